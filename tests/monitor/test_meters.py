"""What meters say of messages, residuals and accumulated gradients, and how the guard judges it."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_compress.config import Config
from ds_compress.message.channel import Boundary, Channel
from ds_compress.message.channel_end import SendingEnd
from ds_compress.message.clock import HostClock
from ds_compress.message.gradient_error import AVERAGED, GradientError, estimate_gradient_error
from ds_compress.message.meters import SendingMeter
from ds_compress.message.observer import Observer
from ds_compress.monitor import lines
from ds_compress.monitor.guard_limits import MessageQuality
from ds_compress.monitor.metrics import residual_values
from ds_compress.monitor.monitor import Monitor
from ds_compress.transport.codec_stream import CodecStream
from ds_compress.transport.p2p import Sender
from tests.support.codecs import error_of, roundtrip


class HeldSender(Sender):
    """A link that goes nowhere."""

    def __init__(self):
        super().__init__(0, torch.device("cpu"))

    def send(self, packet):
        pass


def transmit(channel, meter, step, micro_batch, x):
    end = SendingEnd(channel, HeldSender(), HeldSender(), CodecStream(), observers=[meter])
    end.transmit([x], channel.message_id(step, micro_batch))


@pytest.mark.parametrize("bad, share", [(math.inf, 1 / 3), (math.nan, 1 / 3), (1.0, 0.0)])
def test_messages_that_are_not_finite_are_counted(bad, share):
    """Micro-batch 1 is bad, the last one empty."""
    good = torch.randn(64)
    messages = [good, torch.cat([good[1:], torch.tensor([bad])]), good[:0]]
    for compared in (0, 1):
        boundary = Boundary(0, Config({"forward": {"codec": "bf16"}, "min_numel": 0}))
        meter = SendingMeter(HostClock(), {compared})
        for micro_batch, x in enumerate(messages):
            transmit(boundary.forward, meter, 0, micro_batch, x)
        values = meter.values()
        assert values["nonfinite_share"] == pytest.approx(share) and not meter.failure
        if compared == 1 and share:
            assert all(math.isnan(values[each]) for each in ("relative_error", "token_error", "cosine"))
        else:
            assert 0 < values["relative_error"] < 2**-8 and values["cosine"] == pytest.approx(1, abs=1e-4)


class Operations(TorchDispatchMode):
    """Counts what is computed."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_meter_of_time_alone_computes_nothing():
    """Over NCCL the first step that recipe auto measures would have had kernels that none before it had."""
    boundary, counts = Boundary(0, Config({"forward": {"codec": "bf16"}, "min_numel": 0})), []
    meter = SendingMeter(HostClock(), ())
    for observer in (Observer(), Observer(), meter):  # the first time the layout is made
        with Operations() as operations:
            transmit(boundary.forward, observer, 0, 0, torch.ones(64))
        counts.append(operations.count)
    assert counts[1] == counts[2] > 0 and meter.values()["step_messages"] == 1


def gradient_error(steps):
    """Of a TopK after one step of warm-up, as these steps leave it."""
    block = {"backward": {"codec": {"name": "topk", "density": 0.1}}, "warmup_steps": 1, "min_numel": 0}
    boundary, gradients = Boundary(0, Config(block)), GradientError()
    for step in steps:
        meter = SendingMeter(HostClock(), range(4), gradients)
        for micro_batch in range(4):
            x = 0.1 + torch.randn(32, 16, generator=torch.Generator().manual_seed(micro_batch))
            transmit(boundary.backward, meter, step, micro_batch, x)
    return meter.values()["gradient_error"]


def test_gradients_of_the_warm_up_say_nothing_of_the_codec():
    """Half of the messages were bit-identical, which halved the error of the others."""
    assert math.isnan(gradient_error([0]))
    assert gradient_error([0, 1]) == gradient_error([1]) > 0.1


