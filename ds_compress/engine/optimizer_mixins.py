"""DeepSpeed's optimizers that partition their states over the replicas, with compressed traffic.

    DeepSpeedZeroOptimizer   fp16, fp32, and bf16 that accumulates gradients in bf16, under ZeRO-1
    BF16_Optimizer           bf16 without ZeRO, and with ZeRO-1 where it accumulates gradients in fp32

In both a gradient's average is needed only by the replica that owns its partition.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import deepspeed
from torch import Tensor
from torch import distributed as dist

from ds_compress.codec import Codec
from ds_compress.codecs.lowrank import LowRank
from ds_compress.codecs.mixins import layers
from ds_compress.config import KEY, ReplicasOptions
from ds_compress.config.replicas import check_size
from ds_compress.engine.deepspeed import BF16_Optimizer, DeepSpeedZeroOptimizer, PipelineEngine, missing
from ds_compress.errors import CompressionError
from ds_compress.transport import staging

Exact = Callable[[list[Tensor]], Tensor]
"""DeepSpeed's all-reduce of a bucket; returns it flat."""
Owners = Sequence[int | None]
"""Of each tensor the one replica that needs its average; None: every replica."""

_Optimizer: Any = object
"""What stands behind a mixin: DeepSpeed's optimizer, which has no types."""


class CompressedZeroOptimizer(_Optimizer):
    """DeepSpeed's optimizer of ZeRO-1, whose buckets go through a `ReplicaTraffic`.

    A bucket holds slices of gradients, each needed by the one replica that owns its partition.
    """

    ds_compress: Any  # a `ReplicaTraffic`
    _owners: Owners | None = None  # of the tensors of the bucket in progress

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
        self, bucket: Sequence[Tensor], dtype: Any, owners: Owners, group: Any, factor: float, exact: Exact
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


class CompressedBF16Optimizer(_Optimizer):
    """DeepSpeed's optimizer of bf16, whose gradients and parameters go through a `ReplicaTraffic`.

    A replica gets the averages of its own partition alone, so the norm is that of all partitions together.
    """

    ds_compress: Any  # a `ReplicaTraffic`
    mpu: Any
    _in_step = False

    def step(self, closure: Any = None) -> None:
        mpu = self.mpu
        if self.ds_compress.is_partitioned:
            self.mpu = _AllRanks(mpu)
        self._in_step = True
        try:
            super().step(closure)
        finally:
            self.mpu, self._in_step = mpu, False

    def get_grads_for_norm(self, for_clipping: bool = False) -> Any:
        found = super().get_grads_for_norm(for_clipping)
        if not self.ds_compress.is_partitioned:
            return found
        gradients = found if for_clipping else found[0]
        own = [part for gradient in gradients for part in self._of_own_partition(gradient)]
        own = own or [self.fp32_groups_gradients_flat[0].new_zeros(1)]
        return own if for_clipping else (own, found[1])

    def update_lp_params(self) -> None:
        # a universal checkpoint brings other weights, not small differences
        if not (self._in_step and self.ds_compress.gather_parameters()):
            super().update_lp_params()

    def _of_own_partition(self, gradient: Tensor) -> Iterator[Tensor]:
        for partition in self.fp32_groups_gradient_flat_partition:
            size, offset = gradient.element_size(), partition.data_ptr() - gradient.data_ptr()
            first = max(0, offset // size)
            last = min(gradient.numel(), offset // size + partition.numel())
            if first < last:
                yield gradient.view(-1)[first:last]


class _AllRanks:
    """Stands in for DeepSpeed's grid while a norm is computed: its sum goes over all ranks."""

    def __init__(self, mpu: Any):
        self._mpu = mpu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mpu, name)

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD


_MIXINS = {DeepSpeedZeroOptimizer: CompressedZeroOptimizer, BF16_Optimizer: CompressedBF16Optimizer}


def check_optimizer(engine: PipelineEngine, options: ReplicasOptions, codec: Codec) -> None:
    """Refuse an optimizer that cannot do what `options` ask for, or that is not built as its mixin relies on.

    Args:
        codec: of `options`.

    Raises:
        CompressionError: names what is missing.
    """
    optimizer = engine.optimizer
    check_size(codec, engine.communication_data_type, f"{KEY}.replicas")
    if staging.is_needed(engine.device):
        raise CompressionError(
            f"{KEY}.replicas: gloo has no all-to-all for memory of a {engine.device.type}; use a backend "
            "that has, or leave replicas out"
        )
    if options.parameters != "none" and (not isinstance(optimizer, BF16_Optimizer) or engine.has_moe_layers):
        raise CompressionError(
            f"{KEY}.replicas.parameters: {options.parameters} is not allowed with "
            f"{type(optimizer).__name__}: it needs DeepSpeed's BF16_Optimizer without MoE layers, which bf16 "
            "has without ZeRO, or with ZeRO 1 and data_types.grad_accum_dtype 'fp32'; leave it out"
        )
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and any(layers(codec, LowRank)):
        raise CompressionError(
            f"{KEY}.replicas.codec: 'lowrank' is not allowed with {type(optimizer).__name__}, whose "
            "partitions cut matrices; use 'quantize', train without ZeRO, or in bf16 set "
            "data_types.grad_accum_dtype 'fp32'"
        )
    if has_autocast_scaler(engine):
        raise CompressionError(
            f"{KEY}.replicas: torch_autocast to float16 is not allowed: residuals would contain its loss "
            "scale; use bfloat16, or fp16"
        )
    for base in _MIXINS:
        name = missing(base.__name__, optimizer) if isinstance(optimizer, base) else ""
        if name:
            raise CompressionError(
                f"{KEY}.replicas: DeepSpeed {deepspeed.__version__} has no {name} in its "
                f"{base.__name__}; leave replicas out"
            )


def has_autocast_scaler(engine: PipelineEngine) -> bool:
    """Return whether torch_autocast scales the loss by itself."""
    scalers = (engine, "torch_autocast_z0_gradscaler"), (engine.optimizer, "torch_autocast_gradscaler")
    return any(getattr(owner, name, None) is not None for owner, name in scalers)


def mix_in(optimizer: Any, traffic: Any) -> None:
    """Let the buckets of `optimizer` go through `traffic`, if it is one that partitions its states."""
    for base, mixin in _MIXINS.items():
        if isinstance(optimizer, base):
            own = type(optimizer)
            optimizer.__class__ = type(f"Compressed{own.__name__}", (mixin, own), {})
            optimizer.ds_compress = traffic
