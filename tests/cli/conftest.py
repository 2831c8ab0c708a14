"""What tests of `ds-compress advise` on a model share."""

import pytest

from ds_compress.cli import main

LINK = ("--micro-batches", "4", "--gbps", "0.0001")


@pytest.fixture
def advise(capsys):
    """Return a function that runs advise over a slow link; it returns stdout, or stderr if `refused`."""

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
