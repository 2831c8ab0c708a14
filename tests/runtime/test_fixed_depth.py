"""A configured depth holds while other settings change, and after a checkpoint of before is loaded."""

import contextlib
import io

import pytest
from deepspeed.runtime.pipe.schedule import TrainSchedule

import ds_compress  # noqa: F401  (hooks the engine)
from ds_compress.runtime import stage_profile
from ds_compress.transport.probe import LinkMeasurement
from tests.support.pipeline import MICRO_BATCH, batches, build, ds_config, skip_steps
from tests.support.ranks import run_ranks

DEPTH, MICRO_BATCHES, SHAPE, STEPS = 3, 6, (64, 32), 6
FAR = LinkMeasurement(incoming=1e5, latency=0.01)
LOOSENS = {
    "forward": {"codec": {"name": "quantize", "bits": 1}},
    "backward": {"codec": {"name": "topk", "density": 0.05}, "feedback": "ef"},
    "guard": {"every": 2, "action": "relax", "error": 0.3, "loss": 1e6},
}
AUTO = {"recipe": "auto", "quality": "balanced", "guard": {"every": 0}}


def trained(config, before, folder):
    """Train, then again from step `before`: losses, settings by step, depths, loaded settings."""
    stage_profile.probe = lambda sender, receiver, first: FAR
    engine, ran, runs, back = build(2, config), [], [], []
    schedule = engine.ds_compress.depth.schedule

    def noted(*args):
        ran.append(schedule(*args))
        return ran[-1]

    engine.ds_compress.depth.schedule = noted
    for _ in range(2):
        data = batches(shape=SHAPE)
        skip_steps(engine, data, engine.global_steps)
        losses, settings, depths = [], [], set()
        for step in range(engine.global_steps, STEPS):
            losses.append(engine.train_batch(data).item())
            settings.append(engine.ds_compress.config.codecs(0).settings)
            depths |= _depths(engine, ran)
            if step + 1 == before and not runs:
                engine.save_checkpoint(str(folder), tag="before")
        runs.append((losses, settings, depths))
        engine.load_checkpoint(str(folder), tag="before")
        back.append((engine.ds_compress.config.codecs(0).settings, _depths(engine, [])))
    return runs, back


def _depths(engine, ran):
    """Of the engine, of its links, and of the schedules that trained since."""
    links = {link.depth for end in engine.ds_compress.stage.ends for link in (end.link, end.extra_link)}
    schedules = {getattr(each, "depth", 1) for each in ran if isinstance(each, TrainSchedule)}
    ran.clear()
    return {engine.ds_compress.depth.now} | links | schedules


def config(block, depth):
    size = {"gradient_accumulation_steps": MICRO_BATCHES, "train_batch_size": MICRO_BATCH * MICRO_BATCHES}
    return ds_config({**block, "min_numel": 0, "link": {"depth": depth}}, **size)


@pytest.mark.parametrize("block, before", [(LOOSENS, 1), (AUTO, 2)], ids=["guard", "auto"])
def test_settings_change_and_change_back_and_the_depth_stays(block, before, tmp_path):
    with contextlib.redirect_stdout(io.StringIO()):
        ranks = run_ranks(2, trained, config(block, DEPTH), before, tmp_path)
    for (first, second), back in ranks:
        (losses, settings, depths), (again, _, later) = first, second
        assert settings[before - 1] == settings[0] != settings[-1]
        assert [own for own, _ in back] == [settings[0]] * 2
        assert depths == later == {DEPTH} and all(found == {DEPTH} for _, found in back)
        same = 1 if block is AUTO else STEPS  # it chooses anew, after three more steps
        assert again[:same] == losses[before:][:same]
    assert ranks[0][0][0][1] == ranks[1][0][0][1]


def test_what_the_guard_does_at_a_depth_is_what_it_does_at_1(tmp_path):
    deep, flat = (
        run_ranks(2, trained, config(LOOSENS, depth), 1, tmp_path / str(depth))[0][0] for depth in (DEPTH, 1)
    )
    assert [run[:2] for run in deep] == [run[:2] for run in flat]
