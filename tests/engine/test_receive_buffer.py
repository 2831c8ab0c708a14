"""What DeepSpeed clones of a message that came is no copy where nobody else has its memory."""

import torch

from ds_compress.engine.intercept import ReceiveBuffer, receiving
from tests.support.pipeline import batches, build, ds_config
from tests.support.ranks import run_ranks


def test_memory_of_its_own_is_handed_over_once():
    buffer, arrived = receiving(torch.zeros(3, 4)), torch.randn(3, 4)
    buffer.become(arrived)
    kept, again = buffer.clone().detach(), buffer.clone()
    assert kept.data_ptr() == arrived.data_ptr() and again.data_ptr() != arrived.data_ptr()
    assert torch.equal(kept, arrived) and torch.equal(again, arrived)
    assert type(kept) is type(again) is torch.Tensor
    kept.requires_grad = True
    assert kept.is_leaf and not buffer.requires_grad


def clones(block):
    """Of the activations that came in a step, how many were handed over, and how many copied."""
    engine, data = build(2, ds_config(block)), batches()
    engine.train_batch(data)
    counts, original = [0, 0], ReceiveBuffer.clone

    def clone(self, *args, **kwargs):
        counts[not self._given] += 1
        made = original(self, *args, **kwargs)
        assert type(made) is torch.Tensor
        return made

    ReceiveBuffer.clone = clone
    engine.train_batch(data)
    return counts


def test_decoded_activations_are_not_copied_and_those_in_a_packet_are():
    for codec, copied in (("quantize", False), ("none", True)):
        block = {"forward": {"codec": codec}, "min_numel": 0}
        counts = run_ranks(2, clones, block)[1]
        assert counts[copied] > 0 and counts[not copied] == 0, (codec, counts)
