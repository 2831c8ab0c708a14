"""The guard compares the loss of a micro-batch with compression and without.

After a training step the last micro-batch of that step passes the pipeline twice more, in evaluation, by
DeepSpeed's own schedule; all micro-batches of the step where that schedule takes no fewer. This leaves the
state of training unchanged.

Harms add up: what evaluation loses, what training on inexact activations loses, and what biased gradients do.
So the guard also judges them together, each as a share of its limit. The root of the sum of the squared
shares is at most 1. With 2 bits in both directions each of them may stay below its limit.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

from ds_compress.codec import TYPICAL, Codec
from ds_compress.config import DIRECTIONS, Config
from ds_compress.config.policies import ChannelKey
from ds_compress.errors import CompressionError
from ds_compress.message.channel import Mode
from ds_compress.message.part import Engine, RuntimePart, Step
from ds_compress.monitor.guard_limits import LOSSLESS, MessageQuality, place_of
from ds_compress.monitor.metrics import LOSS_COST
from ds_compress.transport.collectives import lowest


def is_lossy(codec: Codec) -> bool:
    """Return whether `codec` may change values."""
    return codec.error_bound(TYPICAL) > 0


Replay = Callable[[Mode, int], Sequence[Any]]
"""Evaluates so many of the micro-batches in `Guard.replayed`; returns what the last stage puts out."""

Quality = Callable[[], Mapping[ChannelKey, MessageQuality]]

Write = Callable[[Engine, Mapping[str, float]], None]

logger = logging.getLogger("ds_compress")


class Guard(RuntimePart):
    """Decides when to compare losses, on which micro-batches, and what follows; on every rank."""

    key = "guard"

    def __init__(self, config: Config, rank: int, boundaries: int):
        """Guard a pipeline with this number of `boundaries`."""
        self.batches: deque[Any] = deque()  # the last ones of the step in progress, if `due`
        self.due = False  # whether losses are compared after the step in progress
        self.replayed: Iterator[Any] | None = None  # of `batches`, while the engine loads these
        self._config = config
        self._options = config.block.guard
        self.acts = self._options.action != "warn"
        self._rank = rank
        self._boundaries = boundaries
        self._has_warned = False
        self._first_loss: float | None = None  # of training; None until a step had a finite one
        self._worst = LOSSLESS  # of the messages that were judged last
        self._loads_itself = False  # whether the program loads its micro-batches
        self.follow()

    def follow(self) -> None:
        """Use the present codecs of the config."""
        used = [self._config.in_force.codecs(number) for number in range(self._boundaries)]
        self._loses = any(is_lossy(codec) for each in used for codec in (each.forward, each.backward))
        # evaluation compresses activations alone
        plain = all(each.feedbacks["forward"].name == "none" for each in used)
        self._on = plain and any(is_lossy(each.forward) for each in used)

    @contextmanager
    def batch(
        self, engine: Engine, count: int, quality: Quality, write: Write, replay: Replay
    ) -> Iterator[None]:
        """Wrap a training step of `engine`, and check it where that is due; every rank enters it alike.

        Args:
            count: micro-batches to compare losses on.
            quality: returns what this replica measured of the step (`Monitor.message_quality`).
            write: writes what the guard measured (`Monitor.write`).

        Raises:
            CompressionError: compression costs more than is allowed, and "action" is "stop".
        """
        step = engine.global_steps + 1
        self.due = self._on and not self._loads_itself and self.judges(step)
        self.batches = deque(maxlen=count)
        yield
        if self.judges(engine.global_steps):
            self._check_limits(engine, quality())
        if self.due:
            self._check_loss(engine, write, replay)
        self.due = False
        self.batches.clear()
        self._note_loss(getattr(engine, "agg_train_loss", None))

    def _note_loss(self, loss: object) -> None:
        """Remember the first `loss` of training, its mean over a step, the same on every rank."""
        if self._on and self._first_loss is None and torch.is_tensor(loss) and loss.numel() == 1:
            first = abs(float(loss.float()))  # the last stage may have a finer dtype than the others
            self._first_loss = first if math.isfinite(first) else None

    def state(self) -> dict[str, Any]:
        return {"first_loss": self._first_loss}

    def resume(self, step: Step, state: Mapping[str, Any], own: object) -> None:
        first = state.get("first_loss")
        self._first_loss = first if type(first) is float and math.isfinite(first) else None

    def judges(self, step: int) -> bool:
        """Return whether the guard judges the messages of that step, and its loss where it can compare it."""
        return self._loses and self._options.is_due(step - self._config.warmup_steps)

    def _check_loss(self, engine: Engine, write: Write, replay: Replay) -> None:
        """Compare the loss with compression and without, after a step with `due`; every rank calls it."""
        loads = engine.is_first_stage() or engine.is_last_stage()
        if not any(lowest(engine.device, len(self.batches) == self.batches.maxlen or not loads)):
            self._loads_itself = True
            if self._rank == 0:
                logger.info("ds_compress: the guard is off: this program loads its micro-batches by itself")
            return
        modes: tuple[Mode, Mode] = "compressed", "uncompressed"
        compressed, plain = _mean(engine, *(self._loss(engine, replay, mode) for mode in modes))
        if not math.isfinite(plain):
            return
        write(engine, {LOSS_COST: compressed - plain})
        self._judge(engine, compressed, plain)

    def _loss(self, engine: Engine, replay: Replay, mode: Mode) -> Tensor:
        """Return the mean loss, fp32 []: 0 before the last stage, nan if it is no number."""
        count, self.replayed = int(self.batches.maxlen or 0), iter(self.batches)
        try:
            outputs = replay(mode, count)
        finally:
            self.replayed = None
        if not engine.is_last_stage():
            return torch.zeros((), dtype=torch.float32, device=engine.device)
        losses = [loss for loss in outputs if torch.is_tensor(loss) and loss.numel() == 1]
        if len(losses) != count:
            return torch.full((), math.nan, dtype=torch.float32, device=engine.device)
        return torch.stack([loss.detach().float().reshape(()) for loss in losses]).mean()

    def _judge(self, engine: Engine, compressed: float, plain: float) -> None:
        cost, first = compressed - plain, abs(plain) if self._first_loss is None else self._first_loss
        allowed = max(self._options.loss * abs(plain), self._options.loss_floor * first)
        limits = f"ds_compress.guard.loss: {self._options.loss:.0%}"
        directions: tuple[str, ...] = DIRECTIONS[:1]
        if -allowed <= cost <= allowed:
            shares = {"loss": abs(cost) / allowed if allowed else 0.0, **self._worst.shares(self._options)}
            # messages beyond a limit of their own have been reported
            if max(shares.values()) > 1 or math.hypot(*shares.values()) <= 1:
                return
            parts = (f"{share:.0%} of ds_compress.guard.{limit}" for limit, share in shares.items())
            limits, directions = f"{', '.join(parts)}: too much together", DIRECTIONS
        used = [self._config.in_force.codecs(number) for number in range(self._boundaries)]
        codecs = (
            f"{direction} {', '.join(dict.fromkeys(str(getattr(each, direction)) for each in used))}"
            for direction in directions
        )
        # a loss that is no number with compression hurts
        meaning = "the model has come to need it" if cost < 0 else "it hurts"
        share = f"{cost / abs(plain):+.1%}" if plain else "all of it"
        line = (
            f"ds_compress: guard: after step {engine.global_steps} a loss of {plain:.4g} is {compressed:.4g} "
            f"with compression ({share}; {limits}): {meaning}; "
            f"{'; '.join(codecs)}: use more bits or a higher density, or another codec"
        )
        if self.acts:
            raise CompressionError(line)
        if self._rank == 0 and not self._has_warned:
            logger.warning(line)
            self._has_warned = True

    def _check_limits(self, engine: Engine, known: Mapping[ChannelKey, MessageQuality]) -> None:
        """Judge what this replica measured of a step for which `judges` holds; on every rank."""
        keys = [(number, direction) for number in range(self._boundaries) for direction in DIRECTIONS]
        rows = [known.get(key, LOSSLESS) for key in keys]
        most = torch.tensor(rows, dtype=torch.float64, device=engine.device)
        # unknown: the message is not finite, or its sender cannot decode it
        most = torch.where(most.isnan(), most.new_tensor(LOSSLESS), most)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        self._worst = MessageQuality(*most.amax(0).tolist())
        if not self.acts:  # the monitor warns
            return
        over = dict[tuple[str, tuple[str, ...]], dict[int, MessageQuality]]()
        for (number, direction), row in zip(keys, most.tolist()):
            judged = MessageQuality(*row)
            found = (each.limit for each in judged.violations(self._options))
            if limits := tuple(each for each in found if self._stops_at(each, direction)):
                over.setdefault((direction, limits), {})[number] = judged
        lines = []
        for (direction, limits), alike in over.items():
            violations = MessageQuality.worst(alike.values()).violations(self._options)
            words = ", ".join(each.words for each in violations if each.limit in limits)
            lines.append(f"{place_of([*alike], direction)}: {words}")
        if lines:
            raise CompressionError(f"ds_compress: guard: after step {engine.global_steps} {'; '.join(lines)}")

    def _stops_at(self, limit: str, direction: str) -> bool:
        """Return whether a limit ends the run: large residuals of gradients, and inf or nan, do only if the
        block sets that limit."""
        milder = limit == "nonfinite" or (limit == "residual" and direction == "backward")
        return not milder or limit in self._options.model_fields_set


def _mean(engine: Engine, *losses: Tensor) -> list[float]:
    """Return the means over the last stages of what `Guard._loss` returned; every rank calls it."""
    last = torch.tensor(float(engine.is_last_stage()), dtype=torch.float32, device=engine.device)
    sums = torch.stack([*losses, last])
    dist.all_reduce(sums)
    return (sums[:-1] / sums[-1]).tolist()
