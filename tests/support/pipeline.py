"""Build small pipelines, layers of all kinds for them, and the same models in `simulate`."""

import contextlib
import copy
import io
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from torch import Tensor, nn

from ds_compress.simulate import announce, simulate
from ds_compress.transport.connections import Connection
from tests.support.calls import wrapped

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


def ds_config(
    block: dict[str, Any] | None = None, replicas: int = 1, micro_batches: int = MICRO_BATCHES, **changes: Any
) -> dict[str, Any]:
    """A DeepSpeed config that computes the same for every number of stages."""
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": micro_batches,
        "train_batch_size": MICRO_BATCH * micro_batches * replicas,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 100000,
        **changes,
    }
    if block is not None:
        config["ds_compress"] = copy.deepcopy(block)
    return config


def alike(codec: Any, feedback: Any = "none", **others: Any) -> dict[str, Any]:
    """A block with the same codec and feedback in both directions."""
    direction = {"codec": codec, "feedback": feedback}
    return {"forward": direction, "backward": direction, **others}


def reusing(density: float, **others: Any) -> dict[str, Any]:
    """A block with TopK, whose gradients are sent where activations were."""
    forward, backward = {"name": "topk", "density": density}, {"name": "topk", "indices": "reuse"}
    return {"forward": {"codec": forward}, "backward": {"codec": backward}, **others}


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
    options = {"loss_fn": loss_fn, "partition_method": "uniform", "seed_layers": True, "topology": topology}
    module = module_class(specs or layers(), **options | module_options)
    parameters = [p for p in module.parameters() if p.requires_grad]
    given = {"config": config, "model_parameters": parameters, "training_data": training_data}
    return deepspeed.initialize(model=module, **given)[0]


def weights(engine) -> dict[str, torch.Tensor]:
    """This stage's weights by global layer name."""
    found = {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}
    return {**found, "start": engine.module._local_start}


