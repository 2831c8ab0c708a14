"""What has to hold for every kind."""

import itertools
from typing import Any

import torch

from tests.support.dist import run_ranks
from tests.support.kinds.kind import Kind
from tests.support.kinds.training import BLOCKS, train_all, train_simulated

LOSSY = ("topk", "quantize")


def problems(kind: Kind) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """What is not as it has to be, and what the first rank has to show."""
    ranks = run_ranks(kind.world_size, train_all, kind)
    found = []

    def expect(condition, what):
        if not condition:
            found.append(what)

    for number, runs in enumerate(ranks):
        reference = runs["stock" if kind.stock else "blocking"]
        partner = ranks[number - number % kind.same_packets]
        for name in BLOCKS:
            mine = runs[name]
            expect(
                mine["class"] == f"Compressed{reference['class'].removeprefix('Compressed')}", mine["class"]
            )
            expect(mine["own"] == reference["own"], f"{name}: {mine['own']} own instructions ran")
            expect(mine["packets"] == partner[name]["packets"], f"{name}: rank {number} sends other bytes")
        for name in ("blocking", "eager"):
            mine = runs[name]
            same = all(
                torch.equal(torch.as_tensor(mine["weights"][key]), torch.as_tensor(value))
                for key, value in reference["weights"].items()
            )
            expect(same, f"none, {name}: other weights on rank {number}")
            for key in ("losses", "evaluated"):
                expect(
                    mine[key] == reference[key],
                    f"none, {name}: {key} {mine[key]} instead of {reference[key]}",
                )
    first = ranks[0]
    for name in LOSSY:
        expect(first[name]["losses"] != first["blocking"]["losses"], f"{name}: nothing is compressed")
        expect(first[name]["wire"] < first[name]["raw"], f"{name}: more bytes than without")
    for name, block in BLOCKS.items():
        run = first[name]
        expect(
            run["evaluated"][-1] < run["evaluated"][0], f"{name}: the loss does not fall: {run['evaluated']}"
        )
        if kind.simulated is not None:
            ours, simulated = (
                run["losses"] + run["evaluated"],
                list(itertools.chain(*train_simulated(kind, block))),
            )
            same = all(abs(a - b) <= kind.simulated * abs(b) for a, b in zip(ours, simulated))
            expect(same, f"{name}: {ours}, but simulate gives {simulated}")
    return found, first
