"""Compare the mirrored state of both sides of each boundary by hash (EF21, AQ-SGD).

Each side computes this state itself, from the same packets. A flipped bit in memory, or a processor that
rounds differently, would make the two differ from then on without any other sign.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ds_compress.checkpoint.restore import MOST_SIDES, Side
from ds_compress.config import DIRECTIONS
from ds_compress.feedback.digest import window_digest
from ds_compress.message.part import RuntimePart, StageView, Step
from ds_compress.transport.collectives import all_gather

log = logging.getLogger("ds_compress")


class ReplicaCheck(RuntimePart):
    """Compares hashes every `state_check_every` steps; clears on both sides what differs."""

    def __init__(self, stage: StageView, sides: Sequence[Side], grid: Any, device: torch.device):
        """Compare the `sides` of this rank; `grid`: that of DeepSpeed's engine."""
        self._stage = stage
        self._sides = sides
        self._device = device
        self._group = grid.get_model_parallel_group()  # all stages and tensor-parallel ranks of a replica
        self._replica = grid.get_data_parallel_id()
        self._tensor_parallel = grid.get_slice_parallel_rank()
        self.follow()

    def follow(self) -> None:
        """Use the present codecs of the config."""
        config = self._stage.config
        is_mirrored = config.in_force.has_mirrored_state
        self.every = config.block.state_check_every if is_mirrored else 0  # steps; 0: never

    def end_step(self, step: Step) -> None:
        """Compare both sides, if it is due."""
        if self.every and step.number % self.every == 0:
            self._compare(step.number)

    def _compare(self, step: int) -> None:
        rows = torch.full((MOST_SIDES * len(DIRECTIONS), 4), -1, dtype=torch.int64, device="cpu")
        places = [(side, number) for side in self._sides for number in range(len(DIRECTIONS))]
        for row, (side, number) in zip(rows, places):
            window = side.boundary.memory, DIRECTIONS[number], step // self.every
            digest = self._stage.on_codec_stream(side.boundary, window_digest, *window)
            numbers = [side.boundary.number, number, self._tensor_parallel, digest]
            row.copy_(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        everywhere = all_gather(rows.to(self._device), self._group)
        apart = find_mismatches(row for each in everywhere for row in each.tolist())
        for side, number in places:
            if (side.boundary.number, number) in apart:
                self._start_anew(side, DIRECTIONS[number], step)

    def _start_anew(self, side: Side, direction: str, step: int) -> None:
        self._stage.on_codec_stream(side.boundary, side.boundary.forget_mirrored, direction)
        if side.name == "upstream" and self._tensor_parallel == 0:
            log.warning(
                f"boundary {side.boundary.number}, {direction}: both sides no longer hold the same after "
                f"step {step}, so both start from zero [replica {self._replica}]; they compute differently, "
                "or memory fails"
            )


def find_mismatches(rows: Iterable[list[int]]) -> set[tuple[int, int]]:
    """Return (boundary, number of the direction) where two sides have other hashes, from all ranks' rows of
    (boundary, direction, tensor-parallel rank, hash).

    One tensor-parallel rank is enough: all send the same bytes, so all have to forget.
    """
    found: dict[tuple[int, int, int], set[int]] = {}
    for boundary, direction, rank, digest in rows:
        found.setdefault((boundary, direction, rank), set()).add(digest)
    return {place[:2] for place, digests in found.items() if place[0] >= 0 and len(digests) > 1}
