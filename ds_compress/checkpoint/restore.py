"""Find the state of boundaries in a checkpoint: each rank searches, all decide alike.

A rank searches for a side in the files of every stage of its replica. No search raises: a problem is a
status, which all ranks learn of, so both sides start from zero if one has to.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_compress.checkpoint.file import DamagedFile, Metadata, StateFile
from ds_compress.codecs.mixins import Stateful, layers
from ds_compress.errors import shown_numbers
from ds_compress.feedback.digest import mirror_digest
from ds_compress.message.channel import Boundary

SIDES = ("upstream", "downstream")
MOST_SIDES = 4  # of a rank: DualPipeV gives it two stages
RESTORED, ABSENT, CHANGED, UNREADABLE, UNFIT, DIFFERENT, SHARED = range(7)
REASONS = {
    ABSENT: "the checkpoint has none for both sides",
    CHANGED: "its settings have changed",
    UNREADABLE: "its file is damaged or cannot be read",
    UNFIT: "its entries do not fit its settings",
    DIFFERENT: "the two sides do not have the same",
    SHARED: "a stage has no layers, so two boundaries are at one",
}
OF_GRADIENTS = REASONS | {
    ABSENT: "the checkpoint has none",
    CHANGED: "the codec, the number of replicas or the stages differ from the saved run",
}
"""Reasons why residuals of exchanged gradients are not restored."""

log = logging.getLogger("ds_compress")


@dataclass(frozen=True)
class Rank:
    """Coordinates of a rank in the job."""

    stage: int
    replica: int
    tensor_parallel: int

    def path(self, folder: Path) -> Path:
        return folder / f"ds_compress_pp{self.stage:02d}_{self._shard}"

    def shards(self, folder: Path) -> list[Path]:
        """Return the files of all stages for this rank's replica."""
        return sorted(folder.glob(f"ds_compress_pp*_{self._shard}"))

    @property
    def _shard(self) -> str:
        return f"dp{self.replica:02d}_tp{self.tensor_parallel:02d}.safetensors"


@dataclass(frozen=True)
class Side:
    """One side of a boundary; `layer`: index of the first layer behind it."""

    boundary: Boundary
    layer: int
    name: str

    @property
    def key(self) -> str:
        return f"{self.layer}/{self.name}"

    @property
    def has_state(self) -> bool:
        """Return whether a codec here has entries in checkpoints."""
        codecs = [channel.codec for channel in self.boundary.channels]
        return any(any(layers(codec, Stateful)) for codec in codecs)  # type: ignore[type-abstract]

    @property
    def settings(self) -> dict[str, Any]:
        return self.boundary.config.in_force.codecs(self.boundary.number).settings


class Found(NamedTuple):
    """The result of a search: a status, and the memory by tensor position, on the CPU."""

    status: int
    memories: dict[int, dict[str, Tensor]] = {}


def gradients_key(kind: str) -> str:
    """Return what keys of residuals of exchanged gradients begin with; `kind`: as in `metrics.GRADIENTS`."""
    return f"{kind}/gradients"


def load_side(root: Path, tag: str, rank: Rank, side: Side, step: int, is_shared: bool = False) -> Found:
    """Search the files of checkpoint `tag` for `side`; without state there is nothing to restore.

    Args:
        is_shared: whether another boundary is at the same layer, so that files cannot tell them apart.
    """
    if not side.has_state:
        return Found(RESTORED)
    if is_shared:
        return Found(SHARED)
    return _search(rank.shards(Path(root, tag)), side.key, side.settings, step, side.boundary.check)


def load_gradients(root: Path, tag: str, rank: Rank, traffic: Any, step: int) -> Found:
    """Search the file of `rank` in checkpoint `tag` for the residuals of exchanged gradients, by slice.

    Args:
        traffic: one of those of a session.
    """

    def check(memories: dict[int, dict[str, Tensor]]) -> None:
        for memory in memories.values():
            for layer in layers(traffic.codec.codec, Stateful):  # type: ignore[type-abstract]
                layer.check_memory(memory)

    path = rank.path(Path(root, tag))
    own = [path] if os.path.exists(path) else []  # a new replica has none, nor a run without ds_compress
    return _search(own, gradients_key(traffic.kind), traffic.settings, step, check)


