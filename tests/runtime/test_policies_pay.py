"""Accordion against constant settings in longer runs: bytes and losses (`pytest -s`)."""

import contextlib
import io
import itertools

import pytest
import torch

import ds_compress  # noqa: F401  (hooks the engine)
from tests.support.pipeline import batches, build, ds_config, sent_bytes
from tests.support.ranks import run_ranks

STEPS, DROP = 530, 490  # long enough to converge before the learning rate drops
DISTINCT = 40  # micro-batches
MILD, STRONG = 8, 2
ADAM = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True, "adam_w_mode": False}}


def quantize(bits):
    return {"codec": {"name": "quantize", "bits": bits, "group_size": 32}}


def block(forward, backward, policy="constant"):
    guard = {"guard": {"every": 0}, "monitor": {"every": 0}}
    return {
        "forward": quantize(forward),
        "backward": quantize(backward),
        "min_numel": 0,
        "policy": policy,
        "eval": "uncompressed",
        **guard,
    }


def examples():
    return [(x, torch.sin(x)) for x, _ in itertools.islice(batches(), DISTINCT)]


def trained(block, stages, steps):
    """Return the loss on all data uncompressed, and the bytes sent."""
    with contextlib.redirect_stdout(io.StringIO()):
        engine = build(stages, ds_config(block, optimizer=ADAM))
        data = itertools.cycle(examples())
        for step in range(steps):
            if step == DROP:
                for group in engine.optimizer.param_groups:
                    group["lr"] *= 0.2
            engine.train_batch(data)
        sent = sent_bytes(engine)
        again, passes = iter(examples()), DISTINCT // engine.micro_batches
        plain = sum(engine.eval_batch(again).item() for _ in range(passes)) / passes
    return {"loss": plain, "sent": sent}


@pytest.mark.slow
def test_accordion_halves_the_bytes_at_half_the_gap():
    """Half the gap in loss between mild and strong, at half the bytes of mild or less."""
    ladder = {"bits": [MILD, STRONG]}
    accordion = {"name": "accordion", "every": 25, "threshold": 0.5, "forward": ladder, "backward": ladder}
    blocks = {
        "mild": block(MILD, MILD),
        "strong": block(STRONG, STRONG),
        "accordion": block(MILD, MILD, accordion),
    }
    found = {name: run_ranks(2, trained, each, 2, STEPS) for name, each in blocks.items()}
    loss = {name: ranks[0]["loss"] for name, ranks in found.items()}
    sent = {name: sum(rank["sent"] for rank in ranks) for name, ranks in found.items()}
    print(f"\nloss {loss}\nbytes {sent}, {sent['mild'] / sent['accordion']:.2f} times fewer than mild")
    assert loss["mild"] < loss["strong"]
    assert loss["accordion"] <= (loss["mild"] + loss["strong"]) / 2
    assert 2 * sent["accordion"] <= sent["mild"]
