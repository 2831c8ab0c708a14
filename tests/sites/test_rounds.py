"""Rounds of replicas, with two slots each, in a real store, and in that of the command among strangers."""

import contextlib
import functools
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from ds_compress.config.replicas import OuterOptions, ReplicasOptions, build_replica_codec
from ds_compress.errors import CompressionError
from ds_compress.sites import board as board_module
from ds_compress.sites import chunks, handover
from ds_compress.sites import rounds as rounds_module
from ds_compress.sites.board import KEPT_ROUNDS, PREFIX, WINDOW, Board, Position, Shipment, members_of
from ds_compress.sites.outer_step import Anchor, DeltaCodec, DeltaPart
from ds_compress.sites.rounds import Rounds
from ds_compress.sites.store import connect
from ds_compress.sites.store_keys import Keys
from tests.support.calls import wrapped
from tests.support.network import disturb, eventually, flood
from tests.support.refusals import refusal
from tests.test_strangers import disturbed

SLOTS, NUMEL = 2, 20_000
SETTINGS = {"ds_compress": "0.3", "ds_compress.replicas.every": 30}
QUANTIZE = {"name": "quantize", "bits": 8}
PATIENCE = 300  # seconds, which only an exchange that hangs needs


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def first_anchor(slot):
    return Anchor(torch.randn(NUMEL, generator=torch.Generator().manual_seed(slot)), torch.zeros(NUMEL))


def client_of(store):
    return TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=PATIENCE))


class Launch:
    """A replica: its slots exchange deltas at the same time."""

    def __init__(self, store, digest="first", announces=True, codec=QUANTIZE, connections=1, **options):
        options = OuterOptions(**{"grace_s": 60.0, **options})
        self.slots, own = [], HashStore()
        for slot in range(SLOTS):
            client, *further = (client_of(store) for _ in range(connections + (connections > 1)))
            self.slots.append(Rounds(client, own, slot, SLOTS, options, further))
        joined = self.slots[0].join(SETTINGS, Position(0, digest))
        for rounds in self.slots:
            rounds.number = joined.number
        self.number, self.position, self.is_newcomer = joined
        self.anchors = [first_anchor(slot) for slot in range(SLOTS)]
        replica = ReplicasOptions(codec=codec, feedback="ef", every=30)
        parts = [DeltaPart(0, NUMEL)]
        self.codecs = [DeltaCodec(build_replica_codec(replica, "x"), parts, 0, 1) for _ in range(SLOTS)]
        self.pool = ThreadPoolExecutor(SLOTS)
        if announces and not self.is_newcomer:
            self.take_part()

    def take_part(self):
        for rounds, anchor in zip(self.slots, self.anchors):
            rounds.take_part(anchor, self.position)

    def start(self, learned):
        """Begin an exchange in which each slot has learned `learned`, a number; return its future results."""
        self.sent = [anchor.values - learned for anchor in self.anchors]
        return [
            self.pool.submit(rounds.exchange_delta, anchor, self.position, sent, codec)
            for rounds, anchor, sent, codec in zip(self.slots, self.anchors, self.sent, self.codecs)
        ]

    def finish(self, futures):
        results = [future.result(PATIENCE) for future in futures]
        assert len({result.position for result in results}) == 1
        assert len({result.members for result in results}) == 1
        self.anchors, self.position = [result.anchor for result in results], results[0].position
        return results

    def catch_up(self):
        return [self.pool.submit(rounds.catch_up, NUMEL, "own") for rounds in self.slots]

    def wait_for_anchor(self):
        self.waits = self.catch_up()
        eventually(lambda: self.number in self.slots[0]._board.newcomers())

    def take_anchor(self, other):
        """Take the anchor that another replica hands over, while `other` trains."""
        hand_over_until(other, lambda: all(future.done() for future in self.waits))
        self.anchors, positions = zip(*(future.result(PATIENCE) for future in self.waits))
        self.position = positions[0]
        self.take_part()


def newcomer_to(store, **options):
    """A launch that has other weights, and waits for the anchor."""
    newcomer = Launch(store, digest="another", **options)
    newcomer.wait_for_anchor()
    return newcomer


def play(launches, learned):
    """A round of all launches; return the results of each."""
    futures = [launch.start(value) for launch, value in zip(launches, learned)]
    return [launch.finish(own) for launch, own in zip(launches, futures)]


def play_without_others(launches, learned):
    """A round of all launches that live; who was announced, and is dead, is waited for no longer."""
    futures = [launch.start(value) for launch, value in zip(launches, learned)]
    first, slots = launches[0].slots[0], [slot for launch in launches for slot in launch.slots]
    numbers, number = {launch.number for launch in launches}, first._board.head().round
    eventually(lambda: numbers <= set(first._board.came(number)))
    with contextlib.ExitStack() as stack:
        for slot in slots:
            impatient = slot._options.model_copy(update={"grace_s": 0.001})
            stack.enter_context(mock.patch.object(slot, "_options", impatient))
        return [launch.finish(own) for launch, own in zip(launches, futures)]


def assert_alike(launches):
    """I1."""
    for launch in launches[1:]:
        assert launch.position == launches[0].position
        for own, other in zip(launch.anchors, launches[0].anchors):
            assert torch.equal(own.values, other.values) and torch.equal(own.momentum, other.momentum)


def moved(launch, start):
    """How far the anchor has moved, which is the same for all values."""
    return (start[0].values - launch.anchors[0].values).mean().item()


def test_a_newcomer_gets_its_anchor_from_one_that_lives(store, monkeypatch):
    """A member may have been killed after it sent its packet: its newcomer waited five minutes for it. And
    without a quorum rounds have no members, and a newcomer that would complete it waited for ever."""
    monkeypatch.setattr(rounds_module, "BEAT_S", 0.1)
    dead, living = Launch(store, quorum=2, grace_s=0.1), Launch(store, announces=False, quorum=2, grace_s=0.1)
    newcomer = newcomer_to(store, quorum=2, grace_s=0.1)
    for slot in range(SLOTS):  # the packet of one that dies now
        dead.slots[slot]._board.put_packet(0, slot, dead.number, torch.zeros(4, dtype=torch.uint8))
    dead.slots[0]._board.come(0, dead.number)
    start = living.anchors
    play([living], [0.1])
    newcomer.take_anchor(living)
    assert newcomer.position.round == 0 and torch.equal(newcomer.anchors[0].values, start[0].values)


def test_rounds_of_which_only_the_dead_had_deleted_leave_the_store(store):
    """Who began to delete later took it that nothing was there before: the first rounds stayed for ever. And
    only who sent a packet deleted it: each kill left some."""
    first, second = Launch(store), Launch(store)
    for _ in range(2):
        play([first, second], [0.1, 0.1])
    for _ in range(KEPT_ROUNDS):
        play_without_others([second], [0.1])
    assert not [key for key in store.list_keys() if key.startswith(f"{PREFIX}0/")]


