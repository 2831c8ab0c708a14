"""Counters of all channels of a pipeline, gathered on its first stage and written where DeepSpeed's monitor writes."""

from collections.abc import Callable

import torch
from torch import Tensor

from ds_compress import __version__
from ds_compress.config import DIRECTIONS, Config
from ds_compress.stage import Stage

COLUMNS = ("messages", "raw_bytes", "wire_bytes", "message_raw_bytes", "message_wire_bytes")
WRITTEN = ("raw_bytes", "wire_bytes", "ratio")

Events = list[tuple[str, float, int]]


class Monitor:
    """Says once what is active, and writes the running totals every so many steps."""

    def __init__(
        self,
        config: Config,
        boundaries: int,
        total: Callable[[Tensor], object],
        write: Callable[[Events], None] | None,
        reports: bool,
    ):
        """
        Args:
            boundaries: how many the pipeline has.
            total: sums a tensor in place over the stages of this pipeline.
            write: DeepSpeed's `monitor.write_events`, None when no sink is on.
            reports: True on the one rank that speaks for all, a first stage.
        """
        self.config = config
        self.boundaries = boundaries
        self._total = total
        self._write = write
        self._reports = reports
        self._announced = False

    def end_step(self, stage: Stage, step: int, samples: int, device: torch.device) -> None:
        """After a training step, on all stages alike; `samples` (global) is the x-axis of DeepSpeed's own events."""
        every = self.config.block.monitor.every
        due = self._write is not None and every > 0 and step % every == 0
        if self._announced and not due:
            return
        rows = self._gather(stage, device)
        if not self._announced:
            self._announced = True
            if self._reports:
                print(self._announcement(rows), flush=True)
        if due and self._reports:
            self._write(self._events(rows, samples))

    def _gather(self, stage: Stage, device: torch.device) -> Tensor:
        """float64 [boundaries, directions, columns]; each stage fills the channels it sends on."""
        rows = torch.zeros(self.boundaries, len(DIRECTIONS), len(COLUMNS), dtype=torch.float64)
        for channel in stage.sending:
            sent = channel.sent
            values = (
                sent.messages, sent.raw_bytes, sent.wire_bytes,
                channel.last.raw_bytes, channel.compressed_bytes(channel.last),
            )
            rows[channel.boundary.number, DIRECTIONS.index(channel.direction)] = torch.tensor(
                values, dtype=torch.float64
            )
        rows = rows.to(device)
        self._total(rows)
        return rows.cpu()

    def _announcement(self, rows: Tensor) -> str:
        boundaries = []
        for number, directions in enumerate(rows.tolist()):
            codecs = self.config.codecs(number)
            channels = []
            for name, row in zip(DIRECTIONS, directions):
                values = dict(zip(COLUMNS, row))
                raw, wire = values["message_raw_bytes"], values["message_wire_bytes"]
                channels.append(f"{name} {getattr(codecs, name)} {raw:,.0f} -> {wire:,.0f} bytes ({raw / wire:.2f}x)")
            boundaries.append(f"boundary {number}: {', '.join(channels)}")
        block = self.config.block
        warmup = f", after {block.warmup_steps} warm-up steps" if block.warmup_steps else ""
        how = f"link {block.link.mode}{warmup}"
        return f"ds_compress {__version__} active, {how}; per message: {'; '.join(boundaries)}"

    def _events(self, rows: Tensor, samples: int) -> Events:
        events = []
        for number, directions in enumerate(rows.tolist()):
            for name, row in zip(DIRECTIONS, directions):
                values = dict(zip(COLUMNS, row))
                values["ratio"] = values["raw_bytes"] / values["wire_bytes"]
                label = f"Train/Compression/boundary_{number}/{name}"
                events += [(f"{label}/{key}", values[key], samples) for key in WRITTEN]
        return events
