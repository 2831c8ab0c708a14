"""A model with simulated boundaries between its layers: traffic, evaluation, ids of samples."""

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from ds_compress.config import KEY, Config
from ds_compress.config.recipes import with_changes
from ds_compress.errors import CompressionError, shown
from ds_compress.feedback.aqsgd.sample_ids import SampleIds
from ds_compress.message.channel import Mode, evaluated
from ds_compress.message.dependence import DependencyTracker
from ds_compress.runtime.policy import PolicyController
from ds_compress.simulate.boundary import SimulatedBoundary


class SimulatedTraining:
    """Runs the policy before the first pass after a step, when optimizer and scheduler have stepped."""

    def __init__(
        self, config: Config, boundaries: list[SimulatedBoundary], lr: Callable[[], Sequence[float]] | None
    ):
        """
        Raises:
            CompressionError: the policy needs a learning rate, which is missing.
        """
        self.config = config
        self.global_steps = 0
        self._boundaries = boundaries
        self.ends = [end for boundary in boundaries for end in boundary.ends.values()]
        self._lr = lr
        if config.policy.norms and lr is None:
            raise CompressionError(
                f"simulate: {KEY}.policy {config.policy.name!r} may follow the learning rate; give simulate "
                "lr=scheduler.get_last_lr, or a function like it"
            )
        self._policy = PolicyController(config, len(boundaries), "cpu", lambda tensor: [tensor])
        self._adopt(self._policy.start(self, self))

    def get_lr(self) -> Sequence[float]:
        """Return the learning rates of the optimizer."""
        return self._lr() if self._lr else ()

    def before_pass(self, *_: Any) -> None:
        """Run the policy if a step has ended; a hook of the whole model."""
        first = self._boundaries[0]  # gradients reach it last
        steps, begun = divmod(first.trained, first.micro_batches)
        begins = first.training and torch.is_grad_enabled() and not begun
        if steps > self.global_steps and not begun and (begins or first.is_answered):
            self.global_steps = steps
            change = self._policy.decide(self)
            if change is not None:
                self._adopt(change.boundaries)
                change.report()

    def _adopt(self, changes: Mapping[str, Any]) -> None:
        """Give boundaries other settings."""
        if self.config.adopt(with_changes(self.config.adopted, changes)):
            for boundary in self._boundaries:
                boundary.upstream.adopt()
                boundary.downstream.adopt()


def simulate(
    model: nn.Module,
    ds_config: dict[str, Any],
    cuts: Sequence[int],
    steps_per_epoch: int | None = None,
    lr: Callable[[], Sequence[float]] | None = None,
    replica: int = 0,
) -> nn.Module:
    """Put simulated boundaries between the layers of `model`.

    Args:
        model: an `nn.Sequential`, or a `PipelineModule` that was built with one stage.
        ds_config: the whole config, with the "ds_compress" block and the number of micro-batches of a step:
            "gradient_accumulation_steps" or the batch sizes; 1 if neither is given.
        cuts: index of the first layer after each boundary, ascending: [4, 8] makes three stages.
        steps_per_epoch: optimizer steps in one pass over the data; "warmup_epochs" needs it.
        lr: returns the learning rates of the optimizer, as `scheduler.get_last_lr` does; policy "accordion"
            needs it.
        replica: data-parallel rank of the pipeline, which varies the random choices of codecs. For several
            replicas, simulate the same `nn.Sequential` once for each (`SimulatedReplicas`).

    Returns:
        A new `nn.Sequential` that shares the layers of `model`; a `PipelineModule` is changed in place and
        returned.

    Raises:
        CompressionError: a bad block, a cut that is not between two layers, an unknown number of
            micro-batches, or a model of another kind.
    """
    if not isinstance(ds_config, dict):
        raise CompressionError(f"simulate: ds_config {shown(ds_config)}; allowed: the config as a dict")
    config = Config(ds_config.get(KEY, {}))
    layers: Any = list(model) if isinstance(model, nn.Sequential) else getattr(model, "forward_funcs", None)
    if layers is None:
        raise CompressionError(
            f"simulate: {type(model).__name__} has no list of layers; allowed: nn.Sequential, PipelineModule"
        )
    cuts = _between(cuts, len(layers))
    micro_batches = _micro_batches(ds_config)
    if not config.block.enabled:
        return model
    interval = getattr(model, "activation_checkpoint_interval", 0)
    if interval:
        raise CompressionError(
            f"simulate: activation_checkpoint_interval {interval} of the PipelineModule: boundaries cannot "
            "be recomputed; allowed: 0, which has the same results"
        )
    if config.quality is not None:
        raise CompressionError(
            f"{KEY}.recipe: 'auto' is not simulated, as it chooses from what a pipeline measures; use the "
            "block that it prints there"
        )
    config.in_force.check_boundaries(len(cuts))
    config.count_epochs(steps_per_epoch)
    config.prepare()

    follows = config.in_force.compresses and config.block.tensors == "large"
    tracking = DependencyTracker(model) if follows else None
    boundaries = [
        SimulatedBoundary(number, config, micro_batches, tracking, replica) for number in range(len(cuts))
    ]
    for number, cut in reversed(list(enumerate(cuts))):
        layers.insert(cut, boundaries[number])
        if not isinstance(model, nn.Sequential):
            model.add_module(f"boundary_{number}", boundaries[number])
    simulated = nn.Sequential(*layers) if isinstance(model, nn.Sequential) else model
    if tracking is not None:
        _follow(simulated, boundaries, tracking)
    if boundaries and config.has_policy:
        simulated.register_forward_pre_hook(SimulatedTraining(config, boundaries, lr).before_pass)
    if boundaries and config.in_force.sample_ids:
        _follow_samples(simulated, boundaries, config.in_force.sample_ids)
    return simulated


