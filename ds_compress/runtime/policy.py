"""Run a policy in an engine or in a simulated pipeline.

In steps where the policy may change something, one collective gathers the signals of all ranks, and every
rank decides for all. Other steps need no collective, and nothing waits for a device before a decision is due.
New settings hold from the next step on. Signals are the norms of gradient messages, measured where they are
sent.
"""

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_compress.config import KEY, Config
from ds_compress.config.policies import ChannelKey, DecisionInput, Signal, ladders
from ds_compress.config.policies.base import format_rung
from ds_compress.errors import CompressionError, shown, shown_boundaries
from ds_compress.kernels.numerics import wide
from ds_compress.message.observer import Observer, SeenMessage
from ds_compress.message.part import Change, MessageSource, RuntimePart, Step, Trainer

Gather = Callable[[Tensor], Sequence[Tensor]]
"""Gathers a tensor from all ranks, in their order."""

BACKWARD = "backward"


class GradientNorms(Observer):
    """The norms of the gradient messages that this rank sends, of each boundary, after the warm-up."""

    def __init__(self, config: Config, boundaries: int, device: torch.device | str):
        self._config = config
        self._boundaries = boundaries
        self._device = device
        self._norms: dict[int, Tensor] = {}  # by boundary: sum and number of finite norms

    def observe(self, source: MessageSource) -> None:
        """Measure the messages of `source` from now on."""
        for end in source.ends:
            if end.sends and end.channel.direction == BACKWARD and self not in end.observers:
                end.observers.append(self)

    def before(self, message: SeenMessage) -> None:
        message_id = message.message_id
        if not message_id.training or message_id.step < self._config.warmup_steps:
            return
        floats = [tensor for tensor in message.tensors if tensor.dtype.is_floating_point]
        norms = [torch.linalg.vector_norm(x.detach(), dtype=wide(x.dtype)).float() for x in floats]
        norm = torch.linalg.vector_norm(torch.stack(norms)).double() / message.channel.boundary.loss_scale
        finite = norm.isfinite()
        found = torch.stack([torch.where(finite, norm, 0.0), finite.double()])
        known = self._norms.get(message_id.boundary)
        # in place: this runs on the codec stream, and `resume` has made it on another one
        self._norms[message_id.boundary] = found if known is None else known.add_(found)

    def take(self) -> list[float]:
        """Return two numbers of each boundary, to be added up over all ranks, and measure anew; wait for the
        device."""
        # ranks that do not send at a boundary have zeros
        own, self._norms = self.state(), {}
        return [value for n in range(self._boundaries) for value in own.get(str(n), (0.0, 0.0))]

    def state(self) -> dict[str, list[float]]:
        """Return what was measured since the last `take`, for a checkpoint; wait for the device."""
        return {str(number): noted.tolist() for number, noted in self._norms.items()}

    def resume(self, state: Mapping[str, list[float]]) -> None:
        """Continue with what was measured.

        Raises:
            CompressionError: it does not fit the pipeline.
        """
        if not all(int(number) < self._boundaries for number in state):
            raise CompressionError(f"policy: norms of boundaries {list(state)}, there are {self._boundaries}")
        self._norms = {
            int(number): torch.tensor(noted, dtype=torch.float64, device=self._device)
            for number, noted in state.items()
        }


