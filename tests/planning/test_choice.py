"""The choice over a grid of profiles: within its limits, not slower than DeepSpeed, nearly the best."""

import itertools
import json
import math

import pytest
import torch

from ds_compress.cli.bench import benchmark_tensor, size_and_error
from ds_compress.config import DIRECTIONS, Config
from ds_compress.config.recipes import LIMITS, ErrorLimits
from ds_compress.message.gradient_error import estimate_gradient_error
from ds_compress.planning.choice import (
    Candidate,
    EvaluatedMessage,
    Evaluation,
    all_candidates,
    combine,
    is_within,
    pick_best,
    rank,
    uncompressed_recipe,
    write_block,
)
from ds_compress.planning.depth import MemoryBudget
from ds_compress.planning.step_time import LinkSpeed, MessageCost, Workload

SHAPE = (512, 256)
SCALE = 64  # messages are so many times as large as the tensor that their errors are measured on
RAW = 4 * SCALE * math.prod(SHAPE)
STAGES, MICRO_BATCHES = 3, 4
LINKS = [1e7, 1e8, 1e9, 1e10, 1e11]  # bits per second
COMPUTE = [0.002, 0.05, 1.0]  # seconds of a forward pass
MESSAGES = ["gaussian", "heavy-tailed"]
LATENCIES = [0.0, 0.04]
SITUATIONS = list(itertools.product(LINKS, COMPUTE, MESSAGES, LATENCIES))
CODEC = 2e9  # bytes of input per second


def message(kind):
    if kind == "gaussian":
        return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    return benchmark_tensor(SHAPE, torch.float32, torch.device("cpu")) ** 3


@pytest.fixture(scope="module")
def evaluations():
    """Settings with sizes and errors of real codecs, by kind of message."""
    found = {}
    for kind in MESSAGES:
        x, before = message(kind), message(kind).roll(1, dims=-1)
        found[kind] = []
        for candidate in all_candidates():
            config, made = Config(candidate.block), []
            for direction in DIRECTIONS:
                codec = getattr(config.codecs(None), direction)
                bits, error = size_and_error(codec, x, before)
                seconds = 0.0 if codec.name == "none" else RAW / CODEC
                gradient_error = estimate_gradient_error(error, codec.unbiased)
                cost = MessageCost(int(bits * RAW / 32), seconds, seconds)
                made.append(EvaluatedMessage(cost, error, gradient_error))
            found[kind].append(Evaluation(candidate, *made))
    return found


def ranked(settings, limits, networks, forward, **link):
    raw = (RAW,) * (STAGES - 1)
    workload = Workload((forward,) * STAGES, (2 * forward,) * STAGES, MICRO_BATCHES)
    options = {"eager": True, "depth": "auto", "budgets": (MemoryBudget(RAW),) * STAGES} | link
    found = combine(settings, networks, limits, **options)
    return rank(
        workload, networks, [uncompressed_recipe(raw, raw), *(own for own in found if own.is_within(limits))]
    )


@pytest.mark.parametrize("quality", LIMITS)
@pytest.mark.extended(keep=1)
def test_no_pick_is_above_its_limits_or_slower_than_deepspeed(evaluations, quality):
    limits, picked, speedups = LIMITS[quality], set(), []
    for bits, forward, kind, latency in SITUATIONS:
        networks = (LinkSpeed(bits / 8, latency),) * (STAGES - 1)
        rows = ranked([evaluations[kind]] * (STAGES - 1), limits, networks, forward)
        chosen = pick_best(rows, limits)
        fixed = min(row["step_s"] for row in rows if is_within(row, limits))
        if chosen is None:  # DeepSpeed itself
            assert rows[0]["step_s"] <= 1.06 * fixed
            continue
        assert limits.allow(chosen["error_forward"], chosen["gradient_error"])
        assert chosen["step_s"] <= 1.02 * rows[0]["step_s"]
        assert chosen["step_s"] <= 1.05 * fixed
        Config(chosen["block"])
        picked.add(chosen["recipe"])
        speedups.append(chosen["speedup"])
    assert {"none"} < picked and max(speedups) > (10 if limits.forward else 1.5)


