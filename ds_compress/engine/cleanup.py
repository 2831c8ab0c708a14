"""Free the process groups and the watchdog of an engine that Python has collected.

Each rank collects an engine at a time of its own. A group of gloo is freed at once. All ranks of a group of
NCCL must free it together: they do so when they build their next engine, and agree that the old one is gone.
"""

import contextlib
import gc
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist

from ds_compress.transport.collectives import lowest

FREED_ALONE = ("gloo",)
"""Backends whose groups need no other rank to be freed."""

_numbers = itertools.count()  # of engines, alike on all ranks
_living: set[int] = set()
_left: dict[int, Sequence[Any]] = {}  # groups of engines that have gone here
_shared: list[int] = []  # engines whose groups are freed together, alike on all ranks


def free_with(engine: Any, groups: Sequence[Any], close: Callable[[], None]) -> None:
    """Free process `groups` and call `close` when `engine` goes; for every engine on every rank alike."""
    number = next(_numbers)
    _living.add(number)
    if not _are_freed_alone():
        _shared.append(number)
    finalizer = weakref.finalize(engine, _gone, number, groups, close, os.getpid())
    finalizer.atexit = False  # the end of the process frees everything


def free_unused(device: torch.device) -> None:
    """Free the process groups of engines that no longer exist; all ranks call it."""
    if _living:
        gc.collect()  # DeepSpeed's engines are in cycles
    if not _shared:
        return
    gone = lowest(device, *(number in _left for number in _shared))
    for number in [number for number, everywhere in zip(_shared, gone) if everywhere]:
        _shared.remove(number)
        _free(_left.pop(number))


def _gone(number: int, groups: Sequence[Any], close: Callable[[], None], process: int) -> None:
    if os.getpid() != process:  # a fork has no part in its parent's groups
        return
    _living.discard(number)
    close()
    if number in _shared:
        _left[number] = groups
    else:
        _free(groups)


def _are_freed_alone() -> bool:
    # that of the default group, which ours have, too: a rank may have no group, and another one some
    backends = (pair.rpartition(":")[2] for pair in dist.get_backend_config().split(","))
    return all(backend in FREED_ALONE for backend in backends)


def _free(groups: Sequence[Any]) -> None:
    for group in groups:
        with contextlib.suppress(ValueError):  # it went with the default group
            dist.destroy_process_group(group)
