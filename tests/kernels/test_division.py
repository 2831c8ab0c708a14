"""Divisions give the same bits on a GPU, where torch multiplies with the inverse of a number.

Tensors of device "meta" have no values, but operations: they show what is divided by what.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_compress.codec import Context, TensorSpec
from ds_compress.config import Config
from ds_compress.feedback import FEEDBACKS
from ds_compress.kernels.numerics import as_divisor
from ds_compress.testing import settings_of

META = torch.device("meta")
CODECS = [setting for name in ("quantize", "fp8", "minmax") for setting in settings_of(name)]


class Inexact(TorchDispatchMode):
    """Notes divisions by a number whose inverse is no float."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            x, number = args[0], args[1]
            of_a_device = isinstance(x, torch.Tensor) and not x.is_cpu and x.is_floating_point()
            if of_a_device and not isinstance(number, torch.Tensor) and math.frexp(number)[0] != 0.5:
                self.found.append(number)
        return function(*args, **(kwargs or {}))


def test_such_a_division_is_seen():
    with Inexact() as inexact:
        x = torch.zeros(4, device=META)
        x / 3.0, x.div_(7), x / 4.0, x / torch.full((), 3.0, device=META), torch.zeros(4) / 3.0
    assert inexact.found == [3.0, 7]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("store", ["fp32", "int8"])
@pytest.mark.parametrize("name", sorted({*FEEDBACKS.names()} - {"aqsgd"}))  # which divides nothing
def test_messages_are_divided_by_tensors(name, store, codec):
    """Under a loss scale that is no power of two what a message lost was another number on a GPU."""
    feedback = {"name": name, "dtype": store} if name in ("ef", "loco") else name
    block = {"forward": {"codec": codec, "feedback": feedback}, "warmup_steps": 0}
    codec = Config(block).in_force.codecs(None).forward
    x = torch.zeros(64, 256, device=META)
    sender, receiver = Context(loss_scale=3.0), Context(loss_scale=3.0)
    with Inexact() as inexact:
        for _ in range(2):
            codec.decode(codec.encode(x, sender), TensorSpec.of(x), receiver)
    assert not inexact.found


@pytest.mark.parametrize("number", [1.0, 3.0, 127, 15.0, 1e-3, 65536.0, 2.0**-126])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_same_quotient(number, dtype):
    x = torch.randn(10_000, dtype=dtype) * 2.0 ** torch.randint(-100, 100, (10_000,))
    there = as_divisor(number, x.to(META))
    by = there if isinstance(there, (int, float)) else torch.full((), number, dtype=there.dtype)
    assert torch.equal(x / by, x / as_divisor(number, x)) and torch.equal(x / by, x / number)
