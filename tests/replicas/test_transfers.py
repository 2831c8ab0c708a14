"""Gradients that leave over several connections: the same bits, over all of them, and faults stay named."""

import dataclasses
import os
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ds_compress.replicas.transfers import Replicas, Transfer
from ds_compress.runtime import connections as controller
from ds_compress.transport import packet_parts
from ds_compress.transport.p2p import ExchangeConnections
from ds_compress.transport.probe import LinkMeasurement
from tests.support.calls import wrapped
from tests.support.pipeline import build, ds_config, printed_lines
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal
from tests.support.replicas import KINDS, assert_alike, train_replicas, train_steps, wide_layers

CONNECTIONS = 3
FOUR_BITS = {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef"}
SEVERAL = {"link": {"connections": CONNECTIONS}}


def train_and_count(*args):
    """What `train_replicas` returns, and how many transfers start over each connection."""
    started = Counter()
    packet_parts.over = wrapped(packet_parts.over, before=lambda group, kind: started.update([(kind, group)]))
    result = train_replicas(*args)
    return result, sorted(count for (kind, _), count in started.items() if kind == "isend")


CASES = {
    "fp32, tied": (2, 2, {"replicas": FOUR_BITS, "tied": FOUR_BITS}),
    "fp32": (1, 3, {"replicas": FOUR_BITS}),
    "bf16 zero 1": (1, 2, {"replicas": {**FOUR_BITS, "parameters": 4}}),
    "bf16": (2, 2, {"replicas": {"codec": {"name": "lowrank", "rank": 4}, "feedback": "ef"}}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.extended(keep=1)
def test_several_connections_change_no_bit(name, monkeypatch):
    """A sum of numbers, as of factors, has one connection."""
    monkeypatch.setattr(packet_parts, "WHOLE", 64)  # packets are small here
    stages, replicas, block = CASES[name]
    kind, _, specs = name.partition(", ")
    config = ds_config(None, replicas=replicas, **KINDS[kind])
    configs = [{**config, "ds_compress": {**block, **changes}} for changes in ({}, SEVERAL)]
    options = [(stages, own, 4, specs or "wide") for own in configs]
    one, several = (run_ranks(stages * replicas, train_and_count, *own) for own in options)
    assert_alike([result for result, _ in several])
    for (result, before), (same, transfers) in zip(one, several):
        assert same["digests"] == result["digests"] and same["losses"] == result["losses"]
        assert same["sent"] == result["sent"] > 0
        # messages have their own, over one connection too
        messages = len(before) if stages > 1 else 0
        exchanges = 0 if name == "bf16" else 1 + (specs == "tied")
        assert len(before) == messages and len(transfers) == CONNECTIONS * (messages + exchanges)


def choose(block):
    """Connections of a stage that has no channels, and of its exchanges, its groups, what was probed, weights
    and lines."""
    probed = []

    def probe(sender, receiver, first, rate):
        probed.append((len(sender.groups), first))
        return LinkMeasurement(1e6 * min(4.2, len(receiver.groups)), 0.04)

    controller.probe = probe
    with printed_lines("ds_compress") as lines:
        engine = build(1, ds_config(block, replicas=dist.get_world_size()), wide_layers())
        *_, last = train_steps(engine, 5)
    stage = engine.ds_compress.stage
    exchanges = [len(own.groups) for own in stage.exchange_connections]
    return stage.connections, exchanges, len(stage.groups), probed, last, lines


def test_auto_probes_the_links_to_replicas():
    """It knew only those between stages, of which there may be none, or others than the slow ones."""
    results = run_ranks(3, choose, {"replicas": FOUR_BITS, "link": {"connections": "auto"}})
    assert [result[:2] for result in results] == [(4, [4])] * 3
    between = [(number, first) for number in (1, 4, 16, 64) for first in (False, True)]
    assert results[1][3] == between and results[0][3] == between[1::2]
    assert len({own for *_, own, _ in results}) == 1
    said = "link connections 4 chosen: slowest link, Mbit/s: 8 with 1, 32 with 4"
    assert sum(said in line for line in results[0][-1]) == 1


@pytest.mark.parametrize("recipe", [{}, {"recipe": "auto"}], ids=["depth", "recipe"])
@pytest.mark.extended(keep=1)
def test_auto_chooses_nothing_where_no_packet_is_sent(recipe):
    """Depth and recipe were chosen by the slowest of no links, and the worst of no messages: ValueError. Sums
    have one connection, whatever a link would give."""
    link = {"connections": "auto", "depth": "auto", "memory_gb": 1}
    replicas = {"codec": {"name": "lowrank", "rank": 4}, "feedback": "ef"}
    block = {**recipe, "replicas": replicas, "link": link}
    (*first, lines), (*other, silent) = run_ranks(2, choose, block)
    assert first == other and (first[0], *first[2:4]) == (1, 1, []) and not silent
    if recipe:
        said = "recipe auto: messages stay uncompressed: a pipeline of one stage sends none"
        assert lines.pop(0) == f"ds_compress: {said}"
    assert len(lines) == 1 and "link eager; gradients between replicas: lowrank" in lines[0]


def probe_links(sets):
    """The peers of this rank in its set, in the order in which it probes them, and a byte from each."""
    found = []
    for sender, receiver, first in ExchangeConnections(sets, "bytes", 60).links(torch.device("cpu")):
        packet = sender.memory(1)
        packet.memory.fill_(dist.get_rank())
        sender.send(packet)
        receiver.expect(1, 1)
        found.append((sender.peer, receiver.receive(1).memory.item(), first))
        sender.drain()
    return found


def test_no_rank_waits_for_another_in_sets_of_any_size():
    first, second, third, fourth, alone = run_ranks(5, probe_links, [(0, 1, 2, 4)])
    assert first == [(1, 1, True)] and second == [(0, 0, False), (2, 2, True)]
    assert third == [(4, 4, True), (1, 1, False)] and fourth == [] and alone == [(2, 2, False)]


def failing(how, number):
    """What rank 0 is told when rank 1 dies or is silent while connection `number` lacks its part."""
    connections = ExchangeConnections([(0, 1, 2)], "gradients between replicas", 600)
    connections.set_number(CONNECTIONS)
    replicas, packets = Replicas.over(connections, 0), torch.ones(1 << 20, dtype=torch.uint8)
    dist.barrier()
    if dist.get_rank() == 1:
        never = connections.groups[number] if number else SimpleNamespace(irecv=dist.irecv)
        never.isend = lambda *args, **options: None
        if number == 0:
            packet_parts.dist = never
    started = replicas.start(Transfer(torch.cat([packets] * 3), [packets.numel()] * 3))
    store, rank = _get_default_store(), dist.get_rank()
    if rank == 1:
        if how == "is silent":
            store.wait(["told 0", "told 2"])
        os._exit(0)
    if how == "is silent":
        timeout = dataclasses.replace(replicas.timeout, seconds=2)
        started = dataclasses.replace(started, replicas=dataclasses.replace(replicas, timeout=timeout))
    said = refusal(started.wait)
    store.set(f"told {rank}", "")
    return said


@pytest.mark.parametrize("number", [0, CONNECTIONS - 1])
@pytest.mark.parametrize(
    "how, said",
    [("dies", "is gone: "), ("is silent", "did not answer within 2 s (ds_compress.link.timeout_s)")],
)
@pytest.mark.extended(keep=1)
def test_a_replica_that_sends_no_more_is_named(how, said, number):
    """Rank 0 waits for it first; rank 2 for rank 0, which may be late on a busy machine, or gone by then."""
    told, *_ = run_ranks(3, failing, how, number, check=False)
    assert f"gradients between replicas: rank 1 {said}" in told
