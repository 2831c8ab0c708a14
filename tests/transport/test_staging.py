"""Packets through host memory, where the backend cannot send a device's: bytes, order, failures."""

import os
import time

import pytest
import torch
from deepspeed.runtime.pipe import p2p
from torch import distributed as dist

from ds_compress.engine import attach
from ds_compress.errors import CompressionError
from ds_compress.transport import staging
from ds_compress.transport.p2p import (
    EagerReceiver,
    EagerSender,
    PeerTimeout,
    Receiver,
    Sender,
    channel_groups,
)
from tests.support.ranks import run_ranks
from tests.transport.streams import install

CPU = torch.device("cpu")
SIZES = [64] * 9 + [*range(64, 64 * 9, 64)]


def packets(ends):
    """What rank 1 gets of packets that rank 0 fills anew as soon as it may."""
    device = install(staged=True)
    group, (sending, receiving) = channel_groups(1)[0, "forward"], ends
    if dist.get_rank() == 1:
        receiver = receiving(0, CPU, group)
        receiver.expect(64, 9)
        return [receiver.receive(size).unique().tolist() for size in SIZES], device.problems
    sender = sending(1, CPU, group)
    for number, size in enumerate(SIZES):
        sender.send(sender.memory(size).fill_(number))
    sender.drain()
    return len(sender._transport._free), device.problems


@pytest.mark.parametrize(
    "ends", [(Sender, Receiver), (EagerSender, EagerReceiver)], ids=["blocking", "eager"]
)
def test_packets_arrive_in_order(ends):
    (buffers, sent), (seen, received) = run_ranks(2, packets, ends)
    assert seen == [[number] for number in range(len(SIZES))]
    assert not sent + received
    assert buffers <= 4


def failing(how, message):
    """Rank 0 writes what it is told when rank 1 dies, or does not answer."""
    install(staged=True)
    group = channel_groups(1)[0, "forward"]
    dist.barrier()
    if dist.get_rank() == 1:
        while how == "sleeps" and not message.exists():
            time.sleep(0.01)
        os._exit(0)
    timeout = PeerTimeout("boundary 0, backward", 2 if how == "sleeps" else 600)
    with pytest.raises(CompressionError) as caught:
        EagerReceiver(1, CPU, group, timeout).receive(64)
    message.write_text(str(caught.value))
    os._exit(0)


@pytest.mark.parametrize("how, message", [("dies", "is gone"), ("sleeps", "did not answer within 2 s")])
def test_failures_are_named(how, message, tmp_path):
    run_ranks(2, failing, how, tmp_path / "message", check=False)
    assert f"boundary 0, backward: rank 1 {message}" in (tmp_path / "message").read_text()


@pytest.mark.parametrize(
    "backends, device, needed",
    [
        ("cpu:gloo,cuda:gloo", "cuda", True),
        ("cpu:gloo,cuda:nccl", "cuda", False),
        ("cpu:gloo,cuda:gloo", "cpu", False),
    ],
)
def test_gloo_cannot_send_what_is_on_a_gpu(backends, device, needed, monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    assert staging.is_needed(torch.device(device)) is needed


@pytest.mark.parametrize("needed", [False, True])
def test_deepspeeds_own_messages_are_broadcast_where_they_must(needed, monkeypatch):
    before = p2p.can_send_recv
    monkeypatch.setattr(p2p, "can_send_recv", before)
    monkeypatch.setattr(staging, "is_needed", lambda device: needed)
    attach.prepare()
    assert p2p.can_send_recv() is not needed
    assert needed or p2p.can_send_recv is before


def backend_config():
    return dist.get_backend_config()


def test_the_backends_of_a_group_are_named_as_expected():
    assert "cpu:gloo" in run_ranks(1, backend_config)[0].split(",")
