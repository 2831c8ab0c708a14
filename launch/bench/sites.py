"""Train one model at several sites, each with a pipeline of two stages, over slow links to a common store.

    python launch/bench/sites.py --sites 3 [--alone] [--asleep] [--kill-every SECONDS] [--steps 120]
    python launch/bench/sites.py --table

Every site is a network namespace with a link of its own to the namespace of `ds-compress replica-store`. All
share the cores of this machine. Needs root. A row a run is appended to results/sites.jsonl:

    talk             whether sites exchange their progress; false (--alone): no "ds_compress" key
    asleep           whether passes sleep most of the time (sleeping_passes.py), so that sites do not
                     compete for cores
    kill_every       seconds after which all processes of the last site are killed (kill -9), and it is
                     started again
    tokens_per_s     of all sites that are not killed, without the first `SKIPPED` steps
    seconds          of the slowest of them; longest_step_s: of all
    rounds, members  rounds of the first site, and replicas that counted in them, summed up
    round_s, mb      median duration of a round, and what a site sends in one
    loss             held-out, of the first site after its last step

--table compares rows of equal sites: tokens per second with those of sites that are alone; goodput and loss
with those of a run in which nothing is killed (the loss if it has as many steps). Goodput is the number of
steps that reached the common weights, over those that would have in the same time:
members / (sites x rounds) x seconds of a step undisturbed / seconds of a step.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from ds_compress.config.replicas import STORE
from launch.bench.net_runs import LAUNCH, read
from launch.reproduce.run import processor

STAGES, EVERY, SKIPPED = 2, 30, 10
MBIT, RTT_MS = 200, 80
PORT = 29400
SEQ, MICRO_BATCH, MICRO_BATCHES = 128, 4, 4
OUTER = {"delay": 15, "grace_s": 5}
REPLICAS = {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef", "every": EVERY, "outer": OUTER}


class Site:
    """A place where a replica trains."""

    def __init__(self, namespace: str, number: int, folder: Path, words: Sequence[str], store: str | None):
        self.namespace, self.folder = namespace, folder
        folder.mkdir(parents=True)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "steps_per_print": 1000000,
            "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "csv"},
        }
        if store:
            config["ds_compress"] = {"replicas": REPLICAS, "monitor": {"every": OUTER["delay"]}}
        (folder / "ds_config.json").write_text(json.dumps(config, indent=2))
        launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(STAGES)]
        self._command = [*_inside(namespace), *launcher, *words, "--replica", str(number)]
        self._command += ["--deepspeed_config", str(folder / "ds_config.json")]
        self._environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PASS_MS": "15",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(LAUNCH.parent), os.environ.get("PYTHONPATH")])),
            **({STORE: store} if store else {}),
        }
        self.start()

    def start(self) -> None:
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )

    def kill(self) -> None:
        """Kill all processes of this site at once."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        if found.stdout.split():
            subprocess.run(["kill", "-9", *found.stdout.split()], check=False)
        self.process.wait()

    def has_begun(self) -> bool:
        return (self.folder / "csv" / "Train_Samples_step_ms.csv").exists()

    def series(self, name: str) -> list[float]:
        return read(self.folder / "csv" / f"Train_{name}.csv")


def _inside(namespace: str) -> list[str]:
    return ["ip", "netns", "exec", namespace]


