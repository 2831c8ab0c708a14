"""A rank's state of channels in a safetensors file.

    KEY                        the tensor, or
    KEY#0, KEY#1, ...          the payload that the codec of "checkpoint" makes of it
    metadata                   "state": a `Metadata` in JSON, with a hash of each entry; "hash": of that text

Everything read is compared with its hash and with the metadata. Whatever is wrong with a file raises
`DamagedFile`, never another exception.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ds_compress.codec import CODECS, Codec, Context, TensorSpec
from ds_compress.feedback.digest import absorb
from ds_compress.kernels.numerics import is_finite
from ds_compress.registry import Options

HASH_BYTES = 8

SMALLEST = 256
"""Values of a tensor from which the codec encodes it."""
INEXACT = torch.float32, torch.bfloat16, torch.float16
"""Dtypes that it encodes."""


class DamagedFile(Exception):
    """A file that must not, or cannot, be loaded."""


FROM_JSON = Field(strict=False)
"""A tuple that may come as a list, as JSON has it."""


class PolicyRecord(Options):
    """The state of a policy."""

    policy: dict[str, Any] = {}
    """Its settings; empty up to release 0.3."""
    rungs: list[Annotated[tuple[int, str, int], FROM_JSON]]
    """Boundary, direction and rung."""
    state: dict[str, Any]
    """The policy's own state."""


class SessionState(Options):
    """The settings after all changes during training, and the state of the parts, by their keys."""

    written: dict[str, Any]
    """The parts of the block that have to be the same for the settings to go on."""
    adopted: dict[str, Any]
    """Settings in force beside the written block, as "boundaries" of a block."""
    policy: PolicyRecord
    guard: dict[str, float | None] = {}
    """What the guard remembers: the first loss of training."""
    depth: dict[str, Annotated[int, Field(ge=1)]] = {}
    """The depth that was chosen, and the stages and micro-batches that it is for; empty: none was."""


class Metadata(Options):
    """The metadata of a file."""

    version: str
    """Release that wrote the file."""
    step: int
    """Optimizer steps done."""
    settings: dict[str, dict[str, Any]]
    """Settings of the codecs of each side in the file."""
    schedule: list[int] = []
    warmup_ends: dict[str, int] = {}
    """Like `schedule` written up to release 0.3; not read."""
    state: SessionState | None = Field(default=None, alias="course")
    """The same in the files of all ranks."""
    own_state: dict[
        Annotated[str, Field(pattern=r"^\d{1,9}(/(forward|backward))?$")],
        Annotated[tuple[float, float], FROM_JSON],
    ] = Field(default={}, alias="noted")
    """What only this rank has recorded. By boundary, for its policy: a sum of norms and their number. By
    boundary and direction, for its guard: `monitor.guard_limits.LASTING` of the last measured step."""
    dependence: dict[str, list[bool]] = {}
    """`Boundary.dependence` of each side where it is known."""
    codec: dict[str, Any] = {}
    """Name and options of the codec of "checkpoint"; empty for none."""
    encoded: dict[str, Annotated[tuple[list[int], str, int], FROM_JSON]] = {}
    """Shape, dtype and number of parts of each tensor that it has encoded, by key."""
    name: str
    """Name of the file itself: a file of another rank is refused."""
    id: str = ""
    base: None = None
    """From releases up to 0.3, like `id`; a file with changes to another one had a base, and is refused."""
    eight_bits: dict[str, str] = Field({}, max_length=0)
    """From releases up to 0.3, which could store state in 8 bits; such a file is refused."""
    names: str
    """Hash of the names of all entries, sorted: BLAKE2b, 8 bytes, hexadecimal."""
    hashes: str
    """Hash of each entry, in the order of their names, without a space: a list would double the header."""


GONE = {"scheme": "asymmetric", "scale_dtype": "bf16", "grid": None}
"""Options that `quantize` had up to release 0.3, each with its only value that is left."""


