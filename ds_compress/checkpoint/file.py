"""A rank's state of channels in a safetensors file: as it is, in 8 bits, or as 8-bit changes to another file.

    KEY                        the tensor as it is
    KEY#codes  KEY#scales      int8 codes of the tensor's shape, fp32 scales: see `int8_encode`
    KEY#delta  KEY#scales      zstd frame of the int8 codes of a change, uint8; scales: see `delta_encode`
    metadata                   "state": a `Metadata` in JSON, with a hash of each entry; "hash": of that text

A base has the same name under another tag of the same folder, and may have a base itself. Its id differs
from that of a file written there later.

Everything read is compared with its hash and with the metadata. Whatever is wrong with a file raises
`DamagedFile`, never another exception.
"""

import functools
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import zstandard
from pydantic import BaseModel, ConfigDict, Field
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ds_compress.config import DIRECTIONS
from ds_compress.feedback.digest import absorb
from ds_compress.feedback.state import GROUP, int8_decode, int8_encode
from ds_compress.kernels.feedback.reference import grouped, int8_codes, int8_scales
from ds_compress.kernels.lossless.zstd import unpack
from ds_compress.kernels.numerics import is_finite
from ds_compress.planning.depth import MAX_DEPTH

FULL_EVERY = 8
"""The most files of changes in a row; then follows a complete file. Loading reads no more bases than that."""
HASH_BYTES = 8


class DamagedFile(Exception):
    """A file that must not, or cannot, be loaded; `tag` is that of its checkpoint."""

    def __init__(self, reason: str, tag: str):
        super().__init__(reason)
        self.tag = tag


class UnhashedFile(DamagedFile):
    """A file of a release that wrote no hashes."""


class Record(BaseModel):
    """A part of a file's metadata."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


FROM_JSON = Field(strict=False)
"""A tuple that may come as a list, as JSON has it."""


class PolicyRecord(Record):
    """The state of a policy."""

    rungs: list[Annotated[tuple[int, str, int], FROM_JSON]]
    """Boundary, direction and rung."""
    state: dict[str, Any]
    """The policy's own state."""


class Course(Record):
    """The settings after all changes during training."""

    written: dict[str, Any]
    """The parts of the block that have to be the same for the settings to go on."""
    adopted: dict[str, Any]
    """Settings in force beside the written block, as "boundaries" of a block."""
    policy: PolicyRecord


class Metadata(Record):
    """The metadata of a file."""

    version: str
    """Release that wrote the file."""
    step: int
    """Optimizer steps done."""
    settings: dict[str, dict[str, Any]]
    """Of the codecs of each side in the file."""
    schedule: tuple[Annotated[int, Field(ge=1, le=MAX_DEPTH)], int, int] = (1, 0, 0)
    """Depth, stages and micro-batches of the steps before."""
    warmup_ends: dict[str, int] = {}
    """Of each side in the file: see `Boundary.warmup_end`."""
    course: Course | None = None
    """The settings after all changes during training; the same in the files of all ranks."""
    noted: dict[
        Annotated[str, Field(pattern=r"^\d{1,9}(/(forward|backward))?$")],
        Annotated[tuple[float, float], FROM_JSON],
    ] = {}
    """What only this rank has recorded. By boundary, for its policy: a sum of norms and their number. By
    boundary and direction, for its guard: `monitor.limits.LASTING` of the last measured step."""
    name: str
    """Of the file itself: that of another rank must not take its place."""
    id: str
    """New for every file that is written."""
    base: tuple[str, str] | None
    """Tag and id of what #delta entries change."""
    eight_bits: dict[str, Literal["float16", "bfloat16", "float32", "float64"]]
    """Dtype of each tensor in codes."""
    names: str
    """Hash of the names of all entries, sorted: BLAKE2b, 8 bytes, hexadecimal."""
    hashes: str
    """Hash of each entry, in the order of their names, without a space: a list would double the header."""


class _Link(NamedTuple):
    tag: str
    file: Any
    hashes: Mapping[str, str]  # by entry
    metadata: Metadata


