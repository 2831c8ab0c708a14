"""A small pipeline to train in tests, the same in every process."""

import copy
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from torch import nn

WIDTH = 32
MICRO_BATCH = 4
MICRO_BATCHES = 4


class Block(nn.Module):
    """A residual step, so that messages look like a transformer's hidden states."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def layers(count: int = 8) -> list[LayerSpec]:
    return [LayerSpec(Block) for _ in range(count)]


def loss_fn(output, target):
    return nn.functional.mse_loss(output.float(), target.float())


def ds_config(block: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A DeepSpeed config that computes the same for every number of stages."""
    replicas = changes.pop("replicas", 1)
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "train_batch_size": MICRO_BATCH * MICRO_BATCHES * replicas,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 100000,
        **changes,
    }
    if block is not None:
        config["ds_compress"] = copy.deepcopy(block)
    return config


def batches(replica: int = 0, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (8, WIDTH)):
    """Endless micro-batches of (input, target)."""
    generator = torch.Generator().manual_seed(100 + replica)
    while True:
        x = torch.randn(MICRO_BATCH, *shape, generator=generator)
        yield x.to(dtype), torch.sin(3 * x)


def build(
    stages: int,
    config: dict[str, Any],
    specs: list[Any] | None = None,
    training_data: Any = None,
    module_class: type = PipelineModule,
    tensor_parallel: int = 1,
    **module_options: Any,
):
    """A DeepSpeed engine of `stages` stages; ranks beyond that are data-parallel replicas."""
    torch.manual_seed(1)
    replicas = torch.distributed.get_world_size() // stages // tensor_parallel
    if tensor_parallel > 1:
        topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor_parallel, num_dp=replicas)
    else:
        topology = PipeDataParallelTopology(num_pp=stages, num_dp=replicas)
    options = {"loss_fn": loss_fn, "partition_method": "uniform", "seed_layers": True, **module_options}
    module = module_class(specs or layers(), topology=topology, **options)
    engine, *_ = deepspeed.initialize(
        model=module,
        config=config,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        training_data=training_data,
    )
    return engine


def weights(engine) -> dict[str, torch.Tensor]:
    """This stage's weights by global layer name."""
    start = engine.module._local_start
    return {name: p.detach().float().clone() for name, p in engine.module.named_parameters()} | {
        "start": start
    }


def train(stages: int, config: dict[str, Any], steps: int = 4, **options: Any) -> dict[str, Any]:
    """Losses, final weights and the class of the engine; runs on every rank."""
    dtype = torch.bfloat16 if config.get("bf16", {}).get("enabled") else torch.float32
    engine = build(stages, config, **options)
    data = batches(engine.grid.get_data_parallel_id(), dtype)
    losses = [engine.train_batch(data).item() for _ in range(steps)]
    return {"losses": losses, "weights": weights(engine), "class": type(engine).__name__}
