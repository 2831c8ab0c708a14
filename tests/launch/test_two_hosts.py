"""The link of `make bench-net`: what goes over it comes late, whole and in order."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.network import reason_for_none

TWO_HOSTS = Path(__file__).parents[2] / "launch" / "two_hosts.sh"
RTT_MS = 40
PING = """
import json, random, socket, sys, time
data, place = random.Random(1).randbytes(2_000_000), ("10.77.0.1", 29501)
if sys.argv[sys.argv.index("--node_rank") + 1] == "0":
    peer, _ = socket.create_server(place).accept()
    for answer in (b"x", b"x", b"x", data, data[:100_000]):
        peer.recv(1)
        peer.sendall(answer)
    sys.exit(peer.recv(1) != b"x")
peer = None
while peer is None:
    try:
        peer = socket.create_connection(place, 1)
    except OSError:
        time.sleep(0.1)
peer.settimeout(None)
def ask(size):
    started = time.perf_counter()
    peer.sendall(b"x")
    return peer.recv(size, socket.MSG_WAITALL), time.perf_counter() - started
trip = min(ask(1)[1] for _ in range(3))
same = ask(len(data))[0] == data
time.sleep(0.5)  # the link has rested
small = ask(100_000)[1]
peer.sendall(b"x")
print(json.dumps({"trip": trip, "same": same, "small": small}))
"""
HAS_HOSTS = pytest.mark.skipif(bool(reason_for_none()), reason=reason_for_none())
HAS_TUN = pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="this kernel has no tun devices")


def start(environment):
    """Run the script; `environment`: beside that of this process."""
    env = {**os.environ, **environment}
    return subprocess.run([TWO_HOSTS, "train.py"], capture_output=True, text=True, env=env, timeout=300)


def pinged(folder, **environment):
    """What the program that runs on each host in place of deepspeed has found, and what both sent."""
    launcher, counters = folder / "deepspeed", folder / "counters"
    launcher.write_text(f"#!{sys.executable}\n{PING}")
    launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
    done = start(environment | {"DEEPSPEED": str(launcher), "COUNTERS": str(counters)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), list(map(int, counters.read_text().split()))


@HAS_HOSTS
@HAS_TUN
@pytest.mark.parametrize("rate", ["", "100mbit"])
def test_a_far_link_delays_every_packet_and_loses_none(rate, tmp_path):
    found, (sent, received) = pinged(tmp_path, RTT_MS=str(RTT_MS), RATE=rate)
    assert found["same"] and found["trip"] >= RTT_MS / 1e3
    assert sent > 2_000_000 > received


@HAS_HOSTS
@HAS_TUN
@pytest.mark.extended
def test_a_link_that_loses_packets_sends_them_again(tmp_path):
    found, (sent, _) = pinged(tmp_path, LOSS="5", JITTER_MS="3")
    assert found["same"]
    assert sent > 1.03 * 2_100_000 * 1500 / 1448  # those that were lost have left twice


@HAS_HOSTS
@pytest.mark.extended
def test_a_slow_link_is_slow_for_a_small_message_too(tmp_path):
    """A burst of 128 KiB after every pause passed any rate: 4-bit messages at 9 Mbit/s cost nothing."""
    found, _ = pinged(tmp_path, RATE="5mbit")
    assert found["same"] and found["small"] > (100_000 - 2 * 16_384) * 8 / 5e6


@pytest.mark.parametrize("user, said", [(0, ""), (1000, "needs root")])
def test_a_link_that_cannot_be_made_far_says_so(user, said, tmp_path):
    no_link = 'case "$*" in *"link show"*) exit 1;; esac'
    tools = {"id": f"echo {user}", "ip": no_link, "tc": "", "taskset": "", "python3": "exit 1"}
    for name, line in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    done = start({"PATH": f"{tmp_path}:{os.environ['PATH']}", "RTT_MS": "20"})
    error = done.stderr
    assert done.returncode == 1 and error.startswith(f"two_hosts: {said}") and error.count("\n") == 1
