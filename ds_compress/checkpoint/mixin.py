"""State of the channels beside DeepSpeed's checkpoint: a safetensors file per rank in the folder of the tag.

    ds_compress_pp01_dp00_tp00.safetensors            stage 1, data-parallel rank 0, tensor-parallel rank 0
      4/downstream/0/backward/sender/ef               layer 4 begins here; float tensor 0; key in memory
      8/upstream/0/forward/mirror/ef21                layer 8 begins on the next stage
      metadata: see `file.Metadata`

A boundary is known by the first layer behind it, so it is found again where it still exists after a change of
the stages. Its state is restored, on both sides, when both find theirs with equal settings in files of the
loaded step and what both sides share is equal, compared by hash. Otherwise both start from zero, and rank 0
says which and why. Replica r reads what replica r wrote; `load_module_only` restores nothing.

Settings that have changed since training began (`course`) go on as they were, where all ranks find the same
and the block and the boundaries are those of that run.

With depth "auto" training goes on at the depth it had, where all ranks find it and stages and micro-batches
are as many.

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

import torch
from deepspeed import comm as dist
from safetensors import SafetensorError
from torch import Tensor

from ds_compress.checkpoint.file import FULL_EVERY, Damaged, StateFile, pack, write
from ds_compress.checkpoint.search import (
    ABSENT,
    MOST_SIDES,
    RESTORED,
    Found,
    Rank,
    Side,
    Verdict,
    load,
    saved_course,
    saved_depth,
)
from ds_compress.errors import CompressionError
from ds_compress.version import __version__

log = logging.getLogger("ds_compress")


def state_of(sides: Iterable[Side]) -> dict[str, Tensor]:
    """All that boundaries remember, by key in a file."""
    return {
        f"{side.key}/{position}/{name}": value
        for side in sides
        for position, memory in side.boundary.saved().items()
        for name, value in memory.items()
    }


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
        failure = ""
        try:
            write(
                path,
                entries,
                version=__version__,
                step=self.global_steps,
                settings=settings,
                schedule=(self._ahead.now, self.num_stages, self.micro_batches),
                course={**self._adoption.state(), "policy": self._rungs.state()},
                noted=self._rungs.noted(),
                **metadata,
            )
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
            except Damaged as error:
                lost = Path(root, error.tag, name)
                log.warning(
                    "%s cannot be read; checkpoints since need it, this one is complete: %s", lost, error
                )
            everywhere = torch.tensor(int(packed is not None), dtype=torch.int64, device=self.device)
            dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
            if not everywhere:
                chain, packed = Chain(root), None
        self._chain = chain.then(tag)
        return packed

    def _load_depth(self, root, tag, rank, restore):
        """Go on at the depth that was found before, until it is found anew: links or memory may be others
        now."""
        place = self.global_steps, self.num_stages, self.micro_batches
        depth = saved_depth(root, tag, rank, *place) if restore else 0
        ends = torch.tensor([depth, -depth], dtype=torch.int64, device=self.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MIN)
        least, most = ends[0].item(), -ends[1].item()
        self._ahead.set(self._compression, least if least == most and least > 0 else 1)

    def _load_course(self, root, tag, rank):
        """Have the settings that training had come to, where all ranks find the same."""
        course, noted = saved_course(root, tag, rank, self.global_steps)
        digest = hashlib.blake2b(json.dumps(course, sort_keys=True).encode(), digest_size=7).digest()
        number = int.from_bytes(digest, "little")
        had = bool(course.get("adopted"))
        ends = torch.tensor([number, -number, -had], dtype=torch.int64, device=self.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MIN)
        least, most, lost = ends.tolist()
        alike = least == -most
        resumed = self._adoption.resume(self, course if alike else {})
        if resumed:
            self._rungs.resume(course["policy"], noted)
        else:
            self._rungs.start(self)
        if not resumed and lost and dist.get_rank() == 0:
            log.warning(
                "ds_compress: %s: settings that changed during training start again from the block: it, or "
                "the number of stages, is another than that run had, or a file cannot be read",
                Path(root, tag),
            )

    def _load_channels(self, root, tag, restore):
        rank, sides = self._rank_in_job(), self._sides()
        if restore:
            self._load_course(root, tag, rank)
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
            restored = verdict.status[side.layer, rank.replica] == RESTORED
            memories = its.memories if restored else {}
            self._compression.in_lane(
                side.boundary, functools.partial(side.boundary.restore, memories, self.device)
            )
        if self._ahead.auto:
            self._load_depth(root, tag, rank, restore)
        self._ahead.measure_again()
        report = verdict.report(Path(root, tag))
        if restore and report and dist.get_rank() == 0:
            log.warning(report)
