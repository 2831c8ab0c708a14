"""Read what W&B wrote offline: its file is a LevelDB log of protobuf records."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from ds_compress.cli.runs import Series


def keep_offline(folder: Path, monkeypatch: Any) -> None:
    """Let runs of W&B write below `folder` alone."""
    for name, value in (("MODE", "offline"), ("DIR", str(folder)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)


def finish() -> None:
    """End the run of this process, and wait for the process that writes the file."""
    wandb.finish()
    wandb.teardown()


def read_offline(folder: Path) -> tuple[dict[str, Series], dict[str, Any], dict[str, Any]]:
    """Series by label, config and summary of the only run below `folder`."""
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    series: dict[str, Series] = {}
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for record in map(Record.FromString, _records(file.read_bytes())):
        config |= map(_item, [*record.run.config.update, *record.config.update])
        summary |= map(_item, record.summary.update)
        for name, value in map(_item, record.history.item):
            if isinstance(value, (int, float)) or value in ("NaN", "Infinity", "-Infinity"):
                series.setdefault(name, []).append((record.history.step.num, float(value)))
    return series, config, summary


def _item(item: Any) -> tuple[str, Any]:
    return item.key or "/".join(item.nested_key), json.loads(item.value_json)


def _records(data: bytes) -> Iterator[bytes]:
    """The records behind a header of 7 bytes, in blocks of 32 KiB of fragments, each of which begins with
    CRC u32, length u16 and type u8: 1 whole, 2 first, 3 middle, 4 last."""
    block, header = 32768, struct.Struct("<IHB")
    assert data[:4] == b":W&B"
    at, record = 7, b""
    while at + header.size <= len(data):
        if block - at % block < header.size:
            at += block - at % block
            continue
        _, length, kind = header.unpack_from(data, at)
        at += header.size
        record = (record if kind in (3, 4) else b"") + data[at : at + length]
        at += length
        if kind in (1, 4):
            yield record
