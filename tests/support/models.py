"""Layers that pass all kinds of tensors from stage to stage."""

import torch
from torch import nn

from tests.support.pipeline import WIDTH, Block


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
