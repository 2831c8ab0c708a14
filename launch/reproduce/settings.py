"""Name every setting of the tables and give its "ds_compress" block; the most informative first.

A new setting is a new line. The numbers in a name are forward/backward: bits, or percent kept.
"""

from typing import Any

from launch.reproduce.presets import PRESETS

Block = dict[str, Any]

IDS = {"column": 2}  # of the batches of both tasks
DENSITIES = (50, 30, 20, 10, 5, 2)


def block(
    forward: Any, backward: Any = None, feedback: Any = "none", back: Any = None, **others: Any
) -> Block:
    """Build a block; `feedback` is for forward, `back` for backward, by default the same."""
    backward, back = backward or forward, back or feedback
    return {
        "forward": {"codec": forward, "feedback": feedback},
        "backward": {"codec": backward, "feedback": back},
        **others,
    }


def minmax(bits: int) -> Block:
    return {"name": "minmax", "bits": bits}


def group(bits: int, **options: Any) -> Block:
    return {"name": "quantize", "bits": bits, "group_size": 128, **options}


def entropy(bits: float, **options: Any) -> Block:
    return {"name": "entropy", "bits": bits, **options}


def topk(percent: float, **options: Any) -> Block:
    return {"name": "topk", "density": percent / 100, **options}


def aqsgd(forward: Any, backward: Any, first: Any = "none", back: Any = "none") -> Block:
    """AQ-SGD forward; by default dense first visits and no feedback backward, as in its paper."""
    return block(forward, backward, {"name": "aqsgd", "ids": IDS, "first_visit": first}, back)


FIRST = group(4, hadamard=True)
REUSE = {"name": "topk", "indices": "reuse"}
SMALL = {"values": {"name": "quantize", "bits": 4, "group_size": 128}, "indices": "rice"}

NONE: dict[str, Block] = {"none": {}}

PAPER: dict[str, Block] = {
    "minmax4/8": block(minmax(4), minmax(8)),
    "minmax8/4": block(minmax(8), minmax(4)),
    "topk10": block(topk(10)),
    "topk10-reuse": block(topk(10), REUSE),
    "topk30": block(topk(30)),
    "topk30-reuse": block(topk(30), REUSE),
    "topk10-ef": block(topk(10), feedback="ef"),
    "topk10-ef21": block(topk(10), feedback="ef21"),
    "topk10-efmixed": block(topk(10), feedback="ef_mixed"),
    "topk30-aqsgd": aqsgd(topk(30), topk(30)),
    "topk10-aqsgd": aqsgd(topk(10), topk(10)),
    "minmax4/4": block(minmax(4)),
    "minmax2/8": block(minmax(2), minmax(8)),
    "minmax8/2": block(minmax(8), minmax(2)),
    "minmax8/8": block(minmax(8)),
    **{f"topk{p}": block(topk(p)) for p in DENSITIES},
    **{f"topk{p}-reuse": block(topk(p), REUSE) for p in DENSITIES},
    **{f"topk{p}-ef": block(topk(p), feedback="ef") for p in (30, 10)},
    **{f"topk{p}-ef21": block(topk(p), feedback="ef21") for p in (30, 10)},
    **{f"topk{p}-efmixed": block(topk(p), feedback="ef_mixed") for p in (30, 10)},
    **{f"topk10-{n}-warmup": block(topk(10), feedback=f, warmup_epochs=1)
       for n, f in (("ef", "ef"), ("ef21", "ef21"), ("efmixed", "ef_mixed"))},
    "topk10-warmup": block(topk(10), warmup_epochs=1),
    **{f"topk{p}-aqsgd": aqsgd(topk(p), topk(p)) for p in (50, 30, 20, 10)},
    **{f"minmax{f}/{b}": block(minmax(f), minmax(b)) for f in (8, 6, 4, 2) for b in (8, 6, 4, 2)},
}  # fmt: skip

