"""What crosses between layers, and what codecs make of it, found without what `advise` measures them with."""

import pytest

from ds_compress.config import DIRECTIONS
from ds_compress.planning.candidates import startable_candidates
from ds_compress.planning.evaluate import REPEATS
from tests.support.measure import relative_error

SEED = 1234


def crossing(layers, cuts, x, loss):
    """What crosses whole layers at `cuts` and comes back, found without any of what is tested."""
    forward = []
    for number, layer in enumerate(layers):
        if number in cuts:
            x.retain_grad()
            forward.append(x)
        x = layer(x)
    loss(x).backward()
    return [(x.detach(), x.grad) for x in forward]


def agree(measured, *micro_batches):
    """Assert that settings without state or partner have the errors of their codecs on the same tensors, cut
    by cut, of each of the micro-batches in turn."""
    blocks = {
        candidate.name: candidate.block
        for candidate in startable_candidates()
        if candidate.name.startswith(("quantize", "entropy", "fp8", "bf16"))
    }
    assert len(blocks) > 10
    for message in measured["messages"]:
        place = {"boundary": message["boundary"], "direction": message["direction"]}
        direction = place["direction"]
        sent = [own[message["boundary"]][DIRECTIONS.index(direction)] for own in micro_batches]
        x = sent[0]
        assert message["tensors"] == [{"shape": list(x.shape), "dtype": str(x.dtype).split(".")[1]}]
        assert message["bytes"] == x.nbytes
        for name, block in blocks.items():
            codec = block[direction]["codec"]  # rotations are others for each micro-batch
            error = max(
                relative_error(codec, sent[n % len(sent)], seed=SEED, micro_batch=n, **place)
                for n in range(REPEATS)
            )
            assert message["settings"][name]["error"] == pytest.approx(error, rel=1e-4)
