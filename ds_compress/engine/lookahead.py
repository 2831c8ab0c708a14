"""Find which messages of a schedule may be sent as soon as they are computed, and how many will be received.

DeepSpeed sends a message at the place that its schedule gives; an eager link sends it when it is computed.
Both send the same message only if

    ForwardPass(b) ... SendActivation(b)

the next message of the channel is the one just computed, and no instruction in between uses buffer b or is
unknown to DeepSpeed. Schedules of other projects send twice per micro-batch, or in another order than they
compute. Their messages are sent at their own place.
"""

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import chain, repeat
from typing import Any

from deepspeed.runtime.pipe import schedule

from ds_compress.planning.schedule import DepthSchedule
from ds_compress.transport.p2p import packets_in_flight

MADE_BY = {schedule.SendActivation: schedule.ForwardPass, schedule.SendGrad: schedule.BackwardPass}
KNOWN = {
    found
    for found in vars(schedule).values()
    if isinstance(found, type) and issubclass(found, schedule.PipeInstruction)
}
ORDERED = (schedule.TrainSchedule, DepthSchedule, schedule.InferenceSchedule)
"""Schedules in which no posted receive depends on what its own rank launches later
(tests/transport/test_posting.py)."""

NOWHERE = -1
Tracked = AbstractContextManager[Any]


class _Step(list[Any]):
    """The instructions of a step; iterating over them moves `plan.at` along."""

    plan: "Lookahead"
    indices: range  # of its instructions in the schedule

    def __iter__(self) -> Iterator[Any]:
        plan = self.plan
        # Instructions that a program appends have no index in the schedule
        for index, instruction in zip(chain(self.indices, repeat(NOWHERE)), super().__iter__()):
            if index in plan.left:  # a send whose message has left early
                continue
            plan.at = index
            context = plan.tracking() if plan.tracking and computes(instruction) else None
            with context or contextlib.nullcontext():
                yield instruction
        plan.at = NOWHERE


class Lookahead:
    """The plan of one schedule, and the position in it."""

    def __init__(
        self,
        pipe_schedule: Any = None,
        tracking: Callable[[], Tracked | None] | None = None,
        depth: int = 1,
        in_order: bool = False,
    ):
        """
        Args:
            pipe_schedule: not analysed if None, or if it has an iterator of its own.
            tracking: gives a context for an instruction that may compute what is sent.
            depth: of the links.
            in_order: let no message leave early.
        """
        self.plain = isinstance(pipe_schedule, schedule.PipeSchedule) and all(
            getattr(type(pipe_schedule), name) is getattr(schedule.PipeSchedule, name)
            for name in ("__iter__", "__next__")
        )
        self.tracking = tracking
        self.at = NOWHERE
        """The index of the instruction in progress; NOWHERE outside of one."""

        self.left: set[int] = set()
        """Indices of the send instructions whose message has left early."""

        self._flat: list[Any] = []
        self._steps = []
        for instructions in pipe_schedule.steps() if self.plain else ():
            step = _Step(instructions)
            self._steps.append(step)
            step.plan, step.indices = self, range(len(self._flat), len(self._flat) + len(instructions))
            self._flat += instructions
        self.counts = Counter(map(type, self._flat))
        self._sends = {kind: deque(_indices(self._flat, kind)) for kind in MADE_BY}  # that may not have left
        self.early = _early(self._flat, packets_in_flight(depth))
        """Index of the send instruction whose message may leave early, by index of what computes it."""

        self._in_order = in_order
        self.has_kept = False
        """Whether a message stays for `in_order` alone."""

    def steps(self) -> Iterator[list[Any]]:
        """Iterate over the schedule's steps, and track the instructions as they run."""
        return iter(self._steps)

    def end(self) -> None:
        """Let go of the schedule, which has run: its steps and this object refer to each other, and programs
        switch off the garbage collector, or call it seldom."""
        self._steps.clear()

    @property
    def current(self) -> Any:
        """Return the instruction in progress; None outside of one."""
        index = self.at
        return None if index == NOWHERE else self._flat[index]

    def leaves_early(self, made_by: type, buffer_id: int) -> bool:
        """Return whether the message that `made_by`, in progress, has just put into `buffer_id` may leave
        now; if so it counts as gone."""
        index = self.at
        send = self.early.get(index, NOWHERE)
        if send == NOWHERE:
            return False
        made = self._flat[index]
        if made.kwargs.get("buffer_id") != buffer_id or type(made) is not made_by:
            return False
        waiting = self._sends[type(self._flat[send])]
        while waiting and waiting[0] < index:  # left in its own place
            waiting.popleft()
        if not waiting or waiting[0] != send:
            return False
        if self._in_order:
            self.has_kept = True
            return False
        self.left.add(waiting.popleft())
        return True


def computes(instruction: Any) -> bool:
    """Return whether an instruction may fill a buffer with what will be sent."""
    return type(instruction) is schedule.ForwardPass or type(instruction) not in KNOWN


def _indices(flat: list[Any], kind: type) -> list[int]:
    return [index for index, instruction in enumerate(flat) if type(instruction) is kind]


def _early(flat: list[Any], most: int) -> dict[int, int]:
    """Find the messages that may be sent as soon as they are computed.

    Return, by the position of the instruction that computes a message, the position of its send instruction.

    Args:
        most: messages in flight before a sender waits.
    """
    early = {}
    for kind, made_by in MADE_BY.items():
        indices = _indices(flat, kind)
        for number, index in enumerate(indices):
            buffer_id = flat[index].kwargs["buffer_id"]
            for before in range(index - 1, -1, -1):
                touches = flat[before].kwargs.get("buffer_id") == buffer_id
                if touches and type(flat[before]) is made_by:
                    # Before it makes message n the sender waits until message n - `most` was received. If the
                    # schedule sends that one earlier, DeepSpeed's own order waits for it too
                    if number < most or indices[number - most] < before:
                        early[before] = index
                    break
                if touches or type(flat[before]) not in KNOWN:
                    break
    return early
