"""Hand an anchor over to a newcomer: in chunks, through the store, while the replica that has it goes on.

A newcomer asks for an anchor. Slot 0 of a replica that is between two exchanges gives it the one that the
replica has, and every slot sends its part, of which `WINDOW` chunks are in the store at once. The newcomer
then follows the rounds since.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_compress.errors import CompressionError
from ds_compress.sites.board import CHUNK, KEPT_ROUNDS, WINDOW, Board, LaunchBoard, Position, Shipment
from ds_compress.sites.outer_step import Anchor

LOOK_S = 0.05
"""Seconds between two looks at what a newcomer has taken."""

ABANDONED_S = 60.0
"""Seconds without a sign of life after which a newcomer goes on with its own weights."""


class _Upload:
    """An anchor that this slot hands over."""

    def __init__(self, newcomer: int, anchor: Anchor, position: Position):
        self.newcomer = newcomer
        self.chunks = _chunks(anchor)
        self.shipment = Shipment(anchor.values.numel(), position, 0)
        self.taken, self.moved = 0, time.monotonic()  # chunks, and when their number has changed
        self.next_look = 0.0


class AnchorSender:
    """Hands the anchor of a replica over to newcomers; one for each slot."""

    def __init__(self, board: Board, slot: int, slots: int, limit: float):
        """
        Args:
            limit: seconds without progress after which a newcomer is given up.
        """
        self._board = board
        self._slot, self._slots, self._limit = slot, slots, limit
        self._held: tuple[Anchor, Position] | None = None  # for newcomers to take
        self._uploads: list[_Upload] = []
        self._is_sending = False
        self._handed = set[int]()  # newcomers whose upload has begun, until they are forgotten
        self._behind_since: float | None = None  # since when a newcomer waits beside this replica

    @property
    def has_anchor(self) -> bool:
        """Return whether newcomers can have an anchor of this replica."""
        return self._held is not None

    def hold(self, anchor: Anchor, position: Position) -> None:
        """Let newcomers have `anchor` from now on."""
        self._held = anchor, position

    def hand_over(self, replica: int, kept_rounds: float) -> None:
        """Let newcomers that wait have the anchor, if this is slot 0; other slots are not ahead of it.

        Args:
            replica: number of this one.
            kept_rounds: for which packets are in the store; inf: not known yet.
        """
        if self._slot or self._held is None:
            return
        _, position = self._held
        newcomers = self._board.newcomers()
        for newcomer, given in newcomers.items():
            if given is not None and given[0] <= position.round - kept_rounds:  # it has died
                for slot in range(self._slots):
                    self._board.end_shipment(newcomer, slot)
                self._board.forget_newcomer(newcomer)  # last, for who deletes that if this replica dies here
        waiting = [each for each, given in newcomers.items() if given is None and each != replica]
        if not waiting:
            self._behind_since = None
            return
        head = self._board.head()
        # packets of earlier rounds may be gone
        if head.round - position.round >= KEPT_ROUNDS or not self._board.leads_to(position, head):
            self._held = None  # no newcomer needs signs of life of this replica
            return
        now = time.monotonic()
        self._behind_since = None if head == position else self._behind_since or now
        if self._behind_since is not None and now - self._behind_since < ABANDONED_S:
            return  # one at the head hands over before that
        for newcomer in waiting:
            self._board.give_anchor(newcomer, position.round, replica)

    def begin_uploads(self, replica: int) -> None:
        """Begin to send the anchor to the newcomers to which slot 0 of this `replica` hands it over."""
        if self._held is None:
            return
        anchor, position = self._held
        newcomers = self._board.newcomers()
        for newcomer, given in newcomers.items():
            if newcomer not in self._handed and given == (position.round, replica):
                self._handed.add(newcomer)
                self._uploads.append(_Upload(newcomer, anchor, position))
        self._handed &= newcomers.keys()

    def send_chunks(self, longest: float) -> float:
        """Send chunks to each newcomer that has taken enough; return the seconds until there are more to
        send, at most `longest`."""
        if self._is_sending:  # who moves chunks calls this meanwhile
            return longest
        self._is_sending = True
        try:
            return min([longest, *(self._send_some(upload) for upload in list(self._uploads))])
        finally:
            self._is_sending = False

    def _send_some(self, upload: _Upload) -> float:
        """Send chunks of an anchor, if the newcomer has taken enough; return seconds until the next ones."""
        count, newcomer, sent = len(upload.chunks), upload.newcomer, upload.shipment.sent
        # half of the window: others are taken while these are sent
        end = min(count, upload.taken + WINDOW, sent + min(self._board.chunks.at_once, WINDOW // 2))
        if sent < end:
            shipment = upload.shipment._replace(sent=end)
            self._board.ship(newcomer, self._slot, upload.chunks[sent:end], shipment)
            upload.shipment = shipment
            return 0.0
        now = time.monotonic()
        if now < upload.next_look:
            return upload.next_look - now
        upload.next_look = now + LOOK_S
        taken = self._board.taken(newcomer, self._slot)
        if taken is not None and taken > upload.taken:
            upload.taken, upload.moved = taken, now
        is_over = taken is None or taken < 0
        if upload.taken >= count or is_over or now - upload.moved > self._limit:
            self._uploads.remove(upload)
            self._board.end_shipment(newcomer, self._slot)
            if upload.taken < count and self._slot == 0:
                self._board.forget_newcomer(newcomer)
        return 0.0


class AnchorReceiver:
    """Takes the anchor of another replica, as a newcomer; one for each slot."""

    def __init__(
        self,
        board: Board,
        launch: LaunchBoard,
        newcomer: int,
        slot: int,
        slots: int,
        wait: Callable[..., Any],
    ):
        """
        Args:
            newcomer: number of this replica.
            wait: takes a function, and a name for errors; returns what it returns, when that is not None.
        """
        self._board, self._launch, self._wait = board, launch, wait
        self._newcomer, self._slot, self._slots = newcomer, slot, slots

    def receive(self, numel: int, digest: str) -> tuple[Anchor | None, Position]:
        """Ask for an anchor and receive it; arguments and result are those of `Rounds.catch_up`."""
        if self._slot == 0:
            for slot in range(self._slots):  # one that begins late would seem to have died
                self._board.say_taken(self._newcomer, slot, 0)
            self._board.ask_for_anchor(self._newcomer)
        try:
            return self._take(numel, digest)
        except CompressionError:
            if self._board.newcomers().get(self._newcomer) is not None:
                self._board.say_taken(self._newcomer, self._slot, -1)  # who sends it deletes it
            else:
                self._board.end_shipment(self._newcomer, self._slot)
                if self._slot == 0:
                    self._board.forget_newcomer(self._newcomer)
            raise

    def end(self) -> None:
        """Say that this newcomer needs no older packets, when it is a member."""
        if self._slot == 0:
            self._board.forget_newcomer(self._newcomer)
        if self._board.taken(self._newcomer, self._slot) is not None:  # who sent the anchor has died
            self._board.end_shipment(self._newcomer, self._slot)

    def _take(self, numel: int, digest: str) -> tuple[Anchor | None, Position]:
        shipment = self._wait(self._watch(digest), "the anchor of another replica")
        if isinstance(shipment, int):
            self._board.end_shipment(self._newcomer, self._slot)
            return None, Position(shipment, digest)
        if shipment.numel != numel:
            raise CompressionError(f"an anchor of {shipment.numel} values came, expected {numel}")
        anchor = Anchor(*(torch.empty(numel, dtype=torch.float32, device="cpu") for _ in range(2)))
        chunks, taken = _chunks(anchor), 0
        while taken < len(chunks):
            sent = self._wait(functools.partial(self._sent, taken), f"part {taken} of an anchor")
            here = chunks[taken : min(sent, taken + WINDOW)]
            self._board.take(self._newcomer, self._slot, here, taken, shipment)
            taken += len(here)
            self._board.say_taken(self._newcomer, self._slot, taken)
        return anchor, shipment.position

    def _watch(self, digest: str) -> Callable[[], Shipment | int | None]:
        """Return what looks for an anchor. Without signs of life of others it returns a round, in which this
        launch goes on alone; slot 0 decides it for all, as some may have their part of an anchor by then."""
        signs: tuple[str, Position] | None = None
        heard = time.monotonic()

        def ready() -> Shipment | int | None:
            nonlocal signs, heard
            said = self._launch.alone() if self._slot else -1
            if said is None or said >= 0:
                return said
            shipment = self._board.shipment(self._newcomer, self._slot)
            if self._slot:
                return shipment
            if shipment is not None:
                self._launch.say_alone(-1)
                return shipment
            head = self._board.head()  # another newcomer that goes on alone moves it before it gives signs
            if (now := (self._board.beats(), head)) != signs:
                signs, heard = now, time.monotonic()
            if time.monotonic() - heard > ABANDONED_S:
                self._board.move_head(head, Position(head.round, digest))
                self._board.forget_newcomer(self._newcomer)
                self._launch.say_alone(head.round)
                return head.round
            return None

        return ready

    def _sent(self, taken: int) -> int | None:
        """Return how many chunks were sent, if they are more than were taken."""
        found = self._board.shipment(self._newcomer, self._slot)
        return found.sent if found is not None and found.sent > taken else None


def _chunks(anchor: Anchor) -> list[Tensor]:
    """Return views of an anchor: its bytes, in chunks."""
    return [chunk for each in anchor for chunk in each.view(torch.uint8).split(CHUNK)]
