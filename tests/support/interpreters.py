"""Fork Python processes from a server in which torch and DeepSpeed are imported already.

`interpreter` returns the path of a program that is called as Python is; it has a server, one for each worker
of pytest, fork itself. The child gets the program's arguments, environment, folder and standard files, and
finds it as `sys.executable`. Tests of imports, or of variables read at import, need `sys.executable` itself.

python tests/support/interpreters.py FOLDER MODULE ...      the server; started by `interpreter`
"""

import contextlib
import gc
import importlib
import io
import marshal
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

MODULES = ("torch", "deepspeed")

TRAINING = "torch._dynamo"
"""Imported by the first optimizer; slow, and Triton, which comes with it, reports leaks at exit."""

SOCKET = "socket"
PROGRAM = """#!{python} -IS
import marshal, os, signal, socket, sys

with socket.socket(socket.AF_UNIX) as link:
    link.connect({address!r})
    request = marshal.dumps((sys.argv[1:], dict(os.environ), os.getcwd()))
    socket.send_fds(link, [len(request).to_bytes(4, "little")], [0, 1, 2])
    link.sendall(request)
    answer = link.recv(4)
    if answer:
        pid = int.from_bytes(answer, "little")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, frame: os.kill(pid, number))
        answer = link.recv(4)
if not answer:
    sys.exit("the server of warm processes has ended: " + open({log!r}).read())
code = os.waitstatus_to_exitcode(int.from_bytes(answer, "little"))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
"""Stands in for the interpreter. It imports next to nothing: starting it is what a process costs."""

SERVERS: list[subprocess.Popen[bytes]] = []

Request = tuple[list[str], dict[str, str], str]
"""Arguments, environment and folder."""


@cache
def interpreter(*more: str) -> str:
    """Return a program that stands in for `sys.executable`, with MODULES and `more` imported."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    program, log = folder / "python", folder / "log"
    text = PROGRAM.format(python=sys.executable, address=str(folder / SOCKET), log=str(log))
    launcher = Path(sys.executable).with_name("deepspeed").read_text().partition("\n")[2]
    for path, content in ((program, text), (folder / "deepspeed", f"#!{program}\n{launcher}")):
        path.write_text(content)
        path.chmod(0o755)
    with log.open("w") as message:
        server = subprocess.Popen(
            [sys.executable, __file__, str(folder), *MODULES, *more],
            stdin=subprocess.PIPE,  # it ends when this process does
            stdout=message,
            stderr=message,
        )
    while not (folder / SOCKET).exists():
        assert server.poll() is None, log.read_text()
        time.sleep(0.01)
    SERVERS.append(server)
    return str(program)


def serve(folder: Path, modules: list[str]) -> Request:
    """Fork for each request; return only in the child that runs it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / f".{SOCKET}"))
    listener.listen(64)
    os.rename(folder / f".{SOCKET}", folder / SOCKET)  # whoever sees it can ask
    for module in modules:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the threads that an import has started"
    gc.collect()
    gc.freeze()  # the first collection in each child would copy all of that memory
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        link = listener.accept()[0]
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return answer(link)
        link.close()
    shutil.rmtree(folder, ignore_errors=True)  # the one who started this has ended
    os._exit(0)


def answer(link: socket.socket) -> Request:
    """Fork, tell who asks the child's number, and how it has ended; return in the child alone."""
    size, files, *_ = socket.recv_fds(link, 4, 3)
    request = b""
    while len(request) < int.from_bytes(size, "little"):
        request += link.recv(1 << 20)
    if (child := os.fork()) == 0:
        link.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        return marshal.loads(request)
    for file in files:
        os.close(file)
    with contextlib.suppress(OSError):  # who asked was killed
        link.sendall(child.to_bytes(4, "little"))
    ended = os.pidfd_open(child)
    if ended not in select.select([ended, link, sys.stdin], [], [])[0]:  # as was who asked, or all has ended
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        link.sendall(status.to_bytes(4, "little"))
    os._exit(0)


def interpret(words: list[str]) -> None:
    """What the interpreter does with its arguments."""
    if words[0] == "-u":
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
        words = words[1:]
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    what, *rest = words
    if what == "-m":
        name, *rest = rest
        sys.argv, sys.path[:] = ["-m", *rest], [os.getcwd(), *own, *FOUND]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif what == "-c":
        code, *rest = rest
        sys.argv, sys.path[:] = ["-c", *rest], ["", *own, *FOUND]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[:] = words, [str(Path(what).resolve().parent), *own, *FOUND]
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    FOUND = sys.path[1 + len(named) :]  # what the interpreter finds by itself
    del sys.path[0]  # the folder of this file, whose modules are nobody's but of tests
    words, variables, folder = serve(Path(sys.argv[1]), sys.argv[2:])
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.executable = str(Path(sys.argv[1], "python"))
    interpret(words)
