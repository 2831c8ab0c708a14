"""ds-compress doctor --hostfile: through DeepSpeed's launcher, on hosts that the test's ssh reaches."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.interpreters import interpreter
from tests.support.launch_scripts import ROOT
from tests.support.network import ADDRESSES, WIRE, logins, reason_for_none, two_hosts

HOSTFILE = "worker-1 slots=8\n# the other one\n\nworker-2 slots=8\n"
TWO_HOSTS = pytest.mark.skipif(bool(reason_for_none()), reason=reason_for_none())


def doctor(folder, environment, hostfile=HOSTFILE, *more, python=None):
    """`python`: where hosts are others than this one, what starts there; the interpreter."""
    (folder / "hostfile").write_text(hostfile)
    python = python or interpreter()
    command = [python, "-m", "ds_compress", "doctor", "--hostfile", "hostfile", *more]
    environment = {**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=600)


def refusal(done):
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done
    return done.stderr


@TWO_HOSTS
@pytest.mark.extended
def test_two_hosts_are_measured(tmp_path):
    (tmp_path / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={WIRE}\n")
    with two_hosts() as hosts:
        hosts.shape(0, "rate 20mbit burst 32kb latency 200ms")
        environment = logins(tmp_path / "bin", {"worker-1": hosts.on(0), "worker-2": hosts.on(1)})
        done = doctor(tmp_path, environment, HOSTFILE, "--json", python=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    for host, address in zip(report["hosts"], ADDRESSES, strict=True):
        assert host["gloo_interface"] == host["way"] == WIRE
        assert address in next(each["addresses"] for each in host["interfaces"] if each["name"] == WIRE)
    (link,) = report["links"]
    assert link["ranks"] == [0, 1] and link["rtt_ms"] > 0
    assert 0 < link["gbps_forward"] <= 0.021 < 2 * 0.021 < link["gbps_backward"]
    (clock,) = report["clocks"]
    assert abs(clock["ahead_ms"]) <= clock["within_ms"] + 1, "both have the clock of this machine"
    (uneven,) = [each for each in report["findings"] if each["level"] == "look"]
    assert "one direction is" in uneven["said"]
    (last,) = [each["do"] for each in report["findings"] if "slowest link" in each["said"]]
    assert last.startswith(f"ds-compress advise ... --gbps {link['gbps_forward']:.3g} ")


@TWO_HOSTS
@pytest.mark.extended
def test_hosts_that_would_not_find_each_other_are_told_what_to_set():
    """gloo takes the address of the host's name, here a loopback one, and waits for half an hour."""
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", "PYTHONPATH": str(ROOT)}
    environment = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"} | where
    with two_hosts() as hosts:
        processes = [
            subprocess.Popen(
                [*hosts.on(rank), sys.executable, "-m", "ds_compress", "doctor"],
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        (out, _), (nothing, _) = (process.communicate() for process in processes)
    assert [process.returncode for process in processes] == [1, 0] and nothing == ""
    bad = [line for line in out.splitlines() if line.startswith("BAD ")]
    assert len(bad) == 3 and "no link was tried" in bad[-1]
    for line in bad[:2]:
        assert "would not be found: gloo takes lo" in line and f"set GLOO_SOCKET_IFNAME={WIRE}" in line


def test_hosts_that_cannot_be_reached_are_named(tmp_path):
    here = logins(tmp_path / "bin", {"worker-1": []})
    message = refusal(doctor(tmp_path, here))
    reason = "ssh: Could not resolve hostname worker-2: Name or service not known"
    assert message == f"ds-compress doctor: worker-2: not reached by ssh without a password ({reason})\n"


@pytest.mark.parametrize(
    "python, message",
    [
        ("exit 127", "cannot run ds_compress"),
        ("echo 'ModuleNotFoundError: No module named torch' >&2; exit 1", "named torch"),
        ("echo 0.0.1", "has ds_compress 0.0.1, this machine "),
    ],
)
def test_hosts_without_the_same_package_are_named(tmp_path, python, message):
    here = logins(tmp_path / "bin", {"worker-1": [], "worker-2": ["sh", "-c", python]})
    found = refusal(doctor(tmp_path, here))
    assert found.startswith("ds-compress doctor: worker-2: ") and message in found


@pytest.mark.parametrize(
    "hostfile, message",
    [
        ("", "hostfile: no machine in it; should have lines like worker-1 slots=8"),
        ("worker-1 slots=1\nworker-2\n", "hostfile:2: 'worker-2' is not a line like worker-1 slots=8"),
        ("worker-1 slots=1\nworker-1 slots=1\n", "hostfile:2: 'worker-1' has a line already"),
    ],
)
def test_a_hostfile_that_is_none(tmp_path, hostfile, message):
    assert refusal(doctor(tmp_path, logins(tmp_path / "bin", {}), hostfile)) == f"{message}\n"


def test_tools_that_are_missing_are_named(tmp_path):
    environment = logins(tmp_path / "bin", {"worker-1": []})
    (tmp_path / "bin" / "pdsh").unlink()
    message = refusal(doctor(tmp_path, {**environment, "PATH": str(tmp_path / "bin")}))
    assert (
        "pdsh is missing" in message and "apt install pdsh" in message and "-m ds_compress doctor" in message
    )


def test_a_launcher_that_fails_is_quoted(tmp_path):
    environment = logins(tmp_path / "bin", {"worker-1": [], "worker-2": []})
    (tmp_path / "bin" / "pdsh").write_text("#!/bin/sh\necho pdsh: no more sockets\nexit 1\n")
    assert refusal(doctor(tmp_path, environment)).endswith("the launcher failed: pdsh: no more sockets\n")
