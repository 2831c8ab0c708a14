"""Passes of feedbacks by feedback.cpp; states are fp32."""

import torch
from torch import Tensor

from ds_compress.kernels.feedback.reference import GROUP
from ds_compress.kernels.native.function import FLOATS, SIZE, Buffer, Function

_STATE = Buffer((torch.float32,), ("n",))
_CODES = Buffer((torch.int8,), ("n",))
_SCALES = Buffer((torch.float32,), ("n",), per=GROUP)

_changed = {
    dtype: Function(
        "feedback",
        f"changed_{name}",
        "n",
        x=Buffer((dtype,), ("n",)),
        state=_STATE,
        factor=float,
        n=SIZE,
        y=Buffer((dtype,), ("n",)),
    )
    for dtype, name in FLOATS.items()
}
_advanced = {
    dtype: Function(
        "feedback",
        f"advanced_{name}",
        "n",
        state=_STATE,
        change=Buffer((dtype,), ("n",)),
        divisor=float,
        n=SIZE,
        made=_STATE,
    )
    for dtype, name in FLOATS.items()
}
_finite = {
    dtype: Function("feedback", f"finite_{name}", "n", x=Buffer((dtype,), ("n",)), n=SIZE)
    for dtype, name in FLOATS.items()
}
_renewed = {
    dtype: Function(
        "feedback",
        f"renewed_{name}",
        "n",
        x=Buffer((dtype,), ("n",)),
        residual=_STATE,
        sent=Buffer((dtype,), ("n",)),
        scale=float,
        share=float,
        rest=float,
        n=SIZE,
        made=_STATE,
    )
    for dtype, name in FLOATS.items()
}
_encode_int8 = Function("feedback", "encode_int8", "n", values=_STATE, n=SIZE, codes=_CODES, scales=_SCALES)
_decode_int8 = Function("feedback", "decode_int8", "n", codes=_CODES, scales=_SCALES, n=SIZE, values=_STATE)


def changed(x: Tensor, state: Tensor, factor: float) -> Tensor:
    """See `reference.changed`; of `x`, fp32 or bf16."""
    y = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    x, state = x.detach().contiguous(), state.detach().contiguous()
    _changed[x.dtype](x=x, state=state, factor=factor, n=x.numel(), y=y)
    return y


def advanced(state: Tensor, change: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
    """See `reference.advanced`; `change` is fp32 or bf16."""
    new = torch.empty(state.shape, dtype=torch.float32, device="cpu")
    state, change = state.detach().contiguous(), change.detach().contiguous()
    finite = _advanced[change.dtype](state=state, change=change, divisor=divisor, n=new.numel(), made=new)
    return new, torch.tensor(bool(finite), dtype=torch.bool, device="cpu")


def finite(x: Tensor) -> Tensor:
    """See `reference.finite`; of fp32 or bf16."""
    found = _finite[x.dtype](x=x.detach().contiguous(), n=x.numel())
    return torch.tensor(bool(found), dtype=torch.bool, device="cpu")


def renewed(
    x: Tensor, residual: Tensor, sent: Tensor, scale: float, share: float, rest: float
) -> tuple[Tensor, Tensor]:
    """See `reference.renewed`; `x` and `sent` are fp32 or bf16."""
    made = torch.empty(residual.shape, dtype=torch.float32, device="cpu")
    x, residual, sent = (tensor.detach().contiguous() for tensor in (x, residual, sent))
    finite = _renewed[x.dtype](
        x=x, residual=residual, sent=sent, scale=scale, share=share, rest=rest, n=made.numel(), made=made
    )
    return made, torch.tensor(bool(finite), dtype=torch.bool, device="cpu")


def encode_int8(value: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.encode_int8`; of fp32."""
    codes = torch.empty(value.shape, dtype=torch.int8, device="cpu")
    scales = torch.empty(-(-value.numel() // GROUP), dtype=torch.float32, device="cpu")
    _encode_int8(values=value.detach().contiguous(), n=value.numel(), codes=codes, scales=scales)
    return codes, scales


def decode_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """See `reference.decode_int8`."""
    values = torch.empty(codes.shape, dtype=torch.float32, device="cpu")
    _decode_int8(codes=codes.contiguous(), scales=scales.contiguous(), n=codes.numel(), values=values)
    return values
