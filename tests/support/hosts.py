"""Make hosts in network namespaces, and log in to them.

Two hosts on one machine, joined by a link that can be cut: network namespaces, which need root.

ssh and pdsh that reach the hosts of a test: each is a command to put before what is run there.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

WIRE = "wire"
ADDRESSES = ("10.77.1.1", "10.77.1.2")


def reason_for_none() -> str:
    """Why there can be no two hosts here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is missing (iproute2)"
    name = f"ds-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return made.stderr.strip()
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Hosts:
    def __init__(self, names: tuple[str, str]):
        self._names = names

    def on(self, host: int) -> list[str]:
        """What to put before a command to run it on host 0 or 1."""
        return ["ip", "netns", "exec", self._names[host]]

    def cut(self) -> None:
        """From now on the link loses every packet, as a switch that has failed does: nobody is told."""
        for host in range(2):
            self.shape(host, "rate 8bit burst 1 latency 1ms")

    def shape(self, host: int, words: str) -> None:
        """What leaves host 0 or 1 passes through a token bucket of tc."""
        shaping = f"tc qdisc replace dev {WIRE} root tbf {words}".split()
        subprocess.run([*self.on(host), *shaping], check=True)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    names = (f"ds-a-{os.getpid()}", f"ds-b-{os.getpid()}")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("-n", names[0], "link", "add", WIRE, "type", "veth", "peer", "name", WIRE, "netns", names[1])
        for name, address in zip(names, ADDRESSES):
            ip("-n", name, "address", "add", f"{address}/30", "dev", WIRE)
            for device in ("lo", WIRE):
                ip("-n", name, "link", "set", device, "up")
        yield Hosts(names)
    finally:
        for name in made:
            ip("netns", "del", name)


PROGRAM = """#!{python}
import os, subprocess, sys, threading

hosts, tool = {hosts!r}, os.path.basename(sys.argv[0])
words, names = sys.argv[1:], None
while words and words[0].startswith("-"):  # -S of pdsh alone stands without a value
    flag = words.pop(0)
    value = None if flag == "-S" else words.pop(0)
    names = value.split(",") if flag == "-w" else names
names = names or [words.pop(0)]
codes = {{}}


def run(number, name):
    if name not in hosts:
        print(f"ssh: Could not resolve hostname {{name}}: Name or service not known", file=sys.stderr)
        codes[name] = 255
        return
    command = " ".join(words).replace("%n", str(number))
    clean = {{key: os.environ[key] for key in ("HOME", "PATH") if key in os.environ}}
    start = [*hosts[name], "sh", "-c", command]
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT) if tool == "pdsh" else {{}}
    process = subprocess.Popen(start, env=clean, text=True, **pipe)
    for line in process.stdout or ():
        print(f"{{name}}: {{line}}", end="", flush=True)
    codes[name] = process.wait()


threads = [threading.Thread(target=run, args=each) for each in enumerate(names)]
for each in threads:
    each.start()
for each in threads:
    each.join()
sys.exit(max(codes.values()))
"""


def logins(folder: Path, hosts: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The environment in which ssh and pdsh know `hosts`, by name, and start there in an environment of their
    own."""
    folder.mkdir()
    for tool in ("ssh", "pdsh"):
        (folder / tool).write_text(PROGRAM.format(python=sys.executable, hosts=dict(hosts)))
        (folder / tool).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
