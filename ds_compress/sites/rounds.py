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

A newcomer gets the anchor of a replica (`handover.py`) that is between two exchanges, training or not, and
follows the rounds since. A replica that is so far behind that these are gone gives no signs of life, and a
newcomer that sees none goes on with its own anchor. Nothing that makes progress is given up.

The digest of a position names the outcomes that led to an anchor, so two replicas with the same digest have
the same anchor. The protocol of a lighthouse with a quorum is that of torchft (github.com/pytorch/torchft);
here the store takes the place of the lighthouse.
"""

import functools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ds_compress.config.replicas import OuterOptions
from ds_compress.errors import CompressionError, in_one_line
from ds_compress.sites.board import KEPT_ROUNDS, Board, LaunchBoard, Position, members_of
from ds_compress.sites.handover import AnchorReceiver, AnchorSender
from ds_compress.sites.outer_step import Anchor, DeltaCodec
from ds_compress.sites.store import check_shared

KEPT_BYTES = 16
"""Bytes per weight up to which packets stay longer, for a newcomer whose anchor is on its way."""

TRANSFER_S = 300.0
"""Seconds without progress, beside the grace, after which a replica gives up what it waits for."""

BEAT_S = 5.0
"""Seconds between two signs of life of a replica."""

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


def _telling_if_it_fails(method: Callable[..., Found]) -> Callable[..., Found]:
    """Let the other slots of the launch know if a method fails: they leave, too, and need not wait."""

    @functools.wraps(method)
    def call(self: "Rounds", *args: Any) -> Found:
        try:
            return method(self, *args)
        except Exception as error:
            if not self.ended.is_set():  # else all leave, and the store of the launch may be gone
                self._launch.say_failed(self._slot, in_one_line(error))
            raise

    return call


class Rounds:
    """One rank's view of the rounds."""

    def __init__(
        self,
        store: Any,
        launch_store: Any,
        slot: int,
        slots: int,
        options: OuterOptions,
        further: Sequence[Any] = (),
    ):
        """
        Args:
            store: a `torch.distributed.Store` that all replicas reach.
            launch_store: one of this launch alone, without keys.
            further: connections to `store`, over which packets and anchors cross, too.
        """
        self._board = Board(store, self.tend, further)
        self._launch = LaunchBoard(launch_store)
        self._slot = slot
        self._slots = slots
        self._options = options
        self._limit = patience(options)
        # whether this replica deletes old rounds, for all; at first each does, so that `kept` is there
        self._deletes = True
        self._own: tuple[int, str, Tensor] | None = None  # round, digest and bytes of its last packet
        self._exchanges = 0  # so far, the same on all slots
        self._last_beat = self._last_look = -BEAT_S
        self._moved_chunks = 0
        self._voting: int | None = None  # the round in which others wait for the vote of this replica
        self._silent = -1, set[int]()  # a round, and candidates that were silent for the grace time in it
        self._kept_rounds = math.inf  # until its first round: another newcomer may need all
        self._round_bytes = 0  # of this slot's packets in the last round, which may differ in size
        self._sender = AnchorSender(self._board, slot, slots, self._limit)
        self._receiver: AnchorReceiver | None = None  # of a newcomer until it is a member
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

    @_telling_if_it_fails
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
        receiver = AnchorReceiver(self._board, self._launch, self.number, self._slot, self._slots, self._wait)
        anchor, position = receiver.receive(numel, digest)
        if anchor is not None:
            self._launch.count_caught_up(1)
            if self._slot == 0:  # which hands it over to others, and gives signs of life
                self._wait(self._have_caught_up, "the anchor of the other slots")
            self._receiver = receiver
        return anchor, position

    def _have_caught_up(self) -> bool | None:
        return self._launch.count_caught_up() == self._slots or None

    def take_part(self, anchor: Anchor, position: Position) -> None:
        """Let the others wait for this replica in the next round, and newcomers have its anchor; every slot
        calls it."""
        self._sender.hold(anchor, position)
        if self._slot == 0:
            self._board.announce(position.round, self.number)

    @_telling_if_it_fails
    def exchange_delta(
        self, anchor: Anchor, position: Position, sent: Tensor, codec: DeltaCodec
    ) -> ExchangeResult:
        """Send a delta in the first round that is open, and wait for its outcome; every slot calls it, and
        equally often.

        Args:
            anchor: of `position`.
            sent: weights of this slot, fp32, 1-D.
            codec: its residuals are those of the packets that counted, when this returns.

        Raises:
            CompressionError, RuntimeError: the store, or this replica, is too late or out of reach.
        """
        began = time.monotonic()
        self._exchanges += 1
        self._sender.hold(anchor, position)
        started, deletes = position.round, self._deletes
        self._sender.hand_over(self.number, self._kept_rounds)
        delta, base = anchor.values - sent, anchor.values
        number = self._open_round(position)
        self._sender.begin_uploads(self.number)
        while position.round < number:
            anchor, position, _ = self._follow(anchor, position, codec)
        self.tend()  # of a replica that has ended the codec may be in use again
        before = codec.residuals()
        packet = codec.encode(delta, number, self.number)
        self._own = number, self._board.put_packet(number, self._slot, self.number, packet), packet
        if self._launch.say_sent(self._exchanges, self._slots):
            self._board.come(number, self.number)
        open_at = position
        anchor, position, members = self._follow(anchor, position, codec)
        head = self._board.head()
        is_agreed = head == open_at or self._board.leads_to(position, head)
        is_member = is_agreed and self.number in members
        if head.round - number >= KEPT_ROUNDS and not is_member:
            # others may have deleted the round just before this packet was there
            self._board.delete_packet(number, self._slot, self.number)
        if not is_agreed:  # one that had been stopped decided it again after others had deleted it
            raise _too_late(number)
        # packets of a round may be kept for as long as a newcomer needs for its anchor
        if self._round_bytes:
            self._kept_rounds = max(KEPT_ROUNDS, KEPT_BYTES * codec.numel // self._round_bytes)
        elif math.isinf(self._kept_rounds):  # of a void round nothing is known
            self._kept_rounds = KEPT_ROUNDS
        if is_member:
            base = sent
            if self._receiver is not None:
                self._receiver.end()
                self._receiver = None
        else:
            codec.restore(before)
        seconds = time.monotonic() - began
        if deletes:  # now that nobody waits for this replica: it takes round trips for each packet of each
            self._board.delete_rounds(self._slot, self._first_kept(started))
        return ExchangeResult(anchor, position, base, members, is_member, seconds)

    def tend(self) -> float:
        """Do what others rely on: give a sign of life, if one is due, and send chunks to each newcomer.

        Returns:
            Seconds after which there is more to do.

        Raises:
            CompressionError: this replica has ended.
        """
        if self.ended.is_set():
            raise CompressionError("this replica has ended")
        if time.monotonic() - self._last_beat >= BEAT_S:
            self._last_beat = time.monotonic()
            if self._board.chunks.moved != self._moved_chunks:
                self._moved_chunks = self._board.chunks.moved
                self._launch.count_moved(1)
            if self._slot == 0 and self._sender.has_anchor:
                self._board.beat()
            if self._voting is not None:
                self._board.say_alive(self._voting, self.number)
        return self._sender.send_chunks(BEAT_S)

    def idle(self) -> float:
        """Like `tend`, between two exchanges: newcomers that wait get the anchor of this replica."""
        self._voting = None  # of an exchange that has failed
        if time.monotonic() - self._last_beat >= BEAT_S:
            self._sender.hand_over(self.number, self._kept_rounds)
            self._sender.begin_uploads(self.number)
        return self.tend()

    # A round

    def _open_round(self, position: Position) -> int:
        """Return the round of this exchange: slot 0 chooses the first undecided one, and tells the others."""
        if self._slot == 0:
            number = max(position.round, self._board.head().round)
            while self._board.outcome(number) is not None:
                number += 1
            if number > position.round:
                self._board.announce(number, self.number)
            self._launch.set_exchange(self._exchanges, number)
        return self._wait(lambda: self._launch.exchange(self._exchanges), "the round of slot 0")

    def _is_open(self, number: int) -> bool:
        """Return whether a round has no outcome yet.

        Raises:
            CompressionError: others have deleted its outcome, while this replica was stopped, or slow.
        """
        self._last_look = time.monotonic()
        head = self._board.head()  # before the outcome, which is there when the head moves on
        if self._board.outcome(number) is not None:
            return False
        if head.round <= number:
            return True
        # nobody else deletes what this replica has written since; another slot may have deleted that it sends
        self._board.delete_packet(number, self._slot, self.number)
        for slot in {0, self._slot}:
            self._board.delete_round(number, slot)
        raise _too_late(number)

    def _follow(
        self, anchor: Anchor, position: Position, codec: DeltaCodec
    ) -> tuple[Anchor, Position, tuple[int, ...]]:
        """Wait for the outcome of the round at `position`, and apply it to `anchor`."""
        number, total, summed = position.round, None, None
        if self._is_open(number):
            candidates = self._candidates(number)
            self._voting = number if self._slot == 0 else None
            bad, total = self._sum(number, candidates, codec)
            summed = tuple(each for each in candidates if each not in bad)
            self._launch.set_checked(self._slot, number, bad)
            if self._slot == 0:
                self._conclude(number, candidates)
        text = self._wait(lambda: self._board.outcome(number), f"the outcome of round {number}", number)
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
        self._deletes = not members or self.number == min(members)
        if self._slot == 0:
            self._board.move_head(before, position)
        self.take_part(anchor, position)
        return anchor, position, members

    def _candidates(self, number: int) -> list[int]:
        """Wait until it is decided who came to a round in time. Slot 0 decides it, if its replica came."""
        since: float | None = None
        # members of the round before may not have seen its outcome yet, so they have not announced themselves
        expected = set(members_of(self._board.outcome(number - 1) or "{}")) if self._slot == 0 else set[int]()
        silent_in, silent = self._silent
        if silent_in == number - 1:  # they have been waited for
            expected -= silent

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

        return self._wait(ready, f"the other slots of this replica in round {number}", number)

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
                if self.ended.is_set():  # which is no fault of the packet
                    raise
                bad[replica] = str(error)
                continue
            total = delta if total is None else total.add_(delta)
        return bad, total

    def _packet(self, number: int, replica: int) -> Tensor:
        """Return a packet; that of this rank is at hand."""
        if self._own is not None and replica == self.number:
            own_number, own_digest, packet = self._own
            if own_number == number and self._board.packet_digest(number, self._slot, replica) == own_digest:
                return packet
        return self._board.packet(number, self._slot, replica)

    def _conclude(self, number: int, candidates: Sequence[int]) -> None:
        """Vote when all slots of this replica have checked the packets, and help to decide the outcome."""
        bad: dict[int, str] = {}
        for slot in range(self._slots):
            checked = functools.partial(self._checked, number, slot)
            bad |= self._wait(checked, f"slot {slot} in round {number}", number)
        self._board.vote(number, self.number, sorted(bad))
        self._voting = None
        outcome = self._wait(self._vote_counter(number, candidates), f"votes of round {number}", number)
        for replica in sorted(set(candidates).difference(members_of(outcome))):
            why = bad.get(replica, "other replicas cannot read its packet")
            log.warning(f"ds_compress: round {number}: replica {replica} is left out: {why}")

    def _checked(self, number: int, slot: int) -> dict[int, str] | None:
        """Return why packets of a slot are bad; a slot that saw an outcome of others has checked nothing."""
        found = self._launch.checked(slot, number)
        return {} if found is None and self._board.outcome(number) is not None else found

    def _vote_counter(self, number: int, candidates: Sequence[int]) -> Callable[[], str | None]:
        """Return what counts the votes of a round, and returns its outcome as soon as no vote that is to come
        can change it. Votes come from candidates; who has been silent for the grace time has none."""
        signs, heard, began = dict[int, int](), dict[int, float](), time.monotonic()

        def is_silent(replica: int, alive: list[str]) -> bool:
            now = time.monotonic()
            if signs.get(replica) != alive.count(str(replica)):
                signs[replica], heard[replica] = alive.count(str(replica)), now
            return now - heard[replica] > self._options.grace_s + BEAT_S

        def ready() -> str | None:
            if (outcome := self._board.outcome(number)) is not None:
                return outcome
            votes = self._board.votes(number)
            missing = [each for each in candidates if each not in votes]
            alive = self._board.alive(number) if missing else []
            counted = [votes[each] for each in candidates if each in votes]
            silent = {each for each in missing if is_silent(each, alive)}
            self._silent = number, silent
            is_over = time.monotonic() - began >= TRANSFER_S
            voters = len(counted) + (0 if is_over else len(missing) - len(silent))
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
        """Return the first round whose packets are needed when round `number` is open."""
        given = [each[0] for each in self._board.newcomers().values() if each is not None]
        needed = [each for each in given if each > number - self._kept_rounds]
        return min([max(0, number - KEPT_ROUNDS + 1), *needed])

    def _wait(self, ready: Callable[[], Found | None], what: str, number: int | None = None) -> Found:
        """Return what `ready` returns, when it is not None.

        Args:
            number: of the round that has to be in the store meanwhile; None: of none.

        Raises:
            CompressionError: no rank of this launch has sent or received anything for too long, one has
                failed, or others have deleted the round.
        """
        moved, since, pause = self._launch.count_moved(), time.monotonic(), 0.01
        looked = since
        while True:
            if number is not None and time.monotonic() - self._last_look >= BEAT_S:
                self._is_open(number)
            if (found := ready()) is not None:
                return found
            if (now := time.monotonic()) - looked > BEAT_S:
                if (failure := self._launch.failure()) is not None:
                    raise CompressionError(failure)
                before, moved, looked = moved, self._launch.count_moved(), now
                if moved != before:
                    since = now
                elif now - since > self._limit:
                    raise CompressionError(f"{what} did not come within {self._limit:g} s")
            pause = min(1.5 * pause, 0.5)
            self.ended.wait(min(pause, self.tend()))


def _too_late(number: int) -> CompressionError:
    return CompressionError(
        f"round {number} was long ago; a new anchor is needed; if this site is always so slow, "
        "let it compute fewer micro-batches a step"
    )
