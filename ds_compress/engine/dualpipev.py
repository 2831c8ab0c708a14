"""The mixin over `DualPipeVEngine` (DeepSpeed 0.19.8 or newer).

N ranks hold 2N stages: rank r has stage r, which it runs in phase 0, and stage 2N-1-r, in phase 1. Between
stages N-1 and N nothing is sent, both are on the last rank. The other cuts are the boundaries, counted in the
way of the data:

    stages      0   1   2 | 3   4   5         N = 3
    boundaries    0   1   .   2   3           so boundary b < N-1 joins ranks b and b+1 on the way out,
                                              boundary b >= N-1 ranks 2N-2-b and 2N-3-b on the way back

DeepSpeed queues the sends and receives of an instruction and launches the queue as one batch later. Here each
instruction queues one packet, and what arrived is decoded when the batch is complete. The order of the queue,
by which the two sides of a pair match their packets, is DeepSpeed's own.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe import schedule
from torch import Tensor

from ds_compress.checkpoint.restore import Side
from ds_compress.config import DIRECTIONS, KEY, Config
from ds_compress.engine.announced_tensors import as_announced
from ds_compress.engine.deepspeed import PipelineEngine, neighbour_stages, queue_message, take_queue
from ds_compress.engine.intercept import PointToPoint
from ds_compress.engine.message_path import MessagePath
from ds_compress.engine.mixin import RECEIVES, SENDS, CompressedEngine
from ds_compress.engine.stage import Stage
from ds_compress.engine.tied_gradients import reduce_tied_gradients
from ds_compress.errors import CompressionError
from ds_compress.message.channel import Boundary, Channel
from ds_compress.message.channel_end import ReceivingEnd, SendingEnd
from ds_compress.transport.codec_stream import CodecStream
from ds_compress.transport.p2p import PeerTimeout, Receiver, Sender
from ds_compress.transport.packet_memory import Packet

Queue = Callable[[Callable[..., Any], list[Tensor]], None]


class QueuedSender(Sender):
    """Puts packets into DeepSpeed's queue."""

    def __init__(self, peer: int, device: torch.device, queue: Queue):
        """
        Args:
            queue: queues an operation, `dist.isend` or `dist.irecv`, on tensors.
        """
        super().__init__(peer, device, is_eager=False)
        self._queue = queue

    def send(self, packet: Packet) -> None:
        self._queue(dist.isend, [packet.memory])


class QueuedReceiver(Receiver):
    """Queues receives when told to expect packets; the first packet asked for launches the queue."""

    def __init__(self, peer: int, device: torch.device, queue: Queue, launch: Callable[[], None]):
        """
        Args:
            launch: returns when everything queued is done.
        """
        super().__init__(peer, device, is_eager=False)
        self._queue = queue
        self._launch = launch
        self._queued: deque[Packet] = deque()

    def expect(self, nbytes: int, count: int) -> None:
        for _ in range(count):
            # of its own: what is sent uncompressed is used in place until the backward pass
            packet = self._empty(nbytes)
            self._queued.append(packet)
            self._queue(dist.irecv, [packet.memory])

    def receive(self, nbytes: int) -> Packet:
        self._launch()
        return self._queued.popleft()


class TwoStages(Stage):
    """The stages of both phases of a rank."""

    def __init__(
        self, config: Config, p2p: PointToPoint, phases: list[tuple[Boundary | None, Boundary | None]]
    ):
        """Connect `phases`: the boundaries before and after the rank's stage of each phase."""
        super().__init__(config, p2p, *phases[0])
        self.phases = phases

    @property
    def boundaries(self) -> list[Boundary]:
        return [boundary for phase in self.phases for boundary in phase if boundary is not None]

    @property
    def is_sending(self) -> bool:
        """Return True: what DualPipeV announces it sends through a queue of its own."""
        return True