BEYOND: dict[str, Block] = {
    "group4/4": block(group(4)),
    "group4/4-hadamard": block(group(4, hadamard=True)),
    "group4/8": block(group(4), group(8)),
    "group3/3": block(group(3)),
    "group3/3-hadamard": block(group(3, hadamard=True)),
    "group2/4": block(group(2), group(4)),
    "group2/4-hadamard": block(group(2, hadamard=True), group(4, hadamard=True)),
    "group4/2": block(group(4), group(2)),
    **{f"entropy{f:g}/{b:g}": block(entropy(f), entropy(b))
       for f, b in ((2.5, 2.5), (2, 2), (2, 3), (3, 3), (3, 1), (2.5, 1.5), (1.5, 2.5), (1, 3), (3, 4),
                    (4, 3))},
    **{f"entropy{f:g}/{b:g}-loco": block(entropy(f), entropy(b), "none", "loco")
       for f, b in ((2, 2), (2.5, 2.5), (3, 2), (2.5, 1.5), (3, 1))},
    "group2/2-hadamard-loco": block(group(2, hadamard=True), None, "none", "loco"),
    "entropy1.5/2-aqsgd": aqsgd(entropy(1.5), entropy(2)),
    "group2/2-hadamard": block(group(2, hadamard=True)),
    "group2/2-hadamard-aqsgd": aqsgd(group(2, hadamard=True), group(2, hadamard=True)),
    "group2/2": block(group(2)),
    "group2/2-aqsgd": aqsgd(group(2), group(2)),
    "group2/4-aqsgd": aqsgd(group(2), group(4)),
    "group2/4-hadamard-aqsgd": aqsgd(group(2, hadamard=True), group(4, hadamard=True)),
    "group4/4-aqsgd": aqsgd(group(4), group(4)),
    # first visits at 4 bits, which is the default
    "group2/2-hadamard-aqsgd4": aqsgd(group(2, hadamard=True), group(2, hadamard=True), FIRST),
    "group2/4-hadamard-aqsgd4": aqsgd(group(2, hadamard=True), group(4, hadamard=True), FIRST),
    "group2/2-hadamard-aqsgd4-loco": aqsgd(group(2, hadamard=True), group(2, hadamard=True), FIRST, "loco"),
    "topk10-aqsgd4": aqsgd(topk(10), topk(10), FIRST),
    "group4/4-loco": block(group(4), group(4), "none", "loco"),
    "group4/2-loco": block(group(4), group(2), "none", "loco"),
    "group4/4-stochastic": block(group(4, rounding="stochastic")),
    "topk20-4bit": block(topk(20, **SMALL)),
    "topk10-4bit-reuse": block(topk(10, **SMALL), {**REUSE, "values": SMALL["values"]}),
    "topk10-4bit-aqsgd": aqsgd(topk(10, **SMALL), group(4)),
    "bf16": block("bf16"),
    "fp8": block("fp8"),
    "fp8-groups": block({"name": "fp8", "group_size": 128}),
    "randomk50": block({"name": "randomk", "density": 0.5}),
    "randomk10": block({"name": "randomk", "density": 0.1}),
    "lossless": block("lossless"),
    "lowrank8": block({"name": "lowrank", "rank": 8}),
    "lowrank8-loco": block({"name": "lowrank", "rank": 8}, None, "none", "loco"),
}  # fmt: skip

EVERY = 50  # steps between two decisions of a policy


def policy(name: str, bits: list[int], **options: Any) -> Block:
    """Hadamard groups with the first of `bits`, which a policy changes in both directions."""
    ladders = {direction: {"bits": bits} for direction in ("forward", "backward")}
    policy = {"name": name, "every": EVERY, **ladders, **options}
    return block(group(bits[0], hadamard=True), policy=policy)


CHANGING: dict[str, Block] = {
    "group4-2-accordion": policy("accordion", [4, 2]),  # trained as a pipeline of four ranks
    # behind a link so slow that bytes decide (`chosen.py`)
    **{
        f"auto-{quality}": {"recipe": "auto", "quality": quality}
        for quality in ("safe", "balanced", "aggressive")
    },
}

FORWARD = {
    "group4": group(4, hadamard=True),
    **{f"entropy{bits:g}": entropy(bits) for bits in (4, 3.3, 2.5)},
    **{f"entropy{bits:g}-rank8": entropy(bits, rank=8) for bits in (4, 3.7, 3.3, 2.5)},
}
"""Codecs of activations."""

BACKWARD = {
    "group4": group(4, hadamard=True),
    **{f"stochastic{bits}": group(bits, hadamard=True, rounding="stochastic") for bits in (3, 2)},
    **{f"dither{bits:g}": entropy(bits, rounding="dither") for bits in (4, 3, 2.5, 2, 1.75, 1.5, 1.25, 1)},
}
"""Codecs of gradients."""

ONE_DIRECTION: dict[str, Block] = {
    **{f"{name}/none": block(codec, "none") for name, codec in FORWARD.items()},
    **{f"none/{name}": block("none", codec) for name, codec in BACKWARD.items()},
}
BOTH_DIRECTIONS: dict[str, Block] = {
    f"{forward}/{backward}": block(FORWARD[forward], BACKWARD[backward])
    for forward, backward in (
        ("entropy4-rank8", "dither3"),
        ("entropy4-rank8", "dither2"),
        ("entropy4-rank8", "dither1.5"),
        ("entropy4-rank8", "dither1.25"),
        ("entropy3.7-rank8", "dither1.5"),
        ("entropy3.3-rank8", "dither2"),
        ("entropy2.5-rank8", "dither1.5"),
        ("entropy4", "dither3"),
        ("entropy3.3", "dither2"),
        ("entropy2.5", "dither1.5"),
    )
}
GRADIENTS: dict[str, Block] = {
    # activations uncompressed
    "none/group3": block("none", group(3, hadamard=True)),
    "none/stochastic1": block("none", group(1, hadamard=True, rounding="stochastic")),
    **{f"none/entropy{bits}": block("none", entropy(bits)) for bits in (4, 3, 2)},
    "none/group4-ef21": block("none", group(4, hadamard=True), back="ef21"),
    "none/topk10": block("none", topk(10)),
    "none/topk30": block("none", topk(30)),
}
"""Further codecs of gradients alone."""

