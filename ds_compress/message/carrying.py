"""Which float tensors of a message carry what the model has learned.

A stage may pass on masks, position tables or ids beside its hidden state, as floats too. They follow from the
data alone: no parameter has touched them, no gradient is wanted for them, and a loss of precision in them is
not noise but another model. They cross as they are.

Asking autograd is not enough: in evaluation it keeps nothing, a frozen stage has nothing, and a checkpointed
segment is one node for all that it returns. So while the tensors are computed, every operation is looked at:
what one with a carrying input makes, carries too. It begins with the parameters, and on later stages with
those received tensors that carried where they came from.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

SHAPE_ALONE = {
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.full_like.default,
    torch.ops.aten.rand_like.default,
    torch.ops.aten.randn_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.new_ones.default,
    torch.ops.aten.new_full.default,
}
"""Operations that take no more from a tensor than how large it is."""


class Tracking(TorchDispatchMode):
    """A context: operations inside it pass on what carries. What is not float carries nothing."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._module = module
        self._parameters: set[int] = set()
        self._carrying: Any = WeakTensorKeyDictionary()
        self._paused = False

    def __enter__(self) -> Any:
        self._parameters = {id(parameter) for parameter in self._module.parameters()}
        return super().__enter__()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are not looked at."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Those of `tensors` that are float carry."""
        for tensor in tensors:
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                self._carrying[tensor] = True

    def of(self, tensors: Sequence[Tensor], known: tuple[bool, ...] | None) -> tuple[bool, ...]:
        """Of each float tensor of a message, whether it carries; `known`, of an earlier one, if that had as
        many."""
        floats = [tensor for tensor in tensors if tensor.dtype.is_floating_point]
        return known if known and len(known) == len(floats) else tuple(map(self.carries, floats))

    def add_float(self, tensors: Sequence[Tensor], carrying: Sequence[bool]) -> None:
        """Of the float ones among the received `tensors`, those carry that `carrying` says it of."""
        floats = [tensor for tensor in tensors if tensor.dtype.is_floating_point]
        self.add(tensor for tensor, carries in zip(floats, carrying) if carries)

    def carries(self, tensor: Tensor) -> bool:
        return id(tensor) in self._parameters or tensor in self._carrying

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if (
            not self._paused
            and func not in SHAPE_ALONE
            and any(map(self.carries, tensors_in((args, kwargs))))
        ):
            self.add(tensors_in(made))
            for argument, value in zip(func._schema.arguments, args):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in tensors_in(value):
                        # what is written to through a view is written to
                        self.add([tensor] if tensor._base is None else [tensor, tensor._base])
        return made


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