class DualPipeVPath(MessagePath):
    """Sends and receives the messages of both stages of a rank under DualPipeV."""

    own_link = "of DualPipeV"

    def __init__(self, engine: PipelineEngine, *args: Any):
        self._base: Any = super(CompressedDualPipeV, engine)
        self._instruction = schedule.SendActivation, 0  # the one in progress, and its phase
        self._buffer_id = 0
        # the instruction, phase, buffer and tensors to fill of each packet queued to be received
        self._arriving: list[tuple[type, int, int, list[Tensor]]] = []
        self._timeouts: list[PeerTimeout] = []  # of each operation in DeepSpeed's queue
        super().__init__(engine, *args)

    @staticmethod
    def check(config: Config, stages: int) -> int:
        for direction in DIRECTIONS:
            if config.in_force.has_extra_payload(direction):
                raise CompressionError(
                    f"{KEY}.{direction}: DualPipeV posts receives before the size of a message that follows "
                    "from the data is known; allowed: any codec but 'lossless', any feedback but 'aqsgd'"
                )
        link = config.block.link
        for option, value in (("depth", link.depth), ("connections", link.connections)):
            if value != 1:
                note = f"{KEY}.link.{option}: {value} has no effect: DualPipeV has a schedule of its own"
                config.notes[note] = None
        boundaries = 2 * stages - 2
        config.in_force.check_boundaries(boundaries)
        return boundaries

    def connect(self, p2p: PointToPoint, depth: int) -> "TwoStages":
        engine, config = self.engine, self.config
        rank, last = engine.stage_id, engine.num_stages - 1
        replica = engine.grid.get_data_parallel_id()

        def boundary(number: int, exists: bool) -> Boundary | None:
            return Boundary(number, config, replica) if exists else None

        out = boundary(rank - 1, rank > 0), boundary(rank, rank < last)
        back = boundary(2 * last - 1 - rank, rank < last), boundary(2 * last - rank, rank > 0)
        stage = TwoStages(config, p2p, [out, back])
        for phase, (before, after) in enumerate(stage.phases):
            upstream, downstream = neighbour_stages(engine, phase)
            for end, neighbour, receiving, sending in (
                (before, upstream, schedule.RecvActivation, schedule.SendGrad),
                (after, downstream, schedule.RecvGrad, schedule.SendActivation),
            ):
                if end is None:
                    continue
                peer = engine.grid.stage_to_global(neighbour)
                come, go = end.channels if end is before else end.channels[::-1]
                receiver = QueuedReceiver(peer, engine.device, self._queue_to(neighbour, come), self._launch)
                sender = QueuedSender(peer, engine.device, self._queue_to(neighbour, go))
                # `check` refuses codecs with extra packets; the queue starts on the compute stream
                stage.receivers[receiving, phase] = ReceivingEnd(come, receiver, receiver, CodecStream())
                stage.senders[sending, phase] = SendingEnd(go, sender, sender, CodecStream())
        self.phases = stage.phases
        return stage

    def sides(self) -> list[Side]:
        return [
            Side(boundary, layer, name)
            for phase, layers in zip(self.phases, self.engine.module.phase_bounds)
            for boundary, layer, name in zip(phase, layers, ("downstream", "upstream"))
            if boundary is not None
        ]

    def evaluated_at_least(self) -> int:
        """Return the micro-batches of a step: DeepSpeed counts the buffers of the second phase from there."""
        return int(self.engine.micro_batches)

    def post_receives(self, training: bool) -> None:
        """Do nothing: the schedule posts its receives before the sender runs."""
        self._arriving.clear()

    def boundary_of_shapes(self, sends: bool) -> Boundary:
        return self._boundary(self._instruction[1], sends)

    def _boundary(self, phase: int, sends: bool) -> Boundary:
        boundary = self.phases[phase][int(sends)]
        assert boundary is not None
        return boundary

    def run(self, instruction: type, buffer_id: int, phase: int) -> None:
        """Run DeepSpeed's instruction: what it queues belongs to it."""
        self._instruction, self._buffer_id = (instruction, phase), buffer_id
        self.original[instruction](self.engine, buffer_id, phase)

    def queue(self, tensors: list[Tensor]) -> None:
        """Queue one packet for the tensors that the instruction in progress sends or receives."""
        instruction, phase = self._instruction
        if instruction is schedule.SendActivation:
            boundary = self._boundary(phase, sends=True)
            tensors = as_announced(
                boundary.forward, tensors, self.stage.announced.get(boundary.number, tensors)
            )
        if instruction in SENDS:
            self.stage.dispatch(instruction, self._buffer_id, tensors, phase=phase)
        else:
            self.stage.post_receive(instruction, phase, tensors)
            self._arriving.append((instruction, phase, self._buffer_id, tensors))

    def commit(self, run: Callable[[], None]) -> None:
        """Launch the queue and decode what arrives; `run` is DeepSpeed's own way to launch it."""
        for instruction, phase, buffer_id, tensors in self._arriving:
            arrived = self.stage.fetch(instruction, buffer_id, tensors, phase=phase)
            for tensor, came in zip(tensors, arrived):
                tensor.data = came
            if instruction is schedule.RecvActivation and self.lookahead.tracking:
                self.tracked.mark_received(tensors, self._boundary(phase, sends=False))
        self._arriving.clear()
        self._launch()  # a queue of sends alone, which no receive has launched
        run()  # with nothing left to do

    def _queue_to(self, stage: int, channel: Channel) -> Queue:
        timeout = PeerTimeout(channel.place, self.config.block.link.timeout_s)

        def queue(operation: Callable[..., Any], tensors: list[Tensor]) -> None:
            queue_message(self._base, operation, tensors, stage)
            self._timeouts.append(timeout)

        return queue

    def _launch(self) -> None:
        """Do all that is queued, as DeepSpeed does it; but failures name their boundary."""
        operations, timeouts = take_queue(self.engine), self._timeouts
        self._timeouts = []
        if not operations:
            return
        peers = ", ".join(sorted({str(operation.peer) for operation in operations}))
        anywhere = PeerTimeout("; ".join(dict.fromkeys(t.place for t in timeouts)), timeouts[0].seconds)
        with anywhere.naming(peers):
            requests = dist.batch_isend_irecv(operations)
        if len(requests) < len(operations):  # NCCL has one request for all
            for request in requests:
                anywhere.wait(request, peers, self.engine.device)
        else:
            for request, operation, own in zip(requests, operations, timeouts):
                own.wait(request, operation.peer, self.engine.device)


def _around(instruction: type) -> Callable[..., None]:
    """Return what runs instead of DeepSpeed's function for an instruction."""

    def run(engine: PipelineEngine, buffer_id: int, phase: int) -> None:
        engine.ds_compress.path.run(instruction, buffer_id, phase)

    return run


def _run_commit(engine: PipelineEngine, *args: Any, **kwargs: Any) -> None:
    path = engine.ds_compress.path
    path.commit(partial(path.original[schedule.CommitP2P], engine, *args, **kwargs))


class CompressedDualPipeV(CompressedEngine):
    """Runs DeepSpeed's DualPipeV with every message in one packet."""

    _AROUND = {
        **{kind: _around(kind) for kind in (*SENDS, *RECEIVES)},
        schedule.CommitP2P: _run_commit,
        schedule.ReduceTiedGrads: reduce_tied_gradients,
    }

    def _queue_p2p(self, operation: Any, tensors: list[Tensor], stage: int) -> None:
        path: Any = self.ds_compress.path
        path.queue(tensors)

    def _exec_commit_p2p(self, *args: Any, **kwargs: Any) -> None:
        path: Any = self.ds_compress.path
        path.commit(partial(super()._exec_commit_p2p, *args, **kwargs))
