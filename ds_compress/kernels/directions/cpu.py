"""Products with directions on the CPU by directions.cpp."""

from typing import Any

import torch
from torch import Tensor

from ds_compress.kernels import native
from ds_compress.kernels.directions import reference
from ds_compress.kernels.native.function import FLAG, FLOATS, SIZE, Buffer, Function

__all__ = reference.__all__

_FACTORS: dict[str, Any] = {
    "values": Buffer(FLOATS, ("rows", "width"), dtype_from="bf16"),
    "bf16": FLAG,
    "rows": SIZE,
    "width": SIZE,
    "rank": range(1, 65),
    "basis": Buffer((torch.float32,), ("rank", "width")),
    "codes": Buffer((torch.int8,), ("rows", "rank")),
    "exponents": Buffer((torch.int8,), ("rows",)),
}
_subtract = Function(
    *("directions", "subtract_product"),
    **_FACTORS,
    dual=Buffer((torch.float32,), ("rank", "width")),
    rest=Buffer(FLOATS, ("rows", "width"), dtype_from="bf16"),
)
_add = Function(*("directions", "add_product"), **_FACTORS)
_project = Function(
    *("directions", "project_rows"),
    values=_FACTORS["values"],
    bf16=FLAG,
    rows=SIZE,
    width=SIZE,
    onto=Buffer(FLOATS, ("rows", "width"), dtype_from="bf16"),
    lengths=Buffer((torch.float32,), ("rows",)),
    sets=FLAG,
)


def subtract_product(m: Tensor, dual: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not native.serves(m.numel()):
        return reference.subtract_product(m, dual, basis)
    values = (m if m.dtype in FLOATS else m.float()).contiguous()
    rest = torch.empty_like(values)
    codes = torch.empty(len(m), len(basis), dtype=torch.int8, device="cpu")
    exponents = torch.empty(len(m), dtype=torch.int8, device="cpu")
    call = _subtract.bind(**_known(values, basis))
    call(values, basis.contiguous(), codes, exponents, dual.contiguous(), rest)
    return rest, codes, exponents


def add_product(rest: Tensor, codes: Tensor, exponents: Tensor, basis: Tensor) -> Tensor:
    if not native.serves(rest.numel()):
        return reference.add_product(rest, codes, exponents, basis)
    call = _add.bind(**_known(rest, basis))
    call(rest, basis.contiguous(), codes.contiguous(), exponents.contiguous())
    return rest


def _known(values: Tensor, basis: Tensor) -> dict[str, Any]:
    rows, width = values.shape
    return {"bf16": values.dtype == torch.bfloat16, "rows": rows, "width": width, "rank": len(basis)}


def project(m: Tensor, onto: Tensor) -> Tensor:
    if not native.serves(m.numel()):
        return reference.project(m, onto)
    values = (m if m.dtype in FLOATS else m.float()).contiguous()
    lengths = torch.empty(len(m), dtype=torch.float32, device="cpu")
    _project_rows(values, onto, lengths, sets=False)
    return lengths


def set_projection(m: Tensor, onto: Tensor, lengths: Tensor) -> Tensor:
    if not native.serves(m.numel()):
        return reference.set_projection(m, onto, lengths)
    _project_rows(m, onto, lengths.float(), sets=True)
    return m


def _project_rows(m: Tensor, onto: Tensor, lengths: Tensor, sets: bool) -> None:
    rows, width = m.shape
    known = {"bf16": m.dtype == torch.bfloat16, "rows": rows, "width": width, "sets": sets}
    _project.bind(**known)(m, onto.to(m.dtype).contiguous(), lengths)
