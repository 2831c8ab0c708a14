"""Whether the Triton kernels serve a GPU: asked once for each device, and said once if they do not."""

import logging
from functools import cache
from types import ModuleType

import torch

from ds_compress.kernels.affine import Grid
from ds_compress.kernels.memory import is_out_of_memory

logger = logging.getLogger(__name__)


@cache
def kernels(device: torch.device) -> ModuleType | None:
    """`ds_compress.kernels.triton` if `device` can run it; None, where plain torch has to do, if not."""
    if device.type != "cuda":
        return None
    try:
        from ds_compress.kernels import triton

        # compiles and launches: a Triton that is too old for our kernels, or finds no C compiler, fails only
        # here
        triton.quantize(torch.zeros(1, 8, dtype=torch.float32, device=device), Grid(bits=8))
    except Exception as error:
        if is_out_of_memory(error):  # with room it would serve
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning(
            "Triton kernels are off on %s, plain torch takes several passes for each: %s", device, reason
        )
        return None
    return triton
