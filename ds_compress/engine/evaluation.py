"""One state of a model evaluated twice, where "eval" is "both": with messages compressed, and as they are."""

import itertools
from collections.abc import Iterator
from typing import Any

from ds_compress.monitor.metrics import EVAL_LOSS, label
from ds_compress.runtime.guard import evaluation_mode

_OPTIONS = ("return_logits", "compute_loss", "reduce_output", "bcast_loss", "num_micro_batches")
"""Of DeepSpeed's `eval_batch`, behind the data, in its order."""


class EvaluatedEngine:
    """The part of the engine's mixin that evaluates."""

    gives_losses = True
    """Whether what `eval_batch` gives is a loss; who makes it something else says so."""

    def evaluated_at_least(self):
        """Micro-batches that the schedule of an evaluation takes."""
        return 1

    def eval_batch(self, data_iter, *args, **kwargs):
        config, asked = self._compression.config, dict(zip(_OPTIONS, args)) | kwargs
        is_mean = asked.get("compute_loss", True) and asked.get("reduce_output", "avg") == "avg"
        is_loss = self.gives_losses and is_mean and not asked.get("return_logits", False)
        if config.block.eval != "both" or not is_loss:
            return super().eval_batch(data_iter, *args, **kwargs)
        asked["bcast_loss"] = True  # to the rank that reports
        once, again = _twice(data_iter)
        other = "compressed" if config.eval == "uncompressed" else "uncompressed"
        monitored, losses = self.monitor.enabled, {}
        self.module.eval()  # as DeepSpeed does, and leaves it
        try:
            self.monitor.enabled = False  # one value for DeepSpeed's own label
            with evaluation_mode(self, config, other):
                losses[other] = super().eval_batch(once, **asked).mean().item()
        finally:
            self.monitor.enabled = monitored
        loss = super().eval_batch(again, **asked)
        losses[config.eval] = loss.mean().item()
        if self.global_rank == 0:
            self._report(losses)
        return loss

    def _report(self, losses):
        words = ", ".join(f"{losses[way]:.4f} {way}" for way in EVAL_LOSS)
        print(f"ds_compress: evaluation after step {self.global_steps}: loss {words}", flush=True)
        if self.monitor.enabled:
            events = [(label(name), losses[way], self.global_samples) for way, name in EVAL_LOSS.items()]
            self.monitor.write_events(events)


def _twice(data_iter: Any) -> tuple[Iterator[Any] | None, Iterator[Any] | None]:
    """What `data_iter` gives, twice; it is asked once. None, on a rank that loads nothing, stays None."""
    if data_iter is None:
        return None, None
    once, again = itertools.tee(iter(lambda: next(data_iter), object()))
    return once, again
