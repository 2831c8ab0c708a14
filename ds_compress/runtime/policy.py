"""Run the policy of an engine or of a simulated pipeline.

In steps where the policy may change something, one collective gathers the signals of all ranks, and every
rank decides for all boundaries. Other steps need no collective. New settings hold from the next step on
(engine/reconfigure.py).
"""

import copy
from collections.abc import Mapping
from typing import Any

from ds_compress.codec import Codec
from ds_compress.config import DIRECTIONS, KEY, Config
from ds_compress.config.policies import DecisionInput, Place, ladders
from ds_compress.config.policies.base import format_rung
from ds_compress.config.recipes import with_changes
from ds_compress.errors import CompressionError, shown
from ds_compress.runtime.interface import Change, MessageSource, Trainer
from ds_compress.runtime.signals import Gather, Signals


class PolicyController:
    """Choose the rung of each direction of a boundary by the policy, and resume it from checkpoints."""

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
        if config.changes and not self._ladders:
            raise CompressionError(
                f"{KEY}.policy: no boundary of this pipeline has a codec with the options of its ladder; "
                "give them to forward or backward, or use 'constant'"
            )
        self._ladder_lengths = {place: len(ladder) for place, ladder in self._ladders.items()}
        self._signals = Signals(boundaries, max(self._ladder_lengths.values(), default=0), device, all_gather)
        self.rungs: dict[Place, int] = {}
        self._state: dict[str, Any] = {}  # of the policy

    def start(self, engine: Trainer, source: MessageSource) -> dict[str, Any]:
        """Return the settings of the first step, where no checkpoint is resumed; called on every rank."""
        self.rungs, self._state = {}, {}
        self._signals.resume({})
        if not self._config.changes:
            return {}
        self.rungs = dict.fromkeys(self._ladders, 0)
        if self._policy.norms:
            self._signals.note_norms(source)
        if not self._policy.measures:
            self._decide(engine)
        return self._boundaries(self.rungs)

    def begin_step(self, engine: Trainer, source: MessageSource) -> None:
        """Watch the messages of the training step that begins if the policy decides after it."""
        if not self._policy.errors:
            return
        if self._policy.due(self._compressed(engine) + 1):
            trials = {place: self._trials(place) for place in self._ladders}
            self._signals.try_rungs(source, trials, engine.micro_batches - 1)
        else:  # an interrupted step may have left trials
            self._signals.stop(source)

    def end_step(self, engine: Trainer) -> Change | None:
        """Decide after a training step, with nothing in flight; called on every rank."""
        if not self._policy.due(self._compressed(engine)):
            return None
        changed = self._decide(engine)
        if not changed:
            return None
        line = self._format(engine.global_steps + 1)
        return Change(self._boundaries(changed), lambda differs: print(line, flush=True) if differs else None)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON types, the same on every rank."""
        return {"rungs": [[*place, rung] for place, rung in self.rungs.items()], "state": self._state}

    def own_measurements(self) -> dict[str, list[float]]:
        """Return the signals of this rank for a checkpoint."""
        return self._signals.state()

    def resume(self, state: Mapping[str, Any], own_measurements: Mapping[str, list[float]]) -> None:
        """Continue from `state` and `own_measurements` of a checkpoint whose settings have been adopted.

        Raises:
            CompressionError: the state does not fit the policy or the pipeline.
        """
        rungs = {(number, direction): rung for number, direction, rung in state["rungs"]}
        ladders = self._ladder_lengths if self._config.changes else {}
        if rungs.keys() != ladders.keys() or not all(0 <= rungs[n] < length for n, length in ladders.items()):
            raise CompressionError(f"policy: rungs {shown(state['rungs'])} do not fit {shown(ladders)}")
        self._policy.check_state(state["state"])
        self._signals.resume(own_measurements)
        self.rungs, self._state = rungs, copy.deepcopy(state["state"])

    def _decide(self, engine: Trainer) -> dict[Place, int]:
        """Return the rungs that change."""
        lr, signals = 0.0, None
        if self._policy.measures:
            largest = max(map(float, engine.get_lr()), default=0.0)
            lr, signals = self._signals.gather(largest, self._ladder_lengths, engine.micro_batches)
        step, samples = self._compressed(engine), engine.global_samples
        now = DecisionInput(step, samples, self.rungs, self._ladder_lengths, lr, signals)
        rungs = self._policy.decide(now, self._state)
        changed = {place: rung for place, rung in rungs.items() if rung != self.rungs.get(place)}
        self.rungs = {**self.rungs, **changed}
        return changed

    def _boundaries(self, rungs: Mapping[Place, int]) -> dict[str, Any]:
        """Return the key `boundaries` of a block with these rungs."""
        found: dict[str, Any] = {}
        for (number, direction), rung in rungs.items():
            codec = self._ladders[number, direction][rung]
            found.setdefault(str(number), {})[direction] = {"codec": codec}
        return found

    def _trials(self, place: Place) -> list[Codec]:
        """Return the codecs of a place by rung; the other direction stays where it is."""
        found = []
        for rung in range(self._ladder_lengths.get(place, 0)):
            boundaries = with_changes(self._config.adopted, self._boundaries({place: rung}))
            codecs = self._config.changed({"boundaries": boundaries}).codecs(place[0])
            found.append(getattr(codecs, place[1]))
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
