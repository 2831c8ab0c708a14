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

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe import schedule
from torch import Tensor

from ds_compress.checkpoint.search import Side
from ds_compress.config import DIRECTIONS, KEY
from ds_compress.engine.mixin import CompressedEngine
from ds_compress.engine.stage import Instruction, Stage
from ds_compress.errors import CompressionError
from ds_compress.message.channel import Boundary
from ds_compress.transport.p2p import PeerTimeout, Receiver, Sender
from ds_compress.transport.streams import Lane

Queue = Callable[[Callable, list[Tensor]], None]


class QueuedSender(Sender):
    """Puts packets into DeepSpeed's queue."""

    def __init__(self, peer: int, device: torch.device, queue: Queue):
        """`queue`: queues an operation, `dist.isend` or `dist.irecv`, on tensors."""
        super().__init__(peer, device)
        self._queue = queue

    def memory(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def send(self, packet: Tensor) -> None:
        self._queue(dist.isend, [packet])


class QueuedReceiver(Receiver):
    """Queues receives when told to expect packets; the first packet asked for launches the queue."""

    def __init__(self, peer: int, device: torch.device, queue: Queue, launch: Callable[[], None]):
        """`launch`: returns when everything queued is done."""
        super().__init__(peer, device)
        self._queue = queue
        self._launch = launch
        self._queued: deque[Tensor] = deque()

    def expect(self, nbytes: int, count: int) -> None:
        for _ in range(count):
            # of its own: what is sent uncompressed is used in place until the backward pass
            packet = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self._queued.append(packet)
            self._queue(dist.irecv, [packet])

    def receive(self, nbytes: int) -> Tensor:
        self._launch()
        return self._queued.popleft()


class TwoStages(Stage):
    """The stages of both phases of a rank."""

    def __init__(self, config, p2p, phases: list[tuple[Boundary | None, Boundary | None]]):
        """`phases`: the boundaries before and after the rank's stage of each phase."""
        super().__init__(config, p2p, *phases[0])
        self.phases = phases

    @property
    def boundaries(self) -> list[Boundary]:
        return [boundary for phase in self.phases for boundary in phase if boundary is not None]


class CompressedDualPipeV(CompressedEngine):
    """Runs DeepSpeed's DualPipeV with every message in one packet."""

    _AROUND = {
        schedule.SendActivation: "_send_activations",
        schedule.RecvActivation: "_recv_activations",
        schedule.SendGrad: "_send_grads",
        schedule.RecvGrad: "_recv_grads",
        schedule.CommitP2P: "_commit_p2p",
    }

    _own_link = "of DualPipeV"
    _instruction = Instruction.SEND_ACTIVATION, 0  # the one in progress that sends or receives, and its phase

    @staticmethod
    def _check(config, stages):
        for direction in DIRECTIONS:
            if config.has_rest(direction):
                raise CompressionError(
                    f"{KEY}.{direction}: DualPipeV posts receives before the size of a message that "
                    "follows from the "
                    "data is known; allowed: any codec but 'lossless', any feedback but 'aqsgd'"
                )
        depth = config.block.link.depth
        if depth != 1:
            note = f"{KEY}.link.depth: {depth} has no effect: DualPipeV has a schedule of its own"
            config.notes[note] = None
        boundaries = 2 * stages - 2
        config.check_boundaries(boundaries)
        return boundaries

    def _connect(self, config, p2p):
        rank, last = self.stage_id, self.num_stages - 1

        def boundary(number, exists):
            return Boundary(number, config, self.grid.get_data_parallel_id()) if exists else None

        out = boundary(rank - 1, rank > 0), boundary(rank, rank < last)
        back = boundary(2 * last - 1 - rank, rank < last), boundary(2 * last - rank, rank > 0)
        stage = self._compression = TwoStages(config, p2p, [out, back])
        self._arriving = []  # instruction and the tensors to fill, for each packet queued to be received
        self._patience = []  # for each operation in DeepSpeed's queue
        for phase, (before, after) in enumerate(stage.phases):
            for end, neighbour, receiving, sending in (
                (before, self._upstream_stage(phase), Instruction.RECV_ACTIVATION, Instruction.SEND_GRAD),
                (after, self._downstream_stage(phase), Instruction.RECV_GRAD, Instruction.SEND_ACTIVATION),
            ):
                if end is None:
                    continue
                peer = self.grid.stage_to_global(neighbour)
                come, go = end.channels if end is before else end.channels[::-1]
                receiver = QueuedReceiver(peer, self.device, self._queue_to(neighbour, come), self._launch)
                sender = QueuedSender(peer, self.device, self._queue_to(neighbour, go))
                # no second packets: _check has refused what sends them
                # and no lanes: the queue starts on the compute stream
                stage.connect_receiver(receiving, come, receiver, receiver, Lane(), phase)
                stage.connect_sender(sending, go, sender, sender, Lane(), phase)

    def _sides(self):
        return [
            Side(boundary, layer, name)
            for phase, layers in zip(self._compression.phases, self.module.phase_bounds)
            for boundary, layer, name in zip(phase, layers, ("downstream", "upstream"))
            if boundary is not None
        ]

    def _queue_to(self, stage, channel):
        queue_p2p = super()._queue_p2p
        patience = PeerTimeout(channel.place, self._compression.config.block.link.timeout_s)

        def queue(operation, tensors):
            queue_p2p(operation, tensors, stage)
            self._patience.append(patience)

        return queue

    def _launch(self):
        """Do all that is queued; as DeepSpeed does it, but a failure is named."""
        operations, patience = self._p2p_ops, self._patience
        self._p2p_ops, self._patience = [], []
        if not operations:
            return
        peers = ", ".join(sorted({str(operation.peer) for operation in operations}))
        anywhere = PeerTimeout("; ".join(dict.fromkeys(p.place for p in patience)), patience[0].seconds)
        with anywhere.naming(peers):
            requests = dist.batch_isend_irecv(operations)
        if len(requests) < len(operations):  # NCCL has one request for all
            for request in requests:
                anywhere.wait(request, peers, self.device)
        else:
            for request, operation, own in zip(requests, operations, patience):
                own.wait(request, operation.peer, self.device)

    def evaluated_at_least(self):
        """Those of a step: DeepSpeed counts the buffers of the second phase from there."""
        return self.micro_batches

    def _post_receives(self, training):
        """Nothing to do: the schedule posts its receives before the sender runs."""
        self._arriving.clear()

    def _boundaries_after(self):
        return [after for _, after in self._compression.phases if after is not None]

    def _boundary_of_shapes(self, sends):
        return self._compression.phases[self._instruction[1]][int(sends)]

    def _queue_p2p(self, operation, tensors, stage):
        instruction, phase = self._instruction
        if instruction in (Instruction.SEND_ACTIVATION, Instruction.SEND_GRAD):
            self._compression.dispatch(instruction, self._buffer_id, tensors, phase=phase)
        else:
            self._compression.queue(instruction, phase, tensors)
            self._arriving.append((instruction, phase, self._buffer_id, tensors))

    def _commit_p2p(self, *args, **kwargs):
        self._commit(partial(self._stock[schedule.CommitP2P], self, *args, **kwargs))

    def _commit(self, run):
        for instruction, phase, buffer_id, tensors in self._arriving:
            arrived = self._compression.fetch(instruction, buffer_id, partial(tuple, tensors), phase=phase)
            for tensor, came in zip(tensors, arrived):
                tensor.data = came
            if instruction is Instruction.RECV_ACTIVATION and self._lookahead.tracking:
                self._tracking.add_float(tensors, self._compression.phases[phase][0].carrying or ())
        self._arriving.clear()
        self._launch()  # what nobody waited for: a queue of sends alone
        run()  # DeepSpeed's own, with nothing left to do

    def _exec_commit_p2p(self, *args, **kwargs):
        self._commit(partial(super()._exec_commit_p2p, *args, **kwargs))

    def _during(self, kind, instruction, buffer_id, phase):
        self._instruction, self._buffer_id = (instruction, phase), buffer_id
        self._stock[kind](self, buffer_id, phase)

    def _send_activations(self, buffer_id, phase):
        self._during(schedule.SendActivation, Instruction.SEND_ACTIVATION, buffer_id, phase)

    def _send_grads(self, buffer_id, phase):
        self._during(schedule.SendGrad, Instruction.SEND_GRAD, buffer_id, phase)

    def _recv_activations(self, buffer_id, phase):
        self._during(schedule.RecvActivation, Instruction.RECV_ACTIVATION, buffer_id, phase)

    def _recv_grads(self, buffer_id, phase):
        self._during(schedule.RecvGrad, Instruction.RECV_GRAD, buffer_id, phase)
