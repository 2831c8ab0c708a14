"""What the meter of a sender says of its messages: error, cosine, and whether all was finite."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.config import Config
from ds_compress.message.channel import Boundary
from ds_compress.message.clock import HostClock
from ds_compress.message.gradient_error import GradientError
from ds_compress.message.meters import SendingMeter, error_and_cosine, largest, norms


class HeldSender:
    """A link that goes nowhere."""

    def memory(self, nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)

    def send(self, packet):
        pass


@pytest.mark.parametrize("bad, share", [(math.inf, 0.5), (math.nan, 0.5), (1.0, 0.0)])
def test_messages_that_are_not_finite_are_counted(bad, share):
    """Micro-batch 1 is bad."""
    good = torch.randn(64)
    messages = [good, torch.cat([good[1:], torch.tensor([bad])])]
    for compared in (0, 1):
        boundary = Boundary(0, Config({"forward": {"codec": "bf16"}, "min_numel": 0}))
        meter = SendingMeter(HostClock(), {compared})
        for micro_batch, x in enumerate(messages):
            message_id = boundary.forward.message_id(0, micro_batch)
            encoded = meter.encode(boundary.forward, [x], message_id, HeldSender().memory)
            meter.send(HeldSender(), encoded.packet)
        values = meter.values()
        assert values["nonfinite_share"] == share
        if compared == 1 and share:
            assert math.isnan(values["relative_error"]) and math.isnan(values["cosine"])
        else:
            assert 0 < values["relative_error"] < 2**-8 and values["cosine"] == pytest.approx(1, abs=1e-4)


def gradient_error(steps):
    """Of a TopK after one step of warm-up, as these steps leave it."""
    block = {"backward": {"codec": {"name": "topk", "density": 0.1}}, "warmup_steps": 1, "min_numel": 0}
    boundary, gradients = Boundary(0, Config(block)), GradientError()
    for step in steps:
        meter = SendingMeter(HostClock(), range(4), gradients)
        for micro_batch in range(4):
            message_id = boundary.backward.message_id(step, micro_batch)
            x = 0.1 + torch.randn(32, 16, generator=torch.Generator().manual_seed(micro_batch))
            encoded = meter.encode(boundary.backward, [x], message_id, HeldSender().memory)
            meter.send(HeldSender(), encoded.packet)
    return meter.values()["gradient_error"]


def test_gradients_of_the_warm_up_say_nothing_of_the_codec():
    """Half of the messages were bit-identical, which halved the error of the others."""
    assert math.isnan(gradient_error([0]))
    assert gradient_error([0, 1]) == gradient_error([1]) > 0.1


def compared(sent, decoded):
    return error_and_cosine(*norms(sent, decoded, largest(sent)).tolist())


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.floats(0, 2),
)
def test_error_and_cosine_against_float64(size, dtype, noise):
    generator = torch.Generator().manual_seed(0)
    x = (size * torch.randn(3, 100, generator=generator, dtype=torch.float64)).to(dtype)
    y = (x.double() + noise * size * torch.randn(3, 100, generator=generator, dtype=torch.float64)).to(dtype)
    ints = torch.arange(5)
    error, cosine = compared([x[:1], ints, x[1:]], [y[:1], ints, y[1:]])
    a, b = x.double().flatten() / size, y.double().flatten() / size
    assert error == pytest.approx(((a - b).norm() / a.norm()).item(), rel=1e-4, abs=1e-7)
    assert cosine == pytest.approx((a @ b / (a.norm() * b.norm())).item(), abs=1e-5)


def test_nothing_sent_is_no_error():
    zero = torch.zeros(4)
    assert compared([zero], [zero]) == (0.0, 1.0)
    assert compared([zero], [zero + 1]) == (math.inf, 0.0)
    assert compared([torch.zeros(0)], [torch.zeros(0)]) == (0.0, 1.0)
