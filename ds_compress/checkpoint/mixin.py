"""State of the channels beside DeepSpeed's checkpoint: one safetensors file per rank in the folder of the
tag.

    ds_compress_pp01_dp00_tp00.safetensors            stage 1, data-parallel rank 0, tensor-parallel rank 0
      4/downstream/0/backward/sender/ef               layer 4 begins here; float tensor 0; key in memory
      8/upstream/0/forward/mirror/ef21                layer 8 begins on the next stage
      metadata: release, step, settings of each boundary, and what `state_file` adds

A boundary is known by the first layer behind it, so it is found again where it still exists after a change of
the stages. Its state is restored, on both sides, when both find theirs with equal settings in files of the
loaded step and what both sides share is equal, compared by hash. Otherwise both start from zero, and rank 0
says which and why. Replica r reads what replica r wrote; `load_module_only` restores nothing.

With `"state": "delta"` a file may hold changes to the checkpoint before. The first one of a run is complete,
and so is the next after `FULL_EVERY` of the others, and any one when a rank cannot read what it would build
on.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from safetensors import SafetensorError
from torch import Tensor

from ds_compress.checkpoint.file import DAMAGE, FULL_EVERY, StateFile, pack, write
from ds_compress.errors import CompressionError
from ds_compress.message.channel import Boundary
from ds_compress.version import __version__

SIDES = ("upstream", "downstream")
MOST_SIDES = 4  # of a rank: DualPipeV gives it two stages
TAG_BYTES = 64  # of the longest tag that is named in full to other ranks
RESTORED, ABSENT, CHANGED, UNREADABLE, ORPHANED, DIFFERENT = range(6)
REASONS = {
    ABSENT: "the checkpoint has none for both sides",
    CHANGED: "its settings have changed",
    UNREADABLE: "its file cannot be read",
    ORPHANED: "the checkpoint that it builds on is missing or damaged: ",
    DIFFERENT: "the two sides do not have the same",
}

log = logging.getLogger("ds_compress")


@dataclass(frozen=True)
class Rank:
    """Where a rank stands in the job."""

    stage: int
    replica: int
    tensor_parallel: int

    def path(self, folder: Path) -> Path:
        return folder / f"ds_compress_pp{self.stage:02d}_{self._shard}"

    def shards(self, folder: Path) -> list[Path]:
        """The files of all stages for this rank's replica."""
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
    def settings(self) -> dict[str, Any]:
        return self.boundary.config.codecs(self.boundary.number).settings


@dataclass(frozen=True)
class Chain:
    """Checkpoints of this run, a complete one first and each the base of the next."""

    root: Path | None = None
    tags: tuple[str, ...] = ()

    def before(self, root: Path, tag: str) -> "Chain":
        """What is left to build on when `tag` is written below `root`."""
        if root != self.root or len(self.tags) > FULL_EVERY:
            return Chain(root)
        return Chain(root, self.tags[: self.tags.index(tag)] if tag in self.tags else self.tags)

    def then(self, tag: str) -> "Chain":
        return Chain(self.root, (*self.tags, tag))


class Found(NamedTuple):
    """How the search for a side ended, and its memory by tensor position, on the CPU."""

    status: int
    memories: dict[int, dict[str, Tensor]] = {}
    lost: str = ""  # ORPHANED: tag of the checkpoint that is missing or damaged


def state_of(sides: Iterable[Side]) -> dict[str, Tensor]:
    """All that boundaries remember, by key in a file."""
    return {
        f"{side.key}/{position}/{name}": value
        for side in sides
        for position, memory in side.boundary.memory.items()
        for name, value in memory.items()
    }


def load(root: Path, tag: str, rank: Rank, side: Side, step: int) -> Found:
    """Search the files of checkpoint `tag` for `side`."""
    for path in rank.shards(Path(root, tag)):
        file = StateFile(root, tag, path.name)
        try:
            metadata = file.metadata
            # saved under this tag by an earlier run with more stages: not part of this checkpoint
            if metadata["step"] != step or side.key not in metadata["settings"]:
                continue
            if metadata["settings"][side.key] != json.loads(json.dumps(side.settings)):
                return Found(CHANGED)
            return Found(RESTORED, _read(file, side))
        except DAMAGE as error:
            log.warning("%s cannot be read: %s", Path(root, file.at, path.name), error)
            return Found(UNREADABLE) if file.at == tag else Found(ORPHANED, lost=file.at)
    return Found(ABSENT)


