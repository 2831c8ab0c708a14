"""Find out which float tensors of a message depend on parameters, and hold no mask.

A stage may pass on masks, position tables or ids beside its hidden state, as floats too. They follow from the
data alone and need no gradient, and a loss of precision in them is not noise but another model. They are sent
uncompressed.

Asking autograd is not enough: in evaluation it keeps nothing, a frozen stage has nothing, and a checkpointed
segment is one node for all that it returns. So every operation is observed while the tensors are computed:
outputs of an operation with a marked input are marked. Parameters are marked at first, and on later stages
those received tensors that were marked where they came from.

Kernels that torch does not see, as those of Triton, mark nothing. Where no tensor of a message is marked, the
hidden state is the only float one, or the only one that autograd knows.

A learned bias may hold a mask: its values are so large that nothing is left of the others in a group of a
codec. Such a tensor is sent uncompressed, too.
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
"""Operations that take only the shape of a tensor."""

MASKED = -1e8
"""Values below are those of a mask; in fp16, values below half of the lowest finite one."""


class DependencyTracker(TorchDispatchMode):
    """Mark what depends on the parameters of a module, in operations inside this context."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._module = module
        self._parameters: set[int] = set()
        self._marked: Any = WeakTensorKeyDictionary()
        self._is_paused = False
        self.has_looked = False
        """Whether it saw the operations of the latest pass; it sees none under schedules that programs
        iterate themselves."""

    def __enter__(self) -> Any:
        self.has_looked = True
        self._parameters = {id(parameter) for parameter in self._module.parameters()}
        return super().__enter__()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore the operations inside."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def mark(self, tensors: Iterable[Tensor]) -> None:
        """Mark those of `tensors` that are float."""
        for tensor in tensors:
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                self._marked[tensor] = True

    def mark_received(self, tensors: Sequence[Tensor], dependence: Sequence[bool]) -> None:
        """Mark received tensors.

        Args:
            tensors: of a message.
            dependence: of each float one among them, whether it depends on parameters.
        """
        floats = [tensor for tensor in tensors if tensor.dtype.is_floating_point]
        self.mark(tensor for tensor, depends in zip(floats, dependence) if depends)

    def dependence(
        self, tensors: Sequence[Tensor], known: tuple[bool, ...] | None
    ) -> tuple[bool, ...] | None:
        """Find out which tensors of a message depend on parameters and hold no mask.

        Args:
            tensors: of the message.
            known: what was found of an earlier message; it holds if that had as many float tensors.

        Returns:
            One value for each float tensor; None if it did not look while they were computed.
        """
        floats = [tensor for tensor in tensors if tensor.dtype.is_floating_point]
        if known and len(known) == len(floats):
            return known
        if not self.has_looked:
            return None
        marked = [self.depends_on_parameters(each) for each in floats]
        if not any(marked):  # made by a kernel that torch does not see
            marked = [each.grad_fn is not None or len(floats) == 1 for each in floats]
            marked = [depends and sum(marked) == 1 for depends in marked]
        return tuple(depends and not holds_mask(each) for depends, each in zip(marked, floats))

    def depends_on_parameters(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a parameter, or marked."""
        return id(tensor) in self._parameters or tensor in self._marked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if (
            not self._is_paused
            and func not in SHAPE_ALONE
            and any(map(self.depends_on_parameters, tensors_in((args, kwargs))))
        ):
            self.mark(tensors_in(made))
            for argument, value in zip(func._schema.arguments, args):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in tensors_in(value):
                        # what is written to through a view is written to
                        self.mark([tensor] if tensor._base is None else [tensor, tensor._base])
        return made


def holds_mask(tensor: Tensor) -> bool:
    """Return whether some values are those of a mask, as no activation is; this waits for the device."""
    lowest = max(MASKED, torch.finfo(tensor.dtype).min / 2)
    return tensor.numel() > 0 and bool((tensor.detach() < lowest).any())


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
