"""Board: what replicas that are launched apart write for each other into the store, one method a key.

    key               value                                                   written by
    settings          what all replicas must have                             the first replica
    head              first undecided round, digest of the anchor             slot 0 of any replica
    numbers, beat     replicas so far; signs of life so far                   slot 0 of each
    newcomers         those that wait for an anchor; with a round and a       slot 0 of a newcomer, and of the
                      replica: those that get one of this round from it       replica that hands it over
    kept/S            first round of which slot S may have something here     slot S of any member

    K/announced       replicas that will take part in round K                 slot 0 of each
    K/senders/S       replicas that send a packet of slot S                   slot S of each
    K/packet/S/R      size and digest of that packet, no digest before it     slot S of replica R
                      is there
    K/packet/S/R/...  its chunks, by the byte they begin with                 the same
    K/came            replicas all of whose packets are there                 the rank that was last
    K/candidates      decided once: those that came in time                   slot 0 of any replica
    K/votes           candidates, each with those whose packets it cannot     slot 0 of each
                      read
    K/alive           candidates that have not voted, again and again         slot 0 of each
    K/outcome         decided once: the members of round K, and a random      slot 0 of any replica
                      number

    anchor/R/S        size and position of an anchor for newcomer R, and      slot S of the replica that hands
                      how many of its chunks were sent                        it over
    anchor/R/S/J      the chunks whose number modulo `WINDOW` is J, each      the same
                      with the digest of position, number and bytes
    anchor/R/S/taken  how many chunks the newcomer has taken; -1: it takes    slot S of newcomer R
                      no more

What is decided once is written with compare_set. Keys of a round are deleted after some rounds, those of a
newcomer when it has its anchor: the store does not grow with the number of rounds or newcomers. What ranks of
one launch write for each other crosses the store of that launch:

    exchange          number of an exchange, its round                        slot 0
    sent/N            slots that have sent their packet in exchange N         each slot
    checked/S         a round, and why packets of slot S are bad              slot S
    alone             round in which this newcomer goes on with its own       slot 0
                      anchor; -1: it takes another one's
    caught_up         slots of this newcomer that have their part so far      each slot
    moved             signs of progress                                       each slot
    failed            which slot failed first, and why                        each slot
"""

import functools
import hashlib
import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from ds_compress.config.block import MOST_CONNECTIONS
from ds_compress.errors import CompressionError, shown
from ds_compress.sites.chunks import ChunkMover
from ds_compress.sites.store_keys import PREFIX, Keys

CHUNK = 4 << 20
"""Bytes of a value; a TCPStore takes 8 MiB at most."""

WINDOW = 8
"""Chunks of an anchor that are in the store at once."""

LARGEST = 2**40
"""Bytes; every packet has fewer."""

KEPT_ROUNDS = 3
"""Rounds for which packets stay in the store; a replica that is further behind needs an anchor."""

DIGEST = 16
"""Bytes of a digest."""


Found = TypeVar("Found")

Newcomers = dict[int, tuple[int, int] | None]


class Position(NamedTuple):
    """What a replica knows of the rounds."""

    round: int  # the first one that it has not applied
    digest: str  # of its anchor

    def after(self, outcome: str) -> "Position":
        text = f"{self.digest}/{self.round}/{outcome}"
        return Position(self.round + 1, digest_of(text.encode()).hex())


class Shipment(NamedTuple):
    """An anchor on its way to a newcomer."""

    numel: int  # of the slot's weights
    position: Position
    sent: int  # chunks


