"""Process groups of the channels are few, and what goes through host memory."""

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from deepspeed.runtime.pipe import p2p as deepspeed_p2p
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_compress.config import Config
from ds_compress.engine import attach, wiring
from ds_compress.engine.intercept import PointToPoint
from ds_compress.engine.stage import Stage
from ds_compress.engine.wiring import wire
from ds_compress.message.channel import Boundary
from ds_compress.transport import staging
from tests.support.calls import wrapped
from tests.support.pipeline import build, ds_config
from tests.support.ranks import run_ranks

LOSSLESS = {direction: {"codec": "lossless"} for direction in ("forward", "backward")}  # a rest both ways


class Engine:
    """What `wire` asks of an engine: stage `stage_id` in replica 5 of `replicas`."""

    def __init__(self, stages, replicas, stage_id):
        self.num_stages, self.stage_id, self.device = stages, stage_id, torch.device("cpu")
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self.grid, self._topo = self, PipeDataParallelTopology(stages, replicas)
        self.global_rank = self.stage_to_global(stage_id)
        self.dynamic_shape = False

    def stage_to_global(self, stage_id):
        return self._topo.get_rank(pipe=stage_id, data=5)


def wired(stages, replicas, stage_id, block):
    """Calls that take all ranks, and (group, boundary, direction, use) of each end of the stage."""
    engine, calls = Engine(stages, replicas, stage_id), []
    wiring.receives_hold_device = lambda device: True
    dist.init_process_group("fake", store=FakeStore(), rank=engine.global_rank, world_size=stages * replicas)
    for name in ("new_group", "split_group", "barrier", "all_reduce", "all_gather", "broadcast"):
        setattr(dist, name, wrapped(getattr(dist, name), before=lambda *args, **options: calls.append(args)))
    config = Config(block)
    before = Boundary(stage_id - 1, config, 5) if stage_id else None
    after = Boundary(stage_id, config, 5) if stage_id < stages - 1 else None
    stage = Stage(config, PointToPoint(None, None), before, after)
    wire(stage, engine, depth=1)
    number = {id(group): index for index, group in enumerate(stage.groups)}
    ends = [
        (number[id(group)], end.channel.boundary.number, end.channel.direction, use)
        for end in stage.ends
        for use, link in (("packets", end.link), ("rest", end.extra_link))
        for group in link.groups
        if group is not None
    ]
    return len(calls), ends


def on_stage(*args):
    """`wired` in a process of its own, which a fake world needs; what it raises is raised here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as processes:
        return processes.submit(wired, *args).result()


@pytest.mark.parametrize("block, most", [({}, 4), (LOSSLESS, 8)], ids=["none", "lossless"])
def test_start_up_takes_as_many_calls_for_any_job(block, most):
    """It was (stages - 1) x replicas x 2 on every rank."""
    assert on_stage(16, 64, 7, block)[0] == on_stage(4, 8, 2, block)[0] == most


@pytest.mark.parametrize("block", [{}, LOSSLESS], ids=["none", "lossless"])
def test_no_rank_has_two_channels_in_a_group_and_both_ends_are_in_the_same(block):
    """So NCCL, which does the work of a group in order, lets no channel wait for another."""
    group_of = {}
    for stage in range(5):
        _, ends = on_stage(5, 8, stage, block)
        shared = Counter(group for group, *_ in ends)
        assert set(shared.values()) == {1}, (stage, ends)
        for group, *channel in ends:
            assert group_of.setdefault(tuple(channel), group) == group


CPU = torch.device("cpu")


@pytest.mark.parametrize("backend, device", [("gloo", "cuda"), ("nccl", "cuda"), ("gloo", "cpu")])
def test_gloo_cannot_send_what_is_on_a_gpu(backend, device, monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda: f"cpu:gloo,cuda:{backend}")
    assert staging.is_needed(torch.device(device)) is ((backend, device) == ("gloo", "cuda"))


def time_outs_of_new_groups(block):
    """Seconds of each process group of this rank that comes with an engine, beside those of DeepSpeed."""
    before, known = set(), torch.distributed.distributed_c10d._world.pg_map
    found = []
    for own in (None, block):
        engine = build(2, ds_config(own, replicas=2))
        new = [group for group in known if group not in before]
        before.update(new)
        found.append(Counter(g._get_backend(CPU).options._timeout.total_seconds() for g in new))
    stock, ours = found
    links = [group for end in engine.ds_compress.stage.ends for group in end.link.groups if group]
    of_links = Counter(each._group.options._timeout.total_seconds() for each in links)
    return dict(ours - stock + of_links)


@pytest.mark.parametrize("mode", ["eager", "blocking"])
def test_every_group_has_the_time_out_of_the_link(mode):
    """That of the gradients had DeepSpeed's 10 minutes, whatever `link.timeout_s` was."""
    block = {**LOSSLESS, "link": {"mode": mode, "timeout_s": 77}, "replicas": {"codec": "bf16"}}
    for rank in run_ranks(4, time_outs_of_new_groups, block):
        assert rank.keys() == {77.0}, rank


@pytest.mark.parametrize("needed", [False, True])
def test_deepspeeds_own_messages_are_broadcast_where_they_must(needed, monkeypatch):
    before = deepspeed_p2p.can_send_recv
    monkeypatch.setattr(deepspeed_p2p, "can_send_recv", before)
    monkeypatch.setattr(staging, "is_needed", lambda device: needed)
    attach.prepare()
    assert deepspeed_p2p.can_send_recv() is not needed
    assert needed or deepspeed_p2p.can_send_recv is before


def test_the_backends_of_a_group_are_named_as_expected():
    assert "cpu:gloo" in run_ranks(1, dist.get_backend_config)[0].split(",")
