"""The outer step and its packets: torch's Nesterov, nothing lost but the residual, no damaged packet."""

import hashlib
import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from ds_compress.config.replicas import OuterOptions, ReplicasOptions, build_replica_codec
from ds_compress.errors import CompressionError
from ds_compress.feedback.state import residuals
from ds_compress.replicas.slices import GRADIENT
from ds_compress.sites.outer_step import LENGTH, Anchor, DeltaCodec, DeltaPart
from tests.support.launch_scripts import ROOT

PARTS, EXACT = [DeltaPart(0, 20_000), DeltaPart(3, 16_384)], 77
FOUR_BITS = {"name": "quantize", "bits": 4}
VALUES = {"name": "quantize", "bits": 3, "group_size": 64}
TOPK = {"name": "topk", "density": 0.016, "indices": "rice", "values": VALUES}


def delta_codec(codec, feedback="ef", parts=PARTS, exact=EXACT):
    options = ReplicasOptions(codec=codec, feedback=feedback, every=30)
    return DeltaCodec(build_replica_codec(options, "replicas"), parts, exact, 1)


def random_delta(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 0.01 * torch.randn(20_000 + 16_384 + EXACT, generator=generator)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0)])
def test_the_outer_step_is_torchs_nesterov(lr, momentum):
    weights = torch.nn.Parameter(random_delta())
    sgd = torch.optim.SGD([weights], lr=lr, momentum=momentum, nesterov=momentum > 0)
    anchor = Anchor(weights.detach().clone(), torch.zeros_like(weights))
    for step in range(5):
        weights.grad = random_delta(step + 1)
        sgd.step()
        anchor = anchor.step(weights.grad, OuterOptions(lr=lr, momentum=momentum))
    assert torch.allclose(anchor.values, weights, atol=1e-7)


@pytest.mark.parametrize("codec", ["none", FOUR_BITS, TOPK], ids=str)
def test_packets_and_residual_are_all_that_was_learned(codec):
    """I2: summed over rounds, decoded packets are the deltas but for the residual."""
    sender, receiver = delta_codec(codec), delta_codec(codec)
    sent = arrived = torch.zeros(())
    for number in range(4):
        delta = random_delta(number)
        packet = sender.encode(delta, number, 5)
        assert packet.numel() == sender.nbytes
        sent, arrived = sent + delta, arrived + receiver.decode(packet, number, 5)
    left = [e for memory in sender.residuals().values() for e in residuals(memory, GRADIENT)]
    lost = torch.cat([*left, torch.zeros(sent.numel() - sum(e.numel() for e in left))])
    assert torch.allclose(sent, arrived + lost, atol=1e-6)
    assert torch.equal(arrived[-EXACT:], sent[-EXACT:])


def test_topk_is_146_times_smaller_than_fp32():
    """SparseLoCo's figure (arXiv 2508.15706), for the parts that are compressed."""
    few = delta_codec(TOPK, parts=[DeltaPart(0, 2**20)], exact=0)
    assert 4 * few.numel / few.nbytes > 146


def with_label(packet, label):
    return torch.cat([packet, torch.tensor([*label.encode(), *len(label).to_bytes(LENGTH, "little")]).byte()])


def bytes_of_ones(count):
    return lambda packet: torch.full((count,), 255, dtype=torch.uint8)


LABELS = ["[]", "1", "[" * 9000, '{"name": ' * 5000, '{"name": "topk", "feedback": []}']
"""Settings that nobody could have: some ended the round at all sites, a TypeError, a RecursionError."""
LABELS += [json.dumps(FOUR_BITS)]  # of a release without the other options


def longer(packet):
    """`packet` with zeros before the settings that it ends in."""
    size = int.from_bytes(bytes(packet[-LENGTH:].tolist()), "little") + LENGTH
    return torch.cat([packet[:-size], torch.zeros(64, dtype=torch.uint8), packet[-size:]])


HARMS = {
    "longer": longer,
    "a byte": lambda packet: packet ^ (torch.arange(len(packet)) == 5000).byte(),
    "shorter": lambda packet: packet[:-64],
    "no codec": lambda packet: torch.cat([packet[:-LENGTH], torch.zeros(LENGTH, dtype=torch.uint8)]),
    **{f"label {label[:9]}": partial(with_label, label=label) for label in LABELS},
    **{f"{count} bytes": bytes_of_ones(count) for count in (0, 1, LENGTH, 100)},
}


@pytest.mark.parametrize("harm", ["another round", "nan", *HARMS])
def test_a_packet_that_is_not_the_one_expected_is_refused(harm):
    codec, delta = delta_codec(FOUR_BITS), random_delta()
    if harm == "nan":
        delta[7] = torch.nan
    packet = codec.encode(delta, 3, 0)
    with pytest.raises(CompressionError):
        codec.decode(HARMS[harm](packet) if harm in HARMS else packet, 4 if harm == "another round" else 3, 0)


def test_settings_of_another_release_are_named():
    packet = with_label(delta_codec(FOUR_BITS).encode(random_delta(), 3, 0), LABELS[-1])
    with pytest.raises(CompressionError, match="its codec is not known here"):
        delta_codec(FOUR_BITS).decode(packet, 3, 0)


def test_models_that_differ_have_other_digests():
    digests = {
        delta_codec("none", parts=parts, exact=exact).digest for parts in (PARTS, []) for exact in (EXACT, 76)
    }
    assert len(digests) == 4


def test_each_replica_draws_random_bits_of_its_own():
    """With the same ones their errors would add up in the mean."""
    codec = delta_codec({**FOUR_BITS, "rounding": "stochastic"}, "none")
    one, other = (codec.encode(random_delta(), 0, sender) for sender in (0, 1))
    assert not torch.equal(codec.decode(one, 0, 0), codec.decode(other, 0, 1))


def rounds(lr, momentum):
    """The hash of an anchor after five rounds."""
    draws = torch.Generator().manual_seed(0)
    anchor = Anchor(*(torch.rand(5000, generator=draws) for _ in range(2)))
    for _ in range(5):
        anchor = anchor.step(torch.rand(5000, generator=draws), OuterOptions(lr=lr, momentum=momentum))
    return hashlib.sha256(torch.cat(anchor).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.7), (0.7, 0.9)])
@pytest.mark.extended
def test_an_anchor_is_the_same_on_every_processor(lr, momentum):
    """Some fuse a product with the sum: after 300 rounds 70 % of the values differed."""
    program = f"from tests.sites.test_outer_step import rounds; print(rounds({lr}, {momentum}))"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    found = subprocess.check_output([sys.executable, "-c", program], env=environment, cwd=ROOT, text=True)
    assert found.split()[-1] == rounds(lr, momentum)


@pytest.mark.parametrize("codec", ["none", {"name": "quantize", "bits": 8}, TOPK], ids=str)
@pytest.mark.parametrize("feedback", ["none", "ef", "loco"])
def test_a_packet_of_another_codec_is_decoded_as_its_sender_does(codec, feedback):
    sender, receiver = delta_codec(codec, feedback), delta_codec(FOUR_BITS)
    for number in range(2):
        packet = sender.encode(random_delta(number), number, 7)
        assert torch.equal(receiver.decode(packet, number, 7), sender.decode(packet, number, 7))
    own = receiver.encode(random_delta(2), 2, 0)
    assert torch.equal(receiver.decode(own, 2, 0), sender.decode(own, 2, 0))
