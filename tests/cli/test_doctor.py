"""ds-compress doctor: what a machine says of itself, what several say, and how they are reached."""

import copy
import json
import mmap
import os
import re
import subprocess
import sys

import pytest
import torch

from ds_compress.autoload import HOOK
from ds_compress.cli import main
from ds_compress.cli.doctor import machine
from ds_compress.cli.doctor.cluster import Meeting, merge_links
from ds_compress.cli.doctor.findings import findings
from ds_compress.version import __version__
from launch.ports import reserved_port
from tests.support.interpreters import interpreter
from tests.support.launch_scripts import ROOT
from tests.support.network import ADDRESSES, WIRE, reason_for_none, two_hosts
from tests.support.refusals import refusal

VERSIONS = {"python": "3.11.7", "ds_compress": "1", "torch": "2", "deepspeed": "0.19.8", "transformers": "5"}
LO = {"name": "lo", "addresses": ["127.0.0.1"], "mbit": 0, "mtu": 65536}
ETH = {"name": "eth0", "addresses": ["10.0.0.1"], "mbit": 1000, "mtu": 1500}
IB = {"name": "ib0", "addresses": ["10.1.0.1"], "mbit": 100_000, "mtu": 1500}
HOST = {"versions": VERSIONS, "switched_on": True, "device": "2 cores, x86_64", "kernels": "x86-64-v4"}
HOST |= {"interfaces": [LO, ETH], "way": "eth0", "congestion_control": "cubic", "slow_start_after_idle": "0"}
HOST |= {"gloo_interface": "eth0", "gloo_because": "the name a is 10.0.0.1", "left_buffers": {}}


def report(**changes):
    """Two machines with which all is well but for `changes` to the second."""
    hosts = [{**copy.deepcopy(HOST), "host": name} for name in "ab"]
    link = {"ranks": [0, 1], "gbps_forward": 0.9, "gbps_backward": 0.9, "rtt_ms": 0.3}
    link |= {key: changes.pop(key) for key in link.keys() & changes.keys()}
    hosts[1] |= changes
    return {"hosts": hosts, "links": [link]}


def problems(given=None, **changes):
    """Findings that are not good."""
    return [each for each in findings(given or report(**changes)) if each.level != "good"]


def test_nothing_is_found_where_all_is_well():
    assert problems() == []
    assert [each.said for each in findings(report())] == [
        "python 3.11.7, ds_compress 1, torch 2, deepspeed 0.19.8, transformers 5 everywhere",
        "C++ kernels for x86-64-v4 on a, b",
        "a talks over eth0",
        "b talks over eth0",
        "a - b: 0.9 Gbit/s there, 0.9 back, 0.30 ms round trip",
        "the slowest link gives 0.9 Gbit/s",
    ]
    assert findings(report())[-1].do == "ds-compress advise ... --gbps 0.9 --latency-ms 0.15"


NAMED_LO = {"gloo_interface": "lo", "gloo_because": "the name b is 127.0.1.1"}
MISSPELT = {"gloo_interface": "eht0", "gloo_because": "GLOO_SOCKET_IFNAME"}
OVER_IB = {"interfaces": [LO, ETH, IB], "way": "ib0"}
LEFT = "/dev/shm/deepspeed_allreduce_buffer_0"
LEFT_66_MB = {"left_buffers": {LEFT: 66_000_000}}
SLOW = {"gbps_forward": 0.1, "gbps_backward": 0.1, "rtt_ms": 40.0}
IDLE = {"rtt_ms": 40.0, "slow_start_after_idle": "1"}


def versions(**others):
    return {"versions": {**VERSIONS, **others}}


