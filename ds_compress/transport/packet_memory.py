"""The memory of a packet, which links use again."""

from collections.abc import Callable

import torch
from torch import Tensor


class Packet:
    """Owns the bytes of one message, and the views of them that its layout has made.

    Views are made once, as each operation of torch costs as much as a thousand values.
    """

    __slots__ = ("bytes", "layout", "memory", "nbytes", "views")

    def __init__(self, memory: Tensor):
        """Own `memory`, uint8, 1-D."""
        self.memory, self.nbytes = memory, memory.numel()
        self.bytes = memory.numpy().data if memory.is_cpu else None
        """The same memory without an operation of torch; None on a device."""
        self.layout: object = None
        self.views: tuple[Tensor, ...] = ()
        """Those that `layout` has made."""


@torch.inference_mode(False)
def new_packet(nbytes: int, device: torch.device, make: Callable[..., Tensor] = torch.zeros) -> Packet:
    """Return a packet of so many bytes that `make` has allocated.

    Training uses the packets of an evaluation again, and cannot write to tensors of inference mode.
    """
    return Packet(make(nbytes, dtype=torch.uint8, device=device))
