"""Codec entropy: a constant size whatever comes, fewer bits than other codecs need, damage is noticed."""

import random

import pytest
import torch

from ds_compress.codec import Context, TensorSpec, build
from ds_compress.errors import CompressionError
from ds_compress.kernels.entropy import code_plan
from ds_compress.kernels.entropy.format import LARGEST_NUMEL, STEPS, frame_of
from tests.support import messages as captured
from tests.support.codecs import bits_per_value, error_of, roundtrip
from tests.support.messages import residual_stream

HOSTILE = {
    "normal": torch.randn,
    "sorted": lambda n: torch.randn(n).sort().values,
    "after a ReLU": lambda n: torch.randn(n).relu(),
    "every magnitude there is": lambda n: torch.exp2(torch.rand(n) * 250 - 125),
    "heavy tails": lambda n: torch.empty(n).cauchy_(),
    "two values": lambda n: torch.randint(0, 2, (n,)) * 2.0 - 1,
    "few values": lambda n: torch.randint(-3, 4, (n,)).bfloat16(),
    "uniform": lambda n: torch.rand(n) - 0.5,
    "every key": lambda n: (torch.arange(n) * 977 % 6144 + 26624 << 15).int().view(torch.float32),
    "alternating": lambda n: torch.tensor([1.0, -1e-3, 0.5, 0.03]).repeat(n // 4 + 1)[:n],
    "one outlier": lambda n: torch.randn(n).index_fill_(0, torch.tensor([n // 2]), 1e30),
    "subnormal": lambda n: torch.randn(n) * 2.0**-140,
    "random bits": lambda n: torch.randint(-(2**31), 2**31, (n,)).int().view(torch.float32),
    "constant": lambda n: torch.full((n,), 0.3),
}


@pytest.mark.parametrize(
    "messages",
    [100, pytest.param(300, marks=pytest.mark.extended), pytest.param(10_000, marks=pytest.mark.slow)],
)
def test_many_messages_keep_their_size_and_arrive(messages):
    """Each by a decoder that refuses a code with a word too many; and none is worse than zeros."""
    rng, names = random.Random(0), [*HOSTILE]
    for number in range(messages):
        n = rng.choice([rng.randint(1, 100), rng.randint(100, 1500), rng.randint(1500, 4000)])
        codec = build({"name": "entropy", "bits": rng.uniform(0.1, 6)})
        x = HOSTILE[names[number % len(names)]](n)
        (code,) = codec.encode(x, Context())
        declared = max(min(n, 64) + 16, int(n * codec.options.bits / 16))
        assert code.shape == (declared,) == codec.layout(TensorSpec.of(x))[0][0]
        y = codec.decode((code,), TensorSpec.of(x), Context())
        if x.isfinite().all():
            error = (x.double() - y.double()).norm()
            assert error <= x.double().norm() * (1 + 1e-6) + 2.0**-149 * n**0.5, names[number % len(names)]
        else:
            assert not y.isfinite().any()


def test_the_worst_message_costs_nothing_with_the_coarsest_step():
    """What no finer step fits: all values become 0, which takes one word of a table."""
    for bits in (0.1, 1, 6):
        for n in (1, 63, 64, 1000, 100_000, 2**24, LARGEST_NUMEL):
            frame = frame_of(n, bits)
            assert frame.capacity >= 1 and (n > 64 or frame.capacity >= n + 8)
    n = 4096
    frame = frame_of(n, 0.1)
    histogram = torch.zeros(1, 2, 6144, dtype=torch.int64)
    histogram[:, :, -1] = n // 2  # each of the largest magnitude, of either sign: 1 bit per value, or none
    plan = code_plan.search(histogram, frame, worst_case=True)
    assert plan.words == 1 and plan.reach.tolist() == [[0, 0]] and plan.escapes == 0
    x = torch.ones(n).index_fill_(0, torch.arange(0, n, 2), -1)
    assert not roundtrip({"name": "entropy", "bits": 0.1}, x).any()


def test_a_code_that_comes_out_too_long_is_made_anew():
    """By a step whose code is sure to fit; rare, as the words that states hold pay for what rounding adds."""
    again, codec = 0, build({"name": "entropy", "bits": 1})
    for seed in range(60):
        x = torch.randn(300, generator=torch.Generator().manual_seed(seed))
        frame = frame_of(300, 1)
        (code,) = codec.encode(x, Context())
        keys = code_plan.keys_of(x.view(torch.int32), code_plan.exponent_of(x.view(torch.int32)))
        histogram = torch.bincount(keys, minlength=2 * 6144).view(1, 2, 6144)
        first, second = (code_plan.search(histogram, frame, sure).step.item() for sure in (False, True))
        assert code[frame.head + 1] in (first, second) and second <= first
        again += code[frame.head + 1].item() != first
        assert error_of({"name": "entropy", "bits": 1}, x) < 1
    assert 0 < again < 20


@pytest.mark.parametrize("rounding", ["nearest", "dither"])
@pytest.mark.parametrize("bits", [0.1, 1, 2.5, 6])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 4, 5, 6), (1, 1, 1023), (64, 300)], ids=str)
def test_damaged_codes_are_refused(shape, bits, rounding):
    """Whatever bit is flipped: the code is refused, or it decodes to a tensor; most are refused."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codec = build({"name": "entropy", "bits": bits, "rounding": rounding})
    rng, refused = random.Random(0), 0
    code, *shifts = codec.encode(x, Context())
    for _ in range(40):
        damaged = code.clone()
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(code))] ^= rng.choice([1 << rng.randrange(15), -1, 255])
        try:
            assert codec.decode((damaged, *shifts), TensorSpec.of(x), Context()).shape == x.shape
        except CompressionError as error:
            assert str(error) == "entropy: a damaged code came, no message is coded like that"
            refused += 1
    assert refused >= (25 if x.numel() > 1000 and bits >= 1 else 0)


def test_scale_down_to_the_smallest_normal():
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    x = x * 2.0 ** -x.abs().amax().log2().floor()
    choice = {"name": "entropy", "bits": 2.5}
    plain = roundtrip(choice, x)
    for power in (-126, -125, -60, 60, 126, 127):
        assert torch.equal(roundtrip(choice, x * 2.0**power), plain * 2.0**power), power
        assert roundtrip(choice, x * 2.0**power).isfinite().all()


def test_a_finer_step_with_more_bits():
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    errors = [error_of({"name": "entropy", "bits": bits}, x) for bits in (0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 6)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.025
    constant = error_of({"name": "entropy"}, torch.full((5000,), -0.3))
    assert constant < 2**-9  # a key's width
    assert frame_of(5000, 6).words * 16 == 30_000 and STEPS == 1537


def test_a_tensor_too_large_for_its_sums_is_refused():
    codec = build("entropy")
    refused = codec.refuses(TensorSpec((LARGEST_NUMEL + 1,), torch.float32))
    assert refused == "it has 1,073,741,825 values, allowed: 1,073,741,824; 'quantize' takes any number"
    assert not codec.refuses(TensorSpec((LARGEST_NUMEL,), torch.float32))


FOUR_BITS = {"name": "quantize", "bits": 4, "hadamard": True}
TENTH = {"name": "topk", "indices": "rice", "values": "bf16"}


def mean(measure, choice, messages):
    return sum(measure(choice, x) for x in messages) / len(messages)


@pytest.mark.parametrize(
    "model, direction, bits, other",
    [
        ("transformer", 0, 3.75, FOUR_BITS),
        ("transformer", 1, 3.9, FOUR_BITS),
        *(("transformer", direction, 0.9, TENTH) for direction in (0, 1)),
        ("cnn", 0, 2.0, FOUR_BITS),
        ("cnn", 1, 1.75, FOUR_BITS),
        ("cnn", 0, 0.8, TENTH),
        ("outliers", 0, 3.35, FOUR_BITS),
        ("outliers", 0, 0.9, TENTH),
    ],
)
@pytest.mark.extended
def test_reaches_the_error_of_another_setting_in_fewer_bits(model, direction, bits, other):
    messages = [residual_stream()] if model == "outliers" else getattr(captured, model)()[direction]
    choice = {"name": "entropy", "bits": bits}
    assert mean(bits_per_value, choice, messages) <= bits < mean(bits_per_value, other, messages)
    assert mean(error_of, choice, messages) <= mean(error_of, other, messages)


@pytest.mark.parametrize("bits, ideal", [(1, 0.5906), (2.5, 0.2111), (3.3, 0.1212)])
def test_a_large_message_of_normal_values_is_near_what_an_ideal_coder_makes(bits, ideal):
    """`ideal`: a uniform step, the means of its cells, the entropy of its codes; computed in numpy."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    assert error_of({"name": "entropy", "bits": bits}, x) == pytest.approx(ideal, rel=0.04)
