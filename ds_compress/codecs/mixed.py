"""Two code widths in one message (TAH-Quant, arXiv 2506.01352): tiles of high entropy get more bits.

The entropy of a tile is that of |x| / sum |x| over its values: high if magnitudes are equal, low if a few are
much larger. The number of tiles of each width depends on the option `share` alone, so messages have a static
size. One bit per tile gives its width.
"""

import torch
from pydantic import Field
from torch import Tensor

from ds_compress.codec import CodecOptions
from ds_compress.kernels.quantize.bits import pack, packed_size, unpack


class Mixed(CodecOptions):
    """Options of mixed widths."""

    share: float = Field(0.8, ge=0, le=1)
    """Fraction of the tiles with the full width: those of highest entropy."""
    low_bits: int = Field(3, ge=1, le=7)
    """Bits per code in the other tiles."""

    def counts(self, tiles: int) -> tuple[int, int]:
        """Return how many of `tiles` are high and how many low."""
        high = round(self.share * tiles)
        return high, tiles - high


def map_size(tiles: int) -> int:
    """Return the size of the width map of `tiles` tiles, in bytes."""
    return packed_size(tiles + -tiles % 8, bits=1)


def separate(tiles: Tensor, high: int) -> tuple[Tensor, Tensor, Tensor]:
    """Separate the `high` tiles of highest entropy from the others.

    Args:
        tiles: [n, G].

    Returns:
        the map, the high tiles and the others, both in the order they have in `tiles`.

    The map is uint8 [map_size(n)]: 1 for a high tile, packed as in `kernels.quantize.bits`.
    """
    ranked = _entropy(tiles).argsort(descending=True, stable=True)
    is_high = torch.zeros(tiles.shape[0], dtype=torch.uint8, device=tiles.device)
    is_high.index_fill_(0, ranked[:high], 1)
    places = _places(is_high)
    order = torch.empty_like(places).scatter_(0, places, _numbers(is_high))
    padded = torch.nn.functional.pad(is_high, (0, -len(is_high) % 8))
    return pack(padded[None], bits=1)[0], tiles[order[:high]], tiles[order[high:]]


def reunite(tile_map: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Invert `separate`: return the tiles, [n, G], in their original order."""
    is_high = unpack(tile_map[None], bits=1)[0, : len(high) + len(low)]
    return torch.cat([high, low])[_places(is_high)]


def _places(is_high: Tensor) -> Tensor:
    """Return the position of each tile, int64, among the high tiles followed by the low ones."""
    until = is_high.cumsum(0)
    return torch.where(is_high > 0, until - 1, is_high.sum() + _numbers(is_high) - until)


def _numbers(tiles: Tensor) -> Tensor:
    """Return the indices 0 ... n - 1 of the tiles, int64."""
    return torch.arange(len(tiles), dtype=torch.int64, device=tiles.device)


def _entropy(tiles: Tensor) -> Tensor:
    """Return the entropy of |x| / sum |x| of each tile."""
    magnitude = tiles.float().abs()
    total = magnitude.sum(1, keepdim=True)
    return torch.special.entr(magnitude / torch.where(total > 0, total, 1)).sum(1)
