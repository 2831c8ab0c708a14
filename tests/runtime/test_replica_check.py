"""What both sides hold alike is hashed and compared every so many steps; where it differs both forget."""

import functools
import itertools

import pytest
import torch
from deepspeed.pipe import LayerSpec

from ds_compress.feedback import digest
from ds_compress.feedback.digest import mirror_digest, window_digest
from tests.feedback.test_feedback_pipeline import digests
from tests.support.pipeline import ParallelBlock, alike, batches, build, ds_config, log_lines
from tests.support.ranks import run_ranks

TOPK = {"name": "topk", "density": 0.3}
EVERY, STEPS = 3, 8
EF21 = alike(TOPK, "ef21")
AQSGD = {"codec": TOPK, "feedback": {"name": "aqsgd", "dtype": "fp32"}}
BLOCKS = {
    "ef21": EF21,
    "ef21 per slot": {"forward": {"codec": TOPK, "feedback": {"name": "ef21", "scope": "micro_batch"}}},
    "aqsgd": {**EF21, "forward": AQSGD},
}


def config(name, every=EVERY, replicas=1, **changes):
    block = {**BLOCKS[name], "min_numel": 0, "state_check_every": every, "seed": 7}
    return ds_config(block, replicas=replicas, **changes)


def flip(engine, direction):
    """Change one bit of what this rank mirrors, as failing memory does."""
    for memory in engine.ds_compress.stage.boundaries[0].memory.values():
        for key, value in memory.items():
            if key.startswith(f"{direction}/mirror/"):
                value.flatten().view(torch.int32)[3] ^= 1 << 20
                return


def mirrored(engine):
    """Entries by boundary and direction."""
    found = {}
    for boundary, way in itertools.product(engine.ds_compress.stage.boundaries, ("forward", "backward")):
        keys = itertools.chain(*boundary.memory.values())
        found[boundary.number, way] = sum(key.startswith(f"{way}/mirror/") for key in keys)
    return found


def train(stages, settings, damage=None, **options):
    """`damage`: (rank, step, direction); before that step a bit flips there."""
    lines = log_lines()
    engine = build(stages, settings, **options)
    cycle = list(itertools.islice(batches(engine.grid.get_data_parallel_id()), 2 * engine.micro_batches))
    losses, held = [], []
    for step in range(1, STEPS + 1):
        if damage and (torch.distributed.get_rank(), step) == damage[:2]:
            flip(engine, damage[2])
        half = step % 2 * engine.micro_batches  # AQ-SGD sees every sample again
        data = iter(cycle[half : half + engine.micro_batches])
        losses.append(engine.train_batch(data).item())
        held.append(mirrored(engine))
    warnings = [line for line in lines if "no longer hold the same" in line]
    return {"losses": losses, "held": held, "digests": digests(engine), "warnings": warnings}


def sides(ranks):
    """Both hashes of each boundary and replica."""
    found = {}
    for rank in ranks:
        for place, own in rank["digests"].items():
            found.setdefault(place, set()).add(own)
    return found


def in_step(ranks):
    return all(len(hashes) == 1 for hashes in sides(ranks).values())


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.extended(keep=1)
def test_a_healthy_run_is_left_alone(name):
    ranks = run_ranks(2, lambda: [train(2, config(name, every)) for every in (EVERY, 0)])
    checked, plain = zip(*ranks)
    assert checked == plain and in_step(checked) and not checked[0]["warnings"]


@pytest.mark.parametrize(
    "name, direction, at",
    [
        ("ef21", "forward", 0),
        ("ef21", "backward", 1),
        ("ef21 per slot", "forward", 1),
        ("aqsgd", "forward", 0),
        ("aqsgd", "forward", 1),
    ],
)
@pytest.mark.extended(keep=1)
def test_a_flipped_bit_is_found_and_both_sides_start_anew(name, direction, at):
    """Unnoticed, the two sides never came together again."""
    damage = (at, EVERY + 2, direction)
    unchecked = run_ranks(2, train, 2, config(name, every=0), damage)
    assert not in_step(unchecked)
    ranks = run_ranks(2, train, 2, config(name), damage)
    assert in_step(ranks) and sides(ranks)
    (line,) = (line for rank in ranks for line in rank["warnings"])
    start = f"boundary 0, {direction}: both sides no longer hold the same after step {2 * EVERY}, "
    assert line.startswith(start + "so both start from zero [replica 0]")
    for rank in ranks:
        counts = [held[0, direction] for held in rank["held"]]
        assert counts[2 * EVERY - 1] == 0 and counts[-1] > 0 and counts[2 * EVERY - 2] > 0
        other = "backward" if direction == "forward" else "forward"
        assert rank["held"][2 * EVERY - 1][0, other] == rank["held"][-1][0, other]
        assert torch.tensor(rank["losses"]).isfinite().all()
    assert ranks[1]["losses"][: EVERY + 1] == unchecked[1]["losses"][: EVERY + 1]


def test_replicas_are_compared_on_their_own():
    damage = (3, EVERY + 2, "forward")  # the downstream side of replica 1
    ranks = run_ranks(4, train, 2, config("ef21", replicas=2), damage)
    assert in_step(ranks) and len(sides(ranks)) == 2
    assert [len(rank["warnings"]) for rank in ranks] == [0, 1, 0, 0], "of the upstream side"
    assert "[replica 1]" in ranks[1]["warnings"][0]
    assert [rank["held"][2 * EVERY - 1][0, "forward"] for rank in ranks] == [1, 0, 1, 0]


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.extended
def test_tensor_parallel_ranks_start_anew_together(sliced):
    """They send the same bytes: one of them alone would send what the others do not."""
    pipeline = {"pipe_partitioned": sliced, "grad_partitioned": sliced}
    specs = [LayerSpec(ParallelBlock) for _ in range(4)]
    damage = (3, EVERY + 2, "forward")
    run = functools.partial(train, specs=specs, tensor_parallel=2)
    ranks = run_ranks(4, run, 2, config("ef21", pipeline=pipeline), damage)
    assert in_step(ranks[::2]) and in_step(ranks[1::2])
    assert sorted(len(rank["warnings"]) for rank in ranks) == [0, 0, 0, 1]
    assert [rank["held"][2 * EVERY - 1][0, "forward"] for rank in ranks] == [0] * 4


