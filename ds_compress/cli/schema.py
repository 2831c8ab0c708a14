"""ds-compress schema: JSON Schema of a ds_config.json with the block in it, for editors."""

import argparse
import json
from typing import Any

from ds_compress.cli.arguments import add_import
from ds_compress.cli.reference import schema


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "schema", help='JSON Schema of a ds_config.json that checks its "ds_compress" block'
    )
    add_import(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(json.dumps(schema(), indent=2))
    return 0
