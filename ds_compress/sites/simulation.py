"""Replicas that are launched apart, inside one process: each has a model and an optimizer of its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_compress.config import KEY, Config
from ds_compress.errors import CompressionError
from ds_compress.message.layout import Counters
from ds_compress.replicas.slices import is_compressed
from ds_compress.sites.masters import (
    MasterWeight,
    build_delta_codec,
    master_weight,
    read_masters,
    write_masters,
)
from ds_compress.sites.outer_step import MIN_DELTA_NUMEL, Anchor
from ds_compress.sites.store import check_shared, shared_settings


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

    def __init__(self, models: Sequence[nn.Module], ds_config: dict[str, Any] | Sequence[dict[str, Any]]):
        """
        Args:
            models: one for each replica; all get the weights of the first.
            ds_config: its "ds_compress" block counts; one for each replica if their codecs differ.

        Raises:
            CompressionError: a bad block, its replicas are not launched apart, or settings differ that all
                must share.
        """
        given = [ds_config] * len(models) if isinstance(ds_config, dict) else ds_config
        if len(given) != len(models):
            raise CompressionError(f"SimulatedRounds: {len(given)} configs came for {len(models)} models")
        configs = [_config(each) for each in given]
        settings = [shared_settings(config) for config in configs]
        for theirs in settings[1:]:
            check_shared(theirs, settings[0])
        outer, replicas = configs[0].outer, configs[0].block.replicas
        assert outer is not None and replicas is not None
        self._options, self._every = outer, replicas.every
        self._masters = [_masters(model) for model in models]
        self.codecs = [build_delta_codec(config, masters) for config, masters in zip(configs, self._masters)]
        """One per replica, with its residuals."""
        first = read_masters(self._masters[0])
        self.anchor = Anchor(first, torch.zeros_like(first))
        self._bases: list[Tensor] | None = None  # of the round that is not applied yet
        for masters in self._masters:
            write_masters(masters, first)
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
        number = self.steps // self._every
        old, count = self.anchor.values, len(self._masters)
        self._bases = [*map(read_masters, self._masters)]
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
        for masters, base in zip(self._masters, self._bases or ()):
            write_masters(masters, self.anchor.values + (read_masters(masters) - base))
        self._bases = None


def _config(ds_config: dict[str, Any]) -> Config:
    config = Config(ds_config.get(KEY, {}))
    if config.outer is None:
        raise CompressionError(f'{KEY}.replicas: SimulatedRounds needs "every" above 1, or "outer"')
    config.prepare()
    return config


def _masters(model: nn.Module) -> list[MasterWeight]:
    """Return the trained parameters, those that are compressed first.

    Raises:
        CompressionError: one is not fp32.
    """
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    found = sorted(trained, key=lambda parameter: not is_compressed(parameter, MIN_DELTA_NUMEL))
    for number, parameter in enumerate(found):
        if parameter.dtype != torch.float32:
            raise CompressionError(
                f"simulate: parameter {number} is {parameter.dtype}; only float32 has outer steps"
            )
    return [master_weight(parameter, number, parameter.detach()) for number, parameter in enumerate(found)]