def _search(
    paths: Iterable[Path], key: str, settings: dict[str, Any], step: int, check: Callable[[Any], None]
) -> Found:
    """Search files for the state of `key`; log why one that it needs cannot be read.

    Args:
        settings: with which the state can be used.
        check: refuses a state that cannot be of these settings.
    """
    result, why = Found(ABSENT), ""
    for path in paths:
        try:
            file = StateFile(path)
            metadata = file.metadata
            # saved under this tag by an earlier run with more stages: not part of this checkpoint
            if metadata.step != step or key not in metadata.settings:
                continue
            if metadata.settings[key] != json.loads(json.dumps(settings)):
                return Found(CHANGED)
            memories = file.memories(key)
            check(memories)
            return Found(RESTORED, memories)
        except DamagedFile as error:  # the state may still be in another one
            result, why = Found(UNREADABLE), f"{path} cannot be read: {error}"
        except Exception as error:  # of a codec that looks at its entries
            result, why = Found(UNFIT), f"{path} does not fit: {error}"
    if why:
        log.warning(why)
    return result


def saved_state(root: Path, tag: str, rank: Rank, step: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the `state` and `own_state` of a session at checkpoint `tag`, empty if they are unknown.

    A rank without a file, as in a new replica, reads the state in the files of others. So does one whose file
    was saved under this tag by an earlier run with more replicas.
    """
    own = rank.path(Path(root, tag))
    others = sorted(Path(root, tag).glob("ds_compress_pp*.safetensors"))
    for path, metadata in _saved_at(step, dict.fromkeys([own, *others])):
        state = metadata.state.model_dump(mode="json") if metadata.state else {}
        measured = {boundary: list(pair) for boundary, pair in metadata.own_state.items()}
        return state, measured if path == own else {}
    return {}, {}


def saved_dependence(root: Path, tag: str, rank: Rank, step: int) -> dict[str, tuple[bool, ...]]:
    """Return `Boundary.dependence` at checkpoint `tag` by the keys of sides, as far as it is known."""
    found: dict[str, tuple[bool, ...]] = {}
    for _, metadata in _saved_at(step, rank.shards(Path(root, tag))):
        # of two files the first counts, as for states
        found = {key: tuple(depends) for key, depends in metadata.dependence.items()} | found
    return found


def _saved_at(step: int, paths: Iterable[Path]) -> Iterator[tuple[Path, Metadata]]:
    """Yield those of the files that were saved at `step`, with their metadata."""
    for path in paths:
        try:
            metadata = StateFile(path).metadata
        except DamagedFile:  # `load` logs why
            continue
        if metadata.step == step:
            yield path, metadata


class Verdict:
    """What all ranks found: a status for each layer and replica, known to all.

    It is one for all tensor-parallel ranks: they send the same bytes, so they have to remember the same. From
    int64 rows of (layer, replica, tensor-parallel rank, side, status, hash).
    """

    WIDTH = 6

    def __init__(self, rows: Iterable[list[int]]):
        places: dict[tuple[int, int], list[list[int]]] = {}
        for row in rows:
            if row[0] >= 0:
                places.setdefault((row[0], row[1]), []).append(row)
        self.status = {place: self._joint(found) for place, found in places.items()}

    @staticmethod
    def row(place: tuple[int, int, int], side: Side, found: Found) -> Tensor:
        fields = [*place, SIDES.index(side.name), found.status, mirror_digest(found.memories)]
        return torch.tensor(fields, dtype=torch.int64, device="cpu")

    @staticmethod
    def _joint(found: list[list[int]]) -> int:
        worst = max(row[4] for row in found)
        hashes: dict[int, set[int]] = {}  # of both sides, by tensor-parallel rank
        for row in found:
            hashes.setdefault(row[2], set()).add(row[5])
        same = all(len(both) == 1 for both in hashes.values())
        return worst if worst != RESTORED or same else DIFFERENT

    def report(self, folder: Path) -> str:
        """Return what starts from zero and why, an empty string for nothing."""
        reasons: dict[int, dict[int, set[int]]] = {}
        for place, status in sorted(self.status.items()):
            if status != RESTORED:
                layer, replica = place
                reasons.setdefault(status, {}).setdefault(layer, set()).add(replica)
        sentences = []
        for status, found in sorted(reasons.items()):
            alike: dict[tuple[int, ...], list[int]] = {}  # numbers of layers, by replicas
            for layer, own in found.items():
                alike.setdefault(tuple(sorted(own)), []).append(layer)
            places = "; ".join(
                f"layer {shown_numbers(cut)}, replica {shown_numbers(own)}" for own, cut in alike.items()
            )
            sentences.append(f"{REASONS[status]} ({places})")
        if not sentences:
            return ""
        return f"ds_compress: {folder}: state of channels starts from zero: {', '.join(sentences)}"
