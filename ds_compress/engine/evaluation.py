"""Evaluate with compressed messages and without; nothing of the state of training changes."""

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ds_compress.engine.deepspeed import PipelineEngine, evaluate, evaluating
from ds_compress.message.channel import Boundary, Mode, evaluated
from ds_compress.monitor.metrics import EVAL_LOSS

_EVAL_OPTIONS = ("return_logits", "compute_loss", "reduce_output", "bcast_loss", "num_micro_batches")
"""Parameters of DeepSpeed's `eval_batch` after the data, in its order."""


@contextmanager
def evaluation(engine: PipelineEngine, boundaries: Sequence[Boundary], mode: Mode) -> Iterator[None]:
    """Let passes of `engine` be those of an evaluation in `mode`; then restore the engine, and the generators
    of random numbers."""
    devices = [engine.device] if engine.device.type == "cuda" else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), evaluating(engine), evaluated(boundaries, mode):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def replay(
    engine: PipelineEngine, boundaries: Sequence[Boundary], mode: Mode, micro_batches: int
) -> list[Any]:
    """Evaluate micro-batches that the guard gives the engine; return what the last stage puts out."""
    with evaluation(engine, boundaries, mode):
        return evaluate(engine, micro_batches)


def run_eval_batch(
    engine: PipelineEngine, eval_batch: Callable[..., Any], data_iter: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run DeepSpeed's `eval_batch`; where "eval" is "both" twice, if it returns a loss."""
    session: Any = engine.ds_compress
    config, asked = session.config, dict(zip(_EVAL_OPTIONS, args)) | kwargs
    is_mean = asked.get("compute_loss", True) and asked.get("reduce_output", "avg") == "avg"
    if config.block.eval != "both" or not is_mean or asked.get("return_logits", False):
        return eval_batch(data_iter, *args, **kwargs)
    asked["bcast_loss"] = True  # to the rank that reports
    # by `next`, as DeepSpeed does: it may not be iterable
    items = None if data_iter is None else map(next, itertools.repeat(data_iter))
    once, again = (None, None) if items is None else itertools.tee(items)
    other: Mode = "compressed" if config.eval == "uncompressed" else "uncompressed"
    batch_fn, made, losses = engine.batch_fn, deque[Any](), dict[str, float]()

    def keep(batch: Any) -> Any:
        made.append(batch_fn(batch))
        return made[-1]

    monitored = engine.monitor.enabled
    try:
        # batch_fn may pop from a batch, so it gets each once; and it may draw random numbers, whose
        # generators the second evaluation restores
        engine.batch_fn = batch_fn and keep
        loss = eval_batch(once, **asked)
        losses[config.eval] = loss.mean().item()
        engine.batch_fn = batch_fn and (lambda _: made.popleft())
        monitored, engine.monitor.enabled = engine.monitor.enabled, False  # one value for DeepSpeed's label
        with evaluation(engine, session.stage.boundaries, other):
            losses[other] = eval_batch(again, **asked).mean().item()
    finally:
        engine.monitor.enabled, engine.batch_fn = monitored, batch_fn
    session.eval_losses = losses
    if engine.global_rank == 0:
        values = ", ".join(f"{losses[mode]:.4f} {mode}" for mode in EVAL_LOSS)
        print(f"ds_compress: evaluation after step {engine.global_steps}: loss {values}", flush=True)
        session.monitor.write(engine, {name: losses[mode] for mode, name in EVAL_LOSS.items()})
    return loss
