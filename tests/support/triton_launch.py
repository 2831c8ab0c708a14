"""Launch Triton kernels on a GPU, or in Triton's interpreter on the CPU; elsewhere tests that import this are
skipped."""

import os

import pytest
import torch
from hypothesis import strategies as st

from ds_compress.kernels import backends

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
fused = backends.load("triton", backends.ON_GPU)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
EXAMPLES = int(os.environ.get("EXAMPLES", "40"))
SPECIAL = (torch.inf, -torch.inf, torch.nan)


def launched(function, *args, **named):
    """What `function` returns on DEVICE for arguments on the CPU, on the CPU; the host must not wait
    meanwhile."""
    args = [arg.to(DEVICE) if isinstance(arg, torch.Tensor) else arg for arg in args]
    if INTERPRETED:
        return function(*args, **named)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = function(*args, **named)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return tuple(part.cpu() for part in result) if isinstance(result, tuple) else result.cpu()