def test_a_sink_hides_no_other_token():
    """All tokens but one were lost, and the monitor showed an error of 0.02."""
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    x[0] = 1000 * x[0].sign()  # all that is sent
    codec = {"name": "topk", "density": 1 / len(x), "rows": "tensor"}
    boundary, meter = Boundary(0, Config({"forward": {"codec": codec}})), SendingMeter(HostClock(), {0})
    transmit(boundary.forward, meter, 0, 0, x)
    values = meter.values()
    assert values["relative_error"] < 0.03 and values["token_error"] > 0.99
    assert values["message_norm"] == pytest.approx(x.double().norm().item())
    assert set(values) == set(SendingMeter.COLUMNS)
    found = MessageQuality.of({**values, "residual_share": 0.0}, {}, "forward")
    assert [each.limit for each in found.violations(boundary.config.block.guard)] == ["error", "lost_rows"]


def channel(direction, memory, loss_scale=1.0):
    boundary = Boundary(0, Config({}))
    boundary.memory = memory
    boundary.begin_step(loss_scale)
    return Channel(boundary, direction, boundary.config.in_force.codecs(0).backward)


def test_residuals_of_two_micro_batches_and_two_tensors():
    """Norms 3 and 4 of one tensor, 12 and 0 of the other: 13 together, 13 / sqrt(2) for a micro-batch."""
    keys = [f"backward/sender/ef/micro_batch{number}" for number in range(2)]
    kept = ([3.0, 0.0], [0.0, 4.0]), ([12.0], [0.0])
    memory = {position: dict(zip(keys, map(torch.tensor, each))) for position, each in enumerate(kept)}
    memory[0]["forward/sender/ef/micro_batch0"] = torch.tensor([1e6])  # of the other direction
    memory[0]["backward/mirror/ef21"] = torch.tensor([1e6])  # not held back
    found = residual_values(channel("backward", memory), 2.0)
    assert found["residual_norm"] == 13
    assert found["residual_share"] == pytest.approx(13 / math.sqrt(2) / 2)
    assert found["buffer_bytes"] == 4 * (2 + 2 + 1 + 1 + 1), "what both sides hold is kept too"


def test_a_loss_scale_makes_no_share_smaller():
    """Residuals are in units that it does not change, the message is not."""
    memory = {0: {"backward/sender/ef": torch.tensor([6.0])}}
    assert residual_values(channel("backward", memory, 1024.0), 2 * 1024.0)["residual_share"] == 3


def test_where_there_is_nothing_to_compare():
    nothing = {"residual_norm": 0, "residual_share": 0, "buffer_bytes": 0}
    assert residual_values(channel("backward", {0: {}}), 1.0) == nothing
    memory = {0: {"backward/sender/ef": torch.ones(1)}}
    for norm in (0.0, math.nan):
        assert math.isnan(residual_values(channel("backward", memory), norm)["residual_share"])


COARSE = {"codec": {"name": "topk", "density": 0.02}}
FINE = {"message_norm": 1.0, "token_error": 0.01}
FINE |= dict.fromkeys(("gradient_error", "residual_share", "nonfinite_share", "lost_rows"), 0.0)


def over(values, before=FINE, direction="forward", **limits):
    """The limits that a channel is over, and what is said of it."""
    config = Config({"forward": COARSE, "backward": COARSE, "guard": limits})
    violations = MessageQuality.of({**FINE, **values}, before, direction).violations(config.block.guard)
    return [each.limit for each in violations], lines.violation_note(config, [0], direction, violations)


def test_limits_of_messages():
    found, note = over({"token_error": 0.93})
    assert found == ["error"]
    assert note == (
        "boundary 0, forward: topk(density=0.02) has a token error of 0.93 (ds_compress.guard.error: "
        "0.5): use more bits or a higher density, or another codec"
    )
    nothing_known = {"token_error": math.nan, "residual_share": math.nan}
    for values in ({}, {"token_error": 0.5, "residual_share": 100.0}, nothing_known):
        assert over(values)[0] == []
    assert over({"token_error": 0.93}, error=1)[0] == []
    zeros = {"message_norm": 0.0, "token_error": math.inf}
    assert over(zeros)[0] == [], "error feedback sent what it had held back"