def _read(file: StateFile, side: Side) -> dict[int, dict[str, Tensor]]:
    prefix = f"{side.key}/"
    memories: dict[int, dict[str, Tensor]] = {}
    for name in sorted(name for name in file.keys if name.startswith(prefix)):
        position, key = name.removeprefix(prefix).split("/", 1)
        memories.setdefault(int(position), {})[key] = file.read(name)
    return memories


def mirror_digest(memories: dict[int, dict[str, Tensor]]) -> int:
    """64-bit hash of all that both sides of a boundary should have alike."""
    digest = hashlib.blake2b(digest_size=8)
    for position, memory in sorted(memories.items()):
        for key in sorted(memory):
            if "/mirror/" in key:
                value = memory[key].cpu().contiguous()
                digest.update(f"{position} {key} {tuple(value.shape)} {value.dtype}".encode())
                digest.update(value.view(torch.uint8).numpy() if value.numel() else b"")
    return int.from_bytes(digest.digest(), "little", signed=True)


class Verdict:
    """What all ranks found, known to all.

    int64 rows of (layer, replica, tensor-parallel rank, side, status, hash), then the lost tag, UTF-8 and
    zeros.
    """

    WIDTH = 6 + TAG_BYTES // 8

    def __init__(self, rows: Iterable[list[int]]):
        places: dict[tuple[int, ...], list[list[int]]] = {}
        for row in rows:
            if row[0] >= 0:
                places.setdefault(tuple(row[:3]), []).append(row)
        self.status = {place: self._joint(found) for place, found in places.items()}
        self.lost = {place: max(_tag(row[6:]) for row in found) for place, found in places.items()}

    @staticmethod
    def row(place: tuple[int, int, int], side: Side, found: Found) -> Tensor:
        tag = torch.frombuffer(
            bytearray(found.lost.encode()[:TAG_BYTES].ljust(TAG_BYTES, b"\0")), dtype=torch.int64
        )
        fields = [*place, SIDES.index(side.name), found.status, mirror_digest(found.memories)]
        return torch.cat([torch.tensor(fields, dtype=torch.int64, device="cpu"), tag])

    @staticmethod
    def _joint(found: list[list[int]]) -> int:
        worst = max(row[4] for row in found)
        same = len({row[5] for row in found}) == 1
        return worst if worst != RESTORED or same else DIFFERENT

    def report(self, folder: Path) -> str:
        """What starts from zero and why; an empty string when nothing does."""
        reasons: dict[tuple[int, str], dict[int, set[int]]] = {}
        for place, status in sorted(self.status.items()):
            if status != RESTORED:
                layer, replica, _ = place
                reason = status, self.lost[place] if status == ORPHANED else ""
                reasons.setdefault(reason, {}).setdefault(layer, set()).add(replica)
        sentences = []
        for (status, tag), found in sorted(reasons.items()):
            places = "; ".join(
                f"layer {layer}, replica {_listed(replicas)}" for layer, replicas in found.items()
            )
            sentences.append(f"{REASONS[status]}{tag} ({places})")
        if not sentences:
            return ""
        return f"ds_compress: {folder}: state of channels starts from zero: {', '.join(sentences)}"


def _tag(words: list[int]) -> str:
    return (
        torch.tensor(words, dtype=torch.int64, device="cpu")
        .numpy()
        .tobytes()
        .rstrip(b"\0")
        .decode(errors="replace")
    )


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


