"""One state of a model evaluated twice, where "eval" is "both": with messages compressed, and as they are."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ds_compress.engine.session import Session
from ds_compress.monitor.metrics import EVAL_LOSS, label
from ds_compress.runtime.guard import Mode, evaluation_mode

_OPTIONS = ("return_logits", "compute_loss", "reduce_output", "bcast_loss", "num_micro_batches")
"""Of DeepSpeed's `eval_batch`, behind the data, in its order."""


def evaluate_both(
    engine: Any, session: Session, evaluate: Callable[..., Any], data_iter: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run `evaluate`, DeepSpeed's `eval_batch`; where "eval" is "both" twice, if it returns a loss."""
    config, asked = session.config, dict(zip(_OPTIONS, args)) | kwargs
    is_mean = asked.get("compute_loss", True) and asked.get("reduce_output", "avg") == "avg"
    is_loss = session.gives_losses and is_mean and not asked.get("return_logits", False)
    if config.block.eval != "both" or not is_loss:
        return evaluate(data_iter, *args, **kwargs)
    asked["bcast_loss"] = True  # to the rank that reports
    once, again = _twice(data_iter)
    other: Mode = "compressed" if config.eval == "uncompressed" else "uncompressed"
    monitored, losses = engine.monitor.enabled, dict[str, float]()
    engine.module.eval()  # as DeepSpeed does, and leaves it
    try:
        engine.monitor.enabled = False  # one value for DeepSpeed's own label
        with evaluation_mode(engine, config, other):
            losses[other] = evaluate(once, **asked).mean().item()
    finally:
        engine.monitor.enabled = monitored
    loss = evaluate(again, **asked)
    losses[config.eval] = loss.mean().item()
    if engine.global_rank == 0:
        _report(engine, losses)
    return loss


def _report(engine: Any, losses: Mapping[str, float]) -> None:
    values = ", ".join(f"{losses[mode]:.4f} {mode}" for mode in EVAL_LOSS)
    print(f"ds_compress: evaluation after step {engine.global_steps}: loss {values}", flush=True)
    if engine.monitor.enabled:
        events = [(label(name), losses[mode], engine.global_samples) for mode, name in EVAL_LOSS.items()]
        engine.monitor.write_events(events)


def _twice(data_iter: Any) -> tuple[Iterator[Any] | None, Iterator[Any] | None]:
    """Return two iterators over the items of `data_iter`, which is read once; twice None for None."""
    if data_iter is None:
        return None, None
    once, again = itertools.tee(iter(lambda: next(data_iter), object()))
    return once, again
