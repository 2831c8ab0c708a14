"""A boundary with the codec autoencoder, as training uses it."""

import torch

import ds_compress.codecs  # noqa: F401 - registers
from ds_compress.codec import Context, TensorSpec, build


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
