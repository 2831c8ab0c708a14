"""Runs read back from what DeepSpeed's monitors wrote: a folder of CSV files, or an offline W&B run."""

import csv
import json
import math
import re
import statistics
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_compress.config import DIRECTIONS
from ds_compress.errors import CompressionError
from ds_compress.monitor.metrics import CHANNEL, LOSS_COST, PIPELINE, label

LOSS = "Train/Samples/train_loss"
FINAL = 5  # losses whose mean is the final loss
COMMON = r"csv|files|wandb|(offline-)?run-\d+_\d+-\w+"
"""Names of folders that monitors give to all runs, as a pattern."""

Series = list[tuple[int, float]]


@dataclass
class RecordedRun:
    """One run: its series of (samples, value) by label, in the order of the samples."""

    name: str
    series: dict[str, Series]
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def boundaries(self) -> int:
        """How many boundaries wrote values."""
        count = 0
        while label("wire_bytes", count, "forward") in self.series:
            count += 1
        return count

    def channel(self, name: str, boundary: int, direction: str) -> Series:
        return self.series.get(label(name, boundary, direction), [])

    def total(self, name: str) -> Series:
        """Sum of a channel value over all channels, at the samples where every channel has one."""
        channels = [dict(self.channel(name, b, d)) for b in range(self.boundaries) for d in DIRECTIONS]
        shared = set.intersection(*map(set, channels)) if channels else set()
        return [(samples, sum(channel[samples] for channel in channels)) for samples in sorted(shared)]

    def median(self, name: str, boundary: int | None = None, direction: str | None = None) -> float:
        """Median of the finite values of a label, nan when there is none."""
        values = [
            value
            for _, value in self.series.get(label(name, boundary, direction), ())
            if math.isfinite(value)
        ]
        return statistics.median(values) if values else math.nan

    @property
    def final_loss(self) -> float:
        """Mean of the last losses."""
        return statistics.fmean(loss for _, loss in self.series[LOSS][-FINAL:])


def read_runs(path: Path) -> list[RecordedRun]:
    """The runs at `path`: folders of DeepSpeed's CSV monitor, or .wandb files, wherever they are below it.

    What both monitors wrote of one run is one run: its losses are the same.

    Raises:
        CompressionError: there is no run, or one that holds no training loss.
    """
    if not path.exists():
        raise CompressionError(f"report: {path} is not there")
    files = sorted(path.rglob("*.wandb")) if path.is_dir() else [path] if path.suffix == ".wandb" else []
    folders = sorted({file.parent for file in path.rglob(_file(LOSS))}) if path.is_dir() else []
    if not folders and not files:
        raise CompressionError(
            f"report: {path} holds no run; allowed: a folder of DeepSpeed's csv_monitor, an offline W&B run, "
            "or a folder with such folders"
        )
    alone = len(folders) + len(files) == 1
    runs: list[RecordedRun] = []
    for place in (*folders, *files):
        series, config = _read_wandb(place) if place in files else (_read_csv(place), {})
        if not series.get(LOSS):
            raise CompressionError(f"report: {place} holds no {LOSS}: the run wrote no step")
        series = {name: sorted(dict(points).items()) for name, points in series.items()}
        same = next((run for run in runs if _is_same(run.series[LOSS], series[LOSS])), None)
        if same and place in files:
            same.config = config
        else:
            runs.append(RecordedRun(_name(path, path if alone else place), series, config))
    return runs


def _is_same(one: Series, other: Series) -> bool:
    return len(one) == len(other) and all(
        a[0] == b[0] and math.isclose(a[1], b[1], rel_tol=1e-6) for a, b in zip(one, other)
    )


def _name(path: Path, place: Path) -> str:
    """What tells the run at `place` from others below `path`, or the last part of both: not the folders that
    every run has."""
    parts = [part for part in place.resolve().with_suffix("").parts if not re.fullmatch(COMMON, part)]
    above = [part for part in path.resolve().with_suffix("").parts if not re.fullmatch(COMMON, part)]
    return "/".join(parts[len(above) :]) or parts[-1]


def _read_csv(folder: Path) -> dict[str, Series]:
    """A file per label; DeepSpeed has replaced / by _, so only labels of a known form can be told."""
    known = {name: _file(name) for name in (LOSS, *map(label, (*PIPELINE, LOSS_COST)))}
    for file in folder.glob("Train_Compression_boundary_*.csv"):
        match = re.fullmatch(r"Train_Compression_boundary_(\d+)_(forward|backward)_(\w+)\.csv", file.name)
        if match and match[3] in CHANNEL:
            known[label(match[3], int(match[1]), match[2])] = file.name
    return {name: _read_series(folder / file) for name, file in known.items() if (folder / file).exists()}


def _file(name: str) -> str:
    return f"{name.replace('/', '_')}.csv"


def _read_series(file: Path) -> Series:
    """A run that goes on in the same folder writes another header, and steps again that it had done
    before."""
    try:
        with open(file, newline="") as lines:
            return [(int(samples), float(value)) for samples, value in csv.reader(lines) if samples != "step"]
    except (ValueError, csv.Error) as error:
        raise CompressionError(f"report: {file} is not lines of a step and a value: {error}") from None


def _read_wandb(file: Path) -> tuple[dict[str, Series], dict[str, Any]]:
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]
    except ImportError as error:
        raise CompressionError(f"report: {file}: {error}; install wandb") from None
    series: dict[str, Series] = {}
    config: dict[str, Any] = {}
    try:
        for record in map(Record.FromString, _wandb_records(file.read_bytes(), file)):
            for item in [*record.run.config.update, *record.config.update]:
                config[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            for item in record.history.item:
                value = json.loads(item.value_json)
                name = item.key or "/".join(item.nested_key)
                if isinstance(value, (int, float)) or value in ("NaN", "Infinity", "-Infinity"):
                    series.setdefault(name, []).append((record.history.step.num, float(value)))
    except (DecodeError, json.JSONDecodeError) as error:
        raise CompressionError(f"report: {file} holds a damaged record: {error}") from None
    return series, config


def _wandb_records(data: bytes, file: Path) -> Iterator[bytes]:
    """The records of a .wandb file, which is a LevelDB log behind a header of 7 bytes.

        file    ":W&B"  magic u16  version u8  then blocks of 32 KiB, the header being part of the first
        block   fragments, and zeros where less than a fragment's header is left
        fragment  CRC u32  length u16  type u8 (1 whole, 2 first, 3 middle, 4 last)  bytes

    Numbers are little-endian. A file that was cut off ends with its last whole record.
    """
    block, header = 32768, struct.Struct("<IHB")
    if data[:4] != b":W&B":
        raise CompressionError(f"report: {file} starts with {data[:4]!r}, not b':W&B': not a file of W&B")
    at, record = 7, b""
    while at + header.size <= len(data):
        if block - at % block < header.size:
            at += block - at % block
            continue
        _, length, kind = header.unpack_from(data, at)
        at += header.size
        if kind == 0 or at + length > len(data):
            return
        record = (record if kind in (3, 4) else b"") + data[at : at + length]
        at += length
        if kind in (1, 4):
            yield record
