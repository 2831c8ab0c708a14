"""ssh and pdsh that reach the hosts of a test: each is a command to put before what is run there."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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
