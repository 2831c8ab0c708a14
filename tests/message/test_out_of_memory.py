"""Out of memory is called what it is: neither a damaged packet, nor a lost neighbour, nor a bad Triton."""

import pytest
import torch
import zstandard

from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.kernels import backends
from ds_compress.message.channel import Boundary
from ds_compress.transport.p2p import PeerTimeout


def of_python():
    bytearray(1 << 60)


def of_the_cpu():
    torch.empty(1 << 60, dtype=torch.uint8)


def of_a_device():
    raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


def of_pinned_memory():
    raise RuntimeError("CUDA error: out of memory")


def of_zstd():
    raise zstandard.ZstdError("decompression error: Allocation error : not enough memory")


EXHAUSTED = [of_python, of_the_cpu, of_a_device, of_pinned_memory, of_zstd]


def error_of(action):
    with pytest.raises(Exception) as caught:
        action()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("exhausted", EXHAUSTED)
def test_while_decoding(exhausted):
    """It was called a packet damaged on its way, and sent people to look at their network."""
    config = Config({"forward": {"codec": "bf16"}, "min_numel": 0})
    sender, receiver = Boundary(0, config), Boundary(0, config)
    message_id, x = sender.forward.message_id(3, 0), torch.randn(4, 8)
    packet = sender.forward.encode([x], message_id).packet
    receiver.forward.codec.decode = lambda parts, spec, ctx: exhausted()
    message = receiver.forward.layout_of([x], message_id)
    assert error_of(lambda: receiver.forward.decode(packet, message, message_id)) == error_of(exhausted)


def send_with(failure):
    with PeerTimeout("boundary 0, forward").naming(1):
        failure()


@pytest.mark.parametrize("exhausted", EXHAUSTED)
def test_while_sending(exhausted):
    """Staging allocates for each transfer: its failure was called `rank 1 is gone`."""
    assert error_of(lambda: send_with(exhausted)) == error_of(exhausted)


def test_a_lost_neighbour_is_still_named():
    def lost():
        raise RuntimeError("[pair.cc:1] Connection closed. This means a remote process died")

    output = error_of(lambda: send_with(lost))
    assert output == (CompressionError, "boundary 0, forward: rank 1 is gone: Connection closed")


def test_while_triton_is_tried(monkeypatch):
    """The device went on with plain torch, for good, or stopped at the handshake as unlike the others."""
    broken = backends.Backend("triton", {"quantize": lambda *args, **options: of_a_device()})
    monkeypatch.setattr(backends, "load", lambda *args: broken)
    # there is no such device here
    monkeypatch.setattr(backends, "_values", lambda *args: torch.zeros(40, 128))
    backends.kernels.cache_clear()
    assert error_of(lambda: backends.kernels(torch.device("cuda", 7))) == error_of(of_a_device)
