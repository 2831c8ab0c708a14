"""Other codecs between two training steps, on a running engine.

All ranks adopt the same at the same step, with nothing under way: whoever decides does so on every rank, from
numbers that one collective has made known to all (see depth.py). From the next message on both ends of every
channel have the layouts, sizes and fingerprints of the new codecs. What a feedback keeps goes on where its
settings stay.
"""

import json
from collections.abc import Mapping
from typing import Any

from ds_compress.codecs.mixins import ObservesWarmup, layers
from ds_compress.config import DIRECTIONS, KEY, Config
from ds_compress.config.recipes import with_changes
from ds_compress.engine.wiring import wire_rests
from ds_compress.errors import CompressionError

WRITTEN = (*DIRECTIONS, "boundaries", "policy", "quality")
"""Keys of the block that have to be the same for a checkpoint's settings to go on."""


class Reconfigurator:
    """What an engine has adopted beside the block as it was written."""

    def __init__(self, config: Config, boundaries: int):
        """`boundaries`: how many the pipeline has."""
        self.adopted: dict[str, Any] = {}
        """As "boundaries" of a block: with these, the block as it was written gives the settings in force."""

        self._config = config
        written = {name: config.settings[name] for name in WRITTEN}
        self._written = json.loads(json.dumps({**written, "number of boundaries": boundaries}))

    def adopt(self, engine: Any, boundaries: Mapping[str, Any]) -> bool:
        """Let boundaries have other settings from the next step on; every rank calls it alike, between two
        steps.

        Args:
            boundaries: as the block has them, {"0": {"forward": {"codec": "bf16"}}}; a codec or a feedback
                that is not given stays as it is.

        Returns:
            Whether anything is other than before.

        Raises:
            CompressionError: it would be a bad block, or what cannot begin while training runs.
        """
        return self._become(engine, with_changes(self.adopted, boundaries))

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON types: the same on every rank."""
        return {"written": self._written, "adopted": self.adopted}

    def resume(self, engine: Any, state: Mapping[str, Any]) -> bool:
        """Go on with what `state`, from a checkpoint, says; every rank calls it alike.

        Returns:
            Whether it is of a run with the same block and boundaries; otherwise the block as it was written
            holds.
        """
        same = state.get("written") == self._written
        self._become(engine, state["adopted"] if same else {})
        return same

    def _become(self, engine: Any, adopted: dict[str, Any]) -> bool:
        stage, config = engine._compression, self._config
        if stage.in_schedule:
            raise CompressionError(
                f"{KEY}: settings cannot change while a step runs; adopt between two steps"
            )
        other = config.changed({"boundaries": adopted})
        engine._check(other, engine.num_stages)
        _check_warmup(config, other, engine.global_steps)
        other.prepare()
        self.adopted = adopted
        if not config.adopt(other):
            return False
        wire_rests(stage, engine)
        stage.adopt()
        engine._guard.follow()
        engine._compression_mirrors.every = config.block.state_check_every if config.mirrors else 0
        engine._compression_monitor.follow()
        return True


def _check_warmup(config: Config, other: Config, step: int) -> None:
    """Refuse codecs that learn from the warm-up when it is over."""
    if step < config.warmup_steps:
        return
    for number in other.numbers:
        for direction in DIRECTIONS:
            old, new = (getattr(each.codecs(number), direction) for each in (config, other))
            needs = any(layer.needs_warmup for layer in layers(new, ObservesWarmup))  # type: ignore[type-abstract]
            if needs and new.settings != old.settings:
                raise CompressionError(
                    f"{KEY}.{direction}.codec: {new} learns from the warm-up, which is over after "
                    f"{config.warmup_steps} steps: it cannot begin at step {step}; allowed: other codecs"
                )
