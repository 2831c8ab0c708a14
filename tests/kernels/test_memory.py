"""Memory of the CPU kernels: used again, never by two at a time."""

import resource
import subprocess
import sys
import threading

import torch

from ds_compress.kernels.memory import scratch


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


def faults_per_allocation() -> float:
    """Page faults for each 64 MiB tensor that is filled and freed, in a process of its own."""
    code = """
import resource, torch
from ds_compress.kernels.memory import retain_freed_memory
retain_freed_memory(1 << 26)
for _ in range(20):  # until the heap has grown
    torch.empty(1 << 24).fill_(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.empty(1 << 24).fill_(1)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 5)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_freed_memory_is_kept():
    pages = (1 << 26) / resource.getpagesize()
    assert faults_per_allocation() < 0.01 * pages
