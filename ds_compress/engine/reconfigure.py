"""Change codecs between two training steps of a running engine.

All ranks adopt the same settings at the same step, with no message in flight: they decide from numbers that
one collective has given to all (see runtime/depth.py). From the next message on, both ends of every channel
use the layouts, sizes and fingerprints of the new codecs. A feedback with unchanged settings keeps its state.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ds_compress.config import DIRECTIONS, KEY, Config
from ds_compress.config.recipes import with_changes
from ds_compress.engine.stage import Stage
from ds_compress.engine.wiring import wire_extra_links
from ds_compress.errors import CompressionError
from ds_compress.message.part import RuntimePart

WRITTEN = (*DIRECTIONS, "boundaries", "policy", "quality")
"""Keys of the block that have to be the same for a checkpoint's settings to go on."""


class Reconfigurator:
    """Changes the settings of an engine, and keeps track of what differs from the block as written."""

    def __init__(
        self,
        stages: int,
        stage: Stage,
        boundaries: int,
        check: Callable[[Config, int], object],
        watching: Sequence[RuntimePart],
    ):
        """
        Args:
            stages: of the pipeline, each with a rank or more.
            boundaries: how many the pipeline has.
            check: raises CompressionError for settings that an engine of so many stages does not support.
            watching: parts that `follow` when settings have changed.
        """
        self._stages = stages
        self._stage = stage
        self._check = check
        self._watching = watching
        written = {name: stage.config.settings[name] for name in WRITTEN}
        self._written = json.loads(json.dumps({**written, "number of boundaries": boundaries}))

    def change(self, boundaries: Mapping[str, Any]) -> bool:
        """Let boundaries have other settings from the next step on; every rank calls it alike, between two
        steps.

        Args:
            boundaries: as the block has them, {"0": {"forward": {"codec": "bf16"}}}; a codec or a feedback
                that is not given stays as it is.

        Returns:
            Whether any setting differs from those before.

        Raises:
            CompressionError: the settings are not allowed, or cannot begin while training runs.
        """
        return self._adopt(with_changes(self._stage.config.adopted, boundaries))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold, as JSON types: the same on every rank."""
        return {"written": self._written, "adopted": self._stage.config.adopted}

    def resume(self, state: Mapping[str, Any]) -> bool:
        """Adopt the settings that `state`, from a checkpoint, holds; every rank calls it alike.

        Returns:
            Whether the checkpoint is of a run with the same block and boundaries; if not, the block holds as
            it was written.
        """
        is_same = bool(state.get("written") == self._written)
        self._adopt(state["adopted"] if is_same else {})
        return is_same

    def _adopt(self, adopted: dict[str, Any]) -> bool:
        stage, config = self._stage, self._stage.config
        if stage.in_schedule:
            raise CompressionError(
                f"{KEY}: settings cannot change while a step runs; adopt between two steps"
            )
        other = config.changed({"boundaries": adopted})
        self._check(other, self._stages)
        other.prepare()
        config.adopted = adopted
        if not config.adopt(other):
            return False
        wire_extra_links(stage, self._stages)
        stage.adopt()
        for part in self._watching:
            part.follow()
        return True
