"""What rank 0 says of a choice: the table it was made from, and the block that reproduces it."""

import json
from collections.abc import Sequence
from typing import Any

from ds_compress.config import KEY, Config
from ds_compress.config.quality import LIMITS
from ds_compress.config.recipes import with_changes
from ds_compress.runtime.cluster_profile import slowest_link
from ds_compress.runtime.measuring import Row

COLUMNS = "{:>10}  {:>8}  {:>6}  {:>8}  {:>8}  {}"


def in_words(
    ranked: Sequence[dict[str, Any]],
    chosen: dict[str, Any],
    rows: Sequence[Row],
    config: Config,
    step: int,
) -> str:
    """
    Args:
        ranked: rows of `choice.rank`.
        rows: of all ranks.
        step: optimizer steps done.
    """
    assert config.quality is not None
    limits = LIMITS[config.quality]
    lines = [
        f"ds_compress: recipe auto, quality {config.quality} (errors up to {limits.forward:g} forward, "
        f"{limits.backward:g} backward): {chosen['recipe']}, link depth {chosen['depth']}, from step "
        f"{step + 1} on; {slowest_link(rows)}",
        COLUMNS.format("step, ms", "speed-up", "depth", "forward", "backward", "settings (errors measured)"),
    ]
    for row in ranked:
        numbers = f"{1e3 * row['step_s']:.1f}", f"{row['speedup']:.2f}", row["depth"]
        errors = f"{row['error_forward']:.4f}", f"{row['error_backward']:.4f}"
        mark = " <- chosen" if row is chosen else ""
        lines.append(COLUMNS.format(*numbers, *errors, f"{row['recipe']}{mark}"))
    if chosen["speedup"] < 1.05:
        lines.append("nothing would make a step 5 % faster than DeepSpeed's own")
    lines.append(f'"{KEY}": {json.dumps(reproducing(config, chosen, step))}')
    return "\n".join(lines)


def reproducing(config: Config, chosen: dict[str, Any], step: int) -> dict[str, Any]:
    """The block that trains the same from the beginning: as it was written, with what was chosen in the place
    of the recipe."""
    block = config.written
    if not block.get("warmup_epochs"):
        block["warmup_steps"] = max(step, block.get("warmup_steps", 0))
    block.get("link", {}).pop("memory_gb", None)  # it limits depth "auto" alone
    return with_changes(block, {**chosen["block"], "link": {"depth": chosen["depth"]}})