def test_one_that_is_late_is_left_out_and_counts_in_the_next_round(store):
    first, late = (Launch(store, announces=each, lr=1.0, momentum=0.0) for each in (True, False))
    start = first.anchors
    ((result, _),) = play([first], [0.1])
    assert result.members == (1,) and moved(first, start) == pytest.approx(0.1, abs=0.01)
    # its next exchange: it applies the round that it has missed, and sends for the one that is open
    futures = late.start(0.4)
    eventually(lambda: late.number in first.slots[0]._board.came(1))
    play([first], [0.0])
    results = late.finish(futures)
    assert results[0].members == (1, 2) and results[0].is_member
    assert_alike([first, late])
    assert moved(first, start) == pytest.approx(0.1 + 0.2, abs=0.01)


def test_members_of_a_round_are_waited_for_in_the_next_one(store):
    """A quick replica decided the next round alone, before the other one had seen the outcome of this one."""
    first, second = Launch(store), Launch(store)
    has_decided = threading.Event()
    slot = second.slots[0]
    slot.take_part = wrapped(slot.take_part, before=lambda *_: has_decided.wait(PATIENCE))
    own, other = first.start(1.0), second.start(3.0)
    first.finish(own)
    own = first.start(1.0)
    wait(own, timeout=2)  # as long as the quick one needs to decide
    has_decided.set()
    second.finish(other)
    other = second.start(3.0)
    for result in (*first.finish(own), *second.finish(other)):
        assert result.members == (first.number, second.number)
    assert_alike([first, second])


def test_one_whose_packet_came_too_late_keeps_its_residual(store):
    first, late = (Launch(store, announces=each, lr=1.0, momentum=0.0) for each in (True, False))
    start = first.anchors
    waiting = threading.Event()
    slot = late.slots[0]
    slot._open_round = wrapped(slot._open_round, after=lambda *_: waiting.wait(PATIENCE))
    futures = late.start(0.4)
    play([first], [0.1])
    waiting.set()
    (result, _) = late.finish(futures)
    assert result.members == (1,) and not result.is_member and torch.equal(result.base, start[0].values)
    assert not any(memory for codec in late.codecs for memory in codec.residuals().values())
    assert_alike([first, late])


@pytest.mark.parametrize(("slot", "where"), [(0, "_open_round"), (1, "_candidates")])
def test_ranks_wait_for_none_of_their_launch_that_has_failed(store, slot, where, monkeypatch):
    """When one rank lost its connection, the other ranks stopped training for 330 s, to wait for it; and the
    other sites for 300 s, to wait for their vote."""
    monkeypatch.setattr(rounds_module, "BEAT_S", 0.1)
    launch, other = Launch(store, grace_s=0.5), Launch(store, grace_s=0.5)
    setattr(launch.slots[slot], where, mock.Mock(side_effect=RuntimeError("the connection was cut")))
    futures, others = launch.start(0.1), other.start(0.1)
    said = f"rank {slot} of this launch: RuntimeError: the connection was cut"
    assert refusal(futures[1 - slot].result, PATIENCE) == said
    other.finish(others)


def test_an_exchange_that_was_given_up_leaves_the_residual(store):
    """A checkpoint was saved while the store was silent: training went back to the residual from before the
    exchange. When the store answered, its thread went on, and replaced that."""
    launch = Launch(store)
    for slot in launch.slots:
        slot._open_round = wrapped(slot._open_round, after=lambda *_, ended=slot.ended: ended.set())
    assert all("has ended" in str(future.exception(PATIENCE)) for future in launch.start(0.4))
    assert launch.slots[0]._launch.failure() is None  # all ranks end an exchange together
    assert not any(memory for codec in launch.codecs for memory in codec.residuals().values())


def test_the_anchor_for_a_newcomer_outlasts_short_rounds(store):
    """Packets were deleted three rounds later; a slow newcomer could not follow, and asked again."""
    first = Launch(store)
    play([first], [0.1])
    newcomer = newcomer_to(store)
    for _ in range(8):
        play([first], [0.1])
    newcomer.take_anchor(first)
    assert newcomer.position.round == 1
    own, other = newcomer.start(0.1), first.start(0.1)
    first.finish(other)
    newcomer.finish(own)
    assert newcomer.position.round >= 9
    for _ in range(2):
        results = play([first, newcomer], [0.1, 0.1])
    assert results[0][0].members == (first.number, newcomer.number)
    assert_alike([first, newcomer])
    assert first.slots[0]._board.newcomers() == {}


def test_a_newcomer_outlasts_a_third_replica_that_begins(store):
    """It knew no sizes of packets yet, took the newcomer for dead three rounds later, deleted its anchor and
    the rounds that it needed."""
    first = Launch(store)
    play([first], [0.1])
    newcomer = newcomer_to(store)
    for _ in range(4):
        play([first], [0.1])
    assert newcomer.number in first.slots[0]._board.newcomers()
    third = newcomer_to(store)
    third.take_anchor(first)
    play([first, third], [0.1, 0.1])
    newcomer.take_anchor(first)
    own, others = newcomer.start(0.1), [each.start(0.1) for each in (first, third)]
    first.finish(others[0])
    third.finish(others[1])
    newcomer.finish(own)
    play([first, third, newcomer], [0.1, 0.1, 0.1])
    assert_alike([first, third, newcomer])


def hand_over_until(giver, is_done):
    """Let a replica be idle, as its thread does between two exchanges."""

    def is_over():
        for rounds in giver.slots:
            rounds._last_beat = -rounds_module.BEAT_S
            rounds.idle()
        return is_done()

    eventually(is_over)


def test_a_slot_that_begins_late_takes_its_part(store):
    """Who sent it took the slot for one that had died, as it had not said yet that it had taken nothing; the
    newcomer waited for ever. It also did if others were alive and did not train: only rounds handed over
    anchors."""
    first = Launch(store)
    play([first], [0.3])
    newcomer = Launch(store, digest="another")
    early, late = newcomer.slots
    waits = [newcomer.pool.submit(early.catch_up, NUMEL, "own")]
    hand_over_until(first, early._launch.count_caught_up)
    newcomer.waits = [*waits, newcomer.pool.submit(late.catch_up, NUMEL, "own")]
    newcomer.take_anchor(first)
    assert_alike([first, newcomer])
    for slot in range(SLOTS):  # as if who sent it had died before it deleted that
        late._board.say_taken(newcomer.number, slot, 2)
    play([first, newcomer], [0.1, 0.1])
    assert late._board.newcomers() == {} and not [key for key in store.list_keys() if "/anchor/" in key]


