"""Select entries above a threshold that is fitted to the magnitudes, without sorting them.

SIDCo (Abdelmoniem et al., arXiv 2101.10761) with exponential distributions and peaks over thresholds: on a
GPU a few passes over the tensor, where an exact selection takes many more. The fit keeps about as many
entries as it should; for a packet of constant size exactly `k` are sent. It suits gradients: of hidden states
few channels are far larger than a distribution allows for.
"""

import math

import torch
from torch import Tensor

from ds_compress.kernels.topk.selection import Selection

FIRST = 0.25
"""Largest share of the entries that one fit looks for: the tail is fitted anew behind each threshold."""


def thresholds(magnitudes: Tensor, density: float) -> Tensor:
    """Return thresholds that about a share `density` of the `magnitudes` of a row exceeds.

    `magnitudes` are fp32 [rows, d], the thresholds fp32 [rows, 1].
    """
    fits, share = _fits(density)
    threshold = magnitudes.new_zeros(len(magnitudes), 1)
    for _ in range(fits):
        excess = (magnitudes - threshold).clamp_(min=0)
        count = torch.count_nonzero(excess, dim=1)[:, None].clamp(min=1)
        threshold = threshold - math.log(share) * excess.sum(1, keepdim=True) / count
    return threshold


def _fits(density: float) -> tuple[int, float]:
    """Return how often to fit, and the share that each fit looks for."""
    fits = max(1, math.ceil(math.log(density) / math.log(FIRST)))
    return fits, density ** (1 / fits)


def least_share(k: int, d: int) -> float:
    """Return the share of the energy of a row of `d` entries that the `k` selected ones have at least.

    If at most `k` entries are above the threshold, the largest one is kept. If more are, `k` larger than the
    threshold are, which is at least `-log(share) / d` times the norm of the row, or half of that behind
    entries that an earlier fit excluded.
    """
    return 1.0 if k == d else min(1.0, -math.log(_fits(k / d)[1])) ** 2 / (4 * d**2)


def above_threshold(x: Tensor, k: int) -> Selection:
    """Select `k` entries of each row of `x` [rows, d], of any float dtype: those above its threshold.

    If more than `k` are, the first ones; if fewer are, also the first of the others.
    """
    rows, d = x.shape
    magnitudes = x.detach().abs().float()
    is_above = torch.ones_like(x, dtype=torch.bool)
    if k < d:
        largest = magnitudes.amax(1, keepdim=True)
        # of equal entries among zeros, none is above the fit
        threshold = torch.minimum(thresholds(magnitudes, k / d), largest.nextafter(torch.zeros_like(largest)))
        is_above = magnitudes > threshold
    place = torch.where(is_above, is_above.cumsum(1), is_above.sum(1, keepdim=True) + (~is_above).cumsum(1))
    entries = torch.arange(rows * d, dtype=torch.int64, device=x.device).view(rows, d)
    kept = x.new_empty(rows, k + 1, dtype=torch.int64)
    # an entry that is not kept is written behind the others
    kept.scatter_(1, (place - 1).clamp_(max=k), entries)
    return Selection.at(kept[:, :k].sort(dim=1).values.flatten(), rows * d)
