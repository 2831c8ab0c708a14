"""Where gradients between replicas are taken from DeepSpeed: its functions that all-reduce a bucket.

    DeepSpeedEngine.allreduce_bucket           gradients of parameters, or BF16_Optimizer's flat buffers
    DeepSpeedZeroOptimizer.allreduce_bucket    ZeRO-1: slices of gradients, see engine/optimizers.py

A bucket becomes parts of parameters, found by where their memory lies. Those that are compressed go through
an `Exchange`; DeepSpeed's own function gets the others, or the whole bucket where there are no others.
"""

import hashlib
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ds_compress.codec import CODECS
from ds_compress.codecs.lowrank import LowRank
from ds_compress.codecs.mixins import layers
from ds_compress.config import Config, ReplicasOptions
from ds_compress.engine.deepspeed import (
    BF16_Optimizer,
    add_to_flat_gradient,
    flat_gradient,
    flat_groups,
    is_moe_param,
    loss_scale,
    reduced_gradients,
)
from ds_compress.engine.optimizers import mix_in
from ds_compress.engine.overlap import EarlyBuckets
from ds_compress.message.gradient_error import AVERAGED
from ds_compress.message.part import RuntimePart, Step
from ds_compress.replicas.exchange import Replicas
from ds_compress.replicas.factors import build_exchange, compressed_parameters
from ds_compress.replicas.parameters import ParameterExchange, Range
from ds_compress.replicas.slices import DTYPES, Gradient, SliceCodec
from ds_compress.transport.collectives import lowest

logger = logging.getLogger("ds_compress")

Exact = Callable[[list[Tensor]], Tensor]
"""DeepSpeed's all-reduce of a bucket; returns it flat."""


class _GradientSpan(NamedTuple):
    """The memory of the gradient of a parameter."""

    start: int  # address
    nbytes: int
    number: int  # of the parameter


