"""What all traffic of gradients has in common: an `Exchange`, its residuals, and what is measured of it."""

import hashlib
import logging
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from ds_compress.codec import Codec
from ds_compress.config import Config
from ds_compress.engine.deepspeed import PipelineEngine
from ds_compress.message.gradient_error import AVERAGED
from ds_compress.message.part import RuntimePart, Step
from ds_compress.replicas.exchange import Exchange
from ds_compress.replicas.slices import SliceCodec, residual_norm

logger = logging.getLogger("ds_compress")


def describe(exchanged: str, codec: Codec, warmup_steps: int) -> str:
    """Return what the start-up line says of gradients that ranks exchange."""
    after = f" after {warmup_steps} warm-up steps" if warmup_steps else ""
    return f"{exchanged}: {codec}{after}"


class GradientTraffic(RuntimePart, ABC):
    """Gradients that ranks of an engine exchange in each step after the warm-up."""

    kind: ClassVar[str]
    """Name in labels of metrics and in checkpoints; one of `metrics.GRADIENTS`."""

    def __init__(self, engine: PipelineEngine, config: Config, exchange: Exchange):
        """
        Args:
            engine: DeepSpeed's.
        """
        self._engine = engine
        self.exchange = exchange
        self._skipped = 0  # steps, when the present one began
        self._before: dict[int, dict[str, Tensor]] | None = None
        self._measure_every = config.block.monitor.every if engine.monitor.enabled else 0
        self._guard = config.block.guard
        self._gradient_error = math.nan
        self._has_warned = False

    @property
    @abstractmethod
    def warmup_steps(self) -> int:
        """Return the number of steps at the start of training in which gradients are exact."""

    @property
    def restarts(self) -> str:
        """Return what a checkpoint without usable state leads to."""
        return f"residuals of {self.exchange.replicas.exchanged} start from zero"

    def describe(self) -> str:
        """Return what the start-up line says."""
        return describe(self.exchange.replicas.exchanged, self.exchange.codec.codec, self.warmup_steps)

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
        """Return what the monitor writes of this stage, by name in `metrics.EXCHANGE`."""
        exchange = self.exchange
        error, cosine = exchange.quality
        return {
            "raw_bytes": exchange.sent.raw_bytes,
            "wire_bytes": exchange.sent.wire_bytes,
            "relative_error": error,
            "cosine": cosine,
            "gradient_error": self._gradient_error,
            "residual_norm": residual_norm(each.memory for each in exchange.slices),
            "round_s": 0.0,
            "rounds": 0.0,
            "members": exchange.replicas.size,
        }

    @property
    def is_warm(self) -> bool:
        """Return whether the warm-up is over."""
        return bool(self._engine.global_steps >= self.warmup_steps)

    def begin_step(self, step: Step) -> None:
        """Remember the residuals, if DeepSpeed may skip the step because gradients are not finite."""
        self._skipped = self._engine.skipped_steps
        # all ranks that exchange have to decide alike: it takes an all-reduce
        if self._measure_every and (self._engine.global_steps + 1) % self._measure_every == 0:
            self.exchange.measure()
        if self._guard.is_due(self._compressed_steps() + AVERAGED):
            self.exchange.take_gradient_error()  # of steps that only the monitor has measured
        if any(self._guard.is_due(self._compressed_steps() + 1 + later) for later in range(AVERAGED)):
            self.exchange.measure()
        may_skip = hasattr(self._engine.optimizer, "overflow")
        self._before = self.exchange.slices.saved() if may_skip else None

    def end_step(self, step: Step) -> None:
        """Take the residuals back if DeepSpeed has skipped the step: it has used none of the averages."""
        if self._before is not None and self._engine.skipped_steps > self._skipped:
            self.exchange.slices.load(self._before)
        self._before = None
        if self._guard.is_due(self._compressed_steps()):
            self._check(self.exchange.take_gradient_error())

    def _compressed_steps(self) -> int:
        """Return the number of completed steps since the warm-up."""
        return int(self._engine.global_steps) - self.warmup_steps

    def _check(self, error: float) -> None:
        """Warn once if averages added up over the last steps differ too much from the exact ones."""
        self._gradient_error = error
        if error > self._guard.gradient_error and not self._has_warned and self.exchange.replicas.rank == 0:
            self._has_warned = True
            logger.warning(
                f"ds_compress: {self.exchange.replicas.exchanged}, stage {self._engine.stage_id}: "
                f"{self.exchange.codec.codec} has an error of {error:.2f} in the sum of {AVERAGED} averages "
                f"(ds_compress.guard.gradient_error: {self._guard.gradient_error:g}): use more bits or a "
                'higher density, feedback "ef", or "rounding": "dither"'
            )