@contextmanager
def start_sites(count: int, words: Sequence[str], folder: Path, talk: bool) -> Iterator[list[Site]]:
    """Start training at `count` sites; all is gone when the context ends."""
    shutil.rmtree(folder, ignore_errors=True)
    hub, names = f"ds-hub-{os.getpid()}", [f"ds-site-{os.getpid()}-{number}" for number in range(count)]
    with ExitStack() as stack:
        for name in (hub, *names):
            _run("ip", "netns", "add", name)
            stack.callback(_remove, name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        for number, name in enumerate(names):
            wire = f"wire{number}"
            # the relay stays in the last namespace, where `Site.kill` does not find it
            relay = [sys.executable, str(LAUNCH / "bench" / "delayed_link.py"), name, hub, wire, str(RTT_MS)]
            stack.callback(_end, subprocess.Popen(relay))
            while subprocess.run(["ip", "-n", hub, "link", "show", wire], capture_output=True).returncode:
                time.sleep(0.1)
            for place, last in ((hub, 1), (name, 2)):
                _run("ip", "-n", place, "address", "add", f"10.78.{number}.{last}/30", "dev", wire)
                _run("ip", "-n", place, "link", "set", wire, "up")
                shape = f"tc qdisc add dev {wire} root tbf rate {MBIT}mbit burst 100000 latency 100ms"
                _run(*_inside(place), *shape.split())
        command = [sys.executable, "-m", "ds_compress", "replica-store", "--port", str(PORT)]
        store = subprocess.Popen([*_inside(hub), *command], stdout=subprocess.PIPE, text=True)
        stack.callback(_end, store)
        assert store.stdout is not None and "replica store" in store.stdout.readline()
        addresses = [f"10.78.{number}.1:{PORT}" if talk else None for number in range(count)]
        yield [
            Site(name, number, folder / str(number), words, address)
            for number, (name, address) in enumerate(zip(names, addresses))
        ]


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


def _remove(namespace: str) -> None:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    subprocess.run(["kill", "-9", *found.stdout.split()], stderr=subprocess.DEVNULL)
    subprocess.run(["ip", "netns", "del", namespace])


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train until all sites, without the one that is killed, have taken their steps; return a row."""
    size = ("--layers", "2", "--hidden", "64") if args.asleep else ("--layers", "4", "--hidden", "256")
    script = [str(LAUNCH / "bench" / "sleeping_passes.py")] * args.asleep + [str(LAUNCH / "train_lm.py")]
    words = [*script, "--stages", str(STAGES), *size, "--seq", str(SEQ)]
    words += ["--steps", str(args.steps), "--eval-every", str(args.steps)]
    kills = 0
    with start_sites(args.sites, words, args.out, not args.alone) as sites:
        whole = sites[:-1] if args.kill_every else sites
        while not all(site.has_begun() for site in sites):
            if any(site.process.poll() for site in sites):
                sys.exit(f"sites: a site failed; all output: {args.out}/*/log")
            time.sleep(0.1)
        next_kill = time.monotonic() + (args.kill_every or math.inf)
        while any(site.process.poll() is None for site in whole):
            time.sleep(0.1)
            if time.monotonic() > next_kill:
                sites[-1].kill()
                sites[-1].start()
                kills, next_kill = kills + 1, next_kill + args.kill_every
        if any(site.process.returncode for site in whole):
            sys.exit(f"sites: a site failed; all output: {args.out}/*/log")
    joined = (sites[-1].folder / "log").read_text().count("ds_compress: replica ")
    if not args.alone and joined < kills:  # after the last kill there may be too little time
        sys.exit(f"sites: a site was killed {kills} times, and joined {joined} times: {args.out}/*/log")
    steps = [[ms / 1e3 for ms in site.series("Samples_step_ms")[SKIPPED:]] for site in whole]
    found = re.findall(r"held-out loss ([\d.]+)", (whole[0].folder / "log").read_text())
    tokens = SEQ * MICRO_BATCH * MICRO_BATCHES
    return {
        "sites": args.sites,
        "talk": not args.alone,
        "asleep": args.asleep,
        "kill_every": args.kill_every,
        "kills": kills,
        "steps": args.steps,
        "mbit": MBIT,
        "rtt_ms": RTT_MS,
        "replicas": None if args.alone else REPLICAS,
        "tokens_per_s": sum(tokens * len(own) / sum(own) for own in steps),
        "seconds": max(map(sum, steps)),
        "longest_step_s": max(map(max, steps)),
        "loss": float(found[-1]),
        **({} if args.alone else rounds_of(whole[0])),
        "processor": processor(),
    }


def rounds_of(site: Site) -> dict[str, float]:
    """Return what rounds were like, from the monitor's values."""
    of_stages = [f"Compression_replicas_stage_{stage}" for stage in range(STAGES)]
    counts, members, seconds = (
        site.series(f"{of_stages[0]}_{name}") for name in ("rounds", "members", "round_s")
    )
    new = [at for at in range(len(counts)) if counts[at] > (counts[at - 1] if at else 0)]
    sent = sum(site.series(f"{stage}_wire_bytes")[-1] for stage in of_stages)
    return {
        "rounds": len(new),
        "members": sum(members[at] for at in new),
        "round_s": statistics.median(seconds[at] for at in new),
        "mb": sent / counts[-1] / 1e6,
    }


def table(rows: list[dict[str, Any]]) -> None:
    """Print every row with its comparisons."""
    print(
        "| sites | | tokens/s | / alone | round, s | MB | longest step, s | goodput | loss |\n"
        + "|---" * 9
        + "|"
    )
    for row in rows:
        alike = [own for own in rows if all(own[key] == row[key] for key in ("sites", "asleep"))]
        alone = next((own["tokens_per_s"] for own in alike if not own["talk"]), math.nan)
        undisturbed = [own for own in alike if own["talk"] and not own["kills"]]
        undisturbed.sort(key=lambda own: abs(own["steps"] - row["steps"]))
        kind = "" if row["talk"] else "alone"
        if row["kills"]:
            kind = f"killed {row['kills']} times, every {row['kill_every']:g} s"
        cells = [f"{row['sites']}", kind, f"{row['tokens_per_s']:,.0f}", f"{row['tokens_per_s'] / alone:.3f}"]
        cells += [f"{row[key]:.2f}" if key in row else "" for key in ("round_s", "mb")]
        cells.append(f"{row['longest_step_s']:.2f}")
        if row["kills"] and undisturbed:
            whole, kept = undisturbed[0], row["members"] / row["sites"] / row["rounds"]
            cells.append(f"{kept * _step_seconds(whole) / _step_seconds(row):.1%}")
            change = f" ({row['loss'] / whole['loss'] - 1:+.2%})" if whole["steps"] == row["steps"] else ""
            cells.append(f"{row['loss']:.4f}{change}")
        else:
            cells += ["", f"{row['loss']:.4f}"]
        print(f"| {' | '.join(cells)} |")


def _step_seconds(row: dict[str, Any]) -> float:
    return row["seconds"] / (row["steps"] - SKIPPED)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--asleep", action="store_true")
    parser.add_argument("--kill-every", type=float, metavar="SECONDS")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=LAUNCH.parent / "runs" / "sites")
    parser.add_argument("--results", type=Path, default=LAUNCH.parent / "results" / "sites.jsonl")
    parser.add_argument("--table", action="store_true", help="print the rows instead of training")
    args = parser.parse_args()
    if not args.table:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are removed
        row = train(args)
        print(json.dumps(row))
        with args.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
    table([json.loads(line) for line in args.results.read_text().splitlines()])


if __name__ == "__main__":
    main()
