"""What a side of a boundary keeps from message to message, and the contexts that codecs get of it."""

import copy

from torch import Tensor

from ds_compress.codec import Context, MessageId
from ds_compress.config import Config


class BoundaryState:
    """One side of the cut between stages `number` and `number` + 1, without its channels."""

    def __init__(self, number: int, config: Config, replica: int = 0):
        """`replica`: data-parallel rank; it varies the random choices of the codecs."""
        self.number = number
        self.config = config
        self.replica = replica
        self.memory: dict[int, dict[str, Tensor]] = {}  # by tensor position
        self.sample_ids: dict[int, Tensor] = {}  # of the present step, by micro-batch
        self.loss_scale = 1.0  # of the gradients of the present step
        self.carrying: tuple[bool, ...] | None = None
        """Of each float tensor of a message, whether it carries what the model has learned (see `carrying`);
        None where nobody has said. Both sides are told the same."""
        self._stashes: dict[tuple[int, int], dict[str, Tensor]] = {}

    def begin_step(self, loss_scale: float = 1.0) -> None:
        """Forget what an interrupted step left; `loss_scale`: of the gradients until the next one."""
        self._stashes.clear()
        self.loss_scale = loss_scale

    def context(self, message_id: MessageId, position: int) -> Context:
        """The context of the float tensor at `position` in a message.

        In training a forward message leaves its stash for the backward message of the same micro-batch, which
        takes it away. Evaluation leaves nothing: its stash and its copy of the memory go with the context.
        """
        memory = self.memory.setdefault(position, {})
        forward = message_id.direction == "forward"
        key = (message_id.micro_batch, position)
        if not message_id.training:
            stash, memory = {}, dict(memory)
        elif forward:
            stash = self._stashes[key] = {}
        else:
            stash = self._stashes.pop(key, {})
        return Context(
            **vars(message_id),
            position=position,
            replica=self.replica,
            seed=self.config.block.seed,
            loss_scale=1.0 if forward else self.loss_scale,
            sample_ids=self.sample_ids.get(message_id.micro_batch) if forward else None,
            stash=stash,
            memory=memory,
        )

    def copied(self) -> "BoundaryState":
        """The same for now: what happens to the copy leaves no trace here."""
        other = copy.copy(self)
        other.memory = {position: dict(memory) for position, memory in self.memory.items()}
        other.sample_ids = dict(self.sample_ids)
        other._stashes = {key: dict(stash) for key, stash in self._stashes.items()}
        return other
