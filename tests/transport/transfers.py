"""Watch which transfers start over which connection."""

from ds_compress.transport import parts


def count_transfers():
    """Return a list that will have (isend or irecv, connection) of each transfer of this process."""
    started, over = [], parts.over

    def noted(group, transfer):
        started.append((transfer, group))
        return over(group, transfer)

    parts.over = noted
    return started
