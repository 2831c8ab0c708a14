"""Data-parallel replicas inside one process: their gradients are averaged as a pipeline's replicas do it."""

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ds_compress.config import KEY, Config
from ds_compress.errors import CompressionError
from ds_compress.replicas.exchange import Exchange
from ds_compress.replicas.factors import build_exchange, compressed_parameters
from ds_compress.replicas.slices import Gradient
from ds_compress.replicas.transfers import Replicas, Transfer
from ds_compress.transport.codec_stream import without_autocast


class SimulatedReplicas:
    """Averages the gradients of replicas that one process computes in turn.

        replicas = SimulatedReplicas(model, ds_config, 4)
        for batch in of_each_replica:
            loss(model(batch)).backward()
            replicas.collect()
        replicas.average()
        optimizer.step()
        optimizer.zero_grad()

    The averages are those of DeepSpeed's fp32 training without ZeRO, bit for bit with two replicas of one
    stage and no tied weights; random draws of codecs differ with several stages.
    """

    def __init__(self, model: nn.Module, ds_config: dict[str, Any], count: int):
        """
        Args:
            model: whose parameters have the gradients.
            ds_config: its "ds_compress" block counts.
            count: number of replicas.

        Raises:
            CompressionError: a bad block.
        """
        config = Config(ds_config.get(KEY, {}))
        options, codec = config.block.replicas, config.replica_codec
        self._parameters = {n: p for n, p in enumerate(model.parameters()) if p.requires_grad}
        self._warmup_steps = options.warmup_steps if options is not None else 0
        self._count = count
        self._collected: list[dict[int, Tensor]] = []
        self.global_steps = 0
        self.exchanges: list[Exchange] = []
        """One per replica, with its counters and residuals; empty if nothing is compressed."""
        self.compressed = set[int]()
        """Positions of the parameters whose gradients are compressed after the warm-up."""
        if codec is not None and config.block.enabled and count > 1:
            config.prepare()
            found = compressed_parameters(model.parameters(), codec)
            self.compressed = found.keys() & self._parameters.keys()
            shared = codec, found, 2**62, config.block.seed, config.block.link.checksum
            self.exchanges = [build_exchange(Replicas(count, rank), *shared) for rank in range(count)]

    def collect(self) -> None:
        """Take the gradients that the next replica has computed; the parameters are left without."""
        if len(self._collected) == self._count:
            raise CompressionError(
                f"simulate: gradients of more than {self._count} replicas in one step; call average() between"
            )
        own = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in self._parameters.items()}
        self._collected.append({n: gradient.detach().contiguous() for n, gradient in own.items()})
        for parameter in self._parameters.values():
            parameter.grad = None

    def average(self) -> None:
        """Set the gradient of each parameter to the average over all replicas.

        Raises:
            CompressionError: `collect` was called fewer times than there are replicas.
        """
        if len(self._collected) < self._count:
            raise CompressionError(
                f"simulate: average() after {len(self._collected)} of {self._count} replicas; call collect() "
                "after the backward pass of each"
            )
        collected, self._collected = self._collected, []
        compresses = self.global_steps >= self._warmup_steps
        large = [number for number in self._parameters if compresses and number in self.compressed]
        if large:
            gradients = [[Gradient(n, own[n].view(-1)) for n in large] for own in collected]
            self._exchange(gradients)
        for number, parameter in self._parameters.items():
            first, *others = (own[number] for own in collected)
            if number not in large:
                for other in others:
                    first += other
                first *= 1 / self._count
            parameter.grad = first
        self.global_steps += 1

    def _exchange(self, gradients: Sequence[Sequence[Gradient]]) -> None:
        """Average `gradients` of each replica in place."""
        factor = 1 / self._count
        with torch.no_grad(), without_autocast():
            rounds = [
                exchange.rounds(own, factor, 1.0, self.global_steps)
                for exchange, own in zip(self.exchanges, gradients)
            ]
            transfers = [next(each) for each in rounds]
            while transfers:  # all replicas send equally often
                arrived = [_arrived(transfers, rank) for rank in range(self._count)]
                transfers = []
                for each, packets in zip(rounds, arrived):
                    with suppress(StopIteration):
                        transfers.append(each.send(packets))


def _arrived(transfers: Sequence[Transfer], rank: int) -> Tensor:
    """Return what replica `rank` receives: from one replica after another, or the sum."""
    if transfers[0].is_summed:
        return functools.reduce(torch.add, [transfer.packets for transfer in transfers])
    return torch.cat(
        [packets if sizes is None else packets.split(sizes)[rank] for packets, sizes, _ in transfers]
    )
