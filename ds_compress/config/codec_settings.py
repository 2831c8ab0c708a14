"""Settings in force: the codecs of every boundary. A change replaces them as a whole."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ds_compress.codec import CODECS, Codec
from ds_compress.codecs.mixins import FollowsForward, VariableSizePayload
from ds_compress.config.block import DIRECTIONS, KEY, Block
from ds_compress.errors import CompressionError, errors_at, shown
from ds_compress.feedback import FEEDBACKS, Feedback
from ds_compress.feedback.aqsgd.sample_ids import SampleIds

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
        """Return `other`, but keep the codecs, and so their state, whose settings are equal: both, or the
        forward one."""
        if self.settings == other.settings:
            return self
        if self.forward.settings != other.forward.settings:
            return other
        forward, backward = self.feedbacks["forward"], other.feedbacks["backward"]
        return BoundaryCodecs(self.forward, other.backward, {"forward": forward, "backward": backward})


class CodecSettings:
    """The codecs of every boundary, each built from a block when it is first asked for, and then the same."""

    def __init__(self, block: Block):
        """
        Args:
            block: checked on its own.

        Raises:
            CompressionError: codecs and feedbacks cannot work together; names the JSON path.
        """
        self.block = block  # with the boundaries of what was adopted
        self.notes: dict[str, None] = {}  # lines for the user, in order, each once
        self._codecs: dict[int | None, BoundaryCodecs] = {}
        self.configured_boundaries = (None, *map(int, block.boundaries))
        """Boundaries with settings of their own; None: all others."""

        self.sample_ids = self._sample_ids()

    def codecs(self, boundary: int | None) -> BoundaryCodecs:
        """Return the codecs of `boundary`, the same objects at every call; None: one without settings of its
        own."""
        if boundary not in self._codecs:
            self._codecs[boundary] = self._built(boundary)
        return self._codecs[boundary]

    def with_codecs_of(self, other: "CodecSettings") -> "CodecSettings":
        """Return these settings with the codecs of `other`, or the same object if that changes nothing.

        Codecs with equal settings stay the same objects.
        """
        numbers = {*self.configured_boundaries, *other.configured_boundaries, *self._codecs}
        codecs = {n: self.codecs(n).replaced_by(other.codecs(n)) for n in numbers}
        if all(codecs[n] is self.codecs(n) for n in numbers):
            return self
        new = copy.copy(self)
        new._codecs, new.notes = codecs, dict(self.notes)
        new.block = self.block.model_copy(update={"boundaries": other.block.boundaries})
        new.configured_boundaries, new.sample_ids = other.configured_boundaries, other.sample_ids
        return new

    @property
    def has_mirrored_state(self) -> bool:
        """Return whether both sides of some boundary keep state that has to stay the same."""
        return any(feedback.has_mirrored_state for _, feedback in self.pairs())

    @property
    def used(self) -> list[BoundaryCodecs]:
        """Return the codecs of each boundary with settings of its own, and of all others."""
        return [self.codecs(number) for number in self.configured_boundaries]

    def pairs(self) -> Iterator[tuple[Codec, Feedback]]:
        """Yield codecs, with the feedbacks round them, of all boundaries and directions."""
        for codecs in self.used:
            yield from ((getattr(codecs, direction), codecs.feedbacks[direction]) for direction in DIRECTIONS)

    @property
    def compresses(self) -> bool:
        """Return whether any boundary sends other than what it is given."""
        return any(codec.name != "none" for codec, _ in self.pairs())

    def has_extra_payload(self, direction: str) -> bool:
        """Return whether messages of any boundary may come with a second packet."""
        return any(isinstance(getattr(codecs, direction), VariableSizePayload) for codecs in self.used)

    def check_boundaries(self, count: int) -> None:
        """Refuse settings for a boundary that a pipeline with `count` boundaries does not have."""
        for number in self.block.boundaries:
            if int(number) >= count:
                keys = [f'"{b}"' for b in range(count)]
                several = f"{keys[0]} to {keys[-1]}" if count > 3 else ", ".join(keys)
                allowed = several or "none (a pipeline of one stage has no boundary)"
                raise CompressionError(
                    f"{KEY}.boundaries.{number}: there is no such boundary; allowed: {allowed}"
                )

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

    def _built(self, boundary: int | None) -> BoundaryCodecs:
        chosen = {direction: self.find_choice(boundary, direction) for direction in DIRECTIONS}
        forward, backward = (CODECS.build(*chosen[direction]["codec"]) for direction in DIRECTIONS)
        feedbacks = {direction: FEEDBACKS.build(*own["feedback"]) for direction, own in chosen.items()}
        path = self._path(boundary)
        if isinstance(forward, FollowsForward) and forward.forward_partner() is not None:
            raise CompressionError(
                f"{path}.forward.codec: {forward} takes over from a forward message; allowed backward only"
            )
        for (direction, feedback), codec in zip(feedbacks.items(), (forward, backward)):
            if direction not in feedback.directions:
                raise CompressionError(
                    f"{path}.{direction}.feedback: {feedback.name!r} is not for this direction; "
                    f"allowed: {', '.join(feedback.directions)}"
                )
            if feedback.has_mirrored_state and not codec.decodes_alike:
                raise CompressionError(
                    f"{path}.{direction}.feedback: {feedback.name!r} is not allowed with codec {codec}: "
                    "both sides keep the same state, but a matrix product has other last bits on other "
                    "processors; allowed: 'none', 'ef', 'loco'"
                )
        with errors_at(f"{path}.forward.feedback"):
            feedbacks["forward"].check_growth(forward)
            forward = feedbacks["forward"].wrap(forward)
        if isinstance(backward, FollowsForward):
            with errors_at(f"{path}.backward.codec"):
                paired = backward.paired_with(forward)
            # a feedback computes what the other side decodes, which has another activation
            if paired.decodes_alike or feedbacks["backward"].name == "none":
                backward = paired
            if isinstance(backward, FollowsForward) and backward.note:
                self.notes[f"{path}.backward.codec: {backward.note}"] = None
        with errors_at(f"{path}.backward.feedback"):
            feedbacks["backward"].check_growth(backward)
            backward = feedbacks["backward"].wrap(backward)
        return BoundaryCodecs(forward, backward, feedbacks)

    def _sample_ids(self) -> SampleIds | None:
        """Return the settings of sample ids that all feedbacks share, None if none needs ids."""
        wanted: dict[SampleIds, tuple[Any, str]] = {}  # where each comes from first
        for number in self.configured_boundaries:
            ids = self.codecs(number).feedbacks["forward"].sample_ids
            if ids is not None:
                wanted.setdefault(ids, self.find_choice(number, "forward")["feedback"])
        if len(wanted) > 1:
            (_, first), (other, path), *_ = wanted.values()
            raise CompressionError(
                f"{path}: {shown(other)} wants other sample ids than {first}; "
                "allowed: equal 'ids', 'scope' and 'batch_dim' everywhere"
            )
        return next(iter(wanted), None)

    def codec_choice(self, boundary: int | None, direction: str) -> dict[str, Any]:
        """Return the codec of `find_choice` as an object with its name."""
        choice = self.find_choice(boundary, direction)["codec"][0]
        return {"name": choice} if isinstance(choice, str) else choice

    def find_choice(self, boundary: int | None, direction: str) -> dict[str, tuple[Any, str]]:
        """Return the value of "codec" and of "feedback" in the block, and its JSON path.

        The boundary's own settings come before those of the direction.
        """
        general, override = getattr(self.block, direction), self.block.boundaries.get(str(boundary))
        own = override and getattr(override, direction)
        chosen = {}
        for key in ("codec", "feedback"):
            if own and key in own.model_fields_set:
                chosen[key] = getattr(own, key), f"{KEY}.boundaries.{boundary}.{direction}.{key}"
            else:
                chosen[key] = getattr(general, key), f"{KEY}.{direction}.{key}"
        return chosen