class StateFile:
    """Reads the file `name` under `tag`; opens it, and its bases, when they are needed.

    Every read may raise `DamagedFile`.
    """

    def __init__(self, root: Path, tag: str, name: str):
        self.root, self.tag, self.name = root, tag, name
        self._links: list[_Link] = []  # this file, its base, the base of that, ...

    @property
    def metadata(self) -> Metadata:
        return self._link(0).metadata

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        return frozenset(entry.split("#")[0] for entry in self._link(0).hashes)

    def read(self, key: str) -> Tensor:
        """Return the tensor in the dtype in which it was saved; on the CPU, and finite."""
        value, dtype = self.decoded(key), self.metadata.eight_bits.get(key)
        with _damage_in(self.tag):
            value = value.to(getattr(torch, dtype)) if dtype else value
            if value.is_floating_point() and not is_finite(value if value.itemsize > 1 else value.float()):
                raise ValueError(f"entry {key} is not finite")
        return value

    def memories(self, side: str) -> dict[int, dict[str, Tensor]]:
        """Return all tensors of `side`, by tensor position and key in memory."""
        found: dict[int, dict[str, Tensor]] = {}
        for name in sorted(name for name in self.keys if name.startswith(f"{side}/")):
            with _damage_in(self.tag):
                position, key = name.removeprefix(f"{side}/").split("/", 1)
                memory = found.setdefault(int(position), {})
            memory[key] = self.read(name)
        return found

    def decoded(self, key: str, depth: int = 0) -> Tensor:
        """Return the tensor from the file `depth` bases down; fp32 if it is in codes."""
        link = self._link(depth)
        with _damage_in(link.tag):
            if key in link.hashes:
                return _entry(link, key)
            scales = _entry(link, f"{key}#scales", torch.float32)
            if f"{key}#codes" in link.hashes:
                codes = _entry(link, f"{key}#codes", torch.int8)
                _check_scales(codes, scales)
                return int8_decode(codes, scales)
            frame = _entry(link, f"{key}#delta", torch.uint8)
            base = self.decoded(key, depth + 1)
            _check_scales(base, scales)
            return delta_decode(unpack(frame, base.numel()).view(torch.int8), scales, base)

    def _link(self, depth: int) -> _Link:
        if depth == len(self._links):
            link: tuple[str, str | None] | None = self._links[-1].metadata.base if depth else (self.tag, None)
            if link is None:
                raise DamagedFile("it has changes, and no base", self._links[-1].tag)
            with _damage_in(link[0]):
                self._links.append(self._open(*link))
        return self._links[depth]

    def _open(self, tag: str, written: str | None) -> _Link:
        """Open the file under `tag`; `written`: its id, None for the file of this object."""
        path = Path(self.root, tag, self.name)
        if written is not None and not path.resolve().is_relative_to(Path(self.root).resolve()):
            raise ValueError(f"{path} is not inside {self.root}")
        if len(self._links) > FULL_EVERY:
            raise ValueError(f"{path} is more than {FULL_EVERY} bases down")
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        file = safe_open(path, "pt")
        texts = file.metadata() or {}
        if "hash" not in texts and "version" in texts:
            raise UnhashedFile("it has no hashes: written by an older release", tag)
        if texts.keys() != {"state", "hash"} or texts["hash"] != _hash_of_text(texts["state"]):
            raise ValueError("its metadata is not what was written")
        metadata = Metadata.model_validate_json(texts["state"])
        if metadata.name != self.name:
            raise ValueError(f"it was written as {metadata.name}")
        if written is not None and metadata.id != written:
            raise ValueError(f"{path} was written again, after what builds on it")
        entries = sorted(file.keys())
        if metadata.names != _hash_of_text(json.dumps(entries)):
            raise ValueError("its entries are not those that were written")
        length = 2 * HASH_BYTES
        hashes = [metadata.hashes[at : at + length] for at in range(0, len(metadata.hashes), length)]
        return _Link(tag, file, dict(zip(entries, hashes, strict=True)), metadata)


