"""The real deepspeed launcher and an unchanged script: the JSON alone decides; stage-times measures it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.ports import reserved_port
from tests.support.interpreters import TRAINING, interpreter
from tests.support.launch_scripts import ROOT
from tests.support.pipeline import MICRO_BATCHES, ds_config

SCRIPT = ROOT / "tests" / "engine" / "training_script.py"


def launch(folder: Path, *configs, python=None):
    """Run two ranks, one config each or one for both, and return exit code and output."""
    files = []
    for number, config in enumerate(configs):
        files.append(folder / f"ds_config{number}.json")
        files[-1].write_text(json.dumps(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with reserved_port() as port:
        command = [python or interpreter(TRAINING), "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
        command += ["--master_port", str(port), str(SCRIPT), "--configs", *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module", autouse=True)
def installed():
    from importlib.metadata import entry_points

    names = [point.name for point in entry_points(group="torch.backends")]
    assert "ds_compress" in names, "install the package first: make test does, or pip install -e ."


def test_without_the_block_deepspeed_is_as_it_was(tmp_path):
    code, output = launch(tmp_path, ds_config())
    assert code == 0, output
    for rank in range(2):
        assert f"rank {rank} engine deepspeed.runtime.pipe.engine.PipelineEngine" in output
    assert "ds_compress" not in output.replace(str(ROOT), "")  # a clone lies in a folder of that name


def test_with_the_block_messages_are_compressed(tmp_path):
    block = {
        "forward": {"codec": {"name": "topk", "density": 0.1}},
        "backward": {"codec": "bf16"},
        "min_numel": 0,
    }
    code, output = launch(tmp_path, ds_config(block), python=sys.executable)
    assert code == 0, output
    for rank in range(2):
        assert f"rank {rank} engine ds_compress.engine.attach.CompressedPipelineEngine" in output
        assert f"rank {rank} trained" in output
    lines = [line for line in output.splitlines() if "ds_compress" in line and "active" in line]
    assert len(lines) == 1
    assert (
        "boundary 0: forward topk(density=0.1) 4,096 -> " in lines[0]
        and "backward bf16 4,096 -> 2,080" in lines[0]
    )


@pytest.mark.extended
def test_bad_block_stops_before_training(tmp_path):
    code, output = launch(tmp_path, ds_config({"backward": {"codec": "top_k"}}))
    assert code != 0
    assert "ds_compress.backward.codec: 'top_k' is not registered (did you mean 'topk'?)" in output
    assert "trained" not in output


ENDS = f"""
import runpy, sys
assert sys.argv[1].startswith("--local_rank=")
runpy.run_path({str(ROOT / "tests/engine/training_script.py")!r}, run_name="__main__")
sys.exit(0)
"""


def run(*words, python=None):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [python or interpreter(), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("block", [None, {"forward": {"codec": "bf16"}}], ids=["stock", "compressed"])
@pytest.mark.extended(keep=1)
def test_every_stage_says_what_it_takes(block, tmp_path):
    """Also where the script ends with sys.exit, as many do."""
    (tmp_path / "train.py").write_text(ENDS)
    (tmp_path / "ds_config.json").write_text(json.dumps(ds_config(block)))
    with reserved_port() as port:
        start = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port)]
        program = ["--module", "ds_compress", "stage-times", str(tmp_path / "train.py")]
        configs = ["--configs", str(tmp_path / "ds_config.json")]
        done = run(*start, *program, *configs, python=interpreter(TRAINING))
    assert done.returncode == 0, done.stdout + done.stderr
    found = sorted(re.findall(r"stage_times (\{.*?\})", done.stdout))
    assert [json.loads(each)["stage"] for each in found] == [0, 1]
    for each in map(json.loads, found):
        assert list(each) == ["stage", "forward_ms", "backward_ms", "step_ms"]
        assert all(each[name] > 0 for name in ("forward_ms", "backward_ms", "step_ms"))
    assert MICRO_BATCHES > 1 and done.stdout.count("trained, loss") == 2


def script(folder, text):
    (folder / "train.py").write_text(text)
    return run("-m", "ds_compress", "stage-times", str(folder / "train.py"), "--lr", "1", "stage-times")


def test_the_script_sees_its_own_arguments_and_folder(tmp_path):
    (tmp_path / "beside.py").write_text("word = 'found'")
    done = script(tmp_path, "import beside, sys; print(sys.argv[1:], beside.word, __name__); sys.exit(3)")
    assert done.stdout.endswith("['--lr', '1', 'stage-times'] found __main__\n") and done.returncode == 3


def test_a_module_is_run_as_python_does(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import sys; print(sys.argv[1:], __name__); sys.exit(3)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    done = run("-m", "ds_compress", "stage-times", "--module", "mine", "train.json", "--module")
    assert done.stdout.endswith("['train.json', '--module'] __main__\n") and done.returncode == 3


def test_its_errors_are_its_own(tmp_path):
    """OSError and our own errors, which of a command are one line, are told as Python tells them."""
    done = script(tmp_path, "open('no_such_file')")
    assert done.returncode == 1 and 'train.py", line 1' in done.stderr
    assert done.stderr.endswith("FileNotFoundError: [Errno 2] No such file or directory: 'no_such_file'\n")


def test_a_script_that_trains_no_pipeline(tmp_path):
    done = script(tmp_path, "")
    assert done.returncode == 2 and "stage_times {" not in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ds-compress stage-times: ") and "trained no pipeline in this process" in last


def test_a_script_that_is_not_there():
    done = run("-m", "ds_compress", "stage-times", "no_such.py")
    assert done.returncode == 2 and done.stderr == "ds-compress stage-times: no_such.py: no such script\n"
