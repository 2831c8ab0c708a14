"""Resolve the block: what was written, checked, and the settings that are in force."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import ds_compress.codecs  # noqa: F401  (registers them)
from ds_compress.codec import CODECS, Codec
from ds_compress.codecs.mixins import Selects, Stateful
from ds_compress.config.block import KEY, Block
from ds_compress.config.checks import check, check_nesting, feedback_notes, unused_options
from ds_compress.config.codec_settings import CodecSettings
from ds_compress.config.policies import POLICIES
from ds_compress.config.policies.ladder import check as check_ladders
from ds_compress.config.recipes import with_changes, with_recipe
from ds_compress.config.replicas import build_replica_codec, build_tied_codec, replica_notes
from ds_compress.errors import REQUIRE, CompressionError, is_required, shown
from ds_compress.kernels.backends import prepare
from ds_compress.registry import validate
from ds_compress.registry.plugins import load_installed


class Config:
    """The checked block, and the settings that are in force."""

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
        self.quality = self.block.quality  # the error budget if recipe "auto" chooses the settings, else None
        self.adopted: dict[str, Any] = {}
        """Settings in force beside the written block, as "boundaries" of a block."""
        self.gave_up = False  # whether recipe "auto" has found that it cannot choose

        self._steps_per_epoch: int | None = None
        self.in_force = CodecSettings(self.block)
        codec, replicas = build_replica_codec(self.block.replicas, f"{KEY}.replicas"), self.block.replicas
        self.outer = replicas.apart if replicas is not None else None
        self.outer_codec = codec if self.outer else None  # of changes of weights, between launches
        self.replica_codec = None if self.outer else codec  # of gradients, within a launch
        self.tied_codec = build_tied_codec(self.block.tied, f"{KEY}.tied")
        self.checkpoint_codec = self._checkpoint_codec()
        self.eval = self._evaluation()
        self.policy = POLICIES.build(self.block.policy, f"{KEY}.policy")
        self.has_policy = self.policy.name != "constant"  # whether it may change settings between steps
        check_ladders(self.in_force, self.policy, self.changed)
        between = replica_notes(replicas, f"{KEY}.replicas")
        unused = unused_options(self.in_force, self.policy, block)
        notes = (*self.in_force.notes, *unused, *feedback_notes(self.in_force), *between)
        self.notes = dict.fromkeys(notes)  # lines for the user, in order, each once

    @property
    def is_open(self) -> bool:
        """Return whether recipe "auto" is still to choose settings; checkpoints after its choice contain
        them. All that is sent is exact until then."""
        return self.quality is not None and not self.gave_up and not self.adopted

    @property
    def compresses(self) -> bool:
        """Return whether any boundary of the pipeline compresses, or will: the same on every rank."""
        return self.quality is not None or self.in_force.compresses

    @property
    def written(self) -> dict[str, Any]:
        """Return the block without the name of a recipe, but with all that it says."""
        return self.block.model_dump(exclude_unset=True, exclude={"recipe", "quality"})

    def changed(self, changes: Mapping[str, Any]) -> "Config":
        """Return the written block with `changes` to its keys, and without a policy.

        Raises:
            CompressionError: it would be a bad block.
        """
        return Config(with_changes(self.written, {**changes, "policy": "constant"}))

    def adopt(
        self, boundaries: dict[str, Any], check: Callable[["Config"], object] = lambda other: None
    ) -> bool:
        """Use other settings of boundaries from now on; return whether any codec changed.

        Args:
            boundaries: beside the written block, as it has them.
            check: refuses what an engine does not support.

        Raises:
            CompressionError: the settings are not allowed.
        """
        other = self.changed({"boundaries": boundaries})
        check(other)
        other.prepare()
        self.adopted = boundaries
        before, self.in_force = self.in_force, self.in_force.with_codecs_of(other.in_force)
        return self.in_force is not before

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
        others = (self.replica_codec or self.outer_codec, self.tied_codec, self.checkpoint_codec)
        codecs = [*others, *(codec for codec, _ in self.in_force.pairs())]
        if self.quality or any(codec is not None and codec.name != "none" for codec in codecs):
            prepare()

    @property
    def settings(self) -> dict[str, Any]:
        """Return everything that both ends of a link must agree on, as JSON types, defaults and codec options
        included; not the name of the recipe that some of it may come from."""
        plain = self.block.model_dump(mode="json", exclude={"recipe", "forward", "backward", "boundaries"})
        used = self.in_force
        codecs = {number: used.codecs(int(number)).settings for number in used.block.boundaries}
        return {**used.codecs(None).settings, "boundaries": codecs, **plain, "policy": self.policy.settings}

    def _checkpoint_codec(self) -> Codec:
        path = f"{KEY}.checkpoint.codec"
        codec = CODECS.build(self.block.checkpoint.codec, path)
        if isinstance(codec, (Stateful, Selects)) or not codec.decodes_alike:
            raise CompressionError(
                f"{path}: {codec} is not allowed in checkpoints: it depends on other messages, leaves most "
                "values out, or gives other bits on other processors; allowed: 'quantize', 'lossless' and "
                "the like"
            )
        return codec

    def _evaluation(self) -> Literal["compressed", "uncompressed"]:
        """Return how messages of eval_batch are sent, of which the result counts."""
        if self.block.eval in ("compressed", "uncompressed"):
            return self.block.eval
        changes = any(codecs.feedbacks["forward"].has_mirrored_state for codecs in self.in_force.used)
        return "uncompressed" if changes else "compressed"
