"""The guard that acts: milder settings step by step, on all ranks, in checkpoints; and what is milder."""

import pytest
from torch import nn

from ds_compress.config import Config
from ds_compress.config.recipes import with_changes
from ds_compress.runtime.guard import relax
from tests.support.pipeline import Block, batches, build, ds_config, log_lines, skip_steps
from tests.support.ranks import run_ranks

STEPS = 6
PLACES = [(0, "forward"), (0, "backward")]
QUANTIZE = {"codec": {"name": "quantize", "bits": 1}}
LEARNED = {"codec": {"name": "entropy", "bits": 2, "rotate": "learned", "refresh_steps": 8}}


def course(block):
    """What the codecs of boundary 0 become, until nothing changes."""
    config, found = Config({"min_numel": 0, **block}), []
    for _ in range(12):
        changes = relax(config, PLACES)
        if not changes:
            return found
        config.adopted = with_changes(config.adopted, changes)
        config.adopt(config.changed({"boundaries": config.adopted}))
        found.append(tuple(str(getattr(config.codecs(0), direction)) for _, direction in PLACES))
    raise AssertionError(found)


def test_what_is_milder():
    bits = [f"quantize(bits={n})" for n in (2, 4, 8)]
    densities = [f"topk(density={d})" for d in (0.4, 0.5)]
    found = course({"forward": QUANTIZE, "backward": {"codec": {"name": "topk", "density": 0.2}}})
    assert [forward for forward, _ in found] == [*bits, "none"]
    assert [backward for _, backward in found] == [*densities, "none", "none"]
    assert course({"forward": {"codec": {"name": "quantize", "bits": 6}}})[0][0] == "quantize(bits=8)"
    assert [f for f, _ in course({"forward": {"codec": {"name": "entropy", "bits": 2.5}}})] == [
        "entropy(bits=5.0)",
        "none",
    ]
    assert course({"forward": {"codec": "fp8"}, "backward": {"codec": "lossless"}}) == [("none", "lossless")]
    assert course({}) == []


def test_what_goes_together_stays_together():
    reuse = {"codec": {"name": "topk", "indices": "reuse"}}
    found = course({"forward": {"codec": {"name": "topk", "density": 0.3}}, "backward": reuse})
    assert found[-1] == ("none", "none") and "0.5" in found[0][0]
    both = course({"forward": LEARNED, "backward": LEARNED})
    assert both == [("none", "none")]
    ef = course({"forward": {"codec": {"name": "quantize", "bits": 2}, "feedback": "ef"}})
    assert ef[0][0].startswith("quantize(bits=4) + ef") and ef[-1][0] == "none"


def trained(config, stages=2, folder=None, saved=0, specs=None):
    logged = log_lines()
    engine = build(stages, config, specs)
    data = batches(engine.grid.get_data_parallel_id())
    if saved:
        engine.load_checkpoint(str(folder), tag=f"step{saved}")
        skip_steps(engine, data, saved)
    losses, codecs, judged = [], [], []
    for step in range(saved, STEPS):
        losses.append(engine.train_batch(data).item())
        judged.append(engine.ds_compress.monitor.message_quality())
        codecs.append([str(getattr(engine.ds_compress.config.codecs(0), d)) for _, d in PLACES])
        if folder and not saved:
            engine.save_checkpoint(str(folder), tag=f"step{step + 1}")
    return {
        "losses": losses,
        "codecs": codecs,
        "judged": judged,
        "logged": [line for line in logged if "milder" in line],
    }


def block(**guard):
    backward = {"codec": {"name": "topk", "density": 0.05}, "feedback": "ef"}
    guard = {"every": 1, "action": "relax", **guard}
    return {"forward": QUANTIZE, "backward": backward, "min_numel": 0, "guard": guard}


@pytest.mark.parametrize("link", [{}, {"mode": "blocking"}], ids=["eager", "blocking"])
def test_over_its_limit_the_next_milder_setting_follows_and_resumes(link, tmp_path):
    """Forward by its loss until that is small enough, backward by its errors."""
    config = ds_config({**block(loss=0.01, error=0.9, gradient_error=0.01), "link": link})
    whole = run_ranks(2, trained, config, 2, tmp_path)
    resumed = run_ranks(2, trained, config, 2, tmp_path, 2)
    for ours, theirs in zip(resumed, whole):
        assert ours["losses"] == theirs["losses"][2:]
        assert ours["codecs"] == theirs["codecs"][2:] == whole[0]["codecs"][2:]
    assert whole[0]["codecs"][0] == ["quantize(bits=4)", "topk(density=0.1) + ef"]  # 2 bits, then 4 by loss
    assert whole[0]["codecs"][1] == ["quantize(bits=4)", "topk(density=0.2) + ef"]
    assert whole[0]["codecs"][2] == ["quantize(bits=4)", "topk(density=0.4) + ef"]
    logged = whole[0]["logged"]
    assert "with compression" in logged[0] or "with compression" in logged[1]
    assert any("milder from the next step on: boundary 0 forward quantize(bits=2)" in line for line in logged)
    assert not whole[1]["logged"]


@pytest.mark.parametrize("saved", [1, 3])
def test_a_resumed_run_is_judged_by_the_same_measurements(saved, tmp_path):
    """It was judged by another micro-batch, and forgot which residual had lasted: settings differed."""
    config = ds_config(block(residual=0.5, error=9.0, gradient_error=1e6, loss=1e6))
    whole = run_ranks(2, trained, config, 2, tmp_path)
    resumed = run_ranks(2, trained, config, 2, tmp_path, saved)
    for ours, theirs in zip(resumed, whole):
        assert ours["judged"] == theirs["judged"][saved:]
        assert ours["codecs"] == theirs["codecs"][saved:]
    errors = {quality[0, "forward"].error for quality in whole[0]["judged"]}
    assert len(errors) == STEPS
    assert whole[0]["codecs"][1][1] == "topk(density=0.1) + ef", "the residual lasted two steps"


class Brittle(nn.Module):
    """Evaluates to nan what has few different values, as messages of few bits have."""

    def forward(self, x):
        return x if self.training or x.unique().numel() > x.numel() / 2 else x * float("nan")


def brittle():
    return trained(
        ds_config({"forward": {"codec": {"name": "quantize", "bits": 4}}, "min_numel": 0,
                   "guard": {"every": 1, "action": "relax"}}),
        specs=[Block(), Block(), Brittle(), Block()],
    )  # fmt: skip


def test_a_loss_that_is_no_number_with_compression_relaxes():
    """No comparison with nan is true, so nothing followed but a warning."""
    first = run_ranks(2, brittle)[0]
    assert "is nan with compression" in first["logged"][0] and "it hurts" in first["logged"][0]
    assert [forward for forward, _ in first["codecs"]] == ["quantize(bits=8)"] * STEPS


def test_replicas_act_alike_and_one_is_enough():
    config = ds_config(block(error=0.3, gradient_error=0.01, loss=1e6), replicas=2)
    ranks = run_ranks(6, trained, config, 3)
    assert all(rank["codecs"] == ranks[0]["codecs"] for rank in ranks)
    assert ranks[0]["codecs"][-1][1] == "none"
    assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks)
    assert "boundary 1, backward: an error of accumulated gradients of " in ranks[0]["logged"][0]
