"""`ds-compress replica-store`: its port among strangers, and what replicas do with one that is none."""

import contextlib
import socket
import subprocess
import sys
import threading

import pytest
from torch.distributed import TCPStore

from ds_compress.errors import CompressionError
from ds_compress.replicas.store import connect
from tests.replicas.test_rounds import Launch, assert_alike, play
from tests.support.network import disturb, eventually, flood


@contextlib.contextmanager
def serving(soft_limit=None):
    """The command; yield a connection to its store, and the process."""
    words = [sys.executable, "-m", "ds_compress", "replica-store", "--port", "0"]
    words = ["bash", "-c", f'ulimit -S -n {soft_limit}; exec "$@"', "bash", *words] if soft_limit else words
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        port = int(line.split("port ")[1].split(";")[0])
        yield TCPStore("127.0.0.1", port, is_master=False), process
        assert process.poll() is None
        process.terminate()


def test_strangers_at_the_port_leave_rounds_alone():
    """Bytes of all kinds, and more connections than the process may have open by default.

    Few of either: torch looks up a name for each connection, which takes long where names have no server.
    """
    with serving(soft_limit=64) as (store, _), flood(store.port, 50):
        first = Launch(store)
        disturb([store.port])
        ended = threading.Event()

        def run():
            while not ended.is_set():
                disturb([store.port])

        strangers = threading.Thread(target=run)
        strangers.start()
        try:
            second = Launch(store)
            for _ in range(3):
                results = play([first, second], (0.1, 0.2))
                assert all(result.members == (1, 2) for own in results for result in own)
        finally:
            ended.set()
            strangers.join()
        assert_alike([first, second])


def test_a_port_that_says_nothing_is_no_store():
    """Launches would wait for ever: torch sets no limit for the first answer. A thread that waited for it as
    the interpreter ended aborted the process: "terminate called without an active exception"."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(5)
        with pytest.raises(RuntimeError, match="does not answer; is it `ds-compress replica-store`?"):
            connect(f"127.0.0.1:{silent.getsockname()[1]}", seconds=0.1)
        eventually(lambda: "ds_compress_connect" not in [each.name for each in threading.enumerate()])


@pytest.mark.parametrize("address", ["", "host", ":1", "host:0", "host:65536", "host:٣", "host:1:x"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(CompressionError, match="set it to HOST:PORT"):
        connect(address)