def test_a_coarse_codec_on_many_boundaries_is_reported_in_one_line(caplog):
    """There was a warning for each channel: 126 with 64 stages."""
    config = Config({"forward": COARSE, "boundaries": {"7": {"forward": {"codec": {"name": "topk"}}}}})
    judged = {n: MessageQuality.of({**FINE, "token_error": 0.6 + n / 200}, {}, "forward") for n in range(63)}
    judged[9] = judged[9]._replace(error=math.nan)
    judged[62] = judged[62]._replace(residual=math.inf)
    known = {(number, "forward"): each for number, each in judged.items()}
    monitor = SimpleNamespace(config=config, _warned=set(), message_quality=lambda: known)
    for _ in range(2):
        Monitor._warn(monitor)
    several, seven, last = caplog.messages
    assert several.startswith(
        "boundaries 0-6, 8, 10-61, forward, at worst: topk(density=0.02) has a token error of 0.91 ("
    )
    assert seven.startswith("boundary 7, forward: topk has a token error of 0.64 (")
    assert "boundary 62, forward: " in last and "of 0.91" in last and "a residual of inf messages" in last


def test_tokens_of_which_nothing_arrives_are_reported_however_few():
    """3 of 4,096 tokens raise the token error by 0.03, and the norm of the gradient by 1e5."""
    found, note = over({"token_error": 0.1, "lost_rows": 3 / 4096})
    assert found == ["lost_rows"] and "nothing left of 0.0732 % of the tokens" in note
    assert over({"lost_rows": 0.5}, direction="backward")[0] == []


def test_gradients_are_judged_by_what_does_not_average_out():
    """The best setting from scratch, stochastic rounding at an error of 0.70, was warned of."""
    stochastic = {"token_error": 0.7, "gradient_error": 0.2}
    assert over(stochastic, direction="backward")[0] == []
    assert over(stochastic)[0] == ["error"]
    found, note = over({"token_error": 0.15, "gradient_error": 0.9}, direction="backward")
    assert found == ["gradient_error"] and over({"gradient_error": 0.9})[0] == []
    assert "has an error of accumulated gradients of 0.90 (ds_compress.guard.gradient_error: 0.4)" in note
    assert over({"gradient_error": math.nan}, direction="backward")[0] == []


def test_residuals_that_stay_large():
    """One small gradient makes any residual a large share."""
    large = {**FINE, "residual_share": 338.0}
    assert over(large)[0] == over({}, large)[0] == over(large, {})[0] == []
    found, note = over({"residual_share": 966.4}, large)
    assert found == ["residual"] and "a residual of 338 messages (ds_compress.guard.residual: 100)" in note


def test_a_step_that_overflows_is_no_excess_but_two_in_a_row_are():
    """fp16 training skips a step now and then."""
    overflown = {**FINE, "nonfinite_share": 0.5}
    assert over(overflown)[0] == over(overflown, {})[0] == over({}, overflown)[0] == []
    found, note = over(overflown, overflown)
    assert found == ["nonfinite"] and "inf or nan in 50% of all (ds_compress.guard.nonfinite: 0)" in note


STOCHASTIC = {"name": "quantize", "bits": 2, "hadamard": True, "rounding": "stochastic"}
DEAD_ZONE = {"name": "entropy", "bits": 1.5}