class PolicyController(RuntimePart):
    """Chooses the rung of each direction of a boundary, alike on all ranks."""

    key = "policy"

    def __init__(self, config: Config, boundaries: int, device: torch.device | str, all_gather: Gather):
        """
        Args:
            boundaries: their number.

        Raises:
            CompressionError: there is a policy, and none of the boundaries has a ladder.
        """
        self.rungs: dict[ChannelKey, int] = {}
        """Current rungs; 0 is the mildest."""

        self._config = config
        self._policy = config.policy
        self._settings = json.loads(json.dumps(config.policy.settings))
        # as the block was written: what is adopted later gives boundaries codecs of their own
        numbers = range(boundaries if config.has_policy else 0)
        found = {number: ladders(config.in_force, config.policy, number) for number in numbers}
        self._ladders = {(n, d): ladder for n, own in found.items() for d, ladder in own.items()}
        if numbers and not self._ladders:
            raise CompressionError(
                f"{KEY}.policy: no boundary of this pipeline has a codec with the options of its ladder; "
                "give them to forward or backward, or use 'constant'"
            )
        self._lengths = {key: len(ladder) for key, ladder in self._ladders.items()}
        self._norms = GradientNorms(config, boundaries, device)
        self._device = device
        self._all_gather = all_gather
        self._state: dict[str, Any] = {}  # of the policy

    def start(self, engine: Trainer, source: MessageSource) -> dict[str, Any]:
        """Begin with the mildest rungs, or with those of the step; return the key `boundaries` of a block
        with them. Every rank calls it."""
        self.rungs, self._state = dict.fromkeys(self._lengths, 0), {}
        self._norms.resume({})
        if self._policy.norms:
            self._norms.observe(source)
        else:
            self._decide(engine)
        return self._codecs(self.rungs)

    def end_step(self, step: Step) -> Change | None:
        return self.decide(step.engine)

    def decide(self, engine: Trainer) -> Change | None:
        """Decide after a training step, with nothing in flight; called on every rank."""
        if not self._policy.due(engine.global_steps - self._config.warmup_steps):
            return None
        changed = self._decide(engine)
        if not changed:
            return None
        alike = dict[tuple[str, int], list[int]]()  # boundaries by direction and rung
        for (number, direction), rung in sorted(self.rungs.items()):
            alike.setdefault((direction, rung), []).append(number)
        places = (
            f"{shown_boundaries(numbers)} {direction} "
            f"{format_rung(self._policy.options.rungs(direction)[rung])}"
            for (direction, rung), numbers in alike.items()
        )
        start = f"ds_compress: policy {self._policy.name}: from step {engine.global_steps + 1} on: "
        line = f"{start}{'; '.join(places)}"
        return Change(self._codecs(changed), lambda: print(line, flush=True))

    def state(self) -> dict[str, Any]:
        rungs = [[*key, rung] for key, rung in self.rungs.items()]
        return {"policy": self._settings, "rungs": rungs, "state": self._state}

    def own_state(self) -> dict[str, list[float]]:
        return self._norms.state()

    def resume(self, step: Step, state: Mapping[str, Any], own: Mapping[str, list[float]]) -> Change | None:
        # up to release 0.3 the policy of boundaries did not say which one it was; its block was the same
        if not state or (state.get("policy") or self._settings) != self._settings:
            return Change(self.start(step.engine, step.stage))
        rungs, lengths = {(n, direction): rung for n, direction, rung in state["rungs"]}, self._lengths
        if rungs.keys() != lengths.keys() or not all(0 <= rungs[n] < length for n, length in lengths.items()):
            raise CompressionError(f"policy: rungs {shown(state['rungs'])} do not fit {shown(lengths)}")
        self._policy.check_state(state["state"])
        self.rungs, self._state = rungs, copy.deepcopy(state["state"])
        self._norms.resume({number: norms for number, norms in own.items() if number.isdecimal()})
        return None

    def _codecs(self, rungs: Mapping[ChannelKey, int]) -> dict[str, Any]:
        """Return the key `boundaries` of a block with the codecs of `rungs`."""
        found: dict[str, Any] = {}
        for (number, direction), rung in rungs.items():
            found.setdefault(str(number), {})[direction] = {"codec": self._ladders[number, direction][rung]}
        return found

    def _decide(self, engine: Trainer) -> dict[ChannelKey, int]:
        """Return the rungs that change."""
        lr, signals = self._gather(engine) if self._policy.norms else (0.0, None)
        steps = engine.global_steps - self._config.warmup_steps
        rungs = self._policy.decide(DecisionInput(steps, self.rungs, self._lengths, lr, signals), self._state)
        changed = {key: rung for key, rung in rungs.items() if rung != self.rungs[key]}
        self.rungs = {**self.rungs, **changed}
        return changed

    def _gather(self, engine: Trainer) -> tuple[float, dict[ChannelKey, Signal]]:
        """Return rank 0's largest learning rate and the signals of all ladders, then measure anew.

        All ranks return the same. Both directions of a boundary have the norm of its gradients.
        """
        lr = max(map(float, engine.get_lr()), default=0.0)
        own = torch.tensor([lr, *self._norms.take()], dtype=torch.float64, device=self._device)
        everywhere = [each.tolist() for each in self._all_gather(own)]
        _, *sums = (math.fsum(column) for column in zip(*everywhere))
        norms = [total / count if count else math.nan for total, count in zip(sums[::2], sums[1::2])]
        return everywhere[0][0], {key: Signal(norms[key[0]]) for key in self._lengths}
