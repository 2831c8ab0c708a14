"""Watch which transfers start over which connection."""

from ds_compress.transport import packet_parts
from tests.support.calls import wrapped


def count_transfers():
    """Return a list that will have (isend or irecv, connection) of each transfer of this process."""
    started = []
    packet_parts.over = wrapped(
        packet_parts.over, before=lambda group, transfer: started.append((transfer, group))
    )
    return started