@pytest.mark.extended
def test_dualpipev():
    """Rank 0 has boundaries 0 and 1 with the same neighbour, one of each phase."""
    dualpipev = pytest.importorskip("deepspeed.runtime.pipe.dualpipev")
    run = functools.partial(train, module_class=dualpipev.DualPipeVModule)
    ranks = run_ranks(2, run, 2, config("ef21"), (1, EVERY + 2, "forward"))
    assert in_step(ranks) and len(sides(ranks)) == 2
    (line,) = (line for rank in ranks for line in rank["warnings"])
    assert line.startswith("boundary 0, forward: ")
    counts = {(0, "forward"): 0, (0, "backward"): 1, (1, "forward"): 1, (1, "backward"): 1}
    assert [rank["held"][2 * EVERY - 1] for rank in ranks] == [counts, counts]


def count_gathers(settings):
    engine = build(2, settings)
    calls = []
    gather = torch.distributed.all_gather
    torch.distributed.all_gather = lambda *args, **options: calls.append(1) or gather(*args, **options)
    data = batches()
    for _ in range(5):
        engine.train_batch(data)
    return len(calls)


def test_only_what_is_mirrored_is_compared():
    forward = {"forward": EF21["forward"]}
    blocks = forward, {**forward, "state_check_every": 0}, {"forward": {"feedback": "ef"}}
    configs = [ds_config({"min_numel": 0, "state_check_every": 2, **block}) for block in blocks]
    assert run_ranks(2, lambda: [count_gathers(each) for each in configs]) == [[2, 0, 0]] * 2


def memories(rows=10, numel=50):
    torch.manual_seed(0)
    keys = [f"forward/mirror/host/aqsgd/{row:016x}" for row in range(rows)]
    keys = ["backward/mirror/ef21", *keys, "forward/sender/ef"]
    return {position: {key: torch.randn(numel) for key in keys} for position in (0, 1)}


def hashes(state, turns=1):
    return [window_digest(state, "forward", turn) for turn in range(turns)]


def test_only_what_is_mirrored_in_the_direction_counts():
    state, before, whole = memories(), hashes(memories()), mirror_digest(memories())
    state[0]["forward/sender/ef"] += 1
    assert hashes(state) == before and mirror_digest(state) == whole
    state[0]["backward/mirror/ef21"] += 1
    assert hashes(state) == before and mirror_digest(state) != whole
    assert window_digest(state, "backward", 0) != window_digest(memories(), "backward", 0)


@pytest.mark.parametrize("window", [1, 7, 200, 333, 3999, 4000, 10**6])
def test_every_bit_is_seen_in_turn(window, monkeypatch):
    monkeypatch.setattr(digest, "WINDOW", window)
    total = 2 * 10 * 50 * 4
    turns = -(-total // window)
    before = hashes(memories(), turns)
    for position, row, byte in [(0, 0, 0), (0, 3, 17), (1, 0, 199), (1, 9, 199)]:
        state = memories()
        state[position][f"forward/mirror/host/aqsgd/{row:016x}"].view(torch.uint8)[byte] ^= 1
        seen = [turn for turn, pair in enumerate(zip(before, hashes(state, turns))) if len(set(pair)) > 1]
        assert len(seen) == 1, "once in so many turns"
        assert window_digest(state, "forward", seen[0] + turns) != before[seen[0]], "and again after them"
        assert seen[0] == (position * 2000 + row * 200 + byte) // window


def test_what_is_missing_is_seen_at_once(monkeypatch):
    monkeypatch.setattr(digest, "WINDOW", 100)
    state = memories()
    del state[1]["forward/mirror/host/aqsgd/0000000000000009"]
    assert all(ours != theirs for ours, theirs in zip(hashes(state, 40), hashes(memories(), 40)))
    renamed = memories()
    renamed[0]["forward/mirror/host/aqsgd/x"] = renamed[0].pop("forward/mirror/host/aqsgd/0000000000000000")
    assert any(ours != theirs for ours, theirs in zip(hashes(renamed, 40), hashes(memories(), 40)))


def test_a_turn_reads_one_window(monkeypatch):
    monkeypatch.setattr(digest, "WINDOW", 1000)
    read = []
    absorb = digest.absorb
    monkeypatch.setattr(digest, "absorb", lambda *args: read.append(args[2].nbytes) or absorb(*args))
    state = memories(rows=2000)
    for turn in range(20):
        read.clear()
        window_digest(state, "forward", turn)
        assert sum(read) == 1000


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5)])
def test_any_shape_dtype_and_layout(dtype, shape):
    value = torch.ones(shape).to(dtype)
    state = {0: {"forward/mirror/x": value}}
    turned = {0: {"forward/mirror/x": value.mT.contiguous().mT if value.dim() > 1 else value}}
    assert hashes(state) == hashes(turned) and mirror_digest(state) == mirror_digest(turned)
    other = {0: {"forward/mirror/x": value.reshape(*shape, 1)}}
    assert mirror_digest(state) != mirror_digest(other)
