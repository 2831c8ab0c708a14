"""Which kernels serve a device: the one place that decides."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from ds_compress.kernels import cpu, gpu, reference

_override: ModuleType | None = None


def kernels(device: torch.device) -> ModuleType:
    """The module whose `quantize` and `dequantize` serve tensors on `device`; `reference` specifies them."""
    return _override or (cpu if device.type == "cpu" else gpu.kernels(device) or reference)


@contextmanager
def using(module: ModuleType) -> Iterator[None]:
    """Let `module` serve all devices; for tests."""
    global _override
    _override, before = module, _override
    try:
        yield
    finally:
        _override = before
