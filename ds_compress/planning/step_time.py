"""Predict how long a training step takes, by replaying its schedule.

The schedule is DeepSpeed's 1F1B or a deeper one, with given compute times, codecs and links. Every boundary
has a link of its own, equally fast in both directions at once. Encoding and decoding take the stage's own
time, as on a CPU. Times are seconds, sizes bytes.
"""

from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ds_compress.config.policies import ChannelKey

FINISHED = object()
Waiting = Generator[None, None, float]
"""Yields while it waits for another stage; returns when it is done, in seconds since the step began."""


@dataclass(frozen=True)
class Workload:
    """Compute time of each stage, in seconds per micro-batch."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    micro_batches: int
    per_step: float = 0.0  # seconds of a step beside its micro-batches: optimizer, sum of the losses

    @property
    def stages(self) -> int:
        return len(self.forward)


@dataclass(frozen=True)
class MessageCost:
    """Cost of one message in one direction."""

    nbytes: int  # on the wire
    encode: float = 0.0  # seconds
    decode: float = 0.0


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of a link."""

    bandwidth: float = float("inf")  # bytes per second, in each direction
    latency: float = 0.0  # seconds one way


LinkSpeeds = LinkSpeed | tuple[LinkSpeed, ...]


@dataclass(frozen=True)
class TransferPlan:
    """Transfers of a recipe; costs are those of every boundary, or one per boundary."""

    forward: MessageCost | tuple[MessageCost, ...]
    backward: MessageCost | tuple[MessageCost, ...]
    eager: bool
    depth: int = 1  # more needs an eager link
    exchanged: int = 0  # bytes of gradients of tied weights that a stage sends after the last backward pass


@dataclass(frozen=True)
class Prediction:
    """Seconds of one step, and of the same step without some of its costs."""

    step: float
    free_link: float  # with an infinitely fast link
    compute: float  # with free codecs too: no recipe is faster
    link_busy: float  # share of the step in which the busier direction of a link transmits

    @property
    def limit(self) -> str:
        """Return what takes most of the time above `compute`: "link" or "codec", or "compute" below 5 %."""
        exposed = {"link": self.step - self.free_link, "codec": self.free_link - self.compute}
        worst = max(exposed, key=lambda name: exposed[name])
        return worst if exposed[worst] > 0.05 * self.step else "compute"


def step_seconds(workload: Workload, plan: TransferPlan, network: LinkSpeeds) -> float:
    """Predict the step time of `workload`.

    Args:
        network: of every boundary, or one per boundary.
    """
    return _Replay(workload, plan, network).run() + _exchange_seconds(workload, plan, network)


def _exchange_seconds(workload: Workload, plan: TransferPlan, network: LinkSpeeds) -> float:
    """Return the seconds in which stages exchange gradients of tied weights, to their owners and back."""
    links = [_at(network, boundary) for boundary in range(workload.stages - 1)]
    if not plan.exchanged or not links:
        return 0.0
    slowest = min(link.bandwidth for link in links)
    return plan.exchanged / slowest + 2 * max(link.latency for link in links)


def predict(workload: Workload, plan: TransferPlan, network: LinkSpeeds) -> Prediction:
    """Predict the step time like `step_seconds`, and split it into its causes."""
    boundaries = range(workload.stages - 1)
    ways = plan.forward, plan.backward
    forward, backward = (tuple(MessageCost(_at(way, b).nbytes) for b in boundaries) for way in ways)
    free = replace(plan, forward=forward, backward=backward)
    step = step_seconds(workload, plan, network)
    transmits = [max(_at(way, b).nbytes for way in ways) / _at(network, b).bandwidth for b in boundaries]
    return Prediction(
        step=step,
        free_link=step_seconds(workload, plan, LinkSpeed()),
        compute=step_seconds(workload, free, LinkSpeed()),
        link_busy=workload.micro_batches * max(transmits, default=0.0) / step,
    )


def _at(values: Any, boundary: int) -> Any:
    """Return the value of `boundary`, where boundaries differ."""
    return values[boundary] if isinstance(values, tuple) else values


