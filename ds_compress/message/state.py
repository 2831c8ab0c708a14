"""What a side of a boundary keeps from message to message, and the contexts that codecs get of it."""

import copy
from typing import Any

from torch import Tensor

from ds_compress.codec import Codec, Context, MessageId
from ds_compress.codecs.mixins import CodecWrapper, Stateful, layers
from ds_compress.config import DIRECTIONS, Config


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
        self.warmup_end = 0
        """Step until which messages cross uncompressed, beside the warm-up of the block: a boundary that lost
        what its codecs learned goes through the warm-up again. Both sides have the same."""
        self.dependence: tuple[bool, ...] | None = None
        """Of each float tensor of a message, whether it depends on parameters; None while that is not known.
        Equal on both sides."""
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
        return Context(  # by name: ** would make a dict of all of them
            boundary=message_id.boundary,
            direction=message_id.direction,
            step=message_id.step,
            micro_batch=message_id.micro_batch,
            training=message_id.training,
            position=position,
            replica=self.replica,
            seed=self.config.block.seed,
            loss_scale=1.0 if forward else self.loss_scale,
            sample_ids=self.sample_ids.get(message_id.micro_batch) if forward else None,
            stash=stash,
            memory=memory,
        )

    def pass_by(self, message_id: MessageId, position: int) -> None:
        """Drop what the forward message kept for the gradient at `position`, which is sent uncompressed."""
        if message_id.training and message_id.direction == "backward":
            self._stashes.pop((message_id.micro_batch, position), None)

    def drop(self, direction: str, old: Codec, new: Codec) -> None:
        """Forget what `old` has left in `direction` that `new` cannot go on with.

        A feedback goes on where its settings stay: what it keeps is about messages, whatever the codec inside
        makes of them. A codec goes on where its own do.
        """
        other = next(name for name in DIRECTIONS if name != direction)
        feedback = _feedback(old) == _feedback(new)
        codec = _inner(old).settings == _inner(new).settings or not isinstance(_inner(old), Stateful)

        def stays(key: str) -> bool:
            if key.startswith(tuple(f"{name}/" for name in DIRECTIONS)):
                return feedback or key.startswith(f"{other}/")
            return codec or other in key.split(".")

        for position, memory in self.memory.items():
            self.memory[position] = {key: value for key, value in memory.items() if stays(key)}

    def copied(self) -> "BoundaryState":
        """The same for now: what happens to the copy leaves no trace here."""
        other = copy.copy(self)
        other.memory = {position: dict(memory) for position, memory in self.memory.items()}
        other.sample_ids = dict(self.sample_ids)
        other._stashes = {key: dict(stash) for key, stash in self._stashes.items()}
        return other


def _inner(codec: Codec) -> Codec:
    """`codec` without a feedback round it."""
    return list(layers(codec, Codec))[-1]  # type: ignore[type-abstract]


def _feedback(codec: Codec) -> Any:
    """Settings of the feedback round `codec`; None where there is none."""
    return codec.settings["feedback"] if isinstance(codec, CodecWrapper) else None