def gradients(seed):
    """Few tokens have large gradients; what all have in common is small."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(128, generator=torch.Generator().manual_seed(99))
    size = torch.rand(8, 64, 1, generator=generator) ** 6
    return 0.2 * common + 3 * size * torch.randn(8, 64, 128, generator=generator)


def accumulated(arrives, messages=AVERAGED, sent=gradients):
    """Of so many messages; `arrives` returns what arrives of one, by its number."""
    found = GradientError()
    for number in range(messages):
        x = sent(number)
        found.add([x], [arrives(number, x)])
    return found


def through(choice):
    """For `accumulated`: what a codec makes of a gradient."""
    return lambda number, x: roundtrip(choice, x, micro_batch=number, direction="backward")


def centered(number):
    """Gradients that add up to 0."""
    x = gradients(number).flatten(0, 1)
    return x - x.mean(0)


def test_a_dead_zone_is_worse_than_unbiased_rounding_of_twice_its_error():
    """By their relative errors it was the other way round."""
    x = gradients(0)
    assert error_of(STOCHASTIC, x) > 1.3 * error_of(DEAD_ZONE, x)
    unbiased, biased = accumulated(through(STOCHASTIC)), accumulated(through(DEAD_ZONE))
    assert unbiased.value < 0.2 < 0.4 < biased.value
    assert unbiased.bias_and_total()[0] < 0.1


def test_sums_that_cancel_tell_nothing_of_unbiased_noise():
    """Behind batch normalization gradients add up to 0: recipes had an error of 1 under a CNN, and cost
    nothing."""
    assert accumulated(through(STOCHASTIC), sent=centered).value < 0.3


@pytest.mark.parametrize("sent", [gradients, centered])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("messages", [1, AVERAGED])
def test_a_codec_that_loses_all_is_seen_as_losing_all(messages, share, sent):
    """Where gradients have no significant mean the error never exceeded .354, below the limit."""
    found = accumulated(lambda number, x: share * x, messages, sent)
    assert found.value == pytest.approx(1 - share, rel=0.01)


def test_a_codec_that_sends_few_entries_loses_the_others():
    """The guard missed randomk of 1 % backward, whose training loss was 5.4 % higher."""
    assert accumulated(through({"name": "randomk", "density": 0.01}), sent=centered).value > 0.9


def with_explosion(number):
    """Gradients of which one token's are 10,000 times as large, as behind an RMSNorm of a row of zeros."""
    x = gradients(number)
    x.view(-1, x.shape[-1])[7 * number] *= 1e4 / x.view(-1, x.shape[-1])[7 * number].abs().max()
    return x


def test_a_gradient_that_explodes_hides_no_other_token():
    """All tokens but one were lost, and the error of accumulated gradients was 0.05."""

    def largest_alone(number, x):
        return torch.where(x.abs().amax(-1, keepdim=True) > 1e3, x, 0.0)

    assert accumulated(largest_alone, sent=with_explosion).value > 0.4
    assert accumulated(through("bf16"), sent=with_explosion).value < 0.01


@pytest.mark.parametrize("messages", [1, 2])
def test_few_messages_tell_a_large_bias(messages):
    assert accumulated(through(STOCHASTIC), messages).value < 0.25
    assert accumulated(through(DEAD_ZONE), messages).value > 0.3


@pytest.mark.parametrize("scale, dtype", [(1e-30, torch.float32), (1e25, torch.float32), (1, torch.bfloat16)])
def test_units_do_not_matter(scale, dtype):
    def scaled(number):
        return (scale * gradients(number)).to(dtype)

    expected = accumulated(through("topk")).value
    assert accumulated(through("topk"), sent=scaled).value == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 16), (4, 8, 6, 6)])
def test_a_share_that_is_always_lost_is_the_error(shape):
    """Whatever the shape; columns of images are their channels."""

    def positive(number):
        return 1 + torch.rand(shape, generator=torch.Generator().manual_seed(number))

    assert accumulated(lambda number, x: 0.75 * x, 3, positive).value == pytest.approx(0.25, rel=0.2)


def test_what_says_nothing_is_unknown():
    found = GradientError()
    assert math.isnan(found.value)
    found.add([torch.zeros(4, 8)], [torch.zeros(4, 8)])
    assert math.isnan(found.value)
    found.add([torch.full((4, 8), math.inf)], [torch.full((4, 8), math.nan)])
    assert math.isnan(found.value), "an overflow is not of compression's making"
    x = torch.rand(6, 16)
    found.add([x], [x])
    assert found.value == 0, "of messages of another shape nothing is kept"
    found.add([0 * x], [0 * x])
    assert found.value == 0, "a micro-batch whose labels are all masked hides no other"


def test_what_is_taken_where_no_gradients_are_at_hand():
    assert estimate_gradient_error(0.5, is_unbiased=True) < 0.2 < 0.5 < estimate_gradient_error(0.5, False)
