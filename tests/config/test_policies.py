"""Policies decide what a hand computes, from numbers alone; ladders that cannot be are refused."""

import json
import math

import pytest

from ds_compress.config import Config
from ds_compress.config.policies import POLICIES, DecisionInput, Signal, ladders
from tests.support.refusals import refusal

FORWARD, BACKWARD = (0, "forward"), (0, "backward")
LADDER = {"bits": [8, 4]}


def policy(name, **options):
    return POLICIES.build({"name": name, "forward": LADDER, **options}, "policy")


def test_the_policy_of_the_page(pytestconfig, monkeypatch):
    """The one that readers paste returned Ellipsis instead of a rung."""
    monkeypatch.setattr(POLICIES, "_classes", dict(POLICIES._classes))
    page = (pytestconfig.rootpath / "docs" / "policies.md").read_text()
    text = page.partition("## Write your own policy")[2]
    exec(compile(text.split("```python\n")[1].split("```")[0], "policies.md", "exec"), {"__name__": "pasted"})
    block = json.loads("{" + text.split("```json\n")[1].split("```")[0] + "}")
    config = Config({"forward": {"codec": {"name": "quantize", "bits": 8}}, **block})
    signals = {FORWARD: Signal(0.05), (1, "forward"): Signal(0.3), (2, "forward"): Signal(math.nan)}
    now = DecisionInput(100, dict.fromkeys(signals, 0), dict.fromkeys(signals, 3), 0.1, signals)
    assert list(config.policy.decide(now, {}).values()) == [2, 0, 0]


def trace(made, places, intervals, state=None):
    """The rungs after each interval of (norm by boundary, learning rate)."""
    state = {} if state is None else state
    rungs, found = dict.fromkeys(places, 0), []
    for norms, lr in intervals:
        signals = {place: Signal(norms[place[0]]) for place in places}
        rungs = made.decide(DecisionInput(0, rungs, dict.fromkeys(places, 2), lr, signals), state)
        found.append([rungs[place] for place in places])
        state = json.loads(json.dumps(state))  # as a checkpoint has it
    return found


def test_accordion_reproduces_a_trace_computed_by_hand():
    """Both directions of a boundary go by its gradients; 1 is strong.

    interval      1     2     3     4     5     6     7     8     9
    boundary 0   8.0   5.0   2.5   2.0   2.0   3.0   3.0   inf   1.4
    change        -   .375   .50   .20   0     .50   0      -    .53   of 3.0, the last that was finite
    boundary 1   1.0   1.0   1.0   0.6   0.6   0.6   0.6   0.6   0.2
    change        -    0     0     .40   0     0     0     0     .67
    lr           .1    .1    .1    .1    .05   .05   .04   .04   .04   halved before the fifth
    """
    first = [8.0, 5.0, 2.5, 2.0, 2.0, 3.0, 3.0, math.nan, 1.4]
    second = [1.0, 1.0, 1.0, 0.6, 0.6, 0.6, 0.6, 0.6, 0.2]
    lr = [0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.04, 0.04, 0.04]
    intervals = [({0: a, 1: b}, each) for a, b, each in zip(first, second, lr)]
    places = [FORWARD, BACKWARD, (1, "forward")]
    expected = zip([0, 1, 0, 1, 0, 0, 1, 0, 0], [0, 1, 1, 1, 0, 1, 1, 1, 0])
    assert trace(policy("accordion"), places, intervals) == [[a, a, b] for a, b in expected]


def test_accordion_with_learning_rates_that_fall_all_the_time():
    cosine = [0.5 * (1 + math.cos(math.pi * step / 10)) for step in range(10)]
    found = trace(policy("accordion"), [FORWARD], [({0: 1.0}, lr) for lr in cosine])
    assert [rungs[0] for rungs in found] == [0, 1, 1, 1, 1, 1, 1, 1, 0, 0]  # .206 -> .095 -> .024
    zero = trace(policy("accordion"), [FORWARD], [({0: norm}, 1.0) for norm in (0.0, 0.0, 1.0, 1.0)])
    assert zero == [[0], [1], [0], [1]]


