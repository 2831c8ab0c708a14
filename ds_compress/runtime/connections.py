"""Choose the connections of channels and exchanges: `"link": {"connections": "auto"}`.

A TCP connection needs round trips to recover from a lost packet, so several together are faster; a slow link
without loss carries the same with any number. Before the first training step, and after a checkpoint was
loaded, ranks probe their links, to neighbours and to the replicas before and after, with 1, 4, 16 and 64
connections, until two in a row are not faster: one may have lost more packets by chance. Numbers for which a
rank may not open enough files are left out. Collectives give rates to all ranks, and each makes the same
choice.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ds_compress.message.part import RuntimePart, StageView, Step
from ds_compress.runtime.stage_profile import Row, gather, probe_links
from ds_compress.transport.connections import TooFewFiles
from ds_compress.transport.probe import NEAR, SEGMENT, message_rate, probe
from ds_compress.transport.staging import receives_hold_device

NUMBERS = (1, 4, 16, 64)
CLOSE = 0.9
"""Share of the best rate with which fewer connections are chosen."""
WINDOW = 4 * SEGMENT
"""Bytes in flight, four packets; more than 9 of 100 would have to be lost to keep one connection below."""


class ConnectionsController(RuntimePart):
    """Chooses the number of connections of one engine's channels and exchanges."""

    def __init__(self, set_connections: Callable[[Any, Any, int], None]):
        """
        Args:
            set_connections: lets the channels and exchanges of a stage of an engine send over so many, or
                raises `TooFewFiles` on all ranks and changes nothing.
        """
        self._set = set_connections
        self._is_due = True

    def resume(self, step: Step, state: Mapping[str, Any], own: object) -> None:
        """Choose anew: links may have changed."""
        self._is_due = True

    def begin_step(self, step: Step) -> None:
        """Choose if it is due; no packet is in flight."""
        is_due, self._is_due = self._is_due, False
        stage, engine = step.stage, step.engine
        is_eager = all(end.link.is_eager for end in stage.ends)
        has_links = bool(stage.ends or stage.exchange_connections)
        is_possible = has_links and is_eager and not receives_hold_device(engine.device)
        if not is_due or not is_possible or engine.dynamic_shape:
            return
        slowest: dict[int, Row] = {}
        for number in NUMBERS:
            try:
                self._set(stage, engine, number)
            except TooFewFiles:
                break
            row = slowest_row(gather(_probe(stage, engine.device), engine.device))
            if slowest and not math.isfinite(row["rate"]):  # the link is just as far as `NEAR`
                break
            slowest[number] = row
            tried = list(slowest)
            if choose(slowest) not in tried[-2:] or not may_lose(slowest[1]):
                break
        self._set(stage, engine, choose(slowest))
        if engine.global_rank == 0:
            print(format_choice(slowest), flush=True)


def _probe(stage: StageView, device: torch.device) -> Row:
    """Return the slowest link to this rank, of channels and exchanges: bytes per second, and seconds of a
    round trip."""
    probe_message = partial(probe, rate=message_rate)
    found = [link for _, link in probe_links(stage, probe_message)]
    found += [probe_message(*link) for each in stage.exchange_connections for link in each.links(device)]
    return slowest_row([{"rate": link.incoming, "round trip": 2 * link.latency} for link in found])


def slowest_row(rows: list[Row]) -> Row:
    """Return the row of the slowest link; of the farthest, if all are near."""
    return min(rows, key=lambda row: (row["rate"], -row["round trip"]))


def may_lose(row: Row) -> bool:
    """Return whether lost packets may be what limits one connection over a link."""
    return math.isfinite(row["rate"]) and row["rate"] * row["round trip"] > WINDOW


def choose(slowest: Mapping[int, Row]) -> int:
    """Choose the smallest number of connections with nearly the best rate of its slowest link."""
    best = max(row["rate"] for row in slowest.values())
    return min(number for number, row in slowest.items() if row["rate"] >= CLOSE * best)


def format_choice(slowest: Mapping[int, Row]) -> str:
    """Format the line that reports the chosen number, and what each number gave."""
    one = slowest[1]
    milliseconds = f"{1e3 * one['round trip']:.3g} ms there and back"
    if not math.isfinite(one["rate"]):
        why = f"links take at most {milliseconds}; lost packets cost little below {1e3 * NEAR:g} ms"
    else:
        rates = ", ".join(f"{8e-6 * row['rate']:,.3g} with {number}" for number, row in slowest.items())
        why = f"slowest link, Mbit/s: {rates}; {milliseconds}"
        why += "" if may_lose(one) else ": the link is the limit, not lost packets"
    return f"ds_compress: link connections {choose(slowest)} chosen: {why}"
