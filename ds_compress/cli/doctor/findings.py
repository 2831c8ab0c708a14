"""Derive findings from a report of the machines: one verdict per line, with what to do."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ds_compress.autoload import HOOK
from ds_compress.cli.doctor.cluster import Report, is_unreachable
from ds_compress.cli.doctor.machine import AUTOLOAD, LOOPBACK, Facts

MUST_BE_ALIKE = ("ds_compress", "torch", "deepspeed")
"""Libraries that need one version everywhere; others only get the level `look` if versions differ."""

UNEVEN = 2.0
"""Ratio above which a link gets the level `look`: faster to slower direction, nominal to measured."""

SLOWED_BY_LOSS = ("cubic", "reno")
"""Congestion controls of TCP that send much less after a lost packet."""

FAR_MS = 10.0
"""Milliseconds of a round trip from which TCP is slow after a lost packet, or after a pause."""


@dataclass(frozen=True)
class Finding:
    """One verdict on the machines, with what to do if it is not good."""

    level: Literal["good", "look", "bad"]
    said: str
    do: str = ""


def findings(report: Report) -> list[Finding]:
    """Return all findings of a report; level `bad` marks what stops or degrades training."""
    hosts = report["hosts"]
    names = named(hosts)
    found = [*_versions(hosts, names), *_switched_on(hosts, names), *_kernels(hosts, names)]
    found += _left_buffers(hosts, names)
    if len(hosts) > 1:
        found += [*_interfaces(hosts, names), *_links(report, names)]
    return found


def named(hosts: list[Facts]) -> list[str]:
    """Return a name for each rank: its host name, with the rank appended if two hosts share it."""
    names = [host["host"] for host in hosts]
    return [name if names.count(name) == 1 else f"{name} (rank {rank})" for rank, name in enumerate(names)]


def _by(values: list[Any], names: list[str]) -> dict[Any, list[str]]:
    """Group the names of the machines by their values."""
    found = defaultdict(list)
    for value, name in zip(values, names):
        found[value].append(name)
    return found


def _versions(hosts: list[Facts], names: list[str]) -> Iterator[Finding]:
    """Compare the versions of the libraries."""
    alike = []
    for library in hosts[0]["versions"]:
        groups = _by([host["versions"].get(library) for host in hosts], names)
        needed = library in MUST_BE_ALIKE
        if len(groups) > 1:
            found = "; ".join(f"{value or 'none'} on {', '.join(on)}" for value, on in groups.items())
            level: Literal["look", "bad"] = "bad" if needed else "look"
            yield Finding(level, f"{library} differs: {found}", "install the same version everywhere")
        elif None not in groups:
            alike.append(f"{library} {next(iter(groups))}")
        elif needed:
            yield Finding("bad", f"{library} is not installed", f"pip install {library}")
    yield Finding("good", ", ".join(alike) + (" everywhere" if len(hosts) > 1 else ""))


def _switched_on(hosts: list[Facts], names: list[str]) -> Iterator[Finding]:
    """Check that ds_compress switches itself on on every machine."""
    install = "install ds_compress with pip, or import ds_compress in the script"
    for fact, said, do in (
        ("switched_on", "torch does not load ds_compress by itself", f"unset {AUTOLOAD}, or {install}"),
        ("hooks", f"{HOOK} is 0", f"unset {HOOK}, or call ds_compress.attach in the script"),
    ):
        if off := _by([host.get(fact, True) for host in hosts], names).get(False):
            yield Finding("bad", f"{said} on {', '.join(off)}: the key would be ignored", do)


def _kernels(hosts: list[Facts], names: list[str]) -> Iterator[Finding]:
    """Check which machines have compiled kernels."""
    for kernels, where in _by([host["kernels"] for host in hosts], names).items():
        on = ", ".join(where)
        if kernels is None:
            yield Finding(
                "look",
                f"no C++ kernels on {on}: codecs on the CPU run in PyTorch there, tens of times slower",
                "install g++ (apt install g++), then ds_compress again, or a wheel that has them",
            )
        else:
            yield Finding("good", f"C++ kernels for {kernels} on {on}")


def _left_buffers(hosts: list[Facts], names: list[str]) -> Iterator[Finding]:
    """Check that no launch that was killed has left its buffers in memory."""
    for host, name in zip(hosts, names):
        if left := host["left_buffers"]:
            yield Finding(
                "look",
                f"killed launches left {len(left)} buffers of DeepSpeed, "
                f"{sum(left.values()) / 1e6:,.0f} MB, in the shared memory of {name}",
                f"rm {' '.join(sorted(left))}",
            )


def _interfaces(hosts: list[Facts], names: list[str]) -> Iterator[Finding]:
    """Check that gloo uses the interface that reaches rank 0."""
    for host, name in zip(hosts, names):
        taken, way, why = host["gloo_interface"], host["way"], host["gloo_because"]
        others = [each["name"] for each in host["interfaces"] if each["name"] != LOOPBACK]
        right = way if way in others else next(iter(others), "NAME")
        do = f"on {name} set GLOO_SOCKET_IFNAME={right} (GPUs: NCCL_SOCKET_IFNAME={right}), in .deepspeed_env"
        if is_unreachable(host, hosts):
            said = f"{name} would not be found: gloo takes {taken}, as {why}"
            yield Finding("bad", f"{said}; interfaces: {', '.join(others) or 'none'}", do)
        elif way in (taken, LOOPBACK):
            yield Finding("good", f"{name} talks over {taken}")
        else:
            yield Finding("look", f"{name} reaches rank 0 over {way}, but gloo takes {taken}, as {why}", do)


def _links(report: Report, names: list[str]) -> Iterator[Finding]:
    """Check the bandwidth of each link against its other direction and its interface."""
    hosts = report["hosts"]
    for link in report["links"]:
        before, after = link["ranks"]
        pair = f"{names[before]} - {names[after]}"
        there, back = link["gbps_forward"], link["gbps_backward"]
        slow, fast = sorted((there, back))
        said = f"{pair}: {there:.3g} Gbit/s there, {back:.3g} back, {link['rtt_ms']:.2f} ms round trip"
        ends = hosts[before], hosts[after]
        rated = ([i["mbit"] / 1e3 for i in host["interfaces"] if i["name"] == host["way"]] for host in ends)
        slowed = _having(report, names, link["ranks"], "congestion_control", SLOWED_BY_LOSS)
        advice = _LOOK
        if link["rtt_ms"] >= FAR_MS:
            advice += _LOST.format(f"TCP's bbr on {slowed}, or " if slowed else "")
        promised = min(next(iter(own), 0.0) for own in rated)  # Gbit/s; 0: an interface does not report it
        if fast > UNEVEN * slow:
            yield Finding("look", f"{said}: one direction is {fast / slow:.1f} times the other", advice)
        elif promised > UNEVEN * slow and slow < 10:  # one connection cannot saturate faster links
            yield Finding("look", f"{said}: the interface is rated {promised:.3g} Gbit/s", advice)
        else:
            yield Finding("good", said)
    if report["links"]:
        slowest = min(report["links"], key=lambda link: min(link["gbps_forward"], link["gbps_backward"]))
        gbps = min(slowest["gbps_forward"], slowest["gbps_backward"])
        yield Finding(
            "good",
            f"the slowest link gives {gbps:.3g} Gbit/s",
            f"ds-compress advise ... --gbps {gbps:.3g} --latency-ms {slowest['rtt_ms'] / 2:.2g}",
        )
        yield from _pauses(report, names)
    elif len(hosts) > 1:
        yield Finding("bad", "no link was tried: gloo cannot reach the machines", "fix the interfaces first")


def _pauses(report: Report, names: list[str]) -> Iterator[Finding]:
    """Check that TCP goes on after a pause as before, where links are far."""
    far = [link for link in report["links"] if link["rtt_ms"] >= FAR_MS]
    ranks = [rank for link in far for rank in link["ranks"]]
    if slow := _having(report, names, ranks, "slow_start_after_idle", ("1",)):
        yield Finding(
            "look",
            f"TCP sends slowly after each pause on {slow}: messages may then take several round trips of "
            f"{max(link['rtt_ms'] for link in far):.2f} ms more",
            "sysctl -w net.ipv4.tcp_slow_start_after_idle=0 there, as root (docs/slow-machines.md)",
        )


def _having(report: Report, names: list[str], ranks: Sequence[int], fact: str, values: Sequence[str]) -> str:
    """Return the names of the machines of `ranks` whose `fact` is one of `values`, each once."""
    found = (names[rank] for rank in ranks if report["hosts"][rank].get(fact) in values)
    return ", ".join(dict.fromkeys(found))


_LOOK = "look for other traffic, a bad cable, or a limit of the provider"
_LOST = '; a few lost packets are enough: try {}"link": {{"connections": "auto"}} (docs/slow-machines.md)'
