"""Save and load the state of compression beside DeepSpeed's checkpoints.

Each rank writes one safetensors file into the folder of the tag:

    ds_compress_pp01_dp00_tp00.safetensors            stage 1, data-parallel rank 0, tensor-parallel rank 0
      4/downstream/0/backward/sender/ef               layer 4 begins here; float tensor 0; key in memory
      8/upstream/0/forward/mirror/ef21                layer 8 begins on the next stage
      metadata: see `file.Metadata`

The first layer behind a boundary identifies it, so its state is found even if the stages have changed. Both
sides restore their state if both find it in files of the loaded step with equal settings, and if their
mirrored state is equal, compared by hash. Otherwise both start from zero, and rank 0 logs which and why.
The boundaries before and after a stage without layers have the same first layer behind them, so they start
from zero, too.
Which tensors are sent uncompressed, because they depend on no parameter or hold a mask ("dependence"), stays
as it was found in the saved run, if every rank finds that.
Replica r reads what replica r wrote. With `load_module_only` all state begins anew.

Settings that changed during training, and the state of each part of the runtime, are restored if all ranks
find the same, and if the block and the boundaries are those of the saved run.

Residuals of gradients that ranks exchange have entries `replicas/gradients/NUMBER OF THE SLICE/...`, those of
tied weights `tied/gradients/...`. They are restored if every rank finds its own, with equal settings.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed import comm as dist
from torch import Tensor

from ds_compress.checkpoint.file import write
from ds_compress.checkpoint.restore import (
    ABSENT,
    MOST_SIDES,
    OF_GRADIENTS,
    RESTORED,
    Found,
    Rank,
    Verdict,
    gradients_key,
    load_gradients,
    load_side,
    saved_dependence,
    saved_state,
)
from ds_compress.config import Config
from ds_compress.errors import CompressionError, in_one_line
from ds_compress.message.part import Engine, StageView
from ds_compress.monitor.metrics import GRADIENTS
from ds_compress.transport.collectives import all_gather, lowest
from ds_compress.version import __version__

log = logging.getLogger("ds_compress")


class SavedSession(Protocol):
    """What checkpoints hold of a session (engine/session.py), and load into it."""

    @property
    def engine(self) -> Engine:
        """Return DeepSpeed's engine."""

    @property
    def config(self) -> Config:
        """Return what is in force."""

    @property
    def stage(self) -> StageView:
        """Return the traffic of the stage."""

    @property
    def path(self) -> Any:
        """Return what has the `Side`s of this rank, as `sides()`."""

    @property
    def traffic(self) -> Mapping[str, Any]:
        """Return what exchanges gradients, by kind."""

    def state(self) -> dict[str, Any]:
        """Return the changed settings and the state of the parts, the same on every rank."""

    def own_state(self) -> dict[str, list[float]]:
        """Return what this rank alone has measured."""

    def resume(self, state: Mapping[str, Any], own: Mapping[str, list[float]]) -> bool:
        """Go on from what both returned; return whether they were of the same block and boundaries."""


