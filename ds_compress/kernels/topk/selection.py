"""Which entries of a tensor are kept: the selection, and how it is made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_compress.kernels.backends import kernels


@dataclass(eq=False)
class Selection:
    """`count` of the `numel` entries of a flat tensor, in the order in which their values travel.

    Stored as indices or as bits, whichever was made first. The other is made when needed and not stored.
    """

    numel: int
    count: int

    entries: Tensor
    """int64 [count]: flat indices; or uint8 [ceil(numel / 8)]: bits, of ascending entries (see
    `reference`)."""

    values: Tensor | None = None
    """[count]: the kept entries, if the kernel that selected them wrote them too; None after `take`."""

    @classmethod
    def at(cls, indices: Tensor, numel: int) -> "Selection":
        """Return the selection of flat indices, int64 [count]. Coders need them distinct and ascending;
        `gather` and `scatter` do not."""
        return cls(numel, indices.numel(), indices)

    @classmethod
    def from_packet(cls, bits: Tensor, numel: int, count: int) -> "Selection":
        """Return the selection of bits in a packet, whose memory will be used again."""
        return cls(numel, count, kernels(bits.device).copy_bits(bits, numel, count))

    @classmethod
    def joined(cls, selections: Sequence["Selection"]) -> "Selection":
        """Return the entries of all `selections`, one selection after the other. Entries may repeat."""
        return cls.at(torch.cat([each.indices for each in selections]), selections[0].numel)

    @property
    def is_packed(self) -> bool:
        """Whether the entries are stored as bits."""
        return self.entries.dtype == torch.uint8

    @property
    def indices(self) -> Tensor:
        entries = self.entries
        return (
            kernels(entries.device).list_bits(entries, self.numel, self.count) if self.is_packed else entries
        )

    @property
    def bits(self) -> Tensor:
        entries = self.entries
        return entries if self.is_packed else kernels(entries.device).set_bits(entries, self.numel)

    def gather(self, x: Tensor) -> Tensor:
        """Return the kept entries of `x`, [count]."""
        return x.flatten().index_select(0, self.indices)

    def take(self, x: Tensor) -> Tensor:
        """Return `gather` of the tensor that the selection was made from, and drop the stored values, so that
        the stash of a message does not keep them."""
        values, self.values = self.values, None
        return self.gather(x) if values is None else values

    def scatter(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of `shape` with `values`, [count], at the kept entries and zeros elsewhere."""
        return kernels(values.device).scatter(values, self.entries, shape)


def largest(x: Tensor, k: int, values: Tensor | None = None) -> Selection:
    """Select the k entries of each row of `x` [rows, d] with the largest keys; of equal keys the lowest
    index.

    Args:
        values: see `select_largest` in reference.py.
    """
    rows, d = x.shape
    if k == d or not rows:
        return Selection.at(torch.arange(x.numel(), dtype=torch.int64, device=x.device), x.numel())
    return Selection(x.numel(), rows * k, *kernels(x.device).select_largest(x, k, values))


def banded(x: Tensor, bounds: tuple[Tensor | int, ...], k: int) -> Selection:
    """Select k entries of each row as `select_banded` in reference.py does; 0 < k."""
    return Selection(x.numel(), len(x) * k, *kernels(x.device).select_banded(x, bounds, k))


SIDCO_STAGES = 3
FIRST_STAGE = 0.25
"""Fraction that the first stage of SIDCo passes on. Near the target a stage covers half of the way on a log
scale."""


def sidco_thresholds(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Estimate the k-th largest magnitude of each row from a statistical fit instead of a sort.

    SIDCo (Abdelmoniem et al., MLSys 2021, arXiv 2101.10761): the magnitudes of a row are taken as exponential
    or generalised Pareto variables, fitted by their mean and variance. One fit of the bulk says little about
    the tail, so each stage fits what exceeds the estimate of the stage before it (peaks over threshold). The
    paper adapts the number of stages from call to call; here every call does all stages, which needs no
    state.

    Args:
        x: [rows, d].

    Returns:
        (high, low, achieved), each [rows, 1]: the lowest estimate that at most k entries reach, and the
        highest one that at least k entries reach (infinity and 0 if there is none), in the precision of the
        fit; and how many entries reach the estimate that is nearest to k. For rows that are zero, constant or
        not finite they mean nothing; `achieved` is then far from k or nan.
    """
    size = x.abs().to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    unit = size.mean(1, keepdim=True)
    size /= unit  # else the squares below would leave the range of fp32
    search = _Search(size, k)
    location = torch.zeros_like(unit)
    for _ in range(SIDCO_STAGES):
        excess = (size - location).clamp_(min=0)
        count = search.count_true(excess > 0)
        mean = excess.sum(1, keepdim=True) / count
        variance = excess.square_().sum(1, keepdim=True) / count - mean.square()
        log_ratio = (k / count.float()).log()
        search.consider(location + _exponential(mean, log_ratio))
        search.consider(location + _pareto(mean, variance, log_ratio))
        location = location + _exponential(mean, (log_ratio / 2).clamp(min=math.log(FIRST_STAGE)))
    # what exceeds the best estimate says how far to move it for slightly fewer and slightly more than k
    # entries
    mean = (size - search.best).clamp_(min=0).sum(1, keepdim=True) / search.achieved
    for aim in (0.95, 1.05):
        search.consider(search.best + _exponential(mean, (aim * k / search.achieved).log()))
    return search.high * unit, search.low * unit, search.achieved


class _Search:
    """The estimates tried so far, per row."""

    def __init__(self, size: Tensor, k: int):
        self.size, self.k, self.count_true = size, k, kernels(size.device).count_true
        self.high = size.new_full((size.shape[0], 1), math.inf)
        self.low = torch.zeros_like(self.high)
        self.best, self.achieved = torch.zeros_like(self.high), torch.zeros_like(self.high)

    def consider(self, estimate: Tensor) -> None:
        achieved = self.count_true(self.size >= estimate).to(estimate.dtype)
        self.high = torch.where((achieved <= self.k) & (estimate < self.high), estimate, self.high)
        self.low = torch.where((achieved >= self.k) & (estimate > self.low), estimate, self.low)
        nearer = (achieved / self.k).log().abs() < (self.achieved / self.k).log().abs()
        self.best = torch.where(nearer, estimate, self.best)
        self.achieved = torch.where(nearer, achieved, self.achieved)


def _exponential(mean: Tensor, log_ratio: Tensor) -> Tensor:
    """Return the value that a fraction e^log_ratio of exponential variables of this mean exceeds."""
    return -mean * log_ratio


def _pareto(mean: Tensor, variance: Tensor, log_ratio: Tensor) -> Tensor:
    """Do the same for generalised Pareto variables, by the method of moments; kappa is minus the usual
    shape."""
    signal = mean.square() / variance
    kappa, alpha = (signal - 1) / 2, mean * (signal + 1) / 2
    return -alpha * torch.expm1(kappa * log_ratio) / kappa
