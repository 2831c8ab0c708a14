"""ds-compress replica-store: where replicas that are launched apart meet, until it is stopped."""

import argparse
import os
import resource
import threading
from contextlib import suppress

from torch.distributed import TCPStore

from ds_compress.cli.arguments import integer
from ds_compress.config.replicas import STORE
from ds_compress.errors import failures_at

HELP = "serve the store through which sites exchange weights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port", type=integer(0, 65535), required=True, help="port that all sites can reach; 0: any free one"
    )


def run(args: argparse.Namespace) -> int:
    # strangers that connect and stay must not use up what replicas need
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # torch looks up the name of each address that connects, in the one thread that serves all: where no name
    # server answers, each stranger stopped the store for 5 s
    os.environ["RES_OPTIONS"] = "attempts:0"
    with failures_at(f"--port: {args.port}"):
        store = TCPStore("localhost", args.port, is_master=True, wait_for_workers=False)
    print(f"replica store on port {store.port}; start replicas with {STORE}=HOST:{store.port}", flush=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
    return 0
