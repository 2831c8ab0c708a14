"""The Triton kernels against their specification.

`test_triton` runs this file, under TRITON_INTERPRET=1 where there is no GPU: the variable has to be set before triton
is first imported, and the rest of the suite must not run interpreted.
"""
import os
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_compress.codecs import sparse
from ds_compress.kernels import bitstring, indices, reference, resolve, topk
from ds_compress.kernels import triton as fused
from ds_compress.kernels.selection import Selection
from ds_compress.kernels.triton import selection
from tests.test_cpu_kernels import values

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
EXAMPLES = 40 if INTERPRETED else 300
SPECIAL = (torch.inf, -torch.inf, torch.nan)


def launched(function, *args, **named):
    """What `function` returns on DEVICE for arguments on the CPU, on the CPU; the host must not wait meanwhile."""
    args = [arg.to(DEVICE) if isinstance(arg, torch.Tensor) else arg for arg in args]
    if INTERPRETED:
        return function(*args, **named)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = function(*args, **named)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return tuple(part.cpu() for part in result) if isinstance(result, tuple) else result.cpu()


@contextmanager
def small_blocks():
    """Several programs for each row."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in ((fused.bitstring, "BLOCK", 64), (fused.bitstring, "TILES", 2),
                                    (selection, "BLOCK", 64), (selection, "TILES", 2)):
            patch.setattr(module, name, value)
        yield


def assert_bits_equal(ours, expected):
    assert ours.dtype == expected.dtype and torch.equal(topk.as_integers(ours), topk.as_integers(expected))


def assert_rounded(ours, exact):
    """`ours` is `exact`, fp32, rounded to its own dtype; the interpreter cuts off instead of rounding to bfloat16."""
    if INTERPRETED and ours.dtype == torch.bfloat16:
        torch.testing.assert_close(ours.float(), exact, rtol=2**-7, atol=0, equal_nan=True)
    else:
        torch.testing.assert_close(ours, exact.to(ours.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", range(1, 9))
@given(
    size=st.sampled_from([8, 24, 128, 136]), n=st.integers(0, 40), symmetric=st.booleans(), stochastic=st.booleans(),
    scale_dtype=st.sampled_from([torch.float32, torch.bfloat16]), dtype=DTYPES, out=DTYPES, scale=st.integers(-30, 30),
)
@settings(max_examples=EXAMPLES // 4, deadline=None)
def test_quantize_equals_the_reference(bits, size, n, symmetric, stochastic, scale_dtype, dtype, out, scale):
    if dtype == torch.float16:
        scale //= 10
    groups = (torch.randn(n, size) * 10.0**scale + 10.0**scale).to(dtype)
    if n > 3:
        groups[1], groups[2] = 0, groups[2, 0]
    if symmetric and bits == 1:
        stochastic = True  # the mean magnitude is compared in a test of its own
    generators = [torch.Generator(device).manual_seed(n) if stochastic else None for device in ("cpu", DEVICE)]
    with pytest.MonkeyPatch.context() as patch:
        if stochastic and not INTERPRETED:
            dither = torch.rand(n, size)
            patch.setattr(torch, "rand", lambda shape, generator, device: dither.to(device, non_blocking=True))
        expected = reference.quantize(groups, bits, symmetric, scale_dtype, False, generators[0])
        parts = launched(fused.quantize, groups, bits, symmetric, scale_dtype, False, generators[1])
    for ours, theirs in zip(parts, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    packed, step, *offset = expected
    offset = None if symmetric else offset[0]
    decoded = launched(fused.dequantize, packed, step, offset, bits, False, out)
    assert decoded.dtype == out
    assert_rounded(decoded, reference.dequantize(packed, step, offset, bits))


@given(
    bits=st.integers(1, 8), size=st.sampled_from([8, 32, 128, 512]), symmetric=st.booleans(), dtype=DTYPES,
    scale_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_the_rotation_equals_the_reference(bits, size, symmetric, dtype, scale_dtype):
    groups = torch.randn(9, size).to(dtype)
    if symmetric and bits == 1:
        bits = 2
    expected = reference.quantize(groups, bits, symmetric, scale_dtype, True)
    parts = launched(fused.quantize, groups, bits, symmetric, scale_dtype, True)
    for ours, theirs in zip(parts, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    packed, step, *offset = expected
    offset = offset[0] if offset else None
    decoded = launched(fused.dequantize, packed, step, offset, bits, True)
    assert torch.equal(decoded, reference.dequantize(packed, step, offset, bits, True))


@given(
    bits=st.integers(1, 8), size=st.sampled_from([8, 24, 128]), n=st.integers(1, 20), hadamard=st.booleans(),
    symmetric=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    special=st.sampled_from((None, *SPECIAL)), factor=st.sampled_from([0.0, 1.0, 1024.0]), seed=st.integers(0, 99),
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_error_feedback_in_one_pass_equals_the_reference(
    bits, size, n, hadamard, symmetric, dtype, special, factor, seed
):
    hadamard &= not size & (size - 1)
    if symmetric and bits == 1:
        bits = 2
    groups, residual = values(n, size, dtype, seed, special), values(n, size, torch.float32, seed + 1)
    # the interpreter gets the subnormal numbers of bfloat16 wrong
    groups = torch.where(groups.abs() < torch.finfo(dtype).tiny, 0, groups)
    residual = residual.clamp(-1e36, 1e36)
    residual[0, 0], groups[0, 0] = torch.finfo(torch.float32).max / 1024, torch.finfo(dtype).max
    grid = bits, symmetric, torch.float32, hadamard
    expected, expected_error = reference.quantize_with_error(groups, residual, torch.tensor(factor), *grid)
    parts = launched(
        lambda *args: (lambda parts, error: (*parts, error))(*fused.quantize_with_error(*args, *grid)),
        groups, residual, torch.tensor(factor),
    )
    finite = (groups.isfinite()).all(1)
    for ours, theirs in zip(parts, (*expected, expected_error), strict=True):
        torch.testing.assert_close(ours[finite], theirs[finite], rtol=0, atol=0, equal_nan=True)
    assert not parts[-1][~finite].isfinite().all() or finite.all()


def test_mean_magnitude_is_within_its_bound():
    groups = torch.randn(40, 128)
    packed, step = launched(fused.quantize, groups, 1, True, torch.float32)
    expected, step_expected = reference.quantize(groups, 1, True, torch.float32)
    assert torch.equal(packed, expected)
    assert ((step - step_expected).abs() <= 2 * 7 * 2**-24 * step_expected).all()


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [1, 4, 7])
def test_non_finite_groups_decode_to_non_finite(bits, symmetric, hadamard, special):
    groups = torch.randn(4, 32)
    groups[2, 5] = special
    packed, step, *offset = launched(fused.quantize, groups, bits, symmetric, torch.bfloat16, hadamard)
    decoded = launched(fused.dequantize, packed, step, offset[0] if offset else None, bits, hadamard)
    assert not decoded[2].isfinite().any() or special == torch.inf and not decoded[2].isfinite().all()
    assert decoded[[0, 1, 3]].isfinite().all()


def test_groups_that_are_not_contiguous_or_too_large():
    groups = torch.randn(64, 10).t()
    parts = launched(fused.quantize, groups, 4, False, torch.bfloat16)
    for ours, theirs in zip(parts, reference.quantize(groups, 4, False, torch.bfloat16), strict=True):
        assert torch.equal(ours, theirs)
    groups = torch.randn(2, 2 * fused.groups.MAX_GROUP)
    parts = fused.quantize(groups, 4, False, torch.bfloat16)
    assert torch.equal(parts[0], reference.quantize(groups, 4, False, torch.bfloat16)[0])


@given(
    rows=st.integers(1, 3), d=st.integers(1, 300), share=st.floats(0, 1), dtype=DTYPES, seed=st.integers(0, 99),
    kind=st.sampled_from(["spread", "tied", "zero", "special"]),
)
@example(rows=2, d=300, share=0.1, dtype=torch.bfloat16, seed=0, kind="special")
@settings(max_examples=EXAMPLES, deadline=None)
def test_selection_equals_the_reference(rows, d, share, dtype, seed, kind):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "BLOCK", 64)  # several programs for each row
        patch.setattr(selection, "TILES", 2)
        x = torch.randn(rows, d, generator=torch.Generator().manual_seed(seed))
        x = {"spread": x, "tied": x.round(), "zero": x * 0, "special": torch.where(x > 1.5, torch.inf, x)}[kind]
        size, k = topk.keys(x.to(dtype)), max(1, round(share * d))
        assert torch.equal(launched(selection.exact, size, k), topk.exact_reference(size, k))
        high, low = (topk.kth_largest(size, place) for place in (max(1, k - 20), min(d, k + 20)))
        bounds = (low, high, high + 1, topk.INFINITY[dtype])
        expected = topk.banded_reference(size, bounds, k)
        on_device = tuple(b.to(DEVICE) if isinstance(b, torch.Tensor) else b for b in bounds)
        assert torch.equal(launched(selection.banded, size, on_device, k), expected)


ALL_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@given(n=st.integers(1, 3000), dtype=ALL_DTYPES, special=st.sampled_from((None, *SPECIAL)), packed=st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_entries_are_read_and_put_back_as_in_plain_torch(n, dtype, special, packed):
    x = torch.randn(n).to(dtype)
    chosen = torch.randperm(n)[:n // 2].sort().values
    if special is not None:
        x[n // 3] = special
    selection = Selection.at(chosen, n)
    expected = sparse.gather(x, selection)
    with small_blocks():
        values = launched(lambda x, held: fused.gather(x, Selection(n, n // 2, held)), x,
                          selection.bits if packed else chosen)
        assert_bits_equal(values, expected)
        dense = launched(fused.expand, values, selection.bits, n)
    assert_bits_equal(dense, selection.scatter(expected))


@given(n=st.integers(0, 9000), density=st.sampled_from([0, 0.1, 0.5, 1]))
@settings(max_examples=EXAMPLES // 2, deadline=None)
def test_bit_strings_equal_plain_torch(n, density):
    mask = torch.rand(n) < density
    packed, count = bitstring.pack_bits(mask), int(mask.sum())
    assert torch.equal(launched(fused.pack_bits, mask), packed)
    assert torch.equal(launched(fused.unpack_bits, packed, n), mask)
    with small_blocks():
        assert torch.equal(launched(fused.list_bits, packed, n, count), bitstring.positions(mask, count))


@pytest.mark.parametrize("count", [0, 5, 66, 67, 100])
def test_a_damaged_bitmask_names_no_entry_that_does_not_exist(count):
    """All bits are set, those behind the last of 67 entries too; `count` is what the layout says."""
    everything, room = torch.full((9,), 255, dtype=torch.uint8), min(count, 67)
    padding = [0] * (count - room)
    with small_blocks():
        assert launched(fused.list_bits, everything, 67, count).tolist() == [*range(room), *padding]
        values = launched(fused.expand, torch.arange(1.0, count + 1), everything, 67)
        assert values.tolist() == [*range(1, room + 1), *[0] * (67 - room)]
        gathered = launched(lambda x, held: fused.gather(x, Selection(67, count, held)), values, everything)
        assert gathered.tolist() == [*values[:room].tolist(), *padding]


@pytest.mark.skipif(not INTERPRETED, reason="the GPU needs no override")
def test_a_test_can_override():
    from ds_compress.codec import Context, TensorSpec, build

    x, codec = values(50, 40, torch.float32, 0), build({"name": "quantize", "bits": 3})
    parts = codec.encode(x, Context())
    with resolve.using(fused):
        ours = codec.encode(x, Context())
        decoded = codec.decode(ours, TensorSpec.of(x), Context())
    assert all(torch.equal(a, b) for a, b in zip(parts, ours, strict=True))
    assert torch.equal(decoded, codec.decode(parts, TensorSpec.of(x), Context()))


def test_topk_of_devices_takes_them(monkeypatch):
    monkeypatch.setattr(bitstring, "on_cpu", lambda tensor: False)
    monkeypatch.setattr(topk.gpu, "kernels", lambda device: fused)
    x = torch.randn(2, 100)
    size = topk.keys(x)
    expected = topk.exact_reference(size, 10)
    cut, x = topk.kth_largest(size, 10).to(DEVICE), x.to(DEVICE)
    selected = topk.exact(x, 10)
    assert torch.equal(selected.indices.cpu(), expected)
    assert torch.equal(topk.banded(x, (cut,), 10).indices.cpu(), expected)
    for coder in indices.CODERS.values():
        assert torch.equal(coder.decode(coder.encode(selected), 200, 20).indices.cpu(), expected)
