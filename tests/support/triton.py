"""Launch Triton kernels on a GPU or in the interpreter, and compile them for GPUs that are not here."""

import os
from contextlib import contextmanager

import pytest
import torch
import triton
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ds_compress.kernels import backends

ARCHITECTURES = (80, 90)
_DTYPES = {torch.bool: "i1", torch.uint8: "u8", torch.bfloat16: "bf16"}
_DTYPES |= {getattr(torch, f"int{bits}"): f"i{bits}" for bits in (8, 16, 32, 64)}
_DTYPES |= {getattr(torch, f"float{bits}"): f"fp{bits}" for bits in (16, 32, 64)}
_OPTIONS = ("num_warps", "enable_fp_fusion")


class Recorder:
    """Stands in for a kernel: keeps the arguments of its launches."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **named: self.launches.append((args, named))


@contextmanager
def recorded(monkeypatch, *modules):
    """A list that afterwards holds (kernel, positional, named arguments) of every launch from `modules`."""
    recorders, launches = [], []
    with monkeypatch.context() as patch:
        for module in modules:
            for name, value in vars(module).copy().items():
                if isinstance(value, triton.JITFunction):
                    recorders.append(Recorder(value))
                    patch.setattr(module, name, recorders[-1])
        yield launches
    launches.extend((recorder.kernel, *launch) for recorder in recorders for launch in recorder.launches)


def compile_launch(kernel, args, named, architecture):
    """The compiled kernel; raises what the compiler raises."""
    options = {key: named[key] for key in _OPTIONS if key in named}
    values = {**dict(zip(kernel.arg_names, args)), **{k: v for k, v in named.items() if k not in options}}
    assert values.keys() == set(kernel.arg_names), values.keys() ^ set(kernel.arg_names)
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + _DTYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif kernel.params[i].is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "i64" if abs(value) >= 2**31 else "i32"
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def need_device():
    """Skip the module that calls this unless Triton kernels can be launched."""
    if not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
fused = backends.load("triton", backends.ON_GPU)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
EXAMPLES = int(os.environ.get("EXAMPLES", "40"))
SPECIAL = (torch.inf, -torch.inf, torch.nan)


def launched(function, *args, **named):
    """Run `function` with arguments on DEVICE, without a host sync, and return its result on the CPU.

    It runs twice: the first time it may bring constants to the device.
    """
    args = [arg.to(DEVICE) if isinstance(arg, torch.Tensor) else arg for arg in args]
    if INTERPRETED:
        return function(*args, **named)
    function(*args, **named)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = function(*args, **named)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return tuple(part.cpu() for part in result) if isinstance(result, tuple) else result.cpu()