@pytest.mark.parametrize(
    "changes, level, message, do",
    [
        (versions(torch="3"), "bad", "torch differs: 2 on a; 3 on b", "the same version"),
        (versions(python="3.12"), "look", "python differs: 3.11.7 on a; 3.12 on b", ""),
        (versions(transformers=None), "look", "transformers differs: 5 on a; none on", ""),
        ({"switched_on": False}, "bad", "does not load ds_compress by itself on b", machine.AUTOLOAD),
        ({"hooks": False}, "bad", f"{HOOK} is 0 on b: the key would be ignored", f"unset {HOOK}"),
        ({"kernels": None}, "look", "no C++ kernels on b", "apt install g++"),
        (NAMED_LO, "bad", "b would not be found: gloo takes lo, as the name b", "GLOO_SOCKET_IFNAME=eth0"),
        (MISSPELT, "bad", "takes eht0, as GLOO_SOCKET_IFNAME; interfaces: eth0", "GLOO_SOCKET_IFNAME=eth0"),
        (LEFT_66_MB, "look", "left 1 buffers of DeepSpeed, 66 MB, in", f"rm {LEFT}"),
        (OVER_IB, "look", "b reaches rank 0 over ib0, but gloo takes eth0", "GLOO_SOCKET_IFNAME=ib0"),
        ({"gbps_backward": 0.2}, "look", "0.2 back, 0.30 ms round trip: one direction is 4.5 times", "cable"),
        (SLOW, "look", "40.00 ms round trip: the interface is rated 1 Gbit/s", "try TCP's bbr on a, b, or"),
        (
            {**SLOW, "congestion_control": "bbr"},
            "look",
            "is rated 1 Gbit/s",
            'on a, or "link": {"connections"',
        ),
        (IDLE, "look", "after each pause on b: messages may then take", "tcp_slow_start_after_idle=0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_one_line_with_what_to_do(changes, level, message, do):
    (found,) = problems(**changes)
    assert found.level == level and message in found.said and do in found.do
    assert "\n" not in found.said + found.do


def test_buffers_without_a_living_owner(tmp_path, monkeypatch):
    """An afternoon of killed launches left 18 GB, then memory ran out, and nothing named the reason."""
    monkeypatch.setattr(machine, "SHARED", tmp_path)
    living, left = (tmp_path / f"deepspeed_allreduce_buffer_{rank}" for rank in range(2))
    for path in (living, left, tmp_path / "another"):
        path.write_bytes(bytes(8192))
    with living.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert machine.left_buffers() == {str(left): 8192}


def test_what_all_lack():
    everywhere = report()
    for host in everywhere["hosts"]:
        host["versions"] = {**VERSIONS, "deepspeed": None, "transformers": None}
    (found,) = problems(everywhere)
    assert (found.level, found.said) == ("bad", "deepspeed is not installed")


def test_ranks_of_one_machine_need_no_interface():
    alone = report()
    for host in alone["hosts"]:
        host |= {"host": "a", "way": "lo", "gloo_interface": "lo"}
    assert problems(alone) == []
    assert "a (rank 1) talks over lo" in [each.said for each in findings(alone)]


def test_this_machine(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["doctor", "--json"]) == 0
    (host,) = json.loads(capsys.readouterr().out)["hosts"]
    assert host["versions"]["torch"] == torch.__version__ and host["versions"]["ds_compress"] == __version__
    assert "lo" in [each["name"] for each in host["interfaces"]]
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 machine" and [line for line in lines if line.startswith("good  python 3.")]


def test_a_machine_without_kernels_or_entry_point(monkeypatch):
    monkeypatch.setattr(machine.library, "load", lambda: None)
    monkeypatch.setenv(machine.AUTOLOAD, "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    found = machine.facts()
    assert found["kernels"] is None and not found["switched_on"]
    assert (found["gloo_interface"], found["gloo_because"]) == ("eth7", "GLOO_SOCKET_IFNAME")
    assert [each.level for each in findings({"hosts": [{**found, "way": None}]})] == ["good", "bad", "look"]


def test_a_machine_where_the_hook_is_switched_off(monkeypatch):
    """The doctor found nothing wrong, and training was uncompressed."""
    assert machine.facts()["hooks"]
    monkeypatch.setenv(HOOK, "0")
    assert not machine.facts()["hooks"]


def test_several_interfaces_may_be_named(monkeypatch):
    """gloo takes a list; the doctor took it for one interface, which no machine has: "would not be found"."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,ib0")
    name, why = machine.gloo_interface()
    assert problems(gloo_interface=name, gloo_because=why) == []


@pytest.mark.parametrize("address, interface", [("127.0.1.1", "lo"), ("::1", "lo"), ("192.0.2.77", None)])
def test_the_interface_of_an_address(address, interface):
    assert machine.interface_of(address) == interface


def ranks(count, world, *more, first=0, address="127.0.0.1", python=interpreter, before=lambda rank: ()):
    """So many of `world` ranks, as a launcher starts them; what each returned and said."""
    own = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [python(), "-m", "ds_compress", "--local_rank=0", "doctor", *more]
    with reserved_port() as port:
        own |= {"WORLD_SIZE": str(world), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        processes = [
            subprocess.Popen([*before(rank), *command], env={**own, "RANK": str(rank)}, **pipes)
            for rank in range(first, first + count)
        ]
        return [(*process.communicate(), process.returncode) for process in processes]


@pytest.mark.extended
def test_links_between_replicas_under_a_launcher():
    """Two replicas of three stages; rank 0 tells. Ranks 2 apart are neighbouring stages in DeepSpeed's own
    order, which were not measured, and ranks 3 apart replicas that stand in a row."""
    (out, _, code), *others = ranks(6, 6, "--json", "--replicas", "2")
    assert code == 0 and [(out, code) for out, _, code in others] == [("", 0)] * 5
    links = json.loads(out)["links"]
    pairs = sorted([one, one + far] for far in (1, 2, 3) for one in range(6 - far))
    assert [link["ranks"] for link in links] == pairs
    assert all(0 < link[f"gbps_{way}"] < 1e4 for link in links for way in ("forward", "backward"))
    (_, message, code), *_ = ranks(1, 1, "--replicas", "2")
    assert code == 2 and "--replicas: 2 is not allowed: should divide the 1 processes" in message


@pytest.mark.extended
def test_a_rank_that_does_not_come_is_named():
    """On a busy machine rank 1 may come as late as that."""
    (out, message, code), *_ = ranks(2, 3, "--timeout", "5")
    assert code == 2 and out == "" and message.count("\n") == 1, message
    assert re.match(r"ds-compress doctor: of 3 ranks (1, )?2 did not answer within 5 s", message)


@pytest.mark.extended
def test_rank_0_that_cannot_be_reached_is_named():
    ((out, error, code),) = ranks(1, 2, "--timeout", "2", first=1)
    said = r"ds-compress doctor: rank 1 cannot meet the others at 127.0.0.1:\d+; "
    assert code == 2 and out == "" and re.match(said, error.splitlines()[-1])


@pytest.mark.parametrize("name, value", [("WORLD_SIZE", ""), ("MASTER_PORT", "x")])
def test_half_a_launcher(monkeypatch, capsys, name, value):
    good = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for key, given in (good | {name: value}).items():
        monkeypatch.setenv(key, given)
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("ds-compress doctor: the launcher set no usable ")


def test_a_link_is_joined_of_what_its_two_sides_found():
    back = {"ranks": [0, 1], "gbps_backward": 2.0, "rtt_ms": 0.5}
    there = {"ranks": [0, 1], "gbps_forward": 1.0, "rtt_ms": 0.3}
    assert merge_links([back, there]) == [{**back, **there}]


@pytest.mark.skipif(bool(reason_for_none()), reason=reason_for_none())
@pytest.mark.extended
def test_hosts_that_would_not_find_each_other_are_told_what_to_set(monkeypatch):
    """gloo takes the address of the host's name, here a loopback one, and waits for half an hour."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with two_hosts() as hosts:
        found = ranks(2, 2, address=ADDRESSES[0], python=lambda: sys.executable, before=hosts.on)
    (out, _, code), (nothing, _, other) = found
    assert (code, other, nothing) == (1, 0, "")
    bad = [line for line in out.splitlines() if line.startswith("BAD ")]
    assert len(bad) == 3 and "no link was tried" in bad[-1]
    for line in bad[:2]:
        assert "would not be found: gloo takes lo" in line and f"set GLOO_SOCKET_IFNAME={WIRE}" in line


def test_absent_ranks_are_waited_for_together(monkeypatch):
    """One after another: a job of 16 of which rank 0 alone came waited 15 times as long as --timeout."""
    with reserved_port() as port:
        given = {"RANK": "0", "WORLD_SIZE": "64", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        ends, is_set = set(), Meeting._is_set
        monkeypatch.setattr(Meeting, "_is_set", lambda *args: (ends.add(args[2]), is_set(*args))[1])
        error = refusal(lambda: Meeting(1.0).gather("facts", {}))
        assert "of 64 ranks 1-63 did not answer within 1 s" in error and len(ends) == 1
