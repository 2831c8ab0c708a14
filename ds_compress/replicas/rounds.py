"""Rounds: whose deltas count, agreed by replicas that are launched apart, through a store that all reach.

Everything crosses the store (torch's TCPStore), so replicas need no connection to each other, and one that
dies leaves nothing half done: a round counts for all ranks of all replicas, or for none. A replica has a
number, and as many slots as its launch has ranks; slot s has the same part of the model on all replicas.

    key             value                                                   written by
    settings        what all replicas must have                             the first replica
    head            first undecided round, digest of the anchor             slot 0 of any replica
    K/announced     replicas that will take part in round K                 slot 0 of each
    K/packet/R/S    packet of slot S of replica R, in chunks                that rank
    K/came          replicas all of whose packets are there                 the rank that was last
    K/candidates    decided once: those that came in time                   slot 0 of any replica
    K/checked/R/S   candidates whose packets are bad, and why               slot S of replica R
    K/outcome       decided once: the members of round K; who hands its     slot 0 of any replica
                    anchor to which newcomer
    exchange/R/N    round in which replica R sends its N-th delta           its slot 0
    wants           newcomers, which need an anchor
    state/R/S       anchor and momentum of slot S for newcomer R            the same slot of another replica

What is decided once is written with compare_set. The digest names the outcomes that led to an anchor, so two
replicas with the same digest have the same anchor. The protocol of a lighthouse with a quorum is that of
torchft (github.com/pytorch/torchft); here the store takes the place of the lighthouse.
"""

import functools
import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ds_compress.config.replicas import OuterOptions
from ds_compress.errors import CompressionError, in_one_line, shown
from ds_compress.replicas.outer_step import Anchor, DeltaCodec

CHUNK = 4 << 20
"""Bytes of a value; a TCPStore takes 8 MiB at most."""

KEPT_ROUNDS = 3
"""Rounds for which packets stay in the store; a replica that is further behind needs an anchor."""

TRANSFER_S = 300.0
"""Seconds, beside the grace, after which a replica gives up a round."""

BEAT_S = 5.0
"""Seconds between two signs of life of a replica."""

ABANDONED_S = 60.0
"""Seconds without a sign of life after which a newcomer goes on with its own weights."""

PREFIX = "ds_compress/outer/"

Found = TypeVar("Found")

log = logging.getLogger("ds_compress")


