"""Pipelines whose replicas exchange gradients of parameters that are large enough to be compressed."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from tests.support.pipeline import MICRO_BATCHES, Block, batches, build, skip_steps, weights
from tests.support.pipeline_kinds import BF16, ZERO_1, fp16_on_cpu
from tests.support.ranks import run_ranks

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
KINDS = {
    "fp32": {},
    "fp32 zero 1": ZERO_1,
    "bf16": BF16,
    "bf16 zero 1": {**BF16, **ZERO_1, "data_types": {"grad_accum_dtype": "fp32"}},
    "bf16 accumulation": {**BF16, **ZERO_1, "data_types": {"grad_accum_dtype": "bf16"}},
    "fp16 zero 1": {**FP16, **ZERO_1},
}
"""What DeepSpeed has a way of its own for, from gradients to weights."""

WIDE = 96
"""Matrices of 96 x 192 values: three slices of 6,144 values, or two of 9,216, without padding."""


def wide_layers(count: int = 4, width: int = WIDE) -> list[LayerSpec]:
    return [LayerSpec(Block, width) for _ in range(count)]


class Alternating(Block):
    """Has a gradient of `down` in every other step only; without the other matrix in the steps between."""

    calls = 0

    def forward(self, x):
        step = self.calls // MICRO_BATCHES
        self.calls += self.training
        return super().forward(x) if step % 2 else x + self.up(self.norm(x))[..., : x.shape[-1]]


class Projection(nn.Module):
    """A matrix that the first layer multiplies with, and the last one with its transpose."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * width, width) / width)

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def tied_layers(width: int = WIDE) -> list[LayerSpec]:
    tied = {"tied_weight_attr": ["weight"]}
    return [
        TiedLayerSpec("matrix", Projection, width, **tied),
        LayerSpec(Block, 2 * width),
        LayerSpec(Block, 2 * width),
        TiedLayerSpec("matrix", Projection, width, forward_fn=lambda own, x: x @ own.weight, **tied),
    ]


class Experts(nn.Module):
    """Two experts with matrices as large as those of a `Block`; each rank has one."""

    def __init__(self, width: int):
        super().__init__()
        self.moe = MoE(width, Block(width), num_experts=2, ep_size=2, use_rts=False, capacity_factor=2.0)

    def forward(self, x):
        return x + self.moe(x)[0]


SPECS = {
    "wide": wide_layers,
    "odd": lambda: wide_layers(width=97),
    "none": lambda: [LayerSpec(layer, WIDE) for layer in (Alternating, Block, Alternating, Block)],
    "tied": tied_layers,
    "small": lambda: [LayerSpec(Block, WIDE), nn.Linear(WIDE, 8), nn.Linear(8, WIDE), nn.Tanh()],
}
"""small: of two stages the second has no matrix that is large enough."""

MIXTURE = {"experts": lambda: [LayerSpec(layer, WIDE) for layer in (Block, Experts, Block)]}
"""For an even number of replicas of one stage, which have different experts."""


def digest(engine) -> str:
    """A hash of this stage's weights."""
    found = hashlib.blake2b(digest_size=8)
    for name, value in sorted(weights(engine).items()):
        found.update(f"{name} {torch.as_tensor(value).double().numpy().tobytes()!r}".encode())
    return found.hexdigest()


def train_steps(engine, steps: int, skipped: int = 0) -> list[str]:
    """The hash of this stage's weights after each of some steps, with data of after `skipped` steps."""
    data = batches(engine.grid.get_data_parallel_id(), next(engine.module.parameters()).dtype, (8, WIDE))
    skip_steps(engine, data, skipped)
    digests = []
    for _ in range(steps):
        engine.train_batch(data)
        digests.append(digest(engine))
    return digests


def train_replicas(
    stages: int,
    config: dict[str, Any],
    steps: int = 4,
    specs: str | Callable[[], list[LayerSpec]] = "wide",
    overflows: Sequence[int] = (),
    **module_options: Any,
) -> dict[str, Any]:
    """Losses, weights and their hash after each step; runs on every rank.

    Args:
        specs: key of `SPECS` or `MIXTURE`, or what makes them.
        overflows: steps in which the loss of the last replica is infinite.
        module_options: of `build`.
    """
    fp16_on_cpu()
    dtypes = {key: torch.bfloat16 if key == "bf16" else torch.float16 for key in ("bf16", "fp16")}
    dtype = next((dtypes[key] for key in dtypes if config.get(key, {}).get("enabled")), torch.float32)
    made = specs() if callable(specs) else (SPECS | MIXTURE)[specs]()
    engine = build(stages, config, made, **module_options)
    replica = engine.grid.get_data_parallel_id()
    data = batches(replica, dtype, (8, 97 if specs == "odd" else WIDE))
    losses, digests, skipped, scales = [], [], [], []
    for step in range(steps):
        infinite = ((x * torch.inf, target) for x, target in data)
        broken = step in overflows and replica == engine.dp_world_size - 1
        losses.append(engine.train_batch(infinite if broken else data).item())
        digests.append(digest(engine))
        skipped.append(engine.skipped_steps)
        scales.append(getattr(engine.optimizer, "loss_scale", 1.0))
    session = getattr(engine, "ds_compress", None)
    traffic = session.gradients or session.tied if session else None
    return {
        "losses": losses,
        "digests": digests,
        "weights": weights(engine),
        "class": type(engine).__name__,
        "stage": engine.stage_id,
        "replica": replica,
        "norm": engine.get_global_grad_norm(),
        "raw": traffic.exchange.sent.raw_bytes if traffic else 0,
        "sent": traffic.exchange.sent.wire_bytes if traffic else 0,
        "skipped": skipped,
        "scales": scales,
        "residuals": [
            (key, value.float().abs().max().item())
            for memory in (traffic.saved().values() if traffic else ())
            for key, value in memory.items()
        ],
    }


def assert_alike(results: list[dict[str, Any]]) -> None:
    """I1: replicas of a stage have bit-identical weights after every step."""
    by_stage: dict[int, list[str]] = {}
    for result in results:
        assert by_stage.setdefault(result["stage"], result["digests"]) == result["digests"]


def run_replicas(stages: int, replicas: int, config: dict[str, Any], *args: Any) -> list[dict[str, Any]]:
    """What `train_replicas` returns on all ranks of so many replicas."""
    return run_ranks(stages * replicas, train_replicas, stages, config, *args)
