"""The depth that "auto" has found goes into checkpoints, and is found again."""

import contextlib
import io

import pytest

import ds_compress  # noqa: F401  (hooks the engine)
from ds_compress.runtime import stage_profile
from ds_compress.runtime.depth import MEASURED
from ds_compress.transport.probe import LinkMeasurement
from tests.support.pipeline import MICRO_BATCH, batches, build, ds_config
from tests.support.ranks import run_ranks

MICRO_BATCHES = 9
SAVED = MEASURED[-1] + 1
AUTO = {"depth": "auto", "memory_gb": 1}


def run(folder, load, link, latency, micro_batches=MICRO_BATCHES):
    """Losses, and the depth of each batch; of a run that saves, or of one that goes on from there."""
    stage_profile.probe = lambda sender, receiver, first: LinkMeasurement(incoming=1e9, latency=latency)
    counts = {"gradient_accumulation_steps": micro_batches, "train_batch_size": MICRO_BATCH * micro_batches}
    losses, depths = [], []
    with contextlib.redirect_stdout(io.StringIO()):
        engine, data = build(2, ds_config({"link": link}, **counts)), batches()
        if load:
            engine.load_checkpoint(str(folder))
            for _ in range(SAVED * MICRO_BATCHES):
                next(data)
        for step in range(0 if not load else SAVED, 2 * SAVED):
            depths.append((engine.ds_compress.depth.now, engine.ds_compress.stage.ends[0].link.depth))
            losses.append(engine.train_batch(data).item())
            if step + 1 == SAVED and not load:
                engine.save_checkpoint(str(folder))
    return losses, depths


def test_a_resumed_run_goes_on_at_its_depth_until_it_is_measured_anew(tmp_path):
    whole = run_ranks(2, run, tmp_path, False, AUTO, 0.5)
    resumed = run_ranks(2, run, tmp_path, True, AUTO, 0.0)
    for (losses, depths), (again, now) in zip(whole, resumed):
        assert again == losses[SAVED:]
        assert depths[-1] > (1, 1) and now[: MEASURED[-1]] == [depths[SAVED]] * MEASURED[-1]
        assert now[-1] == (1, 1)  # the link has become fast


@pytest.mark.parametrize("link, micro_batches, expected", [
    (AUTO, MICRO_BATCHES + 1, 1),  # more may be under way than were when memory was measured
    ({"depth": 2}, MICRO_BATCHES, 2),  # the block says so
], ids=["other micro-batches", "a fixed depth"])  # fmt: skip
def test_what_does_not_take_the_depth_from_a_checkpoint(link, micro_batches, expected, tmp_path):
    run_ranks(2, run, tmp_path, False, AUTO, 0.5)
    for _, depths in run_ranks(2, run, tmp_path, True, link, 0.5, micro_batches):
        assert depths[0] == (expected, expected)