class CheckpointedEngine:
    """The part of the engine's mixin that saves and loads along with DeepSpeed."""

    _chain = Chain()

    def _save_checkpoint(self, save_dir, tag, *args, **kwargs):
        super()._save_checkpoint(save_dir, tag, *args, **kwargs)
        self._save_channels(Path(save_dir), str(tag))

    def _save_moe_checkpoint(self, save_dir, tag, *args, **kwargs):
        super()._save_moe_checkpoint(save_dir, tag, *args, **kwargs)
        self._save_channels(Path(save_dir), str(tag))

    def _load_checkpoint(self, load_dir, tag, *args, **kwargs):
        path, client_state = super()._load_checkpoint(load_dir, tag, *args, **kwargs)
        if path is not None:
            self._load_channels(Path(load_dir), str(tag), restore=not kwargs.get("load_module_only"))
        return path, client_state

    def _rank_in_job(self):
        grid = self.grid
        return Rank(self.stage_id, grid.get_data_parallel_id(), grid.get_slice_parallel_rank())

    def _sides(self):
        stage, module = self._compression, self.module
        before = [Side(stage.before, module._local_start, "downstream")] if stage.before else []
        after = [Side(stage.after, module._local_stop, "upstream")] if stage.after else []
        return before + after

    def _save_channels(self, root, tag):
        sides, path = self._sides(), self._rank_in_job().path(Path(root, tag))
        state = self._compression.config.block.checkpoint.state
        packed = self._changes(root, tag, path.name) if state == "delta" else None
        entries, metadata = packed or pack(state_of(sides), eight_bits=state != "exact")
        settings = {side.key: side.settings for side in sides}
        metadata = {"version": __version__, "step": self.global_steps, "settings": settings, **metadata}
        failure = ""
        try:
            write(path, entries, metadata)
        except (OSError, SafetensorError) as error:
            failure = f"{path} cannot be written: {error}"
        self._all_saved(failure, tag)

    def _all_saved(self, failure, tag):
        """Stop every rank when one has a `failure`: the others would wait for it in DeepSpeed's next barrier.

        DeepSpeed has not written "latest" yet, so the checkpoint before this one stays the one to load.
        """
        number = torch.tensor(dist.get_rank() + 1 if failure else 0, dtype=torch.int64, device=self.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        if number:
            failure = failure or f"rank {int(number) - 1} could not write its part"
            raise CompressionError(f"ds_compress: checkpoint {tag} is not complete: {failure}")

    def _changes(self, root, tag, name):
        """The state packed as changes; None when it has to be complete.

        That is for all ranks to agree on: sides that were not packed alike would not be equal when they are
        loaded.
        """
        chain = self._chain.before(root, tag)
        packed = None
        if chain.tags:
            base = StateFile(root, chain.tags[-1], name)
            try:
                packed = pack(state_of(self._sides()), True, base)
            except DAMAGE as error:
                lost = Path(root, base.at, name)
                log.warning(
                    "%s cannot be read; checkpoints since need it, this one is complete: %s", lost, error
                )
            everywhere = torch.tensor(int(packed is not None), dtype=torch.int64, device=self.device)
            dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
            if not everywhere:
                chain, packed = Chain(root), None
        self._chain = chain.then(tag)
        return packed

    def _load_channels(self, root, tag, restore):
        rank, sides = self._rank_in_job(), self._sides()
        found = [
            load(root, tag, rank, side, self.global_steps) if restore else Found(ABSENT) for side in sides
        ]
        rows = torch.full((MOST_SIDES, Verdict.WIDTH), -1, dtype=torch.int64, device="cpu")
        for row, side, its in zip(rows, sides, found):
            row.copy_(Verdict.row((side.layer, rank.replica, rank.tensor_parallel), side, its))
        rows = rows.to(self.device)
        everywhere = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, rows)
        verdict = Verdict(row for each in everywhere for row in each.tolist())
        for side, its in zip(sides, found):
            restored = verdict.status[side.layer, rank.replica, rank.tensor_parallel] == RESTORED
            memories = its.memories if restored else {}
            self._compression.in_lane(
                side.boundary, functools.partial(side.boundary.restore, memories, self.device)
            )
        report = verdict.report(Path(root, tag))
        if restore and report and dist.get_rank() == 0:
            log.warning(report)
