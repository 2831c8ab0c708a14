"""Accordion and budget against constant settings in longer runs: bytes, losses, errors (`pytest -s`)."""

import contextlib
import io
import itertools

import pytest
import torch

import ds_compress  # noqa: F401  (hooks the engine)
from ds_compress.message.meters import error_and_cosine, largest, norms
from tests.support.pipeline import batches, build, ds_config
from tests.support.ranks import run_ranks

STEPS, DROP = 530, 490  # long enough to converge before the learning rate drops
DISTINCT = 40  # micro-batches
MILD, STRONG = 8, 2
LIMIT, EVERY = 0.1, 20
BITS = [8, 7, 6, 5, 4, 3, 2]
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
    """Return the loss on all data uncompressed, the bytes sent, and each channel's error by step."""
    with contextlib.redirect_stdout(io.StringIO()):
        engine = build(stages, ds_config(block, optimizer=ADAM))
        data = itertools.cycle(examples())
        errors, ends = {}, [end for end in engine.ds_compress.stage.ends if end.sends]
        for step in range(steps):
            if step == DROP:
                for group in engine.optimizer.param_groups:
                    group["lr"] *= 0.2
            for end in ends if stages > 2 else ():
                compare(end, errors.setdefault(end.channel.place, []))
            engine.train_batch(data)
        sent = sum(end.channel.sent.wire_bytes for end in ends)
        again, passes = iter(examples()), DISTINCT // engine.micro_batches
        plain = sum(engine.eval_batch(again).item() for _ in range(passes)) / passes
    return {"loss": plain, "sent": sent, "errors": errors}


def compare(end, errors):
    """Note the relative error of the first message of the next step."""
    channel = end.channel
    encode = type(channel).encode

    def encoded(tensors, message_id, memory=None):
        del channel.encode
        found = encode(channel, tensors, message_id, memory)
        listener = channel.as_receiver()
        decoded = listener.decode(found.packet, found.layout, message_id)
        errors.append(error_and_cosine(*norms(tensors, decoded, largest(tensors)).tolist())[0])
        return found

    channel.encode = encoded


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


@pytest.mark.slow
def test_budget_keeps_its_limit_with_fewer_bytes_than_a_constant_setting():
    """On 2 boundaries, in both directions, in every step after the first interval."""
    ladder = {"bits": BITS}
    budget = {"name": "budget", "every": EVERY, "error": LIMIT, "forward": ladder, "backward": ladder}
    steps = 300

    def run(each):
        ranks = run_ranks(3, trained, each, 3, steps)
        errors = {place: found for rank in ranks for place, found in rank["errors"].items()}
        worst = {place: max(found[EVERY:]) for place, found in errors.items()}
        return worst, sum(rank["sent"] for rank in ranks)

    worst, sent = run(block(BITS[0], BITS[0], budget))
    constants = {bits: run(block(bits, bits)) for bits in (6, 5, 4, 3)}
    keeping = [bits for bits, (errors, _) in constants.items() if max(errors.values()) <= LIMIT]
    print(f"\nbudget: {worst}, {sent} bytes")
    for bits, (errors, nbytes) in constants.items():
        print(f"{bits} bits: {errors}, {nbytes} bytes")
    assert len(worst) == 4 and max(worst.values()) <= LIMIT
    assert sent < constants[min(keeping)][1]
