"""Threads and memory of the CPU kernels: the same bits by any number, memory used again by none at once."""

import os
import resource
import subprocess
import sys
import threading
import time

import pytest
import torch

from ds_compress.kernels.backends import cpu
from ds_compress.kernels.memory import scratch
from ds_compress.kernels.native import function
from ds_compress.kernels.quantize.grid import Grid
from tests.support.codecs import any_grid, assert_same_bits
from tests.support.kernels import flat, passes, stored

PART = 1 << 14
NUMEL = 13 * PART // 4
"""Enough for three parts, which are of several lengths; no other test has tensors of as many."""


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """How many torch has, in a list of one; every look at it adds a 0."""
    number = [1]
    monkeypatch.setattr(function, "PART", PART)
    monkeypatch.setattr(torch, "get_num_threads", lambda: number.append(0) or number[0])
    return number


@pytest.fixture
def alike(threads):
    """That any number of threads comes to what one does, tensors in any nesting."""

    def check(work):
        threads[:] = [1]
        alone = flat(work())
        for count in (2, 3, 100):
            threads[:] = [count]
            assert_same_bits(flat(work()), alone)
            assert len(threads) > 1

    return check


def values(size, dtype=torch.float32, special=None, seed=0):
    """[n, size], with something special in the last group alone."""
    x = torch.randn(NUMEL // size, size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if special is not None:
        x[-1, 3] = special
    return x


@pytest.mark.parametrize("special", [None, torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 24, 128, 512])
@pytest.mark.parametrize("bits, hadamard", [(4, False), (3, False), (5, False), (2, True)])
@pytest.mark.parametrize("dither", [None, 12345])
def test_groups(alike, bits, hadamard, size, dtype, special, dither):
    """Numbers drawn for values included."""
    x, grid = values(size, dtype, special), any_grid(bits, hadamard, size, seed=5)
    alike(lambda: cpu.quantize(x, grid, dither))
    parts = cpu.quantize(x, grid, dither)
    alike(lambda: cpu.dequantize(parts, grid, dtype, dither=dither))


@pytest.mark.parametrize("store", ["fp32", "int8"])
@pytest.mark.parametrize("special", [None, torch.inf, torch.nan])
@pytest.mark.parametrize("size", [32, 128])
def test_messages_that_follow_a_state(alike, size, special, store):
    x, state, grid = values(size, special=special), values(size, seed=1), Grid(4)
    alike(lambda: cpu.quantize_with_residual(x, stored(state, store), 2.0, 0.75, 0.25, grid, size))
    alike(lambda: cpu.quantize_change(x, state.clone(), 2.0, grid, size))
    parts = cpu.quantize(x, grid)
    alike(lambda: cpu.dequantize_change(parts, state.clone(), 2.0, grid, torch.float32))


@pytest.mark.parametrize("special", [None, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_of_feedbacks(alike, dtype, special):
    x, state = values(1, dtype).flatten(), values(1, seed=1).flatten()
    if special:
        x[-1] = special
    for name, arguments in passes(x, state, 2.0, 0.3).items():
        alike(lambda: getattr(cpu, name)(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_directions(alike, dtype):
    x, directions = values(96, dtype), values(96)[:8]
    alike(lambda: cpu.subtract_product(x, directions, directions))
    rest, *coefficients = cpu.subtract_product(x, directions, directions)
    alike(lambda: cpu.add_product(rest.clone(), *coefficients, directions))
    onto, lengths = values(96, dtype, seed=1), cpu.project(rest, x)
    alike(lambda: cpu.project(x, onto))
    alike(lambda: cpu.set_projection(rest.clone(), onto, lengths))


def processor_time(count, threads):
    """Of other threads than this one, as a share of that of all, for long messages."""
    threads[:] = [count]
    x, grid = values(128).repeat(100, 1), Grid(4, hadamard=True)
    cpu.quantize(x, grid)
    whole, own = time.process_time(), time.thread_time()
    for _ in range(10):
        cpu.quantize(x, grid)
    own, whole = time.thread_time() - own, time.process_time() - whole
    return 1 - own / whole


def test_others_work_where_torch_has_them(threads):
    assert processor_time(1, threads) < 0.2 < processor_time(2, threads)


def test_short_messages_start_no_thread(threads):
    """To start one takes longer than they do."""
    x = values(128)
    cpu.quantize(x[: PART // 128], Grid(4))
    assert threads == [1]
    cpu.quantize(x, Grid(4))
    assert threads == [1, 0]


def test_scratch_is_the_same_memory_for_a_role_and_thread():
    first = scratch("a", (3, 4), torch.int32)
    assert first.shape == (3, 4) and first.dtype == torch.int32
    assert scratch("a", (12,), torch.float32).data_ptr() == first.data_ptr()
    assert scratch("b", (12,), torch.float32).data_ptr() != first.data_ptr()
    found = []
    thread = threading.Thread(target=lambda: found.append(scratch("a", (12,), torch.float32)))
    thread.start()
    thread.join()
    assert found[0].data_ptr() != first.data_ptr()


def faults_per_allocation(ranks: int) -> float:
    """Page faults for each 40 MiB tensor that is filled and freed, in a process of its own beside others."""
    code = """
import resource, torch
from ds_compress.kernels.memory import retain_freed_memory
retain_freed_memory(40 << 20)
for _ in range(20):  # until the heap has grown
    torch.empty(10 << 20).fill_(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.empty(10 << 20).fill_(1)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 5)
"""
    environment = {**os.environ, "LOCAL_SIZE": str(ranks)}
    return float(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True))


@pytest.mark.extended
def test_freed_memory_is_kept_where_there_is_enough():
    """Gaps between the blocks of a heap took 7 GB with messages of 256 MiB: a rank was killed where DeepSpeed
    alone needed 4.6 GB."""
    pages = (40 << 20) / resource.getpagesize()
    assert faults_per_allocation(ranks=1) < 0.01 * pages
    assert faults_per_allocation(ranks=10**6) > 0.5 * pages
