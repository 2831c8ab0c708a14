"""`"depth": "auto"`: chosen from what the first steps measure, alike on all ranks; a fixed one stays."""

import math

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.schedule import BackwardPass
from torch import nn

from ds_compress.runtime import stage_profile
from ds_compress.runtime.depth import MEASURED, decide
from ds_compress.runtime.memory_use import in_use
from ds_compress.runtime.stage_profile import COLUMNS, describe_links
from ds_compress.transport.probe import LinkMeasurement
from tests.runtime.test_depth import MICRO_BATCHES, at_depths, check
from tests.support.pipeline import MICRO_BATCH, batches, build, ds_config, printed_lines
from tests.support.pipeline_kinds import BLOCKS
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
FAR = LinkMeasurement(incoming=1e7, latency=0.5)  # far from every processor, however busy
AUTO = {"depth": "auto", "memory_gb": 1}


@pytest.fixture
def far(monkeypatch):
    """What ranks forked from now on find when they try their links."""
    monkeypatch.setattr(stage_profile, "probe", lambda sender, receiver, first: FAR)


@pytest.mark.parametrize("name", ["tensor", "data-parallel", "bf16", "tied"])
@pytest.mark.extended
def test_none_equals_stock_and_codecs_give_what_they_give_at_depth_1(far, name):
    check(name, at_depths({"none": {}}, "auto") | at_depths({"quantize": BLOCKS["quantize"]}, 1, "auto"))


def depths(stages, replicas, link, found, micro_batches=(9,) * 5):
    """The depth at which each batch ran, and what was printed."""
    stage_profile.probe = lambda sender, receiver, first: found
    ran = []
    with printed_lines("ds_compress") as lines:
        engine = build(stages, ds_config({"link": link}, replicas, micro_batches[0]))
        data = batches(engine.grid.get_data_parallel_id())
        for count in micro_batches:
            engine.set_train_batch_size(MICRO_BATCH * count * replicas)
            session = engine.ds_compress
            ran.append((session.depth.now, {end.link.depth for end in session.stage.ends}))
            engine.train_batch(data)
    return ran, lines


@pytest.mark.parametrize("stages, replicas", [(3, 1), (2, 2)])
@pytest.mark.extended(keep=1)
def test_a_far_link_goes_deeper_on_all_ranks_at_once(stages, replicas):
    (first, lines), *others = run_ranks(stages * replicas, depths, stages, replicas, AUTO, FAR)
    assert all(ran == first and not message for ran, message in others)
    now = [depth for depth, _ in first]
    assert now[: MEASURED[-1]] == [1] * MEASURED[-1] and min(now[MEASURED[-1] :]) > 1
    assert all(links == {depth} for depth, links in first)
    assert "link eager, depth auto, 1 until it is measured;" in lines[0]
    assert f"link depth {now[-1]} chosen: step " in lines[1] and "500 ms one way" in lines[1]
    assert len(lines) == 2


def test_memory_caps_it_and_says_so():
    ran, lines = run_ranks(2, depths, 2, 1, {"depth": "auto", "memory_gb": 1e-6}, FAR)[0]
    assert {depth for depth, _ in ran} == {1} and "needs more memory (link.memory_gb)" in lines[1]


def test_another_number_of_micro_batches_is_measured_again():
    ran, lines = run_ranks(2, depths, 2, 1, AUTO, FAR, (9,) * 4 + (3,) * 4)[0]
    now = [depth for depth, _ in ran]
    assert now[3] > 2 and now[7] == 2 and sum("chosen" in line for line in lines) == 2


class Wide(nn.Module):
    """Keeps its input, 4 MB a micro-batch, for the gradient of its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


INPUT = 4 * 8 * 32768 * 4  # bytes of a micro-batch


def memory(link):
    """Return the most bytes in use after a forward pass, over those at the start, by batch, and the depth."""
    engine = build(2, ds_config({"link": link}, micro_batches=MICRO_BATCHES), specs=[LayerSpec(Wide)] * 6)
    data, most = batches(shape=(8, 32768)), []
    engine.module.register_forward_hook(lambda *_: most.append(in_use(CPU)))
    for _ in range(5):
        before, most[:] = in_use(CPU), []
        engine.train_batch(data)
    return max(most) - before, engine.ds_compress.depth.now


@pytest.mark.parametrize("gigabytes, depth", [(0.08, 2), (0.12, 4)])
@pytest.mark.extended(keep=1)
def test_no_more_memory_is_taken_than_is_allowed(far, gigabytes, depth):
    """Stage 0 holds 3 layer inputs and a message per micro-batch, 16.8 MB each, and 2 packets per depth."""
    (taken, found), _ = run_ranks(2, memory, {"depth": "auto", "memory_gb": gigabytes})
    assert 1 < found <= depth
    assert (found + 1) * 3 * INPUT < taken <= gigabytes * 1e9


def own_passes():
    """The depth of a program that replaces the instruction for backward passes, on a far link."""
    engine, data = build(2, ds_config({"link": AUTO}, micro_batches=MICRO_BATCHES)), batches()
    stock = engine.ds_compress.path.original[BackwardPass]
    type(engine)._INSTRUCTION_MAP[BackwardPass] = lambda self, buffer_id: stock(self, buffer_id)
    losses = [engine.train_batch(data).item() for _ in range(5)]
    return losses[-1] < losses[0], engine.ds_compress.depth.now


def test_a_program_with_passes_of_its_own_stays_at_depth_1(far):
    assert run_ranks(2, own_passes) == [(True, 1)] * 2


def rows(stages=3, **changes):
    times = {"forward": 0.01, "backward": 0.02, "latency": 0.05, "from before": 1e7, "from after": 1e7}
    sizes = {"activations": 1e6, "spare": 1e9, "bytes forward": 1e5, "bytes backward": 1e5}
    row = dict.fromkeys(COLUMNS, 0.0) | times | sizes | changes
    return [row | {"stage": float(stage)} for stage in range(stages)]


def test_the_slowest_link_and_the_farthest_may_be_two():
    """The latency of a far link was printed as that of the slow one."""
    slow, far = rows(2, **{"from before": 6.25e6, "from after": 6.25e6, "latency": 1e-4}), rows(2)
    assert describe_links(slow + far) == "slowest link 50 Mbit/s, farthest 50 ms one way"


def test_what_nobody_knows_is_not_taken():
    found = rows()
    found[1]["activations"] = math.nan
    assert decide(found, 9, 1, None, CPU) is None and decide(rows(), 9, 1, None, CPU).depth > 1


def test_ranks_of_a_host_share_its_memory():
    """Six ranks on one host have a sixth each of what one has alone; room for 7 micro-batches, say."""
    alone = [row | {"host": float(number)} for number, row in enumerate(rows() + rows())]
    together = rows() + rows()
    for row in alone + together:
        row["spare"] = 7.5e6
    assert decide(alone, 32, 1, None, CPU).depth == 3
    assert decide(together, 32, 1, None, CPU).depth == 1


def test_what_a_gpu_has_free_comes_on_top_of_what_is_in_use():
    """At depth 2 stage 0 of 3 holds 5 micro-batches; memory for 2.9 more, with packets of 0.2 per depth."""
    choice = decide(rows(spare=2.9e6), 32, 2, None, torch.device("cuda"))
    assert choice.depth == 3 and choice.capped


def test_the_slowest_replica_counts():
    slow = [row | {"from before": 1e5} for row in rows()]
    assert decide(rows() + slow, 32, 1, 1.0, CPU).step == decide(slow, 32, 1, 1.0, CPU).step
