"""How long a training step takes: a replay of DeepSpeed's 1F1B schedule, or of a deeper one, with given
compute times, codecs and link.

Every boundary has a link of its own, equally fast in both directions at once. Encoding and decoding take the
stage's own time, as they do on a CPU. Times are seconds, sizes bytes.
"""

from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

Channel = tuple[int, str]  # boundary, direction
FINISHED = object()
Waiting = Generator[None, None, float]
"""Yields while it has to wait for another stage; returns when it is done, in seconds of the step."""


@dataclass(frozen=True)
class Workload:
    """What the stages compute, in seconds per micro-batch, one entry per stage."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    micro_batches: int
    per_step: float = 0.0  # seconds a step takes beside its micro-batches: optimizer, sum of the losses

    @property
    def stages(self) -> int:
        return len(self.forward)


@dataclass(frozen=True)
class Traffic:
    """One message in one direction."""

    nbytes: int  # on the wire
    encode: float = 0.0  # seconds
    decode: float = 0.0


@dataclass(frozen=True)
class Network:
    bandwidth: float = float("inf")  # bytes per second, in each direction
    latency: float = 0.0  # seconds one way


Networks = Network | tuple[Network, ...]


@dataclass(frozen=True)
class Plan:
    """A recipe as the replay sees it. Traffic: of all boundaries, or of one after the other."""

    forward: Traffic | tuple[Traffic, ...]
    backward: Traffic | tuple[Traffic, ...]
    eager: bool
    depth: int = 1  # more needs an eager link


@dataclass(frozen=True)
class Prediction:
    """Seconds of one step, and what they would be without its costs."""

    step: float
    free_link: float  # with an infinitely fast link
    compute: float  # with free codecs too: what no recipe can beat
    link_busy: float  # share of the step in which the busier direction of a link transmits

    @property
    def limit(self) -> str:
        """What most of the time above `compute` is spent on; "compute" when that is under 5 % of the step."""
        exposed = {"link": self.step - self.free_link, "codec": self.free_link - self.compute}
        worst = max(exposed, key=lambda name: exposed[name])
        return worst if exposed[worst] > 0.05 * self.step else "compute"


def step_seconds(workload: Workload, plan: Plan, network: Networks) -> float:
    """Step time of `workload` when its messages are those of `plan`, over `network`: one for every boundary,
    or one after the other."""
    return _Replay(workload, plan, network).run()


def predict(workload: Workload, plan: Plan, network: Networks) -> Prediction:
    """Step time like `step_seconds`, and what it consists of."""
    boundaries = range(workload.stages - 1)
    forward, backward = (
        tuple(Traffic(_at(getattr(plan, direction), b).nbytes) for b in boundaries)
        for direction in ("forward", "backward")
    )
    free = replace(plan, forward=forward, backward=backward)
    step = step_seconds(workload, plan, network)
    transmits = [
        max(_at(plan.forward, b).nbytes, _at(plan.backward, b).nbytes) / _at(network, b).bandwidth
        for b in boundaries
    ]
    return Prediction(
        step=step,
        free_link=step_seconds(workload, plan, Network()),
        compute=step_seconds(workload, free, Network()),
        link_busy=workload.micro_batches * max(transmits, default=0.0) / step,
    )


def _at(values: Any, boundary: int) -> Any:
    """The one of `boundary`, where boundaries differ."""
    return values[boundary] if isinstance(values, tuple) else values


class _Replay:
    """All stages of one step. Each is a generator that yields when it has to wait for what another has not
    done yet.

    Messages of a channel are counted: entry n of each list below is about its message n.
    """

    def __init__(self, workload: Workload, plan: Plan, network: Networks):
        self.workload = workload
        self.plan = plan
        self.network = network
        self.offered: dict[Channel, list[float]] = defaultdict(list)  # when the packet is ready to leave
        self.wanted: dict[Channel, list[float]] = defaultdict(list)  # when the receiver asks for it
        self.arrived: dict[Channel, list[float]] = defaultdict(list)
        self.events = 0
        # Here, because a command that only plans should not wait for deepspeed before it can refuse its
        # arguments
        from ds_compress.transport.p2p import in_flight, posted_ahead

        self.in_flight, self.posted_ahead = in_flight(plan.depth), posted_ahead(plan.depth)

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
        for action, direction in _instructions(stage, self.workload, self.plan.depth):
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
            if self.offered[channel]:
                now = max(now, (yield from self._arrival(channel, len(self.offered[channel]) - 1)))
        ends[stage] = now

    def _send(self, channel: Channel, now: float) -> Waiting:
        number = len(self.offered[channel])
        if self.plan.eager and number >= self.in_flight:
            now = max(now, (yield from self._arrival(channel, number - self.in_flight)))
        now += self._traffic(channel).encode
        self._record(self.offered, channel, now)
        return now if self.plan.eager else (yield from self._arrival(channel, number))

    def _receive(self, channel: Channel, now: float) -> Waiting:
        number = len(self.wanted[channel])
        self._record(self.wanted, channel, now)
        return max(now, (yield from self._arrival(channel, number))) + self._traffic(channel).decode

    def _arrival(self, channel: Channel, number: int) -> Waiting:
        while not self._deliver(channel, number):
            yield
        return self.arrived[channel][number]

    def _deliver(self, channel: Channel, number: int) -> bool:
        """Let the packets of `channel` up to `number` arrive, as far as both sides are known to be ready."""
        arrived = self.arrived[channel]
        network = _at(self.network, channel[0])
        latency = network.latency
        while len(arrived) <= number:
            n = len(arrived)
            ready = self._posted(channel, n)
            if n >= len(self.offered[channel]) or ready is None:
                return False
            free = arrived[-1] - latency if arrived else 0.0
            start = max(self.offered[channel][n], ready + latency, free)
            transfer = self._traffic(channel).nbytes / network.bandwidth
            self._record(self.arrived, channel, start + latency + transfer)
        return True

    def _posted(self, channel: Channel, number: int) -> float | None:
        """When the receiver has memory ready for packet `number`, None while that is not known."""
        if self.plan.eager and number < self.posted_ahead:
            return 0.0
        asks = number - self.posted_ahead + 1 if self.plan.eager else number
        return self.wanted[channel][asks] if asks < len(self.wanted[channel]) else None

    def _traffic(self, channel: Channel) -> Traffic:
        return _at(getattr(self.plan, channel[1]), channel[0])

    def _record(self, times: dict[Channel, list[float]], channel: Channel, time: float) -> None:
        times[channel].append(time)
        self.events += 1


def _instructions(stage: int, workload: Workload, depth: int) -> Iterator[tuple[str, str]]:
    """What a stage does in one step, in the order of the schedule: (compute, send or receive; forward or
    backward)."""
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
    for commands in DepthSchedule(workload.micro_batches, workload.stages, stage, depth).steps():
        yield from (actions[type(command)] for command in commands if type(command) in actions)
