"""Training a kind of pipeline: on its ranks, and in one process."""

import contextlib
import hashlib
import io
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

import ds_compress  # noqa: F401  (hooks the engine)
from tests.support.kinds.kind import Kind
from tests.support.pipeline import build, ds_config, weights
from tests.support.simulated import evaluate, even_cuts, simulated, train_step

STEPS = 4
BLOCKS = {
    "blocking": {"link": {"mode": "blocking"}},
    "eager": {},  # the default, with the link of the kind
    "topk": {
        "forward": {"codec": {"name": "topk", "density": 0.2}},
        "backward": {"codec": {"name": "topk", "indices": "reuse"}},
    },
    "quantize": {
        direction: {"codec": {"name": "quantize", "bits": 4}} for direction in ("forward", "backward")
    },
}


def fp16_on_cpu() -> None:
    get_accelerator().is_fp16_supported = lambda: True


def train(kind: Kind, block: dict[str, Any] | None) -> dict[str, Any]:
    """What one rank has to show after some steps and evaluations; `block`: None for stock DeepSpeed."""
    specs = kind.stock_specs if kind.stock_specs and block is None else kind.specs
    config = ds_config({"min_numel": 64, **kind.block, **block} if block is not None else None, **kind.config)
    if "fp16" in kind.config:
        fp16_on_cpu()
    if kind.engine_class:
        deepspeed.PipelineEngine = kind.engine_class
    engine = build(kind.stages, config, specs(), **kind.module)
    own_before = getattr(engine, "sent", 0)
    digest = hashlib.blake2b()
    if block is not None:
        _record(engine, digest)
    if kind.prepare:
        kind.prepare(engine)
    data, losses, evaluated = kind.data(engine), [], []
    for _ in range(STEPS):
        for run, source, results in (
            (engine.train_batch, data, losses),
            (engine.eval_batch, kind.data(engine), evaluated),
        ):
            if kind.before_batch:
                kind.before_batch(engine)
            results.append(run(source).item())
    sent = [channel.sent for channel in engine.ds_compress.stage.sending] if block is not None else []
    return {
        "class": type(engine).__name__,
        "losses": losses,
        "evaluated": evaluated,
        "weights": weights(engine),
        "raw": sum(s.raw_bytes for s in sent),
        "wire": sum(s.wire_bytes for s in sent),
        "packets": digest.hexdigest(),
        "own": getattr(engine, "sent", 0) - own_before,
    }


def _record(engine: Any, digest: Any) -> None:
    """Add every packet that this rank sends to `digest`."""

    def recording(send):
        def run(packet):
            digest.update(packet.numpy())
            return send(packet)

        return run

    for end in engine.ds_compress.stage.ends:
        if end.sends:
            end.link.send = recording(end.link.send)


def train_all(kind: Kind, blocks: dict[str, dict[str, Any]] = BLOCKS) -> dict[str, dict[str, Any]]:
    """One engine after the other in the same processes: stock, then with each block."""
    with contextlib.redirect_stdout(io.StringIO()):
        stock = {"stock": train(kind, None)} if kind.stock else {}
        return stock | {name: train(kind, block) for name, block in blocks.items()}


def train_simulated(kind: Kind, block: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of training and of evaluation, in one process."""
    specs = kind.specs()
    config = ds_config({"min_numel": 64, **kind.block, **block})
    model = simulated(specs, config, even_cuts(len(specs), kind.stages))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data, losses, evaluated = kind.data(None), [], []
    for _ in range(STEPS):
        losses.append(train_step(model, optimizer, data))
        evaluated.append(evaluate(model, kind.data(None)))
    return losses, evaluated
