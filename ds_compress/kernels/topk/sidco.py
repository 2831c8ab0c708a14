"""Thresholds from a statistical fit instead of a sort: SIDCo (Abdelmoniem et al., MLSys 2021, arXiv
2101.10761).

The magnitudes of a row are taken as exponential or generalised Pareto variables, fitted by their mean and
variance. One fit of the bulk says little about the tail, so stages follow each other: each fits what exceeds
the location that the stage before it estimated (peaks over threshold). The paper adapts the number of stages
from call to call; here all stages are tried in every call, which needs no state.
"""

import math

import torch
from torch import Tensor

from ds_compress.kernels.dispatch import kernels

STAGES = 3
FIRST_STAGE = 0.25
"""Fraction that the first stage passes on; near the target, half of the way to it on a log scale."""


def bracket(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Thresholds for |x| [rows, d] on either side of the one that k entries of each row reach.

    Returns:
        (high, low, achieved), each [rows, 1]: the lowest estimate that at most k entries reach, the highest
        one that at least k reach (infinity and 0 where there is none), in the precision of the fit; and how
        many entries reach the estimate that comes nearest to k. All are meaningless where x is zero, constant
        or not finite; `achieved` is then far from k or nan.
    """
    size = x.abs().to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    unit = size.mean(1, keepdim=True)
    size /= unit  # the squares below would leave the range of fp32
    search = _Search(size, k)
    location = torch.zeros_like(unit)
    for _ in range(STAGES):
        excess = (size - location).clamp_(min=0)
        count = search.count_true(excess > 0)
        mean = excess.sum(1, keepdim=True) / count
        variance = excess.square_().sum(1, keepdim=True) / count - mean.square()
        log_ratio = (k / count.float()).log()
        search.consider(location + _exponential(mean, log_ratio))
        search.consider(location + _pareto(mean, variance, log_ratio))
        location = location + _exponential(mean, (log_ratio / 2).clamp(min=math.log(FIRST_STAGE)))
    # what exceeds the best estimate tells how far to move it, to have a little less and a little more than k
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

    def consider(self, eta: Tensor) -> None:
        achieved = self.count_true(self.size >= eta).to(eta.dtype)
        self.high = torch.where((achieved <= self.k) & (eta < self.high), eta, self.high)
        self.low = torch.where((achieved >= self.k) & (eta > self.low), eta, self.low)
        nearer = (achieved / self.k).log().abs() < (self.achieved / self.k).log().abs()
        self.best = torch.where(nearer, eta, self.best)
        self.achieved = torch.where(nearer, achieved, self.achieved)


def _exponential(mean: Tensor, log_ratio: Tensor) -> Tensor:
    """The value that a fraction e^log_ratio of exponential variables of this mean exceeds."""
    return -mean * log_ratio


def _pareto(mean: Tensor, variance: Tensor, log_ratio: Tensor) -> Tensor:
    """The same for generalised Pareto variables, by the method of moments; kappa is minus the usual shape."""
    signal = mean.square() / variance
    kappa, alpha = (signal - 1) / 2, mean * (signal + 1) / 2
    return -alpha * torch.expm1(kappa * log_ratio) / kappa
