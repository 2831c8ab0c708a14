"""ds-compress doctor: check this machine, or all machines of a launched job, before a run."""

import argparse
import dataclasses
import json
import os
from pathlib import Path

from ds_compress.cli.arguments import integer, number
from ds_compress.cli.check import read_block
from ds_compress.cli.console import show
from ds_compress.cli.doctor.cluster import Meeting, Report
from ds_compress.cli.doctor.findings import Finding, findings, named
from ds_compress.cli.doctor.machine import facts
from ds_compress.cli.doctor.store import examine_store, store_findings
from ds_compress.config import Config
from ds_compress.errors import CompressionError

MARKS = {"good": "good", "look": "LOOK", "bad": "BAD "}


HELP = "check this machine, all machines of a job, or a replica store before a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--timeout",
        type=number(1, 1e6),
        default=120.0,
        metavar="SECONDS",
        help="seconds to wait for another machine (default: 120)",
    )
    parser.add_argument(
        "--replicas",
        type=integer(1, 2**16),
        default=1,
        help="number of data-parallel replicas: also measure the links between them, for both orders that "
        "ranks may have (default: 1)",
    )
    parser.add_argument(
        "--replica-store",
        metavar="HOST:PORT",
        help="also check the link to a `ds-compress replica-store`, and list the sites there",
    )
    parser.add_argument(
        "--ds-config",
        type=Path,
        metavar="FILE",
        help="with --replica-store: compare the settings of the sites there with this ds_config.json",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if any of them is bad, else 0."""
    report: Report | None
    config = Config(read_block(args.ds_config)) if args.ds_config else None
    if config is not None and (config.outer is None or not args.replica_store):
        raise CompressionError(
            f'--ds-config: {args.ds_config} needs "replicas" with "every" above 1, and --replica-store'
        )
    if "RANK" in os.environ:
        report = Meeting(args.timeout, args.replicas).report()
    else:
        report = {"hosts": [facts()], "links": []}
    if report is None:
        return 0
    if args.replica_store:
        report["replica_store"] = examine_store(args.replica_store, args.timeout, config)
    found = findings(report)
    if args.replica_store:
        found += store_findings(report["replica_store"])
    if args.json:
        print(json.dumps({**report, "findings": [dataclasses.asdict(each) for each in found]}), flush=True)
    else:
        print_report(report, found)
    return int(any(each.level == "bad" for each in found))


def print_report(report: Report, found: list[Finding]) -> None:
    """Print the report as text."""
    hosts = report["hosts"]
    rows = [
        {
            "machine": name,
            "device": host["device"],
            "kernels": host["kernels"] or "none",
            "interfaces": ", ".join(
                f"{each['name']} {' '.join(each['addresses'][:1])}".strip() for each in host["interfaces"]
            ),
        }
        for host, name in zip(hosts, named(hosts))
    ]
    show(f"{len(hosts)} machine{'s' * (len(hosts) > 1)}", rows)
    for each in found:
        print(f"{MARKS[each.level]}  {each.said}{f' -> {each.do}' if each.do else ''}")
