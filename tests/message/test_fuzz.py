"""DamagedFile packets: our error in one line, or tensors as expected; no crash, no unbounded memory."""

import copy
import random
import resource

import torch

from ds_compress.codec import MessageId, TensorSpec, names
from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.message.channel import Boundary
from ds_compress.message.packet import HEADER_SIZE
from ds_compress.testing import settings_of
from ds_compress.transport.packet_memory import Packet

MESSAGE_ID = MessageId(step=3, micro_batch=1)
SHAPE = (4, 6, 32)


def messages():
    """For every example of every codec: the receiving side of a boundary, a forward packet, its tensors, what
    follows it."""
    for setting in (setting for name in names() for setting in settings_of(name)):
        try:
            config = Config({"min_numel": 0, "forward": {"codec": setting}})
        except CompressionError:  # options for the backward direction
            continue
        sender, receiver = Boundary(0, config), Boundary(0, config)
        x, ids = torch.randn(SHAPE), torch.arange(7)
        packet, rest, _ = sender.forward.encode((x, ids), MESSAGE_ID)
        yield setting, receiver, packet, (x, ids), rest


def mutated(packet, rng):
    """`packet` with some bits flipped, bytes replaced, or another length."""
    memory = packet.memory.clone()
    how = rng.randrange(5)
    if how < 2:
        for _ in range(rng.randint(1, 8) if how else 1):
            memory[rng.randrange(memory.numel() if how else HEADER_SIZE)] ^= 1 << rng.randrange(8)
    elif how == 2:
        start = rng.randrange(memory.numel())
        length = rng.randint(1, 64)
        memory[start : start + length] = rng.choice([0, 255, rng.randrange(256)])
    elif how == 3:
        memory = memory[: rng.randrange(memory.numel())]
    else:
        memory = torch.cat([memory, torch.randint(0, 256, (rng.randint(1, 64),), dtype=torch.uint8)])
    return Packet(memory)


def fuzz(count, seed):
    """How many of `count` mutated packets were refused, by codec; and how many were decoded."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    cases = list(messages())
    refused, decoded = 0, 0
    for number in range(count):
        name, receiver, packet, (x, ids), rest = cases[number % len(cases)]
        boundary = copy.copy(receiver)
        listener = boundary.forward.as_receiver()
        damaged = mutated(packet, rng)
        damaged_rest = mutated(rest, rng) if rest is not None and rng.random() < 0.5 else rest

        def fetch(nbytes):
            if damaged_rest.nbytes != nbytes:
                raise CompressionError("link: a receive has the size that it was posted with")
            return damaged_rest

        try:
            outputs = listener.decode(damaged, listener.layout_of((x, ids), MESSAGE_ID), MESSAGE_ID, fetch)
        except CompressionError as error:
            assert "\n" not in str(error), (name, error)
            refused += 1
        else:
            assert [*map(TensorSpec.of, outputs)] == [TensorSpec.of(x), TensorSpec.of(ids)], name
            decoded += 1
    return refused, decoded


def test_mutated_packets():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused, decoded = fuzz(10_000, seed=0)
    assert refused > 3000 and decoded > 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