QUANTIZE = {"codec": {"name": "quantize", "bits": 6}, "feedback": "ef"}
TOPK = {"codec": {"name": "topk", "density": 0.1}}
BLOCK = {"forward": QUANTIZE, "backward": TOPK}
END = {"name": "accordion"}
WRONG = "ds_compress.policy.forward.bit: codec 'quantize' of ds_compress.forward"
AT_1 = "ds_compress.policy: at forward bits 1"
BAD = [
    ("acordion", "ds_compress.policy: 'acordion' is not registered (did you mean 'accordion'?)"),
    ({**END, "name": "acordion"}, "ds_compress.policy.name: 'acordion' is not registered (did you mean"),
    (5, "ds_compress.policy: 5 is neither a name nor an object"),
    (END, "ds_compress.policy.forward: missing, and so is backward"),
    ({**END, "forward": {"density": [1, 2]}}, "ds_compress.policy.forward.density: codec 'quantize' of"),
    ({**END, "forward": {"bit": [8, 4]}}, f"{WRONG} has no such option (did you mean 'bits'?)"),
    ({**END, "forward": {"bits": [9, 4]}}, "ds_compress.policy.forward.bits: 9 is not allowed"),
    ({**END, "forward": {"bits": ["8", 4]}}, "ds_compress.policy.forward.bits: '8' is not allowed"),
    ({**END, "forward": {"bits": 4}}, "ds_compress.policy.forward.bits: 4 is not allowed: should be a"),
    ({**END, "forward": {"bits": [4]}}, "ds_compress.policy.forward: {'bits': [4]} is not allowed"),
    ({**END, "forward": {"bits": [4, 2], "group_size": [8]}}, "ds_compress.policy.forward: {"),
    ({"name": "accordion", "forward": {"bits": [8, 4, 2]}}, "ds_compress.policy.forward: {'bits': [8, 4"),
    ({**END, "forward": {"bits": [8, 1]}}, f"{AT_1}: ds_compress.forward.feedback: ef cannot follow"),
    ({"name": "constant", "every": 3}, "ds_compress.policy.every: unknown key"),
]  # fmt: skip


@pytest.mark.parametrize("policy, line", BAD, ids=[line for _, line in BAD])
def test_what_cannot_be_is_refused(policy, line):
    assert refusal(Config, {**BLOCK, "policy": policy}).startswith(line)


def test_ladders_are_of_the_codec_that_a_boundary_has():
    quantize = {"name": "quantize", "bits": 5, "group_size": 64}
    own = {"1": {"forward": {"codec": quantize}}, "2": {"forward": TOPK}}
    reuse = {"codec": {"name": "topk", "indices": "reuse"}}
    config = Config({**BLOCK, "boundaries": own, "policy": {**END, "forward": LADDER}, "backward": reuse})
    found = [ladders(config.in_force, config.policy, number) for number in range(3)]
    assert [codec["bits"] for codec in found[0]["forward"]] == [8, 4]
    assert [codec.get("group_size") for codec in found[1]["forward"]] == [64, 64]
    assert found[2] == {}
    # which only a boundary of its own settings has
    config = Config({"boundaries": {"1": {"forward": QUANTIZE}}, "policy": {**END, "forward": LADDER}})
    found = [ladders(config.in_force, config.policy, number) for number in range(2)]
    assert found[0] == {} and len(found[1]["forward"]) == 2


@pytest.mark.parametrize("bits", [[4, 8], [2, 4]])
def test_a_ladder_in_the_wrong_order_is_refused(bits):
    """A ladder of 4, then 8 bits trained with fewer bits first and nobody was told."""
    line = refusal(Config, {**BLOCK, "policy": {**END, "forward": {"bits": bits}}})
    assert f"policy.forward: bits {bits[1]} came after bits {bits[0]} and sends more" in line
