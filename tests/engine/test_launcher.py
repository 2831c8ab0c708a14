"""The real deepspeed launcher and an unchanged script: the JSON alone decides."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.bench.net_runs import STAGE_TIMES, stage_times
from launch.ports import reserved_port
from tests.support.interpreters import TRAINING, interpreter
from tests.support.launch_scripts import ROOT
from tests.support.pipeline import MICRO_BATCHES, ds_config

SCRIPT = ROOT / "tests" / "engine" / "training_script.py"


def launch(folder: Path, config, python: str, *more: str) -> str:
    """Run two ranks; return what they print."""
    (folder / "ds_config.json").write_text(json.dumps(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with reserved_port() as port:
        command = [python, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port)]
        command += [*more, str(SCRIPT), "--config", str(folder / "ds_config.json")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def installed():
    from importlib.metadata import entry_points

    names = [point.name for point in entry_points(group="torch.backends")]
    assert "ds_compress" in names, "install the package first: make test does, or pip install -e ."


def test_with_the_block_messages_are_compressed(tmp_path):
    forward = {"codec": {"name": "topk", "density": 0.1}}
    block = {"forward": forward, "backward": {"codec": "bf16"}, "min_numel": 0}
    output = launch(tmp_path, ds_config(block), sys.executable)
    for rank in range(2):
        assert f"rank {rank} engine ds_compress.engine.attach.CompressedPipelineEngine" in output
        assert f"rank {rank} trained" in output
    (line,) = (line for line in output.splitlines() if "ds_compress" in line and "active" in line)
    assert "boundary 0: forward topk(density=0.1) 4,096 -> " in line and "bf16 4,096 -> 2,080" in line


@pytest.mark.parametrize("block", [None, {"forward": {"codec": "bf16"}}], ids=["stock", "compressed"])
@pytest.mark.extended
def test_the_bench_of_links_learns_what_each_stage_takes(block, tmp_path):
    output = launch(tmp_path, ds_config(block), interpreter(TRAINING), STAGE_TIMES)
    found = stage_times(output.splitlines())
    assert [each.pop("stage") for each in found] == [0, 1]
    for each in found:
        assert list(each) == ["forward_ms", "backward_ms", "step_ms"] and min(each.values()) > 0
    assert MICRO_BATCHES > 1 and output.count("trained, loss") == 2
