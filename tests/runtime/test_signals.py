"""What policies decide from, all at once: gradient norms, errors of rungs, meters of guard and monitor."""

import math

import pytest
import torch

import ds_compress  # noqa: F401  (hooks the engine)
from ds_compress.config.policies.base import POLICIES, LadderOptions, Policy
from tests.support.pipeline import MICRO_BATCHES, batches, build, ds_config, log_lines
from tests.support.ranks import run_ranks

STEPS, EVERY = 6, 2
BITS = {"bits": [8, 2]}
QUANTIZE = {"codec": {"name": "quantize", "bits": 6, "group_size": 32}}
GUARD = {"every": 1, "error": 0.001, "gradient_error": 1e-5, "loss": 1e6}
"""It looks at every step, and warns of any error."""
HEARD = []
"""What a policy was told, in this process."""


class Listens(Policy):
    """Changes nothing."""

    class Options(LadderOptions):
        every: int = EVERY

    def decide(self, now, state):
        HEARD.append({place: vars(signal).copy() for place, signal in now.signals.items()})
        return dict(now.rungs)


class Norms(Listens):
    norms = True


class Errors(Listens):
    errors = True


class Both(Listens):
    norms = errors = True


def block(policy, **changes):
    both = {"forward": QUANTIZE, "backward": {**QUANTIZE, "feedback": "ef"}}
    return {**both, "min_numel": 0, "guard": {"every": 0}, "policy": policy, **changes}


def train_listening(policy, guard):
    """Losses, what the policy was told, what was warned of, and the norms of gradient messages, on a rank."""
    warned, norms = log_lines(), []
    ladders = {"forward": BITS, "backward": BITS} if policy != "constant" else {}
    engine = build(2, ds_config(block({"name": policy, **ladders}, guard=guard)))
    for end in engine.ds_compress.stage.ends:
        if end.sends and end.channel.direction == "backward":
            end.transmit = _noting(end.transmit, norms)
    data = batches()
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    return {"losses": losses, "heard": HEARD, "warned": warned, "norms": norms}


def _noting(transmit, norms):
    def noted(tensors, message_id):
        norms.append(torch.stack([x.detach().double().norm() for x in tensors]).norm().item())
        transmit(tensors, message_id)

    return noted


@pytest.fixture(scope="module")
def ranks():
    """By policy and whether the guard looks, what both ranks say."""
    classes = dict(POLICIES._classes)
    for cls in (Norms, Errors, Both):
        POLICIES.register(cls.__name__.lower())(cls)
    asked = [("norms", {"every": 0}), ("errors", {"every": 0}), ("both", {"every": 0}), ("both", GUARD)]
    found = {(name, guard["every"]): run_ranks(2, train_listening, name, guard) for name, guard in asked}
    POLICIES._classes = classes
    return found


@pytest.mark.extended
def test_each_signal_is_what_it_is_alone(ranks):
    alone = ranks["norms", 0][0]["heard"], ranks["errors", 0][0]["heard"]
    for every in (0, 1):
        both, other = ranks["both", every]
        assert len(both["heard"]) == STEPS // EVERY and both["heard"] == other["heard"]
        for told_of_norms, told_of_errors, told_of_both in zip(*alone, both["heard"], strict=True):
            assert told_of_both.keys() == {(0, "forward"), (0, "backward")}
            for place, signal in told_of_both.items():
                assert signal["norm"] == told_of_norms[place]["norm"] > 0
                assert signal["errors"] == told_of_errors[place]["errors"]
                assert signal["step_bytes"] == told_of_errors[place]["step_bytes"]
                mild, strong = signal["errors"]
                assert 0 < mild < strong and signal["step_bytes"][0] > signal["step_bytes"][1]
    assert all(math.isnan(signal["norm"]) for own in alone[1] for signal in own.values())
    assert {errors for own in alone[0] for signal in own.values() for errors in signal["errors"]} <= {0.0}


def test_norms_are_those_of_the_messages_that_were_sent(ranks):
    """Neither the rungs that are tried nor the evaluations of the guard add to them."""
    for every in (0, 1):
        first, last = ranks["both", every]
        size = EVERY * MICRO_BATCHES
        assert first["norms"] == [] and len(last["norms"]) == STEPS * MICRO_BATCHES
        for number, heard in enumerate(last["heard"]):
            mean = sum(last["norms"][number * size : (number + 1) * size]) / size
            assert heard[0, "backward"]["norm"] == pytest.approx(mean, rel=1e-5)


def test_the_guard_sees_its_own_and_training_is_as_without_it(ranks):
    plain, guarded = ranks["both", 0], ranks["both", 1]
    assert [rank["losses"] for rank in plain] == [rank["losses"] for rank in guarded]
    assert plain[0]["losses"] == ranks["norms", 0][0]["losses"] == ranks["errors", 0][0]["losses"]
    limits = "ds_compress.guard.error:", "ds_compress.guard.gradient_error:"
    warned = [[line for line in rank["warned"] if limit in line] for rank in guarded for limit in limits]
    assert sum(map(len, warned[:2])) == 2, "one of activations, one of gradients"
    assert all("quantize(bits=8" in line for lines in warned for line in lines)  # the rung in force
    assert not any(limit in line for rank in plain for line in rank["warned"] for limit in limits)
