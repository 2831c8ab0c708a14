"""Which kernels serve a device: the one place that decides, and the one override.

A backend is a module with the functions of `reference`: that one, in plain torch, specifies them and runs on
any device; `cpu` is numpy and C++; `triton` is for GPUs. What a backend cannot do better it leaves to the
reference.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch

from ds_compress.kernels import cpu, library, reference
from ds_compress.kernels.memory import is_out_of_memory
from ds_compress.kernels.trial import check

logger = logging.getLogger(__name__)

_override: ModuleType | None = None


@cache  # every message asks: what is found there costs no call of a Python function
def kernels(device: torch.device) -> ModuleType:
    """The backend that serves tensors on `device`."""
    return _override or (cpu if device.type == "cpu" else fused(device) or reference)


def prepare() -> None:
    """Load the compiled kernels, or warn that there are none, before the first message; a GPU needs none."""
    if not torch.cuda.is_initialized():
        library.load()


@contextmanager
def using(backend: ModuleType) -> Iterator[None]:
    """Let `backend` serve all devices; for tests."""
    global _override
    _override, before = backend, _override
    kernels.cache_clear()
    try:
        yield
    finally:
        _override = before
        kernels.cache_clear()


@cache
def fused(device: torch.device) -> ModuleType | None:
    """`ds_compress.kernels.triton` if `device` can run it, else None: asked once for each device, and said
    once if not."""
    if device.type != "cuda":
        return None
    try:
        from ds_compress.kernels import triton

        # compiles and launches: a Triton too old for our kernels, or without a C compiler, fails only here
        check(triton, device)
    except Exception as error:
        if is_out_of_memory(error):  # with room it would serve
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning(
            "Triton kernels are off on %s, plain torch takes several passes for each: %s", device, reason
        )
        return None
    return triton
