"""What a choice is made from, and what of it options say."""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from ds_compress.errors import CompressionError
from ds_compress.planning.choice import STOCK, Candidate
from ds_compress.planning.depth import Room
from ds_compress.planning.step_time import Traffic, Workload


class Grounds(NamedTuple):
    workload: Workload
    candidates: list[Candidate]
    """DeepSpeed's own first."""
    message: str
    """What crosses a boundary, in words."""
    measured: dict[str, Any] | None = None
    """On a model, as `--json` shows it."""


def stock(forward: Sequence[int], backward: Sequence[int]) -> Candidate:
    """DeepSpeed's own; bytes of a message by boundary."""
    ahead, back = (tuple(map(Traffic, sizes)) for sizes in (forward, backward))
    return Candidate(STOCK, {"enabled": False}, ahead, back, eager=False)


def rooms(
    args: argparse.Namespace, held: Sequence[float], memory_gb: float | None = None
) -> tuple[Room, ...]:
    """Of all stages.

    Args:
        held: bytes by stage, where no option says it.
        memory_gb: what the block of a recipe allows.
    """
    limits = [gigabytes * 1e9 for gigabytes in (args.memory_gb, memory_gb) if gigabytes is not None]
    limit = min(limits, default=float("inf"))
    if args.held_mb is not None:
        held = [args.held_mb * 1e6] * args.stages
    return tuple(Room(own, limit=limit) for own in held)


def given_workload(args: argparse.Namespace) -> Workload | None:
    """None where no option says how long passes take.

    Raises:
        CompressionError: not a number for every stage, or backward passes alone.
    """
    if args.forward_ms is None:
        if args.backward_ms is not None:
            raise CompressionError("--backward-ms: came without --forward-ms; give both, or none of them")
        return None
    forward = _per_stage("--forward-ms", args.forward_ms, args.stages)
    backward = args.backward_ms or [2 * ms for ms in args.forward_ms]
    return Workload(
        forward,
        _per_stage("--backward-ms", backward, args.stages),
        args.micro_batches,
        args.step_ms / 1e3,
    )


def _per_stage(option: str, milliseconds: list[float], stages: int) -> tuple[float, ...]:
    if len(milliseconds) not in (1, stages):
        raise CompressionError(
            f"{option}: {len(milliseconds)} numbers for {stages} stages; give 1 or {stages}"
        )
    return tuple(ms / 1e3 for ms in milliseconds * (stages // len(milliseconds)))