@pytest.mark.parametrize("deleted", range(WINDOW + 2))
def test_what_is_left_by_one_that_dies_as_it_deletes_an_anchor_is_deleted(store, deleted):
    """It deleted first the key that says whether something is there: up to 32 MiB stayed for ever."""
    newcomer = Launch(store)
    board = Board(store)
    board.say_taken(newcomer.number, 0, 0)
    board.ship(
        newcomer.number, 0, torch.ones(WINDOW, 1, dtype=torch.uint8), Shipment(2, newcomer.position, WINDOW)
    )
    calls = iter(range(deleted))
    board._delete = wrapped(board._delete, before=lambda *_: next(calls))
    with pytest.raises(StopIteration):
        board.end_shipment(newcomer.number, 0)
    own = newcomer.slots[0]
    handover.AnchorReceiver(own._board, own._launch, newcomer.number, 0, SLOTS, own._wait).end()
    assert not [key for key in store.list_keys() if "/anchor/" in key]


@pytest.mark.parametrize("says", [-1, None])
def test_who_hands_over_hears_at_once_that_a_newcomer_takes_no_more(store, says, monkeypatch):
    monkeypatch.setattr(handover, "LOOK_S", 0.0)
    first, newcomer = Launch(store), Launch(store, digest="another")
    board = newcomer.slots[0]._board
    board.say_taken(newcomer.number, 0, 0)
    board.ask_for_anchor(newcomer.number)
    first.slots[0].idle()
    assert board.shipment(newcomer.number, 0).sent
    if says is None:
        board.end_shipment(newcomer.number, 0)
    else:
        board.say_taken(newcomer.number, 0, says)
    hand_over_until(first, lambda: not first.slots[0]._sender._uploads)
    assert board.newcomers() == {} and board.shipment(newcomer.number, 0) is None


def test_a_slot_hands_over_the_anchor_that_was_given_and_only_once(store):
    """Slots apply the outcome of a round one after the other."""
    launch, board = Launch(store), Board(store)
    slot, own = launch.slots[1]._sender, launch.number
    for given, uploads in (((1, own), 0), ((0, own + 1), 0), ((0, own), 1), ((0, own), 1), (None, 1)):
        board.forget_newcomer(5)
        if given is not None:
            board.ask_for_anchor(5)
            board.give_anchor(5, *given)
        slot.begin_uploads(own)
        assert len(slot._uploads) == uploads
    assert not slot._handed


def test_one_replica_gives_a_newcomer_its_anchor(store):
    board = Board(store)
    board.ask_for_anchor(5)
    for replica in (1, 2):
        board.give_anchor(5, 0, replica)
        assert board.newcomers() == {5: (0, 1)}
    board.forget_newcomer(5)
    board.give_anchor(5, 0, 1)
    assert board.newcomers() == {}


def test_newcomers_that_a_stranger_made_up_are_none(store):
    """A number of 5,000 digits ended each exchange in a ValueError. What is no text never equalled what was
    read of it: a replica tried for ever to change it."""
    slot = Launch(store).slots[0]
    store.set(f"{PREFIX}newcomers", f'{{"{5000 * "9"}": null}}')
    slot.idle()
    assert slot._board.newcomers() == {}
    store.set(f"{PREFIX}newcomers", b"\xff\xfe")
    slot._board.ask_for_anchor(7)
    assert slot._board.newcomers() == {7: None}


def test_a_replica_with_another_anchor_than_the_others_is_told(store):
    board, start = Board(store), Position(0, "first")
    board.head(start)
    ours, theirs = start.after("ours"), start.after("theirs")
    board.move_head(start, ours)
    board.move_head(start, ours)
    assert "has gone on with another anchor" in refusal(board.move_head, start, theirs)
    board.move_head(ours, ours.after("next"))
    board.move_head(start, theirs)  # it is behind: nobody can tell whether its anchor differs
    assert board.head() == ours.after("next")


