"""Where gradients between replicas are taken from DeepSpeed: its functions that all-reduce a bucket.

    DeepSpeedEngine.allreduce_bucket           gradients of parameters, or BF16_Optimizer's flat buffers
    DeepSpeedZeroOptimizer.allreduce_bucket    ZeRO-1: slices of gradients, see `CompressedZeroOptimizer`

A bucket becomes parts of parameters, found by where their memory lies. Those that are compressed go through
an `Exchange`; DeepSpeed's own function gets the others, or the whole bucket where there are no others.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch import distributed as dist

from ds_compress.config import KEY, Config
from ds_compress.errors import CompressionError
from ds_compress.replicas.exchange import Exchange, Replicas
from ds_compress.replicas.slices import Gradient, Slice

MIN_NUMEL = 16 * 1024
"""Parameters of fewer values stay exact: packets and calls would cost more than they save."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


_Optimizer: Any = object
"""What stands behind a mixin: DeepSpeed's optimizer, which has no types."""


class _Place(NamedTuple):
    """Where the gradient of a parameter lies."""

    start: int  # address
    nbytes: int
    number: int  # of the parameter


class GradientTraffic:
    """Compresses the gradients between the replicas of an engine's stage."""

    def __init__(self, engine: Any, config: Config, group: Any):
        """
        Args:
            engine: DeepSpeed's.
            config: with a codec for replicas.
            group: process group of the replicas of this stage, in which nothing else is sent.
        """
        block, options = config.block, config.block.replicas
        assert options is not None and config.replica_codec is not None
        self._engine = engine
        self._skipped = 0  # steps, when the present one began
        self._before: dict[Slice, dict[str, Tensor]] | None = None
        self._warmup_steps = options.warmup_steps
        replicas = Replicas(dist.get_world_size(group), dist.get_rank(group), group)
        self.exchange = Exchange(
            replicas,
            config.replica_codec,
            options.bucket_mb * 10**6,
            block.seed,
            block.link.checksum,
            engine.communication_data_type.itemsize,
        )
        self._measure_every = block.monitor.every if engine.monitor.enabled else 0
        tied = {id(weight) for weight, _ in engine.module.get_tied_weights_and_groups()}
        self._numbers = {
            id(parameter): number
            for number, parameter in enumerate(engine.module.parameters())
            if parameter.dim() > 1
            and parameter.numel() >= MIN_NUMEL
            and id(parameter) not in tied
            and not is_moe_param(parameter)
        }

    def describe(self) -> str:
        """Return what the start-up line says."""
        after = f" after {self._warmup_steps} warm-up steps" if self._warmup_steps else ""
        return f"{self.exchange.codec.codec}{after}"

    @property
    def settings(self) -> dict[str, Any]:
        """All that has to be the same for the residuals of a checkpoint to go on."""
        engine = self._engine
        shapes = [(name, tuple(p.shape)) for name, p in engine.module.named_parameters()]
        return {
            "codec": self.exchange.codec.codec.settings,
            "replicas": self.exchange.replicas.size,
            "zero": engine.zero_optimization_stage(),
            "parameters": hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest(),
        }

    def values(self) -> dict[str, float]:
        """Return what the monitor writes of this stage, by name in `REPLICAS`."""
        exchange = self.exchange
        error, cosine = exchange.quality
        return {
            "raw_bytes": exchange.sent.raw_bytes,
            "wire_bytes": exchange.sent.wire_bytes,
            "relative_error": error,
            "cosine": cosine,
            "residual_norm": exchange.residual_norm(),
        }

    def begin_step(self) -> None:
        """Remember the residuals, if the step may be skipped because of its loss scale."""
        self._skipped = self._engine.skipped_steps
        # all replicas have to decide alike: it takes an all-reduce
        if self._measure_every and (self._engine.global_steps + 1) % self._measure_every == 0:
            self.exchange.measure()
        self._before = self.exchange.slices.memories() if self._engine.fp16_enabled() else None

    def end_step(self) -> None:
        """Take the residuals back if DeepSpeed has skipped the step: it has used none of the averages."""
        if self._before is not None and self._engine.skipped_steps > self._skipped:
            self.exchange.slices.restore(self._before)
        self._before = None

    def all_reduce(
        self,
        bucket: Sequence[Tensor],
        known: Iterable[tuple[Any, Tensor | None]],
        owners: Sequence[int | None],
        group: Any,
        factor: float,
        exact: Callable[[list[Tensor]], Tensor],
    ) -> bool:
        """Average a bucket in place; return False if it is left to DeepSpeed.

        Args:
            bucket: gradients, flat buffers of them, or slices of such buffers.
            known: parameters, with their gradients, of which `bucket` may hold parts.
            owners: of each tensor the one replica that needs its average; None: every replica.
            group: whose all-reduce DeepSpeed asks for.
            factor: of the sum.
            exact: DeepSpeed's all-reduce of a bucket; returns it flat.
        """
        engine = self._engine
        if group is not engine.mpu.get_data_parallel_group() or engine.global_steps < self._warmup_steps:
            return False
        places = self._places(known)
        found, others = list[Gradient](), list[Tensor]()
        for tensor, owner in zip(bucket, owners):
            _split(tensor, owner, places, found, others)
        if not found:
            return False
        scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
        self.exchange.average(found, factor, scale, engine.global_steps)
        if others:
            summed = exact(others)
            for tensor, part in zip(others, summed.split([tensor.numel() for tensor in others])):
                tensor.view(-1).copy_(part)
        return True

    def _places(self, known: Iterable[tuple[Any, Tensor | None]]) -> list[_Place]:
        """Return where the gradients lie that are compressed, by address."""
        places = []
        for parameter, gradient in known:
            number = self._numbers.get(id(parameter))
            if number is None or gradient is None or gradient.is_sparse or not gradient.is_contiguous():
                continue
            if gradient.dtype in DTYPES:
                places.append(_Place(gradient.data_ptr(), gradient.nbytes, number))
        return sorted(places)


