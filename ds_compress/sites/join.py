"""How the ranks of a launch join the other replicas.

    who         does                                                        tells its launch, by key
    every rank  says which part of the model it has                         RANK: shapes, digest of weights
    rank 0      connects to the store, compares settings, and gets a        verdict: address, position, and
                number for the launch                                       membership or what is in the way
    every rank  connects; that of a newcomer takes another one's anchor;
                takes part in the next round

If a rank fails, the caller lets all of them leave.
"""

import functools
import json
import os
from concurrent.futures import Future
from typing import Any

from torch import distributed as dist
from torch.distributed import Store

from ds_compress.config.replicas import STORE, OuterOptions
from ds_compress.errors import CompressionError, in_one_line
from ds_compress.sites.board import Position, digest_of
from ds_compress.sites.outer_step import Anchor
from ds_compress.sites.rounds import patience
from ds_compress.sites.store import CONNECT_S, connect
from ds_compress.sites.worker import Worker


class Join:
    """One attempt of a launch to join the others; the methods are the rows of the table above."""

    def __init__(self, launch: Store, options: OuterOptions, connections: int):
        """
        Args:
            launch: store of this launch alone, without keys.
            connections: of each rank to the store of all, over which chunks cross; one more says what is
                there, if they are several.
        """
        self._launch, self._options, self._connections = launch, options, connections
        self.worker: Worker | None = None  # of this rank, once it is connected

    def say_own(self, shapes: str, anchor: Anchor) -> None:
        own = shapes, digest_of(anchor.values.numpy().data).hex()
        self._launch.set(str(dist.get_rank()), json.dumps(own))

    def ask(self, settings: dict[str, Any], position: Position | None, probe: Future[Any] | None) -> None:
        """Ask the others for a number.

        Args:
            settings: that all replicas must have.
            position: of this launch; None: it has met no other replica.
            probe: has a connection to the store; None: there is none yet.
        """
        address, ranks = os.environ.get(STORE, ""), range(dist.get_world_size())
        shapes, digests = zip(*[json.loads(self._launch.get(str(rank))) for rank in ranks])
        position = position or Position(0, digest_of(repr(digests).encode()).hex())
        launch = {"ranks of a launch": len(shapes), "shapes of the parameters of all ranks": [*shapes]}
        verdict: dict[str, Any] = {"address": address, "own": position}
        try:
            self.worker = self._connect(address, *([probe.result()] if probe else []))
            join = functools.partial(self.worker.rounds.join, {**settings, **launch}, position)
            verdict["membership"] = self.worker.result(join, CONNECT_S)
        except CompressionError as error:
            verdict["refused"] = str(error)
        except (OSError, RuntimeError) as error:
            verdict["lost"] = f"{STORE}={address}: {in_one_line(error)}"
        self._launch.set("verdict", json.dumps(verdict))

    def hear(self) -> dict[str, Any]:
        """Return the verdict: "address"; "own", the position of this launch; "membership", or "refused" or
        "lost": why other replicas do not take this one, or why the store is out of reach."""
        verdict = json.loads(self._launch.get("verdict"))
        return {**verdict, "own": Position(*verdict["own"])}

    def enter(self, verdict: dict[str, Any], own: Anchor) -> tuple[Anchor | None, Position]:
        """Take part.

        Returns:
            The anchor that a newcomer has from another replica, None if it is `own`; the position.

        Raises:
            CompressionError, RuntimeError: the store, or another replica, does not answer.
        """
        number, head, is_newcomer = verdict["membership"]
        anchor, position = None, Position(*head)
        self.worker = self.worker or self._connect(verdict["address"])
        rounds = self.worker.rounds
        rounds.number = number
        if is_newcomer:
            limit = f"at most {patience(self._options):g} s without progress"
            say(f"replica {number} waits for the weights of another, {limit}")
            catch_up = functools.partial(rounds.catch_up, own.values.numel(), verdict["own"].digest)
            anchor, position = self.worker.result(catch_up, patience(self._options))
        self.worker.result(functools.partial(rounds.take_part, anchor or own, position), CONNECT_S)
        return anchor, position

    def _connect(self, address: str, *known: Any) -> Worker:
        """Return a worker with all connections of this rank, of which those in `known` are there."""
        count = 1 + (self._connections if self._connections > 1 else 0)
        more = (connect(address) for _ in range(count - len(known)))
        return Worker(self._launch, self._options, *known, *more)


def say(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(f"ds_compress: {line}", flush=True)
