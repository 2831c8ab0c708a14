"""Codec quantize with "hadamard": "auto": a rotation for the groups that lose less with one."""

import torch
from torch import Tensor

from ds_compress.codec import Codec, Context, Layout, TensorSpec
from ds_compress.codecs.shapes import join, split

_AT_ONCE = 1 << 10
"""Groups whose errors the caches of a CPU hold meanwhile."""


class EitherWay(Codec):
    """Each group as one of two codecs of equal groups and codes makes it, whichever loses less.

    What is sent are the tensors of the first one. Scales are not negative, so that of a group of the second
    one is sent with the other sign, and nothing more has to say which is which. A second codec that has
    fewer scales for a group than the first one leaves zeros in the place of the others.
    """

    name = "quantize"

    def __init__(self, options: object, plain: Codec, rotated: Codec):
        super().__init__(options)
        self._ways = plain, rotated

    def layout(self, spec: TensorSpec) -> Layout:
        return self._ways[0].layout(spec)

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        spec = TensorSpec.of(x)
        both = [(way, way.encode(x, ctx)) for way in self._ways]
        (_, plain), (_, rotated) = both
        lost = _lost(self._split(x), [self._split(way.decode(parts, spec, ctx)) for way, parts in both])
        turned = lost[1] < lost[0]  # not where one is nan: the first codec shows what is not finite
        codes = torch.where(turned.unsqueeze(1), rotated[0], plain[0])
        scale = torch.where(turned, -rotated[1].abs(), plain[1].abs())
        more = [
            torch.where(turned, rotated[number] if number < len(rotated) else 0, plain[number])
            for number in range(2, len(plain))
        ]
        return codes, scale, *more

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        codes, scale, *more = parts
        numbers = [len(way.layout(spec)) for way in self._ways]
        plain, rotated = (
            self._split(way.decode((codes, scale.abs(), *more)[:number], spec, ctx))
            for way, number in zip(self._ways, numbers)
        )
        values = torch.where(scale.signbit().unsqueeze(1), rotated, plain)
        return join(values, spec, self.options.group_size, self.options.axis)

    def _split(self, x: Tensor) -> Tensor:
        return split(x, self.options.group_size, self.options.axis, "zeros")

    def error_bound(self, spec: TensorSpec) -> float:
        return min(way.error_bound(spec) for way in self._ways)

    def gaussian_error_bound(self, spec: TensorSpec) -> float:
        return min(way.gaussian_error_bound(spec) for way in self._ways)

    def refuses(self, spec: TensorSpec) -> str:
        return self._ways[0].refuses(spec)


def _lost(groups: Tensor, ways: list[Tensor]) -> Tensor:
    """fp32 [ways, groups]: the squared error of each group that is decoded to each of `ways`, over the square
    of its largest magnitude; groups and ways: [groups, size]."""
    some = _AT_ONCE if groups.device.type == "cpu" else max(1, len(groups))
    rows = zip(groups.split(some), *(way.split(some) for way in ways))
    return torch.cat([torch.stack(_lost_of(*each)) for each in rows], dim=1)


def _lost_of(groups: Tensor, *ways: Tensor) -> list[Tensor]:
    groups = groups.float()
    largest = groups.abs().amax(1, keepdim=True)
    unit = torch.where(largest > 0, largest, 1)
    found = []
    for way in ways:
        lost = (groups - way).div_(unit)
        lost = lost.mul_(lost)
        # by halves: no library has a say in the order, and all devices choose alike
        while lost.shape[1] > 8:
            lost = lost[:, : lost.shape[1] // 2] + lost[:, lost.shape[1] // 2 :]
        lost = lost.T.contiguous()  # short rows take a CPU long, and so does turning long ones
        while len(lost) > 1:
            lost = lost[: len(lost) // 2] + lost[len(lost) // 2 :]
        found.append(lost[0])
    return found
