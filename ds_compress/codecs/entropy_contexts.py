"""Codec entropy with "contexts": runs or columns sorted by their size, with tables of their own."""

from torch import Tensor

from ds_compress.codec import Context, TensorSpec
from ds_compress.codecs.entropy_plain import Plain
from ds_compress.codecs.reshape import matrix_shape
from ds_compress.kernels.dispatch import kernels
from ds_compress.kernels.entropy import Frame, frame_of
from ds_compress.kernels.units import CLASSES, RUN, Units

LEAST = 2**12
"""Values of a message that is worth several tables."""

SHORTEST = RUN // 2
"""Values of a unit that is worth the 2 bits that say its class."""


class InContexts(Plain):
    """Runs or columns of values, in four contexts of as many, by falling magnitude: see `kernels.units`."""

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        spec = TensorSpec.of(x)
        units = self._units(spec)
        if units is None:
            return super().encode(x, ctx)
        return (kernels(x.device).encode_units(x.detach().reshape(-1), self._frame(spec, units), units),)

    def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
        units = self._units(spec)
        if units is None:
            return super().decode(parts, spec, ctx)
        frame, words = self._frame(spec, units), parts[0]
        return self._checked(*kernels(words.device).decode_units(words, frame, units, spec.dtype)).view(
            spec.shape
        )

    def _units(self, spec: TensorSpec) -> Units | None:
        """None where their classes would take a share of the words."""
        columns = self.options.contexts == "columns"
        if columns:
            shape = (
                spec.shape if len(spec.shape) < 4 else (spec.shape[0], spec.numel // max(1, spec.shape[0]))
            )
            size, count = matrix_shape(shape)
        else:
            count, size = spec.numel // RUN, RUN
        few = spec.numel < LEAST or size < SHORTEST or count < CLASSES
        return None if few else Units(count, size, columns)

    def _frame(self, spec: TensorSpec, units: Units) -> Frame:
        return frame_of(spec.numel, self.options.bits, units.cuts, taken=units.words)
