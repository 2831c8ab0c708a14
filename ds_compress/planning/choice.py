"""Which settings to use: measurements in, choice out. `ds-compress advise` and `"recipe": "auto"` ask here.

What is offered for each boundary becomes candidates for the pipeline as a whole: each setting at all
boundaries alike, and mixtures, which take at each boundary, and in each direction, what costs least when a
second of codec and a second of transfer have some price against each other. How much of a transfer shows
behind computation is not known beforehand, so several prices are tried. Each candidate's step is then
predicted by the replay of the schedule, at the depth that pays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ds_compress.config import DIRECTIONS
from ds_compress.config.quality import Limits
from ds_compress.planning.depth import Room, choose_depth
from ds_compress.planning.offers import Offer
from ds_compress.planning.step_time import Network, Networks, Plan, Traffic, Workload, predict

WORTH = 0.05
"""A setting that gains less than this share of DeepSpeed's own step is not worth it."""

NEAR = 0.02
"""Steps this much longer than the shortest are as short: the setting that loses least is taken."""

PRICES = (0.0, 1 / 64, 1 / 16, 1 / 4, 1.0, 4.0, 64.0)
"""Of a second of transfer, in seconds of codec."""

STOCK = "DeepSpeed"


@dataclass(frozen=True)
class Message:
    """One direction of a boundary under some setting."""

    traffic: Traffic
    error: float  # relative; inf: not known

    def cost(self, network: Network, price: float) -> float:
        codec = self.traffic.encode + self.traffic.decode
        return codec + price * self.traffic.nbytes / network.bandwidth


@dataclass(frozen=True)
class Setting:
    """What may be chosen for a boundary."""

    offer: Offer
    forward: Message
    backward: Message

    def allowed(self, limits: Limits) -> bool:
        return limits.allow(self.forward.error, self.backward.error)


@dataclass(frozen=True)
class Candidate:
    """A recipe for all boundaries, before its step is predicted."""

    name: str
    block: dict[str, Any]
    forward: tuple[Traffic, ...]  # by boundary
    backward: tuple[Traffic, ...]
    eager: bool
    depth: int | str = 1  # or "auto"
    errors: tuple[float, float] = (0.0, 0.0)  # of forward and backward messages, the largest
    rooms: Sequence[Room] = ()  # of all stages; their packets are those of the recipe


def candidates(
    offers: Sequence[Sequence[Setting]],
    networks: Sequence[Network],
    limits: Limits,
    **link: Any,
) -> list[Candidate]:
    """What may be made of `offers`: each at all boundaries, and mixtures within `limits`.

    Args:
        offers: by boundary, the same settings in the same order everywhere.
        networks: by boundary.
        link: `eager`, `depth` and `rooms` of them all.
    """
    everywhere = [tuple(own) for own in zip(*offers)]
    mixed = []
    for price in PRICES:
        mixture = tuple(_cheapest(own, network, price, limits) for own, network in zip(offers, networks))
        if None not in mixture:
            mixed.append(mixture)
    found = {_name(settings): settings for settings in (*everywhere, *mixed)}
    return [_candidate(name, settings, link) for name, settings in found.items()]


def _cheapest(offers: Sequence[Setting], network: Network, price: float, limits: Limits) -> Setting | None:
    """Of the settings of a boundary and of what their directions can be combined to."""

    def key(message: Message) -> tuple[float, float]:
        return message.cost(network, price), message.error

    forward = [own for own in offers if own.offer.splits and own.forward.error <= limits.forward]
    backward = [own for own in offers if own.offer.splits and own.backward.error <= limits.backward]
    whole = [own for own in offers if not own.offer.splits and own.allowed(limits)]
    if forward and backward:
        ahead = min(forward, key=lambda own: key(own.forward))
        back = min(backward, key=lambda own: key(own.backward))
        whole.append(ahead if ahead is back else _combined(ahead, back))

    def both(own: Setting) -> tuple[float, float]:
        (cost, error), (other_cost, other_error) = key(own.forward), key(own.backward)
        return cost + other_cost, error + other_error

    return min(whole, key=both, default=None)


def _combined(forward: Setting, backward: Setting) -> Setting:
    both = {"forward": forward.offer.block["forward"], "backward": backward.offer.block["backward"]}
    offer = Offer(f"{forward.offer.name} / {backward.offer.name}", both, splits=True)
    return Setting(offer, forward.forward, backward.backward)


