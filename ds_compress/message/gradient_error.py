"""Measure the error of accumulated gradients: the error of a codec that remains in sums of messages.

An optimizer adds up gradients over tokens, samples and micro-batches. In these sums the error of an unbiased
codec averages out, whatever its size in one message. Systematic errors remain, and Adam amplifies them:
values always rounded to 0, shrunken values, residuals of other samples. So the measure is the error of the
mean gradient over tokens, a vector of the hidden size. It is the gradient that a bias vector added at the
boundary would get. Only the sender measures, without a further pass.

Each message is cut into parts. Let g and e be the sums of gradient and error over the tokens of a part:

    bias^2  = (|sum e|^2 - sum |e|^2) n / (n - 1) / |sum g|^2     over the n parts of all messages
    total^2 = sum |e|^2 / sum |g|^2                               over whole messages
    error^2 = bias^2 + (total^2 - bias^2) / AVERAGED

Where gradients add up to nearly 0 over a message, as behind batch normalization, sums say nothing about the
weights before it: bias is then relative to the parts, each by itself, and total is the error of the parts.
A codec that shrinks every gradient, or loses it, has no bias of sums there, yet no weight learns. So bias is
at least the share of the parts that does not arrive:

    lost    = |sum <e, g>| / sum |g|^2                            over the n parts of all messages

A token whose gradient is more than `LARGEST_TOKEN` times that of the median token is scaled down to
that: sums would else say nothing of the others. Behind an RMSNorm, gradients of single tokens explode so.

Products of errors of different parts estimate the square of the systematic error, products of error and
gradient the share that is lost: for an unbiased codec their expectation is 0. Their sums count as bias if
they differ from 0 by more than two standard deviations.
"""

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

PARTS = 16
"""Parts into which the rows of a message are cut: even one message then has products of different parts."""

AVERAGED = 8
"""Messages over which random errors are assumed to average out; at most as many are kept."""

LARGEST_TOKEN = 100.0
"""Largest magnitude of a token that counts, in magnitudes of the median token that is not zero."""

BIAS = 1.2
"""Assumed bias of a biased codec, as a multiple of its relative error, if no gradients can be measured.
Rotated groups of 3 and 4 bits have 0.6 to 1.2 (docs/auto.md); coarser codecs and dead zones have more."""


def estimate_gradient_error(error: float, is_unbiased: bool) -> float:
    """Estimate the error of accumulated gradients from the relative `error` of a codec."""
    return error / math.sqrt(AVERAGED) if is_unbiased else BIAS * error


class GradientError:
    """Measures the error of accumulated gradients over the last messages of one channel."""

    def __init__(self) -> None:
        self._messages: deque[Tensor] = deque(maxlen=AVERAGED)  # [2, PARTS, columns]: gradient and error

    def add(self, sent: Sequence[Tensor], decoded: Sequence[Tensor]) -> None:
        """Add a message, before and after the codec; the host does not wait for the device."""
        sums = [_column_sums(x, y) for x, y in zip(sent, decoded) if x.is_floating_point() and x.numel()]
        if sums:
            message = torch.cat(sums, dim=-1)
            if self._messages and self._messages[-1].shape != message.shape:
                self._messages.clear()
            self._messages.append(message)

    @property
    def value(self) -> float:
        """Return the error; nan if no finite message was sent."""
        bias, total = self.bias_and_total()
        return math.sqrt(bias**2 + max(0.0, total**2 - bias**2) / AVERAGED)

    def bias_and_total(self) -> tuple[float, float]:
        """Return bias and total error of the mean gradient of a message."""
        finite = [message for message in self._messages if message.isfinite().all() and message[0].any()]
        if not finite:
            return math.nan, math.nan
        sums = torch.stack(finite, dim=1).double()  # [2, messages, PARTS, columns]
        sums = sums / sums[0].abs().amax((1, 2), keepdim=True)
        # scale each message to norm 1: those of other steps may be much larger
        gradient, error = sums / sums[0].square().sum((1, 2), keepdim=True).sqrt()
        parts = error.flatten(0, 1)
        products = (parts @ parts.T).fill_diagonal_(0)
        common, n = products.sum(), len(parts)
        common = torch.where(common > 2 * products.square().sum().mul(2).sqrt(), common, 0.0) * n / (n - 1)
        alone = gradient.square().sum()  # energy of the parts, each by itself
        bias = common / torch.maximum(gradient.sum((0, 1)).square().sum(), alone)
        lost = (error * gradient).sum(-1)  # by part
        is_lost = lost.sum().abs() > 2 * lost.square().sum().sqrt()
        bias = torch.maximum(bias, torch.where(is_lost, lost.sum() / alone, 0.0).square())
        whole, lost = gradient.sum(1).square().sum(), error.sum(1).square().sum()
        total = torch.where(whole > alone, lost / whole, error.square().sum() / alone)
        return bias.sqrt().item(), total.sqrt().item()


def _column_sums(x: Tensor, y: Tensor) -> Tensor:
    """Sum x and y - x over the rows of each of `PARTS` parts; return fp32 [2, PARTS, columns].

    Columns are the last dimension; for images [samples, channels, height, width] they are the channels.
    """
    gradient, error = x.detach().float(), y.detach().float() - x.detach().float()
    if x.dim() in (2, 3):
        weights = _token_weights(gradient)
        gradient, error = gradient * weights, error * weights
    sums = []
    for tensor in (gradient, error):
        rows = tensor.movedim(1, -1) if tensor.dim() >= 4 else tensor
        rows = rows.reshape(-1, rows.shape[-1] if rows.dim() > 1 else 1)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % PARTS))
        sums.append(padded.view(PARTS, -1, rows.shape[-1]).sum(1))
    return torch.stack(sums)


def _token_weights(gradient: Tensor) -> Tensor:
    """Return [..., 1]: 1, but less for tokens above `LARGEST_TOKEN`; the host does not wait."""
    sizes = gradient.abs().amax(-1, keepdim=True)
    ordered = sizes.flatten().sort().values  # zeros first
    middle = ((ordered == 0).sum() + len(ordered) - 1) // 2
    largest = LARGEST_TOKEN * ordered.gather(0, middle[None])
    return torch.where(sizes > largest, largest / sizes, 1.0)
