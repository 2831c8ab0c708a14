"""Nothing depends on what a program set for its own tensors: default dtype and device, modes, threads."""

import ast
import re
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

import ds_compress
from ds_compress.codec import CODECS, TensorSpec, names
from ds_compress.codecs.message_error import compare
from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.feedback import FEEDBACKS
from ds_compress.kernels import native
from ds_compress.message.channel import Boundary
from ds_compress.message.meters import largest
from tests.support.codecs import assert_same_bits

PACKAGE = Path(ds_compress.__file__).parent

FACTORIES = re.compile(
    r"torch\.(arange|as_tensor|asarray|empty|empty_strided|eye|from_file|full|linspace|logspace|normal|ones|rand"
    r"|randint|randn|randperm|scalar_tensor|tensor|zeros)"
)
"""Functions of torch that take the default dtype, device or both where none is named."""


def test_every_allocation_names_dtype_and_device():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and FACTORIES.fullmatch(ast.unparse(node.func)):
                named = {keyword.arg for keyword in node.keywords}
                assert {"dtype", "device"} <= named, f"{path}:{node.lineno}: {ast.unparse(node)}"


@contextmanager
def changed(setter, value, before):
    """Set something of the process to `value` inside, and back to `before`."""
    setter(value)
    try:
        yield
    finally:
        setter(before)


def default_dtype(dtype):
    return lambda: changed(torch.set_default_dtype, dtype, torch.float32)


AMBIENTS = {
    **{str(dtype): default_dtype(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)},
    "meta": lambda: changed(torch.set_default_device, "meta", None),
    "inference": torch.inference_mode,
    "deterministic": lambda: changed(torch.use_deterministic_algorithms, True, False),
    "3 threads": lambda: changed(torch.set_num_threads, 3, torch.get_num_threads()),
}
SHAPES = [(2, 3, 41), (2, 96, 384)]  # the second one is long: compiled passes serve it
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random(shape, dtype, seed):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def settings():
    """(JSON of a codec, of its feedback) for every example of every codec and for every feedback."""
    for name in names():
        for options in CODECS.find(name, "").examples:
            yield {"name": name, **options}, "none"
    for name in FEEDBACKS.names():
        for codec in ({"name": "quantize", "bits": 4}, {"name": "topk"}, {"name": "fp8", "group_size": 128}):
            yield codec, name


SETTINGS = list(settings())
SLOW = [number for number, (codec, _) in enumerate(SETTINGS) if codec["name"] == "entropy"][1:]
NUMBERS = [
    pytest.param(number, id=str(setting), marks=[pytest.mark.extended] * (number in SLOW))
    for number, setting in enumerate(SETTINGS)
]


@cache
def config_of(number):
    codec, feedback = SETTINGS[number]
    directions = FEEDBACKS.find(feedback, "").directions
    block = {"forward": {"codec": codec, "feedback": feedback}, "warmup_steps": 1, "min_numel": 0}
    try:
        block["backward"] = {"codec": codec, "feedback": feedback if "backward" in directions else "none"}
        return Config(block)
    except CompressionError:  # what is for one direction only
        return Config({**block, "forward": {"codec": "topk"}, "backward": {"codec": codec}})


def messages(number, shape, dtype):
    """What a boundary sends and receives, and measures, in three steps; what both sides remember then."""
    config = config_of(number)
    sender, receiver = (Boundary(0, config) for _ in range(2))
    numbers = torch.arange(7, dtype=torch.int64, device="cpu")
    for step in range(3):
        if config.in_force.sample_ids:
            sender.sample_ids[0] = torch.tensor([0, 1 + step % 2], dtype=torch.int64, device="cpu")
        for source, target in ((sender.forward, receiver.forward), (receiver.backward, sender.backward)):
            x = random(shape, dtype, seed=2 * step + (source is receiver.backward))
            moment = source.message_id(step, 0)
            packet, rest, layout = source.encode((x, numbers), moment)
            message = target.layout_of((TensorSpec.of(x), TensorSpec.of(numbers)), moment)
            outputs = target.decode(packet, message, moment, lambda nbytes, rest=rest: rest)
            measured = largest((x,)), compare((x,), outputs[:1])
            yield from (*layout.packet.views(packet), *outputs, *measured)
    for side in (sender, receiver):
        yield from (side.memory[0][key] for key in sorted(side.memory.get(0, ())))


@cache
def expected(number, shape, dtype):
    return list(messages(number, shape, dtype))


@pytest.mark.parametrize("ambient", AMBIENTS)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_bits_whatever_a_program_sets(ambient, number, shape):
    """A default of bfloat16 was a heap overflow: C++ wrote fp32 to buffers of the default dtype."""
    assert torch.Size(SHAPES[0]).numel() < native.LONG <= torch.Size(SHAPES[1]).numel()
    if ambient == "3 threads" and SETTINGS[number][0]["name"] == "lowrank":
        pytest.skip("the order of sums is the library's")
    for dtype in DTYPES:
        theirs = expected(number, shape, dtype)
        with AMBIENTS[ambient]():
            ours = list(messages(number, shape, dtype))
        assert_same_bits(ours, theirs)
