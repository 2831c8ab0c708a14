"""What stands in a model where a part of it is missing."""

from typing import Any

import torch
from torch import Tensor, nn


class Hollow(nn.Module):
    """In the place of a layer or norm: passes on its first argument; of an embedding: adds zeros.

    It keeps the plain attributes of what it replaces, as some models ask their layers what kind they are.
    """

    def __init__(self, replaced: nn.Module, dtype: torch.dtype, members: int = 0):
        """`members`: length of the tuple that `replaced` returns; 0 where it returns a tensor."""
        super().__init__()
        for name, value in vars(replaced).items():
            if not name.startswith("_") and isinstance(value, bool | int | float | str | None):
                setattr(self, name, value)
        self._zeros = dtype if isinstance(replaced, nn.Embedding) else None
        self._members = members

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first: Tensor = args[0] if args else next(iter(kwargs.values()))
        if self._members:
            return (first, *[None] * (self._members - 1))
        if self._zeros is None:
            return first
        return torch.zeros(*first.shape, 1, dtype=self._zeros, device=first.device)
