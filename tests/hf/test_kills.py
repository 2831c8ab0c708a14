"""A run that is killed twice and started again, through each launcher, is as if nothing had been."""

import json
import re
import time
from pathlib import Path

import psutil
import pytest

from launch.ports import reserved_port
from tests.support.finetuning import command, copy_of, environment, finetune, losses, perplexities, prepare

pytestmark = pytest.mark.slow

STEPS = 36


def whole_run(folder: Path, **changes: str) -> tuple[Path, float]:
    """train.json of an uninterrupted run, and its last perplexity."""
    path = prepare(folder, steps=STEPS, save_every=5, **changes)
    return path, perplexities(finetune("torchrun", path).stderr)[1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return whole_run(tmp_path_factory.mktemp("whole"))


def killed(launcher: str, path: Path, after: int, victim: int | None) -> list[int]:
    """Kill all processes, or rank `victim`, after `after` steps; return the steps logged by then."""
    out = path.parent / "out"
    with reserved_port() as port, (path.parent / "log").open("w") as log:
        process = psutil.Popen(
            command(launcher, port, [str(path)]), stdout=log, stderr=log, env=environment()
        )
        while not (out / "losses.jsonl").exists() or max(losses(out), default=0) < after:
            assert process.poll() is None, Path(log.name).read_text()[-3000:]
            time.sleep(0.01)
        started = [*process.children(recursive=True), process]
        for each in started:
            if victim is None or _rank(each) == victim:
                each.kill()
        assert process.wait(timeout=900) != 0
        _, left = psutil.wait_procs(started, timeout=900)
        assert not left
    return sorted(losses(out))


def _rank(process: psutil.Process) -> int | None:
    """Of a training process; None of a launcher."""
    rank = process.environ().get("RANK")
    return None if rank is None else int(rank)


@pytest.mark.parametrize(("launcher", "victim"), [("deepspeed", 0), ("torchrun", 1), ("accelerate", 0)])
def test_killed_and_started_again_it_is_as_if_nothing_had_been(uninterrupted, tmp_path, launcher, victim):
    kill_twice(*uninterrupted, tmp_path, launcher, victim)


def test_killed_over_4_bits_it_is_as_if_nothing_had_been(tmp_path):
    """The base is quantized again at each start."""
    (tmp_path / "whole").mkdir()
    kill_twice(*whole_run(tmp_path / "whole", quantize="nf4"), tmp_path, "torchrun", 1)


def kill_twice(whole: Path, perplexity: float, folder: Path, launcher: str, victim: int) -> None:
    """Kill one rank, then all; the run has the losses, bit by bit, of `whole`, also of repeated steps."""
    path = copy_of(whole, folder / "killed")
    expected = losses(whole.parent / "out")
    done = killed(launcher, path, STEPS // 3, victim)
    assert done[-1] < STEPS
    done = killed(launcher, path, max(2 * STEPS // 3, done[-1] + 1), None)
    assert done[-1] < STEPS
    output = finetune(launcher, path).stderr
    (step,) = re.findall(r"goes on from step (\d+)", output)
    assert f"perplexity of step {step}: " in output
    rows = [json.loads(line) for line in (path.parent / "out" / "losses.jsonl").read_text().splitlines()]
    assert all(row["loss"] == expected[row["step"]] for row in rows)
    assert losses(path.parent / "out") == expected and perplexities(output)[1] == perplexity
