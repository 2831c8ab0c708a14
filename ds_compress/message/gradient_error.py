"""Measure the error of accumulated gradients: what is left of a codec's error in sums of messages.

An optimizer adds up gradients over tokens, samples and micro-batches. The error of an unbiased codec averages
out there, whatever its size in one message. A dead zone, shrunken values and residuals of other samples
remain, and Adam amplifies them. So gradients are judged by the error of their mean over tokens, a vector of
the hidden size: the gradient of a bias vector added at the boundary. Only the sender measures, and no pass is
added to training.

Messages are cut into parts. With e and g the sums over the tokens of a part, of error and gradient,

    bias^2  = (|sum e|^2 - sum |e|^2) n / (n - 1) / |sum g|^2     over the n parts of all messages
    total^2 = sum |e|^2 / sum |g|^2                               over whole messages
    error^2 = bias^2 + (total^2 - bias^2) / AVERAGED

Products of different parts estimate the square of the systematic error alone: for an unbiased codec their
expectation is 0. They count if they exceed two standard deviations of such products around 0.
"""

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

PARTS = 16
"""Parts of a message, along its rows, so that one message has products of different parts."""

AVERAGED = 8
"""Messages over which the random part of the error is taken to average out."""

BIAS = 1.2
"""Bias of a biased codec as a multiple of its relative error, where no gradients of a model are at hand:
rotated groups of 3 and 4 bits have 0.6 to 1.2 (docs/auto.md), coarser codecs and dead zones more."""


def estimate_gradient_error(error: float, is_unbiased: bool) -> float:
    """Return the error of accumulated gradients of a codec whose relative `error` alone is known."""
    return error / math.sqrt(AVERAGED) if is_unbiased else BIAS * error


class GradientError:
    """Sums over the latest messages of one channel, as sent and as they arrive."""

    def __init__(self) -> None:
        self._messages: deque[Tensor] = deque(maxlen=AVERAGED)  # [2, PARTS, columns]: gradient and error

    def add(self, sent: Sequence[Tensor], decoded: Sequence[Tensor]) -> None:
        """Add a message, without waiting for a device."""
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
        # messages of other steps may be much larger
        gradient, error = sums / sums[0].square().sum((1, 2), keepdim=True).sqrt()
        parts = error.flatten(0, 1)
        products = (parts @ parts.T).fill_diagonal_(0)
        common, n = products.sum(), len(parts)
        common = torch.where(common > 2 * products.square().sum().mul(2).sqrt(), common, 0.0) * n / (n - 1)
        bias = common / gradient.sum((0, 1)).square().sum()
        total = error.sum(1).square().sum() / gradient.sum(1).square().sum()
        return bias.sqrt().item(), total.sqrt().item()


def _column_sums(x: Tensor, y: Tensor) -> Tensor:
    """Return fp32 [2, PARTS, columns]: sums over the rows of `PARTS` parts of x, and of y - x.

    Columns are the last dimension, or of images [samples, channels, height, width] the channels.
    """
    sums = []
    for tensor in (x.detach().float(), y.detach().float() - x.detach().float()):
        rows = tensor.movedim(1, -1) if tensor.dim() >= 4 else tensor
        rows = rows.reshape(-1, rows.shape[-1] if rows.dim() > 1 else 1)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % PARTS))
        sums.append(padded.view(PARTS, -1, rows.shape[-1]).sum(1))
    return torch.stack(sums)
