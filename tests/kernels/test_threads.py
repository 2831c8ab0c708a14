"""Long tensors in parts, by several threads: the same bits as one makes."""

import time

import pytest
import torch

from ds_compress.kernels import cpu, native
from ds_compress.kernels.affine import Grid
from ds_compress.kernels.native.function import PART
from tests.support.same_bits import assert_same_bits

NUMEL = 13 * PART // 4
"""Enough for three parts, which are of several lengths."""


@pytest.fixture(autouse=True)
def _compiled():
    assert native.wait("quantize", "stateful", "feedback", "float8")


@pytest.fixture(autouse=True)
def _own_number_of_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def by(threads, work):
    torch.set_num_threads(threads)
    return work()


def alike(work):
    """That any number of threads comes to what one does, tensors in any nesting."""
    alone = flat(by(1, work))
    for threads in (2, 3, 100):
        assert_same_bits(flat(by(threads, work)), alone)


def flat(found):
    return [found] if isinstance(found, torch.Tensor) else [entry for each in found for entry in flat(each)]


def values(size, dtype=torch.float32, special=None, seed=0):
    """[n, size], with something special in the last group alone."""
    x = torch.randn(NUMEL // size, size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if special is not None:
        x[-1, 3] = special
    return x


SIZES = (8, 24, 128, 4096)


@pytest.mark.parametrize("special", [None, torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("grid", [Grid(4), Grid(3, symmetric=True), Grid(5, scale_dtype=torch.float32)])
def test_groups(grid, size, dtype, special):
    x = values(size, dtype, special)
    alike(lambda: cpu.quantize(x, grid))
    parts = cpu.quantize(x, grid)
    alike(lambda: cpu.dequantize(parts, grid, dtype))


@pytest.mark.parametrize("gaussian", [False, True])
def test_rotated_groups(gaussian):
    x, grid = values(128), Grid(2, gaussian, hadamard=True, key=5, gaussian=gaussian)
    alike(lambda: cpu.quantize(x, grid))
    parts = cpu.quantize(x, grid)
    alike(lambda: cpu.dequantize(parts, grid))


def test_numbers_drawn_for_values_do_not_depend_on_threads():
    x = values(128)
    alike(lambda: cpu.quantize(x, Grid(4), 12345))


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("special", [None, torch.inf, torch.nan])
@pytest.mark.parametrize("size", [32, 128])
def test_messages_that_follow_a_state(size, special, coded):
    """The residual of all groups is left out where one group, in any part, is not finite."""
    x, state, grid = values(size, special=special), values(size, seed=1), Grid(4)
    kept = cpu.encode_int8(state) if coded else (state,)
    alike(lambda: cpu.quantize_with_residual(x, kept, 2.0, 0.75, 0.25, grid))
    alike(lambda: cpu.quantize_change(x, state, 2.0, grid))
    parts = cpu.quantize(x, grid)
    alike(lambda: cpu.dequantize_change(parts, state, 2.0, grid, torch.float32))


@pytest.mark.parametrize("special", [None, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_of_feedbacks(dtype, special):
    x, state = (values(1, dtype, None).flatten() for _ in range(2))
    if special:
        x[-1] = special
    state = state.float()
    alike(lambda: cpu.changed(x, state, 2.0))
    alike(lambda: cpu.advanced(state, x, 2.0))
    alike(lambda: cpu.finite(x))
    alike(lambda: cpu.blended(state, x.float(), 0.3))
    alike(lambda: cpu.encode_int8(state))
    codes = cpu.encode_int8(state)
    alike(lambda: cpu.decode_int8(*codes))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("size", [8, 100, 128])
def test_short_floats(size, dtype):
    x = values(size)
    alike(lambda: cpu.encode_float8(x, dtype))
    codes, scales = cpu.encode_float8(x, dtype)
    alike(lambda: cpu.decode_float8(codes, scales, dtype, torch.float32))


def processor_time(threads):
    """Of other threads than this one, as a share of that of all, for a long message."""
    torch.set_num_threads(threads)
    x, grid = values(128).repeat(4, 1), Grid(4, hadamard=True)
    cpu.quantize(x, grid)
    whole, own = time.process_time(), time.thread_time()
    for _ in range(10):
        cpu.quantize(x, grid)
    own, whole = time.thread_time() - own, time.process_time() - whole
    return 1 - own / whole


def test_others_work_where_torch_has_them():
    assert processor_time(1) < 0.2 < processor_time(2)


def test_short_messages_start_no_thread(monkeypatch):
    """To start one takes longer than they do."""
    asked = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked.append(1) or 2)
    x = values(128)[: PART // 128]
    cpu.quantize(x, Grid(4))
    assert not asked
    cpu.quantize(x.repeat(2, 1), Grid(4))
    assert asked
