"""Which way a model is evaluated where nobody says so, and both ways where that is asked for."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from ds_compress.config import Config
from tests.support.pipeline import batches, build, ds_config, printed_lines, weights
from tests.support.ranks import run_ranks

TOPK = {"name": "topk", "density": 0.1}
BLOCK = {"forward": {"codec": TOPK}, "backward": {"codec": "bf16"}, "min_numel": 0}


@pytest.mark.parametrize(
    "feedback, expected",
    [("none", "compressed"), ("ef", "compressed"), ("ef21", "uncompressed"), ("aqsgd", "uncompressed")],
)
def test_changes_are_not_evaluated_as_if_they_were_messages(feedback, expected):
    """A model trained on changes was evaluated with TopK of whole messages, which it had never seen."""
    forward = {"codec": TOPK, "feedback": feedback}
    for way in (None, "both"):
        assert Config({"forward": forward, "eval": way}).eval == expected
    for way in ("compressed", "uncompressed"):
        assert Config({"forward": forward, "eval": way}).eval == way
    assert Config({"backward": {"codec": TOPK, "feedback": "ef21"}}).eval == "compressed"
    assert Config({"boundaries": {"1": {"forward": forward}}}).eval == expected


def evaluated(block, **options):
    """Losses of three steps and of two evaluations after each, and what was written and printed."""
    engine, events = build(2, ds_config(block)), []
    engine.monitor = SimpleNamespace(enabled=True, write_events=events.extend, tb_monitor=None)
    data, held_out = batches(), batches(replica=7)
    found = []
    with printed_lines("evaluation after step") as lines:
        for _ in range(3):
            found.append(engine.train_batch(data).item())
            found += [engine.eval_batch(held_out, **options).item() for _ in range(2)]
    values = {}
    for name, value, _ in events:
        values.setdefault(name.removeprefix("Train/"), []).append(value)
    return {
        "losses": found,
        "weights": [value for value in weights(engine).values() if torch.is_tensor(value)],
        "values": values,
        "lines": lines,
        "mode": engine.module.training,
        "next": next(held_out)[0].sum().item(),
    }


@pytest.mark.parametrize("feedback", ["none", "ef21"])
def test_both_losses_of_one_model(feedback):
    """Each is what the setting of its name gives; training, and the data, go on as with either of them."""
    block = {**BLOCK, "forward": {"codec": TOPK, "feedback": feedback}}
    ways = ("compressed", "uncompressed")
    alone = {way: run_ranks(2, evaluated, {**block, "eval": way}) for way in ways}
    both = run_ranks(2, evaluated, {**block, "eval": "both"})
    default = Config(block).eval
    for ours, theirs in zip(both, alone[default]):
        assert ours["losses"] == theirs["losses"] and ours["next"] == theirs["next"]
        assert not ours["mode"] and not theirs["mode"]
        assert all(map(torch.equal, ours["weights"], theirs["weights"]))
    values = both[0]["values"]
    for way in ways:
        losses = alone[way][0]["losses"]
        expected = [loss for place, loss in enumerate(losses) if place % 3]
        assert values[f"Compression/eval_loss_{way}"] == pytest.approx(expected, rel=1e-6)
    assert values["Samples/eval_loss"] == values[f"Compression/eval_loss_{default}"]
    compressed, plain = (values[f"Compression/eval_loss_{way}"][0] for way in ways)
    assert both[0]["lines"][0] == (
        f"ds_compress: evaluation after step 1: loss {compressed:.4f} compressed, {plain:.4f} uncompressed"
    )
    assert compressed != plain and len(both[0]["lines"]) == 6 and not both[1]["lines"]


def asked_otherwise(block, options):
    engine = build(2, ds_config(block))
    batch = itertools.repeat(next(batches()))
    with printed_lines("evaluation after step") as lines:
        engine.eval_batch(batch, **options)
        engine.ds_compress.gives_losses = False
        engine.eval_batch(batch)
    return len(lines)


@pytest.mark.parametrize(
    "options, lines",
    [({"num_micro_batches": 2, "bcast_loss": False}, 1), ({"reduce_output": None, "bcast_loss": False}, 0)],
)
def test_what_is_no_mean_loss_is_given_once(options, lines):
    assert run_ranks(2, asked_otherwise, {**BLOCK, "eval": "both"}, options) == [lines, 0]
