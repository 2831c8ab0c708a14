"""Rounds: whose deltas count, agreed by replicas that are launched apart, through a store that all reach.

Everything crosses the store (torch's TCPStore), so replicas need no connection to each other, and one that
dies leaves nothing half done: a round counts for all ranks of all replicas, or for none. A replica has a
number, and as many slots as its launch has ranks; slot s has the same part of the model on all replicas.
`Board` has the keys of the store. In round K

1. every slot sends its packet; when all have come, or after the grace time, the candidates are decided;
2. every slot decodes the packets of the candidates, and slot 0 votes: it names those that its launch cannot
   read. A candidate becomes a member if more than half of the voters can read its packets, so a replica whose
   packets are damaged on their way cannot count, however quick it is;
3. every slot moves its anchor by the mean of the members.

A newcomer asks for an anchor. A replica that is between two exchanges, training or not, hands over the one
that it has, in chunks, while it goes on; the newcomer then follows the rounds since. One that is so far
behind that these are gone gives no signs of life, and a newcomer that sees none goes on with its own. Nothing
that makes progress is given up.

The digest of a position names the outcomes that led to an anchor, so two replicas with the same digest have
the same anchor. The protocol of a lighthouse with a quorum is that of torchft (github.com/pytorch/torchft);
here the store takes the place of the lighthouse.
"""

import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ds_compress.config.replicas import OuterOptions
from ds_compress.errors import CompressionError
from ds_compress.sites.board import CHUNK, WINDOW, Board, LaunchBoard, Position, Shipment, members_of
from ds_compress.sites.outer_step import Anchor, DeltaCodec
from ds_compress.sites.store import check_shared

KEPT_ROUNDS = 3
"""Rounds for which packets stay in the store; a replica that is further behind needs an anchor."""

KEPT_BYTES = 16
"""Bytes per weight up to which packets stay longer, for a newcomer whose anchor is on its way."""

TRANSFER_S = 300.0
"""Seconds without progress, beside the grace, after which a replica gives up what it waits for."""

BEAT_S = 5.0
"""Seconds between two signs of life of a replica."""

LOOK_S = 0.05
"""Seconds between two looks at what a newcomer has taken."""

ABANDONED_S = 60.0
"""Seconds without a sign of life after which a newcomer goes on with its own weights."""

Found = TypeVar("Found")

log = logging.getLogger("ds_compress")


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
    seconds: float  # that it took


def patience(options: OuterOptions) -> float:
    """Return the seconds without progress after which a replica gives up what it waits for."""
    return options.grace_s + TRANSFER_S


class _Upload:
    """An anchor that this slot hands over."""

    def __init__(self, newcomer: int, anchor: Anchor, position: Position):
        self.newcomer = newcomer
        self.chunks = _chunks(anchor)
        self.shipment = Shipment(anchor.values.numel(), position, 0)
        self.taken, self.moved = 0, time.monotonic()  # chunks, and when their number has changed
        self.next_look = 0.0


