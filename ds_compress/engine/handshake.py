"""Compare release and settings of all ranks at start-up: they are equal, or every rank stops with the reason.

The ranks exchange strings through the store of torch.distributed (TCP or a file). So no device and no pickle
is needed, and a rank that never answers is a time-out, not a hang. Rank 0 reads one value of each rank, all
at once: what it waits for, and how long, is the same for any number of ranks.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store

from ds_compress.codecs.lowrank import LowRank
from ds_compress.codecs.mixins import layers
from ds_compress.codecs.sparse import RandomK
from ds_compress.config import Config
from ds_compress.errors import CompressionError, differences, shown_numbers


def agree(
    keys: Store, rank: int, world_size: int, settings: dict[str, Any] | CompressionError, timeout: float
) -> None:
    """Compare `settings` over all ranks; returns when they are equal.

    Args:
        keys: in common, without entries.
        settings: JSON-like settings of this rank, or the error that this rank's block gave.
        timeout: seconds to wait for the others.

    Raises:
        CompressionError: on every rank the same line, naming both values or the ranks that did not answer.
    """
    refused = isinstance(settings, CompressionError)
    keys.set(str(rank), json.dumps({"error": str(settings)} if refused else {"settings": settings}))
    if rank == 0:
        verdict = _verdict(keys, world_size, timeout)
        keys.set("verdict", json.dumps(verdict))
        # rank 0 often hosts the store: it must not go away before the others have read why
        if verdict and world_size > 1:
            _wait(keys, [f"{other}/read" for other in range(1, world_size)], 1)
    else:
        # a little longer than rank 0 waits, so that its verdict arrives rather than a time-out of our own
        if not _wait(keys, ["verdict"], timeout + 5):
            raise CompressionError(f"ds_compress: rank 0 did not answer within {timeout:g} s{_ABSENT}")
        verdict = json.loads(keys.get("verdict"))
        keys.set(f"{rank}/read", "")
    if verdict:
        raise CompressionError(verdict)


_ABSENT = ': is ds_compress installed there, and is the "ds_compress" key in its ds_config.json?'


def _verdict(keys: Store, world_size: int, timeout: float) -> str:
    """Return what is wrong, or an empty string."""
    ranks = [str(rank) for rank in range(world_size)]
    # one wait for all: those who wait for the verdict wait hardly longer than this
    here = ranks if _wait(keys, ranks, timeout) else [rank for rank in ranks if keys.check([rank])]
    absent = [int(rank) for rank in ranks if rank not in here]
    answers = {int(rank): json.loads(answer) for rank, answer in zip(here, keys.multi_get(here))}
    for rank, answer in answers.items():
        if "error" in answer:
            return f"{answer['error']} [rank {rank}]"
    if absent:
        return f"ds_compress: rank {shown_numbers(absent)} did not answer within {timeout:g} s{_ABSENT}"
    for rank, answer in answers.items():
        for path, ours, theirs in differences(answers[0]["settings"], answer["settings"], "ds_compress"):
            return f"{path}: rank 0 has {ours!r}, rank {rank} has {theirs!r}; use the same on all nodes"
    return ""


def _wait(store: Store, names: Sequence[str], seconds: float) -> bool:
    """Return whether all keys with these `names` are there within so many seconds."""
    try:
        store.wait([*names], timedelta(seconds=seconds))
    except RuntimeError:  # DistStoreError and DistNetworkError derive from it
        return False
    return True


def numerics_to_match(config: Config, device: torch.device) -> dict[str, Any]:
    """Return what all ranks must have alike to compute matrix products, or to draw, alike; empty if `config`
    needs none.

    Replicas with codec `lowrank` make the factors that they average orthonormal, each by itself. Both sides
    of `randomk` draw on their own device, and to which value a number of a GPU goes depends on how many
    multiprocessors it has.
    """
    codec = config.replica_codec
    used = codec, config.tied_codec, *(sent for sent, _ in config.in_force.pairs())
    draws = any(each is not None and any(layers(each, RandomK)) for each in used)
    if codec is not None and any(layers(codec, LowRank)):
        why = "replicas with codec 'lowrank' have to compute alike; with another codec they need not"
    elif draws and device.type != "cpu":
        why = "both sides of codec 'randomk' have to draw alike; with another codec they need not"
    else:
        return {}
    found: dict[str, Any] = {"torch": torch.__version__}
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        found |= {"device": f"cpu {capability}", "threads": torch.get_num_threads()}
    else:
        name = torch.get_device_module(device).get_device_name(device)
        found["device"] = f"{device.type} {name}"
    return {f"numerics.{name} ({why})": value for name, value in found.items()}