class Position(NamedTuple):
    """What a replica knows of the rounds."""

    round: int  # the first one that it has not applied
    digest: str  # of its anchor

    def after(self, outcome: str) -> "Position":
        text = f"{self.digest}/{self.round}/{outcome}"
        return Position(self.round + 1, hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


class Membership(NamedTuple):
    """What a replica gets when it joins the others."""

    number: int
    position: Position
    is_newcomer: bool  # whether it needs the anchor of another replica


class ExchangeResult(NamedTuple):
    """What a replica has after an exchange."""

    anchor: Anchor
    position: Position
    base: Tensor  # see outer_step.py
    members: tuple[int, ...]
    is_member: bool


class Rounds:
    """One rank's view of the rounds."""

    def __init__(self, store: Any, slot: int, slots: int, options: OuterOptions):
        """
        Args:
            store: a `torch.distributed.Store`; torch declares too few of its methods.
        """
        self._store = store
        self._slot = slot
        self._slots = slots
        self._options = options
        self._limit = options.grace_s + TRANSFER_S
        self._posted: list[tuple[int, float, str, int]] = []  # what this rank sent: see `_put`; key and size
        self._own: tuple[str, str, Tensor | None] = "", "", None  # key, digest and bytes of its last packet
        self._last_beat = -BEAT_S
        self._is_live = False  # whether it has the anchor, for others to take
        self.number = -1
        self.received_bytes = 0
        self.ended = threading.Event()
        """Ends what waits for the store."""

    def join(self, settings: dict[str, Any], own_position: Position) -> Membership:
        """Join the other replicas; slot 0 calls it.

        Args:
            settings: JSON-like; what all replicas must have.
            own_position: of this replica; it counts if no replica was there before.

        Raises:
            CompressionError: other replicas have other settings; names the first difference.
        """
        own = json.dumps(settings, sort_keys=True)
        theirs = _parsed(self._decide("settings", own), dict)
        for key in {**settings, **theirs}:
            if settings.get(key) != theirs.get(key):
                raise CompressionError(
                    f"{key}: the other replicas have {shown(theirs.get(key))}, this one has "
                    f"{shown(settings.get(key))}; use the same in all launches"
                )
        head = _position(self._decide("head", json.dumps(own_position)))
        self.number = self._store.add(f"{PREFIX}numbers", 1)
        return Membership(self.number, head, head.digest != own_position.digest)

    def catch_up(self, position: Position, numel: int, digest: str) -> tuple[Anchor | None, Position]:
        """Receive the anchor of another replica, as a newcomer; every slot calls it.

        Args:
            position: of the others, when this replica joined.
            numel: values of this slot.
            digest: of this replica's own anchor.

        Returns:
            The anchor, None if the other replicas are gone and this one goes on with its own; the position.

        Raises:
            CompressionError: the replica that should have sent it did not.
        """
        key, beats, heard = f"state/{self.number}", "", time.monotonic()
        given: float | None = None
        if self._slot == 0:
            self._append("wants", self.number)

        def ready() -> bool | None:
            nonlocal beats, heard, given
            if self._has(f"{key}/{self._slot}") or self._has(f"{key}/none"):
                return True
            now = self._read("beat") or ""
            if now != beats:
                beats, heard = now, time.monotonic()
            if self._slot == 0 and time.monotonic() - heard > ABANDONED_S:
                self._store.set(f"{PREFIX}{key}/none", "1")
            if self._has(f"given/{self.number}"):
                given = given or time.monotonic()
                if time.monotonic() - given > self._limit:
                    raise CompressionError(
                        f"another replica did not send its anchor within {self._limit:g} s"
                    )
            return None

        self._wait(ready, "", limit=math.inf)  # the round of the others may take any time
        if self._has(f"{key}/none"):
            taken = Position(position.round, digest)
            if self._slot == 0:
                self._move_head(position, taken)
            return None, taken
        data, found = self._get(f"{key}/{self._slot}")
        if data.numel() != 8 * numel:
            raise CompressionError(f"an anchor of {data.numel()} bytes came, expected {8 * numel}")
        self._delete(f"{key}/{self._slot}", data.numel())
        values, momentum = data.view(torch.float32).split(numel)
        return Anchor(values, momentum), _position(found)

    def exchange_delta(
        self, exchange: int, anchor: Anchor, position: Position, sent: Tensor, codec: DeltaCodec
    ) -> ExchangeResult:
        """Send a delta in the first round that is open, and wait for its outcome; every slot calls it.

        Args:
            exchange: number of this call of the replica, the same on all slots.
            anchor: of `position`.
            sent: weights of this slot, fp32, 1-D.
            codec: its residuals are those of the packets that counted, when this returns.

        Raises:
            CompressionError, RuntimeError: the store, or this replica, is too late or out of reach.
        """
        if position.round:
            self._purge(position.round - KEPT_ROUNDS)
        delta, base = anchor.values - sent, anchor.values
        number = self._open_round(exchange, position)
        while position.round < number:
            anchor, position, _ = self._follow(anchor, position, codec)
        before = codec.residuals()
        key = f"{number}/packet/{self.number}"
        packet_key, packet = f"{key}/{self._slot}", codec.encode(delta, number, self.number)
        self._own = packet_key, self._put(packet_key, packet, "", number), packet
        if self._store.add(f"{PREFIX}{key}/count", 1) == self._slots:
            self._append(f"{number}/came", self.number)
        anchor, position, members = self._follow(anchor, position, codec)
        is_member = self.number in members
        if is_member:
            base = sent
        else:
            codec.restore(before)
        return ExchangeResult(anchor, position, base, members, is_member)

    def announce(self, round_number: int) -> None:
        """Let the others wait for this replica in a round; slot 0 calls it."""
        self._is_live = True
        self._append(f"{round_number}/announced", self.number)

    def beat(self) -> None:
        """Give a sign of life, if one is due and this replica has what newcomers wait for.

        Raises:
            CompressionError: this replica has ended.
        """
        if self.ended.is_set():
            raise CompressionError("this replica has ended")
        if self._is_live and time.monotonic() - self._last_beat >= BEAT_S:
            self._last_beat = time.monotonic()
            self._store.add(f"{PREFIX}beat", 1)

    def _open_round(self, exchange: int, position: Position) -> int:
        """Return the round of this exchange: slot 0 chooses the first undecided one, and tells the others."""
        key = f"exchange/{self.number}/{exchange}"
        if self._slot == 0:
            number = max(position.round, _position(self._read("head") or "").round)
            while self._has(f"{number}/outcome"):
                number += 1
            if number > position.round:
                self.announce(number)
            self._store.set(f"{PREFIX}{key}", str(number))
        text = self._wait(lambda: self._read(key), "the round of slot 0")
        return _parsed(text, int)

    def _follow(
        self, anchor: Anchor, position: Position, codec: DeltaCodec
    ) -> tuple[Anchor, Position, tuple[int, ...]]:
        """Wait for the outcome of the round at `position`, and apply it to `anchor`."""
        number, total, summed = position.round, None, None
        if not self._has(f"{number}/outcome"):
            candidates = self._candidates(number)
            bad, total = self._sum(number, candidates, codec)
            summed = [each for each in candidates if str(each) not in bad]
            self._store.set(f"{PREFIX}{number}/checked/{self.number}/{self._slot}", json.dumps(bad))
            if self._slot == 0:
                self._conclude(number, candidates)
        text = self._wait(lambda: self._read(f"{number}/outcome"), f"the outcome of round {number}")
        outcome = _parsed(text, dict)
        members, donors = tuple(outcome.get("members", ())), outcome.get("donors", {})
        if list(members) != summed:
            bad, total = self._sum(number, members, codec)
            if bad:
                raise CompressionError(f"round {number}: packets are no longer there; a new anchor is needed")
        if members:
            assert total is not None
            anchor = anchor.step(total / len(members), self._options)
        before, position = position, position.after(text)
        for newcomer, donor in donors.items():
            if donor == self.number:
                state = torch.cat(anchor).view(torch.uint8)
                # the newcomer deletes it; rounds may be shorter than the time that it takes to see it
                self._put(f"state/{newcomer}/{self._slot}", state, json.dumps(position), number, self._limit)
        if members and self.number == min(members):
            self._delete_packets(number - KEPT_ROUNDS)
        if self._slot == 0:
            for newcomer in donors:
                self._store.set(f"{PREFIX}given/{newcomer}", "1")
            self._move_head(before, position)
            self.announce(position.round)
        return anchor, position, members

    def _candidates(self, number: int) -> list[int]:
        """Wait until it is decided who came to a round in time. Slot 0 decides it, if its replica came."""
        since: float | None = None
        # members of the round before may not have seen its outcome yet, so they have not announced themselves
        expected = set(self._members(number - 1)) if self._slot == 0 else set[int]()

        def ready() -> str | None:
            nonlocal since
            key = f"{number}/candidates"
            came = self._numbers(f"{number}/came") if self._slot == 0 else []
            if self.number in came:
                since = since or time.monotonic()
                is_enough = len(came) >= self._options.quorum
                is_complete = expected.union(self._numbers(f"{number}/announced")) <= set(came)
                if (is_complete and is_enough) or time.monotonic() - since > self._options.grace_s:
                    return self._decide(key, json.dumps(sorted(came) if is_enough else []))
            return self._read(key)

        found = self._wait(ready, f"the other slots of this replica in round {number}")
        return [int(each) for each in _parsed(found, list)]

    def _members(self, number: int) -> list[int]:
        """Return whose packets counted in a round."""
        outcome = _parsed(self._read(f"{number}/outcome") or "{}", dict)
        return [int(each) for each in outcome.get("members", ())]

    def _sum(
        self, number: int, replicas: Sequence[int], codec: DeltaCodec
    ) -> tuple[dict[str, str], Tensor | None]:
        """Return why packets of this slot are bad, by replica, and the sum of the deltas in the others."""
        bad: dict[str, str] = {}
        total: Tensor | None = None
        for replica in replicas:
            try:
                packet, _ = self._get(f"{number}/packet/{replica}/{self._slot}")
                delta = codec.decode(packet, number, replica)
            except CompressionError as error:
                bad[str(replica)] = str(error)
                continue
            total = delta if total is None else total.add_(delta)
        return bad, total

    def _conclude(self, number: int, candidates: Sequence[int]) -> None:
        """Decide the outcome of a round, when all slots of this replica have checked the packets."""
        bad: dict[str, str] = {}
        outcome = f"{number}/outcome"
        for slot in range(self._slots):
            keys = f"{number}/checked/{self.number}/{slot}", outcome
            text = self._wait(functools.partial(self._read_any, *keys), f"slot {slot} in round {number}")
            if self._has(outcome):  # decided by another replica: a slot that saw it has checked nothing
                return
            bad |= _parsed(text, dict)
        for replica, why in bad.items():
            log.warning("ds_compress: round %d: replica %s is left out: %s", number, replica, why)
        members = [each for each in candidates if str(each) not in bad]
        waiting = [each for each in self._numbers("wants") if not self._has(f"given/{each}")]
        # who decides is alive; a member may have died after it sent its packet
        donors = dict.fromkeys(map(str, waiting), self.number)
        self._decide(outcome, json.dumps({"members": members, "donors": donors}))

    def _move_head(self, before: Position, after: Position) -> None:
        expected, new = json.dumps(before), json.dumps(after)
        found = self._store.compare_set(f"{PREFIX}head", expected, new).decode()
        if found != new and _position(found).round <= after.round:
            raise CompressionError("another replica has gone on with another anchor")

    # The store: keys below `PREFIX`, values that are checked

    def _wait(self, ready: Callable[[], Found | None], what: str, limit: float | None = None) -> Found:
        limit = limit or self._limit
        deadline, pause = time.monotonic() + limit, 0.01
        while (found := ready()) is None:
            if time.monotonic() > deadline:
                raise CompressionError(f"{what} did not come within {limit:g} s")
            self.ended.wait(pause)
            pause = min(1.5 * pause, 0.5)
            self.beat()
        return found

    def _has(self, key: str) -> bool:
        return self._store.check([f"{PREFIX}{key}"])

    def _read(self, key: str) -> str | None:
        return self._store.get(f"{PREFIX}{key}").decode(errors="replace") if self._has(key) else None

    def _read_any(self, *keys: str) -> str | None:
        return next((text for key in keys if (text := self._read(key)) is not None), None)

    def _decide(self, key: str, value: str) -> str:
        """Write `value` unless the key has one; return what it has."""
        return self._store.compare_set(f"{PREFIX}{key}", "", value).decode(errors="replace")

    def _append(self, key: str, number: int) -> None:
        self._store.append(f"{PREFIX}{key}", f"{number},")

    def _numbers(self, key: str) -> list[int]:
        words = (self._read(key) or "").split(",")
        return sorted({int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 10})

    def _put(self, key: str, data: Tensor, note: str, number: int, seconds: float = 0.0) -> str:
        """Store bytes, with a note; they are deleted `KEPT_ROUNDS` rounds after round `number`, but kept for
        `seconds`.

        Returns:
            Their digest.
        """
        content = data.numpy().tobytes()
        self._posted.append((number, time.monotonic() + seconds, key, data.numel()))
        for start in range(0, data.numel(), CHUNK):
            self._store.set(f"{PREFIX}{key}/{start}", content[start : start + CHUNK])
            self.beat()
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        self._store.set(f"{PREFIX}{key}", json.dumps([data.numel(), digest, note]))
        return digest

    def _get(self, key: str) -> tuple[Tensor, str]:
        """Return the bytes that `_put` stored, and the note; the packet of this rank is at hand."""
        text = self._read(key)
        if text is None:
            raise CompressionError("it is not in the store")
        nbytes, digest, note = (*_parsed(text, list), None, None, None)[:3]
        if not isinstance(nbytes, int) or not 0 <= nbytes < 2**40:
            raise CompressionError(f"{shown(nbytes)} is no size")
        own_key, own_digest, packet = self._own
        if packet is not None and (key, digest) == (own_key, own_digest):
            return packet, str(note)
        parts = list[bytes]()
        for start in range(0, nbytes, CHUNK):
            if not self._has(f"{key}/{start}"):
                raise CompressionError("a part of it is not in the store")
            parts.append(self._store.get(f"{PREFIX}{key}/{start}"))
            self.beat()
        content = b"".join(parts)
        if len(content) != nbytes or hashlib.blake2b(content, digest_size=16).hexdigest() != digest:
            raise CompressionError("it was damaged on its way")
        self.received_bytes += len(content)
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        data.numpy()[:] = memoryview(content)
        return data, str(note)

    def _delete(self, key: str, nbytes: int) -> None:
        for start in range(0, nbytes, CHUNK):
            self._store.delete_key(f"{PREFIX}{key}/{start}")
        self._store.delete_key(f"{PREFIX}{key}")

    def _delete_packets(self, number: int) -> None:
        """Delete packets of this slot in a round that are still there: of replicas that were killed."""
        for replica in self._numbers(f"{number}/announced"):
            key, start = f"{number}/packet/{replica}/{self._slot}", 0
            while self._has(f"{key}/{start}"):
                self._store.delete_key(f"{PREFIX}{key}/{start}")
                start += CHUNK
            self._store.delete_key(f"{PREFIX}{key}")

    def _purge(self, last: int) -> None:
        """Delete what this rank stored for rounds up to `last`."""
        kept = []
        for posted in self._posted:
            number, until, key, nbytes = posted
            if number > last or time.monotonic() < until:
                kept.append(posted)
            else:
                self._delete(key, nbytes)
        self._posted = kept


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
    rounds = Rounds(store, 0, 0, OuterOptions())
    number = _position(rounds._read("head") or '[0, ""]').round
    return {
        "settings": _parsed(rounds._read("settings") or "{}", dict),
        "round": number,
        "announced": rounds._numbers(f"{number}/announced"),
        "members": rounds._members(number - 1),
        "beats": rounds._read("beat") or "0",
    }


def _parsed(text: str, kind: type[Found]) -> Found:
    """Parse a value of the store.

    Raises:
        CompressionError: it is no JSON of this kind.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CompressionError(f"the replica store has {shown(text)}: {in_one_line(error)}") from None
    if not isinstance(value, kind):
        raise CompressionError(f"the replica store has {shown(text)}, expected {kind.__name__}")
    return value


def _position(text: str) -> Position:
    found = _parsed(text, list)
    if len(found) != 2 or not isinstance(found[0], int) or not isinstance(found[1], str):
        raise CompressionError(f"the replica store has {shown(text)} as head")
    return Position(*found)
