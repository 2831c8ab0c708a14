"""Attach to a live `PipelineEngine`: check releases, agree on settings, change the class of the engine."""

import inspect
import itertools
import logging
import weakref
from collections import ChainMap
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from packaging.version import Version
from torch.distributed.distributed_c10d import _get_default_store

from ds_compress.config import KEY, Config
from ds_compress.engine import cleanup
from ds_compress.engine.handshake import Notes, SharedWarning, agree, numerics_to_match
from ds_compress.engine.intercept import PointToPoint
from ds_compress.engine.mixin import CompressedEngine
from ds_compress.engine.optimizers import check_optimizer
from ds_compress.engine.outer import check_outer
from ds_compress.engine.session import Session, steps_per_epoch
from ds_compress.errors import CompressionError
from ds_compress.kernels.backends import kernels
from ds_compress.runtime.watchdog import Watchdog
from ds_compress.transport import staging
from ds_compress.version import __version__

MINIMUM_DEEPSPEED = "0.19.3"
HANDSHAKE_SECONDS = 60.0

_engines = itertools.count()

logger = logging.getLogger("ds_compress")


def _mixin(base: type) -> tuple[type[CompressedEngine], type[Session]]:
    """Return the mixin, and the class of the session, for engines of class `base`."""
    if not hasattr(base, "_queue_p2p"):
        return CompressedEngine, Session
    # older releases have no DualPipeV to import
    from ds_compress.engine.dualpipev import CompressedDualPipeV, DualPipeVSession

    return CompressedDualPipeV, DualPipeVSession


def check_release(base: Any, module: Any) -> None:
    """Refuse a DeepSpeed whose pipeline engine is not built the way the mixin relies on.

    Args:
        base: class of the engine.
        module: `deepspeed.runtime.pipe.engine`.

    Raises:
        CompressionError: too old, or a seam is missing; names it.
    """
    release = f"ds_compress: DeepSpeed {deepspeed.__version__}"
    if Version(deepspeed.__version__).release < Version(MINIMUM_DEEPSPEED).release:
        raise CompressionError(
            f'{release} has another pipeline engine; pip install "deepspeed>={MINIMUM_DEEPSPEED}"'
        )
    for instruction in CompressedEngine._AROUND:
        body = base._INSTRUCTION_MAP.get(instruction)
        if body is None or "buffer_id" not in inspect.signature(body).parameters:
            raise CompressionError(
                f"{release}: unknown way to run {instruction.__name__}; it is not supported"
            )
    for name in ("_exec_schedule", "_send_tensor_meta", "_recv_tensor_meta", "_allocate_or_extend_buffers"):
        if not callable(getattr(base, name, None)):
            raise CompressionError(f"{release}: its pipeline engine has no {name}; it is not supported")
    if not all(callable(getattr(module.p2p, name, None)) for name in ("send", "recv")):
        raise CompressionError(f"{release}: its p2p has no send and recv; it is not supported")


def read_ds_config(path: Path) -> Any:
    """Return what a ds_config.json holds, read as `deepspeed.initialize` does: comments are allowed, and keys
    that come twice are refused.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: DeepSpeed does not read it.
    """
    path.stat()  # DeepSpeed takes what is not a file for base64
    try:
        return load_ds_config(str(path))
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deep") from error


def prepare() -> None:
    """Let DeepSpeed's own messages, of shapes and the like, reach a neighbour's GPU.

    Over a backend that cannot send a device's memory DeepSpeed would fail at the first of them. What it has
    for a torch without send and recv, broadcasts in groups of two, works there.
    """
    if staging.is_needed(torch.device(get_accelerator().device_name())):
        p2p.can_send_recv = lambda: False


def attach(engine: Any, module: Any, block: object) -> None:
    """Put the mixin over `engine` as `block` says; called on every rank when the engine has been built.

    Raises:
        CompressionError: the same line on every rank: a bad block, or ranks that differ.
    """
    base = type(engine)
    mixin, make_session = _mixin(base)
    agreed: dict[str, Any] | CompressionError
    try:
        config = Config(block)
        make_session.check(config, engine.num_stages)
        check_release(base, module)
        config.count_epochs(steps_per_epoch(engine))
        codec = config.replica_codec
        has_replicas = codec is not None and engine.is_data_parallel
        exchanges = has_replicas or config.outer is not None
        compresses = config.block.enabled and (engine.num_stages > 1 or exchanges)
        if codec is not None and has_replicas and config.block.replicas:
            check_optimizer(engine, config.block.replicas, codec)
        if compresses and config.outer:
            check_outer(engine)
        if compresses:
            config.prepare()
        else:
            config.leave_uncompressed("a pipeline of one stage sends no messages; use two or more")
        if codec is not None and not engine.is_data_parallel:
            config.notes[f"{KEY}.replicas has no effect: there is one replica"] = None
        backend = kernels(engine.device).name  # tests Triton's kernels before the first message
        agreed = {
            "version": __version__,
            **config.settings,
            "kernels": backend,
            **numerics_to_match(config, engine.device),
        }
    except CompressionError as error:
        agreed = error
    agree(_get_default_store(), dist.get_rank(), dist.get_world_size(), agreed, HANDSHAKE_SECONDS)
    for note in config.notes if engine.global_rank == 0 else ():
        logger.warning(note)
    if not compresses:
        return

    original = base._INSTRUCTION_MAP
    members = {"_INSTRUCTION_MAP": ChainMap(dict(mixin._AROUND), original)}
    engine.__class__ = type(f"Compressed{base.__name__}", (mixin, base), members)
    cleanup.free_unused(engine.device)
    store = _get_default_store()
    watchdog = Watchdog(store, dist.get_rank(), dist.get_world_size(), config.block.link.timeout_s)
    number = next(_engines)
    notes = Notes(store, f"ds_compress/notes/{number}/{engine.grid.get_data_parallel_id()}")
    warning = SharedWarning(store, f"ds_compress/left/{number}")
    parts = PointToPoint.over(p2p), original, watchdog, notes, warning
    session = engine.ds_compress = make_session(engine, config, *parts)
    cleanup.free_with(engine, session.stage.groups, watchdog.close)
    weakref.finalize(engine, session.monitor.close)  # when the engine goes, at the latest when Python ends
