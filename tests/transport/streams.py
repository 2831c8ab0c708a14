"""Simulate a device with streams on the CPU, and check the order of accesses with vector clocks.

Every tensor operation notes what it reads and writes, with what its timeline (a stream, a host thread or a
transfer) knows to be done. An access that does not know an earlier one it conflicts with is a race. Freed
memory goes back to the stream that allocated it, as in torch's caching allocator: handed out again before
another stream is done with it, and without `record_stream`, it is a race too.
"""

import sys
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ds_compress.engine import wiring
from ds_compress.transport import codec_stream, packet_parts, staging
from tests.transport.deadlocks import Launches

HOST_WAITS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operations whose result, or its size, the host has to wait for."""


class Timeline:
    """Operations that run one after the other."""

    def __init__(self, name):
        self.name = name
        self.done = 0
        self.known = {}

    def learn(self, known):
        for timeline, done in known.items():
            self.known[timeline] = max(done, self.known.get(timeline, 0))

    def state(self):
        return {**self.known, self: self.done}


class Memory:
    """What happened to a storage."""

    def __init__(self, home):
        self.home = home  # the stream that allocated it
        self.written = None  # (timeline, its count, operation)
        self.read = []
        self.used_on = {}  # by foreign stream, its count at the last use
        self.recorded = set()


class Stream(Timeline):
    def __init__(self, device=None, name="lane"):
        super().__init__(name)
        self.freed = []  # what foreign streams did with memory that came back

    def wait_stream(self, other):
        if self.name not in Device.now.deaf:
            self.learn(other.state())


class Event:
    def __init__(self, **options):
        self._known = {}

    def record(self):
        self._known = Device.now.stream.state()

    def synchronize(self):
        assert threading.current_thread() is not threading.main_thread(), "the host waits for the device"
        if "host" not in Device.now.deaf:
            Device.now.host.learn(self._known)


class Transfer:
    """Work of torch.distributed that is a timeline of its own; `waits`: who learns of its end."""

    def __init__(self, work, name, access, tensor, known, waits):
        self.timeline = Timeline(name)
        self.timeline.learn(known)
        Device.now.launches.rename_last(self.timeline)
        Device.now.note(self.timeline, name, **{access: [tensor]})
        self._work = work
        self._waits = waits

    def wait(self, timeout=None):
        self._work.wait(*([timeout] if timeout else []))
        self._waits().learn(self.timeline.state())
        Device.now.launches.waited.add(self.timeline)


class Device(TorchDispatchMode):
    """The device, and the checks on all that this process does with it while the mode is on."""

    now = None

    def __init__(self, deaf=()):
        """`deaf`: names of timelines that do not wait when told to, and "allocator"; to test the checks."""
        super().__init__()
        self.deaf = deaf
        self.problems = []
        self.launches = Launches()
        self.compute = self.stream = Stream(name="compute")
        self._hosts = {}
        self._memory = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @property
    def host(self):
        """The timeline of the calling thread."""
        return self._hosts.setdefault(threading.get_ident(), Timeline("host"))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self._launch(func.overloadpacket.__name__, args)
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in HOST_WAITS:
            self.host.learn(self.stream.state())
            if self.stream is not self.compute:
                self.problems.append(f"{self.stream.name}: the host waits for {func}")
        self.stream.learn(self.host.known)
        reads, writes = [], []
        values = dict(zip((argument.name for argument in func._schema.arguments), args)) | (kwargs or {})
        for argument in func._schema.arguments:
            into = writes if argument.alias_info is not None and argument.alias_info.is_write else reads
            into += _tensors(values.get(argument.name))
        given = {t.untyped_storage()._cdata for t in reads + writes}
        made = [t for t in _tensors(result) if t.untyped_storage()._cdata not in given]
        if func is torch.ops.aten.lift_fresh.default:  # of `torch.tensor`: made, but not by an operation
            made = _tensors(result)
        if made or writes or not _tensors(result):  # else a view, which looks at no data
            for tensor in made:
                self._allocate(tensor, func)
            self.note(self.stream, str(func), reads, made + writes)
        return result

    def _launch(self, name, args):
        """Note a transfer; the stream waits for it, unless it is to be waited for later."""
        timeline = Timeline(name)
        timeline.done = 1
        self.launches.add(timeline, name, args, self.stream.known, self.host.known)
        if not self.launches.are_waited_for_later:
            self.wait_for(timeline)

    def wait_for(self, timeline):
        self.stream.learn(timeline.state())
        self.launches.waited.add(timeline)

    def batch(self, function):
        """`dist.batch_isend_irecv`, after which the stream waits for all that it launched."""

        def launch(operations):
            with self.launches.in_a_batch() as timelines:
                works = function(operations)
            for timeline in timelines:
                self.wait_for(timeline)
            return works

        return launch

    def _allocate(self, tensor, func):
        stream = self.stream
        for uses, what in stream.freed:
            for timeline, done in uses.items():
                if stream.known.get(timeline, 0) < done:
                    said = f"may get memory that {timeline.name} uses, {what}"
                    self.problems.append(f"{stream.name}: {func} {said}")
        stream.freed.clear()
        storage = tensor.untyped_storage()
        memory = self._memory[storage] = Memory(self.stream)
        weakref.finalize(storage, self._free, memory)

    @staticmethod
    def _free(memory):
        uses = {stream: done for stream, done in memory.used_on.items() if stream not in memory.recorded}
        memory.home.freed.append((uses, memory.written and memory.written[2]))

    def note(self, timeline, name, reads=(), writes=()):
        """An operation of `timeline`."""
        with self._lock:
            timeline.done += 1
            for tensors, is_write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    memory = self._memory.setdefault(tensor.untyped_storage(), Memory(timeline))
                    self._access(timeline, name, memory, is_write)

    def _access(self, timeline, name, memory, is_write):
        earlier = [memory.written, *memory.read] if is_write else [memory.written]
        for access in earlier:
            if access and access[0] is not timeline and timeline.known.get(access[0], 0) < access[1]:
                said = f"does not wait for {access[2]} of {access[0].name}"
                self.problems.append(f"{timeline.name}: {name} {said}")
        if is_write:
            memory.written, memory.read = (timeline, timeline.done, name), []
        else:
            memory.read.append((timeline, timeline.done, name))
        if isinstance(timeline, Stream) and timeline is not memory.home:
            memory.used_on[timeline] = timeline.done

    def recorded(self, tensor, stream):
        if "allocator" not in self.deaf:
            self._memory.setdefault(tensor.untyped_storage(), Memory(self.stream)).recorded.add(stream)

    @contextmanager
    def on(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def transfers(self, timeline):
        """`over` of transfers that start when `timeline()` has got there; it learns of their end."""
        over, accesses = packet_parts.over, {"isend": "reads", "irecv": "writes"}

        def noted(group, name):
            def start(tensor, peer):
                with self.launches.waited_for_later():
                    work = over(group, name)(tensor, peer)
                return Transfer(work, name, accesses[name], tensor, timeline().state(), timeline)

            return start

        return noted


def _tensors(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _pinned(nbytes):
    with _disable_current_modes():  # the host's own memory: no stream makes it
        return torch.zeros(nbytes, dtype=torch.uint8)


def _replace(name, function):
    """Let all of ds_compress that imported a function of that name call another one."""
    for place, module in list(sys.modules.items()):
        if place.startswith("ds_compress.") and hasattr(module, name):
            setattr(module, name, function)


def install(staged, deaf=()):
    """Give this process, one of forked ranks, the device; `staged`: transfers cannot read its memory."""
    device = Device.now = Device(deaf)
    module = SimpleNamespace(Stream=Stream, Event=Event, stream=device.on, set_device=lambda which: None)
    module.current_stream = lambda which=None: device.stream
    torch.get_device_module = lambda which=None: module
    torch.Tensor.record_stream = lambda tensor, stream: device.recorded(tensor, stream)
    wiring.codec_stream_for = codec_stream.DeviceCodecStream
    staging.pinned = _pinned
    _replace("is_readable", lambda x: False)
    if staged:
        staging.is_needed = lambda which: True
        packet_parts.over = device.transfers(lambda: device.host)  # as gloo's, which know no stream
    else:
        packet_parts.over = device.transfers(lambda: device.stream)  # as NCCL's
        dist.batch_isend_irecv = device.batch(dist.batch_isend_irecv)
        _replace("receives_hold_device", lambda which: True)
    device.__enter__()
    return device
