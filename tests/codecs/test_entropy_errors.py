"""What codec entropy is for: the error of other codecs in fewer bits, on messages of models."""

import pytest
import torch

from tests.support import messages as captured
from tests.support.codecs import bits_per_value, error_of
from tests.support.messages import residual_stream

FOUR_BITS = {"name": "quantize", "bits": 4, "hadamard": True}
TENTH = {"name": "topk", "indices": "rice", "values": "bf16"}


def mean(measure, choice, messages):
    return sum(measure(choice, x) for x in messages) / len(messages)


@pytest.mark.parametrize(
    "model, direction, other, bits",
    [
        ("transformer", 0, FOUR_BITS, 3.6),
        ("transformer", 1, FOUR_BITS, 3.6),
        ("transformer", 0, TENTH, 0.9),
        ("transformer", 1, TENTH, 0.9),
        ("cnn", 0, FOUR_BITS, 2.0),
        ("cnn", 1, FOUR_BITS, 1.5),
        ("cnn", 0, TENTH, 0.8),
    ],
)
@pytest.mark.extended(keep=2)
def test_reaches_the_error_of_another_codec(model, direction, other, bits):
    messages, choice = getattr(captured, model)()[direction], {"name": "entropy", "bits": bits}
    assert mean(bits_per_value, choice, messages) <= bits < mean(bits_per_value, other, messages)
    assert mean(error_of, choice, messages) <= mean(error_of, other, messages)


def test_outliers_cost_little():
    hidden = residual_stream()
    assert error_of({"name": "entropy", "bits": 3.35}, hidden) <= error_of(FOUR_BITS, hidden)
    assert error_of({"name": "entropy", "bits": 0.9}, hidden) <= error_of(TENTH, hidden)


@pytest.mark.parametrize("bits, ideal", [(1, 0.5906), (2.5, 0.2111), (3.3, 0.1212)])
def test_a_large_message_of_normal_values_is_near_what_an_ideal_coder_makes(bits, ideal):
    """`ideal`: a uniform step, the means of its cells, the entropy of its codes; computed in numpy."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    assert error_of({"name": "entropy", "bits": bits}, x) == pytest.approx(ideal, rel=0.04)
