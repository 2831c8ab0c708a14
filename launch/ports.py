"""Reserve a port for ranks that start on this machine."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free port of this machine until the context ends.

    Once it was only asked for, and under load another process had it before rank 0 listened there. It is
    bound here without listening: where both sides allow an address to be used twice, as torch's store does,
    Linux lets one more process ask for this port by its number, and never gives it to one that asks for any.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