@pytest.fixture
def clock(monkeypatch):
    """Stands for the module `time`."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    for module in (rounds_module, handover):
        monkeypatch.setattr(module, "time", clock)
    return clock


def let_time_pass(clock, newcomer, meanwhile=lambda: None):
    """Until it waits for no anchor any more; `meanwhile`: what another replica does."""
    while not all(future.done() for future in newcomer.waits):
        clock.now += 5.0
        meanwhile()
        newcomer.slots[0].ended.wait(0.01)


def test_one_that_is_behind_hands_over_and_the_newcomer_follows(store):
    """The one that had gone on was dead, and newcomers waited for ever, 360 s at a time."""
    behind, dead = Launch(store), Launch(store)
    play([behind, dead], [0.1, 0.1])
    for _ in range(2):
        play_without_others([dead], [0.1])
    newcomer = newcomer_to(store)
    behind.slots[0].idle()
    assert behind.slots[0]._board.newcomers() == {newcomer.number: None}, "one at the head comes first"
    behind.slots[0]._sender._behind_since = -handover.ABANDONED_S  # it has waited for so long
    newcomer.take_anchor(behind)
    assert newcomer.position == behind.position and dead.position.round == 3
    play_without_others([behind, newcomer], [0.1, 0.1])
    assert_alike([behind, newcomer])
    assert newcomer.position.round == 4


@pytest.mark.parametrize("lag", [KEPT_ROUNDS, KEPT_ROUNDS + 2])
def test_one_that_is_too_far_behind_keeps_no_newcomer_waiting(lag, store, request):
    """Its signs of life did, although nothing led from its anchor to that of the others, who were dead."""
    behind, dead = Launch(store), Launch(store)
    play([behind, dead], [0.1, 0.1])
    for _ in range(lag):
        play_without_others([dead], [0.1])
    clock = request.getfixturevalue("clock")
    newcomer = newcomer_to(store)
    began = clock.now
    let_time_pass(clock, newcomer, behind.slots[0].idle)
    assert {future.result() for future in newcomer.waits} == {(None, Position(lag + 1, "own"))}
    assert clock.now - began < 360


def test_a_newcomer_to_which_nobody_hands_an_anchor_gives_up(store, clock):
    """The others give signs of life, so it does not go on instead of them; it waited for ever."""
    first = Launch(store)
    newcomer = newcomer_to(store)
    let_time_pass(clock, newcomer, first.slots[0].tend)
    for future in newcomer.waits:
        assert "the anchor of another replica did not come within 360 s" in refusal(future.result)
    assert not [key for key in store.list_keys() if "/anchor/" in key]
    assert first.slots[0]._board.newcomers() == {} and first.slots[0]._board.head() == first.position


def test_packets_and_anchors_cross_over_several_connections(monkeypatch):
    """One connection gives a few Mbit/s where packets are lost. Nothing else changes, and no key is left."""
    monkeypatch.setattr(board_module, "CHUNK", 1500)
    monkeypatch.setattr(handover, "CHUNK", 1500)
    launches = []
    for connections, of_newcomer in ((4, 3), (1, 1)):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        first = Launch(store, connections=connections)
        play([first], [0.1])
        newcomer = newcomer_to(store, connections=of_newcomer)
        first.slots[0].idle()
        newcomer.take_anchor(first)
        results = play([first, newcomer], [0.1, 0.3])
        assert all(result.members == (1, 2) for own in results for result in own)
        assert not [key for key in store.list_keys() if "/anchor/" in key]
        launches += [first, newcomer]
        assert_alike(launches[-2:])
    anchors = zip(launches[1].anchors, launches[3].anchors)
    assert all(torch.equal(torch.cat(ours), torch.cat(theirs)) for ours, theirs in anchors)


class Lazy:
    """A connection whose packets are under way until something is asked over it."""

    def __init__(self, store):
        self.store, self.under_way = store, []

    def set(self, *entry):
        self.under_way.append(entry)

    def __getattr__(self, name):
        while self.under_way:
            self.store.set(*self.under_way.pop())
        return getattr(self.store, name)


def test_what_is_said_to_be_there_is_there_over_every_connection(store, monkeypatch):
    """The store knows no order between connections, and `set` is not answered."""
    monkeypatch.setattr(board_module, "CHUNK", 100)
    lazy = [Lazy(client_of(store)) for _ in range(3)]
    board, packet = Board(store, further=lazy), torch.arange(250).to(torch.uint8).repeat(40)
    board.put_packet(0, 0, 1, packet)
    assert torch.equal(Board(client_of(store)).packet(0, 0, 1), packet)
    chunks = packet.split(100)[:WINDOW]
    shipment = Shipment(800, Position(0, "first"), WINDOW)
    board.ship(2, 0, chunks, shipment)
    taken = [torch.empty_like(chunk) for chunk in chunks]
    Board(client_of(store)).take(2, 0, taken, 0, shipment)
    assert all(map(torch.equal, taken, chunks))
    for other in (shipment._replace(position=Position(0, "other")), shipment):
        take = Board(client_of(store)).take
        assert "damaged on its way" in refusal(take, 2, 0, taken, int(other is shipment), other)
    assert "part 0 of an anchor has 100 bytes, expected 99" in refusal(take, 2, 0, [packet[:99]], 0, shipment)


class Cut:
    def __getattr__(self, name):
        raise RuntimeError("the connection was cut")


def test_a_connection_that_is_cut_announces_nothing(store, monkeypatch):
    """Then nothing crosses over the others, either: few chunks might cross without it, and be announced with
    those that it lost. No chunk stays."""
    monkeypatch.setattr(board_module, "CHUNK", 100)
    packet, reader = torch.zeros(10_000, dtype=torch.uint8), Board(client_of(store))
    board = Board(client_of(store), further=[client_of(store), Cut()])
    with pytest.raises(RuntimeError, match="was cut"):
        board.put_packet(0, 0, 1, packet)
    board.await_answer()
    assert "not all of it is in the store" in refusal(reader.packet, 0, 0, 1)
    with pytest.raises(RuntimeError, match="was cut"):
        board.ship(2, 0, packet.split(100)[:1], Shipment(100, Position(0, "first"), 1))
    assert reader.shipment(2, 0) is None
    reader.delete_packet(0, 0, 1)
    assert not [key for key in store.list_keys() if "packet/0/1" in key]
    reader.put_packet(0, 0, 2, packet)
    board = Board(client_of(store), further=[client_of(store), Cut()])
    with pytest.raises(RuntimeError, match="was cut"):
        board.packet(0, 0, 2)


@pytest.mark.extended
def test_an_anchor_is_not_announced_after_a_part_of_it_failed(store, monkeypatch):
    """The next try counted what had failed as sent: a newcomer took older chunks for these."""
    monkeypatch.setattr(handover, "CHUNK", 4000)
    first, newcomer = Launch(store, connections=4), newcomer_to(store)
    chunks = first.slots[0]._board.chunks
    chunks._further[1] = Keys(Cut())
    for _ in range(3):
        with pytest.raises(RuntimeError, match="was cut"):
            first.slots[0].idle()
    assert newcomer.slots[0]._board.shipment(newcomer.number, 0) is None
    chunks._failure, chunks._further = None, []  # a new launch begins again
    newcomer.take_anchor(first)
    assert_alike([first, newcomer])


def test_who_moves_chunks_tends_and_gives_up_a_silent_connection(store, monkeypatch):
    """One connection of several that is silent kept a newcomer waiting for ever. Moves that are asked for
    meanwhile go over the connection that is free."""
    monkeypatch.setattr(board_module, "CHUNK", 100)
    monkeypatch.setattr(chunks, "SILENCE_S", 0.5)
    monkeypatch.setattr(chunks, "END_S", 0.1)
    answers, tended = threading.Event(), []

    class Silent(Lazy):
        def set(self, *entry):
            answers.wait()

    def tend():
        if not tended:
            tended.append("")
            board.ship(2, 0, packet.split(100)[:2], Shipment(200, Position(0, "first"), 2))

    packet = torch.zeros(1000, dtype=torch.uint8)
    board = Board(client_of(store), tend, [Silent(store)])
    assert "is silent" in refusal(board.put_packet, 0, 0, 1, packet)
    board.await_answer()
    assert Board(client_of(store)).shipment(2, 0).sent == 2
    with pytest.raises(RuntimeError, match="is silent"):
        board.put_packet(1, 0, 1, packet)
    answers.set()


def test_a_slot_waits_as_long_as_another_one_makes_progress(store, clock):
    """What is awaited comes after 1,500 s; later nothing moves, and 360 s are the limit."""
    waiting, moving = Launch(store).slots
    looks = []

    def ready():
        clock.now += 150.0
        looks.append("")
        moving._board.chunks.moved += len(looks) % 3 == 0 and len(looks) < 10
        moving.tend()
        return looks if len(looks) == 10 else None

    assert waiting._wait(ready, "a packet") is looks
    assert "a packet did not come within 360 s" in refusal(waiting._wait, ready, "a packet")
    assert len(looks) < 20


def test_what_moved_before_a_wait_does_not_make_it_longer(store, clock):
    """A newcomer whose giver was killed waited twice the limit: the signs of parts that had come before."""
    waiting = Launch(store).slots[0]
    waiting._board.chunks.moved, began = 7, clock.now

    def ready():
        clock.now += 100.0

    assert "a part did not come within 360 s" in refusal(waiting._wait, ready, "a part")
    assert clock.now - began <= 600


def test_one_that_lives_and_does_not_vote_is_waited_for_as_long_as_a_transfer_takes(store, clock):
    launch = Launch(store, grace_s=1.0)
    board, began = launch.slots[0]._board, clock.now
    outcome = launch.slots[0]._vote_counter(0, [1, 2])
    board.vote(0, 1, [2])
    while clock.now - began < rounds_module.TRANSFER_S:
        board.say_alive(0, 2)
        assert outcome() is None
        clock.now += 5.0
    assert members_of(outcome()) == (1,)


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_anchor_that_makes_progress_is_not_given_up(store, is_lost, clock, monkeypatch):
    """What took longer than `grace_s` and 300 s was given up, asked for again, and sent again from the start.
    Now the time without progress is limited; if there is none, little was sent in vain."""
    monkeypatch.setattr(handover, "CHUNK", 4000)
    monkeypatch.setattr(handover, "LOOK_S", 0.0)
    first, newcomer = Launch(store), Launch(store, digest="another")
    begun, ships = clock.now, []

    def takes_time(*args):
        ships.append(clock.now)
        # even if all parts of the other slot come first, this one makes progress in time
        clock.now += 8.0

    for rounds in first.slots:
        rounds._board.ship = wrapped(rounds._board.ship, before=takes_time)
    if is_lost:
        sent = handover.AnchorReceiver._sent

        def loses_slot_1(self, taken):
            return sent(self, taken) if self._slot == 0 else None

        monkeypatch.setattr(handover.AnchorReceiver, "_sent", loses_slot_1)
    newcomer.wait_for_anchor()
    hand_over_until(first, newcomer.slots[0]._launch.count_caught_up)
    chunks = 2 * 4 * NUMEL // 4000  # of a slot
    if not is_lost:
        newcomer.take_anchor(first)
        assert len(ships) == SLOTS * chunks and clock.now - begun > 360
        assert_alike([first, newcomer])
        return
    while not newcomer.waits[1].done():
        clock.now += 400.0
        hand_over_until(first, lambda: True)
    assert "did not come within 360 s" in str(newcomer.waits[1].exception())
    assert len(ships) == chunks + WINDOW
    for _ in range(20):
        play([first], [0.1])
    assert not [key for key in store.list_keys() if "/anchor/" in key]


@pytest.mark.extended
def test_many_joins_leave_neither_keys_nor_calls(store, monkeypatch):
    """After 1,000 joins a round had 1,020 calls of the store, and small keys were never deleted."""
    first, second = Launch(store), Launch(store)
    board = first.slots[0]._board
    board._store = mock.Mock(wraps=board._store)

    def calls_and_keys():
        """Of a round, after some others. Replicas that wait call more often, so the fewest of some count."""
        calls = []
        for _ in range(25):
            board._store.reset_mock()
            play([first, second], (0.1, 0.1))
            calls.append(len(board._store.mock_calls))
        return min(calls[20:]), len(store.list_keys())

    calls, keys = calls_and_keys()
    for _ in range(10):
        newcomer = newcomer_to(store)
        newcomer.take_anchor(first)
        play([first, second, newcomer], (0.1, 0.1, 0.1))
        play_without_others([first, second], (0.1, 0.1))  # it is killed
    for number in range(1000, 1100):  # these died while they waited
        board.ask_for_anchor(number)
    hand_over_until(first, lambda: not board.newcomers())
    after = calls_and_keys()
    assert after[0] <= calls + 10 and after[1] <= keys + 10


def test_a_replica_whose_other_slot_came_after_the_outcome_goes_on(store):
    """Slot 1 saw the outcome of others and checked no packets; slot 0 waited five minutes for its check."""
    late, first = Launch(store), Launch(store, announces=False)
    late.slots[0]._limit = 1.0
    first.slots[0]._board.decide_outcome(0, [2])
    late.slots[0]._conclude(0, [1, 2])
    assert members_of(first.slots[0]._board.outcome(0)) == (2,)


def test_a_newcomer_goes_on_alone_if_all_others_are_gone(store, monkeypatch):
    monkeypatch.setattr(handover, "ABANDONED_S", 0.2)
    play([Launch(store)], [0.1])
    newcomer = Launch(store, digest="another", grace_s=0.3)  # the other one was announced
    found = [future.result(PATIENCE) for future in newcomer.catch_up()]
    assert [anchor for anchor, _ in found] == [None, None]
    assert newcomer.slots[0]._board.newcomers() == {}
    newcomer.position = found[0][1]
    ((result, _),) = play([newcomer], [0.1])
    assert result.members == (newcomer.number,)


def test_of_newcomers_whose_others_are_gone_one_goes_on_and_hands_over_to_the_rest(store, clock):
    """All had been killed, and came back at once from checkpoints of other ages: each went on alone, with
    another anchor in the same round."""
    play([Launch(store)], [0.1])
    newcomers = [Launch(store, digest=digest) for digest in ("early", "late")]
    firsts = [each.slots[0] for each in newcomers]
    looks = [
        handover.AnchorReceiver(each._board, each._launch, each.number, 0, SLOTS, each._wait)._watch(digest)
        for each, digest in zip(firsts, ("early", "late"))
    ]
    assert [look() for look in looks] == [None, None]
    clock.now += handover.ABANDONED_S + 1
    for look in looks:  # the second one before the first one has given a sign of life
        look()
    assert [each._launch.alone() for each in firsts] == [1, None]
    assert firsts[0]._board.head() == Position(1, "early")


def test_a_newcomer_that_has_died_is_forgotten_when_its_anchor_is_deleted(store):
    """One that was killed between both left up to 32 MiB for each rank, of which nobody knew."""
    launch, second = Launch(store), Launch(store)
    board = Board(store)
    board.ask_for_anchor(7)
    board.give_anchor(7, -KEPT_ROUNDS, 8)
    for slot in range(SLOTS):
        board.ship(7, slot, [torch.zeros(8, dtype=torch.uint8)], Shipment(2, launch.position, 1))
    for each in (launch, second):  # as after a round
        each.slots[0]._kept_rounds = KEPT_ROUNDS
    launch.slots[0]._board.end_shipment = mock.Mock(side_effect=RuntimeError("killed here"))
    with pytest.raises(RuntimeError, match="killed here"):
        launch.slots[0].idle()
    second.slots[0].idle()
    assert board.newcomers() == {} and not [key for key in store.list_keys() if "/anchor/" in key]


def test_all_slots_of_a_newcomer_have_the_anchor_of_others_or_its_own(store, clock):
    """Rank 0 of the replica that handed over was gone: the newcomer's rank 1 had the weights of the others,
    and its rank 0 went on with its own."""
    first, newcomer = Launch(store), newcomer_to(store)
    first.slots[0]._board.give_anchor(newcomer.number, 0, first.number)
    let_time_pass(clock, newcomer, first.slots[1].idle)
    assert {future.result() for future in newcomer.waits} == {(None, Position(0, "own"))}
    while first.slots[1]._sender._uploads:
        clock.now += 5.0
        first.slots[1].idle()
    assert not [key for key in store.list_keys() if "/anchor/" in key]


def test_a_newcomer_of_which_a_slot_lacks_its_part_hands_nothing_over(store, clock):
    """Rank 0 of each newcomer had the anchor, and gave it to the next one; nobody had the part of rank 1.
    They waited 330 s, asked again, and got it from each other, for ever."""
    first, newcomer = Launch(store), newcomer_to(store)
    while not newcomer.slots[0]._launch.count_caught_up():
        clock.now += handover.LOOK_S
        first.slots[0].idle()
    let_time_pass(clock, newcomer)
    assert all("did not come within 360 s" in refusal(future.result) for future in newcomer.waits)
    assert not newcomer.slots[0]._sender.has_anchor


def test_an_anchor_that_is_deleted_as_it_comes_fails_like_a_store(store):
    """It was looked for, then read: an AssertionError ended training if it had been deleted in between."""
    board = Launch(store).slots[0]._board
    board.ship(2, 0, [torch.zeros(8, dtype=torch.uint8)], Shipment(2, Position(0, "first"), 1))

    def wait(ready, what):
        found = ready()
        board.end_shipment(2, 0)
        if found is None:
            raise CompressionError(what)
        return found

    launch = Launch(store).slots[0]._launch
    take = handover.AnchorReceiver(board, launch, 2, 0, SLOTS, wait)._take
    assert refusal(take, 2, "own") == "part 0 of an anchor"


@pytest.mark.parametrize("harm", ["a byte", "no packet"])
def test_a_bad_packet_leaves_out_its_replica_on_all_slots(store, harm, caplog):
    """The second slot's packet alone is bad; both slots have to leave the replica out."""
    good, bad = (Launch(store, lr=1.0, momentum=0.0) for _ in range(2))
    start, put = good.anchors, bad.slots[1]._board.put_packet

    def harmful(number, slot, replica, packet):
        packet[5000] ^= 1
        return put(number, slot, replica, packet) if harm == "a byte" else ""

    bad.slots[1]._board.put_packet = harmful
    results = play([good, bad], [0.1, 0.4])
    assert all(result.members == (1,) for own in results for result in own)
    assert not results[1][0].is_member
    assert_alike([good, bad])
    assert moved(good, start) == pytest.approx(0.1, abs=0.01)
    assert any("round 0: replica 2 is left out: " in record.getMessage() for record in caplog.records)


