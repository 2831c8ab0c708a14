"""Size and error of the codecs on the benchmark's tensor, as `ds-compress bench` prints them."""

import pytest
import torch

from ds_compress.cli.bench import benchmark_tensor, size_and_error
from ds_compress.codec import build

RICE4 = {"name": "topk", "indices": "rice", "values": {"name": "quantize", "bits": 4, "group_size": 128}}


@pytest.fixture(scope="module")
def x():
    return benchmark_tensor((4, 1024, 1024), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    "choice, most_bits, most_error",
    [
        ({"name": "quantize", "bits": 4, "group_size": 128}, 4.26, 0.22),
        ({"name": "quantize", "bits": 4, "group_size": 128, "hadamard": True}, 4.26, 0.09),
        ({"name": "quantize", "bits": 2, "group_size": 128, "hadamard": True}, 2.26, 0.45),
        ({"name": "quantize", "bits": 8, "group_size": 128}, 8.26, 0.015),
        ({"name": "topk", "density": 0.1, "indices": "bitmask", "values": "bf16"}, 2.61, 0.42),
        ({"name": "topk", "density": 0.1, "indices": "rice", "values": "bf16"}, 2.15, 0.42),
        ({"name": "topk", "density": 0.1, "indices": "reuse", "values": "bf16"}, 1.61, 0.42),
        (RICE4, 1.05, 0.55),
        ({"name": "randomk", "density": 0.1, "values": "bf16"}, 1.61, 0.97),
    ],
    ids=str,
)
def test_figures(choice, most_bits, most_error, x):
    bits, error = size_and_error(build(choice), x)
    assert bits <= most_bits
    assert 0 < error <= most_error


def test_hadamard_halves_the_error(x):
    plain, rotated = ({"name": "quantize", "bits": 4, "hadamard": hadamard} for hadamard in (False, True))
    assert size_and_error(build(plain), x)[1] >= 2 * size_and_error(build(rotated), x)[1]
