"""The host waits for nothing that a device computes while messages are encoded and decoded there, and
codecs take little of its memory.

Tensors on "meta" stand for those of a GPU: PyTorch's kernels serve both, and to read one is an error.
"""

import contextlib
import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_compress.codec import CODECS, Context, TensorSpec, build
from ds_compress.feedback import FEEDBACKS
from ds_compress.hf.footprint import FakeTensorMeter
from ds_compress.kernels import backends
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.entropy.format import frame_of, tables
from ds_compress.kernels.entropy.rans import Coded, Coder
from ds_compress.kernels.entropy.reference import EntropyCoding
from tests.support.codecs import goes_with

DEVICE = torch.device("meta")
SHAPE = (4, 16, 64)
WAIT = ("lossless", "randomk")
"""lossless runs on the host; torch cannot draw on "meta"."""
CHOICES = [
    {"name": name, **options}
    for name in CODECS.names()
    if name not in WAIT
    for options in build(name).examples
    if options.get("indices") != "reuse"
]


class Crossings(TorchDispatchMode):
    """Refuses operations on tensors of host and device: a copy between them makes the host wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, made)) if isinstance(each, torch.Tensor)]
        assert len({tensor.device for tensor in tensors}) < 2, func
        return made


def rans_encode(symbols, frequencies, frame):
    """What the kernel of Triton allocates: in PyTorch each step is a dozen operations."""
    shape = frame.blocks, frame.steps, frame.lanes
    states = torch.empty(frame.blocks, frame.lanes, dtype=torch.int64, device=symbols.device)
    words = torch.empty(shape, dtype=torch.int16, device=symbols.device)
    return Coded(states, words, torch.empty_like(words, dtype=torch.bool))


def rans_decode(states, words, places, frequencies, frame, classes=None):
    symbols = torch.empty(frame.numel, dtype=torch.int16, device=words.device)
    return symbols, torch.empty_like(places), torch.empty_like(states)


@pytest.fixture(autouse=True)
def on_device():
    """The operations of PyTorch, but for the loops that a GPU runs in kernels of Triton."""
    coding = EntropyCoding(Coder(rans_encode, rans_decode))
    functions = {name: getattr(coding, name) for name in vars(EntropyCoding) if not name.startswith("_")}
    with backends.using(backends.Backend("device", {**backends.reference.functions, **functions})):
        yield


@pytest.fixture(autouse=True)
def single_entries(monkeypatch):
    """Refuse to assign a number to a single entry: on a GPU torch copies it from the host, and waits.

    Up to its pull request 186482; a slice is filled.
    """
    assign = torch.Tensor.__setitem__

    def refusing(tensor, index, value):
        assert isinstance(value, torch.Tensor) or tensor[index].dim(), "a number for a single entry"
        assign(tensor, index, value)

    monkeypatch.setattr(torch.Tensor, "__setitem__", refusing)


def send_twice(codec, direction="forward", **stash):
    """Encode and decode two messages; only the first may bring constants to the device."""
    memories = {}, {}
    x = torch.empty(SHAPE, dtype=torch.bfloat16, device=DEVICE)

    def send():
        sender, receiver = (
            Context(direction=direction, loss_scale=3.0, memory=memory, stash=dict(stash))
            for memory in memories
        )
        with torch.no_grad():
            y = codec.decode(codec.encode_into(x, sender, None), TensorSpec.of(x), receiver)
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)

    send()
    with Crossings():
        send()


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.extended(keep=5)
def test_codecs(choice):
    """`entropy` waited for each message, nearest and dithered."""
    send_twice(build(choice))


@pytest.mark.parametrize("feedback", [name for name in FEEDBACKS.names() if name not in ("none", "aqsgd")])
@pytest.mark.parametrize(
    "choice", [{"name": "quantize", "group_size": 8}, {"name": "topk", "rows": "tensor"}], ids=str
)
def test_feedbacks(choice, feedback):
    if goes_with(feedback, choice):
        send_twice(FEEDBACKS.build(feedback, "feedback").wrap(build(choice)), "backward")


def test_gradients_along_their_activations():
    codec = build({"name": "entropy", "bits": 2, "rounding": "dither"}).paired_with(build("none"))
    activation = torch.empty(SHAPE, dtype=torch.bfloat16, device=DEVICE)
    assert codec.wants_activation(TensorSpec.of(activation))
    send_twice(codec, "backward", activation=activation)


@pytest.mark.parametrize(
    "choice", [{"bits": 4, "rank": 8}, {"bits": 2, "rounding": "dither"}], ids=["nearest", "dither"]
)
def test_memory_of_entropy(choice):
    """A message of 8,192 tokens of width 4,096 took 4 GB for a moment: 121 bytes a value."""
    codec, spec = build({"name": "entropy", **choice}), TensorSpec((1, 1024, 1024), torch.bfloat16)
    x = torch.empty(spec.shape, dtype=spec.dtype, device=DEVICE)
    for message, limit in (
        (lambda: codec.encode_into(x, Context(), None), 44),
        (lambda: codec.decode(parts, TensorSpec.of(x), Context()), 28),
    ):
        with torch.no_grad(), FakeTensorMeter([]) as memory:
            parts = message()
        assert 4 < memory.peak / x.numel() < limit


def test_only_the_first_run_of_a_kernel_brings_constants(monkeypatch):
    """Tests of kernels that run on a GPU refuse waits of the host. They refused the tables of `entropy`, too,
    which the host copies to a device once: there `make test` would have failed."""
    support = importlib.import_module("tests.support.triton")
    device, modes = kernels(DEVICE), {"error": Crossings(), "default": contextlib.nullcontext()}
    refusing = contextlib.ExitStack()

    def switch(mode):
        refusing.close()
        refusing.enter_context(modes[mode])

    monkeypatch.setattr(support, "INTERPRETED", False)
    monkeypatch.setattr(support, "DEVICE", DEVICE)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", switch)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor)  # there is nothing to copy
    tables.cache_clear()
    words, _ = support.launched(device.encode_entropy, torch.randn(300), frame_of(300, 3.0))
    assert words.device == DEVICE
