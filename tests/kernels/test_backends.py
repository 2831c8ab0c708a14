"""One backend serves a device; all have the functions of the reference, and are tried before they serve."""

import functools
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

from ds_compress.kernels import backends, native
from ds_compress.kernels.backends import cpu, reference
from tests.support.codecs import assert_same_bits
from tests.test_ambient import SETTINGS, messages

KERNELS = Path(backends.__file__).parent
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def asked_again():
    """No device has been asked before."""
    forget()
    yield
    forget()


def forget():
    backends.kernels.cache_clear()
    backends.on_gpu.cache_clear()


@pytest.mark.parametrize("name, algorithms", [("cpu", backends.ALGORITHMS), ("triton", backends.ON_GPU)])
def test_backends_have_the_same_functions(name, algorithms):
    if name == "triton":
        pytest.importorskip("triton")
    backend = backends.load(name, algorithms)
    assert backend.functions.keys() == reference.functions.keys()
    for operation, function in backend.functions.items():
        assert inspect.signature(function) == inspect.signature(reference.functions[operation]), operation


def test_the_page_of_operations_is_complete():
    """backends.py lists each with its arguments."""
    listed = dict(re.findall(r"^    (\w+)\((.*?)\)", backends.__doc__, re.MULTILINE))
    assert listed == {
        operation: ", ".join(inspect.signature(function).parameters)
        for operation, function in reference.functions.items()
    }


def rooms_entered(function):
    """What `function` returns, and the packages and modules of `kernels` whose functions it calls."""
    found = set()

    def look(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(KERNELS):
            found.update((path.parent.name, path.stem.partition("_")[0]))

    sys.setprofile(look)
    try:
        return function(), found
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=lambda number: str(SETTINGS[number]))
def test_the_override_reaches_every_codec_and_feedback(number, monkeypatch):
    """It reached quantization alone: to see the plain torch of a GPU the others were patched one by one."""
    monkeypatch.setattr(native, "LONG", 0)
    sent = functools.partial(messages, number, (2, 3, 41), torch.float32)
    with backends.using(backend_with()):
        ours, entered = rooms_entered(lambda: list(sent()))
    assert not entered & {"cpu", "native", "triton"}
    if SETTINGS[number][0].items() >= {"name": "entropy", "rank": 8}.items():
        return  # backends round products differently
    assert_same_bits(ours, sent())


def test_the_override_ends_and_can_be_nested():
    backend = backend_with()
    assert backends.kernels(CPU) is cpu
    with backends.using(reference):
        assert backends.kernels(CPU) is backends.kernels(CUDA) is reference
        with backends.using(backend):
            assert backends.kernels(CPU) is backend
        assert backends.kernels(CPU) is reference
    assert backends.kernels(CPU) is cpu


def test_asking_again_costs_no_call():
    backends.kernels(CPU)
    assert rooms_entered(lambda: backends.kernels(CPU)) == (cpu, set())


def test_without_triton_plain_torch_serves_gpus_and_says_so_once(monkeypatch, caplog, asked_again):
    monkeypatch.setitem(sys.modules, "ds_compress.kernels.quantize.triton", None)
    for _ in range(2):
        assert backends.kernels(CUDA) is backends.kernels(CUDA) is reference
        with backends.using(cpu):
            assert backends.kernels(CUDA) is cpu
    assert len(caplog.records) == 1 and "Triton kernels are off on cuda:0" in caplog.text


def test_kernels_that_work_are_used_without_the_others(monkeypatch, caplog, asked_again):
    """Triton 3.1 and 3.2, those of torch 2.5 and 2.6, do not compile the kernels of quantize. Those of
    entropy were switched off with them, and thousands of launches of PyTorch coded each message."""
    entropy = pytest.importorskip("ds_compress.kernels.entropy.triton")
    monkeypatch.setitem(sys.modules, "ds_compress.kernels.quantize.triton", None)
    monkeypatch.delitem(sys.modules, "ds_compress.kernels.feedback.triton", raising=False)
    tested = []
    monkeypatch.setattr(backends, "self_test", lambda backend, device, examples: tested.extend(examples))
    used = backends.kernels(CUDA)
    assert tested == ["entropy coding"]
    assert (used.encode_entropy, used.quantize) == (entropy.encode_entropy, reference.quantize)
    assert used.quantize_with_residual is reference.quantize_with_residual
    assert used.name == "triton for entropy"
    assert len(caplog.records) == 1 and "are off on cuda:0, but for entropy, PyTorch" in caplog.text


def test_triton_that_cannot_launch_is_not_used(caplog, asked_again):
    """As here: no driver."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert backends.kernels(CUDA) is reference
    assert len(caplog.records) == 1
    assert backends.kernels(CPU) is cpu


def backend_with(**functions):
    """The reference as a backend of its own, with other `functions`."""
    return backends.Backend("changed", {**reference.functions, **functions})


@pytest.mark.parametrize("backend", [reference, cpu], ids=lambda backend: backend.name)
def test_what_gives_the_right_bits_passes(backend):
    backends.self_test(backend, CPU)


FAMILY_OF = {"quantize": "quantize", "dequantize": "quantize", "quantize_with_residual": "feedback"}
FAMILY_OF |= dict.fromkeys(("encode_entropy", "decode_entropy"), "entropy coding")


@pytest.mark.parametrize("name, family", FAMILY_OF.items())
def test_a_kernel_that_fails_or_is_wrong_is_found_and_its_family_named(name, family):
    """Only quantization was tried: another kernel that did not compile stopped the first message."""

    def failing(*arguments):
        raise ValueError("no such instruction\nand more")

    def wrong(*arguments):
        return _spoilt(getattr(reference, name)(*arguments))

    for kernel, line in (failing, "no such instruction"), (wrong, "its bits differ from those of PyTorch"):
        with pytest.raises(RuntimeError, match=f"^{family}: {line}$"):
            backends.self_test(backend_with(**{name: kernel}), CPU)


def _spoilt(part):
    """With another last value; of a nested result the first tensor's."""
    if isinstance(part, tuple):
        return (_spoilt(part[0]), *part[1:])
    part = part.clone()
    last = part.view(-1)[-1:]
    last.copy_(last == 0)
    return part
