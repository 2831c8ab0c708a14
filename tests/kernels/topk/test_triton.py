"""The Triton kernels of TopK against the reference; see quantize/test_triton.py."""

from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_compress.codec import Context, TensorSpec
from ds_compress.codecs import sparse
from ds_compress.config import Config
from ds_compress.kernels import backends
from ds_compress.kernels.backends import reference
from ds_compress.kernels.topk import reference as magnitudes
from ds_compress.kernels.topk import triton as selection
from ds_compress.kernels.topk import triton_order_statistics as ranks
from ds_compress.kernels.topk.reference import as_integers, positions
from ds_compress.kernels.topk.selection import Selection
from tests.support.triton import DEVICE, DTYPES, EXAMPLES, INTERPRETED, SPECIAL, fused, launched, need_device

need_device()


@contextmanager
def small_blocks(sample=magnitudes.SAMPLE):
    """Several programs for each row, and several turns of their loops."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in (
            (selection, "COUNTED", 2),
            (selection, "BLOCK", 64),
            (ranks, "SPAN", 32),
            (ranks, "SAMPLED", 32),
            (ranks, "PROGRAMS", 2),
            (ranks, "ENOUGH", 3),
            (ranks, "CHUNK", 16),
            (ranks, "TILES", 2),
            (magnitudes, "SAMPLE", sample),
        ):
            patch.setattr(module, name, value)
        yield


def assert_selects(select, x, *args, expected):
    """`select` on the device returns the entries of `x` [rows, d] at `expected`."""
    held, values = launched(select, x, *args)
    rows, d = x.shape
    selection = Selection.at(expected, x.numel())
    assert torch.equal(held, selection.bits if rows == 1 or d % 8 == 0 else expected)
    assert_bits_equal(values, selection.gather(x))


def assert_bits_equal(ours, expected):
    assert ours.dtype == expected.dtype and torch.equal(as_integers(ours), as_integers(expected))


@given(
    rows=st.integers(1, 3),
    d=st.one_of(st.integers(1, 300), st.integers(1, 40).map(lambda n: 8 * n)),
    share=st.floats(0, 1),
    sample=st.sampled_from([4, 16, 64, 1024]),
    dtype=DTYPES,
    seed=st.integers(0, 99),
    kind=st.sampled_from(["spread", "tied", "zero", "special"]),
)
@example(rows=2, d=300, share=0.1, sample=16, dtype=torch.bfloat16, seed=0, kind="special")
@example(rows=1, d=1, share=1, sample=16, dtype=torch.float32, seed=0, kind="special")
@settings(max_examples=2 * EXAMPLES, deadline=None)
def test_selection_equals_the_reference(rows, d, share, sample, dtype, seed, kind):
    x = torch.randn(rows, d, generator=torch.Generator().manual_seed(seed))
    x = {
        "spread": x,
        "tied": x.round(),
        "zero": x * 0,
        "special": torch.where(x > 1.5, SPECIAL[seed % 3], x),
    }[kind]
    x = x.to(dtype)
    k = min(d, max(1, round(share * d)))
    with small_blocks(sample):
        memory = torch.empty(rows * k, dtype=x.dtype)
        assert_selects(fused.select_largest, x, k, memory, expected=reference.select_largest(x, k)[0])


def long_rows(dtype, k):
    """[4, 640]: two rows that the sample represents, one where it sees large entries only, one none."""
    x = torch.randn(4, 640, generator=torch.Generator().manual_seed(0)).clamp(-5, 5)
    stride, _, _ = magnitudes.sample_plan(x.shape[1], k)
    x[1, ::stride] += 100 * x[1, ::stride].sign()
    x[2] += 100 * x[2].sign()
    x[2, ::stride] /= 100
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [1, 160, 639])
def test_rows_whose_sample_misleads_are_exact(dtype, k):
    with small_blocks(sample=64):
        x = long_rows(dtype, k)
        assert_selects(fused.select_largest, x, k, expected=reference.select_largest(x, k)[0])


@contextmanager
def loads_of(x):
    """An array that afterwards holds how often each entry of `x` has been loaded by a kernel."""
    interpreter = pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder
    loads, load = np.zeros(x.numel(), dtype=int), interpreter.create_masked_load

    def counted(self, pointers, mask, *args):
        places = (pointers.data[mask.data].astype(np.int64) - x.data_ptr()) // x.itemsize
        np.add.at(loads, places[(places >= 0) & (places < x.numel())], 1)
        return load(self, pointers, mask, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "create_masked_load", counted)
        yield loads


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter counts")
@pytest.mark.parametrize("k, misled", [(1, []), (160, [1, 2]), (639, [])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_how_often_exact_reads_the_tensor(dtype, k, misled):
    """Twice, and for the sample. Rows that the band misses are read again: per key byte, and to count."""
    with small_blocks(sample=64):
        x = long_rows(dtype, k)
        expected = np.full(x.shape, 2)
        expected[misled] += dtype.itemsize + 1
        expected[:, :: magnitudes.sample_plan(x.shape[1], k)[0]] += 2 * dtype.itemsize
        with loads_of(x) as loads:
            fused.select_largest(x, k)
        assert np.array_equal(loads.reshape(x.shape), expected)


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter counts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_how_often_others_read_the_tensor(dtype):
    x = torch.randn(4, 320).to(dtype)
    with small_blocks():
        with loads_of(x) as loads:  # the row is its own sample, which is read for each byte of a key
            held, _ = fused.select_largest(x, 30)
        assert (loads == 2 + dtype.itemsize).all()
        with loads_of(x) as loads:
            fused.gather(x, held, x.shape[0] * 30)
        assert (loads == 1).all()


ALL_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@given(
    n=st.integers(1, 3000), dtype=ALL_DTYPES, special=st.sampled_from((None, *SPECIAL)), packed=st.booleans()
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_entries_are_read_and_put_back_as_in_plain_torch(n, dtype, special, packed):
    x = torch.randn(n).to(dtype)
    chosen = torch.randperm(n)[: n // 2].sort().values
    if special is not None:
        x[n // 3] = special
    selection = Selection.at(chosen, n)
    expected = sparse.gather(x, selection)
    with small_blocks():
        values = launched(fused.gather, x, selection.bits if packed else chosen, n // 2)
        assert_bits_equal(values, expected)
        dense = launched(fused.scatter, values, selection.bits, (n,))
    assert_bits_equal(dense, selection.scatter(expected, (n,)))


@given(n=st.integers(0, 9000), density=st.sampled_from([0, 0.1, 0.5, 1]))
@settings(max_examples=EXAMPLES // 2, deadline=None)
def test_bit_strings_equal_plain_torch(n, density):
    mask = torch.rand(n) < density
    packed, count = reference.pack_bits(mask), int(mask.sum())
    assert torch.equal(launched(fused.pack_bits, mask), packed)
    assert torch.equal(launched(fused.unpack_bits, packed, n), mask)
    with small_blocks():
        assert torch.equal(launched(fused.list_bits, packed, n, count), positions(mask, count))


@pytest.mark.parametrize("count", [0, 5, 66, 67, 100])
def test_a_damaged_bitmask_names_no_entry_that_does_not_exist(count):
    """All bits are set, those behind the last of 67 entries too; `count` is what the layout says."""
    everything, room = torch.full((9,), 255, dtype=torch.uint8), min(count, 67)
    padding = [0] * (count - room)
    with small_blocks():
        assert launched(fused.list_bits, everything, 67, count).tolist() == [*range(room), *padding]
        values = launched(fused.scatter, torch.arange(1.0, count + 1), everything, 67)
        assert values.tolist() == [*range(1, room + 1), *[0] * (67 - room)]
        gathered = launched(fused.gather, values, everything, count)
        assert gathered.tolist() == [*values[:room].tolist(), *padding]


FORWARD = [
    *({"indices": name, "values": "bf16"} for name in ("bitmask", "int16", "int32", "rice")),
    {"rows": "tensor", "density": 0.3},
    {"density": 0.01},
    {"density": 1.0},
    {"values": {"name": "quantize", "bits": 4, "group_size": 64}},
]


def interpreted():
    """The kernels, for CPU tensors too; torch rounds to bfloat16 for the interpreter, which cuts off."""

    def dequantize(parts, grid, dtype, *shape):
        return fused.dequantize(parts, grid, torch.float32, *shape).to(dtype)

    return backends.Backend("interpreted", {**fused.functions, "dequantize": dequantize})


@pytest.mark.parametrize(
    "options, dtype, feedback",
    [
        *((options, torch.bfloat16, "none") for options in FORWARD),
        *(({}, dtype, "none") for dtype in (torch.float32, torch.float16, torch.float64)),
        ({}, torch.float32, "ef_mixed"),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(3, 8, 40), (3, 7, 9)], ids=str)
def test_packets_and_tensors_are_those_of_the_cpu(options, dtype, feedback, shape):
    """Forward, and backward at the entries that forward kept; the packet's memory is reused in between."""
    codecs = Config(
        {
            "forward": {"codec": {"name": "topk", **options}, "feedback": feedback},
            "backward": {"codec": {"name": "topk", "indices": "reuse"}},
        }
    ).codecs(None)
    x, grad = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    bad = grad.clone()
    bad.view(-1)[17] = torch.nan

    def messages(device):
        sender, receiver = Context(), Context()
        for codec, tensor, here, there in (
            (codecs.forward, x, sender, receiver),
            (codecs.backward, grad, receiver, sender),
            (codecs.backward, bad, receiver, sender),
        ):
            tensor = tensor.to(device)
            parts = codec.encode(tensor, here)
            packet = [part.clone() for part in parts]
            yield from (*parts, codec.decode(tuple(packet), TensorSpec.of(tensor), there))
            for part in packet:
                part.view(torch.uint8).fill_(255)
        assert sender.selection.values is None

    with small_blocks(sample=64):
        expected = list(messages("cpu"))
        with backends.using(interpreted()) if INTERPRETED else nullcontext():
            for ours, theirs in zip(messages(DEVICE), expected, strict=True):
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))