def test_nothing_pays_on_a_link_without_cost(evaluations):
    for kind in MESSAGES:
        free = (LinkSpeed(),) * (STAGES - 1)
        rows = ranked([evaluations[kind]] * (STAGES - 1), LIMITS["aggressive"], free, 0.05)
        assert pick_best(rows, LIMITS["aggressive"]) is None
        assert rows[1]["error_forward"] == 0, "a codec was predicted to make a free link faster"


def test_each_boundary_gets_what_its_link_needs(evaluations):
    """The first link is slow, the other one free: only messages of the first are worth a codec."""
    networks = (LinkSpeed(1e6), LinkSpeed(1e13))
    limits = LIMITS["aggressive"]
    rows = ranked([evaluations["gaussian"]] * 2, limits, networks, 0.05)
    chosen = pick_best(rows, limits)
    first, second = (Config(chosen["block"]).codecs(number).settings for number in (0, 1))
    assert "none" in {second[direction]["name"] for direction in DIRECTIONS}
    assert all(first[direction]["name"] != "none" for direction in DIRECTIONS)


def test_each_boundary_has_errors_of_its_own(evaluations):
    """What is mild at boundary 0 loses heavy tails at boundary 1: only what is allowed at both is used."""
    networks = (LinkSpeed(1e6),) * 2
    for limits in LIMITS.values():
        rows = ranked([evaluations["gaussian"], evaluations["heavy-tailed"]], limits, networks, 0.01)
        chosen = pick_best(rows, limits)
        assert is_within(chosen, limits)
        sizes = [row["step_s"] for row in rows if is_within(row, limits) and ":" not in row["recipe"]]
        assert chosen["step_s"] <= 1.02 * min(sizes)


def test_an_unknown_error_is_above_every_limit():
    candidate = Candidate("odd", {direction: {"codec": "bf16"} for direction in DIRECTIONS}, True)
    odd = Evaluation(
        candidate,
        EvaluatedMessage(MessageCost(1), 0.0, 0.0),
        EvaluatedMessage(MessageCost(1), math.inf, math.inf),
    )
    none = Candidate("none", {direction: {"codec": "none"} for direction in DIRECTIONS}, True)
    known = Evaluation(none, *(EvaluatedMessage(MessageCost(RAW), 0.0, 0.0),) * 2)
    networks = (LinkSpeed(1e6),) * (STAGES - 1)
    rows = ranked([[known, odd]] * (STAGES - 1), ErrorLimits(1e9, 1e9), networks, 0.01)
    assert pick_best(rows, ErrorLimits(1e9, 1e9))["recipe"] == "odd / none"


def setting(name, feedback=None):
    directions = {d: {"codec": name} | ({"feedback": feedback} if feedback else {}) for d in DIRECTIONS}
    return Evaluation(Candidate(name, directions, True), *(EvaluatedMessage(MessageCost(1), 0.0, 0.0),) * 2)


def test_a_block_says_most_once():
    found = write_block([setting("bf16"), setting("fp16", "ef"), setting("fp16", "ef"), setting("none")])
    assert found["forward"] == {"codec": "fp16", "feedback": "ef"}
    config = Config(found)
    names = [config.codecs(number).forward.name for number in range(4)]
    feedbacks = [config.codecs(number).feedbacks["backward"].name for number in range(4)]
    assert names == ["bf16", "fp16", "fp16", "none"] and feedbacks == ["none", "ef", "ef", "none"]


def test_separable_candidates_go_with_any_other_direction():
    """Each direction of what may be mixed goes with any other one."""
    every = all_candidates()
    assert len({json.dumps(candidate.block, sort_keys=True) for candidate in every}) == len(every)
    split = [candidate for candidate in every if candidate.is_separable]
    assert len(split) == len(every) - len(LIMITS) + 1, "all but three recipes"
    for candidate in split:
        for direction in DIRECTIONS:
            Config({direction: candidate.block[direction]})
