"""Run the policy of an engine or of a simulated pipeline, and measure its signals where messages are sent.

In steps where the policy may change something, one collective gathers the signals of all ranks, and every
rank decides for all boundaries. Other steps need no collective, and nothing waits for a device before a
decision is due. New settings hold from the next step on (`Session.reconfigure`).

Between replicas the owner of a slice adds up its averages, and the norms of these sums are the signals. All
replicas of a stage change their codec together.
"""

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_compress.config import DIRECTIONS, KEY, Config
from ds_compress.config.policies import ChannelKey, DecisionInput, Policy, Signal, ladders
from ds_compress.config.policies.base import format_rung
from ds_compress.errors import CompressionError, shown
from ds_compress.message.observer import Observer, SeenMessage
from ds_compress.message.part import Change, MessageSource, RuntimePart, Step, Trainer
from ds_compress.replicas.exchange import Exchange

Gather = Callable[[Tensor], Sequence[Tensor]]
"""Gathers a tensor from all ranks, in their order."""

BACKWARD = "backward"


class Signals(Observer):
    """The norms of gradient messages on one rank since the last decision."""

    def __init__(self, config: Config, boundaries: int, device: torch.device, all_gather: Gather):
        self._config = config
        self._boundaries = boundaries
        self._device = device
        self._all_gather = all_gather
        self._norms: dict[int, Tensor] = {}  # by boundary: sum and number of finite norms

    def observe(self, source: MessageSource) -> None:
        """Record the norms of gradient messages from now on, in training steps after the warm-up."""
        for end in source.ends:
            if end.sends and end.channel.direction == BACKWARD and self not in end.observers:
                end.observers.append(self)

    def before(self, message: SeenMessage) -> None:
        message_id = message.message_id
        if not message_id.training or message_id.step < self._config.warmup_steps:
            return
        floats = [tensor for tensor in message.tensors if tensor.dtype.is_floating_point]
        norms = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32) for tensor in floats]
        norm = torch.linalg.vector_norm(torch.stack(norms)).double() / message.channel.boundary.loss_scale
        finite = norm.isfinite()
        found = torch.stack([torch.where(finite, norm, 0.0), finite.double()])
        known = self._norms.get(message_id.boundary)
        self._norms[message_id.boundary] = found if known is None else known + found

    def state(self) -> dict[str, list[float]]:
        """Return the norms since the last decision, for a checkpoint; wait for the device."""
        return {str(number): noted.tolist() for number, noted in self._norms.items()}

    def resume(self, state: Mapping[str, list[float]]) -> None:
        """Continue with the norms of a checkpoint.

        Raises:
            CompressionError: one belongs to a boundary that the pipeline does not have.
        """
        if not all(int(number) < self._boundaries for number in state):
            raise CompressionError(f"policy: norms of boundaries {list(state)}, there are {self._boundaries}")
        self._norms = {
            int(number): torch.tensor(noted, dtype=torch.float64, device=self._device)
            for number, noted in state.items()
        }

    def gather(self, lr: float, keys: Iterable[ChannelKey]) -> tuple[float, dict[ChannelKey, Signal]]:
        """Return rank 0's `lr` and the signals of the channels in `keys`, then clear them.

        All ranks return the same. Both directions of a boundary have the norm of its gradients.
        """
        table = torch.zeros((self._boundaries, 2), dtype=torch.float64, device="cpu")
        for number, noted in self._norms.items():
            table[number] = noted.cpu()
        self._norms = {}
        own = torch.cat([torch.tensor([lr], dtype=torch.float64, device="cpu"), table.flatten()])
        everywhere = [each.cpu() for each in self._all_gather(own.to(self._device))]
        rows = [each[1:].view_as(table).tolist() for each in everywhere]
        norms = dict[int, float]()
        for number in range(self._boundaries):  # ranks that do not send there have zeros
            total, count = (math.fsum(row[number][column] for row in rows) for column in (0, 1))
            norms[number] = total / count if count else math.nan
        return everywhere[0][0].item(), {key: Signal(norms[key[0]]) for key in keys}