class Board(Keys):
    """What replicas write for each other; see the table above. K is `number`, R `replica`, S `slot`."""

    def __init__(self, store: Any, tend: Callable[[], Any] = lambda: None, further: Sequence[Any] = ()):
        """
        Args:
            tend: called between two chunks of a packet, or an anchor, and while they are on their way.
            further: connections to the same store, over which chunks cross side by side.
        """
        super().__init__(store)
        self.chunks = ChunkMover(self, [Keys(each) for each in further], tend)

    def settings(self, own: str = "{}") -> dict[str, Any]:
        return parse(self._decide("settings", own), dict)

    def head(self, own: Position | None = None) -> Position:
        return parse(self._decide("head", json.dumps(own)) if own else self._read("head") or "", Position)

    def move_head(self, before: Position, after: Position) -> None:
        """
        Raises:
            CompressionError: another replica has moved it elsewhere.
        """
        new = json.dumps(after)
        found = self._decide("head", new, json.dumps(before))
        if found != new and parse(found, Position).round <= after.round:
            raise CompressionError("another replica has gone on with another anchor")

    def leads_to(self, position: Position, head: Position) -> bool:
        """Return whether the rounds since `position` lead to `head`, and their outcomes are there."""
        while position.round < head.round and (outcome := self.outcome(position.round)) is not None:
            position = position.after(outcome)
        return position == head

    def new_number(self) -> int:
        return self._store.add(f"{PREFIX}numbers", 1)

    def beat(self) -> None:
        self._store.add(f"{PREFIX}beat", 1)

    def beats(self) -> str:
        return self._read("beat") or "0"

    def newcomers(self) -> Newcomers:
        """Return who waits for an anchor (None), or gets one: its round, and which replica sends it."""
        return _newcomers(self._read("newcomers") or "")

    def ask_for_anchor(self, newcomer: int) -> None:
        self._change_newcomers(lambda found: {**found, newcomer: None})

    def give_anchor(self, newcomer: int, number: int, replica: int) -> None:
        """Let a newcomer have the anchor of round `number` from a replica, if it waits still."""
        given = number, replica
        self._change_newcomers(
            lambda found: {**found, newcomer: given} if found.get(newcomer, given) is None else found
        )

    def forget_newcomer(self, newcomer: int) -> None:
        self._change_newcomers(
            lambda found: {each: given for each, given in found.items() if each != newcomer}
        )

    def _change_newcomers(self, change: Callable[[Newcomers], Newcomers]) -> None:
        """Let the key have what `change` makes of it, whoever else changes it at the same time."""
        text = self._read("newcomers") or ""
        while (wanted := json.dumps(change(_newcomers(text)))) != text:
            if "\ufffd" in text:  # bytes of a stranger that are no text: nothing would equal them
                self._delete("newcomers")
                text = ""
            text = self._decide("newcomers", wanted, text)

    # A round

    def announce(self, number: int, replica: int) -> None:
        self._append(f"{number}/announced", replica)

    def announced(self, number: int) -> list[int]:
        return self._numbers(f"{number}/announced")

    def put_packet(self, number: int, slot: int, replica: int, packet: Tensor) -> str:
        """Store a packet, uint8; return its digest."""
        self._append(f"{number}/senders/{slot}", replica)
        key, content = f"{number}/packet/{slot}/{replica}", packet.numpy().tobytes()
        self._set(key, json.dumps([len(content), ""]))  # for who deletes it, if this replica dies here

        def put(start: int, keys: Keys) -> None:
            keys._set(f"{key}/{start}", content[start : start + CHUNK])

        self.chunks.move([functools.partial(put, start) for start in range(0, len(content), CHUNK)])
        digest = digest_of(content).hex()
        self._set(key, json.dumps([len(content), digest]))
        self.await_answer()  # what another slot says may come sooner
        return digest

    def packet_digest(self, number: int, slot: int, replica: int) -> str:
        """Return the digest of a packet that is there, of `put_packet`."""
        return self._packet_entry(number, slot, replica)[1]

    def packet(self, number: int, slot: int, replica: int) -> Tensor:
        """
        Raises:
            CompressionError: it is not there, or damaged.
        """
        nbytes, digest = self._packet_entry(number, slot, replica)
        parts, starts = dict[int, bytes](), range(0, nbytes, CHUNK)

        def get(start: int, keys: Keys) -> None:
            part = keys._read_bytes(f"{number}/packet/{slot}/{replica}/{start}")
            if part is None:
                raise CompressionError("a part of it is not in the store")
            parts[start] = part

        self.chunks.move([functools.partial(get, start) for start in starts])
        content = bytearray()
        for start in starts:
            content += parts.pop(start)
        if len(content) != nbytes or digest_of(content).hex() != digest:
            raise CompressionError("it was damaged on its way")
        return torch.frombuffer(content, dtype=torch.uint8)

    def _packet_entry(self, number: int, slot: int, replica: int) -> tuple[int, str]:
        nbytes, digest = _parse_entry(self._read(f"{number}/packet/{slot}/{replica}"))
        if not digest:
            raise CompressionError("not all of it is in the store")
        return nbytes, digest

    def delete_packet(self, number: int, slot: int, replica: int) -> None:
        key, lacking = f"{number}/packet/{slot}/{replica}", 0
        if (text := self._read(key)) is None:
            return
        try:
            nbytes, _ = _parse_entry(text)
        except CompressionError:  # a stranger wrote it
            nbytes = LARGEST
        for start in range(0, nbytes, CHUNK):
            lacking = 0 if self._delete(f"{key}/{start}") else lacking + 1
            if lacking > MOST_CONNECTIONS:  # so many may have been under way when its sender died
                break
        self._delete(key)

    def come(self, number: int, replica: int) -> None:
        self._append(f"{number}/came", replica)

    def came(self, number: int) -> list[int]:
        return self._numbers(f"{number}/came")

    def candidates(self, number: int) -> list[int] | None:
        text = self._read(f"{number}/candidates")
        return None if text is None else parse(text, list[int])

    def decide_candidates(self, number: int, candidates: list[int]) -> list[int]:
        return parse(self._decide(f"{number}/candidates", json.dumps(candidates)), list[int])

    def vote(self, number: int, replica: int, bad: Sequence[int]) -> None:
        self._store.append(f"{PREFIX}{number}/votes", json.dumps([replica, *bad]) + "\n")

    def votes(self, number: int) -> dict[int, list[int]]:
        """Return whose packets a replica cannot read, by replica."""
        lines = (self._read(f"{number}/votes") or "").splitlines()
        found = [parse(line, list) for line in lines]
        return {vote[0]: vote[1:] for vote in found if vote and all(type(each) is int for each in vote)}

    def say_alive(self, number: int, replica: int) -> None:
        self._append(f"{number}/alive", replica)

    def alive(self, number: int) -> list[str]:
        """Return the replicas that gave signs of life in a round, once for each."""
        return (self._read(f"{number}/alive") or "").split(",")

    def outcome(self, number: int) -> str | None:
        return self._read(f"{number}/outcome")

    def decide_outcome(self, number: int, members: list[int]) -> str:
        # no other store, in which numbers begin again, may have an outcome of this text
        outcome = {"members": members, "unique": [secrets.randbits(60)]}
        return self._decide(f"{number}/outcome", json.dumps(outcome))

    def delete_rounds(self, slot: int, end: int) -> None:
        """Delete what is left of rounds before `end`: packets of this slot, whose senders may have died; slot
        0 deletes the rest, too. At most 8 rounds in one call."""
        kept = self._numbers(f"kept/{slot}")
        start = kept[0] if kept else end  # before the first call nothing is here
        end = min(end, start + 8)
        for number in range(start, end):
            self.delete_round(number, slot)
        if start < end or not kept:
            self._set(f"kept/{slot}", str(end))

    def delete_round(self, number: int, slot: int) -> None:
        """Delete the packets of this slot; slot 0 deletes the rest, too, its outcome last."""
        for replica in self._numbers(f"{number}/senders/{slot}"):
            self.delete_packet(number, slot, replica)
        names = ("announced", "came", "candidates", "votes", "alive", "outcome") if slot == 0 else ()
        for name in (f"senders/{slot}", *names):
            self._delete(f"{number}/{name}")

    # An anchor on its way to a newcomer

    def say_taken(self, newcomer: int, slot: int, chunks: int) -> None:
        self._set(f"anchor/{newcomer}/{slot}/taken", str(chunks))

    def taken(self, newcomer: int, slot: int) -> int | None:
        """Return how many chunks a newcomer has taken; None if it has deleted, or never written, the key."""
        text = self._read(f"anchor/{newcomer}/{slot}/taken")
        return None if text is None else parse(text, int)

    def ship(self, newcomer: int, slot: int, chunks: Sequence[Tensor], shipment: Shipment) -> None:
        """Store the next chunks, uint8, the last ones of `shipment`, and say that they are there."""

        def put(number: int, chunk: Tensor, keys: Keys) -> None:
            content = chunk.numpy().tobytes()
            data = _digest_of_chunk(shipment, number, content) + content
            keys._set(f"anchor/{newcomer}/{slot}/{number % WINDOW}", data)

        numbers = range(shipment.sent - len(chunks), shipment.sent)
        self.chunks.move([functools.partial(put, *each) for each in zip(numbers, chunks, strict=True)])
        self._set(f"anchor/{newcomer}/{slot}", json.dumps(shipment))

    def shipment(self, newcomer: int, slot: int) -> Shipment | None:
        text = self._read(f"anchor/{newcomer}/{slot}")
        return None if text is None else parse(text, Shipment)

    def take(
        self, newcomer: int, slot: int, chunks: Sequence[Tensor], first: int, shipment: Shipment
    ) -> None:
        """Fill `chunks`, uint8, with those from number `first` on, which are there.

        Raises:
            CompressionError: one is damaged, or has another size.
        """

        def get(number: int, chunk: Tensor, keys: Keys) -> None:
            data = keys._read_bytes(f"anchor/{newcomer}/{slot}/{number % WINDOW}") or b""
            digest, content = data[:DIGEST], memoryview(data)[DIGEST:]
            if _digest_of_chunk(shipment, number, content) != digest:
                raise CompressionError("the anchor of another replica was damaged on its way")
            if len(content) != chunk.numel():
                expected = f"expected {chunk.numel()}"
                raise CompressionError(f"part {number} of an anchor has {len(content)} bytes, {expected}")
            chunk.numpy()[:] = content

        self.chunks.move([functools.partial(get, *each) for each in enumerate(chunks, first)])

    def end_shipment(self, newcomer: int, slot: int) -> None:
        """Delete what is there of an anchor for a newcomer; without `taken` the rest is taken to be gone."""
        key = f"anchor/{newcomer}/{slot}"
        for each in (*(f"{key}/{number}" for number in range(WINDOW)), key, f"{key}/taken"):
            self._delete(each)


