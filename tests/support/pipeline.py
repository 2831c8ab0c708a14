"""Build small pipelines, and the same models in `simulate`.

A small pipeline to train in tests, the same in every process.

The model of a pipeline in one process, trained as DeepSpeed trains it: equal losses, bit for bit.

What crosses between layers, and what codecs make of it, found without what `advise` measures them with.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from torch import Tensor, nn

from ds_compress.config import DIRECTIONS
from ds_compress.planning.candidates import startable_candidates
from ds_compress.planning.evaluate import REPEATS
from ds_compress.simulate import announce, simulate
from tests.support.codecs import relative_error

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


Loss = Callable[[Tensor, Tensor], Tensor]


def even_cuts(count: int, stages: int) -> list[int]:
    """Where DeepSpeed cuts so many layers when all weigh the same."""
    return [count * stage // stages for stage in range(1, stages)]


def simulated(
    specs: Sequence[LayerSpec], config: dict[str, Any], cuts: Sequence[int], **options: Any
) -> nn.Module:
    """The layers with the weights that a pipeline gives them; DeepSpeed seeds layer i with base seed + i."""
    built = []
    for index, spec in enumerate(specs):
        torch.manual_seed(1234 + index)
        built.append(spec.build())
    return simulate(nn.Sequential(*built), config, cuts, **options)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator,
    loss_fn: Loss = loss_fn,
    micro_batches: int = MICRO_BATCHES,
) -> float:
    """The mean loss over the micro-batches of a step."""
    model.train()
    loss = _mean_loss(model, data, loss_fn, micro_batches)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def evaluate(model: nn.Module, data: Iterator, micro_batches: int = MICRO_BATCHES) -> float:
    """The mean loss over as many micro-batches as a step has."""
    model.eval()
    with torch.no_grad():
        return _mean_loss(model, data, loss_fn, micro_batches)


def train_simulated(stages: int, config: dict[str, Any], steps: int = 4) -> list[float]:
    """The losses of `tests.support.pipeline.train`."""
    specs = layers()
    model = simulated(specs, config, even_cuts(len(specs), stages))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = batches()
    return [train_step(model, optimizer, data) for _ in range(steps)]


def _mean_loss(model: nn.Module, data: Iterator, loss_fn: Loss, micro_batches: int) -> float:
    total = torch.tensor(0.0)
    for x, target, *others in itertools.islice(data, micro_batches):
        announce(model, (x, target, *others))
        loss = loss_fn(model(x), target)
        if model.training:
            (loss / micro_batches).backward()
        total += loss.detach()
    return (total / micro_batches).item()


SEED = 1234


def crossing(layers, cuts, x, loss):
    """What crosses whole layers at `cuts` and comes back, found without any of what is tested."""
    forward = []
    for number, layer in enumerate(layers):
        if number in cuts:
            x.retain_grad()
            forward.append(x)
        x = layer(x)
    loss(x).backward()
    return [(x.detach(), x.grad) for x in forward]


def agree(measured, *micro_batches):
    """Assert that settings without state or partner have the errors of their codecs on the same tensors, cut
    by cut, of each of the micro-batches in turn."""
    blocks = {
        candidate.name: candidate.block
        for candidate in startable_candidates()
        if candidate.name.startswith(("quantize", "entropy", "fp8", "bf16"))
    }
    assert len(blocks) > 10
    for message in measured["messages"]:
        place = {"boundary": message["boundary"], "direction": message["direction"]}
        direction = place["direction"]
        sent = [own[message["boundary"]][DIRECTIONS.index(direction)] for own in micro_batches]
        x = sent[0]
        assert message["tensors"] == [{"shape": list(x.shape), "dtype": str(x.dtype).split(".")[1]}]
        assert message["bytes"] == x.nbytes
        for name, block in blocks.items():
            codec = block[direction]["codec"]  # rotations are others for each micro-batch
            error = max(
                relative_error(codec, sent[n % len(sent)], seed=SEED, micro_batch=n, **place)
                for n in range(REPEATS)
            )
            assert message["settings"][name]["error"] == pytest.approx(error, rel=1e-4)
