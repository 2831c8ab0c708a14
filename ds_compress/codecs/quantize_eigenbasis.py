"""Codec quantize with "rotate": "learned": more bits for coefficients of larger variance."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ds_compress.codec import Context, Layout, Parts, Stability, TensorSpec
from ds_compress.codecs import bounds, eigenbasis
from ds_compress.codecs.eigenbasis import MOST_BITS, EigenbasisCodec, allocate_bits, levels_of
from ds_compress.codecs.mixins import check_entry, parse_size
from ds_compress.codecs.shapes import WIRE_DTYPES, group_shape, split
from ds_compress.errors import CompressionError
from ds_compress.kernels.backends import kernels
from ds_compress.kernels.quantize import gaussian
from ds_compress.kernels.quantize.bits import packed_size
from ds_compress.kernels.quantize.grid import Grid


class EigenbasisQuantize(EigenbasisCodec):
    """Quantizes coefficients of rows in a learned basis with 0 to 8 bits each, exactly `bits` on average.

    Groups are runs of the coefficients by falling variance, the first ones of all rows first, so a group
    holds values of one variance. `allocate_bits` says how many. Up to 4 bits the grid is that of normal
    values, from 5 on a uniform one around 0. The last group is padded with zeros.

    The packet holds the codes of all groups, the widest first; a scale for each group, 0 for those of 0 bits;
    and how many groups have at least 1, 2, ... 8 bits. Both sides know these numbers from what they observed,
    so no host waits for its GPU, and sizes are constant. If the two sides differ all the same, a CPU refuses
    the packet, and on a GPU all values become nan.

    Memory has, beside the basis, KEY.levels, int32 [h]: the variances as `log_levels` counts them. The
    plan of a shape is computed once, which reads them back from a GPU.
    """

    name = "quantize"

    def __init__(self, options: Any):
        super().__init__(options)
        self._plans: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the levels that they follow from

    def layout(self, spec: TensorSpec) -> Layout:
        options = self.options
        groups, size = group_shape(spec, options.group_size)
        return (
            ((groups, packed_size(size, options.bits)), torch.uint8),
            ((groups,), WIRE_DTYPES[options.scale_dtype]),
            ((MOST_BITS,), torch.int32),
        )

    def sent(self, n: int, h: int, ctx: Context) -> int:
        return self._plan(n, h, ctx).sent

    def encode_coefficients(self, coefficients: Tensor, h: int, ctx: Context, out: Parts | None) -> Parts:
        n, device = coefficients.shape[1], coefficients.device
        plan, backend = self._plan(n, h, ctx), kernels(device)
        groups = split(coefficients, self.options.group_size, fill="zeros")
        layout = self.layout(TensorSpec((n, h), torch.float32))
        out = out or tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in layout)
        codes, scales, counts = out
        for run in plan.runs:  # which fill all codes
            backend.quantize(groups[run.groups], self._grid(run.bits), None, run.of(codes, scales))
        scales[plan.runs[-1].groups.stop :] = 0
        counts.copy_(plan.counts)
        return out

    def decode_coefficients(self, parts: Parts, n: int, h: int, ctx: Context) -> Tensor:
        codes, scales, counts = parts
        plan, backend = self._plan(n, h, ctx), kernels(codes.device)
        scales = plan.agreed(scales, counts)
        values = [
            backend.dequantize(run.of(codes, scales), self._grid(run.bits), torch.float32).view(-1)
            for run in plan.runs
        ]
        missing = max(0, plan.sent * n - sum(map(Tensor.numel, values)))
        values.append(torch.zeros(missing, dtype=torch.float32, device=codes.device))
        return torch.cat(values)[: plan.sent * n].view(plan.sent, n)

    def _plan(self, n: int, h: int, ctx: Context) -> "_BitPlan":
        """Return the plan of a message of n rows."""
        levels = ctx.memory[f"{self._key(h, ctx)}.levels"]
        plans = self._plans.setdefault(levels, {})
        if n not in plans:
            plans[n] = _BitPlan.of(levels, n, self.options.group_size, self.options.bits)
        return plans[n]

    def _basis(self, h: int, ctx: Context, device: torch.device) -> Tensor:
        key = self._key(h, ctx)
        variances = eigenbasis.fit(key, h, h, ctx)
        if variances is not None:
            ctx.memory[f"{key}.levels"] = levels_of(variances)
        return ctx.memory[f"{key}.basis"]

    def check_memory(self, memory: Mapping[str, Tensor]) -> None:
        super().check_memory({key: value for key, value in memory.items() if not key.endswith(".levels")})
        for key, value in memory.items():
            stem, _, what = key.rpartition(".")
            if not stem.startswith(f"{self.name}."):
                continue
            if what == "levels":
                check_entry(key, value, torch.int32, shape=(parse_size(stem.rpartition(".")[2]),))
                if (value.diff() > 0).any():
                    raise CompressionError(f"entry {key!r} rises; variances fall")
            if what == "basis" and f"{stem}.levels" not in memory:
                raise CompressionError(f"entry {key!r} came without {stem + '.levels'!r}")

    def stability(self, spec: TensorSpec) -> Stability:
        return Stability(1.0)  # what has 0 bits is lost every time

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        # few rows in the warm-up tell little: at worst all bits go to as few coefficients as they can
        error, options = gaussian.normal_error(gaussian.LARGEST_BITS), self.options
        return bounds.random_part(options.bits / MOST_BITS, error)

    @functools.cached_property
    def _grid(self) -> Any:
        """Return the cached `Grid` of so many bits."""
        scale_dtype = WIRE_DTYPES[self.options.scale_dtype]

        @functools.lru_cache
        def grid(bits: int) -> Grid:
            return Grid(bits, True, scale_dtype, gaussian=bits <= gaussian.LARGEST_BITS)

        return grid


@dataclass(frozen=True)
class _Run:
    """Successive groups with as many bits."""

    bits: int
    groups: slice
    bytes: slice

    def of(self, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return their part of the codes and scales of all groups."""
        count = self.groups.stop - self.groups.start
        return codes.view(-1)[self.bytes].view(count, -1), scales[self.groups]