class CompressedZeroOptimizer(_Optimizer):
    """DeepSpeed's optimizer of ZeRO-1, whose buckets go through a `GradientTraffic`.

    A bucket holds slices of gradients, each needed by the one replica that owns its partition.
    """

    ds_compress: GradientTraffic
    _owners: Sequence[int | None] | None = None  # of the tensors of the bucket in progress

    def allreduce_and_copy_with_multiple_ranks(self, small_bucket: Any, *args: Any, **kwargs: Any) -> None:
        self._owners = [_only_owner(ranks) for ranks in kwargs["bucket_ranks"]]
        try:
            super().allreduce_and_copy_with_multiple_ranks(small_bucket, *args, **kwargs)
        finally:
            self._owners = None

    def allreduce_bucket(
        self,
        bucket: Any,
        communication_data_type: Any,
        rank: Any = None,
        log: Any = None,
        divide: Any = True,
        process_group: Any = None,
    ) -> Tensor:
        options = {"rank": rank, "log": log, "divide": divide, "process_group": process_group}
        exact = partial(super().allreduce_bucket, communication_data_type=communication_data_type, **options)
        owners = self._owners if self._owners is not None else [rank] * len(bucket)
        factor = self._factor() if divide and self.gradient_average else 1.0
        if self._compress(bucket, communication_data_type, owners, process_group, factor, exact):
            return self.flatten(bucket)
        return exact(bucket)

    def gradient_reduction_w_predivide(self, tensor: Any, communication_data_type: Any) -> Tensor:
        def exact(bucket: list[Tensor]) -> Tensor:
            flat = self.flatten(bucket)
            return reduce(flat, communication_data_type)

        reduce = super().gradient_reduction_w_predivide
        factor = self._factor() if self.gradient_average else 1.0
        if self._compress([tensor], communication_data_type, [None], None, factor, exact):
            return tensor
        return reduce(tensor, communication_data_type)

    def _factor(self) -> float:
        return float(self.sequence_parallel_size / dist.get_world_size(self.dp_process_group))

    def _compress(
        self,
        bucket: Sequence[Tensor],
        dtype: Any,
        owners: Sequence[int | None],
        group: Any,
        factor: float,
        exact: Callable[[list[Tensor]], Tensor],
    ) -> bool:
        parameters = [self.bit16_groups[group][place] for group, place, _ in self.ipg_buckets[dtype].params]
        known = [(parameter, self.get_gradient_for_reduction(parameter)) for parameter in parameters]
        return self.ds_compress.all_reduce(
            bucket, known, owners, group or self.dp_process_group, factor, exact
        )