def _name(settings: Sequence[Setting]) -> str:
    """`quantize 4`, or by boundary where these differ: `0-2: quantize 4; 3: none`."""
    if len({own.offer.name for own in settings}) == 1:
        return settings[0].offer.name
    parts = []
    for name, run in groupby(range(len(settings)), key=lambda number: settings[number].offer.name):
        numbers = list(run)
        place = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        parts.append(f"{place}: {name}")
    return "; ".join(parts)


def _candidate(name: str, settings: Sequence[Setting], link: dict[str, Any]) -> Candidate:
    forward, backward = ([getattr(own, direction) for own in settings] for direction in DIRECTIONS)
    return Candidate(
        name,
        block(settings),
        tuple(message.traffic for message in forward),
        tuple(message.traffic for message in backward),
        errors=(max(own.error for own in forward), max(own.error for own in backward)),
        **link,
    )


def block(settings: Sequence[Setting]) -> dict[str, Any]:
    """The keys of the "ds_compress" block that say `settings`, one for each boundary; what most of these have
    stands outside of "boundaries"."""
    of = [own.offer.block for own in settings]
    general = max(of, key=of.count)
    others = {
        str(number): {key: {"feedback": "none", **own[key]} for key in DIRECTIONS}
        for number, own in enumerate(of)
        if own != general
    }
    return {**general, **({"boundaries": others} if others else {})}


def rank(workload: Workload, networks: Networks, candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """One row per candidate: DeepSpeed's own, which must be the first, and then the fastest first."""
    rows: list[dict[str, Any]] = []
    for candidate in candidates:
        row = _row(workload, networks, candidate)
        rows.append(row | {"speedup": rows[0]["step_s"] / row["step_s"] if rows else 1.0})
    return rows[:1] + sorted(rows[1:], key=lambda row: row["step_s"])


def _row(workload: Workload, networks: Networks, candidate: Candidate) -> dict[str, Any]:
    plan = Plan(candidate.forward, candidate.backward, candidate.eager)
    rooms = [
        replace(room, packets=float(packets)) for room, packets in zip(candidate.rooms, _packets(candidate))
    ]
    block, depth = candidate.block, candidate.depth
    if isinstance(depth, str):
        depth = choose_depth(workload, plan, networks, rooms).depth
        block = {**block, "link": {**block.get("link", {}), "depth": depth}}
    prediction = predict(workload, replace(plan, depth=depth), networks)
    taken = (
        room.taken(depth, workload.micro_batches, workload.stages, stage) for stage, room in enumerate(rooms)
    )
    return {
        "recipe": candidate.name,
        "block": block,
        "link": "eager" if candidate.eager else "blocking",
        "depth": depth,
        "step_s": prediction.step,
        "speedup_limit": prediction.step / prediction.compute,
        "limit": prediction.limit,
        "link_busy": prediction.link_busy,
        "wire_bytes": [
            sum(traffic.nbytes for traffic in sent) // len(sent)
            for sent in (candidate.forward, candidate.backward)
        ],
        "error_forward": candidate.errors[0],
        "error_backward": candidate.errors[1],
        "memory_bytes": max(taken, default=0.0),
    }


def _packets(candidate: Candidate) -> list[int]:
    """Bytes of one packet for each end of a link that a stage has, stage by stage."""
    both = [ahead.nbytes + back.nbytes for ahead, back in zip(candidate.forward, candidate.backward)]
    return [before + after for before, after in zip([0, *both], [*both, 0])]


def best(rows: Sequence[dict[str, Any]], limits: Limits) -> dict[str, Any] | None:
    """The recipe to use: of those within `limits` that are nearly as fast as the fastest the one with the
    smallest error; None where no recipe is worth it. `rows`: of `rank`."""
    allowed = [row for row in rows[1:] if within(row, limits) and row["speedup"] >= 1 + WORTH]
    shortest = min((row["step_s"] for row in allowed), default=0.0)
    near = [row for row in allowed if row["step_s"] <= (1 + NEAR) * shortest]
    return min(near, key=lambda row: (error(row), row["step_s"]), default=None)


def within(row: dict[str, Any], limits: Limits) -> bool:
    return limits.allow(row["error_forward"], row["error_backward"])


def error(row: dict[str, Any]) -> float:
    """The larger one of both directions."""
    return max(row["error_forward"], row["error_backward"])