def entries_of(memories: Mapping[str, Mapping[int, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Return the tensors of `memories`, {side: {position: {key: tensor}}}, by SIDE/POSITION/KEY."""
    return {
        f"{key}/{number}/{name}": value
        for key, found in memories.items()
        for number, memory in found.items()
        for name, value in memory.items()
    }


def _rank_in_job(engine: Engine) -> Rank:
    """Return the stage, replica and tensor-parallel index of this rank."""
    grid = engine.grid
    return Rank(engine.stage_id, grid.get_data_parallel_id(), grid.get_slice_parallel_rank())


def _first_with(device: torch.device, failure: bool) -> int | None:
    """Return the first rank that has a failure, None if there is none; every rank calls it."""
    (rank,) = lowest(device, dist.get_rank() if failure else dist.get_world_size())
    return rank if rank < dist.get_world_size() else None


def save(session: SavedSession, root: Path, tag: str) -> None:
    """Write this rank's state beside DeepSpeed's checkpoint `tag` below `root`; every rank calls it.

    Raises:
        CompressionError: on every rank, if any rank could not write its file.
    """
    engine = session.engine
    sides, path = session.path.sides(), _rank_in_job(engine).path(Path(root, tag))
    memories = {side.key: side.boundary.memory for side in sides}
    settings = {side.key: side.settings for side in sides}
    failure = ""
    try:
        for kind, traffic in session.traffic.items():
            key = gradients_key(kind)
            memories[key], settings[key] = traffic.saved(), traffic.settings
        write(
            path,
            entries_of(memories),
            session.config.checkpoint_codec,
            version=__version__,
            step=engine.global_steps,
            settings=settings,
            course=session.state(),
            noted=session.own_state(),
            dependence={side.key: list(known) for side in sides if (known := side.boundary.known_dependence)},
        )
    except Exception as error:  # of the disk, or of the codec
        failure = f"{path} cannot be written: {error}"
    # else the others would wait for this rank in DeepSpeed's next barrier; DeepSpeed has not written
    # "latest" yet, so that file still names the previous checkpoint
    first = _first_with(engine.device, bool(failure))
    if first is not None:
        failure = failure or f"rank {first} could not write its part"
        raise CompressionError(f"ds_compress: checkpoint {tag} is not complete: {failure}")


def _load_gradients(
    session: SavedSession, kind: str, root: Path, tag: str, rank: Rank, restore: bool
) -> None:
    """Restore the residuals of gradients that are exchanged if every rank that has some finds its own, else
    none."""
    engine, traffic, found = session.engine, session.traffic.get(kind), Found(ABSENT)
    if traffic is not None and restore:
        found = load_gradients(root, tag, rank, traffic, engine.global_steps)
    missing = _first_with(engine.device, traffic is not None and found.status != RESTORED)
    if traffic is None:
        return
    traffic.load(found.memories if missing is None else {})
    if restore and missing == dist.get_rank():
        log.warning(f"ds_compress: {Path(root, tag)}: {traffic.restarts}: {OF_GRADIENTS[found.status]}")


def _load_dependence(session: SavedSession, root: Path, tag: str, rank: Rank, restore: bool) -> None:
    """Restore which tensors are sent uncompressed if every rank finds it for its sides, else none: ranks that
    send the same tensor have to send the same bytes."""
    engine, sides = session.engine, session.path.sides()
    known = saved_dependence(root, tag, rank, engine.global_steps) if restore else {}
    missing = _first_with(engine.device, any(side.key not in known for side in sides))
    for side in sides:
        side.boundary.keep_dependence(known[side.key] if missing is None else None)


def _load_state(session: SavedSession, root: Path, tag: str, rank: Rank) -> None:
    """Restore the settings that had changed during training, and the state of all parts, if all ranks find
    the same."""
    engine = session.engine
    state, own = saved_state(root, tag, rank, engine.global_steps)
    text = json.dumps(state, sort_keys=True).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
    had_changes = bool(state.get("adopted"))
    least, minus_most, minus_had_changes = lowest(engine.device, number, -number, -had_changes)
    alike = least == -minus_most
    resumed, failure = False, ""
    try:
        resumed = session.resume(state if alike else {}, own)
    except Exception as error:  # equal on all ranks, but not valid: all ranks start again from the block
        failure = in_one_line(error)
    failed = _first_with(engine.device, bool(failure))
    if failed is not None:
        session.resume({}, {})
    elif not resumed and minus_had_changes:
        failed = 0
        failure = "the block or the number of stages differs from the saved run, or a file cannot be read"
    if failed == dist.get_rank():
        log.warning(
            f"ds_compress: {Path(root, tag)}: settings that changed during training start again from the "
            f"block: {failure}"
        )


def load(session: SavedSession, root: Path, tag: str, restore: bool) -> None:
    """Load this rank's state from beside DeepSpeed's checkpoint `tag` below `root`; every rank calls it.

    Args:
        restore: False if only the weights were loaded; settings then start again from the block, and all
            state from zero.
    """
    engine = session.engine
    rank, sides = _rank_in_job(engine), session.path.sides()
    if restore:
        _load_state(session, root, tag, rank)
    else:
        session.resume({}, {})
    layers = [side.layer for side in sides]  # a stage without layers has the same before and after it
    found = [
        load_side(root, tag, rank, side, engine.global_steps, layers.count(side.layer) > 1)
        if restore
        else Found(ABSENT)
        for side in sides
    ]
    rows = torch.full((MOST_SIDES, Verdict.WIDTH), -1, dtype=torch.int64, device="cpu")
    for row, side, its in zip(rows, sides, found):
        row.copy_(Verdict.row((side.layer, rank.replica, rank.tensor_parallel), side, its))
    rows = rows.to(engine.device)
    verdict = Verdict(row for each in all_gather(rows) for row in each.tolist())
    for side, its in zip(sides, found):
        restored = verdict.status[side.layer, rank.replica] == RESTORED
        boundary, memories = side.boundary, its.memories if restored else {}
        session.stage.on_codec_stream(boundary, boundary.restore, memories, engine.device)
    _load_dependence(session, root, tag, rank, restore)
    for kind in GRADIENTS:
        _load_gradients(session, kind, root, tag, rank, restore)
    report = verdict.report(Path(root, tag))
    if restore and report and dist.get_rank() == 0:
        log.warning(report)
