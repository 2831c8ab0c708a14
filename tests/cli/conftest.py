"""What tests of `ds-compress advise` on a model share."""

import pytest

from ds_compress.cli import main

LINK = ("--micro-batches", "4", "--gbps", "0.0001")


@pytest.fixture
def advise(capsys):
    """Runs it over a link slower than every processor; gives stdout, or stderr where it is to be
    refused, which `advise.err` has in any case."""

    def run(*arguments, code=0):
        try:
            ended = main(["advise", *LINK, *map(str, arguments)])
        except SystemExit as stopped:  # argparse
            ended = stopped.code
        printed = capsys.readouterr()
        run.err = printed.err
        assert ended == code, printed.err
        return printed.err if code else printed.out

    return run
