"""Entropy coding by `format` in PyTorch: the specification.

Everything is a tensor, so that the host does not wait for a GPU.
"""

import torch
from torch import Tensor

from ds_compress.kernels.entropy.code_plan import (
    at,
    count,
    exponent_of,
    first_keys,
    keys_of,
    search,
    shift_of,
    symbols_of,
)
from ds_compress.kernels.entropy.dithered import decode_dithered, encode_dithered
from ds_compress.kernels.entropy.format import (
    HIGHEST,
    KEY_SHIFT,
    KEYS,
    LOWEST,
    NOT_FINITE,
    PER_OCTAVE,
    SHIFT_BITS,
    CodeLayout,
    tables,
)
from ds_compress.kernels.entropy.rans import Coder, rans_decode, rans_encode
from ds_compress.kernels.entropy.rows import shift_rows, unshift_rows
from ds_compress.kernels.entropy.words import read_words, write_words

__all__ = ["decode_entropy", "encode_entropy"]


class EntropyCoding:
    """Entropy coding with the rANS coder of a backend."""

    def __init__(self, coder: Coder):
        self._coder = coder

    def encode_entropy(
        self, x: Tensor, frame: CodeLayout, dither: int | None = None, tolerance: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Encode `x` of any float dtype: [frame.numel], or [rows, width], whose rows are shifted.

        Args:
            dither: 64 bits, the key of the dither, if `frame` is dithered.
            tolerance: of rows, see `rows.shift_rows`.

        Returns:
            The words, int16 [frame.words]; and the shifts, int8 [rows], none for a vector.
        """
        shifts = torch.empty(0, dtype=torch.int8, device=x.device)
        if x.dim() == 2:
            x, shifts = shift_rows(x, tolerance)
        bits = x.float().reshape(-1).view(torch.int32)
        exponent = exponent_of(bits)
        if dither is None:
            words = _encode_nearest(self._coder, bits, exponent, frame)
        else:
            words = encode_dithered(self._coder, bits, exponent, frame, dither)
        overflow = torch.zeros_like(words)
        overflow[frame.head].fill_(NOT_FINITE)  # `overflow[...] = ` makes the host wait for the device
        return torch.where(exponent == NOT_FINITE, overflow, words), shifts

    def decode_entropy(
        self,
        words: Tensor,
        frame: CodeLayout,
        dtype: torch.dtype,
        dither: int | None = None,
        shifts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Decode `words`.

        Args:
            dtype: fp32 or bf16.
            dither: see `encode_entropy`.
            shifts: of the rows, int8 [rows]; None: there are none.

        Returns:
            The values, [frame.numel] of `dtype`; and whether `words` are a possible code, a bool of one
            element. If not, all values are nan.
        """
        values, valid = self._decode(words, frame, dtype, dither)
        if shifts is not None:
            unshift_rows(values.view(len(shifts), -1), shifts)
        return values, valid

    def _decode(
        self, words: Tensor, frame: CodeLayout, dtype: torch.dtype, dither: int | None
    ) -> tuple[Tensor, Tensor]:
        if dither is None:
            read = read_words(self._coder, words, frame)
            key = read.escapes & 0x7FFF
            valid = read.valid & ((key < KEYS) & (key > 0)).all()
            middle = _middle(key, read.escapes >> 15)
            value = read.find(_values(read.q, read.step, read.shift), middle)
        else:
            read, value, valid = decode_dithered(self._coder, words, frame, dither)
        finite = read.exponent != NOT_FINITE
        value = value * (read.exponent.clamp(1, NOT_FINITE - 1).int() << 23).view(torch.float32)
        return torch.where(valid & finite, value, torch.nan).to(dtype), valid | ~finite


def _encode_nearest(coder: Coder, bits: Tensor, exponent: Tensor, frame: CodeLayout) -> Tensor:
    keys = keys_of(bits, exponent)
    histogram = count(keys, 2 * KEYS).view(1, 2, KEYS)
    key = torch.arange(2 * KEYS, dtype=torch.int64, device=bits.device)
    escapes = (key % KEYS + (key // KEYS << 15)).to(torch.int16).index_select(0, keys)

    def write(worst_case: bool) -> tuple[Tensor, Tensor]:
        chosen = search(histogram, frame, worst_case)
        q = torch.searchsorted(first_keys(chosen.step, tables(bits.device)), key[:KEYS], right=True)
        symbols = symbols_of(chosen, q).flatten().index_select(0, keys)
        shift = shift_of(histogram, chosen, frame)
        return write_words(coder, chosen, symbols, escapes, exponent, shift, frame)

    words, fits = write(worst_case=False)
    if not (bits.device.type == "cpu" and fits):  # the host of a GPU does not ask
        words = torch.where(fits, words, write(worst_case=True)[0])
    return words


def _middle(key: Tensor, negative: Tensor) -> Tensor:
    """Return the middle of keys, fp32, in units of the exponent."""
    bits = (key + LOWEST * PER_OCTAVE << KEY_SHIFT) + (1 << KEY_SHIFT - 1)
    middle = bits.int().view(torch.float32).clamp(max=HIGHEST)
    return torch.where(negative > 0, -middle, middle)


def _values(q: Tensor, step: Tensor, shift: Tensor) -> Tensor:
    """Return the value of each q, fp32 [tables, SYMBOLS], in units of the exponent."""
    distance = ((q.abs() << SHIFT_BITS) - shift.unsqueeze(1)).clamp(min=0)
    size = (distance.float() * 2.0**-SHIFT_BITS * at(tables(q.device).step, step)).clamp(max=HIGHEST)
    return size * q.sign()


_coding = EntropyCoding(Coder(rans_encode, rans_decode))
encode_entropy, decode_entropy = _coding.encode_entropy, _coding.decode_entropy