class LaunchBoard(Keys):
    """What ranks of one launch write for each other; see the second table."""

    def set_exchange(self, exchange: int, number: int) -> None:
        self._set("exchange", json.dumps([exchange, number]))

    def exchange(self, exchange: int) -> int | None:
        """Return the round of an exchange, once slot 0 has chosen it."""
        found = parse(self._read("exchange") or "[0, 0]", list[int])
        return found[1] if found[0] == exchange else None

    def say_sent(self, exchange: int, slots: int) -> bool:
        """Return whether all slots have sent their packet."""
        is_last = self._store.add(f"{PREFIX}sent/{exchange}", 1) == slots
        if is_last:
            self._delete(f"sent/{exchange}")
        return is_last

    def set_checked(self, slot: int, number: int, bad: dict[int, str]) -> None:
        self._set(f"checked/{slot}", json.dumps([number, list(bad.items())]))

    def checked(self, slot: int, number: int) -> dict[int, str] | None:
        """Return why packets of a slot are bad in a round, by replica; None until it has checked them."""
        found = parse(self._read(f"checked/{slot}") or "[-1, []]", list)
        return dict(found[1]) if found[0] == number else None

    def say_alone(self, number: int) -> None:
        self._set("alone", str(number))

    def alone(self) -> int | None:
        """Return the round from which this newcomer trains alone; -1: it takes an anchor; None: undecided."""
        text = self._read("alone")
        return None if text is None else parse(text, int)

    def count_caught_up(self, more: int = 0) -> int:
        return self._store.add(f"{PREFIX}caught_up", more)

    def say_failed(self, slot: int, why: str) -> None:
        self._decide("failed", f"rank {slot} of this launch: {why}")

    def failure(self) -> str | None:
        return self._read("failed")

    def count_moved(self, more: int = 0) -> int:
        return self._store.add(f"{PREFIX}moved", more)


