"""The command `ds-compress`, also `python -m ds_compress`: one module per subcommand."""

import argparse
import contextlib
import io
import os
import sys

from ds_compress.cli import advise, bench, check, doctor, listing, merge, reference, replica_store, report
from ds_compress.cli.arguments import Parser
from ds_compress.errors import CompressionError
from ds_compress.registry import plugins
from ds_compress.version import __version__

COMMANDS = {
    "list": listing,
    "check": check,
    "bench": bench,
    "advise": advise,
    "report": report,
    "merge": merge,
    "schema": reference,
    "doctor": doctor,
    "replica-store": replica_store,
}


def parser() -> Parser:
    """Build the parser of all commands."""
    built = Parser(prog="ds-compress", description="Compressed pipeline messages for DeepSpeed.")
    built.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    built.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    subparsers = built.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        text = command.HELP
        own = subparsers.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    return built


def _accept_all_text() -> None:
    """Let standard output take any text, names of files above all, whatever its encoding.

    Where the shell has closed it, nothing is printed.
    """
    if sys.stdout is None:
        sys.stdout = io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        with contextlib.suppress(OSError):  # of a pipe that has taken the place of a file
            sys.stdout.reconfigure(errors="backslashreplace")


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; return the exit code, 2 for input that is refused, in one line."""
    args = parser().parse_args(argv)
    _accept_all_text()
    try:
        if "imports" in args:
            plugins.load_installed()
            for place in args.imports:
                plugins.load(place)
        return args.run(args)
    except CompressionError as error:
        print(error, file=sys.stderr)
    except BrokenPipeError:  # by "| head"; what is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a file or folder to read from or write to
        print(f"ds-compress {args.command}: {error}", file=sys.stderr)
    except KeyboardInterrupt:  # without a traceback; Python ends by the signal, so a loop of a shell ends too
        sys.excepthook = lambda *_: None
        raise
    return 2
