"""Send gradients between replicas while the last backward pass of a step still computes others.

    backward pass of the last micro-batch     parameters n, n-1, ...      bucket 0 complete: encode, send
                                              ...                         bucket 1 complete: encode, send
    its end                                   buckets that are not complete
    DeepSpeed's reduction                     wait for all

Buckets and their order follow from the parameters alone, and bucket b is not sent before bucket b - 1. So all
replicas send in one order, whichever gradients a replica lacks. A replica may wait for another one within
its backward pass, so nothing else in that pass may make the other one wait for this one.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ds_compress.errors import CompressionError
from ds_compress.replicas.exchange import Exchange, fill_buckets
from ds_compress.replicas.slices import Gradient

log = logging.getLogger("ds_compress")


class EarlyBuckets:
    """Starts the exchange of a bucket when the gradients of all its parameters are complete."""

    def __init__(
        self,
        exchange: Exchange,
        parameters: Iterable[tuple[int, Tensor]],
        bucket_bytes: int,
        take: Callable[[int, Tensor, bool], list[Gradient]],
    ):
        """
        Args:
            parameters: with their numbers, in the order of the forward pass; their gradients are dense.
            bucket_bytes: most bytes of a bucket of several parameters, in fp32.
            take: returns the parts of the gradient of a parameter, with its number; its last argument:
                whether the pass that has completed it still runs.
        """
        self._exchange = exchange
        self._take = take
        self._hooks = dict[int, RemovableHandle]()  # by parameter
        self._passes = 0  # backward passes of the step; 0: nothing is sent
        self._ended = 0  # those that are over
        self._factor, self._step = 1.0, 0
        self._counts = dict[int, int]()  # gradients of the step, by parameter
        self._sent = set[int]()  # parameters whose gradients are averages now
        self._is_known = False  # whether a step has shown that a pass computes each gradient at once
        self._repeats = False  # whether it does not: then nothing is sent early
        self._is_seen_later = False  # whether a hook that was made within the step runs after ours
        self._has_warned = False
        self.started = 0
        """Buckets of this step whose exchange has started."""
        backwards = reversed(list(parameters))
        found = fill_buckets(backwards, lambda each: each[1].numel() * torch.float32.itemsize, bucket_bytes)
        self._buckets = [dict(bucket) for bucket in found]

    def begin_step(self, passes: int, factor: float, step: int) -> None:
        """Prepare a step of so many backward passes; 0: nothing is sent in it. Others: see `Exchange`."""
        self._passes, self._factor, self._step = passes, factor, step
        self._remove_hooks()
        # behind all other hooks of a parameter, which may change its gradient
        self._hooks = {
            number: parameter.register_post_accumulate_grad_hook(partial(self._count, number))
            for bucket in self._buckets
            for number, parameter in bucket.items()
            if passes and parameter.requires_grad
        }
        self._counts.clear()
        self._ended, self._sent, self._is_seen_later = 0, set(), False
        self.started = 0

    def _remove_hooks(self) -> None:
        """Let go of the parameters: Python cannot collect an engine that hooks of its parameters hold."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def _count(self, number: int, parameter: Any) -> None:
        if next(reversed(parameter._post_accumulate_grad_hooks)) != self._hooks[number].id:
            self._is_seen_later = True
            if self._is_known and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "ds_compress: gradients between replicas leave after the backward pass of a step in "
                    f"which a program makes hooks of gradients: parameter {number} has one"
                )
        self._counts[number] = self._counts.get(number, 0) + 1
        if self._counts[number] > self._passes:
            if number in self._sent:
                raise CompressionError(
                    f"gradients between replicas: parameter {number} got a gradient after its last one had "
                    "been sent; set ds_compress.replicas.overlap to false"
                )
            self._repeats = True
        while self._is_known and not (self._repeats or self._is_seen_later) and self._is_complete():
            self._start(in_pass=True)

    def _is_complete(self) -> bool:
        """Return whether all gradients of the next bucket are final."""
        return self.started < len(self._buckets) and all(
            self._counts.get(number) == self._passes or not parameter.requires_grad
            for number, parameter in self._buckets[self.started].items()
        )

    def _start(self, in_pass: bool) -> None:
        """Start the exchange of the next bucket: of parameters that are not frozen, as DeepSpeed does."""
        bucket = {n: each for n, each in self._buckets[self.started].items() if each.requires_grad}
        self.started += 1
        gradients = [part for number, each in bucket.items() for part in self._take(number, each, in_pass)]
        self._sent.update(bucket)
        if gradients:
            self._exchange.start(gradients, self._factor, 1.0, self._step)

    def end_pass(self) -> None:
        """After the last backward pass start all buckets that are left, even if gradients are missing.

        Other replicas may wait for these buckets within their own last pass.
        """
        self._ended += 1
        if self._ended == self._passes:
            self._start_rest()

    def _start_rest(self) -> None:
        while self.started < len(self._buckets):
            self._start(in_pass=False)

    def finish(self) -> set[int]:
        """Wait for all averages.

        Returns:
            The parameters whose gradients of this step are averages now.
        """
        if self._passes:
            self._start_rest()  # of an engine that runs its passes in its own way
            self._exchange.finish()
            self._remove_hooks()
            self._passes, self._is_known = 0, True
        return self._sent