def same_weights(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Return whether what `weights` returned of two engines is bit-identical."""
    pairs = ((torch.as_tensor(ours[name]), torch.as_tensor(value)) for name, value in theirs.items())
    return ours.keys() == theirs.keys() and all(torch.equal(*pair) for pair in pairs)


@contextlib.contextmanager
def printed_lines(word: str = "") -> Iterator[list[str]]:
    """Collect the printed lines that hold `word`; the list is filled at the end."""
    lines: list[str] = []
    with contextlib.redirect_stdout(io.StringIO()) as output:
        yield lines
    lines += [line for line in output.getvalue().splitlines() if word in line]


def log_lines() -> list[str]:
    """Return a list that gets every line which ds_compress logs from now on in this process."""
    lines: list[str] = []
    logging.getLogger("ds_compress").addFilter(lambda record: lines.append(record.getMessage()) or True)
    return lines


def skip_steps(engine, data: Iterator[Any], steps: int) -> None:
    """Take from `data` what the first `steps` steps of `engine` were trained on."""
    for _ in range(steps * engine.micro_batches):
        next(data)


def channel_state(engine) -> dict[str, Tensor]:
    """Return a copy of what the channels of this rank remember, by boundary, position and name."""
    return {
        f"{boundary.number}/{position}/{key}": value.clone()
        for boundary in engine.ds_compress.stage.boundaries
        for position, memory in boundary.memory.items()
        for key, value in memory.items()
    }


def sent_bytes(engine) -> int:
    """Return the bytes that this rank has sent so far."""
    return sum(channel.sent.wire_bytes for channel in engine.ds_compress.stage.sending)


def packets_handed_over() -> list[int]:
    """Return a list that gets the size of every uint8 tensor which this process gives to torch to be sent."""
    sizes: list[int] = []

    def count(*args, **kwargs):
        (tensor,) = (arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor))
        sizes.extend([tensor.numel()] if tensor.dtype is torch.uint8 else [])

    dist = torch.distributed
    dist.send, dist.isend, Connection.isend = (
        wrapped(send, count) for send in (dist.send, dist.isend, Connection.isend)
    )
    return sizes


def train(stages: int, config: dict[str, Any], steps: int = 4, **options: Any) -> dict[str, Any]:
    """Losses, final weights and the class of the engine; runs on every rank."""
    dtype = torch.bfloat16 if config.get("bf16", {}).get("enabled") else torch.float32
    engine = build(stages, config, **options)
    data = batches(engine.grid.get_data_parallel_id(), dtype)
    losses = [engine.train_batch(data).item() for _ in range(steps)]
    return {"losses": losses, "weights": weights(engine), "class": type(engine).__name__}


def train_on(
    engine,
    steps: int,
    folder: Any = None,
    start: int = 0,
    evaluates: bool = False,
    prepare: Callable[[int], None] = lambda step: None,
    shape: tuple[int, ...] = (8, WIDTH),
) -> dict[str, list[Any]]:
    """Train from step `start`, loaded from `folder`, on; 0: from the start, saving every step there.

    `prepare` is called with the number of each step. Returns losses, those of evaluations between `prepare`
    and each step, and what this rank has sent in each step.
    """
    data = batches(engine.grid.get_data_parallel_id(), shape=shape)
    if start:
        engine.load_checkpoint(str(folder), tag=f"step{start}")
        skip_steps(engine, data, start)
    found = {"losses": [], "evaluated": [], "sent": []}
    for step in range(start, steps):
        prepare(step)
        if evaluates:
            found["evaluated"].append(engine.eval_batch(batches(shape=shape)).item())
        before = sent_bytes(engine)
        found["losses"].append(engine.train_batch(data).item())
        found["sent"].append(sent_bytes(engine) - before)
        if folder and not start:
            engine.save_checkpoint(str(folder), tag=f"step{step + 1}", save_latest=False)
    return found


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
    data: Iterator,
    loss_fn: Loss = loss_fn,
    micro_batches: int = MICRO_BATCHES,
    lr: float = 0.05,
) -> float:
    """The mean loss over the micro-batches of a step of SGD."""
    model.train()
    loss = _mean_loss(model, data, loss_fn, micro_batches)
    torch.optim.SGD(model.parameters(), lr=lr).step()
    model.zero_grad()
    return loss


def evaluate(model: nn.Module, data: Iterator, micro_batches: int = MICRO_BATCHES) -> float:
    """The mean loss over as many micro-batches as a step has."""
    model.eval()
    with torch.no_grad():
        return _mean_loss(model, data, loss_fn, micro_batches)


def train_simulated(stages: int, config: dict[str, Any], steps: int = 4) -> list[float]:
    """The losses of `tests.support.pipeline.train`."""
    specs = layers()
    model, data = simulated(specs, config, even_cuts(len(specs), stages)), batches()
    return [train_step(model, data) for _ in range(steps)]


def _mean_loss(model: nn.Module, data: Iterator, loss_fn: Loss, micro_batches: int) -> float:
    total = torch.tensor(0.0)
    for x, target, *others in itertools.islice(data, micro_batches):
        announce(model, (x, target, *others))
        loss = loss_fn(model(x), target)
        if model.training:
            (loss / micro_batches).backward()
        total += loss.detach()
    return (total / micro_batches).item()


def boundary_tensors(layers, cuts, x, loss):
    """What crosses whole layers at `cuts` and comes back, found without any of what is tested."""
    forward = []
    for number, layer in enumerate(layers):
        if number in cuts:
            x.retain_grad()
            forward.append(x)
        x = layer(x)
    loss(x).backward()
    return [(x.detach(), x.grad) for x in forward]


class TupleBlock(Block):
    """Knows whether it is the last layer, which returns a tensor; the others return a tuple."""

    def __init__(self, last: bool = False):
        super().__init__()
        self.last = last


class Mixed(TupleBlock):
    """Passes on hidden states, int64 positions, a bool mask, and a small float tensor."""

    def forward(self, inputs):
        if torch.is_tensor(inputs):
            positions = torch.arange(inputs.shape[1]).repeat(len(inputs), 1)
            x = super().forward(inputs)
            return x, positions, positions % 2 == 0, x.mean(dim=(1, 2))
        x, positions, mask, gain = inputs
        x = super().forward(x) * (1 + gain.view(-1, 1, 1)) + 0.01 * (positions * mask).unsqueeze(-1)
        return x if self.last else (x, positions + 1, ~mask, 0.9 * gain)


class Skip(TupleBlock):
    """Passes on two tensors of one size, and a small one."""

    def forward(self, inputs):
        if torch.is_tensor(inputs):
            x = super().forward(inputs)
            return x, x / 2, x.mean(dim=(1, 2))
        x, skip, gain = inputs
        x = super().forward(x) + 0.1 * skip * (1 + gain.view(-1, 1, 1))
        return x if self.last else (x, 0.5 * skip, 0.9 * gain)


class Masked(TupleBlock):
    """Passes on an attention mask in last place, as DeepSpeed's own GPT-2 does."""

    def forward(self, inputs):
        x, mask = (inputs, inputs[..., 0] > 0) if torch.is_tensor(inputs) else inputs
        x = super().forward(x) * (1 + 0.1 * mask.unsqueeze(-1))
        return x if self.last else (x, mask)


class Turned(Block):
    """Swaps the first two dimensions; gloo sends no tensor that is not contiguous, so stock needs a copy."""

    copies = False

    def forward(self, x):
        y = super().forward(x).transpose(0, 1)
        return y.contiguous() if self.copies else y


class CopiedTurned(Turned):
    copies = True


class ParallelBlock(Block):
    """A Block whose hidden units are shared out over the tensor-parallel ranks, two neighbours each."""

    def __init__(self):
        super().__init__()
        ranks = [[first, first + 1] for first in range(0, torch.distributed.get_world_size(), 2)]
        groups = [torch.distributed.new_group(pair) for pair in ranks]
        rank = torch.distributed.get_rank()
        group, own = groups[rank // 2], slice(WIDTH * (rank % 2), WIDTH * (rank % 2 + 1))
        self.up.weight = nn.Parameter(self.up.weight[own].clone())
        self.up.bias = nn.Parameter(self.up.bias[own].clone())
        self.down.weight = nn.Parameter(self.down.weight[:, own].clone())
        self.sums = None, group  # forward, backward

    def forward(self, x):
        own = torch.tanh(self.up(_Summed.apply(self.norm(x), *self.sums))) @ self.down.weight.T
        return x + _Summed.apply(own, *reversed(self.sums)) + self.down.bias


class _Summed(torch.autograd.Function):
    """The sum over the first group; its gradient is the sum over the second one. None: of this rank alone."""

    @staticmethod
    def forward(ctx, x, group, gradients):
        ctx.group = gradients
        return _summed(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return _summed(gradient, ctx.group), None, None


def _summed(x, group):
    if group is None:
        return x
    x = x.clone()
    torch.distributed.all_reduce(x, group=group)
    return x


class Causal(Block):
    """Attention with an additive mask and rotary tables that travel beside the hidden state, as floats."""

    HEADS = 4

    def __init__(self, first: bool = False, last: bool = False):
        super().__init__()
        self.first, self.last = first, last
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    @classmethod
    def layers(cls, count: int) -> list[LayerSpec]:
        return [LayerSpec(cls, first=place == 0, last=place == count - 1) for place in range(count)]

    def forward(self, inputs):
        x, mask, cos, sin = (inputs, *self.tables(inputs)) if self.first else inputs
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = (part * cos + part.roll(1, -1) * sin for part in (q, k))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = super().forward(x + attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x if self.last else (x, mask, cos, sin)

    def tables(self, x):
        """[batch, 1, length, length] of 0 and the lowest number, and two [batch, 1, length, head size]."""
        batch, length, _ = x.shape
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        mask = torch.zeros(batch, 1, length, length).masked_fill(later, torch.finfo(x.dtype).min)
        angles = torch.arange(length)[:, None] / 10 ** torch.linspace(0, 2, WIDTH // self.HEADS)
        tables = [table.expand(batch, 1, -1, -1).clone() for table in (angles.cos(), angles.sin())]
        # DeepSpeed wants a gradient for every float tensor that a stage sends
        return tuple(tensor.requires_grad_(torch.is_grad_enabled()) for tensor in (mask, *tables))
