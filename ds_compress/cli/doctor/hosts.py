"""Run a doctor on each machine of a hostfile, started as DeepSpeed starts a training."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ds_compress.cli.doctor.cluster import Report
from ds_compress.errors import CompressionError, shown
from ds_compress.version import __version__

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
SSH_SECONDS = 120.0
"""Timeout of a login and the start of a Python process."""

COMMAND = "ds-compress doctor"


def read(file: Path) -> list[str]:
    """Read the names of the machines from a hostfile of DeepSpeed (lines NAME slots=NUMBER)."""
    names: list[str] = []
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        found = re.match(r"\s*(\S+)\s+slots=\d+", line)
        if found is None:
            raise CompressionError(f"{file}:{number}: {shown(line)} is not a line like worker-1 slots=8")
        if found[1] in names:
            raise CompressionError(f"{file}:{number}: {shown(found[1])} has a line already")
        names.append(found[1])
    if not names:
        raise CompressionError(f"{file}: no machine in it; should have lines like worker-1 slots=8")
    return names


def examine(file: Path, seconds: float, replicas: int = 1) -> Report:
    """Run a doctor on each machine of a hostfile and return the joint report.

    Raises:
        CompressionError: a machine cannot be reached, cannot start ds_compress, or does not answer.
    """
    names = read(file)
    for tool, package in (("pdsh", "pdsh"), ("ssh", "openssh-client")):
        if shutil.which(tool) is None:
            raise CompressionError(
                f"{COMMAND}: {tool} is missing, by which deepspeed --hostfile reaches machines: apt install "
                f"{package}, or start the doctor as you start a training: torchrun ... -m ds_compress doctor"
            )
    with ThreadPoolExecutor(len(names)) as pool:
        reasons = list(pool.map(_reason_for_none, names))
    wrong = [f"{name}: {reason}" for name, reason in zip(names, reasons) if reason]
    if wrong:
        raise CompressionError(f"{COMMAND}: {'; '.join(wrong)}")
    program = ["ds_compress", "doctor", "--json", "--timeout", f"{seconds:g}", "--replicas", str(replicas)]
    start = ["deepspeed.launcher.runner", "--hostfile", str(file), "--force_multi", "--num_gpus", "1"]
    done = subprocess.run(
        [sys.executable, "-m", *start, "--module", *program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return _report(done.stdout)


def _reason_for_none(name: str) -> str:
    """Return why a machine cannot run ds_compress; an empty string if it can."""
    python = shlex.join(
        [sys.executable, "-c", "from ds_compress.version import __version__; print(__version__)"]
    )
    where = f"cd {shlex.quote(os.getcwd())}; PYTHONPATH={shlex.quote(os.environ.get('PYTHONPATH', ''))}"
    try:
        done = subprocess.run(
            [*SSH, name, f"{where} {python}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SSH_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"no answer by ssh within {SSH_SECONDS:g} s"
    last = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1].strip()
    if done.returncode == 255:
        return f"not reached by ssh without a password ({last})"
    if done.returncode:
        return f"cannot run ds_compress with {sys.executable}, as on this machine ({last})"
    version = done.stdout.split()[-1:]
    if version != [__version__]:
        return f"has ds_compress {''.join(version) or 'without a version'}, this machine {__version__}"
    return ""


def _report(output: str) -> Report:
    """Extract rank 0's JSON report from the launcher's output; pdsh prefixes lines with host names."""
    for line in output.splitlines():
        start = line.find('{"hosts": ')
        if start >= 0:
            return json.loads(line[start:])
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = next((line[line.find(COMMAND) :] for line in lines if f"{COMMAND}: " in line), None)
    raise CompressionError(said or f"{COMMAND}: the launcher failed: {(lines or ['without any output'])[-1]}")
