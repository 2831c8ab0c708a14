"""State of the channels beside DeepSpeed's checkpoint: one safetensors file per rank in the folder of the tag.

    ds_compress_pp01_dp00_tp00.safetensors            stage 1, data-parallel rank 0, tensor-parallel rank 0
      4/downstream/0/backward/sender/ef               layer 4 begins here; float tensor 0 of a message; key in memory
      8/upstream/0/forward/mirror/ef21                layer 8 begins on the next stage
      metadata: release, step, settings of each boundary, what was stored in 8 bits

A boundary is known by the first layer behind it, so it is found again where it still exists after a change of the
stages. Its state is restored, on both sides, when both find theirs with equal settings in files of the loaded step and
what both sides share is equal, compared by hash. Otherwise both start from zero, and rank 0 says which and why.
Replica r reads what replica r wrote; `load_module_only` restores nothing.
"""

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ds_compress import __version__
from ds_compress.channel import Boundary
from ds_compress.config import DIRECTIONS
from ds_compress.feedback.state import GROUP, int8_decode, int8_encode

SIDES = ("upstream", "downstream")
MOST_SIDES = 4  # of a rank: DualPipeV gives it two stages
RESTORED, ABSENT, CHANGED, UNREADABLE, DIFFERENT = range(5)
REASONS = {
    ABSENT: "the checkpoint has none for both sides",
    CHANGED: "its settings have changed",
    UNREADABLE: "its file cannot be read",
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


def save(folder: Path, rank: Rank, sides: Iterable[Side], step: int, eight_bits: bool) -> None:
    """Write the state of `sides`, with what feedbacks keep in 8 bits if asked; complete or not at all."""
    tensors: dict[str, Tensor] = {}
    dtypes, settings = {}, {}
    for side in sides:
        settings[side.key] = side.settings
        for position, memory in side.boundary.memory.items():
            for name, value in memory.items():
                key = f"{side.key}/{position}/{name}"
                if eight_bits and _is_large_feedback(name, value):
                    dtypes[key] = str(value.dtype).removeprefix("torch.")
                    tensors[f"{key}#codes"], tensors[f"{key}#scales"] = int8_encode(value.cpu())
                else:
                    tensors[key] = value.cpu().contiguous()
    metadata = {"version": __version__, "step": step, "settings": settings, "eight_bits": dtypes}
    path = rank.path(folder)
    part = path.with_suffix(".part")
    save_file(tensors, part, {key: json.dumps(value) for key, value in metadata.items()})
    part.rename(path)


def load(folder: Path, rank: Rank, side: Side, step: int) -> tuple[int, dict[int, dict[str, Tensor]]]:
    """How the search for `side` ended (`RESTORED`, ...), and its memory by tensor position, on the CPU."""
    for path in rank.shards(folder):
        try:
            with safe_open(path, "pt") as file:
                metadata = {key: json.loads(value) for key, value in file.metadata().items()}
                # saved under this tag by an earlier run with more stages: not part of this checkpoint
                if metadata["step"] != step or side.key not in metadata["settings"]:
                    continue
                if metadata["settings"][side.key] != json.loads(json.dumps(side.settings)):
                    return CHANGED, {}
                return RESTORED, _read(file, side, metadata["eight_bits"])
        except (SafetensorError, OSError, KeyError, ValueError, AttributeError) as error:
            log.warning("%s cannot be read: %s", path, error)
            return UNREADABLE, {}
    return ABSENT, {}


def _is_large_feedback(name: str, value: Tensor) -> bool:
    is_state = name.startswith(tuple(f"{direction}/" for direction in DIRECTIONS)) and not name.endswith(".scales")
    return is_state and value.dtype.is_floating_point and value.numel() >= GROUP


def _read(file: Any, side: Side, eight_bits: dict[str, str]) -> dict[int, dict[str, Tensor]]:
    prefix = f"{side.key}/"
    names = {name.split("#")[0] for name in file.keys() if name.startswith(prefix)}
    memories: dict[int, dict[str, Tensor]] = {}
    for name in sorted(names):
        if name in eight_bits:
            value = int8_decode(file.get_tensor(f"{name}#codes"), file.get_tensor(f"{name}#scales"))
            value = value.to(getattr(torch, eight_bits[name]))
        else:
            value = file.get_tensor(name)
        position, key = name.removeprefix(prefix).split("/", 1)
        memories.setdefault(int(position), {})[key] = value
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
    """What all ranks found, known to all: int64 rows of (layer, replica, tensor-parallel rank, side, status, hash)."""

    WIDTH = 6

    def __init__(self, rows: Iterable[list[int]]):
        places: dict[tuple[int, ...], list[list[int]]] = {}
        for row in rows:
            if row[0] >= 0:
                places.setdefault(tuple(row[:3]), []).append(row)
        self.status = {place: self._joint(found) for place, found in places.items()}

    @staticmethod
    def _joint(found: list[list[int]]) -> int:
        worst = max(row[4] for row in found)
        same = len({row[5] for row in found}) == 1
        return worst if worst != RESTORED or same else DIFFERENT

    def report(self, folder: Path) -> str:
        """What starts from zero and why; an empty string when nothing does."""
        layers: dict[int, dict[int, set[int]]] = {}
        for (layer, replica, _), status in sorted(self.status.items()):
            if status != RESTORED:
                layers.setdefault(status, {}).setdefault(layer, set()).add(replica)
        sentences = []
        for status, found in sorted(layers.items()):
            places = "; ".join(f"layer {layer}, replica {_listed(replicas)}" for layer, replicas in found.items())
            sentences.append(f"{REASONS[status]} ({places})")
        if not sentences:
            return ""
        return f"ds_compress: {folder}: state of channels starts from zero: {', '.join(sentences)}"


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


class CheckpointedEngine:
    """The part of the engine's mixin that saves and loads along with DeepSpeed."""

    def _save_checkpoint(self, save_dir, tag, *args, **kwargs):
        super()._save_checkpoint(save_dir, tag, *args, **kwargs)
        self._save_channels(Path(save_dir, str(tag)))

    def _save_moe_checkpoint(self, save_dir, tag, *args, **kwargs):
        super()._save_moe_checkpoint(save_dir, tag, *args, **kwargs)
        self._save_channels(Path(save_dir, str(tag)))

    def _load_checkpoint(self, load_dir, tag, *args, **kwargs):
        path, client_state = super()._load_checkpoint(load_dir, tag, *args, **kwargs)
        if path is not None:
            self._load_channels(Path(load_dir, str(tag)), restore=not kwargs.get("load_module_only"))
        return path, client_state

    def _rank_in_job(self):
        grid = self.grid
        return Rank(self.stage_id, grid.get_data_parallel_id(), grid.get_slice_parallel_rank())

    def _sides(self):
        stage, module = self._compression, self.module
        before = [Side(stage.before, module._local_start, "downstream")] if stage.before else []
        after = [Side(stage.after, module._local_stop, "upstream")] if stage.after else []
        return before + after

    def _save_channels(self, folder):
        eight_bits = self._compression.config.block.checkpoint.state == "int8"
        save(folder, self._rank_in_job(), self._sides(), self.global_steps, eight_bits)

    def _load_channels(self, folder, restore):
        rank = self._rank_in_job()
        found = [load(folder, rank, side, self.global_steps) if restore else (ABSENT, {}) for side in self._sides()]
        rows = torch.full((MOST_SIDES, Verdict.WIDTH), -1, dtype=torch.int64)
        for row, side, (status, memories) in zip(rows, self._sides(), found):
            place = side.layer, rank.replica, rank.tensor_parallel
            row.copy_(torch.tensor([*place, SIDES.index(side.name), status, mirror_digest(memories)]))
        rows = rows.to(self.device)
        everywhere = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, rows)
        verdict = Verdict(row for each in everywhere for row in each.tolist())
        for side, (_, memories) in zip(self._sides(), found):
            restored = verdict.status[side.layer, rank.replica, rank.tensor_parallel] == RESTORED
            side.boundary.restore(memories if restored else {}, self.device)
        report = verdict.report(folder)
        if restore and report and dist.get_rank() == 0:
            log.warning(report)
