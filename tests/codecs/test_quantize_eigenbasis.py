"""Codec quantize with "rotate": "learned": the eigenbasis of the warm-up, and bits where the variance is."""

import math

import pytest
import torch

from ds_compress.codec import TensorSpec, build
from ds_compress.errors import CompressionError
from ds_compress.kernels import backends
from ds_compress.kernels.backends import reference
from tests.codecs.test_eigenbasis import KINDS, rows_of_kind
from tests.support import messages as captured
from tests.support.codecs import error_of, observed, relative_error, send
from tests.support.messages import low_rank_matrix, with_spectrum


def learned(bits, **options):
    return build({"name": "quantize", "bits": bits, "rotate": "learned", **options})


def rows_of(n, h):
    """Of a warm-up and of a message, with the same spectrum and directions."""
    return with_spectrum(0.9, 2 * n, h).split(n)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_loses_less_than_a_rotation_that_knows_nothing(bits):
    """Of the hidden states of a transformer, in the basis of those that crossed 20 steps before."""
    messages, before = captured.transformer()[0], captured.transformer_before()[0]
    codec = learned(bits)
    ours = [relative_error(send(codec, x, *observed(codec, old)), x) for old, x in zip(before, messages)]
    other = {"name": "quantize", "bits": bits, "hadamard": True, "grid": "gaussian"}
    assert sum(ours) < 0.8 * sum(error_of(other, x) for x in messages)


def test_the_size_is_that_of_the_shape_whatever_was_observed():
    codec, spec = learned(2), TensorSpec((96, 48), torch.float32)
    layout = codec.layout(spec)
    assert layout == (((36, 32), torch.uint8), ((36,), torch.bfloat16), ((8,), torch.int32))
    x = with_spectrum(0.9, 96, 48)
    for warmup in (with_spectrum(decay, 500, 48) for decay in (1.0, 0.9, 0.3)):
        send(codec, x, *observed(codec, warmup))  # compares with the layout


@pytest.mark.parametrize("kind", KINDS)
def test_two_sides_whose_moments_differ_by_rounding_agree(kind):
    generator, x = torch.Generator().manual_seed(0), rows_of_kind(kind).float()
    for bits in (1, 2, 3):
        codec = learned(bits)
        sender, receiver = observed(codec, x)
        key = "quantize.0.forward.48.moment"
        moment = receiver.memory[key]
        noise = torch.randn(moment.shape, generator=generator, dtype=torch.float64) * moment.abs() * 1e-13
        receiver.memory[key] = moment + noise + noise.T
        alone = send(codec, x, *observed(codec, x))
        arrived = send(codec, x, sender, receiver)
        torch.testing.assert_close(arrived, alone, rtol=0, atol=1e-4 * x.abs().max().item())


def test_sides_that_disagree_are_told():
    codec, x = learned(2), with_spectrum(0.9, 256, 32)
    sender, _ = observed(codec, x)
    _, receiver = observed(codec, with_spectrum(0.5, 256, 32))
    parts = codec.encode(x, sender)
    with pytest.raises(CompressionError) as error:
        codec.decode(parts, TensorSpec.of(x), receiver)
    line = str(error.value)
    assert line.startswith("quantize: groups of at least 1, 2, ... bits came as [") and "\n" not in line
    assert line.endswith("the packet is damaged, or the two sides observed other messages")


class OnGpu(torch.Tensor):
    """Says that it is on a GPU, whose values the host does not look at."""

    @property
    def device(self):
        return torch.device("cuda")


def test_on_a_gpu_a_disagreement_becomes_nan():
    codec, x = learned(2), with_spectrum(0.9, 256, 32)
    sender, _ = observed(codec, x)
    _, _, counts = codec.encode(x, sender)
    (plan,) = next(iter(codec._plans.values())).values()
    scales = torch.rand(64)
    same, other = ((counts + change).as_subclass(OnGpu) for change in (0, 1))
    assert torch.equal(plan.agreed(scales, same).as_subclass(torch.Tensor), scales)
    assert plan.agreed(scales, other).as_subclass(torch.Tensor).isnan().all()


def test_all_backends_make_the_same_packet():
    codec, x = learned(3), with_spectrum(0.85, 512, 96)
    sender, receiver = observed(codec, x)
    parts = codec.encode(x, sender)
    runs = {run.bits for plans in codec._plans.values() for plan in plans.values() for run in plan.runs}
    assert runs >= {1, 2, 3, 4, 5, 6}
    with backends.using(reference):
        assert all(map(torch.equal, codec.encode(x, sender), parts))
        decoded = codec.decode(parts, TensorSpec.of(x), receiver)
    assert torch.equal(codec.decode(parts, TensorSpec.of(x), receiver), decoded)


def test_each_tensor_and_direction_has_levels_of_its_own():
    codec, x, g = learned(2), with_spectrum(0.9, 64, 16), with_spectrum(0.8, 64, 16, seed=1)
    sender, receiver = observed(codec, x, position=1)
    for side in (sender, receiver):
        side.direction = "backward"
        codec.observe(g, side)
    send(codec, g, sender, receiver)
    names = ["backward.16.basis", "backward.16.levels", "forward.16.moment"]
    assert sorted(sender.memory) == sorted(receiver.memory) == [f"quantize.1.{name}" for name in names]


@pytest.mark.parametrize("n", [1, 3, 127, 129, 1000])
def test_rows_that_fill_no_group(n):
    codec, (warmup, x) = learned(4), rows_of(1000, 40)
    error = relative_error(send(codec, x[:n], *observed(codec, warmup)), x[:n])
    assert error < (0.5 if n < 128 else 0.1)


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("row", [0, 100, 299])
def test_what_is_not_finite_shows_in_its_row(special, row):
    """And in those that share a group with it."""
    codec, (warmup, x) = learned(1), rows_of(300, 40)
    x[row, 39] = special
    out = send(codec, x, *observed(codec, warmup))
    assert not out[row].isfinite().all()


def test_a_warm_up_of_few_directions_sends_those():
    """The others were never there."""
    codec, x = learned(1), low_rank_matrix(4, 512, 64)
    assert relative_error(send(codec, x, *observed(codec, x)), x) < 0.02
