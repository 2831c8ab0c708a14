"""Where gradients between replicas are taken from DeepSpeed: its functions that all-reduce a bucket.

    DeepSpeedEngine.allreduce_bucket           gradients of parameters, or BF16_Optimizer's flat buffers
    DeepSpeedZeroOptimizer.allreduce_bucket    ZeRO-1: slices of gradients, see engine/optimizer_mixins.py

A bucket becomes parts of parameters, found by where their memory lies. Those that are compressed go through
an `Exchange`; DeepSpeed's own function gets the others, or the whole bucket where there are no others.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_compress.codec import CODECS
from ds_compress.codecs.lowrank import LowRank
from ds_compress.codecs.mixins import layers
from ds_compress.config import Config, ReplicasOptions
from ds_compress.engine.deepspeed import (
    BF16_Optimizer,
    PipelineEngine,
    add_to_flat_gradient,
    flat_gradient,
    flat_groups,
    is_moe_param,
    loss_scale,
    reduced_gradients,
)
from ds_compress.engine.exchanged_gradients import GradientTraffic
from ds_compress.engine.optimizer_mixins import Exact, Owners, mix_in
from ds_compress.engine.overlapped_gradients import EarlyBuckets
from ds_compress.engine.stage import Stage
from ds_compress.engine.wiring import connect_sets
from ds_compress.message.part import Step
from ds_compress.replicas.factors import build_exchange, compressed_parameters
from ds_compress.replicas.parameters import ParameterExchange, Range
from ds_compress.replicas.slices import DTYPES, Gradient
from ds_compress.replicas.transfers import Replicas
from ds_compress.transport.collectives import lowest
from ds_compress.transport.p2p import ExchangeConnections


class _GradientSpan(NamedTuple):
    """The memory of the gradient of a parameter."""

    start: int  # address
    nbytes: int
    number: int  # of the parameter


class ReplicaTraffic(GradientTraffic):
    """Compresses the gradients between the replicas of an engine's stage."""

    kind = "replicas"

    def __init__(
        self, engine: PipelineEngine, config: Config, connections: ExchangeConnections, has_partitions: bool
    ):
        """
        Args:
            engine: DeepSpeed's.
            config: with a codec for replicas.
            connections: of the replicas of this stage.
            has_partitions: whether all stages have a BF16_Optimizer whose groups are all partitioned over the
                replicas.
        """
        block, options = config.block, config.block.replicas
        assert options is not None and config.replica_codec is not None
        tied = {id(weight) for weight, _ in engine.module.get_tied_weights_and_groups()}
        compressed = {
            number: parameter
            for number, parameter in compressed_parameters(
                engine.module.parameters(), config.replica_codec
            ).items()
            if id(parameter) not in tied and not is_moe_param(parameter)
        }
        self._compressed = compressed
        self._numbers = {id(parameter): number for number, parameter in compressed.items()}
        replicas = Replicas.over(connections, engine.stage_id)
        bucket_bytes = options.bucket_mb * 10**6
        shared = block.seed, block.link.checksum
        itemsize = engine.communication_data_type.itemsize
        exchange = build_exchange(replicas, config.replica_codec, compressed, bucket_bytes, *shared, itemsize)
        super().__init__(engine, config, exchange)
        self._options = options
        self._has_partitions = has_partitions
        self.is_partitioned = False
        """Whether replicas need, of this step's averages, only those of their own partition, under
        BF16_Optimizer. The same on all stages: their norms are added up."""
        self._parameters = None
        if options.parameters != "none":
            codec = CODECS.build({"name": "quantize", "bits": options.parameters}, "parameters")
            self._parameters = ParameterExchange(replicas, codec, bucket_bytes, self.exchange.sent, *shared)
        self.early: EarlyBuckets | None = None
        if self._sends_early(options):
            sparse = {id(each.weight) for each in engine.module.modules() if getattr(each, "sparse", False)}
            usual = [
                (number, p)
                for number, p in compressed.items()
                if p.requires_grad and p.dtype in DTYPES and p.is_contiguous() and id(p) not in sparse
            ]
            take: Callable[[int, Tensor, bool], list[Gradient]] = self._take_gradient
            if isinstance(engine.optimizer, BF16_Optimizer):
                groups = enumerate(flat_groups(engine.optimizer))
                self._in_groups = {
                    id(p): (n, at) for n, group in groups for at, p in enumerate(group.parameters)
                }
                usual = [(number, p) for number, p in usual if id(p) in self._in_groups]
                take = self._take_flat_gradient
            self.early = EarlyBuckets(self.exchange, usual, bucket_bytes, take)

    @property
    def warmup_steps(self) -> int:
        return self._options.warmup_steps

    def _sends_early(self, options: ReplicasOptions) -> bool:
        """Return whether gradients are in place, and final, as soon as the last backward pass has made them.

        DeepSpeedZeroOptimizer and FP16_Optimizer copy them elsewhere. Layers that are recomputed, and
        DualPipeV, may run a backward pass in several parts. Experts of MoE layers exchange tokens between the
        same replicas.
        """
        engine = self._engine
        moved = engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization()
        moved = moved and not isinstance(engine.optimizer, BF16_Optimizer)
        in_parts = engine.module.activation_checkpoint_interval or hasattr(engine.module, "active_phase")
        return options.overlap and not moved and not in_parts and not engine.has_moe_layers

    def _take_gradient(self, number: int, parameter: Tensor, _: bool) -> list[Gradient]:
        """Return the gradient of a parameter, zeros if it has none."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return [Gradient(number, parameter.grad.view(-1))]

    def _take_flat_gradient(self, number: int, parameter: Tensor, in_pass: bool) -> list[Gradient]:
        """Return the gradient of a parameter in BF16_Optimizer's flat buffer, by the partitions it lies in.

        What the last backward pass has computed is added there, as the optimizer would do after the pass.
        """
        optimizer = self._engine.optimizer
        group, at = self._in_groups[id(parameter)]
        if in_pass:
            add_to_flat_gradient(optimizer, parameter, group, at)
        gradient, flat = flat_gradient(optimizer, group, at)
        if not self.is_partitioned:
            return [Gradient(number, gradient.view(-1))]
        span, found = _GradientSpan(gradient.data_ptr(), gradient.nbytes, number), list[Gradient]()
        for owner, part in enumerate(flat.chunk(self.exchange.replicas.size)):
            _split(part, owner, [span], found, [])
        return found

    def begin_step(self, step: Step) -> None:
        """Prepare for gradients that leave while the last backward pass goes on."""
        super().begin_step(step)
        self.is_partitioned = self._has_partitions and self.is_warm
        if self.early is not None:
            engine, size = self._engine, self.exchange.replicas.size
            sends = engine.pipeline_enable_backward_allreduce and self.is_warm
            factor = 1 / size if engine.gradient_average else 1.0
            self.early.begin_step(engine.micro_batches if sends else 0, factor, engine.global_steps)

    def all_reduce_of_engine(self, bucket: Sequence[Tensor], group: Any, factor: float, exact: Exact) -> bool:
        """Average a bucket of DeepSpeed's engine in place; see `all_reduce`."""
        parts, owners = list(bucket), list[int | None]([None] * len(bucket))
        if self.is_partitioned:
            size = self.exchange.replicas.size
            parts = [part for flat in bucket for part in flat.chunk(size)]
            owners = [*range(size)] * len(bucket)
        return self.all_reduce(parts, reduced_gradients(self._engine), owners, group, factor, exact)

    def gather_parameters(self) -> bool:
        """Let all replicas have the new parameters of BF16_Optimizer; return False if that is left to
        DeepSpeed."""
        engine, optimizer = self._engine, self._engine.optimizer
        if self._parameters is None or not self.is_warm:
            return False
        for group, flat, new in flat_groups(optimizer):
            ends = itertools.accumulate((parameter.numel() for parameter in group), initial=0)
            ranges = [
                Range(at, p.numel(), self._numbers.get(id(p)), p.shape[1:].numel())
                for at, p in zip(ends, group)
            ]
            self._parameters.gather(flat, new, ranges, engine.global_steps)
        return True

    def all_reduce(
        self,
        bucket: Sequence[Tensor],
        known: Iterable[tuple[Any, Tensor | None]],
        owners: Owners,
        group: Any,
        factor: float,
        exact: Exact,
    ) -> bool:
        """Average a bucket in place; return False if it is left to DeepSpeed.

        Args:
            bucket: gradients, flat buffers of them, or slices of such buffers.
            known: parameters, with their gradients, of which `bucket` may hold parts.
            owners: of each tensor the one replica that needs its average; None: every replica.
            group: whose all-reduce DeepSpeed asks for.
            factor: of the sum.
            exact: DeepSpeed's own way.
        """
        engine = self._engine
        if group is not engine.mpu.get_data_parallel_group() or not self.is_warm:
            return False
        sent = self.early.finish() if self.early is not None else set()
        spans = self._spans(known)
        found, others = list[Gradient](), list[Tensor]()
        for tensor, owner in zip(bucket, owners):
            _split(tensor, owner, spans, found, others)
        if not found:
            return False
        scale = loss_scale(engine)
        later = [gradient for gradient in found if gradient.parameter not in sent]
        for gradient in later:
            if not self._compressed[gradient.parameter].requires_grad:  # no longer: zeros, and a residual
                for each in self.exchange.slices.of(gradient):
                    each.memory.clear()
        self.exchange.average(later, factor, scale, engine.global_steps)
        if others:
            summed = exact(others)
            for tensor, part in zip(others, summed.split([tensor.numel() for tensor in others])):
                tensor.view(-1).copy_(part)
        return True

    def _spans(self, known: Iterable[tuple[Any, Tensor | None]]) -> list[_GradientSpan]:
        """Return the memory of the gradients that are compressed, by address."""
        spans = []
        for parameter, gradient in known:
            number = self._numbers.get(id(parameter))
            if number is None or gradient is None or gradient.is_sparse or not gradient.is_contiguous():
                continue
            if gradient.dtype in DTYPES:
                spans.append(_GradientSpan(gradient.data_ptr(), gradient.nbytes, number))
        return sorted(spans)


