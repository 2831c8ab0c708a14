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
import hashlib, json, random, socket, sys, time
data = random.Random(1).randbytes(2_000_000)
if sys.argv[sys.argv.index("--node_rank") + 1] == "0":
    server = socket.create_server(("10.77.0.1", 29501))
    peer, _ = server.accept()
    for _ in range(3):
        peer.sendall(peer.recv(1))
    peer.sendall(data)
    peer.recv(1)
    peer.sendall(data[:100_000])
    peer.recv(1)
else:
    while True:
        try:
            peer = socket.create_connection(("10.77.0.1", 29501), 1)
            break
        except OSError:
            time.sleep(0.1)
    peer.settimeout(None)
    trips = []
    for _ in range(3):
        started = time.perf_counter()
        peer.sendall(b"x")
        peer.recv(1)
        trips.append(time.perf_counter() - started)
    found = peer.recv(len(data), socket.MSG_WAITALL)
    time.sleep(0.5)  # the link has rested
    started = time.perf_counter()
    peer.sendall(b"x")
    peer.recv(100_000, socket.MSG_WAITALL)
    seconds = time.perf_counter() - started
    peer.sendall(b"x")
    print(json.dumps({"trip": min(trips), "same": found == data, "small": seconds}))
"""


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


@pytest.mark.skipif(bool(reason_for_none()), reason=reason_for_none())
@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="this kernel has no tun devices")
@pytest.mark.parametrize("rate", ["", "100mbit"])
def test_a_far_link_delays_every_packet_and_loses_none(rate, tmp_path):
    found, (sent, received) = pinged(tmp_path, RTT_MS=str(RTT_MS), RATE=rate)
    assert found["same"] and found["trip"] >= RTT_MS / 1e3
    assert sent > 2_000_000 > received


@pytest.mark.skipif(bool(reason_for_none()), reason=reason_for_none())
@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="this kernel has no tun devices")
def test_a_link_that_loses_packets_sends_them_again(tmp_path):
    found, (sent, _) = pinged(tmp_path, LOSS="5", JITTER_MS="3")
    assert found["same"]
    assert sent > 1.03 * 2_100_000 * 1500 / 1448  # those that were lost have left twice


@pytest.mark.skipif(bool(reason_for_none()), reason=reason_for_none())
def test_a_slow_link_is_slow_for_a_small_message_too(tmp_path):
    """A burst of 128 KiB after every pause passed any rate: 4-bit messages at 9 Mbit/s cost nothing."""
    found, _ = pinged(tmp_path, RATE="5mbit")
    assert found["same"] and found["small"] > (100_000 - 2 * 16_384) * 8 / 5e6


@pytest.mark.parametrize("user, said", [(0, ""), (1000, "needs root")])
def test_a_link_that_cannot_be_made_far_says_so(user, said, tmp_path):
    (tmp_path / "id").write_text(f"#!/bin/sh\necho {user}\n")
    for name in ("ip", "tc", "taskset"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "ip").write_text('#!/bin/sh\ncase "$*" in *"link show"*) exit 1;; esac\nexit 0\n')
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    done = start({"PATH": f"{tmp_path}:{os.environ['PATH']}", "RTT_MS": "20"})
    error = done.stderr
    assert done.returncode == 1 and error.startswith(f"two_hosts: {said}") and error.count("\n") == 1
