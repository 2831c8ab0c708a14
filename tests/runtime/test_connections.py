"""`"connections": "auto"`: chosen from what the links give, alike on all ranks; results stay as they are."""

import math
from types import SimpleNamespace

import pytest
import torch

from ds_compress.runtime import connections, stage_profile
from ds_compress.runtime.connections import choose, format_choice, may_lose, slowest_row
from ds_compress.transport import packet_parts, probe
from ds_compress.transport.connections import TooFewFiles
from ds_compress.transport.probe import LinkMeasurement
from tests.support.pipeline import batches, build, ds_config, printed_lines, same_weights, train, weights
from tests.support.pipeline_kinds import KINDS
from tests.support.ranks import run_ranks

FAR, CLOSE_BY = 0.08, 0.0002
AUTO = {"link": {"connections": "auto"}}
LOSSLESS = {direction: {"codec": "lossless"} for direction in ("forward", "backward")}


def rows(trip, *rates):
    """Of the slowest link, by number of connections; `rates` in MB/s."""
    return {n: {"rate": 1e6 * rate, "round trip": trip} for n, rate in zip(connections.NUMBERS, rates)}


@pytest.mark.parametrize(
    "rates, chosen",
    [((1,), 1), ((25, 25.5), 1), ((25, 27.7), 1), ((25, 28), 4), ((1, 4, 4.3), 4), ((1, 4, 15), 16)],
)
def test_the_smallest_number_within_a_tenth_of_the_best(rates, chosen):
    assert choose(rows(FAR, *rates)) == chosen


def test_the_slowest_link_counts_and_near_links_never_do():
    near = {"rate": math.inf, "round trip": CLOSE_BY}
    nearer = {"rate": math.inf, "round trip": CLOSE_BY / 2}
    far = rows(FAR, 1)[1]
    assert slowest_row([near, far, nearer]) is far and slowest_row([nearer, near]) is near
    assert not may_lose(near) and may_lose(far)


def test_a_link_with_little_in_flight_is_slow_by_itself():
    """0.2 Mbit/s at 80 ms: 2 KB in flight, of which more than one packet in ten would have to be lost."""
    slow = rows(FAR, 0.024)
    assert not may_lose(slow[1]) and may_lose(rows(0.6, 0.04)[1])
    assert format_choice(slow) == (
        "ds_compress: link connections 1 chosen: slowest link, Mbit/s: 0.192 with 1; 80 ms there and back: "
        "the link is the limit, not lost packets"
    )


def probed_over(given, left, monkeypatch, ends=()):
    """The numbers of connections that a controller asks for; `given`: the slowest rows, one after another."""
    rows_of_probes, probed = iter(given), []
    monkeypatch.setattr(connections, "_probe", lambda stage, device: next(rows_of_probes))
    monkeypatch.setattr(connections, "gather", lambda row, device: [row])

    def set_connections(stage, engine, number):
        if number - 1 > left:
            raise TooFewFiles
        probed.append(number)

    stage = SimpleNamespace(ends=ends, exchange_connections=[None])
    engine = SimpleNamespace(device=torch.device("cpu"), dynamic_shape=False, global_rank=1)
    controller = connections.ConnectionsController(set_connections)
    controller.begin_step(SimpleNamespace(stage=stage, engine=engine))
    return probed


@pytest.mark.parametrize("left, numbers", [(math.inf, [1, 4, 16, 64, 64]), (15, [1, 4, 16, 4]), (0, [1, 1])])
def test_one_number_that_was_unlucky_ends_nothing(left, numbers, monkeypatch):
    """At .05 % lost, 4 was chosen by 42.6, 48.2 and 34.1 Mbit/s with 1, 4 and 16; 64 gave 102. With too few
    files, 64 ended a job that ran well with 16."""
    given = rows(FAR, 5.3, 6, 4.3, 12.8).values()
    assert probed_over(given, left, monkeypatch) == numbers


def test_a_link_that_seems_near_once_says_nothing_of_more_connections(monkeypatch):
    given = rows(FAR, 5.3, math.inf).values()
    assert probed_over(given, math.inf, monkeypatch) == [1, 4, 1]


def test_a_link_that_is_not_eager_is_not_probed(monkeypatch):
    """That of DualPipeV, whose receiver would wait for a queue of DeepSpeed's."""
    ends = [SimpleNamespace(link=SimpleNamespace(is_eager=False))]
    assert not probed_over([], math.inf, monkeypatch, ends)


def test_what_each_number_gave_is_reported():
    assert format_choice(rows(FAR, 1, 4, 4.2)) == (
        "ds_compress: link connections 4 chosen: slowest link, Mbit/s: 8 with 1, 32 with 4, 33.6 with 16; "
        "80 ms there and back"
    )
    assert format_choice({1: {"rate": math.inf, "round trip": CLOSE_BY}}) == (
        "ds_compress: link connections 1 chosen: links take at most 0.2 ms there and back; lost packets cost "
        "little below 2 ms"
    )