def _between(cuts: Sequence[int], layers: int) -> list[int]:
    """Return `cuts` if they lie between layers."""
    try:
        found = [operator.index(cut) for cut in cuts if not isinstance(cut, bool)]
    except TypeError:
        found = []
    given = len(cuts) if isinstance(cuts, Sized) else 1
    if len(found) != given or found != sorted(set(found)) or not all(0 < cut < layers for cut in found):
        raise CompressionError(
            f"simulate: cuts {shown(cuts)} must ascend and lie in 1..{layers - 1}, as integers"
        )
    return found


def _micro_batches(ds_config: dict[str, Any]) -> int:
    """Return the micro-batches of a step, given or computed as DeepSpeed does."""
    keys = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    batch, micro, steps = (ds_config.get(key) for key in keys)
    if steps in (None, "auto") and type(batch) is type(micro) is int and micro > 0 and batch % micro == 0:
        steps = batch // micro
    steps = 1 if steps is None else steps
    if type(steps) is not int or steps < 1:
        raise CompressionError(
            f'simulate: {keys[2]} {shown(steps)}; allowed: an integer from 1 ("auto" only together with '
            f"{keys[0]} and {keys[1]}, a multiple of it)"
        )
    return steps


def _follow(model: nn.Module, boundaries: list[SimulatedBoundary], tracking: DependencyTracker) -> None:
    """Track which tensors depend on parameters in passes of `model`, until every boundary knows."""

    tracked = ExitStack()

    def begin(*_: Any) -> None:
        if any(boundary.upstream.dependence is None for boundary in boundaries):
            tracked.enter_context(tracking)
        else:
            tracking.has_looked = False

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(lambda *_: tracked.close(), always_call=True)


def _follow_samples(model: nn.Module, boundaries: list[SimulatedBoundary], source: SampleIds) -> None:
    """Take the ids of the samples from the inputs of `model`, unless `announce` gives them; pass them from
    boundary to boundary."""
    if source.column is None:
        model.register_forward_pre_hook(lambda module, inputs: boundaries[0].announce(source.of(inputs)))
    for earlier, later in itertools.pairwise(boundaries):
        later.upstream.sample_ids = earlier.downstream.sample_ids


@dataclass(frozen=True)
class Traffic:
    """Messages of one direction of a boundary since the start; counts include evaluation."""

    boundary: int
    direction: str
    messages: int
    raw_bytes: int  # of the tensors
    wire_bytes: int  # of the packets, headers, sample ids and first visits included
    relative_error: float
    """Mean over the messages of training that were compressed of ||x - y|| / ||x||, y being what arrived; nan
    without such messages, and when one was not finite."""
    token_error: float
    """The same of the root of the mean over rows of a row's squared relative error."""

    gradient_error: float
    """Largest error of accumulated gradients at the steps that the guard checks; 0 without such steps, and
    forward."""

    warnings: tuple[str, ...]
    """Limits of the guard that messages exceeded at these steps."""


def traffic(model: nn.Module) -> list[Traffic]:
    """Return the traffic of each direction of each boundary in `model`."""
    return [
        Traffic(
            meter.channel.boundary.number,
            meter.channel.direction,
            meter.channel.sent.messages,
            meter.channel.sent.raw_bytes,
            meter.channel.sent.wire_bytes,
            meter.error.relative_error,
            meter.error.token_error,
            meter.gradient_error,
            meter.warnings,
        )
        for boundary in _boundaries(model)
        for meter in boundary.meters
    ]


@contextmanager
def evaluating(model: nn.Module, messages: Mode) -> Iterator[None]:
    """Switch to evaluation mode, with messages compressed or not; overrides "eval" of the config.

    Nothing of the training state changes: one state can be evaluated both ways, and trained on.

    Raises:
        CompressionError: `messages` is neither of the two.
    """
    if messages not in get_args(Mode):
        raise CompressionError(
            f"evaluating: messages {shown(messages)}; allowed: {', '.join(map(repr, get_args(Mode)))}"
        )
    sides = [side for each in _boundaries(model) for side in (each.upstream, each.downstream)]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with evaluated(sides, messages):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def announce(model: nn.Module, batch: Sequence[Any]) -> None:
    """Set the samples of the next training pass of `model`; needed with `"ids": {"column": ...}`.

    Args:
        batch: what the data loader returned, (inputs, labels, ..., indices), as a pipeline would be given it.

    Raises:
        CompressionError: it has no such column, or not one of integers.
    """
    for boundary in _boundaries(model)[:1]:
        if boundary.config.in_force.sample_ids is not None:
            boundary.announce(boundary.config.in_force.sample_ids.of(batch))


def _boundaries(model: nn.Module) -> list[SimulatedBoundary]:
    return [module for module in model.modules() if isinstance(module, SimulatedBoundary)]
