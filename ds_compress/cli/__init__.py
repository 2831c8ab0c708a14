"""The command `ds-compress`, also `python -m ds_compress`: one module per subcommand."""

import argparse
import sys

from ds_compress.cli import advise, bench, check, listing, report
from ds_compress.errors import CompressionError

COMMANDS = (listing, check, bench, advise, report)


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the exit code, 2 for input that is refused."""
    parser = argparse.ArgumentParser(
        prog="ds-compress", description="Compressed pipeline messages for DeepSpeed."
    )
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except CompressionError as error:
        print(error, file=sys.stderr)
        return 2
