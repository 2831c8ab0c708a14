"""Find options of a block that have no effect, so that the user learns of them before training."""

from collections.abc import Iterator, Mapping
from typing import Any

from ds_compress.codec import TYPICAL
from ds_compress.codecs.mixins import BothDirections, Learns, ObservesWarmup, Stateful, layers
from ds_compress.config.block import DIRECTIONS, KEY
from ds_compress.errors import shown

_MISSING = object()


def unused_options(config: Any, written: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each option that is given, and has no effect.

    Args:
        config: a `Config`.
        written: the block as the user wrote it, without what its recipe adds.
    """
    if not config.block.enabled:
        return
    yield from _of_aqsgd(config)
    yield from _of_ladders(config, written)
    if config.quality is not None:  # the codecs are not chosen yet
        return
    for path, reason in {**_of_codecs(config), **_of_feedbacks(config), **_of_guard(config)}.items():
        value: Any = written
        for key in path.split("."):
            value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING
        if reason and value is not _MISSING:
            yield f"{KEY}.{path}: {shown(value)} has no effect: {reason}"


def _of_codecs(config: Any) -> dict[str, str]:
    """Return why an option has no effect beside the codecs of the block, by path; "" where it has one."""
    pairs = list(config.pairs())
    compresses = any(codec.name != "none" for codec, _ in pairs)
    forward = any(config.codecs(number).forward.name != "none" for number in config.numbers)
    kinds = (BothDirections, Learns, ObservesWarmup, Stateful)
    is_stateful = any(any(layers(codec, kind)) for codec, _ in pairs for kind in kinds)
    nothing = "" if compresses else "no codec is set, so nothing is compressed"
    positions = "" if config.block.tensors == "large" else "tensors names positions, whatever their size"
    return {
        "warmup_steps": nothing,
        "warmup_epochs": nothing,
        "tensors": nothing,
        "min_numel": nothing or positions,
        "eval": nothing or ("" if forward else "activations have no codec"),
        "state_check_every": "" if config.mirrors else "no feedback keeps equal state on both sides",
        "checkpoint.state": "" if is_stateful else "no feedback or codec keeps state",
    }


def _of_guard(config: Any) -> dict[str, str]:
    """Return why an option of the guard has no effect, by path; "" where it has one."""
    guard, used = config.block.guard, [config.codecs(number) for number in config.numbers]
    options = ("loss", "loss_floor", "error", "cosine", "gradient_error", "residual", "nonfinite", "action")
    loses_forward = any(each.forward.error_bound(TYPICAL) > 0 for each in used)
    loses_backward = any(each.backward.error_bound(TYPICAL) > 0 for each in used)
    if not loses_forward and not loses_backward:
        return dict.fromkeys((f"guard.{name}" for name in options), "no codec loses anything")
    not_compared = ""
    if not guard.every:
        not_compared = "guard.every is 0"
    elif any(each.feedbacks["forward"].name != "none" for each in used):
        not_compared = "activations have a feedback, which evaluation leaves out"
    elif not loses_forward:
        not_compared = "no codec of activations loses anything"
    is_measured = guard.every or config.block.monitor.every
    not_measured = "" if is_measured else "guard.every and monitor.every are 0, so no step is measured"
    has_residual = any(f.name != "none" and not f.mirrors for _, f in config.pairs())
    return {
        "guard.loss": not_compared,
        "guard.loss_floor": not_compared,
        **dict.fromkeys(
            ("guard.error", "guard.cosine"),
            not_measured or ("" if loses_forward else "no codec of activations loses anything"),
        ),
        "guard.gradient_error": not_measured
        or ("" if loses_backward else "no codec of gradients loses anything"),
        "guard.nonfinite": not_measured,
        "guard.residual": not_measured or ("" if has_residual else "no feedback keeps a residual"),
    }


def _of_feedbacks(config: Any) -> dict[str, str]:
    """Return why a feedback has no effect, by path; "" where it has one at some boundary."""
    reasons: dict[str, str] = {}
    for number in (*config.numbers, None):
        for direction in DIRECTIONS:
            chosen = config.chosen(number, direction)
            path = chosen["feedback"][1].removeprefix(f"{KEY}.")
            is_alone = chosen["codec"][0] in ("none", {"name": "none"})
            is_alone &= config.codecs(number).feedbacks[direction].name != "none"
            reasons[path] = "its codec is 'none'" if is_alone and reasons.get(path, True) else ""
    return reasons


def _of_aqsgd(config: Any) -> Iterator[str]:
    for number in config.numbers:
        options = config.codecs(number).feedbacks["forward"].options
        if getattr(options, "scope", "") == "micro_batch" and "batch_dim" in options.model_fields_set:
            path = config.chosen(number, "forward")["feedback"][1]
            yield f"{path}.batch_dim: {options.batch_dim} has no effect with scope 'micro_batch'"


def _of_ladders(config: Any, written: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for options of a codec that a policy replaces before any message is compressed."""
    for direction in DIRECTIONS:
        own = written.get(direction)
        codec = own.get("codec") if isinstance(own, Mapping) else None
        for option, values in (getattr(config.policy.options, direction, None) or {}).items():
            if isinstance(codec, Mapping) and option in codec:
                yield (
                    f"{KEY}.{direction}.codec.{option}: {shown(codec[option])} has no effect: policy "
                    f"{config.policy.name!r} sets it to {', '.join(map(shown, values))}"
                )