@dataclass(frozen=True, eq=False)
class _BitPlan:
    """The bits of each group of a message."""

    runs: tuple[_Run, ...]
    """Groups that have bits, widest first."""
    counts: Tensor
    """int32: how many groups have at least 1, 2, ... MOST_BITS bits."""
    sent: int
    """How many coefficients of each row have bits, or share a group with some that have."""

    @classmethod
    def of(cls, levels: Tensor, n: int, size: int, bits: int) -> "_BitPlan":
        """Plan the widths of n rows of coefficients of `levels`, in groups of `size` values."""
        h = len(levels)
        groups = -(-n * h // size)
        # of the ranks in a group the first is the largest
        ranks = torch.arange(groups, dtype=torch.int64, device="cpu") * size // n
        counts = allocate_bits(levels.cpu()[ranks], bits)
        runs, place = [], 0
        for width, (last, first) in reversed([*enumerate(pairwise((*counts, 0)), 1)]):
            if last > first:
                nbytes = (last - first) * packed_size(size, width)
                runs.append(_Run(width, slice(first, last), slice(place, place + nbytes)))
                place += nbytes
        known = torch.tensor(counts, dtype=torch.int32, device=levels.device)
        return cls(tuple(runs), known, min(h, -(-counts[0] * size // n)))

    def agreed(self, scales: Tensor, counts: Tensor) -> Tensor:
        """Return `scales` if the other side has the same `counts`, else nan, which makes all values nan.

        Raises:
            CompressionError: other counts came, to a CPU.
        """
        same = (counts == self.counts).all()
        if counts.device.type != "cpu":
            return torch.where(same, scales, torch.nan)
        if not same:
            raise CompressionError(
                f"quantize: groups of at least 1, 2, ... bits came as {counts.tolist()}, expected "
                f"{self.counts.tolist()}: the packet is damaged, or the two sides observed other messages"
            )
        return scales
