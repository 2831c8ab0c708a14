"""Find deadlocks that ranks would have over NCCL, in what they asked of gloo.

gloo takes a message at once, and serves each pair of ranks by itself. NCCL is stricter:

- a transfer is done, for its sender too, when both sides have started it;
- a rank starts it when its stream has done what it was told to wait for, and the communicator what this rank
  launched before: that of the two ranks, or of the group if `init_process_group` was given a `device_id`;
- without `device_id` the first transfer of a communicator makes it, and the hosts of its ranks meet there;
- streams share queues of the device, with CUDA_DEVICE_MAX_CONNECTIONS=1 a single one: then a rank starts its
  work in the order in which it was launched;
- to load a kernel a rank may wait for all that it has launched.

So some things wait for others, and a circle of them is a deadlock.
"""

from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import product

from torch import distributed as dist


@dataclass(frozen=True)
class Launch:
    """A transfer as a rank launched it. Other launches of this rank are named by their numbers."""

    group: str
    own: int  # rank in the group
    peer: int | None  # None: a collective of all ranks of the group
    sends: bool
    batch: int | None  # launches of a batch are one for NCCL
    stream: frozenset[int]  # those that its stream waited for
    host: frozenset[int]  # those that the host waited for
    device: frozenset[int]  # those that any stream waited for

    def communicator(self, of_pairs):
        alone = of_pairs and self.peer is not None and self.batch is None
        return self.group, *(sorted([self.own, self.peer]) if alone else [])

    @property
    def way(self):
        """What it is one of: the n-th of the sender is the n-th of the receiver."""
        ends = () if self.peer is None else (self.own, self.peer) if self.sends else (self.peer, self.own)
        return self.group, *ends


class Launches(list):
    """What a rank launches, in the order of its host; each has a timeline in the simulated device."""

    def __init__(self):
        super().__init__()
        self.waited = set()  # timelines of those that some stream waited for
        self.are_waited_for_later = False
        self._timelines = []
        self._batches = 0
        self._is_batch = False

    def add(self, timeline, name, args, *known):
        """Add the operation of c10d with that `name`; `known`: timelines that its stream and host know."""
        is_message = name in ("send", "recv_")
        group = next(filter(None, map(_group, args)))
        peer, batch = args[2] if is_message else None, self._batches if self._is_batch else None
        waits = (
            frozenset(number for number, each in enumerate(self._timelines) if each in timelines)
            for timelines in (*known, self.waited)
        )
        self.append(Launch(group.group_name, group.rank(), peer, name == "send", batch, *waits))
        self._timelines.append(timeline)

    def rename_last(self, timeline):
        """Let the last launch, if there is one, have this `timeline`."""
        self._timelines[-1:] = [timeline] if self else []

    @contextmanager
    def waited_for_later(self):
        before, self.are_waited_for_later = self.are_waited_for_later, True
        yield
        self.are_waited_for_later = before

    @contextmanager
    def in_a_batch(self):
        """Give a list that gets the timelines of the batch."""
        first, timelines, self._is_batch = len(self), [], True
        with self.waited_for_later():
            yield timelines
        timelines += self._timelines[first:]
        self._is_batch, self._batches = False, self._batches + 1


def _group(argument):
    try:
        return dist.ProcessGroup.unbox(argument)
    except (TypeError, RuntimeError):
        return None


def deadlocks(ranks, are_new=False):
    """Return what never ends, for each way in which NCCL may work, (`device_id`, one queue), where
    something does: a circle of what waits for each other, or transfers that one side alone launched.

    Args:
        ranks: what each one launched.
        are_new: before each launch the rank may have to load a kernel.
    """
    ways = product((False, True), (False, True))
    return {way: found for way in ways if (found := _deadlock(ranks, are_new, *way))}


def apart(launch, other):
    """Whether they are not of one batch."""
    return launch.batch is None or launch.batch != other.batch


def _deadlock(ranks, are_new, has_device_id, has_one_queue):
    waits = defaultdict(set)
    for rank, launches in enumerate(ranks):
        counts, last, done, host = Counter(), {}, [], set()
        for number, launch in enumerate(launches):
            communicator = launch.communicator(of_pairs=not has_device_id)
            if not has_device_id and communicator not in last:
                made = "made", *communicator
                waits[made] |= host | {done[n] for n in launch.host}
                host = {made}
            batch, earlier, own = last.get(communicator, (None, set(), set()))
            if launch.batch is None or launch.batch != batch:
                earlier, own = own, set()
            last[communicator] = launch.batch, earlier, own
            started, transfer = ("started", rank, number), ("done", *launch.way, counts[launch.way])
            counts[launch.way] += 1
            before = launches[:number] if are_new else []
            needs = launch.stream | launch.host | {n for n, each in enumerate(before) if apart(each, launch)}
            if has_one_queue:
                needs |= launch.device
                waits[started] |= {("started", rank, number - 1)} if number else set()
            waits[started] |= earlier | host | {done[n] for n in needs}
            waits[transfer].add(started)
            own.add(transfer)
            done.append(transfer)
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        return error.args[1]
    messages = {node: starts for node, starts in waits.items() if node[0] == "done" and len(node) == 5}
    return [message for message, starts in messages.items() if len(starts) < 2]