class Rounds:
    """One rank's view of the rounds."""

    def __init__(self, store: Any, launch_store: Any, slot: int, slots: int, options: OuterOptions):
        """
        Args:
            store: a `torch.distributed.Store` that all replicas reach.
            launch_store: one of this launch alone, without keys.
        """
        self._board = Board(store, self.tend)
        self._launch = LaunchBoard(launch_store)
        self._slot = slot
        self._slots = slots
        self._options = options
        self._limit = patience(options)
        self._posted: list[int] = []  # rounds whose packets of this rank are in the store
        self._own: tuple[int, str, Tensor | None] = -1, "", None  # round, digest and bytes of its last packet
        self._last_beat = -BEAT_S
        self._moved_chunks = 0
        self._voting: int | None = None  # the round in which others wait for the vote of this replica
        self._held: tuple[Anchor, Position] | None = None  # for newcomers to take
        self._uploads: list[_Upload] = []
        self._handed = set[int]()  # newcomers whose upload has begun
        self._behind_since: float | None = None  # since when a newcomer waits beside this replica
        self._kept_rounds = KEPT_ROUNDS
        self._round_bytes = 0  # of this slot's packets in the last round, which may differ in size
        self._has_caught_up = False
        self.number = -1
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
        theirs = self._board.settings(json.dumps(settings, sort_keys=True))
        check_shared(settings, theirs)
        head = self._board.head(own_position)
        self.number = self._board.new_number()
        return Membership(self.number, head, head.digest != own_position.digest)

    def catch_up(self, numel: int, digest: str) -> tuple[Anchor | None, Position]:
        """Receive the anchor of another replica, as a newcomer; every slot calls it.

        Args:
            numel: values of this slot.
            digest: of this replica's own anchor.

        Returns:
            The anchor, None if the other replicas are gone and this one goes on with its own; the position.

        Raises:
            CompressionError: no other replica handed over its anchor, or it ceased to come.
        """
        self._board.say_taken(self.number, self._slot, 0)
        if self._slot == 0:
            self._board.change_newcomers(lambda found: {**found, str(self.number): None})
        try:
            return self._take_anchor(numel, digest)
        except CompressionError:
            if self._board.newcomers().get(str(self.number)) is not None:
                self._board.say_taken(self.number, self._slot, -1)  # who sends it deletes it
            else:
                self._board.end_shipment(self.number, self._slot)
                if self._slot == 0:
                    self._forget(str(self.number))
            raise

    def take_part(self, anchor: Anchor, position: Position) -> None:
        """Let the others wait for this replica in the next round, and newcomers have its anchor; every slot
        calls it."""
        self._held = anchor, position
        if self._slot == 0:
            self._board.announce(position.round, self.number)

    def exchange_delta(
        self, exchange: int, anchor: Anchor, position: Position, sent: Tensor, codec: DeltaCodec
    ) -> ExchangeResult:
        """Send a delta in the first round that is open, and wait for its outcome; every slot calls it.

        Args:
            exchange: number of this call of the replica, the same on all slots, above 0.
            anchor: of `position`.
            sent: weights of this slot, fp32, 1-D.
            codec: its residuals are those of the packets that counted, when this returns.

        Raises:
            CompressionError, RuntimeError: the store, or this replica, is too late or out of reach.
        """
        began = time.monotonic()
        self._held = anchor, position
        self._purge(position.round)
        self._hand_over()
        delta, base = anchor.values - sent, anchor.values
        number = self._open_round(exchange, position)
        self._begin_uploads()
        while position.round < number:
            anchor, position, _ = self._follow(anchor, position, codec)
        before = codec.residuals()
        packet = codec.encode(delta, number, self.number)
        self._posted.append(number)
        self._own = number, self._board.put_packet(number, self._slot, self.number, packet), packet
        if self._launch.say_sent(exchange, self._slots):
            self._board.come(number, self.number)
        anchor, position, members = self._follow(anchor, position, codec)
        # packets of a round may be kept for as long as a newcomer needs for its anchor
        if self._round_bytes:  # of a void round nothing is known
            self._kept_rounds = max(KEPT_ROUNDS, KEPT_BYTES * codec.numel // self._round_bytes)
        is_member = self.number in members
        if is_member:
            base = sent
            self._end_catch_up()
        else:
            codec.restore(before)
        return ExchangeResult(anchor, position, base, members, is_member, time.monotonic() - began)

    def tend(self) -> float:
        """Do what others rely on: give a sign of life, if one is due, and send a chunk to each newcomer.

        Returns:
            Seconds after which there is more to do.

        Raises:
            CompressionError: this replica has ended.
        """
        if self.ended.is_set():
            raise CompressionError("this replica has ended")
        if time.monotonic() - self._last_beat >= BEAT_S:
            self._last_beat = time.monotonic()
            if self._board.moved_chunks != self._moved_chunks:
                self._moved_chunks = self._board.moved_chunks
                self._launch.count_moved(1)
            if self._slot == 0 and self._held is not None:
                self._board.beat()
            if self._voting is not None:
                self._board.say_alive(self._voting, self.number)
        return min([BEAT_S, *(self._send_chunk(upload) for upload in list(self._uploads))])

    def idle(self) -> float:
        """Like `tend`, between two exchanges: newcomers that wait get the anchor of this replica."""
        if time.monotonic() - self._last_beat >= BEAT_S:
            self._hand_over()
            self._begin_uploads()
        return self.tend()

    # A round

    def _open_round(self, exchange: int, position: Position) -> int:
        """Return the round of this exchange: slot 0 chooses the first undecided one, and tells the others."""
        if self._slot == 0:
            number = max(position.round, self._board.head().round)
            while self._board.outcome(number) is not None:
                number += 1
            if number > position.round:
                self._board.announce(number, self.number)
            self._launch.set_exchange(exchange, number)
        number = self._wait(lambda: self._launch.exchange(exchange), "the round of slot 0")
        if number > position.round and self._board.outcome(position.round) is None:
            raise CompressionError(f"round {position.round} was long ago; a new anchor is needed")
        return number

    def _follow(
        self, anchor: Anchor, position: Position, codec: DeltaCodec
    ) -> tuple[Anchor, Position, tuple[int, ...]]:
        """Wait for the outcome of the round at `position`, and apply it to `anchor`."""
        number, total, summed = position.round, None, None
        if self._board.outcome(number) is None:
            candidates = self._candidates(number)
            self._voting = number if self._slot == 0 else None
            bad, total = self._sum(number, candidates, codec)
            summed = tuple(each for each in candidates if each not in bad)
            self._launch.set_checked(self._slot, number, bad)
            if self._slot == 0:
                self._conclude(number, candidates)
        text = self._wait(lambda: self._board.outcome(number), f"the outcome of round {number}")
        members = members_of(text)
        if members != summed:
            bad, total = self._sum(number, members, codec)
            if bad:
                why = "; ".join(f"replica {replica}: {bad[replica]}" for replica in sorted(bad))
                raise CompressionError(
                    f"round {number}: packets cannot be read; a new anchor is needed: {why}"
                )
        if members:
            assert total is not None
            anchor = anchor.step(total / len(members), self._options)
        before, position = position, position.after(text)
        if members and self.number == min(members):
            self._board.delete_rounds(self._slot, self._first_kept(number))
        if self._slot == 0:
            self._board.move_head(before, position)
        self.take_part(anchor, position)
        return anchor, position, members

    def _candidates(self, number: int) -> list[int]:
        """Wait until it is decided who came to a round in time. Slot 0 decides it, if its replica came."""
        since: float | None = None
        # members of the round before may not have seen its outcome yet, so they have not announced themselves
        expected = set(members_of(self._board.outcome(number - 1) or "{}")) if self._slot == 0 else set[int]()

        def ready() -> list[int] | None:
            nonlocal since
            came = self._board.came(number) if self._slot == 0 else []
            if self.number in came:
                since = since or time.monotonic()
                is_enough = len(came) >= self._options.quorum
                is_complete = expected.union(self._board.announced(number)) <= set(came)
                if (is_complete and is_enough) or time.monotonic() - since > self._options.grace_s:
                    return self._board.decide_candidates(number, came if is_enough else [])
            return self._board.candidates(number)

        return self._wait(ready, f"the other slots of this replica in round {number}")

    def _sum(
        self, number: int, replicas: Sequence[int], codec: DeltaCodec
    ) -> tuple[dict[int, str], Tensor | None]:
        """Return why packets of this slot are bad, by replica, and the sum of the deltas in the others."""
        bad: dict[int, str] = {}
        total: Tensor | None = None
        self._round_bytes = 0
        for replica in replicas:
            try:
                packet = self._packet(number, replica)
                self._round_bytes += packet.numel()
                delta = codec.decode(packet, number, replica)
            except CompressionError as error:
                bad[replica] = str(error)
                continue
            total = delta if total is None else total.add_(delta)
        return bad, total

    def _packet(self, number: int, replica: int) -> Tensor:
        """Return a packet; that of this rank is at hand."""
        own_number, own_digest, packet = self._own
        is_own = (number, replica) == (own_number, self.number)
        if (
            packet is not None
            and is_own
            and self._board.packet_digest(number, self._slot, replica) == own_digest
        ):
            return packet
        return self._board.packet(number, self._slot, replica)

    def _conclude(self, number: int, candidates: Sequence[int]) -> None:
        """Vote when all slots of this replica have checked the packets, and help to decide the outcome."""
        bad: dict[int, str] = {}
        for slot in range(self._slots):
            checked = functools.partial(self._checked, number, slot)
            bad |= self._wait(checked, f"slot {slot} in round {number}")
        self._board.vote(number, self.number, sorted(bad))
        self._voting = None
        outcome = self._wait(self._vote_counter(number, candidates), f"votes of round {number}")
        for replica in sorted(set(candidates).difference(members_of(outcome))):
            why = bad.get(replica, "other replicas cannot read its packet")
            log.warning("ds_compress: round %d: replica %s is left out: %s", number, replica, why)

    def _checked(self, number: int, slot: int) -> dict[int, str] | None:
        """Return why packets of a slot are bad; a slot that saw an outcome of others has checked nothing."""
        found = self._launch.checked(slot, number)
        return {} if found is None and self._board.outcome(number) is not None else found

    def _vote_counter(self, number: int, candidates: Sequence[int]) -> Callable[[], str | None]:
        """Return what counts the votes of a round, and returns its outcome as soon as no vote that is to come
        can change it. Votes come from candidates; who has been silent for the grace time has none."""
        signs, heard, began = dict[int, int](), dict[int, float](), time.monotonic()

        def is_expected(replica: int, alive: list[str]) -> bool:
            now = time.monotonic()
            if signs.get(replica) != alive.count(str(replica)):
                signs[replica], heard[replica] = alive.count(str(replica)), now
            is_silent = now - heard[replica] > self._options.grace_s + BEAT_S
            return not is_silent and now - began < TRANSFER_S

        def ready() -> str | None:
            if (outcome := self._board.outcome(number)) is not None:
                return outcome
            votes = self._board.votes(number)
            missing = [each for each in candidates if each not in votes]
            alive = self._board.alive(number) if missing else []
            counted = [votes[each] for each in candidates if each in votes]
            voters = len(counted) + sum([is_expected(each, alive) for each in missing])
            members = []
            for replica in candidates:
                bad = sum(replica in vote for vote in counted)
                if 2 * (len(counted) - bad) > voters:
                    members.append(replica)
                elif 2 * bad < voters:
                    return None
            return self._board.decide_outcome(number, members)

        return ready

    def _first_kept(self, number: int) -> int:
        """Return the first round whose packets are needed when round `number` is the last one."""
        given = [each[0] for each in self._board.newcomers().values() if each is not None]
        needed = [each for each in given if each > number - self._kept_rounds]
        return min([number - KEPT_ROUNDS + 1, *needed])

    def _purge(self, number: int) -> None:
        """Delete the packets of this rank that nobody needs when round `number` is open."""
        if self._posted and self._posted[0] <= number - KEPT_ROUNDS:
            first = self._first_kept(number)
            for each in [each for each in self._posted if each < first]:
                self._board.delete_packet(each, self._slot, self.number)
            self._posted = [each for each in self._posted if each >= first]

    # The anchor for a newcomer

    def _hand_over(self) -> None:
        """Let newcomers have the anchor of this replica. All its slots are at this position, or behind it."""
        if self._slot or self._held is None:
            return
        _, position = self._held
        newcomers = self._board.newcomers()
        for name, given in newcomers.items():
            if given is not None and given[0] <= position.round - self._kept_rounds:  # it has died
                self._forget(name)
                for slot in range(self._slots):
                    self._board.end_shipment(int(name), slot)
        waiting = [name for name, given in newcomers.items() if given is None and int(name) != self.number]
        if not waiting:
            self._behind_since = None
            return
        head = self._board.head()
        if not self._leads_to(head, position):
            self._held = None  # no newcomer needs signs of life of this replica
            return
        if head == position:
            self._behind_since = None
        else:
            if self._behind_since is None:
                self._behind_since = time.monotonic()
            if time.monotonic() - self._behind_since < ABANDONED_S:
                return  # one at the head hands over before that
        handed = self._launch.handed()
        handed = {each: number for each, number in handed.items() if number > position.round - KEPT_ROUNDS}
        for name in waiting:
            given = [position.round, self.number]
            if self._board.change_newcomers(functools.partial(_give, name, given)):
                handed[int(name)] = position.round
        self._launch.set_handed(handed)

    def _leads_to(self, head: Position, position: Position) -> bool:
        """Return whether who has the anchor of `position` can follow the rounds since to `head`."""
        if head.round - position.round >= KEPT_ROUNDS:  # packets of these rounds may be gone
            return False
        while position.round < head.round and (outcome := self._board.outcome(position.round)) is not None:
            position = position.after(outcome)
        return position == head

    def _begin_uploads(self) -> None:
        """Begin to send the anchor to the newcomers to which slot 0 hands it over."""
        if self._held is None:
            return
        anchor, position = self._held
        handed = self._launch.handed()
        for newcomer, number in handed.items():
            if newcomer not in self._handed and number == position.round:
                self._handed.add(newcomer)
                self._uploads.append(_Upload(newcomer, anchor, position))
        self._handed &= handed.keys()

    def _send_chunk(self, upload: _Upload) -> float:
        """Send a chunk of an anchor, if the newcomer has taken enough; return seconds until the next one."""
        count, newcomer = len(upload.chunks), upload.newcomer
        if upload.shipment.sent < min(count, upload.taken + WINDOW):
            upload.shipment = upload.shipment._replace(sent=upload.shipment.sent + 1)
            self._board.ship(newcomer, self._slot, upload.chunks[upload.shipment.sent - 1], upload.shipment)
            return 0.0
        now = time.monotonic()
        if now < upload.next_look:
            return upload.next_look - now
        upload.next_look = now + LOOK_S
        taken = self._board.taken(newcomer, self._slot)
        if taken is not None and taken > upload.taken:
            upload.taken, upload.moved = taken, now
        is_over = taken is None or taken < 0
        if upload.taken == count or is_over or now - upload.moved > self._limit:
            self._uploads.remove(upload)
            self._board.end_shipment(newcomer, self._slot)
            if upload.taken < count and self._slot == 0:
                self._forget(str(newcomer))
        return 0.0

    def _take_anchor(self, numel: int, digest: str) -> tuple[Anchor | None, Position]:
        beats, heard = "", time.monotonic()

        def ready() -> bool | None:
            nonlocal beats, heard
            if self._board.shipment(self.number, self._slot) or self._launch.alone() is not None:
                return True
            if self._slot == 0 and (now := self._board.beats()) != beats:
                beats, heard = now, time.monotonic()
            if self._slot == 0 and time.monotonic() - heard > ABANDONED_S:
                head = self._board.head()
                self._board.move_head(head, Position(head.round, digest))
                self._forget(str(self.number))
                self._launch.go_alone(head.round)
            return None

        self._wait(ready, "the anchor of another replica")
        if (number := self._launch.alone()) is not None:
            self._board.end_shipment(self.number, self._slot)
            return None, Position(number, digest)
        shipment = self._board.shipment(self.number, self._slot)
        assert shipment is not None
        if shipment.numel != numel:
            raise CompressionError(f"an anchor of {shipment.numel} values came, expected {numel}")
        anchor = Anchor(*(torch.empty(numel, dtype=torch.float32, device="cpu") for _ in range(2)))
        for number, chunk in enumerate(_chunks(anchor)):
            self._wait(functools.partial(self._has_chunk, number), f"part {number} of an anchor")
            content = self._board.take(self.number, self._slot, number)
            if len(content) != chunk.numel():
                expected = f"expected {chunk.numel()}"
                raise CompressionError(f"part {number} of an anchor has {len(content)} bytes, {expected}")
            chunk.numpy()[:] = memoryview(content)
            self._board.say_taken(self.number, self._slot, number + 1)
        self._has_caught_up = True
        return anchor, shipment.position

    def _has_chunk(self, number: int) -> bool | None:
        found = self._board.shipment(self.number, self._slot)
        return True if found is not None and found.sent > number else None

    def _end_catch_up(self) -> None:
        """Say that this newcomer needs no older packets, when it is a member."""
        if self._has_caught_up:
            self._has_caught_up = False
            if self._slot == 0:
                self._forget(str(self.number))
            if self._board.taken(self.number, self._slot) is not None:  # who sent the anchor has died
                self._board.end_shipment(self.number, self._slot)

    def _forget(self, name: str) -> None:
        self._board.change_newcomers(functools.partial(_without, name))

    def _wait(self, ready: Callable[[], Found | None], what: str) -> Found:
        """Return what `ready` returns, when it is not None.

        Raises:
            CompressionError: no rank of this launch has sent or received anything for too long.
        """
        moved, since, pause = self._launch.count_moved(), time.monotonic(), 0.01
        while (found := ready()) is None:
            if time.monotonic() - since > self._limit:
                before, moved, since = moved, self._launch.count_moved(), time.monotonic()
                if moved == before:
                    raise CompressionError(f"{what} did not come within {self._limit:g} s")
            pause = min(1.5 * pause, 0.5)
            self.ended.wait(min(pause, self.tend()))
        return found


def _chunks(anchor: Anchor) -> list[Tensor]:
    """Return views of an anchor: its bytes, in chunks."""
    return [chunk for each in anchor for chunk in each.view(torch.uint8).split(CHUNK)]


def _give(name: str, given: list[int], newcomers: dict[str, Any]) -> dict[str, Any] | None:
    """Let a newcomer that waits have an anchor; None if it waits no more."""
    return {**newcomers, name: given} if newcomers.get(name, given) is None else None


def _without(name: str, newcomers: dict[str, Any]) -> dict[str, Any]:
    return {each: given for each, given in newcomers.items() if each != name}