class GradientTraffic(RuntimePart):
    """Compresses the gradients between the replicas of an engine's stage."""

    restarts = "residuals of gradients between replicas start from zero"
    """What a checkpoint without usable state leads to."""

    def __init__(self, engine: Any, config: Config, group: Any, has_partitions: bool):
        """
        Args:
            engine: DeepSpeed's.
            config: with a codec for replicas.
            group: process group of the replicas of this stage, in which nothing else is sent.
            has_partitions: whether all stages have a BF16_Optimizer whose groups are all partitioned over the
                replicas.
        """
        block, options = config.block, config.block.replicas
        assert options is not None and config.replica_codec is not None
        self._engine = engine
        self._skipped = 0  # steps, when the present one began
        self._before: dict[int, dict[str, Tensor]] | None = None
        self._warmup_steps = options.warmup_steps
        tied = {id(weight) for weight, _ in engine.module.get_tied_weights_and_groups()}
        compressed = {
            number: parameter
            for number, parameter in compressed_parameters(
                engine.module.parameters(), config.replica_codec
            ).items()
            if id(parameter) not in tied and not is_moe_param(parameter)
        }
        self._numbers = {id(parameter): number for number, parameter in compressed.items()}
        replicas = Replicas(dist.get_world_size(group), dist.get_rank(group), group, engine.stage_id)
        bucket_bytes = options.bucket_mb * 10**6
        shared = block.seed, block.link.checksum
        itemsize = engine.communication_data_type.itemsize
        self.exchange = build_exchange(
            replicas, config.replica_codec, compressed, bucket_bytes, *shared, itemsize
        )
        self._has_partitions = has_partitions
        self.is_partitioned = False
        """Whether replicas need, of this step's averages, only those of their own partition, under
        BF16_Optimizer. The same on all stages: their norms are added up."""
        self._parameters = None
        if options.parameters != "none":
            codec = CODECS.build({"name": "quantize", "bits": options.parameters}, "parameters")
            self._parameters = ParameterExchange(replicas, codec, bucket_bytes, self.exchange.sent, *shared)
        self._measure_every = block.monitor.every if engine.monitor.enabled else 0
        self._guard = block.guard
        self._gradient_error = math.nan
        self._has_warned = False
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

    def describe(self) -> str:
        """Return what the start-up line says."""
        after = f" after {self._warmup_steps} warm-up steps" if self._warmup_steps else ""
        return f"gradients between replicas: {self.exchange.codec.codec}{after}"

    @property
    def settings(self) -> dict[str, Any]:
        """Return what must be equal in a checkpoint for its residuals to be used."""
        engine = self._engine
        shapes = [(name, tuple(p.shape)) for name, p in engine.module.named_parameters()]
        return {
            "codec": self.exchange.codec.codec.settings,
            "replicas": self.exchange.replicas.size,
            "optimizer": type(engine.optimizer).__name__,
            "zero": engine.zero_optimization_stage(),
            "parameters": hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest(),
        }

    @property
    def codec(self) -> SliceCodec:
        """Return the codec of the slices."""
        return self.exchange.codec

    def saved(self) -> dict[int, dict[str, Tensor]]:
        """Return the residuals for a checkpoint, by number of the slice."""
        return self.exchange.slices.saved()

    def load(self, saved: dict[int, dict[str, Tensor]]) -> None:
        """Restore the residuals from a checkpoint; missing ones start from zero."""
        self.exchange.slices.load(saved)

    def values(self) -> dict[str, float]:
        """Return what the monitor writes of this stage, by name in `REPLICAS`."""
        exchange = self.exchange
        error, cosine = exchange.quality
        return {
            "raw_bytes": exchange.sent.raw_bytes,
            "wire_bytes": exchange.sent.wire_bytes,
            "relative_error": error,
            "cosine": cosine,
            "gradient_error": self._gradient_error,
            "residual_norm": exchange.residual_norm(),
            "round_s": 0.0,
            "rounds": 0.0,
            "members": exchange.replicas.size,
        }

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
        """Remember the residuals, if DeepSpeed may skip the step because gradients are not finite."""
        self._skipped = self._engine.skipped_steps
        self.is_partitioned = self._has_partitions and self._engine.global_steps >= self._warmup_steps
        # all replicas have to decide alike: it takes an all-reduce
        if self._measure_every and (self._engine.global_steps + 1) % self._measure_every == 0:
            self.exchange.measure()
        if self._guard.is_due(self._compressed_steps() + AVERAGED):
            self.exchange.take_gradient_error()  # of steps that only the monitor has measured
        if any(self._guard.is_due(self._compressed_steps() + 1 + later) for later in range(AVERAGED)):
            self.exchange.measure()
        may_skip = hasattr(self._engine.optimizer, "overflow")
        self._before = self.exchange.slices.memories() if may_skip else None
        if self.early is not None:
            engine, size = self._engine, self.exchange.replicas.size
            sends = engine.pipeline_enable_backward_allreduce and engine.global_steps >= self._warmup_steps
            factor = 1 / size if engine.gradient_average else 1.0
            self.early.begin_step(engine.micro_batches if sends else 0, factor, engine.global_steps)

    def end_step(self, step: Step) -> None:
        """Take the residuals back if DeepSpeed has skipped the step: it has used none of the averages."""
        if self._before is not None and self._engine.skipped_steps > self._skipped:
            self.exchange.slices.restore(self._before)
        self._before = None
        if self._guard.is_due(self._compressed_steps()):
            self._check(self.exchange.take_gradient_error())

    def _compressed_steps(self) -> int:
        """Return the number of completed steps since the warm-up."""
        return int(self._engine.global_steps) - self._warmup_steps

    def _check(self, error: float) -> None:
        """Warn once if averages added up over the last steps differ too much from the exact ones."""
        self._gradient_error = error
        if error > self._guard.gradient_error and not self._has_warned and self.exchange.replicas.rank == 0:
            self._has_warned = True
            logger.warning(
                "ds_compress: gradients between replicas, stage %d: %s has an error of %.2f in the sum of %d "
                "averages (ds_compress.guard.gradient_error: %g): use more bits or a higher density, "
                'feedback "ef", or "rounding": "dither"',
                self.exchange.replicas.stage,
                self.exchange.codec.codec,
                error,
                AVERAGED,
                self._guard.gradient_error,
            )

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
        if self._parameters is None or engine.global_steps < self._warmup_steps:
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
        owners: Sequence[int | None],
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
        if group is not engine.mpu.get_data_parallel_group() or engine.global_steps < self._warmup_steps:
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


def connect_replicas(engine: Any, config: Config) -> GradientTraffic | None:
    """Return what compresses the gradients between the replicas of this stage, with a process group of its
    own; None if nothing does. Every rank of the job calls it."""
    if config.replica_codec is None or not engine.is_data_parallel:
        return None
    limit = timedelta(seconds=config.block.link.timeout_s)
    groups = [dist.new_group(ranks, timeout=limit) for ranks in engine.grid.dp_groups]
    own = next(group for group, ranks in zip(groups, engine.grid.dp_groups) if dist.get_rank() in ranks)
    has_owners = not engine.has_moe_layers and not any(layers(config.replica_codec, LowRank))
    partitions = isinstance(engine.optimizer, BF16_Optimizer) and has_owners
    everywhere = lowest(engine.device, partitions)  # some stages may have MoE layers
    traffic = GradientTraffic(engine, config, own, any(everywhere))
    mix_in(engine.optimizer, traffic)
    return traffic


def _split(
    tensor: Tensor,
    owner: int | None,
    spans: Sequence[_GradientSpan],
    found: list[Gradient],
    others: list[Tensor],
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
