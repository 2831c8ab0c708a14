"""One rank's state of channels in a safetensors file: as it is, in 8 bits, or as 8-bit changes to an earlier
file.

    KEY                        the tensor as it is
    KEY#codes  KEY#scales      int8 codes of the tensor's shape, fp32 scales: see `int8_encode`
    KEY#delta  KEY#scales      zstd frame of the int8 codes of a change, uint8; scales: see `delta_encode`
    metadata                   eight_bits: dtype of each tensor in codes; id: of this file; base: [tag, id] of
                               that #delta changes, or null; and what the caller adds; each value in JSON

A base has the same name under another tag, and may have a base itself. The id tells it from a file that was
written there later.
"""

import functools
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import zstandard
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ds_compress.config import DIRECTIONS
from ds_compress.feedback.state import GROUP, grouped, int8_codes, int8_decode, int8_encode

FULL_EVERY = 8
"""Files of changes in a row at most, so that loading reads no more bases than that; a complete file
follows."""
DAMAGE = (SafetensorError, zstandard.ZstdError, OSError, KeyError, ValueError, AttributeError)
"""What reading a missing or damaged file raises."""


class _Link(NamedTuple):
    tag: str
    file: Any
    entries: frozenset[str]
    metadata: dict[str, Any]


class StateFile:
    """The file `name` under `tag`; it is opened, and so are its bases, when something is read that needs
    them."""

    def __init__(self, root: Path, tag: str, name: str):
        self.root, self.tag, self.name = root, tag, name
        self.at = tag
        """Tag of the file read last: the one to blame for any of `DAMAGE`."""
        self._links: list[_Link] = []  # this file, its base, the base of that, ...

    @property
    def metadata(self) -> dict[str, Any]:
        return self._link(0).metadata

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        return frozenset(entry.split("#")[0] for entry in self._link(0).entries)

    def read(self, key: str) -> Tensor:
        """The tensor in the dtype in which it was given; on the CPU."""
        value, dtype = self.decoded(key), self.metadata["eight_bits"].get(key)
        return value.to(getattr(torch, dtype)) if dtype else value

    def decoded(self, key: str, depth: int = 0) -> Tensor:
        """The tensor as the file so many bases down has it; fp32 if it is in codes."""
        _, file, entries, _ = self._link(depth)
        if key in entries:
            return file.get_tensor(key)
        scales = file.get_tensor(f"{key}#scales")
        if f"{key}#codes" in entries:
            return int8_decode(file.get_tensor(f"{key}#codes"), scales)
        frame = file.get_tensor(f"{key}#delta").numpy()
        codes = torch.frombuffer(bytearray(zstandard.ZstdDecompressor().decompress(frame)), dtype=torch.int8)
        return delta_decode(codes, scales, self.decoded(key, depth + 1))

    def _link(self, depth: int) -> _Link:
        if depth == len(self._links):
            self._links.append(self._open(*self._links[-1].metadata["base"] if depth else (self.tag, None)))
        self.at = self._links[depth].tag
        return self._links[depth]

    def _open(self, tag: str, written: str | None) -> _Link:
        self.at = tag
        path = Path(self.root, tag, self.name)
        if len(self._links) > FULL_EVERY:
            raise ValueError(f"{path} is more than {FULL_EVERY} bases down")
        file = safe_open(path, "pt")
        metadata = {key: json.loads(value) for key, value in file.metadata().items()}
        if written and metadata["id"] != written:
            raise ValueError(f"{path} was written again, after what builds on it")
        return _Link(tag, file, frozenset(file.keys()), metadata)


def pack(
    tensors: Mapping[str, Tensor], eight_bits: bool, base: StateFile | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Entries and metadata of a file for `write`.

    Args:
        tensors: by key; a key is LAYER/SIDE/POSITION/KEY IN MEMORY.
        eight_bits: whether large buffers of feedbacks are stored so.
        base: mirrored ones that it has, in the same shape, are stored as changes to it.

    Raises:
        DAMAGE: `base` cannot be read; one of these classes.
    """
    entries: dict[str, Tensor] = {}
    dtypes = {}
    for key, value in tensors.items():
        name = key.split("/", 3)[3]
        value = value.cpu().contiguous()
        if not (eight_bits and _is_large_feedback(name, value)):
            entries[key] = value
            continue
        dtypes[key] = str(value.dtype).removeprefix("torch.")
        known = base.decoded(key) if base and "/mirror/" in name and key in base.keys else None
        if known is not None and known.shape == value.shape:
            codes, entries[f"{key}#scales"] = delta_encode(value, known)
            frame = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(codes.numpy())
            entries[f"{key}#delta"] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        else:
            entries[f"{key}#codes"], entries[f"{key}#scales"] = int8_encode(value)
    origin = [base.tag, base.metadata["id"]] if base else None
    return entries, {"eight_bits": dtypes, "id": uuid.uuid4().hex, "base": origin}


def write(path: Path, entries: dict[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write a file; complete or not at all."""
    part = path.with_suffix(".part")
    try:
        save_file(entries, part, {key: json.dumps(value) for key, value in metadata.items()})
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def _is_large_feedback(name: str, value: Tensor) -> bool:
    is_state = name.startswith(tuple(f"{direction}/" for direction in DIRECTIONS)) and not name.endswith(
        ".scales"
    )
    return is_state and value.dtype.is_floating_point and value.numel() >= GROUP


def delta_encode(value: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """`value` as a change to `base`: int8 codes of its shape, and one fp32 scale for each group of values;
    finite.

    The step between two codes is that of `int8_encode` for the same value, not a fraction of the change. So
    the error is the same, at most half a step, after any number of changes, and where little has changed
    codes are small numbers, mostly 0, which zstd makes short. A group that is nearer to 0 than to `base` is a
    change to 0 instead: its scale comes with a minus sign.
    """
    new, old = grouped(value), grouped(base)
    largest = new.abs().amax(1)
    near = (new - old).abs().amax(1) <= largest
    steps = largest / 127
    change = new - torch.where(near[:, None], old, 0.0)
    return int8_codes(change, steps, value.shape), torch.where(near, steps, -steps)


def delta_decode(codes: Tensor, scales: Tensor, base: Tensor) -> Tensor:
    """The fp32 value, in base's shape, of what `delta_encode` gave."""
    if codes.numel() != base.numel():
        raise ValueError(f"{codes.numel()} codes came for a change to {base.numel()} values")
    near = (scales > 0).repeat_interleave(GROUP)[: base.numel()].view(base.shape)
    return torch.where(near, base.float(), 0.0) + int8_decode(codes.view(base.shape), scales.abs())
