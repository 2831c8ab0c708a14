"""A port on which ranks started here meet."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this machine that no other process is given until the end of the context.

    Once it was only asked for, and under load another process had it before rank 0 listened there. It is
    bound here without listening: where both sides allow an address to be used twice, as torch's store does,
    Linux lets one more process ask for this port by its number, and never gives it to one that asks for any.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
