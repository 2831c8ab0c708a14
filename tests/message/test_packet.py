"""Packets carry what they were given, and refuse what they were not; out of memory is called what it is."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.codec import MessageId
from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.kernels import backends
from ds_compress.message.channel import Boundary
from ds_compress.message.packet import ALIGNMENT, HEADER_SIZE, Header, PacketLayout
from ds_compress.replicas.transfers import Replicas, replica_failures
from ds_compress.transport.p2p import PeerTimeout
from ds_compress.transport.packet_memory import Packet
from tests.support.refusals import refusal

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int32, torch.int64, torch.bool]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
LAYOUTS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=5).map(tuple)


MESSAGE = MessageId(1, "forward", 7, 3)


CPU = torch.device("cpu")
FOUR = PacketLayout((((4,), torch.float32),), None)


def payload(layout):
    return tuple(torch.randint(0, 2, shape).to(dtype) for shape, dtype in layout.parts)


def written(layout, message_id=MESSAGE):
    packet = layout.allocate(CPU)
    layout.write(packet, message_id, payload(layout))
    return packet


@settings(max_examples=200, deadline=None)
@given(LAYOUTS)
def test_round_trip(parts):
    layout = PacketLayout(parts, "settings")
    packet, sent = layout.allocate(CPU), payload(layout)
    layout.write(packet, MESSAGE, sent)
    layout.check(packet, MESSAGE)
    assert packet.nbytes == packet.memory.numel() == layout.nbytes and packet.nbytes % ALIGNMENT == 0
    for part, view in zip(sent, layout.views(packet)):
        assert torch.equal(part, view) and part.dtype == view.dtype
        assert view.numel() == 0 or (view.data_ptr() - packet.memory.data_ptr()) % ALIGNMENT == 0


@given(
    st.integers(0, 2**16 - 1),
    st.sampled_from(["forward", "backward"]),
    st.integers(0, 2**40),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_header_round_trip(boundary, direction, step, micro_batch, training):
    layout = PacketLayout((), None)
    message_id = MessageId(boundary, direction, step, micro_batch, training)
    packet = layout.allocate(CPU)
    layout.write_header(packet, message_id)
    known = {"fingerprint": layout.fingerprint, "nbytes": layout.nbytes}
    expected = Header(**{**vars(message_id), "step": step % 2**32}, **known)
    assert Header.unpack(packet.bytes.tobytes()) == expected


OTHERS = {"boundary": 2, "direction": "backward", "step": 8, "micro_batch": 4, "training": False}


@pytest.mark.parametrize("field", [*OTHERS, "fingerprint"])
def test_another_message_is_named(field):
    layout = PacketLayout(FOUR.parts, "other settings" if field == "fingerprint" else None)
    packet = written(layout, replace(MESSAGE, **{key: OTHERS[key] for key in OTHERS if key == field}))
    line = refusal(FOUR.check, packet, MESSAGE)
    assert f"boundary 1, forward, step 7, micro-batch 3: its {field} is" in line


def test_wrong_sizes_are_refused():
    assert "47 bytes came, expected 48" in refusal(FOUR.views, Packet(torch.zeros(47, dtype=torch.uint8)))
    assert "shorter than the header" in refusal(Header.unpack, bytes(HEADER_SIZE - 1))
    packet = FOUR.allocate(CPU)
    for parts, line in (
        ((torch.zeros(5),), "payload of (5,)"),
        ((torch.zeros(4, dtype=torch.float64),), "float64"),
        (payload(FOUR) * 2, "2 payload tensors came"),
    ):
        assert line in refusal(FOUR.write, packet, MESSAGE, parts)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, (HEADER_SIZE + 48) * 8 - 1), st.booleans())
def test_no_flipped_bit_passes(bit, has_checksum):
    """Without a checksum none of the header."""
    bit %= HEADER_SIZE * 8 if not has_checksum else 2**30
    layout = PacketLayout((((4,), torch.float32), ((20,), torch.uint8)), None, has_checksum)
    packet = written(layout)
    layout.check(packet, MESSAGE)
    packet.memory[bit // 8] ^= 1 << bit % 8
    line = refusal(layout.check, packet, MESSAGE)
    assert bit < HEADER_SIZE * 8 or line.endswith("its checksum is another: it was damaged on its way")


def test_only_one_side_with_a_checksum_is_refused():
    layout = PacketLayout(FOUR.parts, None, has_checksum=True)
    assert "its checksum is another" in refusal(layout.check, written(FOUR), MESSAGE)


def test_a_packet_is_looked_at_through_the_same_views_and_goes_with_them():
    """Links use its memory again; views that held the packet itself would keep it for ever."""
    layout, other = FOUR, PacketLayout(FOUR.parts, "other settings")
    packet = layout.allocate(CPU)
    first = layout.views(packet)
    assert layout.views(packet) is first
    assert other.views(packet)[0] is not first[0] and layout.views(packet)[0] is not first[0]
    layout.write(packet, MESSAGE, (torch.arange(4.0),))
    assert torch.equal(first[0], torch.arange(4.0))
    gone = weakref.ref(packet.memory)
    gc.disable()
    try:
        del packet, first
        assert gone() is None
    finally:
        gc.enable()


def raising(error):
    def action(*arguments, **options):
        raise error

    return action


of_a_device = raising(torch.OutOfMemoryError("Tried to allocate 2.00 GiB"))
EXHAUSTED = {
    "Python": lambda: bytearray(1 << 60),
    "the CPU": lambda: torch.empty(1 << 60, dtype=torch.uint8),
    "a device": of_a_device,
    "pinned memory": raising(RuntimeError("CUDA error: out of memory")),
    "a kernel of the model": raising(RuntimeError("CUDA error: device-side assert triggered")),
    "a kernel of Triton": raising(
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    ),
    "NCCL": raising(
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.27.5")
    ),
    "zstd": raising(zstandard.ZstdError("decompression error: Allocation error : not enough memory")),
}
EACH_EXHAUSTED = pytest.mark.parametrize("exhausted", EXHAUSTED.values(), ids=EXHAUSTED)


def error_of(action):
    with pytest.raises(Exception) as caught:
        action()
    return type(caught.value), str(caught.value)


@EACH_EXHAUSTED
def test_while_decoding(exhausted):
    """It was called a packet damaged on its way, and sent people to look at their network; so was a failed
    kernel of the model, such as an index out of range, whose error shows up in what is called next."""
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


@EACH_EXHAUSTED
def test_between_replicas(exhausted):
    """A failed kernel of the model was called an error of the gradients between replicas."""

    def send():
        with replica_failures(Replicas(2, 0)):
            exhausted()

    assert error_of(send) == error_of(exhausted)


@EACH_EXHAUSTED
def test_while_sending(exhausted):
    """Staging allocates for each transfer: its failure was called `rank 1 is gone`."""
    assert error_of(lambda: send_with(exhausted)) == error_of(exhausted)


def test_a_lost_neighbour_is_still_named():
    lost = raising(RuntimeError("[pair.cc:1] Connection closed. This means a remote process died"))
    output = error_of(lambda: send_with(lost))
    assert output == (CompressionError, "boundary 0, forward: rank 1 is gone: Connection closed")


def test_while_triton_is_tried(monkeypatch):
    """The device went on with plain torch, for good, or stopped at the handshake as unlike the others."""
    broken = backends.Backend("triton", {"quantize": of_a_device})
    monkeypatch.setattr(backends, "load", lambda *args: broken)
    # there is no such device here
    monkeypatch.setattr(backends, "_values", lambda *args: torch.zeros(40, 128))
    backends.kernels.cache_clear()
    assert error_of(lambda: backends.kernels(torch.device("cuda", 7))) == error_of(of_a_device)
