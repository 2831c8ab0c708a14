"""The packet: the bytes of one message, one contiguous uint8 tensor of a size both sides know beforehand.

    offset  size  field
         0     4  magic "DSCP"
         4     1  version of this layout
         5     1  flags: 1 backward, 2 evaluation
         6     2  boundary
         8     4  step, modulo 2^32
        12     4  micro-batch
        16     8  fingerprint of tensor specs, settings and offsets, equal on both sides
        24     4  CRC-32 of the body ("link": {"checksum": true}), otherwise 0
        28     4  size of the packet in units of 16 bytes
        32     .  body: payload tensor 0, 1, ... each at a multiple of 16 bytes, zeros between

All numbers are little-endian. The alignment lets the receiver use the body in place, as views of any dtype.

Uncompressed tensors are copied into the packet too. Sending header and tensor apart would save a copy of
large tensors, which is short beside their transfer, and cost small messages one more transfer on each side.
Receives are posted for one packet of a known size. An eager send must not read memory that the program may
write to before the transfer ends.
"""

import functools
import hashlib
import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_compress.codec import Layout, MessageId
from ds_compress.errors import CompressionError
from ds_compress.kernels.memory import fill
from ds_compress.transport.packet_memory import Packet, new_packet

MAGIC = b"DSCP"
VERSION = 3
ALIGNMENT = 16
_HEADER = struct.Struct("<4sBBHII8sII")
_PACK = functools.partial(_HEADER.pack, MAGIC, VERSION)
HEADER_SIZE = _HEADER.size
_BACKWARD, _EVALUATION = 1, 2
_FLAGS = {
    (direction, training): _BACKWARD * (direction == "backward") + _EVALUATION * (not training)
    for direction in ("forward", "backward")
    for training in (False, True)
}


@dataclass(kw_only=True)
class Header(MessageId):
    """Which message a packet holds, and how."""

    fingerprint: bytes
    nbytes: int

    @classmethod
    def unpack(cls, data: bytes) -> "Header":
        """Read the header in the first bytes of `data`.

        Raises:
            CompressionError: too short, not a packet, or of another version.
        """
        if len(data) < HEADER_SIZE:
            raise CompressionError(f"packet: {len(data)} bytes are shorter than the header of {HEADER_SIZE}")
        magic, version, flags, boundary, step, micro_batch, fingerprint, _, units = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise CompressionError(
                f"packet: starts with {magic!r}, not {MAGIC!r}: not a packet of ds_compress"
            )
        if version != VERSION:
            raise CompressionError(
                f"packet: version {version}, this side reads {VERSION}: install one release"
            )
        direction = "backward" if flags & _BACKWARD else "forward"
        training = not flags & _EVALUATION
        nbytes = units * ALIGNMENT
        return cls(boundary, direction, step, micro_batch, training, fingerprint=fingerprint, nbytes=nbytes)


class PacketLayout:
    """Where the payload tensors of one kind of message lie in its packet."""

    def __init__(self, parts: Layout, settings: object, has_checksum: bool = False):
        """
        Args:
            settings: whatever else both sides must agree on; it enters the fingerprint by its `repr`.
            has_checksum: whether a checksum of the body goes along.
        """
        self.parts = parts
        # of each part: dtype, shape, strides, and how many entries of the dtype stand before it
        self._places = list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]]()
        end = HEADER_SIZE
        for shape, dtype in parts:
            strides = torch.empty(shape, dtype=dtype, device="meta").stride()
            self._places.append((dtype, shape, strides, end // dtype.itemsize))
            end += -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.nbytes, self._units = end, end // ALIGNMENT
        self.has_checksum = has_checksum
        identity = repr((VERSION, parts, settings))
        self.fingerprint = hashlib.blake2b(identity.encode(), digest_size=8).digest()

    def allocate(self, device: torch.device) -> Packet:
        """Allocate a packet of zeros, so that the gaps are the same on every run."""
        return new_packet(self.nbytes, device)

    def views(self, packet: Packet) -> tuple[Tensor, ...]:
        """Return the payload tensors inside `packet`, without a copy.

        Raises:
            CompressionError: the packet has another size.
        """
        if packet.layout is self:
            return packet.views
        if packet.nbytes != self.nbytes:
            raise CompressionError(f"packet: {packet.nbytes} bytes came, expected {self.nbytes}")
        made, wide = list[Tensor](), {torch.uint8: packet.memory}
        for dtype, shape, strides, start in self._places:
            whole = wide.get(dtype)
            if whole is None:
                whole = wide[dtype] = packet.memory.view(dtype)
            made.append(whole.as_strided(shape, strides, whole.storage_offset() + start))
        packet.layout, packet.views = self, tuple(made)
        return packet.views

    def write(self, packet: Packet, message_id: MessageId, parts: tuple[Tensor, ...]) -> None:
        """Fill `packet` with the header and the payload tensors, which must match the layout.

        Raises:
            CompressionError: a part has another shape or dtype than its layout promised.
        """
        fill(self.views(packet), parts)
        self.write_header(packet, message_id)

    def write_header(self, packet: Packet, message_id: MessageId) -> None:
        """Write the header of `message_id` in front of a packet whose body is complete."""
        data, memory = self._header(packet, message_id), packet.memory
        if packet.bytes is not None:
            packet.bytes[:HEADER_SIZE] = data
            return
        start = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if memory.is_cuda:  # from pageable memory the host would wait for the copy
            start = start.pin_memory()
        memory[:HEADER_SIZE].copy_(start, non_blocking=True)

    def check(self, packet: Packet, message_id: MessageId, place: str = "boundary") -> None:
        """Refuse `packet` unless it is the message `message_id`.

        Args:
            place: what `message_id.boundary` is the number of.

        Raises:
            CompressionError: naming the first field that differs, what came and what was expected.
        """
        expected, data = self._header(packet, message_id), packet.bytes
        if data is None:  # a copy, for which the host waits
            data = packet.memory[:HEADER_SIZE].cpu().numpy().data
        if data[:HEADER_SIZE] == expected:
            return
        came, wanted = Header.unpack(data.tobytes()), Header.unpack(expected)
        number = f"step {message_id.step}, micro-batch {message_id.micro_batch}"
        where = f"packet for {place} {message_id.boundary}, {message_id.direction}, {number}"
        for name in ("boundary", "direction", "training", "step", "micro_batch", "nbytes", "fingerprint"):
            theirs, ours = getattr(came, name), getattr(wanted, name)
            if theirs != ours:
                what = place if name == "boundary" else name
                raise CompressionError(f"{where}: its {what} is {_shown(theirs)}, expected {_shown(ours)}")
        if self.has_checksum:
            raise CompressionError(f"{where}: its checksum is another: it was damaged on its way")
        raise CompressionError(f"{where}: the header has unknown bits set")

    def _header(self, packet: Packet, message_id: MessageId) -> bytes:
        """Return the header of `message_id`, with the checksum of the body of `packet` if there is one."""
        flags, boundary = _FLAGS[message_id.direction, message_id.training], message_id.boundary
        step, number = message_id.step % 2**32, message_id.micro_batch
        checksum = zlib.crc32(packet.memory[HEADER_SIZE:].cpu().numpy().data) if self.has_checksum else 0
        return _PACK(flags, boundary, step, number, self.fingerprint, checksum, self._units)


def _shown(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value
