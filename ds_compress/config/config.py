"""Resolve the block: build the codecs of every boundary, and check options that depend on each other."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ds_compress.codecs  # noqa: F401  (registers them)
from ds_compress.codec import CODECS, Codec
from ds_compress.codecs.lowrank import LowRank
from ds_compress.codecs.mixins import (
    ReusesForwardIndices,
    VariableSizePayload,
)
from ds_compress.config.block import DIRECTIONS, KEY, Block
from ds_compress.config.checks import check, check_nesting, check_policy, feedback_notes, unused_options
from ds_compress.config.policies import POLICIES
from ds_compress.config.policies.ladder import check as check_ladders
from ds_compress.config.policies.ladder import replica_ladder
from ds_compress.config.recipes import with_changes, with_recipe
from ds_compress.config.replicas import build_replica_codec, replica_notes
from ds_compress.errors import REQUIRE, CompressionError, errors_at, is_required, shown
from ds_compress.feedback import FEEDBACKS, Feedback
from ds_compress.feedback.aqsgd.sample_ids import SampleIds
from ds_compress.kernels.backends import prepare
from ds_compress.registry import validate
from ds_compress.registry.plugins import load_installed

HEADERS = 128
"""Bytes that the headers of a message and the places between its parts take, at most."""


@dataclass(frozen=True)
class BoundaryCodecs:
    """The codecs of one boundary, each wrapped in its feedback, and the feedbacks alone."""

    forward: Codec
    backward: Codec
    feedbacks: dict[str, Feedback]  # by direction

    @property
    def settings(self) -> dict[str, Any]:
        return {direction: getattr(self, direction).settings for direction in DIRECTIONS}

    def replaced_by(self, other: "BoundaryCodecs") -> "BoundaryCodecs":
        """Return `other`, with this forward codec and its state if the settings of both are equal."""
        if self.forward.settings != other.forward.settings:
            return other
        forward, backward = self.feedbacks["forward"], other.feedbacks["backward"]
        return BoundaryCodecs(self.forward, other.backward, {"forward": forward, "backward": backward})


class Config:
    """The checked block: plain options, and the codecs of any boundary."""

    def __init__(self, block: object):
        """Check `block`, the JSON value of the "ds_compress" key.

        Raises:
            CompressionError: one line with the JSON path of the first mistake.
        """
        if not isinstance(block, dict):
            raise CompressionError(
                f'{KEY}: {shown(block)} is not an object; write "{KEY}": {{...}} with the options'
            )
        check_nesting(block)
        load_installed()
        self.block = validate(Block, with_recipe(block, KEY), KEY)
        check(self.block)
        self.warmup_steps = self.block.warmup_steps
        self._written = self.block  # before anything was adopted
        self.quality = self.block.quality  # the error budget if recipe "auto" chooses the settings, else None
        self.adopted: dict[str, Any] = {}
        """Settings in force beside the written block, as "boundaries" of a block."""

        self._steps_per_epoch: int | None = None
        self.notes: dict[str, None] = {}  # lines for the user, in order, each once
        self._codecs: dict[int | None, BoundaryCodecs] = {}
        self.configured_boundaries = (None, *map(int, self.block.boundaries))
        """Boundaries with settings of their own; None: all others."""

        for number in self.configured_boundaries:
            self.codecs(number)
        codec, replicas = build_replica_codec(self.block.replicas, f"{KEY}.replicas"), self.block.replicas
        self.outer = replicas.apart if replicas is not None else None
        self.outer_codec = codec if self.outer else None  # of changes of weights, between launches
        self.replica_policy = POLICIES.build(
            replicas.policy if replicas is not None else "constant", f"{KEY}.replicas.policy"
        )
        self.replica_ladder: list[Codec] = []  # a codec for each rung, if the policy changes anything
        if replicas is not None:
            self.replica_ladder = replica_ladder(replicas, self.replica_policy, f"{KEY}.replicas")
        within = self.replica_ladder[0] if self.replica_ladder else codec
        self.replica_codec = None if self.outer else within  # of gradients, within a launch; the first one
        self.sample_ids = self._sample_ids()
        self.eval = self._evaluation()  # `simulate` and the guard evaluate one state both ways
        self.policy = POLICIES.build(self.block.policy, f"{KEY}.policy")
        self.has_policy = self.policy.name != "constant"  # whether it may change settings between steps
        check_policy(self.policy.name, self.block)
        check_ladders(self)
        between = replica_notes(replicas, f"{KEY}.replicas")
        self.notes.update(dict.fromkeys((*unused_options(self, block), *feedback_notes(self), *between)))

    def codecs(self, boundary: int | None) -> BoundaryCodecs:
        """Return the codecs of `boundary`, the same objects at every call; None: one without settings of its
        own."""
        if boundary not in self._codecs:
            self._codecs[boundary] = self._built(boundary)
        return self._codecs[boundary]

    @property
    def strongest_replica_codec(self) -> Codec:
        """Return the codec of gradients between replicas whose rung is the strongest."""
        assert self.replica_codec is not None
        return self.replica_ladder[-1] if self.replica_ladder else self.replica_codec

    @property
    def written(self) -> dict[str, Any]:
        """Return the block without the name of a recipe, but with all that it says."""
        return self._written.model_dump(exclude_unset=True, exclude={"recipe", "quality"})

    def changed(self, changes: Mapping[str, Any]) -> "Config":
        """Return the written block with `changes` to its keys, and without a policy.

        Raises:
            CompressionError: it would be a bad block.
        """
        return Config(with_changes(self.written, {**changes, "policy": "constant"}))

    def adopt(self, other: "Config") -> bool:
        """Use the codecs of `other`, which `changed` made, from now on.

        Codecs with equal settings stay the same objects.

        Returns:
            Whether any codec changed.
        """
        numbers = {*self.configured_boundaries, *other.configured_boundaries, *self._codecs}
        changed = [n for n in numbers if self.codecs(n).settings != other.codecs(n).settings]
        self._codecs.update({n: self.codecs(n).replaced_by(other.codecs(n)) for n in changed})
        self.block = self.block.model_copy(update={"boundaries": other.block.boundaries})
        self.configured_boundaries, self.sample_ids = other.configured_boundaries, other.sample_ids
        return bool(changed)

    def _built(self, boundary: int | None) -> BoundaryCodecs:
        forward, forward_feedback = self._choice(boundary, "forward")
        backward, backward_feedback = self._choice(boundary, "backward")
        path = self._path(boundary)
        if isinstance(forward, ReusesForwardIndices) and forward.forward_partner() is not None:
            raise CompressionError(
                f"{path}.forward.codec: {forward} takes over from a forward message; allowed backward only"
            )
        for feedback, direction in ((forward_feedback, "forward"), (backward_feedback, "backward")):
            if direction not in feedback.directions:
                raise CompressionError(
                    f"{path}.{direction}.feedback: {feedback.name!r} is not for this direction; "
                    f"allowed: {', '.join(feedback.directions)}"
                )
            codec = forward if direction == "forward" else backward
            if feedback.has_mirrored_state and isinstance(codec, LowRank):
                raise CompressionError(
                    f"{path}.{direction}.feedback: {feedback.name!r} is not allowed with codec 'lowrank': "
                    "both sides keep the same state, but a matrix product has other last bits on other "
                    "processors; allowed: 'none', 'ef', 'loco'"
                )
        with errors_at(f"{path}.forward.feedback"):
            forward_feedback.check_growth(forward)
            forward = forward_feedback.wrap(forward)
        if isinstance(backward, ReusesForwardIndices):
            with errors_at(f"{path}.backward.codec"):
                backward = backward.paired_with(forward)
        if isinstance(backward, ReusesForwardIndices) and backward.note:
            self.notes[f"{path}.backward.codec: {backward.note}"] = None
        with errors_at(f"{path}.backward.feedback"):
            backward_feedback.check_growth(backward)
            backward = backward_feedback.wrap(backward)
        return BoundaryCodecs(forward, backward, {"forward": forward_feedback, "backward": backward_feedback})

    def leave_uncompressed(self, why: str) -> None:
        """Replace `notes` by one: the engine stays uncompressed because of `why`. None if "enabled" is false.

        Raises:
            CompressionError: "enabled" is "required", or the environment says that it is.
        """
        self.refuse_if_required(why if self.block.enabled else '"enabled" is false')
        self.notes = {f'the "{KEY}" key has no effect: {why}': None} if self.block.enabled else {}

    def refuse_if_required(self, why: str) -> None:
        """Raise if compression is required, and name `why` it is impossible.

        Raises:
            CompressionError: "enabled" is "required", or the environment says that it is.
        """
        if self.block.enabled == "required" or is_required():
            asked = f'"enabled": "required" in {KEY}' if self.block.enabled == "required" else f"{REQUIRE}=1"
            raise CompressionError(f"{KEY}: {asked} asks for compression, but {why}")

    def size_note(self, boundary: int, direction: str, raw_bytes: float, wire_bytes: float) -> str:
        """Return a note where the packet of a message is larger than its tensors, else nothing; headers do
        not count."""
        if wire_bytes <= raw_bytes + HEADERS:
            return ""
        codec = f"{self._path(boundary)}.{direction}.codec: {getattr(self.codecs(boundary), direction)}"
        sizes = f"{wire_bytes:,.0f} bytes instead of {raw_bytes:,.0f}"
        return f"{codec} makes messages larger: {sizes}; use other options, or codec 'none'"

    def _path(self, boundary: int | None) -> str:
        return f"{KEY}.boundaries.{boundary}" if str(boundary) in self.block.boundaries else KEY

    def count_epochs(self, steps_per_epoch: int | None, step: int = 0) -> None:
        """Turn warm-up epochs into steps; None where the length of an epoch is not known.

        When that has changed after `step` steps, as the batch size has, what is left of the warm-up is as
        many epochs as before.

        Raises:
            CompressionError: there are warm-up epochs, and their length is not known.
        """
        if not self.block.warmup_epochs:
            return
        if steps_per_epoch is None:
            raise CompressionError(
                f"{KEY}.warmup_epochs: {self.block.warmup_epochs} is not allowed where the length of "
                "an epoch is not known; give deepspeed.initialize the training_data, or use warmup_steps"
            )
        left = self.warmup_steps - step
        if not self._steps_per_epoch:
            self.warmup_steps = self.block.warmup_epochs * steps_per_epoch
        elif left > 0:
            self.warmup_steps = step - (-left * steps_per_epoch // self._steps_per_epoch)
        self._steps_per_epoch = steps_per_epoch

    def prepare(self) -> None:
        """Load the compiled kernels if any codec is used; every rank calls it before training."""
        used = map(self.codecs, self.configured_boundaries)
        codecs_used = (codec for each in used for codec in (each.forward, each.backward))
        between = self.replica_codec or self.outer_codec
        if self.quality or between or any(codec.name != "none" for codec in codecs_used):
            prepare()

    @property
    def has_mirrored_state(self) -> bool:
        """Return whether both sides of some boundary keep state that has to stay the same."""
        return any(feedback.has_mirrored_state for _, feedback in self.pairs())

    def pairs(self) -> Iterator[tuple[Codec, Feedback]]:
        """Yield codecs, with the feedbacks round them, of all boundaries and directions."""
        for number in self.configured_boundaries:
            codecs = self.codecs(number)
            yield from ((getattr(codecs, direction), codecs.feedbacks[direction]) for direction in DIRECTIONS)

    def has_extra_payload(self, direction: str) -> bool:
        """Return whether messages of any boundary may come with a second packet."""
        return any(
            isinstance(getattr(self.codecs(n), direction), VariableSizePayload)
            for n in self.configured_boundaries
        )

    def check_boundaries(self, count: int) -> None:
        """Refuse settings for a boundary that a pipeline with `count` boundaries does not have."""
        for number in self.block.boundaries:
            if int(number) >= count:
                allowed = (
                    ", ".join(f'"{b}"' for b in range(count))
                    or "none (a pipeline of one stage has no boundary)"
                )
                raise CompressionError(
                    f"{KEY}.boundaries.{number}: there is no such boundary; allowed: {allowed}"
                )

    @property
    def settings(self) -> dict[str, Any]:
        """Return everything that both ends of a link must agree on, as JSON types, defaults and codec options
        included; not the name of the recipe that some of it may come from."""
        plain = self.block.model_dump(mode="json", exclude={"recipe", "forward", "backward", "boundaries"})
        codecs = {number: self.codecs(int(number)).settings for number in self.block.boundaries}
        return {**self.codecs(None).settings, "boundaries": codecs, **plain, "policy": self.policy.settings}

    def _evaluation(self) -> Literal["compressed", "uncompressed"]:
        """Return how messages of eval_batch are sent, of which the result counts."""
        if self.block.eval in ("compressed", "uncompressed"):
            return self.block.eval
        changes = any(
            self.codecs(number).feedbacks["forward"].has_mirrored_state
            for number in self.configured_boundaries
        )
        return "uncompressed" if changes else "compressed"

    def _sample_ids(self) -> SampleIds | None:
        """Return the settings of sample ids that all feedbacks share, None if none needs ids."""
        feedbacks = [self.codecs(number).feedbacks["forward"] for number in self.configured_boundaries]
        wanted = {feedback.sample_ids for feedback in feedbacks if feedback.sample_ids is not None}
        if len(wanted) > 1:
            raise CompressionError(
                f"{KEY}: feedbacks of different boundaries want different sample ids; "
                "allowed: equal 'ids', 'scope' and 'batch_dim' everywhere"
            )
        return next(iter(wanted), None)

    def _choice(self, boundary: int | None, direction: str) -> tuple[Codec, Feedback]:
        chosen = self.find_choice(boundary, direction)
        return CODECS.build(*chosen["codec"]), FEEDBACKS.build(*chosen["feedback"])

    def codec_choice(self, boundary: int | None, direction: str) -> dict[str, Any]:
        """Return the codec of `find_choice` as an object with its name."""
        choice = self.find_choice(boundary, direction)["codec"][0]
        return {"name": choice} if isinstance(choice, str) else choice

    def find_choice(self, boundary: int | None, direction: str) -> dict[str, tuple[Any, str]]:
        """Return the value of "codec" and of "feedback" in the block, and its JSON path.

        The boundary's own settings come before those of the direction.
        """
        chosen = {}
        general = getattr(self.block, direction)
        given = [(general, f"{KEY}.{direction}")]
        override = self.block.boundaries.get(str(boundary))
        own = getattr(override, direction) if override else None
        if own is not None:
            given.append((own, f"{KEY}.boundaries.{boundary}.{direction}"))
        for settings, where in given:
            for key in ("codec", "feedback"):
                if key in settings.model_fields_set or settings is general:
                    chosen[key] = getattr(settings, key), f"{where}.{key}"
        return chosen
