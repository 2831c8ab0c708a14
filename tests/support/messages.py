"""Tensors to send: messages of small trained models, matrices of a rank or a spectrum, hostile values."""

import inspect
import json
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.ranks import once

WIDTH, CONTEXT, BATCH = 64, 64, 16


Messages = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Forward and backward, by cut."""


def transformer() -> Messages:
    """Return hidden states and gradients between the blocks of a byte model trained on Python source."""
    return _shared(_train_transformer)


@cache
def _shared(train: Callable[[], Any]) -> Any:
    """What `train` returns, in one of the workers of pytest."""
    folder = once(train.__name__, lambda folder: torch.save(train(), folder / "messages"))
    return torch.load(folder / "messages")


def _train_transformer() -> Messages:
    text = "".join(map(inspect.getsource, (json, textwrap, inspect))).encode()
    data = torch.tensor(list(text), dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        table = 0.02 * torch.randn(256 + CONTEXT, WIDTH)  # as of GPT-2
        embedding, position = nn.Embedding.from_pretrained(table[:256], False), nn.Parameter(table[256:])
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        blocks = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False).layers
        head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
    parts = nn.ModuleList([embedding, *blocks, head])
    mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)

    def loss(cuts: list[Tensor]) -> Tensor:
        starts = torch.randint(0, len(data) - CONTEXT - 1, (BATCH,), generator=generator)
        tokens = data[starts[:, None] + torch.arange(CONTEXT + 1)]
        x = embedding(tokens[:, :-1]) + position
        for block in blocks:
            x = block(x, src_mask=mask, is_causal=True)
            cuts.append(x)
        return F.cross_entropy(head(x).flatten(0, 1), tokens[:, 1:].flatten())

    return _messages(loss, [*parts.parameters(), position], steps=80, rate=2e-3)


def cnn() -> Messages:
    """Maps after a ReLU, and their gradients, between the groups of a residual network for digits."""
    return _shared(_train_cnn)


def _train_cnn() -> Messages:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, scale_factor=2)
    labels, generator = torch.tensor(digits.target), torch.Generator().manual_seed(0)

    def block(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(inside, outside, 3, 2, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()),
            *(nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)),
        )

    with torch.random.fork_rng():
        torch.manual_seed(0)
        stem = nn.Conv2d(1, 16, 3, 1, 1)
        groups = nn.ModuleList([block(16, 32), block(32, 64), block(64, 64)])
        joins = nn.ModuleList([nn.Conv2d(16, 32, 1, 2), nn.Conv2d(32, 64, 1, 2), nn.Conv2d(64, 64, 1, 2)])
        head = nn.Linear(64, 10)

    def loss(cuts: list[Tensor]) -> Tensor:
        picked = torch.randint(0, len(images), (64,), generator=generator)
        x = stem(images[picked]).relu()
        cuts.append(x)
        for group, join in zip(groups, joins):
            x = (group(x) + join(x)).relu()
            cuts.append(x)
        return F.cross_entropy(head(x.mean((2, 3))), labels[picked])

    parameters = [each for part in (stem, groups, joins, head) for each in part.parameters()]
    forward, backward = _messages(loss, parameters, steps=60, rate=2e-3)
    return forward[:3], backward[:3]


def _messages(loss, parameters, steps, rate):
    """Of step `steps`."""
    optimizer = torch.optim.Adam(parameters, lr=rate)
    for _ in range(steps + 1):
        cuts: list[Tensor] = []
        optimizer.zero_grad()
        value = loss(cuts)
        for cut in cuts:
            cut.retain_grad()
        value.backward()
        optimizer.step()
    return tuple(cut.detach() for cut in cuts), tuple(cut.grad for cut in cuts)


def residual_stream():
    """[4, 1024, 1024] like the hidden state of a transformer: 6 of 1024 channels are 20 times larger."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 1024, 1024, generator=generator)
    x[..., torch.randperm(1024, generator=generator)[:6]] *= 20
    return x


def values(n: int, size: int, dtype: torch.dtype, seed: int, special: float | None = None) -> Tensor:
    """[n, size] of very different magnitudes: constants, zeros, subnormals and `special` among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, size, generator=generator) * torch.exp2(torch.randn(n, 1, generator=generator) * 20)
    x[::7] = x[::7, :1]
    x[::11] = 0
    x[::11, seed % size] = -0.0
    x[::13] *= 1e-30
    x[::19] *= 1e-38
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    x[3::23] = (x[3::23] * most).clamp(-most, most)
    x[4::23, seed % size] = most
    if special is not None:
        x[::17, seed % size] = special
    return x.to(dtype)


def low_rank_matrix(rank, n, h, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, rank, generator=generator) @ torch.randn(rank, h, generator=generator)


def with_spectrum(decay, n, h, seed=0):
    """n x h matrix with singular values near 1, decay, decay^2, ..."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.linalg.qr(torch.randn(h, h, generator=generator)).Q
    return (torch.randn(n, h, generator=generator) * decay ** torch.arange(h)) @ v.T
