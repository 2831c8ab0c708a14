"""Settings tried on the messages of a rehearsal, as `"recipe": "auto"` tries them in a pipeline."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import track

from ds_compress.cli.advise.files import Messages
from ds_compress.config import DIRECTIONS, Config
from ds_compress.errors import CompressionError
from ds_compress.kernels import native
from ds_compress.message.channel import Boundary
from ds_compress.message.clock import clock_for
from ds_compress.planning.choice import Message, Setting
from ds_compress.planning.offers import Offer, startable
from ds_compress.planning.trial import ByMicroBatch, setting, try_out

if TYPE_CHECKING:
    from ds_compress.runtime.profile_model import Rehearsed


class Trials:
    """At every boundary of a rehearsed pipeline."""

    def __init__(self, found: "Rehearsed", device: torch.device, codec_gbps: float | None):
        """`codec_gbps`: how fast all codecs are taken to be, in the place of what is measured."""
        self._found, self._clock, self._codec_gbps = found, clock_for(device), codec_gbps
        self._boundaries = range(len(found.carrying))
        self._tried: list[list[Setting]] = [[] for _ in self._boundaries]
        if device.type == "cpu":
            native.wait()  # how fast they are before they are compiled says nothing

    def of_offers(self) -> list[list[Setting]]:
        """By boundary, everything that is offered."""
        console, config = Console(stderr=True), Config({})
        settings: list[list[Setting]] = [[] for _ in self._boundaries]
        pairs = list(itertools.product(self._boundaries, startable()))
        for number, offer in track(pairs, "trying", console=console, disable=not console.is_terminal):
            settings[number].append(self._try(number, config, offer))
        return settings

    def of_file(self, name: str, config: Config) -> Messages:
        """What `config` makes of messages, after its warm-up.

        Raises:
            CompressionError: that cannot be tried on a few messages.
        """
        config.check_boundaries(len(self._boundaries))
        settings = []
        for number in self._boundaries:
            chosen = {direction: config.chosen(number, direction) for direction in DIRECTIONS}
            block = {
                direction: {key: value for key, (value, _) in own.items()}
                for direction, own in chosen.items()
            }
            settings.append(self._try(number, config, Offer(name, block, splits=False)))
        if not all(math.isfinite(own.forward.error + own.backward.error) for own in settings):
            raise CompressionError(
                "cannot be tried on a few messages: it learns from its warm-up, has to know its samples, or "
                "does not take messages of this kind"
            )
        return [own.forward for own in settings], [own.backward for own in settings]

    def measured(self, boundary: int, direction: str) -> dict[str, dict[str, float]]:
        """What was tried and can be used, by name; for JSON."""
        messages = ((own.offer.name, getattr(own, direction)) for own in self._tried[boundary])
        return {
            name: {
                "bytes": message.traffic.nbytes,
                "encode_ms": 1e3 * message.traffic.encode,
                "decode_ms": 1e3 * message.traffic.decode,
                "error": message.error,
            }
            for name, message in messages
            if math.isfinite(message.error)
        }

    def _try(self, number: int, config: Config, offer: Offer) -> Setting:
        boundary = Boundary(number, config)
        boundary.carrying = self._found.carrying[number]
        boundary.begin_step(self._found.loss_scale)
        pair = [self._found.messages[number, direction] for direction in DIRECTIONS]
        own = setting(offer, try_out(boundary, offer, pair, self._clock))
        self._tried[number].append(own)
        return own if self._codec_gbps is None else Setting(offer, *_at_speed(own, pair, self._codec_gbps))


def _at_speed(own: Setting, pair: list[ByMicroBatch], gbps: float) -> Iterator[Message]:
    for direction, messages in zip(DIRECTIONS, pair):
        message: Message = getattr(own, direction)
        plain = _is_none(own.offer.block[direction]["codec"])
        tensors = next(iter(messages.values()))
        seconds = 0.0 if plain else sum(tensor.nbytes for tensor in tensors) / (gbps * 1e9)
        yield replace(message, traffic=replace(message.traffic, encode=seconds, decode=seconds))


def _is_none(codec: Any) -> bool:
    return codec == "none" or (isinstance(codec, dict) and codec["name"] == "none")
