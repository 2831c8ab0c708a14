"""Capture the messages of small models at their cuts.

Messages of small models, caught at their cuts after some steps of training: to measure codecs on.

A boundary with the codec autoencoder, as training uses it.
"""

import inspect
import json
import textwrap
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ds_compress.codecs  # noqa: F401 - registers
from ds_compress.codec import Context, TensorSpec, build

WIDTH, CONTEXT, BATCH = 64, 64, 16


Messages = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Forward and backward, by cut."""


def transformer() -> Messages:
    """Hidden states and their gradients between the blocks of a model of bytes, trained on source code of the
    standard library."""
    return _transformer()[1]


def transformer_before() -> Messages:
    """The same, some steps earlier."""
    return _transformer()[0]


@cache
def _transformer() -> tuple[Messages, Messages]:
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


@cache
def cnn() -> Messages:
    """Maps after a ReLU, and their gradients, between the groups of a residual network for digits."""
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
    forward, backward = _messages(loss, parameters, steps=60, rate=2e-3)[1]
    return forward[:3], backward[:3]


def _messages(loss, parameters, steps, rate):
    """Of step `steps`, and of that 20 earlier."""
    optimizer, found = torch.optim.Adam(parameters, lr=rate), []
    for step in range(steps + 1):
        cuts: list[Tensor] = []
        optimizer.zero_grad()
        value = loss(cuts)
        for cut in cuts:
            cut.retain_grad()
        value.backward()
        optimizer.step()
        if step in (steps - 20, steps):
            found.append((tuple(cut.detach() for cut in cuts), tuple(cut.grad for cut in cuts)))
    return found


class Boundary:
    """Two sides that train: messages by micro-batch, memory and stash as a boundary keeps them."""

    def __init__(self, seed=0, replica=0, **options):
        self.codec = build({"name": "autoencoder", **options})
        self.memories = {}, {}  # forward sender, forward receiver
        self.stashes = {}
        self.fields = {"seed": seed, "replica": replica}

    def send(self, x, direction="forward", micro_batch=0):
        stashes = self.stashes.setdefault(micro_batch, ({}, {}))
        sides = [
            Context(direction=direction, micro_batch=micro_batch, memory=memory, stash=stash, **self.fields)
            for memory, stash in zip(self.memories, stashes)
        ]
        sender, receiver = sides if direction == "forward" else sides[::-1]
        spec = TensorSpec.of(x)
        parts = self.codec.encode(x, sender)
        assert tuple((tuple(part.shape), part.dtype) for part in parts) == self.codec.layout(spec)
        out = self.codec.decode(parts, spec, receiver)
        assert TensorSpec.of(out) == spec
        for part in parts:
            part.fill_(torch.nan)  # the buffer receives the next message
        return out

    def end_step(self, average=lambda gradient: gradient):
        for memory in self.memories:
            self.codec.end_step(memory, average)

    def entry(self, weight, suffix=""):
        """`encoder` or `decoder`, or what belongs to it, from the side that holds it."""
        (found,) = (
            memory[key] for memory in self.memories for key in memory if key.endswith(f".{weight}{suffix}")
        )
        return found

    def snapshot(self):
        return [dict(memory) for memory in self.memories]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(out, x):
    return ((out.double() - x.double()).norm() / x.double().norm()).item()


def same(memories, others):
    return all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        for a, b in zip(memories, others)
    )