def test_a_replica_that_ends_while_it_reads_packets_has_no_vote(store, monkeypatch, caplog):
    """A site was done with training while packets still came: it voted that those of the other one cannot be
    read, so they did not count."""
    monkeypatch.setattr(rounds_module, "BEAT_S", 0.1)
    ending, other = (Launch(store, lr=1.0, momentum=0.0, grace_s=2.0) for _ in range(2))
    first = ending.slots[0]

    def end(*_):
        eventually(lambda: first._launch.checked(1, 0) is not None)
        first.ended.set()

    first._board.packet = wrapped(first._board.packet, before=end)
    own, _ = ending.start(0.1)
    ((result, _),) = play([other], [0.4])
    assert "has ended" in str(own.exception(PATIENCE))
    assert result.members == (ending.number, other.number)
    assert not any("is left out" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("healthy", [1, 2])
@pytest.mark.extended
def test_a_packet_that_is_damaged_on_its_way_does_not_count_if_its_sender_is_the_quickest(store, healthy):
    """The sender has its packet at hand, and sees no damage. When it decided first, the healthy replicas
    could not follow: they left, and took its anchor."""
    damaged, *others = (Launch(store, lr=1.0, momentum=0.0) for _ in range(1 + healthy))
    start = damaged.anchors

    write = damaged.slots[1]._board._set

    def harmful(key, value):
        is_chunk = "/packet/" in key and key.endswith("/0")
        write(key, value[:500] + bytes([value[500] ^ 1]) + value[501:] if is_chunk else value)

    damaged.slots[1]._board._set = harmful
    has_voted = threading.Event()
    board = damaged.slots[0]._board
    board.vote = wrapped(board.vote, after=lambda *_: has_voted.set())
    for slot in [other.slots[0] for other in others]:
        slot._conclude = wrapped(slot._conclude, before=lambda *_: has_voted.wait(PATIENCE))
    launches, numbers = [*others, damaged], tuple(other.number for other in others)
    for _ in range(2):
        results = play(launches, [0.1] * healthy + [0.4])
        assert {result.members for own in results for result in own} == {numbers}
    assert_alike(launches)
    assert moved(others[0], start) == pytest.approx(0.2, abs=0.01)


def test_replicas_with_codecs_of_their_own_have_the_same_anchor(store):
    """One is behind a slow link and sends few bits, one sends all, and a newcomer has what it likes."""
    codecs = {"name": "topk", "density": 0.02}, "none", QUANTIZE
    launches = [Launch(store, codec=codec, lr=1.0, momentum=0.0) for codec in codecs]
    start = launches[0].anchors
    for _ in range(30):
        for result, _ in play(launches, [0.1, 0.2, 0.3]):
            assert result.members == (1, 2, 3)
        assert_alike(launches)
    # whose own packets are small keeps no more rounds: those of the others fill the store, too
    assert {slot._kept_rounds for launch in launches for slot in launch.slots} == {KEPT_ROUNDS}
    late = 0.02 * sum(0.1 * number for number in range(1, 31))  # 2 % of the entries, and all they missed
    assert moved(launches[0], start) == pytest.approx((late + 30 * (0.2 + 0.3)) / 3, rel=0.01)


def test_rounds_of_too_few_leave_the_anchor_and_keep_no_more_for_a_newcomer(store):
    """Nothing was summed, so all was kept: the store grew with every round. And before the first round with
    members only who had sent a packet deleted it, and nobody the other keys of a round."""
    launch = Launch(store, quorum=2, grace_s=0.01)
    launch.slots[1]._board.put_packet(0, 1, 77, torch.zeros(4, dtype=torch.uint8))  # of one that is killed
    start = launch.anchors
    Launch(store, digest="other").catch_up()
    eventually(lambda: launch.slots[0]._board.newcomers())
    for _ in range(2 * KEPT_ROUNDS):
        ((result, _),) = play([launch], [0.1])
        assert result.members == () and not result.is_member
        assert {slot._kept_rounds for slot in launch.slots} == {KEPT_ROUNDS}
    assert torch.equal(launch.anchors[0].values, start[0].values)
    assert launch.position.round == 2 * KEPT_ROUNDS
    assert not [key for key in store.list_keys() if key.startswith(f"{PREFIX}0/")]
    own = launch.slots[0]._launch
    assert own._read("sent/1") is None and own.exchange(2 * KEPT_ROUNDS) == launch.position.round - 1
    assert own.exchange(1) is own.checked(1, 0) is None, "what slots said of rounds before"


def test_a_replica_that_cannot_read_the_packets_of_most_does_not_decide(store):
    """It leaves for a new anchor; the others go on."""
    deaf, *others = (Launch(store, lr=1.0, momentum=0.0) for _ in range(3))
    start = deaf.anchors
    deaf.slots[1]._board.packet = mock.Mock(side_effect=CompressionError("it was damaged on its way"))
    own, *futures = [launch.start(0.1) for launch in (deaf, *others)]
    for launch, future in zip(others, futures):
        assert launch.finish(future)[0].members == (1, 2, 3)
    assert "a new anchor is needed" in str(own[1].exception(PATIENCE))
    assert_alike(others)
    assert moved(others[0], start) == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(("key", "value"), [("ds_compress.replicas.every", 50), ("ds_compress", "0.1")])
def test_other_settings_are_refused_and_the_others_go_on(store, key, value):
    launch = Launch(store)
    other = Rounds(store, HashStore(), 0, SLOTS, OuterOptions())
    said = refusal(other.join, {**SETTINGS, key: value}, Position(0, "first"))
    line = f"{key}: the other replicas have {SETTINGS[key]!r}, this one has {value!r}; use the same in"
    assert said.startswith(line)
    ((result, _),) = play([launch], [0.1])
    assert result.members == (1,)


def test_a_replica_that_claims_a_later_round_or_another_number_harms_nobody(store, monkeypatch):
    """Strangers, or a replica of another step, write packets and names where they do not belong."""
    monkeypatch.setattr(rounds_module, "BEAT_S", 0.1)
    good = Launch(store, grace_s=0.1)
    codec = good.codecs[0]
    for round_number, replica in ((1, 1), (0, 77)):
        content = codec.encode(torch.ones(NUMEL), round_number + 5, replica).numpy().tobytes()
        store.set(f"{PREFIX}{round_number}/packet/0/{replica}/0", content)
        store.set(f"{PREFIX}{round_number}/packet/0/{replica}", f'[{len(content)}, "00"]')
    codec.restore({})
    store.append(f"{PREFIX}0/came", "77,-1,x,")
    for _ in range(3):
        ((result, _),) = play([good], [0.1])
        assert result.members == (1,) and result.is_member


def test_no_rank_downloads_its_own_packet(store):
    launches = [Launch(store) for _ in range(2)]
    boards = [rounds._board for launch in launches for rounds in launch.slots]
    for board in boards:
        board.packet = mock.Mock(wraps=board.packet)
    play(launches, (0.1, 0.1))
    fetched = [[call.args for call in board.packet.call_args_list] for board in boards]
    assert fetched == [[(0, 0, 2)], [(0, 1, 2)], [(0, 0, 1)], [(0, 1, 1)]]


ROUND_KEYS = [f"0/{key}" for key in ("outcome", "candidates", "came", "votes")]
VALUES = {
    "nothing": "",
    "cut": "{",
    "list": "[1]",
    "text": '"x"',
    "bytes": b"\xff",
    "large": "9" * 5000,
    "nested": "[[1]]",
}


@pytest.mark.extended(keep=4)
@pytest.mark.parametrize("key", ["head", "settings", "newcomers", "kept/0", *ROUND_KEYS])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_garbage_of_strangers_ends_a_turn_with_an_error_or_not_at_all(store, key, value, monkeypatch):
    monkeypatch.setattr(rounds_module, "TRANSFER_S", 0.5)
    launch = Launch(store, grace_s=0.3)
    store.set(f"{PREFIX}{key}", value)
    try:
        play([launch], [0.1])
    except CompressionError as error:
        assert "\n" not in str(error)


def test_one_that_is_far_behind_needs_another_anchor(store):
    first, late = Launch(store), Launch(store, announces=False)
    for _ in range(6):
        play([first], [0.1])
    assert "a new anchor is needed" in refusal(play, [late], [0.1])


@pytest.mark.parametrize("where", ["put_packet", "candidates", "packet"])
def test_one_that_was_stopped_in_a_round_of_long_ago_leaves_at_once(store, where, monkeypatch):
    """The others had deleted the round. It waited eleven minutes for their decisions, or decided the round
    again, alone, and its packet stayed in the store for ever."""
    monkeypatch.setattr(rounds_module, "BEAT_S", 0.1)
    first, stopped = Launch(store), Launch(store)
    play([first, stopped], [0.1, 0.1])
    has_stopped, goes_on = threading.Event(), threading.Event()

    def stop(*_):
        has_stopped.set()
        goes_on.wait(PATIENCE)

    for slot in stopped.slots:
        setattr(slot._board, where, wrapped(getattr(slot._board, where), before=stop))
    futures = stopped.start(0.1)
    own = first.start(0.1) if where == "packet" else []
    has_stopped.wait(PATIENCE)
    if own:
        first.slots[0]._board.decide_outcome(1, [first.number])
        first.finish(own)
    for _ in range(1 + KEPT_ROUNDS):
        play_without_others([first], [0.1])
    goes_on.set()
    for future in futures:
        assert "round 1 was long ago; a new anchor is needed" in str(future.exception(PATIENCE))
    monkeypatch.setattr(rounds_module, "BEAT_S", 0.0)
    for slot in stopped.slots:
        slot.idle()  # as its thread does until training looks at the result
    assert not [key for key in store.list_keys() if key.startswith(f"{PREFIX}1/")]


def test_a_round_that_one_that_was_stopped_decides_again_changes_no_anchor(store):
    """It had looked for the outcome, was stopped, and wrote one when the round was deleted. A rank that read
    it had another anchor from then on than the other ranks of its launch, which had read the first one."""
    first, late = Launch(store), Launch(store, announces=False)
    for _ in range(1 + KEPT_ROUNDS):
        play([first], [0.1])
    late.slots[0]._board.decide_outcome(0, [])
    for slot in late.slots:
        slot._open_round = lambda *_: 0  # which was open
    for future in late.start(0.1):
        assert "round 0 was long ago; a new anchor is needed" in str(future.exception(PATIENCE))
    assert not [key for key in store.list_keys() if key.startswith(f"{PREFIX}0/packet")]


def test_a_packet_that_comes_as_its_round_is_deleted_is_deleted(store):
    """Who deleted the round had read who sends packets before this one was named: it stayed for ever."""
    first, late = Launch(store), Launch(store, announces=False)
    for _ in range(KEPT_ROUNDS):
        play([first], [0.1])
    for number, slot in enumerate(late.slots):
        slot._open_round = lambda *_: 0
        delete = functools.partial(slot._board._delete, f"0/senders/{number}")
        slot._board.put_packet = wrapped(slot._board.put_packet, after=lambda *_, delete=delete: delete())
    assert not late.finish(late.start(0.1))[0].is_member
    assert not [key for key in store.list_keys() if key.endswith(f"/{late.number}")]


def test_who_reads_a_key_that_another_replica_deletes_goes_on(store):
    """It had looked whether the key is there, and `get` then waited five minutes for one that was gone."""
    reader, other = Board(client_of(store)), Board(client_of(store))
    reader._store.set_timeout(timedelta(seconds=20))
    with ThreadPoolExecutor(1) as pool:
        for number in range(100):
            other.come(number, 1)
            deleted = pool.submit(other._delete, f"{number}/came")
            while reader.came(number):
                pass
            assert deleted.result(PATIENCE)
    assert reader.candidates(0) is None and not store.list_keys(), "a look writes nothing"


def test_a_packet_under_way_as_another_slot_deletes_the_round_is_deleted(store):
    """Who sent it was forgotten by then: it stayed in the store for ever, when both happened at once."""
    first, late = Launch(store), Launch(store, announces=False)
    for _ in range(2 + KEPT_ROUNDS):
        play([first], [0.1])
    slot = late.slots[0]
    slot._board.put_packet(0, 0, late.number, torch.zeros(9, dtype=torch.uint8))
    slot._board._delete("0/senders/0")  # as slot 1 does
    assert "round 0 was long ago" in refusal(slot._is_open, 0)
    assert not [key for key in store.list_keys() if key.startswith(f"{PREFIX}0/")]


def test_replicas_that_went_on_in_different_stores_differ(store):
    """A store was lost, and soon the next one: each of two sites was alone in a round, with number 1. The
    outcomes had the same text, so both were taken to have the same anchor, which differed from then on."""
    stores = [store, TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    one, other = [Launch(each) for each in stores]
    play([one], [0.1])
    play([other], [0.4])
    assert one.number == other.number and one.position.round == other.position.round
    assert other.slots[0].join(SETTINGS, one.position).is_newcomer


def test_one_that_died_before_its_vote_is_waited_for_once(store, clock):
    """Two sites: the other one waited for the vote of the one that was killed, and in the next round for its
    packet, too."""
    launch = Launch(store, grace_s=30.0)
    first = launch.slots[0]
    outcome = first._vote_counter(0, [1, 2])
    first._board.vote(0, 1, [])
    assert outcome() is None
    clock.now += 36.0
    assert members_of(outcome()) == (1, 2)
    first._board.announce(1, 1)
    first._board.come(1, 1)
    first._wait = lambda ready, *_: ready()
    assert first._candidates(1) == [1]


def test_a_position_names_all_outcomes():
    one, other = Position(0, "a").after("x"), Position(0, "a").after("y")
    assert one.round == other.round == 1 and one != other and one.after("x") != other.after("x")


@contextlib.contextmanager
def serving(soft_limit=None, before=()):
    """The command; yield a connection to its store, and the process."""
    words = [*before, sys.executable, "-m", "ds_compress", "replica-store", "--port", "0"]
    words = ["bash", "-c", f'ulimit -S -n {soft_limit}; exec "$@"', "bash", *words] if soft_limit else words
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline().split("port ")[1].split(";")[0])
        yield TCPStore("127.0.0.1", port, is_master=False), process
        assert process.poll() is None
        process.terminate()


@pytest.mark.extended
def test_strangers_at_the_port_leave_rounds_alone():
    """Bytes of all kinds, and more connections than the process may have open by default."""
    with serving(soft_limit=64) as (store, _), flood(store.port, 500):
        first = Launch(store)
        with disturbed(lambda: [store.port]):
            second = Launch(store)
            for _ in range(3):
                results = play([first, second], (0.1, 0.2))
                assert all(result.members == (1, 2) for own in results for result in own)
        assert_alike([first, second])


@pytest.mark.skipif(os.geteuid() != 0, reason="another name server needs root")
@pytest.mark.extended
def test_strangers_make_the_store_ask_no_name_server(tmp_path):
    """Where no name server answers, each connection stopped the store, and all sites, for 5 s: random bytes
    for 10 s, or 2,000 open connections, stalled a step by 16 s, and 28 rounds took place where 265 were due.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as names:
        names.bind(("127.0.0.53", 53))
        (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.53\n")
        mount = f'mount --bind {tmp_path}/resolv.conf /etc/resolv.conf && exec "$@"'
        with serving(before=["unshare", "--mount", "sh", "-c", mount, "sh"]) as (store, _):
            for _ in range(3):
                disturb([store.port])
            store.set("key", "value")
            assert store.get("key") == b"value"
        names.setblocking(False)
        with pytest.raises(BlockingIOError):  # the server has received nothing
            names.recv(1)


def test_a_port_that_says_nothing_is_no_store():
    """Launches would wait for ever: torch sets no limit for the first answer. A thread that waited for it as
    the interpreter ended aborted the process: "terminate called without an active exception"."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(5)
        with pytest.raises(RuntimeError, match="does not answer; is it `ds-compress replica-store`?"):
            connect(f"127.0.0.1:{silent.getsockname()[1]}", seconds=0.1)
        eventually(lambda: "ds_compress_connect" not in [each.name for each in threading.enumerate()])


def test_where_nothing_listens_it_is_said():
    """A launch before its store, or behind a firewall, was told that what listens there does not answer."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        with pytest.raises(
            RuntimeError, match="no `ds-compress replica-store` can be reached there: .*refused"
        ):
            connect(f"127.0.0.1:{reserved.getsockname()[1]}", seconds=0.1)


@pytest.mark.parametrize("name", ["no-such-host.invalid", "no..such", 70 * "a"])
def test_a_name_without_an_address(name):
    """A mistyped host was said to listen, and not to answer, after minutes."""
    with pytest.raises(RuntimeError, match=f"the name '{name}' has no address here: "):
        connect(f"{name}:29400")


@pytest.mark.parametrize("address", ["", "host", ":1", "host:0", "host:65536", "host:٣", "host:1:x"])
def test_what_is_no_address_is_refused(address):
    assert "set it to HOST:PORT" in refusal(connect, address)


class CountingStore:
    """A store that counts the operations until the packet of a round is begun, one after the other."""

    def __init__(self, store):
        self._store, self.count, self.at_packet = store, 0, None

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def call(*args):
            if name == "append" and "/senders/" in args[0]:
                self.at_packet = self.count
            self.count += 1
            return method(*args)

        return call


@pytest.mark.parametrize("sites", [2, 6])
def test_no_site_is_late_as_it_deletes_the_packets_of_all(store, monkeypatch, sites):
    """One site deleted old packets before it sent its own, in 6 + 5 operations for each site, if a packet has
    three chunks, and all others waited for it."""
    monkeypatch.setattr(board_module, "CHUNK", 7000)
    monkeypatch.setattr(sys.modules[__name__], "client_of", lambda of, own=client_of: CountingStore(own(of)))
    launches = [Launch(store) for _ in range(sites)]
    for _ in range(KEPT_ROUNDS + 2):
        clients = [launch.slots[1]._board._store for launch in launches]
        for client in clients:
            client.count = 0
        play(launches, [0.1] * sites)
    assert max(client.at_packet for client in clients) <= 2
    assert Board(store).outcome(0) is None and not Board(store)._numbers("0/senders/1")