def _without_gone_options(found: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a file's metadata without `GONE`: settings are compared with today's."""
    return {name: value for name, value in found.items() if name not in GONE or value != GONE[name]}


class StateFile:
    """Reads the file at `path`.

    To open it, and every read, may raise `DamagedFile`.
    """

    def __init__(self, path: Path):
        self.path = path
        with _damage():
            if not path.is_file():
                raise FileNotFoundError(f"there is no file {path}")
            self._file: Any = safe_open(path, "pt")
            texts = self._file.metadata() or {}
            if texts.keys() != {"state", "hash"} or texts["hash"] != _hash_of_text(texts["state"]):
                raise ValueError("its metadata is not what was written")
            state = json.loads(texts["state"], object_hook=_without_gone_options)
            self.metadata = Metadata.model_validate_json(json.dumps(state))
            if self.metadata.name != path.name:
                raise ValueError(f"it was written as {self.metadata.name}")
            entries = sorted(self._file.keys())
            if self.metadata.names != _hash_of_text(json.dumps(entries)):
                raise ValueError("its entries are not those that were written")
            text, length = self.metadata.hashes, 2 * HASH_BYTES
            hashes = [text[at : at + length] for at in range(0, len(text), length)]
            self._hashes = dict(zip(entries, hashes, strict=True))

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        encoded = self.metadata.encoded
        parts = {f"{key}#{number}" for key, (*_, count) in encoded.items() for number in range(count)}
        return frozenset(self._hashes.keys() - parts | encoded.keys())

    def read(self, key: str) -> Tensor:
        """Return the tensor as it was saved, or what its codec makes of it; on the CPU, and finite."""
        encoded = self.metadata.encoded.get(key)
        with _damage():
            if encoded is None:
                value = self._read_entry(key)
            else:
                shape, dtype, count = encoded
                parts = tuple(self._read_entry(f"{key}#{number}") for number in range(count))
                spec = TensorSpec(tuple(shape), getattr(torch, dtype))
                value = self._codec.decode(parts, spec, Context())
            if value.is_floating_point() and not is_finite(value if value.itemsize > 1 else value.float()):
                raise ValueError(f"entry {key} is not finite")
        return value

    def _read_entry(self, name: str) -> Tensor:
        value = self._file.get_tensor(name).clone()  # the library maps the file: it may be written to
        if _hash_of_entry(name, value) != self._hashes[name]:
            raise ValueError(f"entry {name} is not what was written")
        return value

    def memories(self, side: str) -> dict[int, dict[str, Tensor]]:
        """Return all tensors of `side`, by tensor position and key in memory."""
        found: dict[int, dict[str, Tensor]] = {}
        for name in sorted(name for name in self.keys if name.startswith(f"{side}/")):
            with _damage():
                position, key = name.removeprefix(f"{side}/").split("/", 1)
                memory = found.setdefault(int(position), {})
            memory[key] = self.read(name)
        return found

    @functools.cached_property
    def _codec(self) -> Codec:
        return CODECS.build(self.metadata.codec, str(self.path))


@contextmanager
def _damage() -> Iterator[None]:
    """Turn every exception while a file is read into `DamagedFile`.

    A rank that raised anything else would leave the others waiting for its verdict.
    """
    try:
        yield
    except DamagedFile:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise DamagedFile(f"{type(error).__name__}: {reason}") from error


def _hash_of_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).hexdigest()


def _hash_of_entry(name: str, value: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    absorb(digest.update, name, value)
    return digest.hexdigest()


def _may_lose(key: str, spec: TensorSpec) -> bool:
    """Return whether an entry is a residual or a buffer of a feedback, whose errors training makes up for."""
    is_kept = not {"sender", "mirror"}.isdisjoint(key.split("/")) and not key.endswith(".scales")
    return is_kept and spec.dtype in INEXACT and spec.numel >= SMALLEST


def save_readable(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Save a safetensors file that those may read who may read other new files, not its owner alone."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(mode)


def write(path: Path, tensors: Mapping[str, Tensor], codec: Codec, **metadata: Any) -> None:
    """Write a file, complete or not at all.

    Args:
        tensors: by key; a key is LAYER/SIDE/POSITION/KEY IN MEMORY.
        codec: encodes what feedbacks keep, not weights, bases and the like. Both sides of a boundary have
            equal mirrored state, so its codes are equal, too.
        metadata: fields of `Metadata`, except those that follow from the file.
    """
    entries, encoded = dict[str, Tensor](), {}
    for key, value in tensors.items():
        value = value.cpu().contiguous()
        spec = TensorSpec.of(value)
        if codec.name == "none" or not _may_lose(key, spec) or codec.refuses(spec):
            entries[key] = value
            continue
        parts = codec.encode(value, Context())
        encoded[key] = [*spec.shape], str(spec.dtype).removeprefix("torch."), len(parts)
        entries |= {f"{key}#{number}": part.contiguous().clone() for number, part in enumerate(parts)}
    names = sorted(entries)
    complete = Metadata(
        **metadata,
        codec=codec.settings if encoded else {},
        encoded=encoded,
        name=path.name,
        names=_hash_of_text(json.dumps(names)),
        hashes="".join(_hash_of_entry(name, entries[name]) for name in names),
    )
    newer = {"codec": encoded, "encoded": encoded, "dependence": complete.dependence}
    unused = {name for name, value in newer.items() if not value}  # releases before them read the file
    text = json.dumps(complete.model_dump(mode="json", by_alias=True, exclude=unused))
    part = path.with_suffix(".part")
    try:
        save_readable(entries, part, {"state": text, "hash": _hash_of_text(text)})
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
