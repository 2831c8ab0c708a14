"""Check the store at which replicas that are launched apart meet, from this machine."""

import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from ds_compress.cli.doctor.findings import Finding
from ds_compress.config import Config
from ds_compress.errors import CompressionError, in_one_line, shown, shown_numbers
from ds_compress.sites.board import CHUNK, survey
from ds_compress.sites.rounds import BEAT_S
from ds_compress.sites.store import connect, parse_address, shared_settings

ORIGIN = "--replica-store"
ROUND_TRIPS = 9
LONG_ENOUGH_S = 0.5
"""A transfer of this duration, or of `CHUNK` bytes, gives the bandwidth; shorter ones grow first."""


def examine_store(address: str, seconds: float, config: Config | None) -> dict[str, Any]:
    """Measure the way to the store, and read who is there.

    Args:
        seconds: time for it to answer.
        config: of this machine; None: settings are not compared.

    Returns:
        address; rtt_ms, up_gbps, down_gbps; `survey`, with is_alive, whether a replica gave a sign of life;
        differences: lines. If the store cannot be used: address and error.

    Raises:
        CompressionError: this is no address.
    """
    parse_address(address, ORIGIN)
    try:
        store = connect(address, ORIGIN, seconds)
        found = {"address": address, **_measure(store), **survey(store), "is_alive": False}
        end = time.monotonic() + 2 * BEAT_S
        while found["announced"] and not found["is_alive"] and time.monotonic() < end:
            time.sleep(0.1)
            found["is_alive"] = survey(store)["beats"] != found["beats"]
    except (RuntimeError, CompressionError) as error:
        return {"address": address, "error": in_one_line(error)}
    own, theirs = shared_settings(config) if config else {}, found["settings"]
    found["differences"] = [
        f"{key}: the replicas there have {shown(theirs.get(key))}, this machine has {shown(value)}"
        for key, value in own.items()
        if theirs and theirs.get(key) != value
    ]
    found["is_compared"] = bool(own and theirs)
    return found


def _measure(store: Any) -> dict[str, float]:
    key = f"ds_compress/doctor/{uuid.uuid4()}"

    def seconds(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    round_trip = statistics.median(seconds(lambda: store.check([key])) for _ in range(ROUND_TRIPS))
    nbytes, times = CHUNK >> 6, (0.0, 0.0)
    try:
        while nbytes <= CHUNK and max(times) < LONG_ENOUGH_S:
            content = bytes(nbytes)
            # the store says nothing to what it is given, so a question follows
            up = seconds(lambda content=content: (store.set(key, content), store.check([key])))  # type: ignore[misc]
            down = seconds(lambda: store.get(key))
            times = max(up - round_trip, 1e-6), max(down - 2 * round_trip, 1e-6)
            sent, nbytes = nbytes, 4 * nbytes
    finally:
        store.delete_key(key)
    up, down = (8e-9 * sent / each for each in times)
    return {"rtt_ms": 1e3 * round_trip, "up_gbps": up, "down_gbps": down}


def store_findings(found: dict[str, Any]) -> Iterator[Finding]:
    """Yield the verdicts on what `examine_store` returned."""
    name = f"replica store {found['address']}"
    if "error" in found:
        do = "run `ds-compress replica-store --port PORT` there, and open the port in its firewall"
        yield Finding("bad", f"{name} cannot be reached: {found['error']}", do)
        return
    yield Finding(
        "good",
        f"{name}: {found['rtt_ms']:.2f} ms round trip, {125 * found['up_gbps']:.3g} MB/s there, "
        f"{125 * found['down_gbps']:.3g} MB/s back",
    )
    there = shown_numbers(sorted(found["announced"]))
    if not there:
        yield Finding("good", f"{name}: no replica is there yet")
    elif found["is_alive"]:
        members = shown_numbers(sorted(found["members"]))
        last = f", the last round counted {members}" if members else ""
        yield Finding("good", f"{name}: replicas {there} meet in round {found['round']}{last}")
    else:
        said = f"{name}: replicas {there} were there, but gave no sign of life for {2 * BEAT_S:g} s"
        yield Finding("look", said, "look whether they still train; a newcomer goes on alone after a minute")
    for line in found["differences"]:
        yield Finding("bad", line, "use the same in all launches")
    if found["is_compared"] and not found["differences"]:
        yield Finding("good", f"{name}: the replicas there have the settings of this machine")