def _only_owner(ranks: Any) -> int | None:
    """Return the one rank in what DeepSpeed has as ranks; None if they are several."""
    if not isinstance(ranks, frozenset):
        return int(ranks)
    return min(ranks) if len(ranks) == 1 else None


def gradients_of(engine: Any) -> list[tuple[Any, Tensor | None]]:
    """Return the parameters of a stage that DeepSpeed's own all-reduce averages, with their gradients."""
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):  # views of flat buffers
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients)
        return [pair for group in groups for pair in zip(*group)]
    return [(parameter, parameter.grad) for parameter in engine.module.parameters()]


def check_replicas(engine: Any) -> None:
    """Refuse a DeepSpeed whose ZeRO optimizer is not built the way `CompressedZeroOptimizer` relies on.

    Raises:
        CompressionError: names what is missing.
    """
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        used = [name for name in vars(CompressedZeroOptimizer) if not name.startswith("_")]
        for name in (*used, "ipg_buckets", "get_gradient_for_reduction", "bit16_groups"):
            if name != "ds_compress" and not hasattr(engine.optimizer, name):
                raise CompressionError(
                    f"{KEY}.replicas: DeepSpeed {deepspeed.__version__} has no {name} in its ZeRO optimizer; "
                    "leave replicas out"
                )


def connect_replicas(engine: Any, config: Config) -> GradientTraffic | None:
    """Return what compresses the gradients between the replicas of this stage, with a process group of its
    own; None if nothing does. Every rank of the job calls it."""
    if config.replica_codec is None or not engine.is_data_parallel:
        return None
    timeout = timedelta(seconds=config.block.link.timeout_s)
    groups = [dist.new_group(ranks, timeout=timeout) for ranks in engine.grid.dp_groups]
    own = next(group for group, ranks in zip(groups, engine.grid.dp_groups) if dist.get_rank() in ranks)
    traffic = GradientTraffic(engine, config, own)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        base = type(engine.optimizer)
        engine.optimizer.__class__ = type(f"Compressed{base.__name__}", (CompressedZeroOptimizer, base), {})
        engine.optimizer.ds_compress = traffic
    return traffic


def _split(
    tensor: Tensor,
    owner: int | None,
    places: Sequence[_Place],
    found: list[Gradient],
    others: list[Tensor],
) -> None:
    """Add the parts of `tensor` that lie at `places` to `found`, the rest to `others`."""
    start, size = tensor.data_ptr(), tensor.element_size()
    inside = [(max(p.start, start), min(p.start + p.nbytes, start + tensor.nbytes), p) for p in places]
    inside = [each for each in inside if each[0] < each[1]] if tensor.is_contiguous() else []
    if not inside:
        others.append(tensor)
        return
    flat, at = tensor.view(-1), start
    for first, last, place in inside:
        if first > at:
            others.append(flat[(at - start) // size : (first - start) // size])
        found.append(Gradient(place.number, flat[(first - start) // size : (last - start) // size], owner))
        at = last
    if at < start + tensor.nbytes:
        others.append(flat[(at - start) // size :])
