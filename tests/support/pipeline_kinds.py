"""Train every kind of pipeline with DeepSpeed alone and with ds_compress: `make pipelines`.

What a kind of pipeline is made of: layers, micro-batches, settings.

All the kinds, by name.

Training a kind of pipeline: on its ranks, and in one process.

What has to hold for every kind.

python -m tests.support.pipeline_kinds        prints the table of docs/pipelines.md
"""

import contextlib
import hashlib
import inspect
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from ds_compress.transport import packet_parts
from tests.support import pipeline
from tests.support.calls import wrapped
from tests.support.pipeline import WIDTH, CopiedTurned, Masked, Mixed, ParallelBlock, Skip, Turned, simulated
from tests.support.ranks import run_ranks

LAYERS = 6


def of(layer: type) -> list[LayerSpec]:
    """Layers of a class that has to know which is the last."""
    return [LayerSpec(layer) for _ in range(LAYERS - 1)] + [LayerSpec(layer, last=True)]


def turned(layer: type) -> list[LayerSpec]:
    """The last layer of the first of two stages is a `layer`; the second turns back."""
    half = pipeline.layers(LAYERS // 2 - 1)
    return [*half, LayerSpec(layer), *half, LayerSpec(CopiedTurned)]


def tied() -> list[LayerSpec]:
    ends = [TiedLayerSpec("ends", nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    return [ends[0], *pipeline.layers(LAYERS - 2), ends[1]]


def plain(engine: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The usual micro-batches, in the dtype that the engine computes in; None: no engine."""
    half = torch.float16 if engine and engine.fp16_enabled() else torch.float32
    dtype = torch.bfloat16 if engine and engine.bfloat16_enabled() else half
    return pipeline.batches(engine.grid.get_data_parallel_id() if engine else 0, dtype)


def of_lengths(lengths: list[int]):
    """Micro-batches of those lengths, round and round."""

    def data(engine):
        by_length = {length: pipeline.batches(shape=(length, WIDTH)) for length in lengths}
        return (next(by_length[length]) for length in itertools.cycle(lengths))

    return data


@dataclass(frozen=True)
class Kind:
    title: str
    stages: int = 2
    ranks: int = 0  # as many as stages unless given
    specs: Callable[[], list[LayerSpec]] = lambda: pipeline.layers(LAYERS)
    stock_specs: Callable[[], list[LayerSpec]] | None = None  # where stock cannot run the same
    stock: bool = True  # whether stock computes the right thing
    config: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    block: dict[str, Any] = field(default_factory=dict)
    data: Callable[[Any], Iterator[tuple[torch.Tensor, torch.Tensor]]] = plain
    prepare: Callable[[Any], None] | None = None  # called with the engine
    before_batch: Callable[[Any], None] | None = None
    after_batch: Callable[[Any], list[float]] = lambda engine: []  # gives more to compare
    steps: int = 4
    evaluates: bool = True  # after each step
    engine_class: type = PipelineEngine
    # largest relative difference to the same in one process; None: that cannot be
    simulated: float | None = 0.0
    possible: Callable[[], bool] = lambda: True  # for this DeepSpeed on this device
    same_packets: int = 1  # neighbouring ranks that have to send the same bytes

    @property
    def world_size(self) -> int:
        return self.ranks or self.stages


try:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
except ImportError:  # before DeepSpeed 0.19.8
    DualPipeVModule = None


class OwnEngine(PipelineEngine):
    """A project's engine with an instruction map of its own."""

    sent = 0

    def _send(self, buffer_id):
        type(self).sent += 1
        self._exec_send_activations(buffer_id)

    def _step(self, lr_kwargs=None):
        PipelineEngine._exec_optimizer_step(self, lr_kwargs)

    _replaced = {schedule.SendActivation: _send, schedule.OptimizerStep: _step}
    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, **_replaced}


def _checkpoints() -> bool:
    """Before 0.19.7 DeepSpeed's checkpointing asks every device for a stream, and a CPU has none."""
    return "Stream(device" not in inspect.getsource(checkpointing) or get_accelerator().Stream is not None


# DeepSpeed runs the backward pass once for each float tensor of a tuple, so gradients are added in another
# order
SEPARATE = 1e-5
ZERO_1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
MIXED = {"specs": lambda: of(Mixed), "simulated": SEPARATE}
FLOATS = {"specs": lambda: of(Skip), "simulated": SEPARATE, "stages": 3}
DYNAMIC = {"module": {"dynamic_shape": True}, "data": of_lengths([8, 3, 16, 5]), "stages": 3}
PARALLEL = {
    "module": {"tensor_parallel": 2},
    "specs": lambda: [LayerSpec(ParallelBlock)] * LAYERS,
    "ranks": 4,
}


def recomputing(**options: Any) -> dict[str, Any]:
    pipeline = {"activation_checkpoint_interval": 1, **options}
    return {"possible": _checkpoints, "config": {"pipeline": pipeline}}


KINDS = {
    "tensor": Kind("one tensor", stages=3),
    "mixed": Kind("tuple with int64, bool and small float tensors", **MIXED),
    "mixed-middle": Kind("the same with a middle stage", stages=3, stock=False, **MIXED),
    "mixed-dynamic": Kind("the same, `dynamic_shape`", stock=False, **MIXED, **DYNAMIC),
    "floats": Kind("tuple with several float tensors", **FLOATS),
    "positions": Kind('the same, `"tensors": [0, 2]`', block={"tensors": [0, 2]}, **FLOATS),
    "mask": Kind(
        "`has_attention_mask`",
        stages=3,
        specs=lambda: of(Masked),
        prepare=lambda engine: engine.set_has_attention_mask(True),
    ),
    "dynamic": Kind("`dynamic_shape`", **DYNAMIC),
    "reset": Kind(
        "`reset_activation_shape()` before every batch",
        data=of_lengths([8] * 4 + [5] * 4),
        before_batch=lambda engine: engine.reset_activation_shape(),
    ),
    "strides": Kind(
        "outputs that are not contiguous (stock: a copy)",
        specs=lambda: turned(Turned),
        stock_specs=lambda: turned(CopiedTurned),
    ),
    "reentrant": Kind("activation checkpointing", **recomputing()),
    "non-reentrant": Kind("activation checkpointing, non-reentrant", **recomputing(use_reentrant=False)),
    "tied": Kind("tied weights, first and last stage", stages=3, specs=tied, simulated=None),
    "clipping": Kind("gradient clipping", config={"gradient_clipping": 0.05}, simulated=None),
    "data-parallel": Kind("PP 2 x DP 2", ranks=4, config={"replicas": 2}, simulated=None),
    "zero-1": Kind("PP 2 x DP 2, ZeRO-1", ranks=4, config={"replicas": 2, **ZERO_1}, simulated=None),
    "bf16": Kind("bf16, BF16_Optimizer", config=BF16, simulated=None),
    "bf16-zero-1": Kind("bf16, ZeRO-1", config={**BF16, **ZERO_1}, simulated=None),
    "fp16": Kind("fp16, ZeRO-1, dynamic loss scale", config={**FP16, **ZERO_1}, simulated=None),
    "autocast": Kind("torch_autocast to bf16", config=AUTOCAST, simulated=None),
    "tp-partitioned": Kind("TP 2 x PP 2, partitioned activations", simulated=None, **PARALLEL),
    "tp-full": Kind(
        "TP 2 x PP 2, full activations",
        simulated=None,
        same_packets=2,
        config={"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}},
        **PARALLEL,
    ),
    "own-map": Kind("a subclass with an instruction map of its own", engine_class=OwnEngine),
    "depth": Kind('`"link": {"depth": 2}`', block={"link": {"depth": 2}}),
    "depth-data-parallel": Kind(
        '`"link": {"depth": 3}`, PP 2 x DP 2, ZeRO-1, bf16',
        ranks=4,
        config={"replicas": 2, **BF16, **ZERO_1},
        simulated=None,
        block={"link": {"depth": 3}},
    ),
    "dualpipev": Kind(
        "DualPipeV, 2 ranks with 4 stages", module={"module_class": DualPipeVModule}, simulated=None
    ),
}
if DualPipeVModule is None:
    del KINDS["dualpipev"]


BLOCKS = {
    "blocking": {"link": {"mode": "blocking"}},
    "eager": {},  # the default, with the link of the kind
    "connections": {"link": {"connections": 3}},
    "topk": pipeline.reusing(0.2),
    "quantize": pipeline.alike({"name": "quantize", "bits": 4}),
}


def fp16_on_cpu() -> None:
    get_accelerator().is_fp16_supported = lambda: True


def train(kind: Kind, block: dict[str, Any] | None) -> dict[str, Any]:
    """What one rank has to show after some steps and evaluations; `block`: None for stock DeepSpeed."""
    specs = kind.stock_specs if kind.stock_specs and block is None else kind.specs
    config = pipeline.ds_config(
        {"min_numel": 64, **kind.block, **block} if block is not None else None, **kind.config
    )
    if "fp16" in kind.config:
        fp16_on_cpu()
    config = {key: value for key, value in config.items() if value is not None}
    before, deepspeed.PipelineEngine = deepspeed.PipelineEngine, kind.engine_class
    try:
        engine = pipeline.build(kind.stages, config, specs(), **kind.module)
    finally:
        deepspeed.PipelineEngine = before
    own_before = getattr(engine, "sent", 0)
    digest = hashlib.blake2b()
    session = getattr(engine, "ds_compress", None)  # some engines attach at their first batch
    for end in session.stage.ends if session else ():
        if end.sends:
            end.link.send = wrapped(end.link.send, lambda packet: digest.update(packet.bytes))
    if kind.prepare:
        kind.prepare(engine)
    data, lines, losses, evaluated, more = kind.data(engine), pipeline.log_lines(), [], [], []
    for _ in range(kind.steps):
        runs = [(engine.train_batch, data, losses), (engine.eval_batch, kind.data(engine), evaluated)]
        for run, source, results in runs[: 1 + kind.evaluates]:
            if kind.before_batch:
                kind.before_batch(engine)
            results.append(run(source).item())
        more += kind.after_batch(engine)
    sent = [channel.sent for channel in engine.ds_compress.stage.sending] if block is not None else []
    return {
        "class": type(engine).__name__,
        "losses": losses,
        "evaluated": evaluated,
        "more": more,
        "left alone": [line for line in lines if "left to DeepSpeed" in line],
        "weights": pipeline.weights(engine),
        "raw": sum(s.raw_bytes for s in sent),
        "wire": sum(s.wire_bytes for s in sent),
        "packets": digest.hexdigest(),
        "own": getattr(engine, "sent", 0) - own_before,
    }


def train_all(kind: Kind, blocks: dict[str, dict[str, Any]] = BLOCKS) -> dict[str, dict[str, Any]]:
    """One engine after the other in the same processes: stock, then with each block."""
    packet_parts.WHOLE = 64  # so that packets have parts where there are several connections
    with contextlib.redirect_stdout(io.StringIO()):
        stock = {"stock": train(kind, None)} if kind.stock else {}
        return stock | {name: train(kind, block) for name, block in blocks.items()}


def train_simulated(kind: Kind, block: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of training and of evaluation, in one process."""
    specs = kind.specs()
    config = pipeline.ds_config({"min_numel": 64, **kind.block, **block})
    model = simulated(specs, config, pipeline.even_cuts(len(specs), kind.stages))
    data, losses, evaluated = kind.data(None), [], []
    for _ in range(kind.steps):
        losses.append(pipeline.train_step(model, data))
        evaluated.append(pipeline.evaluate(model, kind.data(None)))
    return losses, evaluated


def different(mine: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What is not bit-identical of that which two runs of a rank have to show."""
    same = pipeline.same_weights(mine["weights"], other["weights"])
    keys = ("losses", "evaluated", "more")
    return [key for key in keys if mine[key] != other[key]] + ["weights"] * (not same)


EXACT = ("blocking", "eager", "connections")
LOSSY = ("topk", "quantize")


def problems(kind: Kind) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """What is not as it has to be, and what the first rank has to show."""
    ranks = run_ranks(kind.world_size, train_all, kind)
    found = []

    def expect(condition, what):
        if not condition:
            found.append(what)

    for number, runs in enumerate(ranks):
        reference = runs["stock" if kind.stock else "blocking"]
        stock_class = reference["class"].removeprefix("Compressed")
        partner = ranks[number - number % kind.same_packets]
        for name in BLOCKS:
            mine = runs[name]
            expect(mine["class"] == f"Compressed{stock_class}", mine["class"])
            expect(mine["own"] == reference["own"], f"{name}: {mine['own']} own instructions ran")
            expect(mine["packets"] == partner[name]["packets"], f"{name}: rank {number} sends other bytes")
        for name in EXACT:
            others = different(runs[name], reference)
            expect(not others, f"none, {name}: other {others} on rank {number}")
    first = ranks[0]
    for name in LOSSY:
        expect(first[name]["losses"] != first["blocking"]["losses"], f"{name}: nothing is compressed")
        expect(first[name]["wire"] < first[name]["raw"], f"{name}: more bytes than without")
    for name, block in BLOCKS.items():
        losses, evaluated = first[name]["losses"], first[name]["evaluated"]
        expect(evaluated[-1] < evaluated[0], f"{name}: the loss does not fall: {evaluated}")
        if kind.simulated is not None:
            ours, simulated = losses + evaluated, [*itertools.chain(*train_simulated(kind, block))]
            same = all(abs(a - b) <= kind.simulated * abs(b) for a, b in zip(ours, simulated))
            expect(same, f"{name}: {ours}, but simulate gives {simulated}")
    return found, first


def row(kind: Kind) -> list[str]:
    """The cells of a kind in the table."""
    found, runs = problems(kind)
    if found:
        return [kind.title, str(kind.world_size), "; ".join(found), "", "", ""]
    results = []
    for name in LOSSY:
        run = runs[name]
        before, *_, after = run["evaluated"]
        results.append(f"{before:.3f} -> {after:.3f}, {run['raw'] / run['wire']:.1f}x")
    stock = "bit-equal" if kind.stock else "stock is wrong"
    simulated = "-" if kind.simulated is None else f"to {kind.simulated:g}" if kind.simulated else "bit-equal"
    return [kind.title, str(kind.world_size), stock, *results, simulated]


def main() -> None:
    """Print one row for each kind."""
    lossy = "TopK 20 %, indices reused | quantize, 4 bits"
    print(f"| pipeline | ranks | `none` = stock | {lossy} | = `simulate` |\n|---|---|---|---|---|---|")
    for kind in KINDS.values():
        print(f"| {' | '.join(row(kind))} |", flush=True)


if __name__ == "__main__":
    main()