def survey(store: Any) -> dict[str, Any]:
    """Return what a store says of its replicas, and change nothing in it.

    Returns:
        settings: what all replicas must have; empty before the first one.
        round: the one that is open; announced: the replicas that will take part in it.
        members: those whose packets counted in the round before.
        beats: signs of life so far.

    Raises:
        CompressionError: what is there was not written by replicas.
    """
    board = Board(store)
    number = parse(board._read("head") or '[0, ""]', Position).round
    return {
        "settings": parse(board._read("settings") or "{}", dict),
        "round": number,
        "announced": board.announced(number),
        "members": list(members_of(board.outcome(number - 1) or "{}")),
        "beats": board.beats(),
    }


def members_of(outcome: str) -> tuple[int, ...]:
    """Return whose packets counted in a round, from its outcome."""
    return tuple(parse(outcome, dict[str, list[int]]).get("members", ()))


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def parse(text: str, kind: type[Found]) -> Found:
    """Parse a value of the store: JSON of a type.

    Raises:
        CompressionError: it is something else.
    """
    try:
        found: Found = _adapter(kind).validate_json(text, strict=True)  # type: ignore[arg-type]
    except ValidationError as error:
        expected = f"expected {getattr(kind, '__name__', kind)}: {error.errors()[0]['msg']}"
        raise CompressionError(f"the replica store has {shown(text)}, {expected}") from None
    return found


def _newcomers(text: str) -> Newcomers:
    """Parse the key; what a stranger wrote there names no newcomer."""
    try:
        return parse(text or "{}", Newcomers)
    except CompressionError:
        return {}


def _parse_entry(text: str | None) -> tuple[int, str]:
    """Return bytes and digest of a packet; the digest is "" while the packet is written.

    Raises:
        CompressionError: the packet is not there, or its entry is damaged.
    """
    if text is None:
        raise CompressionError("it is not in the store")
    nbytes, digest = parse(text, tuple[int, str])
    if not 0 < nbytes < LARGEST:
        raise CompressionError(f"{nbytes} is no size")
    return nbytes, digest


def _digest_of_chunk(shipment: Shipment, number: int, content: bytes | memoryview) -> bytes:
    """Return the digest of a chunk of an anchor, so that none of another number or anchor takes its place."""
    own = f"{json.dumps(shipment.position)}/{number}/".encode()
    return hashlib.blake2b(own + digest_of(content), digest_size=DIGEST).digest()


def digest_of(content: bytes | bytearray | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST).digest()