CANDIDATES: dict[str, Block] = {
    "group8/8": block(group(8)),
    "group6/6-hadamard": block(group(6, hadamard=True)),
    **{f"none/group{bits}-dither": block("none", group(bits, hadamard=True, rounding="dither"))
       for bits in (3, 2)},
}  # fmt: skip
"""What `auto` and `advise` also choose from, if it has no other name; and 2 bits, which cost too much."""

RECIPES: dict[str, Block] = {
    "quant4_8": block(group(4, hadamard=True), group(8)),
    "topk10_bf16-reuse": block(topk(10, values="bf16"), {**REUSE, "density": 0.1, "values": "bf16"}),
}
"""Settings of recipes that have no other name here."""


def between_replicas(codec: Any, feedback: str = "none", **others: Any) -> Block:
    """Build a block for gradients between replicas, beside `others` for messages between stages."""
    return {**others, "replicas": {"codec": codec, "feedback": feedback}}


REPLICAS: dict[str, Block] = {
    "replicas8-ef": between_replicas(group(8), "ef"),
    "replicas4-ef": between_replicas(group(4), "ef"),
    "replicas4-loco": between_replicas(group(4), "loco"),
    "replicas4-dither": between_replicas(group(4, rounding="dither")),
    "replicas3-dither": between_replicas(entropy(3, rounding="dither")),
    "replicas-rank8-ef": between_replicas({"name": "lowrank", "rank": 8}, "ef"),
    "replicas4-ef+entropy4-rank8/dither3": between_replicas(
        group(4), "ef", **BOTH_DIRECTIONS["entropy4-rank8/dither3"]
    ),
    "replicas4-dither+entropy4-rank8/dither3": between_replicas(
        group(4, rounding="dither"), **BOTH_DIRECTIONS["entropy4-rank8/dither3"]
    ),
}
"""Settings of gradients between replicas; the last ones also compress messages between stages."""


def tied(codec: Any, feedback: str, **others: Any) -> Block:
    """Build a block for the gradients of a tied embedding, beside `others` for messages between stages."""
    return {**others, "tied": {"codec": codec, "feedback": feedback}}


TIED: dict[str, Block] = {
    "tied4-ef": tied(group(4), "ef"),
    "tied2-ef": tied(group(2), "ef"),
    "tied1%-ef": tied(topk(1), "ef"),
    "tied4-ef+entropy4-rank8/dither3": tied(group(4), "ef", **BOTH_DIRECTIONS["entropy4-rank8/dither3"]),
    "tied1%-ef+entropy4-rank8/dither3": tied(topk(1), "ef", **BOTH_DIRECTIONS["entropy4-rank8/dither3"]),
}
"""Settings of gradients of a tied embedding; the last ones also compress messages, as `safe`."""

OLDER = ("group4/4-hadamard", "group3/3-hadamard", "entropy2.5/2.5")
"""What recipes were before they were judged on several models."""

COMPARED = (*NONE, *BOTH_DIRECTIONS, *ONE_DIRECTION, *RECIPES, *OLDER, "bf16", *CANDIDATES)
"""Those that the presets of several architectures run where nobody names others; of "replicas" `REPLICAS`."""

JUDGED = (
    *NONE,
    "none/group4",
    *GRADIENTS,
    *(f"none/{name}" for name in ("stochastic3", "stochastic2", "dither4", "dither2", "dither1")),
    *OLDER,
)
"""Those of which some hurt, which the guard is judged by."""

LAUNCHED = ("none", "minmax4/8", "topk10-reuse", "topk10-ef-warmup", "topk30-aqsgd")
"""Those repeated as real pipelines where nobody names others."""

BOTH_TASKS = (
    NONE | PAPER | BEYOND | CHANGING | ONE_DIRECTION | BOTH_DIRECTIONS | GRADIENTS | CANDIDATES | RECIPES
)
LANGUAGE = BOTH_TASKS | REPLICAS | TIED
VISION = BOTH_TASKS

SETTINGS: dict[str, dict[str, Block]] = {
    task: VISION if size.kind == "vision" else LANGUAGE
    for preset in PRESETS.values()
    for task, size in preset.items()
}
"""By task and name."""
