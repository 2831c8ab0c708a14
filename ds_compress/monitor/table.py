"""The values of all stages of a pipeline, added up by one all-reduce.

The all-reduce has a constant size, and its memory is allocated before training begins. So a stage without
values, or one that failed to measure them, takes part like any other.
"""

import enum
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ds_compress.config import DIRECTIONS
from ds_compress.message.channel import Channel
from ds_compress.message.meters import ReceivingMeter, SendingMeter
from ds_compress.monitor.metrics import COUNTERS, EXCHANGE, GRADIENTS, Channels

_OF_FEEDBACK = "residual_norm", "residual_share", "buffer_bytes"
COLUMNS = *COUNTERS, *SendingMeter.COLUMNS, *_OF_FEEDBACK, *ReceivingMeter.COLUMNS
EXCHANGED = tuple(name for name in EXCHANGE if name != "ratio")
"""Columns of gradients that a stage exchanges."""
SIDES = 2  # of a channel: where it sends, where it receives
STAMPS = 64
"""Packets of a channel, the first of a step, of which times are exchanged."""


class Status(enum.IntEnum):
    """What a stage has done in a step."""

    COUNTED = 0
    MEASURED = 1
    FAILED = 2


class Table:
    """Columns and stamps of every channel, columns and a status of every rank, of one pipeline."""

    def __init__(self, boundaries: int, ranks: int, device: torch.device):
        def zeros(*shape: int, device: torch.device | str = "cpu") -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self._columns = zeros(boundaries, len(DIRECTIONS), len(COLUMNS))
        self.stamps = zeros(boundaries, len(DIRECTIONS), SIDES, STAMPS)
        """[boundary, direction, side, packet]; zeros where there was none."""
        self._status = zeros(ranks)
        self._gradients = zeros(len(GRADIENTS), ranks, len(EXCHANGED))
        self._parts = (self._columns, self.stamps, self._status, self._gradients)
        self._sum = zeros(sum(part.numel() for part in self._parts), device=device)

    def clear(self) -> None:
        for part in self._parts:
            part.zero_()

    def fill(self, channel: Channel, values: Mapping[str, float]) -> None:
        """Write the row of `channel`: `values` by column."""
        for name, value in values.items():
            self._columns[self._place(channel)][COLUMNS.index(name)] = value

    def stamp(self, channel: Channel, side: int, stamps: Sequence[float]) -> None:
        """Store when the packets of a step left (`side` 0) or came (1), in milliseconds."""
        first = torch.tensor(stamps[:STAMPS], dtype=torch.float64, device="cpu")
        self.stamps[self._place(channel)][side, : len(first)] = first

    def fill_gradients(self, kind: str, rank: int, values: Mapping[str, float]) -> None:
        """Put `values`, by column, where the other stages find those of gradients that `rank` exchanges."""
        found = torch.tensor(
            [values.get(name, math.nan) for name in EXCHANGED], dtype=torch.float64, device="cpu"
        )
        self._gradients[list(GRADIENTS).index(kind), rank] = found

    def set_status(self, rank: int, status: Status) -> None:
        self._status[rank] = status

    def add_up(self, group: Any) -> None:
        """Sum the table over all stages, which are the process `group`, and each of which calls this."""
        self._sum.copy_(torch.cat([part.flatten() for part in self._parts]))
        dist.all_reduce(self._sum, group=group)
        sums = self._sum.cpu().split([part.numel() for part in self._parts])
        for part, summed in zip(self._parts, sums):
            part.copy_(summed.view_as(part))

    @property
    def channels(self) -> Channels:
        keys = itertools.product(range(len(self._columns)), DIRECTIONS)
        return {key: dict(zip(COLUMNS, row)) for key, row in zip(keys, self._columns.flatten(0, 1).tolist())}

    @property
    def gradients(self) -> dict[str, list[dict[str, float]]]:
        """Return the values of gradients by kind and rank, zeros where gradients are not compressed."""
        kinds = zip(GRADIENTS, self._gradients.tolist())
        return {kind: [dict(zip(EXCHANGED, row)) for row in rows] for kind, rows in kinds}

    @property
    def statuses(self) -> list[Status]:
        return [Status(int(value)) for value in self._status.tolist()]

    @staticmethod
    def _place(channel: Channel) -> tuple[int, int]:
        return channel.boundary.number, DIRECTIONS.index(channel.direction)
