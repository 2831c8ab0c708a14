"""Measure the memory in use and the free memory of a GPU or of the host."""

import math
from pathlib import Path

import psutil
import torch

GPU_MARGIN = 0.1
"""Share of a GPU's memory that is left free: its allocator cannot use every gap."""
HOST_MARGIN = 0.5
"""Share of the host's free memory that is left to others: data loaders, the file cache."""


def in_use(device: torch.device) -> float:
    """Return bytes that this process has allocated on `device`; nan if its allocator does not count them."""
    if device.type != "cpu":
        return float(torch.get_device_module(device).memory_allocated(device))
    if not hasattr(psutil, "heap_info"):  # not of glibc
        return math.nan
    found = psutil.heap_info()
    return float(found.heap_used + found.mmap_used)


def allocatable_bytes(device: torch.device) -> float:
    """Return how many more bytes may be allocated.

    On a GPU: above this process's highest use so far. On the CPU: above the current use, by all processes of
    the host together.
    """
    if device.type == "cpu":
        available = float(psutil.virtual_memory().available)
        group = Path("/sys/fs/cgroup")  # of the container that this process runs in
        limit, current = group / "memory.max", group / "memory.current"
        if limit.exists() and limit.read_text().strip() != "max":
            available = min(available, int(limit.read_text()) - int(current.read_text()))
        return (1 - HOST_MARGIN) * max(0.0, available)
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    unused = module.memory_reserved(device) - module.max_memory_allocated(device)
    return max(0.0, free + max(0, unused) - GPU_MARGIN * total)