class Decisions:
    """What a policy has decided for the channels that it has ladders for."""

    def __init__(self, policy: Policy, ladder_lengths: Mapping[ChannelKey, int]):
        self.policy = policy
        self.ladder_lengths = ladder_lengths
        self.rungs: dict[ChannelKey, int] = {}
        self._state: dict[str, Any] = {}  # of the policy

    def start(self) -> None:
        """Begin with the mildest rung everywhere."""
        self.rungs, self._state = dict.fromkeys(self.ladder_lengths, 0), {}

    def decide(
        self, step: int, lr: float = 0.0, signals: Mapping[ChannelKey, Signal] | None = None
    ) -> dict[ChannelKey, int]:
        """Return the rungs that change; see `DecisionInput`."""
        now = DecisionInput(step, self.rungs, self.ladder_lengths, lr, signals)
        rungs = self.policy.decide(now, self._state)
        changed = {key: rung for key, rung in rungs.items() if rung != self.rungs.get(key)}
        self.rungs = {**self.rungs, **changed}
        return changed

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON types."""
        return {"rungs": [[*key, rung] for key, rung in self.rungs.items()], "state": self._state}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from `state` of a checkpoint.

        Raises:
            CompressionError: the state does not fit the policy or the pipeline.
        """
        rungs, ladders = {(n, direction): rung for n, direction, rung in state["rungs"]}, self.ladder_lengths
        if rungs.keys() != ladders.keys() or not all(0 <= rungs[n] < length for n, length in ladders.items()):
            raise CompressionError(f"policy: rungs {shown(state['rungs'])} do not fit {shown(dict(ladders))}")
        self.policy.check_state(state["state"])
        self.rungs, self._state = rungs, copy.deepcopy(state["state"])


class PolicyController(RuntimePart):
    """Choose the rung of each direction of a boundary by the policy, and resume it from checkpoints."""

    key = "policy"

    def __init__(self, config: Config, boundaries: int, device: Any, all_gather: Gather):
        """Find the ladders of `boundaries` boundaries.

        Raises:
            CompressionError: no boundary has a ladder.
        """
        self._config = config
        self._policy = config.policy
        # as the block was written: what is adopted later gives boundaries codecs of their own
        found = {number: ladders(config, number) for number in range(boundaries)}
        self._ladders = {(n, d): ladder for n, own in found.items() for d, ladder in own.items()}
        if config.has_policy and not self._ladders:
            raise CompressionError(
                f"{KEY}.policy: no boundary of this pipeline has a codec with the options of its ladder; "
                "give them to forward or backward, or use 'constant'"
            )
        lengths = {key: len(ladder) for key, ladder in self._ladders.items()}
        self._decisions = Decisions(self._policy, lengths if config.has_policy else {})
        self._signals = Signals(config, boundaries, device, all_gather)

    @property
    def rungs(self) -> dict[ChannelKey, int]:
        """Return the current rungs; 0 is the mildest."""
        return self._decisions.rungs

    def start(self, engine: Trainer, source: MessageSource) -> dict[str, Any]:
        """Return the settings of the first step, where no checkpoint is resumed; called on every rank."""
        self._decisions.start()
        self._signals.resume({})
        if not self._config.has_policy:
            return {}
        if self._policy.norms:
            self._signals.observe(source)
        else:
            self._decide(engine)
        return self._boundaries(self.rungs)

    def end_step(self, step: Step) -> Change | None:
        return self.decide(step.engine)

    def decide(self, engine: Trainer) -> Change | None:
        """Decide after a training step, with nothing in flight; called on every rank."""
        if not self._policy.due(self._compressed(engine)):
            return None
        changed = self._decide(engine)
        if not changed:
            return None
        line = self._format(engine.global_steps + 1)
        return Change(self._boundaries(changed), lambda differs: print(line, flush=True) if differs else None)

    def state(self) -> dict[str, Any]:
        return self._decisions.state()

    def own_state(self) -> dict[str, list[float]]:
        """Return the signals of this rank."""
        return self._signals.state()

    def resume(self, step: Step, state: Mapping[str, Any], own: Mapping[str, list[float]]) -> Change | None:
        if not state:
            return Change(self.start(step.engine, step.stage))
        self._decisions.resume(state)
        self._signals.resume({number: norms for number, norms in own.items() if number.isdecimal()})
        return None

    def _decide(self, engine: Trainer) -> dict[ChannelKey, int]:
        """Return the rungs that change."""
        lr, signals = 0.0, None
        if self._policy.norms:
            largest = max(map(float, engine.get_lr()), default=0.0)
            lr, signals = self._signals.gather(largest, self._ladders)
        return self._decisions.decide(self._compressed(engine), lr, signals)

    def _boundaries(self, rungs: Mapping[ChannelKey, int]) -> dict[str, Any]:
        """Return the key `boundaries` of a block with these rungs."""
        found: dict[str, Any] = {}
        for (number, direction), rung in rungs.items():
            codec = self._ladders[number, direction][rung]
            found.setdefault(str(number), {})[direction] = {"codec": codec}
        return found

    def _format(self, step: int) -> str:
        options = {direction: self._policy.options.rungs(direction) for direction in DIRECTIONS}
        at = [
            f"boundary {n} {d} {format_rung(options[d][rung])}" for (n, d), rung in sorted(self.rungs.items())
        ]
        return f"ds_compress: policy {self._policy.name}: from step {step} on: {'; '.join(at)}"

    def _compressed(self, engine: Trainer) -> int:
        """Return the number of steps since the warm-up."""
        return int(engine.global_steps) - self._config.warmup_steps


