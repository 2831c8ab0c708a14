"""The errors of a message: of its values together, and of its rows each by itself.

In pretrained decoders one token, the attention sink, holds most of the energy of an activation: 94 to 99 % in
SmolLM2. The relative error of the message then says how well that token arrives, and nothing of the others.
So activations are judged by their token error, in which all rows count alike.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_compress.codecs.shapes import matrix_shape

SMALLEST = 2.0**-30
"""Smallest unit of a row, as a share of the largest magnitude of its tensor. Rows of less than 2^-93 of it
(1e-28) have squares of 0, and count as rows of zeros."""


class MessageError(NamedTuple):
    """How a message x differs from y, what it decodes to; all nan if one of both is not finite."""

    message_norm: float
    """||x||."""
    relative_error: float
    """||x - y|| / ||x||; 0 if both are 0, inf if x alone is."""
    token_error: float
    """Root of the mean of (||x_r - y_r|| / ||x_r||)^2 over the rows r of x that are not 0; without such rows
    the relative error."""
    cosine: float
    """<x, y> / (||x|| ||y||)."""
    lost_rows: float
    """Share of the rows that are not 0 of which nothing arrives. Behind a norm, which divides by the length
    of a row, gradients of such a row explode, while few of them raise the token error by little."""


UNKNOWN = MessageError(*[math.nan] * 5)


def measure_error(sent: Sequence[Tensor], decoded: Sequence[Tensor]) -> MessageError:
    """Compare the float tensors of a message with what they decode to; this waits for the device."""
    return MessageError(*compare(sent, decoded).tolist())


def compare(sent: Sequence[Tensor], decoded: Sequence[Tensor]) -> Tensor:
    """Compute the fields of `MessageError`, float64 [5] on the device, for which the host does not wait.

    Rows are those of `matrix_shape`; of images [samples, channels, height, width] they are the samples.
    """
    pairs = [(x, y) for x, y in zip(sent, decoded) if x.dtype.is_floating_point and x.numel()]
    if not pairs:
        nothing = torch.zeros(1, dtype=torch.float32, device=sent[0].device)
        pairs = [(nothing, nothing)]
    with torch.no_grad():
        units, norms = map(torch.cat, zip(*(_measure_rows(x, y) for x, y in pairs)))
        largest = units.max()
        # norms of x, y and x - y
        own, arrived, row_difference = norms.unbind(1)
        whole = torch.linalg.vector_norm(norms * (units / largest)[:, None], dim=0)
        norm, decoded_norm, difference = whole

        error = torch.where(difference == 0, 0.0, difference / norm)
        squares, is_sent = torch.where(own > 0, row_difference / own, 0.0).square(), own > 0
        count = is_sent.sum()
        token_error = torch.where(count > 0, (squares.sum() / count).sqrt(), error)
        lost = (is_sent & (arrived == 0)).sum().double() / count.clamp(min=1)  # not in the default dtype
        product = 2 * norm * decoded_norm
        cosine = (norm.square() + decoded_norm.square() - difference.square()) / product
        cosine = torch.where(product > 0, cosine.clamp(-1, 1), (difference == 0).double())

        found = torch.stack([norm * largest, error, token_error, cosine, lost])
        return torch.where(whole.isfinite().all(), found, math.nan)


def _measure_rows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Measure the rows of a tensor, each in a unit of its own, so that no square leaves the range of fp32.

    Returns:
        float64 [rows], the units: a row's largest magnitude, but at least `SMALLEST` of the tensor's; and
        float64 [rows, 3], the norms of the rows of x, y and x - y in these units.
    """
    shape = (len(x), -1) if x.dim() >= 4 else matrix_shape(x.shape)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, y = x.reshape(shape), y.reshape(shape)
    units = x.abs().amax(1, keepdim=True).to(dtype)
    units = torch.maximum(units, SMALLEST * units.max())
    units = torch.where(units == 0, 1.0, units)
    x, y = x.to(dtype) / units, y.to(dtype) / units
    norms = [torch.linalg.vector_norm(t, dim=1) for t in (x, y)]
    norms.append(torch.linalg.vector_norm(x.sub_(y), dim=1))
    return units.flatten().double(), torch.stack(norms, dim=1).double()
