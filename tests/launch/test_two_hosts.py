"""The link of `make bench-net`: what goes over it comes late, whole and in order."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import reason_for_none

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
    found = b""
    while len(found) < len(data):
        found += peer.recv(1 << 20)
    peer.sendall(b"x")
    print(json.dumps({"seconds": min(trips), "same": found == data}))
"""


@pytest.mark.skipif(bool(reason_for_none()), reason=reason_for_none())
@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="this kernel has no tun devices")
@pytest.mark.parametrize("rate", ["", "100mbit"])
def test_a_far_link_delays_every_packet_and_loses_none(rate, tmp_path):
    """Instead of deepspeed each host runs a program that sends to and fro."""
    launcher = tmp_path / "deepspeed"
    launcher.write_text(f"#!{sys.executable}\n{PING}")
    launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
    counters = tmp_path / "counters"
    environment = {"RTT_MS": str(RTT_MS), "RATE": rate, "DEEPSPEED": str(launcher), "COUNTERS": str(counters)}
    done = subprocess.run(
        [TWO_HOSTS, "train.py"],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same"] and found["seconds"] >= RTT_MS / 1e3
    sent, received = map(int, counters.read_text().split())
    assert sent > 2_000_000 > received


def test_a_link_that_cannot_be_made_far_says_so(tmp_path):
    (tmp_path / "id").write_text("#!/bin/sh\necho 0\n")
    for name in ("ip", "tc", "taskset"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "ip").write_text('#!/bin/sh\ncase "$*" in *"link show"*) exit 1;; esac\nexit 0\n')
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "RTT_MS": "20"}
    done = subprocess.run(
        [TWO_HOSTS, "train.py"], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 1 and done.stderr.startswith("two_hosts: ") and done.stderr.count("\n") == 1