class ReplicaPolicy(RuntimePart):
    """Chooses the codec of gradients between the replicas of each stage, alike on all ranks."""

    key = "replica_policy"

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
        keys: list[ChannelKey] = [(stage, BACKWARD) for stage in range(stages)]
        self._decisions = Decisions(config.replica_policy, dict.fromkeys(keys, len(self._ladder)))
        self._settings = json.loads(json.dumps(config.replica_policy.settings))
        for exchange in exchanges:
            exchange.adds_up = config.replica_policy.norms

    def start(self, steps: int) -> None:
        """Begin with the first rung, or with that of the step; called on every rank. Args: see `decide`."""
        self._decisions.start()
        if not self._decisions.policy.norms:
            self._decisions.decide(steps - self._warmup_steps)
        self._use()

    def end_step(self, step: Step) -> Change | None:
        line = self.decide(step.number, [*map(float, step.engine.get_lr())])
        return Change({}, lambda _: print(line, flush=True)) if line else None

    def decide(self, steps: int, lr: Sequence[float]) -> str:
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
        largest, signals = self._gather(max(lr, default=0.0)) if policy.norms else (0.0, None)
        if not self._decisions.decide(step, largest, signals):
            return ""
        self._use()
        rungs = policy.options.rungs(BACKWARD)
        at = (
            f"stage {n} {format_rung(rungs[rung])}" for (n, _), rung in sorted(self._decisions.rungs.items())
        )
        return (
            f"ds_compress: policy {policy.name}: from step {steps + 1} on: "
            f"gradients between replicas: {'; '.join(at)}"
        )

    def state(self) -> dict[str, Any]:
        return {"policy": self._settings, **self._decisions.state()}

    def resume(self, step: Step, state: Mapping[str, Any], own: object) -> None:
        """Continue from `state` of a checkpoint, or start anew if it is of another policy."""
        if state.get("policy") != self._settings:
            self.start(step.number)
            return
        self._decisions.resume(state)
        self._use()

    def _use(self) -> None:
        for exchange in self._exchanges:
            exchange.use(self._ladder[self._decisions.rungs.get((exchange.replicas.stage, BACKWARD), 0)])

    def _gather(self, lr: float) -> tuple[float, dict[ChannelKey, Signal]]:
        """Return rank 0's `lr`, and the norm of each stage's averages, added up since the last time."""
        squares = [0.0] * self._stages
        for exchange in self._exchanges:
            squares[exchange.replicas.stage] += exchange.take_square()
        own = torch.tensor([lr, *squares], dtype=torch.float64, device=self._device)
        everywhere = [each.tolist() for each in self._all_gather(own)]
        _, *columns = zip(*everywhere)
        norms = (math.sqrt(sum(column)) for column in columns)
        return everywhere[0][0], {(n, BACKWARD): Signal(norm) for n, norm in enumerate(norms)}