def connect_replicas(engine: PipelineEngine, stage: Stage) -> ReplicaTraffic | None:
    """Return what compresses the gradients between the replicas of this `stage`, over connections of its own;
    None if nothing does. Every rank of the job calls it."""
    config = stage.config
    if config.replica_codec is None or not engine.is_data_parallel:
        return None
    sends_packets = not any(layers(config.replica_codec, LowRank))
    connections = connect_sets(
        stage, engine, engine.grid.dp_groups, "gradients between replicas", sends_packets
    )
    has_owners = sends_packets and not engine.has_moe_layers
    partitions = isinstance(engine.optimizer, BF16_Optimizer) and has_owners
    everywhere = lowest(engine.device, partitions)  # some stages may have MoE layers
    traffic = ReplicaTraffic(engine, config, connections, any(everywhere))
    mix_in(engine.optimizer, traffic)
    return traffic


def _split(
    tensor: Tensor, owner: int | None, spans: list[_GradientSpan], found: list[Gradient], others: list[Tensor]
) -> None:
    """Add the parts of `tensor` that lie in `spans` to `found`, the rest to `others`."""
    start, size = tensor.data_ptr(), tensor.element_size()
    inside = [(max(p.start, start), min(p.start + p.nbytes, start + tensor.nbytes), p) for p in spans]
    inside = [each for each in inside if each[0] < each[1]] if tensor.is_contiguous() else []
    if not inside:
        others.append(tensor)
        return
    flat, at = tensor.view(-1), start
    for first, last, span in inside:
        if first > at:
            others.append(flat[(at - start) // size : (first - start) // size])
        values = flat[(first - start) // size : (last - start) // size]
        found.append(Gradient(span.number, values, owner, (first - span.start) // size))
        at = last
    if at < start + tensor.nbytes:
        others.append(flat[(at - start) // size :])
