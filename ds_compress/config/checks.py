"""Check a block as a whole: options that contradict each other, and options that have no effect."""

from collections.abc import Iterator, Mapping
from typing import Any

from ds_compress.codec import TYPICAL, Codec
from ds_compress.codecs.mixins import layers
from ds_compress.config.block import DIRECTIONS, KEY, Block
from ds_compress.config.codec_settings import CodecSettings
from ds_compress.config.policies.base import Policy
from ds_compress.config.recipes import AUTO, LIMITS
from ds_compress.errors import CompressionError, shown, shown_key

_MISSING = object()
NONE: tuple[Any, ...] = ("none", {"name": "none"})
"""How a block writes that there is no codec, or no feedback."""

OF_EXCHANGES: dict[str, tuple[str, ...]] = {"tied": (), "replicas": ("warmup_steps", "bucket_mb", "overlap")}
"""Options of exchanges beside codec and feedback."""


def unused_options(settings: CodecSettings, policy: Policy, written: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each option that is given, and has no effect.

    Args:
        written: the block as the user wrote it, without what its recipe adds.
    """
    if not settings.block.enabled:
        return
    yield from _of_aqsgd(settings)
    yield from _of_ladders(policy, written)
    if settings.block.quality is not None:  # the codecs are not chosen yet
        return
    for path, reason in {**_of_codecs(settings), **_of_feedbacks(settings), **_of_guard(settings)}.items():
        value: Any = written
        for key in path.split("."):
            value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING
        if reason and value is not _MISSING:
            yield f"{KEY}.{path}: {shown(value)} has no effect: {reason}"


def _of_codecs(settings: CodecSettings) -> dict[str, str]:
    """Return why an option has no effect beside the codecs of the block, by path; "" where it has one."""
    pairs = list(settings.pairs())
    compresses = any(codec.name != "none" for codec, _ in pairs)
    forward = any(codecs.forward.name != "none" for codecs in settings.used)
    nothing = "" if compresses else "no codec is set, so nothing is compressed"
    warms_up = compresses or _exchanges(settings.block.tied)
    positions = "" if settings.block.tensors == "large" else "tensors names positions, whatever their size"
    return {
        "warmup_steps": "" if warms_up else nothing,
        "warmup_epochs": "" if warms_up else nothing,
        "tensors": nothing,
        "min_numel": nothing or positions,
        "eval": nothing or ("" if forward else "activations have no codec"),
        "state_check_every": "" if settings.has_mirrored_state else "no feedback mirrors its state",
    }


def _exchanges(options: Any) -> bool:
    """Return whether the options of tied weights, or of replicas, name a codec."""
    return options is not None and options.codec not in NONE


def _of_guard(settings: CodecSettings) -> dict[str, str]:
    """Return why an option of the guard has no effect, by path; "" where it has one."""
    guard, used = settings.block.guard, settings.used
    options = ("loss", "loss_floor", "error", "gradient_error", "residual", "nonfinite", "action")
    loses_forward = any(each.forward.error_bound(TYPICAL) > 0 for each in used)
    loses_backward = any(each.backward.error_bound(TYPICAL) > 0 for each in used)
    exchanges = _exchanges(settings.block.tied) or _exchanges(settings.block.replicas)
    if not loses_forward and not loses_backward:
        of_messages = (name for name in options if name != "gradient_error" or not exchanges)
        return dict.fromkeys((f"guard.{name}" for name in of_messages), "no codec loses anything")
    not_compared = ""
    if not guard.every:
        not_compared = "guard.every is 0"
    elif any(each.feedbacks["forward"].name != "none" for each in used):
        not_compared = "activations have a feedback, which evaluation leaves out"
    elif not loses_forward:
        not_compared = "no codec of activations loses anything"
    is_measured = guard.every or settings.block.monitor.every
    not_measured = "" if is_measured else "guard.every and monitor.every are 0, so no step is measured"
    has_residual = any(f.name != "none" and not f.has_mirrored_state for _, f in settings.pairs())
    return {
        "guard.loss": not_compared,
        "guard.loss_floor": not_compared,
        "guard.error": not_measured or ("" if loses_forward else "no codec of activations loses anything"),
        "guard.gradient_error": not_measured
        or ("" if loses_backward or exchanges else "no codec of gradients loses anything"),
        "guard.nonfinite": not_measured,
        "guard.residual": not_measured or ("" if has_residual else "no feedback keeps a residual"),
    }


def _of_feedbacks(settings: CodecSettings) -> dict[str, str]:
    """Return why a feedback, or an option of exchanges, has no effect, by path; "" where it has one at some
    boundary."""
    reasons: dict[str, str] = {}
    for number in settings.configured_boundaries:
        for direction in DIRECTIONS:
            chosen = settings.find_choice(number, direction)
            path = chosen["feedback"][1].removeprefix(f"{KEY}.")
            is_alone = chosen["codec"][0] in NONE
            is_alone &= settings.codecs(number).feedbacks[direction].name != "none"
            reasons[path] = "its codec is 'none'" if is_alone and reasons.get(path, True) else ""
    for key, names in OF_EXCHANGES.items():
        options = getattr(settings.block, key)
        if options is not None and not _exchanges(options):
            idle = names if options.feedback in NONE else ("feedback", *names)
            reasons |= {f"{key}.{name}": "its codec is 'none'" for name in idle}
    return reasons


def _of_aqsgd(settings: CodecSettings) -> Iterator[str]:
    for number in settings.configured_boundaries:
        options = settings.codecs(number).feedbacks["forward"].options
        if getattr(options, "scope", "") == "micro_batch" and "batch_dim" in options.model_fields_set:
            path = settings.find_choice(number, "forward")["feedback"][1]
            yield f"{path}.batch_dim: {options.batch_dim} has no effect with scope 'micro_batch'"


def _of_ladders(policy: Policy, written: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for options of a codec that a policy replaces before any message is compressed."""
    for direction in DIRECTIONS:
        own = written.get(direction)
        codec = own.get("codec") if isinstance(own, Mapping) else None
        for option, values in (getattr(policy.options, direction, None) or {}).items():
            if isinstance(codec, Mapping) and option in codec:
                yield (
                    f"{KEY}.{direction}.codec.{option}: {shown(codec[option])} has no effect: policy "
                    f"{policy.name!r} sets it to {', '.join(map(shown, values))}"
                )


COARSE = 0.1
"""Relative error on normal values from which a feedback of gradients is warned about: 4 bits have it."""

MAX_NESTING = 16
"""Objects and lists within each other; no block needs half as many."""


def check_nesting(block: object) -> None:
    """Refuse a block that is nested so deep that checking it would exceed Python's recursion limit.

    Raises:
        CompressionError: names the first key.
    """
    level: list[tuple[Any, str]] = [(block, "")]
    for _ in range(MAX_NESTING):
        level = [
            (inner, path or f".{shown_key(key)}")
            for value, path in level
            for key, inner in (value.items() if isinstance(value, dict) else enumerate(value))
            if isinstance(inner, (dict, list))
        ]
    if level:
        raise CompressionError(
            f"{KEY}{level[0][1]}: objects and lists are nested too deep; allowed: {MAX_NESTING} within each "
            "other"
        )


def check(block: Block) -> None:
    """Refuse options that contradict each other.

    Raises:
        CompressionError: one line with the JSON path of the first contradiction.
    """
    if block.warmup_steps and block.warmup_epochs:
        raise CompressionError(
            f"{KEY}.warmup_epochs: {block.warmup_epochs} came together with warmup_steps; use one of them"
        )
    _check_auto(block)
    if block.guard.action != "warn" and block.guard.every == 0:
        raise CompressionError(
            f"{KEY}.guard.action: {block.guard.action!r} is not allowed with guard.every 0, which never "
            "checks anything; use 1 up, or leave action out"
        )
    link = block.link
    if link.memory_gb is not None and link.depth != "auto":
        raise CompressionError(
            f"{KEY}.link.memory_gb: {link.memory_gb:g} limits depth 'auto', but depth is {link.depth}; use "
            "depth 'auto', or leave memory_gb out"
        )
    waits = "a stage would send a gradient before its neighbour asks for it, and both would wait for ever"
    reasons = {"depth": waits, "connections": "it sends over DeepSpeed's process group"}
    for option, why in reasons.items():
        if link.mode == "blocking" and getattr(link, option) != 1:
            raise CompressionError(
                f"{KEY}.link.{option}: {getattr(link, option)!r} is not allowed with mode 'blocking': {why}; "
                "use mode 'eager'"
            )


def feedback_notes(settings: CodecSettings) -> Iterator[str]:
    """Yield one line for each feedback beside a coarse, biased codec of gradients.

    Its residuals come from other samples, so the bias of the codec reaches the optimizer all the same
    (docs/codecs.md has the losses).
    """
    for number in settings.configured_boundaries:
        codecs, path = settings.codecs(number), settings.find_choice(number, "backward")["feedback"][1]
        feedback, (*_, codec) = codecs.feedbacks["backward"], layers(codecs.backward, Codec)
        if feedback.name != "none" and not codec.unbiased and codec.gaussian_error_bound(TYPICAL) >= COARSE:
            yield (
                f"{path}: {feedback.name!r} keeps residuals of other samples, and {codec} is biased: Adam "
                'amplifies that, and training from scratch may collapse; use "feedback": "none" and a codec '
                'that is unbiased ("rounding": "dither" or "stochastic"), or 6 bits'
            )


def _check_auto(block: Block) -> None:
    """Refuse what contradicts recipe "auto", and options that have no effect without it."""
    auto = block.recipe == AUTO
    if block.quality is not None and not auto:
        raise CompressionError(
            f"{KEY}.quality: {shown(block.quality)} is not allowed with no recipe 'auto'; "
            f"allowed: an error budget with recipe 'auto' alone: {', '.join(LIMITS)}"
        )
    for key in (*DIRECTIONS, "boundaries"):
        if auto and key in block.model_fields_set:
            raise CompressionError(
                f"{KEY}.{key}: is not allowed with recipe 'auto', which chooses it; leave it out"
            )
    if auto and block.policy not in ("constant", {"name": "constant"}):
        raise CompressionError(
            f"{KEY}.policy: {shown(block.policy)} is not allowed with recipe 'auto', which chooses the "
            "settings; use 'constant'"
        )
    if auto and block.link.mode == "blocking":
        raise CompressionError(f"{KEY}.link.mode: 'blocking' is not allowed with recipe 'auto'; use 'eager'")
