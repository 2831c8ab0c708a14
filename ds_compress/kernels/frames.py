"""zstd frames of a size that is known before."""

import torch
import zstandard
from torch import Tensor


def unpack(frame: Tensor, nbytes: int) -> Tensor:
    """The uint8 [nbytes] that `frame`, uint8 on the CPU, holds; writable.

    A frame says how large its contents are, and the library allocates what it says: a damaged one would fill
    the machine, whatever limit is passed on.

    Raises:
        ValueError: the frame says another size.
        zstandard.ZstdError: it is not a frame, or damaged.
    """
    data = frame.numpy().data
    declared = zstandard.get_frame_parameters(data).content_size
    if declared != nbytes:
        raise ValueError(f"a zstd frame of {declared} bytes came, expected {nbytes}")
    return torch.frombuffer(bytearray(zstandard.ZstdDecompressor().decompress(data)), dtype=torch.uint8)
