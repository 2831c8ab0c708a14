"""Run a policy in a simulated pipeline: between two steps it may change the settings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_compress.config import KEY, Config
from ds_compress.config.policies import Policy
from ds_compress.config.recipes import with_changes
from ds_compress.errors import CompressionError
from ds_compress.runtime.policy import PolicyController
from ds_compress.simulate.boundary import SimulatedBoundary, SimulatedEnd


class SimulatedTraining:
    """Runs the policy before the first pass after a step, when optimizer and scheduler have stepped."""

    def __init__(
        self,
        config: Config,
        boundaries: Sequence[SimulatedBoundary],
        ds_config: Mapping[str, Any],
        lr: Callable[[], Sequence[float]] | None,
    ):
        """
        Raises:
            CompressionError: the policy needs a learning rate or a number of samples, which is missing.
        """
        self.config = config
        self.global_steps = 0
        self.micro_batches = boundaries[0].micro_batches
        self._boundaries = boundaries
        self._lr = lr
        self._step_samples = step_samples(ds_config, self.micro_batches)
        check_given(config.policy, f"{KEY}.policy", lr, self._step_samples)
        self._policy = PolicyController(config, len(boundaries), "cpu", lambda tensor: [tensor])
        self._adopt(self._policy.start(self, self))

    @property
    def ends(self) -> list[SimulatedEnd]:
        """Return the sending ends of all channels."""
        return [end for boundary in self._boundaries for end in boundary.ends.values()]

    @property
    def global_samples(self) -> int:
        """Return the number of samples of the steps so far."""
        return self.global_steps * (self._step_samples or 0)

    def get_lr(self) -> Sequence[float]:
        """Return the learning rates of the optimizer."""
        return self._lr() if self._lr else ()

    def follow(self, model: nn.Module) -> None:
        """Run the policy in the passes of `model`."""
        model.register_forward_pre_hook(lambda *_: self._before_pass())

    def _before_pass(self) -> None:
        first = self._boundaries[0]  # gradients reach it last
        steps, begun = divmod(first.trained, self.micro_batches)
        begins = first.training and torch.is_grad_enabled() and not begun
        if steps > self.global_steps and not begun and (begins or first.is_answered):
            self.global_steps = steps
            change = self._policy.end_step(self)
            if change is not None:
                change.report(self._adopt(change.boundaries))
        if begins:
            self._policy.begin_step(self, self)

    def _adopt(self, changes: Mapping[str, Any]) -> bool:
        """Give boundaries other settings; return whether any differs."""
        adopted = with_changes(self.config.adopted, changes)
        other = self.config.changed({"boundaries": adopted})
        other.prepare()
        self.config.adopted = adopted
        differs = self.config.adopt(other)
        if differs:
            for boundary in self._boundaries:
                boundary.upstream.adopt()
                boundary.downstream.adopt()
        return differs


def check_given(policy: Policy, path: str, lr: object, step_samples: int | None) -> None:
    """Check that what `policy` follows is known.

    Raises:
        CompressionError: it needs a learning rate or a number of samples, which is missing.
    """
    if policy.norms and lr is None:
        raise CompressionError(
            f"simulate: {path} {policy.name!r} follows the learning rate; give simulate "
            "lr=scheduler.get_last_lr, or a function like it"
        )
    if getattr(policy.options, "unit", "steps") == "samples" and not step_samples:
        raise CompressionError(
            f"simulate: {path} {policy.name!r} counts samples; give ds_config train_batch_size or "
            "train_micro_batch_size_per_gpu"
        )


def step_samples(ds_config: Mapping[str, Any], micro_batches: int) -> int | None:
    """Return the samples of a step; None if they are not given."""
    batch, micro = (ds_config.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    if type(batch) is int:
        return batch
    return micro * micro_batches if type(micro) is int else None