@contextmanager
def _damage_in(tag: str) -> Iterator[None]:
    """Turn every exception while the file under `tag` is read into `DamagedFile`.

    A rank that raised anything else would leave the others waiting for its verdict.
    """
    try:
        yield
    except DamagedFile:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise DamagedFile(f"{type(error).__name__}: {reason}", tag) from error


def _entry(link: _Link, name: str, dtype: torch.dtype | None = None) -> Tensor:
    value = link.file.get_tensor(name).clone()  # the library maps the file: it may be written to after this
    if _hash_of_entry(name, value) != link.hashes[name]:
        raise ValueError(f"entry {name} is not what was written")
    if dtype is not None and value.dtype != dtype:
        raise ValueError(f"entry {name} is {value.dtype}, expected {dtype}")
    return value


def _check_scales(values: Tensor, scales: Tensor) -> None:
    groups = -(-values.numel() // GROUP)
    if scales.shape != (groups,):
        raise ValueError(f"scales {list(scales.shape)} came for {groups} groups of values")


def _hash_of_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).hexdigest()


def _hash_of_entry(name: str, value: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    absorb(digest.update, name, value)
    return digest.hexdigest()


def pack(
    tensors: Mapping[str, Tensor], eight_bits: bool, base: StateFile | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the entries of a file for `write`, and their part of the metadata.

    Args:
        tensors: by key; a key is LAYER/SIDE/POSITION/KEY IN MEMORY.
        eight_bits: whether large buffers of feedbacks are stored in 8 bits.
        base: mirrored buffers that it has, in the same shape, are stored as changes to it.

    Raises:
        DamagedFile: `base` cannot be read.
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
            frame = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(codes.numpy().data)
            entries[f"{key}#delta"] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        else:
            entries[f"{key}#codes"], entries[f"{key}#scales"] = int8_encode(value)
    origin = (base.tag, base.metadata.id) if base else None
    return entries, {"eight_bits": dtypes, "base": origin}


def write(path: Path, entries: dict[str, Tensor], **metadata: Any) -> None:
    """Write a file, complete or not at all.

    Args:
        metadata: fields of `Metadata`, except those that follow from the file.
    """
    names = sorted(entries)
    complete = Metadata(
        **metadata,
        name=path.name,
        id=uuid.uuid4().hex,
        names=_hash_of_text(json.dumps(names)),
        hashes="".join(_hash_of_entry(name, entries[name]) for name in names),
    )
    text = json.dumps(complete.model_dump(mode="json"))
    part = path.with_suffix(".part")
    try:
        save_file(entries, part, {"state": text, "hash": _hash_of_text(text)})
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def _is_large_feedback(name: str, value: Tensor) -> bool:
    if not name.startswith(tuple(f"{direction}/" for direction in DIRECTIONS)) or name.endswith(".scales"):
        return False
    return value.dtype.is_floating_point and value.numel() >= GROUP


def delta_encode(value: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Encode `value` as a change to `base`: int8 codes of its shape, and one fp32 scale for each group of
    values; finite.

    The step between two codes is that of `int8_encode` for the same value, not a fraction of the change. So
    the error is the same, at most half a step, after any number of changes, and where little has changed
    codes are small numbers, mostly 0, which zstd makes short. A group that is nearer to 0 than to `base` is a
    change to 0 instead: its scale comes with a minus sign.
    """
    new, old = grouped(value), grouped(base)
    near = (new - old).abs().amax(1) <= new.abs().amax(1)
    steps = int8_scales(new)
    change = new - torch.where(near[:, None], old, 0.0)
    return int8_codes(change, steps, value.shape), torch.where(near, steps, -steps)


def delta_decode(codes: Tensor, scales: Tensor, base: Tensor) -> Tensor:
    """Return the fp32 value, in base's shape, of what `delta_encode` returned."""
    if codes.numel() != base.numel():
        raise ValueError(f"{codes.numel()} codes came for a change to {base.numel()} values")
    near = (scales > 0).repeat_interleave(GROUP)[: base.numel()].view(base.shape)
    return torch.where(near, base.float(), 0.0) + int8_decode(codes.view(base.shape), scales.abs())