def simulate_loss(best):
    """Let links give more with more connections, up to `best` of them; return the numbers probed."""
    probed = []

    def probe_link(sender, receiver, first):
        probed.append(len(sender.groups))
        assert len(receiver.groups) == probed[-1]
        return LinkMeasurement(1e6 * min(best, probed[-1]), FAR / 2)

    def probe_message(sender, receiver, first, rate):
        assert rate is probe.message_rate  # a stream of packets takes a minute where a link is slow
        return probe_link(sender, receiver, first)

    connections.probe, stage_profile.probe = probe_message, probe_link
    return probed


def in_use(engine):
    """The connections of all links of this rank."""
    return {len(end.link.groups) for end in engine.ds_compress.stage.ends}


def trained(stages, block, best, folder=None, steps=4):
    """Losses, weights, connections and numbers probed, and lines; evaluate first, and load in the end."""
    probed, packet_parts.WHOLE = simulate_loss(best), 64
    with printed_lines("connections ") as lines:
        replicas = torch.distributed.get_world_size() // stages
        engine = build(stages, ds_config(block, replicas=replicas))
        data = batches(engine.grid.get_data_parallel_id())
        engine.eval_batch(batches(5))
        losses = [engine.train_batch(data).item() for _ in range(steps)]
        found, seen = in_use(engine), list(probed)
        own, link = weights(engine), engine.ds_compress.monitor.link
        if folder:
            engine.save_checkpoint(folder)
            simulate_loss(1)
            engine.load_checkpoint(folder)
            engine.train_batch(data)
            assert in_use(engine) == {1}, "it is chosen anew"
    return losses, own, found, seen, lines, link


@pytest.mark.parametrize(
    "stages, ranks, best, chosen, tried",
    [(2, 4, 1, 1, [1, 4, 16]), (2, 4, 4.2, 4, [1, 4, 16, 64]), (3, 3, 40, 64, [1, 4, 16, 64])],
)
@pytest.mark.extended(keep=1)
def test_ranks_choose_alike_and_none_equals_stock(stages, ranks, best, chosen, tried, tmp_path):
    stock = run_ranks(ranks, train, stages, ds_config(replicas=ranks // stages))
    ours = run_ranks(ranks, trained, stages, AUTO, best, str(tmp_path))
    for theirs, (losses, own, numbers, probed, _, link) in zip(stock, ours):
        assert losses == theirs["losses"] and same_weights(own, theirs["weights"])
        assert sorted(set(probed)) == tried and numbers == {chosen}
        assert probed == [number for number in tried for _ in range(len(probed) // len(tried))]
        assert (f", {chosen} connections" in link) == (chosen > 1)
    assert f"link connections {chosen} chosen: slowest link, Mbit/s: 8 with 1" in ours[0][4][0]
    assert ours[0][4][0].endswith("; 80 ms there and back")
    assert not any(lines for *_, lines, _ in ours[1:])


@pytest.mark.extended
def test_extra_links_that_come_later_have_as_many():
    for numbers in run_ranks(3, extended):
        assert numbers == [{4}, {4}, {1}]


def extended():
    """Connections of all links: with extra packets from the second step on, and after another choice."""
    simulate_loss(4.2)
    packet_parts.WHOLE = 64
    engine, data = build(3, ds_config(AUTO)), batches()
    found = []
    for step in range(4):
        engine.train_batch(data)
        session = engine.ds_compress
        if step == 0:
            found.append({len(end.link.groups) for end in session.stage.ends})
            session.reconfigure(dict.fromkeys("01", LOSSLESS))
        if step == 2:
            ends = session.stage.ends
            found.append({len(link.groups) for end in ends for link in (end.link, end.extra_link)})
            simulate_loss(1)
            session.resume(session.state(), {})
    found.append({len(link.groups) for end in session.stage.ends for link in (end.link, end.extra_link)})
    return found


@pytest.mark.extended
def test_depth_auto_is_measured_over_the_number_chosen():
    block = {"link": {"connections": "auto", "depth": "auto", "memory_gb": 1}}
    for *_, numbers, probed, _, link in run_ranks(2, trained, 2, block, 4.2):
        assert probed == [1, 4, 16, 64, 4] and numbers == {4} and ", depth auto" in link


def test_dynamic_shapes_stay_at_one():
    for probed, line in run_ranks(3, dynamic):
        assert not probed and "connections auto, 1 because of dynamic_shape" in line
        assert "in DeepSpeed's order" not in line, "shapes have links of their own"


def dynamic():
    kind, probed = KINDS["mixed-dynamic"], simulate_loss(16)
    engine = build(3, ds_config(AUTO), kind.specs(), **kind.module)
    engine.train_batch(kind.data(engine))
    return probed, engine.ds_compress.monitor.link


def near():
    with printed_lines("connections ") as lines:
        engine = build(2, ds_config(AUTO))
        engine.train_batch(batches())
    return in_use(engine), lines


def test_links_of_one_machine_get_one(monkeypatch):
    """Really probed; on a busy machine even they may seem far."""
    monkeypatch.setattr(probe, "NEAR", 10.0)
    (found, lines), (same, _) = run_ranks(2, near)
    assert found == same == {1} and "link connections 1 chosen: links take at most" in lines[0]
