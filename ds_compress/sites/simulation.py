"""Replicas that are launched apart, inside one process: each has a model and an optimizer of its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_compress.config import KEY, Config
from ds_compress.errors import CompressionError
from ds_compress.message.layout import Counters
from ds_compress.replicas.slices import RowSpan, is_compressed
from ds_compress.sites.outer_step import MIN_DELTA_NUMEL, Anchor, DeltaCodec, DeltaPart


class SimulatedRounds:
    """Lets replicas exchange their progress every H steps, as launches of their own do it.

        rounds = SimulatedRounds(models, ds_config)
        for batches in of_all_replicas:
            for model, optimizer, batch in zip(models, optimizers, batches):
                train_step(model, optimizer, batch)
            rounds.end_step()

    The weights are those of DeepSpeed's fp32 training, bit for bit, if every replica comes to every round;
    random draws of codecs differ.
    """

    def __init__(self, models: Sequence[nn.Module], ds_config: dict[str, Any]):
        """
        Args:
            models: one for each replica; all get the weights of the first.
            ds_config: its "ds_compress" block counts.

        Raises:
            CompressionError: a bad block, or its replicas are not launched apart.
        """
        config = Config(ds_config.get(KEY, {}))
        if config.outer is None or config.outer_codec is None or config.block.replicas is None:
            raise CompressionError(f'{KEY}.replicas: SimulatedRounds needs "every" above 1, or "outer"')
        config.prepare()
        self._options, self._every = config.outer, config.block.replicas.every
        trained = ((p for p in model.parameters() if p.requires_grad) for model in models)
        self._parameters = [sorted(own, key=_is_large, reverse=True) for own in trained]
        for number, parameter in enumerate(self._parameters[0]):
            if parameter.dtype != torch.float32:
                raise CompressionError(
                    f"simulate: parameter {number} is {parameter.dtype}; only float32 has outer steps"
                )
        large = [
            DeltaPart(n, p.numel(), RowSpan.of(p[0].numel(), 0, p.numel()))
            for n, p in enumerate(self._parameters[0])
            if _is_large(p)
        ]
        exact = sum(p.numel() for p in self._parameters[0] if not _is_large(p))
        shared = config.outer_codec, large, exact, config.block.seed
        self.codecs = [DeltaCodec(*shared) for _ in models]
        """One per replica, with its residuals."""
        first = _flatten(self._parameters[0])
        self.anchor = Anchor(first, torch.zeros_like(first))
        self._bases: list[Tensor] | None = None  # of the round that is not applied yet
        for parameters in self._parameters:
            _set(parameters, first)
        self.steps = 0
        self.sent = Counters()
        """Counters of the first replica. Raw bytes are those of an fp32 all-reduce in each step."""

    def end_step(self) -> None:
        """Count a step of all replicas; when a round is due, exchange packets and move the weights."""
        self.steps += 1
        since = self.steps % self._every or self._every  # steps since the last round began
        if since == self._options.delay:
            self._apply()
        if since < self._every:
            return
        with torch.no_grad():
            number = self.steps // self._every
            old, count = self.anchor.values, len(self._parameters)
            self._bases = [_flatten(parameters) for parameters in self._parameters]
            total = torch.zeros_like(old)
            for sender, (codec, weights) in enumerate(zip(self.codecs, self._bases)):
                packet = codec.encode(old - weights, number, sender)
                total += codec.decode(packet, number, sender)
            self.anchor = self.anchor.step(total / count, self._options)
            self.sent.messages += 1
            self.sent.raw_bytes += 2 * (count - 1) * old.nbytes * self._every // count
            self.sent.wire_bytes += self.codecs[0].nbytes
            if not self._options.delay:
                self._apply()

    def _apply(self) -> None:
        """Give all replicas the anchor, and what they have learned since they sent their deltas."""
        for parameters, base in zip(self._parameters, self._bases or ()):
            _set(parameters, self.anchor.values + (_flatten(parameters) - base))
        self._bases = None


def _is_large(parameter: Tensor) -> bool:
    return is_compressed(parameter, MIN_DELTA_NUMEL)


def _flatten(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def _set(parameters: Sequence[Tensor], values: Tensor) -> None:
    with torch.no_grad():
        for parameter, own in zip(parameters, values.split([p.numel() for p in parameters])):
            parameter.copy_(own.view_as(parameter))
