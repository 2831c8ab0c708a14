"""What a backend is tried with before it serves a device: all of it, and by the bits it gives."""

import pytest
import torch

from ds_compress.kernels import backends
from ds_compress.kernels.backends import cpu, reference

CPU = torch.device("cpu")


def backend_with(**functions):
    """The reference as a backend of its own, with other `functions`."""
    return backends.Backend("changed", {**reference.functions, **functions})


@pytest.mark.parametrize("backend", [reference, cpu], ids=lambda backend: backend.name)
def test_what_gives_the_right_bits_passes(backend):
    backends.self_test(backend, CPU)


FAMILY_OF = {
    "quantize": "quantize",
    "dequantize": "quantize",
    "quantize_with_residual": "feedback",
    "pack_bits": "bit strings",
    "unpack_bits": "bit strings",
    "list_bits": "bit strings",
    "select_largest": "selection",
    "gather": "selection",
    "scatter": "selection",
    "encode_entropy": "entropy coding",
    "decode_entropy": "entropy coding",
}


@pytest.mark.parametrize("name, family", FAMILY_OF.items())
def test_a_kernel_that_fails_is_found_and_its_family_named(name, family):
    """Only quantization was tried: a selection that did not compile stopped the first message."""

    def failing(*arguments):
        raise ValueError("no such instruction\nand more")

    with pytest.raises(RuntimeError, match=rf"^{family}: no such instruction$"):
        backends.self_test(backend_with(**{name: failing}), CPU)


@pytest.mark.parametrize("name, family", FAMILY_OF.items())
def test_other_bits_are_found(name, family):
    def wrong(*arguments):
        result = getattr(reference, name)(*arguments)
        return _spoilt(result) if isinstance(result, torch.Tensor) else (_spoilt(result[0]), *result[1:])

    with pytest.raises(RuntimeError, match=f"^{family}: its bits differ from those of PyTorch$"):
        backends.self_test(backend_with(**{name: wrong}), CPU)


def _spoilt(part):
    """With another last value; of a nested result the first tensor's."""
    if isinstance(part, tuple):
        return (_spoilt(part[0]), *part[1:])
    part = part.clone()
    last = part.view(-1)[-1:]
    last.copy_(last == 0)
    return part
