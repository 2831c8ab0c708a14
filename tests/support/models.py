"""Layers that pass all kinds of tensors from stage to stage."""

import itertools
from collections.abc import Iterator

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from tests.support.pipeline import MICRO_BATCHES, WIDTH, Block, batches


class Mixed(Block):
    """Passes on hidden states, int64 positions, a bool mask, and a small float tensor."""

    def __init__(self, last: bool = False):
        super().__init__()
        self.last = last

    def forward(self, inputs):
        if torch.is_tensor(inputs):
            positions = torch.arange(inputs.shape[1]).repeat(len(inputs), 1)
            x = super().forward(inputs)
            return x, positions, positions % 2 == 0, x.mean(dim=(1, 2))
        x, positions, mask, gain = inputs
        x = super().forward(x) * (1 + gain.view(-1, 1, 1)) + 0.01 * (positions * mask).unsqueeze(-1)
        return x if self.last else (x, positions + 1, ~mask, 0.9 * gain)


class Skip(Block):
    """Passes on two tensors of one size, and a small one."""

    def __init__(self, last: bool = False):
        super().__init__()
        self.last = last

    def forward(self, inputs):
        if torch.is_tensor(inputs):
            x = super().forward(inputs)
            return x, x / 2, x.mean(dim=(1, 2))
        x, skip, gain = inputs
        x = super().forward(x) + 0.1 * skip * (1 + gain.view(-1, 1, 1))
        return x if self.last else (x, 0.5 * skip, 0.9 * gain)


class Masked(Block):
    """Passes on an attention mask in last place, as DeepSpeed's own GPT-2 does."""

    def __init__(self, last: bool = False):
        super().__init__()
        self.last = last

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
        self.group, own = groups[rank // 2], slice(WIDTH * (rank % 2), WIDTH * (rank % 2 + 1))
        self.up.weight = nn.Parameter(self.up.weight[own].clone())
        self.up.bias = nn.Parameter(self.up.bias[own].clone())
        self.down.weight = nn.Parameter(self.down.weight[:, own].clone())

    def forward(self, x):
        own = torch.tanh(self.up(_Shared.apply(self.norm(x), self.group))) @ self.down.weight.T
        return x + _Sum.apply(own, self.group) + self.down.bias


class _Shared(torch.autograd.Function):
    """What all ranks of the group have, each using it in its own way: gradients add up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """The sum over the group."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


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


def causal_batches(lengths: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless micro-batches, `MICRO_BATCHES` of each length."""
    sources = [batches(shape=(length, WIDTH)) for length in lengths]
    for source in itertools.cycle(sources):
        yield from itertools.islice(source, MICRO_BATCHES)
