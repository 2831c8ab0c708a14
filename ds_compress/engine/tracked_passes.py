"""When passes are observed, to find out which tensors of a message depend on parameters."""

from collections.abc import Callable, Sequence

from deepspeed.runtime.pipe import schedule
from torch import Tensor

from ds_compress.config import Config
from ds_compress.engine.deepspeed import PipelineEngine, announces_next
from ds_compress.engine.stage import Stage
from ds_compress.message.channel import Boundary
from ds_compress.message.dependence import DependencyTracker


class TrackedPasses:
    """Observes the passes of a stage as long as a boundary needs it; none if "tensors" lists positions."""

    def __init__(self, engine: PipelineEngine, config: Config, stage: Stage):
        self._engine = engine
        self._config = config
        self._stage = stage
        follows = config.block.tensors == "large"
        self._tracker = DependencyTracker(engine.module) if follows else None

    def begin_schedule(self) -> Callable[[], DependencyTracker | None] | None:
        """Return a function that gives a context for instructions that compute what is sent; None if no
        boundary needs it."""
        if self._tracker is not None:
            self._tracker.has_looked = False
        return self._open if self._open() else None

    def _open(self) -> DependencyTracker | None:
        """Return the tracker as long as it is needed; after that, what it has seen counts no more."""
        if self._tracker is None:
            return None
        is_needed = self._config.compresses and any(
            end.channel.boundary.dependence is None or announces_next(self._engine, phase)
            for (kind, phase), end in self._stage.senders.items()
            if kind is schedule.SendActivation
        )
        if not is_needed:
            self._tracker.has_looked = False
        return self._tracker if is_needed else None

    def mark_received(self, tensors: Sequence[Tensor], boundary: Boundary) -> None:
        """Mark those of a forward message that depend on parameters."""
        if self._tracker and boundary.dependence:
            self._tracker.mark_received(tensors, boundary.dependence)

    def dependence(self, tensors: Sequence[Tensor], boundary: Boundary) -> tuple[bool, ...] | None:
        """Return which tensors of the next message depend on parameters (`DependencyTracker.dependence`);
        None if nobody looks."""
        if self._tracker is None:
            return None
        return self._tracker.dependence(tensors, boundary.known_dependence)
