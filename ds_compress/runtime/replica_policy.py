"""Run the policy of gradients between replicas, in an engine or in `simulate`.

The owner of a slice adds up its averages. In steps where the policy decides, one collective gathers the
norms of these sums, and every rank decides for all stages. So all replicas of a stage change together.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_compress.config import Config
from ds_compress.config.policies import ChannelKey, Signal
from ds_compress.config.policies.base import format_rung
from ds_compress.replicas.exchange import Exchange
from ds_compress.runtime.policy import Decisions, Gather

DIRECTION = "backward"


class ReplicaPolicy:
    """Chooses the codec of gradients between the replicas of each stage, alike on all ranks."""

    def __init__(
        self,
        config: Config,
        exchanges: Sequence[Exchange],
        stages: int,
        device: torch.device | str,
        all_gather: Gather,
    ):
        """
        Args:
            config: with a ladder between replicas.
            exchanges: those of this process.
        """
        assert config.block.replicas is not None
        self._ladder = config.replica_ladder
        self._warmup_steps = config.block.replicas.warmup_steps
        self._exchanges = exchanges
        self._stages = stages
        self._device = device
        self._all_gather = all_gather
        keys: list[ChannelKey] = [(stage, DIRECTION) for stage in range(stages)]
        self._decisions = Decisions(config.replica_policy, dict.fromkeys(keys, len(self._ladder)))
        self._settings = json.loads(json.dumps(config.replica_policy.settings))
        for exchange in exchanges:
            exchange.adds_up = config.replica_policy.norms

    def start(self, steps: int) -> None:
        """Begin with the first rung, or with that of the step; called on every rank. Args: see `end_step`."""
        self._decisions.start()
        if not self._decisions.policy.measures:
            self._decisions.decide(steps - self._warmup_steps)
        self._use()

    def end_step(self, steps: int, lr: Sequence[float]) -> str:
        """Decide after a training step; called on every rank.

        Args:
            steps: optimizer steps so far.
            lr: learning rates of the optimizer.

        Returns:
            A line about what has changed, empty if nothing has.
        """
        policy, step = self._decisions.policy, steps - self._warmup_steps
        if not policy.due(step):
            return ""
        largest, signals = self._gather(max(lr, default=0.0)) if policy.measures else (0.0, None)
        if not self._decisions.decide(step, largest, signals):
            return ""
        self._use()
        rungs = policy.options.rungs(DIRECTION)
        at = (
            f"stage {n} {format_rung(rungs[rung])}" for (n, _), rung in sorted(self._decisions.rungs.items())
        )
        return (
            f"ds_compress: policy {policy.name}: from step {steps + 1} on: "
            f"gradients between replicas: {'; '.join(at)}"
        )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON types, the same on every rank."""
        return {"policy": self._settings, **self._decisions.state()}

    def resume(self, state: Mapping[str, Any], steps: int) -> None:
        """Continue from `state` of a checkpoint, or start anew if it is of another policy.

        Raises:
            CompressionError: the state does not fit the policy or the pipeline.
        """
        if state.get("policy") != self._settings:
            self.start(steps)
            return
        self._decisions.resume(state)
        self._use()

    def _use(self) -> None:
        for exchange in self._exchanges:
            exchange.use(self._ladder[self._decisions.rungs.get((exchange.replicas.stage, DIRECTION), 0)])

    def _gather(self, lr: float) -> tuple[float, dict[ChannelKey, Signal]]:
        """Return rank 0's `lr`, and the norm of each stage's averages, added up since the last time."""
        squares = [0.0] * self._stages
        for exchange in self._exchanges:
            squares[exchange.replicas.stage] += exchange.take_square()
        own = torch.tensor([lr, *squares], dtype=torch.float64, device=self._device)
        everywhere = [each.tolist() for each in self._all_gather(own)]
        _, *columns = zip(*everywhere)
        norms = (math.sqrt(sum(column)) for column in columns)
        return everywhere[0][0], {(n, DIRECTION): Signal(norm) for n, norm in enumerate(norms)}
