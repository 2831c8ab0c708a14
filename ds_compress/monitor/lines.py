"""Format the lines of the monitor: one when training begins, warnings, and one at the end."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rich.filesize import decimal

from ds_compress.config import Config
from ds_compress.errors import shown_boundaries
from ds_compress.monitor.guard_limits import Violation, place_of
from ds_compress.monitor.metrics import Channels, ratio
from ds_compress.version import __version__


@dataclass
class Waited:
    """How long a stage waited in measured steps, added up over them."""

    steps: int = 0
    shares: float = 0.0  # of each step
    seconds: float = 0.0

    def add(self, share: float, seconds: float) -> None:
        """Add a step."""
        self.steps += 1
        self.shares += share
        self.seconds += seconds


def announcement(
    config: Config, channels: Channels, link: str, tensors: Callable[[str], str], gradients: Mapping[str, str]
) -> str:
    """Return the start-up line: what is active on every boundary, and for gradients that are exchanged.

    Args:
        link: what to call it.
        tensors: what becomes of the tensors of a message, by the place of its channel; empty where that is
            not known.
        gradients: by kind, what is exchanged, and the codec.
    """
    numbers: dict[str, list[int]] = {}  # by description of a boundary
    for number, keys in itertools.groupby(channels, lambda key: key[0]):
        parts, said = [], ""
        for _, name in keys:
            raw, wire = (channels[number, name][f"message_{which}_bytes"] for which in ("raw", "wire"))
            sizes = f"{raw:,.0f} -> {wire:,.0f} bytes ({ratio(raw, wire):.2f}x)"
            codec = getattr(config.in_force.codecs(number), name)
            part = f"{name} {codec} {sizes}" if raw else f"{name} no packets"
            found = tensors(f"boundary {number}, {name}")
            note = f" [{'as forward' if found == said else found}]" if found else ""
            parts.append(f"{part}{note}")
            said = found
        numbers.setdefault(", ".join(parts), []).append(number)
    boundaries = [f"{shown_boundaries(own)}: {said}" for said, own in numbers.items()]
    warmup = f", after {config.warmup_steps} warm-up steps" if config.warmup_steps else ""
    recipe = f"recipe {config.block.recipe}, " if config.block.recipe else ""
    line = f"ds_compress {__version__} active, {recipe}link {link}{warmup}"
    if boundaries:
        line += f"; per message: {'; '.join(boundaries)}"
    return "; ".join([line, *gradients.values()])


def size_notes(config: Config, channels: Channels, known: set[tuple[int, str, str]]) -> list[str]:
    """Return a warning for each codec that makes messages larger, once for all channels that share it.

    Args:
        known: boundary, direction and codec of earlier warnings, which are left out; new ones are added.
    """
    notes: dict[str, None] = {}
    for key, values in channels.items():
        sizes = values["message_raw_bytes"], values["message_wire_bytes"]
        place = *key, str(getattr(config.in_force.codecs(key[0]), key[1]))
        if (note := config.in_force.size_note(*key, *sizes)) and place not in known:
            known.add(place)
            notes[note] = None
    return [*notes]


def violation_note(
    config: Config, boundaries: Sequence[int], direction: str, violations: Sequence[Violation]
) -> str:
    """Return the warning about a direction of boundaries with the same codec that exceeds limits of the
    guard."""
    codec = getattr(config.in_force.codecs(boundaries[0]), direction)
    found = ", ".join(each.words for each in violations)
    advice = dict.fromkeys(each.advice for each in violations)
    return f"{place_of(boundaries, direction)}: {codec} has {found}: {'; '.join(advice)}"


def is_early(steps: int, every: int) -> bool:
    """Return whether what was sent is summed up after so many `steps` for the line at the end, though none is
    due: runs that are shorter than `every` have one too, of their first 1, 2, ... 9, 10, 20, ... 90, 100,
    ..."""
    return 0 < steps < every and not str(steps)[1:].strip("0")


def summary(
    channels: Channels,
    first: int,
    step: int,
    waited: Waited,
    gradients: Mapping[str, Sequence[Mapping[str, float]]],
    exchanged: Mapping[str, str],
) -> str:
    """Return the last line: what training sent until `step`, and what that saved.

    Args:
        first: step that training began, or was resumed, with.
        waited: in the measured steps.
        gradients: bytes of those that are exchanged, by kind and stage.
        exchanged: as `gradients` of `announcement`.
    """
    sent = _instead(channels.values())
    parts = [sent] if sent else []
    for kind, said in exchanged.items():
        if between := _instead(gradients[kind]):
            parts.append(f"{said.partition(':')[0]}: {between}")
    if not parts:
        return ""
    line = f"ds_compress: {'; '.join(parts)} by step {step}"
    if first > 1:
        line += f", from step {first} on"
    if waited.steps and sent:
        share, seconds = waited.shares / waited.steps, waited.seconds / waited.steps * (step - first + 1)
        line += f"; a stage waited {share:.0%} of a step for messages, about {seconds:,.1f} s"
    return line


def _instead(counters: Collection[Mapping[str, float]]) -> str:
    """Return the bytes sent and those without compression; empty if no byte was sent."""
    raw, wire = (int(sum(each[key] for each in counters)) for key in ("raw_bytes", "wire_bytes"))
    said = [decimal(count, precision=2) for count in (wire, raw, abs(raw - wire))]
    line = f"{said[0]} sent instead of {said[1]}, {said[2]} {'saved' if wire <= raw else 'more'}"
    times = f" ({ratio(raw, wire):.2f}x)" if raw else ""  # a site alone would send nothing
    return line + times if wire else ""