class _Replay:
    """All stages of one step, each a generator that yields while it waits for another stage.

    Entry n of each list below is about message n of its channel.
    """

    def __init__(self, workload: Workload, plan: TransferPlan, network: LinkSpeeds):
        self.workload = workload
        self.plan = plan
        self.network = network
        self.ready: dict[ChannelKey, list[float]] = defaultdict(list)  # when the packet can be sent
        self.requested: dict[ChannelKey, list[float]] = defaultdict(list)  # when the receiver asks for it
        self.arrived: dict[ChannelKey, list[float]] = defaultdict(list)
        self.events = 0
        # Imported here, so that a command can refuse its arguments before it waits for deepspeed
        from ds_compress.transport.p2p import packets_in_flight, posted_ahead

        # as over gloo: over NCCL few gradients are received ahead
        self.in_flight, self.posted_ahead = packets_in_flight(plan.depth), posted_ahead(plan.depth)

    def run(self) -> float:
        ends = [0.0] * self.workload.stages
        running = [self._stage(stage, ends) for stage in range(self.workload.stages)]
        while running:
            before = self.events, len(running)
            running = [program for program in running if next(program, FINISHED) is not FINISHED]
            assert (self.events, len(running)) != before, "the schedule waits for itself"
        return max(ends) + self.workload.per_step

    def _stage(self, stage: int, ends: list[float]) -> Iterator[None]:
        now = 0.0
        known = _instructions(self.workload.micro_batches, self.workload.stages, stage, self.plan.depth)
        for action, direction in known:
            forward = direction == "forward"
            if action == "compute":
                now += getattr(self.workload, direction)[stage]
            if action == "receive":
                now = yield from self._receive((stage - 1 if forward else stage, direction), now)
            elif action == ("compute" if self.plan.eager else "send"):
                channel = (stage if forward else stage - 1, direction)
                if 0 <= channel[0] < self.workload.stages - 1:
                    now = yield from self._send(channel, now)
        for channel in ((stage, "forward"), (stage - 1, "backward")):
            if self.ready[channel]:
                now = max(now, (yield from self._arrival(channel, len(self.ready[channel]) - 1)))
        ends[stage] = now

    def _send(self, channel: ChannelKey, now: float) -> Waiting:
        number = len(self.ready[channel])
        if self.plan.eager and number >= self.in_flight:
            now = max(now, (yield from self._arrival(channel, number - self.in_flight)))
        now += self._cost(channel).encode
        self._record(self.ready, channel, now)
        if self.plan.eager:
            return now
        # A blocking send returns when the last byte has left, not when it is there
        arrived = yield from self._arrival(channel, number)
        return max(now, arrived - _at(self.network, channel[0]).latency)

    def _receive(self, channel: ChannelKey, now: float) -> Waiting:
        number = len(self.requested[channel])
        self._record(self.requested, channel, now)
        return max(now, (yield from self._arrival(channel, number))) + self._cost(channel).decode

    def _arrival(self, channel: ChannelKey, number: int) -> Waiting:
        while not self._deliver(channel, number):
            yield
        return self.arrived[channel][number]

    def _deliver(self, channel: ChannelKey, number: int) -> bool:
        """Let packets of `channel` up to `number` arrive; False: not yet known to be ready on both sides."""
        arrived = self.arrived[channel]
        network = _at(self.network, channel[0])
        latency = network.latency
        while len(arrived) <= number:
            n = len(arrived)
            posted = self._posted(channel, n)
            if n >= len(self.ready[channel]) or posted is None:
                return False
            free = arrived[-1] - latency if arrived else 0.0
            start = max(self.ready[channel][n], posted + latency, free)
            transfer = self._cost(channel).nbytes / network.bandwidth
            self._record(self.arrived, channel, start + latency + transfer)
        return True

    def _posted(self, channel: ChannelKey, number: int) -> float | None:
        """Return when the receiver has memory ready for packet `number`; None while that is not known."""
        if self.plan.eager and number < self.posted_ahead:
            return 0.0
        request = number - self.posted_ahead + 1 if self.plan.eager else number
        return self.requested[channel][request] if request < len(self.requested[channel]) else None

    def _cost(self, channel: ChannelKey) -> MessageCost:
        return _at(getattr(self.plan, channel[1]), channel[0])

    def _record(self, times: dict[ChannelKey, list[float]], channel: ChannelKey, time: float) -> None:
        times[channel].append(time)
        self.events += 1


@lru_cache(2048)  # of 64 stages at all depths; making them takes longer than the rest of a replay
def _instructions(micro_batches: int, stages: int, stage: int, depth: int) -> tuple[tuple[str, str], ...]:
    """Return what a stage does in one step, in order: ("compute", "send" or "receive"; direction)."""
    from deepspeed.runtime.pipe import schedule

    from ds_compress.planning.schedule import DepthSchedule

    actions = {
        schedule.ForwardPass: ("compute", "forward"),
        schedule.BackwardPass: ("compute", "backward"),
        schedule.SendActivation: ("send", "forward"),
        schedule.SendGrad: ("send", "backward"),
        schedule.RecvActivation: ("receive", "forward"),
        schedule.RecvGrad: ("receive", "backward"),
    }
    steps = DepthSchedule(micro_batches, stages, stage, depth).steps()
    return tuple(actions[type(each)] for commands in steps for each in commands if type(each) in actions)
