"""Attach to a live engine: check releases, agree on settings, change the class of the engine."""

import functools
import importlib
import logging
import weakref
from collections import ChainMap
from typing import Any

from deepspeed import comm as dist
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from ds_compress.config import KEY, Config
from ds_compress.engine import cleanup
from ds_compress.engine.deepspeed import (
    PipelineEngine,
    check_release,
    instruction_map,
    is_dualpipev,
    is_pipeline,
    p2p,
    steps_per_epoch,
)
from ds_compress.engine.deepspeed import prepare as prepare
from ds_compress.engine.handshake import agree, numerics_to_match
from ds_compress.engine.intercept import PointToPoint
from ds_compress.engine.left_alone import LeftAlone
from ds_compress.engine.message_path import MessagePath
from ds_compress.engine.mixin import CompressedEngine
from ds_compress.engine.optimizer_mixins import check_optimizer
from ds_compress.engine.session import Session
from ds_compress.errors import CompressionError
from ds_compress.kernels.backends import kernels
from ds_compress.runtime.watchdog import Watchdog
from ds_compress.transport.collectives import own_keys
from ds_compress.transport.staging import receives_hold_device
from ds_compress.version import __version__

HANDSHAKE_SECONDS = 300.0
"""How long ranks wait for each other: on a busy machine a healthy one took more than a minute."""

SITES = "ds_compress.sites.traffic"
"""The module of what exchanges weights between launches. A config that asks for it has it imported, by name:
the engine works without."""

logger = logging.getLogger("ds_compress")


def _mixin(engine: PipelineEngine) -> tuple[type[CompressedEngine], type[MessagePath]]:
    """Return the mixin for `engine`, and the class of its message path."""
    if not is_dualpipev(engine):
        return CompressedEngine, MessagePath
    # older releases have no DualPipeV to import
    from ds_compress.engine.dualpipev import CompressedDualPipeV, DualPipeVPath

    return CompressedDualPipeV, DualPipeVPath


def attach(engine: Any, block: object) -> None:
    """Compress what `engine` sends, as `block` says; every rank calls it when the engine has been built.

    The import hook does this for each engine whose ds_config has the key "ds_compress". Call it for one whose
    ds_config has not; `DS_COMPRESS_HOOK=0` in the environment switches the hook off.

    Args:
        engine: what `deepspeed.initialize` returned. If it is not a pipeline, a warning is logged.
        block: the value of the key.

    Raises:
        CompressionError: the same line on every rank: a bad block, or ranks that differ. Or the engine is
            compressed already.
    """
    if hasattr(engine, "ds_compress"):
        raise CompressionError(f"{KEY}: this engine is compressed already; attach to it once, or use the key")
    if not is_pipeline(engine):
        config = Config(block)
        config.leave_uncompressed(
            f"{type(engine).__name__} is not a pipeline; ds_compress compresses what the stages and replicas "
            "of a deepspeed.pipe.PipelineModule send each other"
        )
        _log_notes(engine, config)
        return
    base = type(engine)
    mixin, make_path = _mixin(engine)
    agreed: dict[str, Any] | CompressionError
    compresses, sites = False, None
    try:
        config = Config(block)
        matched: dict[str, Any] = {}
        if config.block.enabled:
            boundaries = make_path.check(config, engine.num_stages)
            check_release(engine)
            config.count_epochs(steps_per_epoch(engine))
            codec = config.replica_codec
            has_replicas = codec is not None and engine.is_data_parallel
            compresses = engine.num_stages > 1 or has_replicas or config.outer is not None
            if codec is not None and has_replicas and config.block.replicas:
                check_optimizer(engine, config.block.replicas, codec)
            sites = importlib.import_module(SITES) if config.outer else None
            if sites is not None:
                sites.OuterTraffic.check(engine)
            backend = kernels(engine.device).name  # tests Triton's kernels before the first message
            matched = {"kernels": backend, **numerics_to_match(config, engine.device)}
        if compresses:
            config.prepare()
        else:
            config.leave_uncompressed("a pipeline of one stage sends no messages; use two or more")
        if config.block.enabled:
            _note_unused(engine, config)
        agreed = {"version": __version__, **config.settings, **matched}
    except CompressionError as error:
        agreed = error
    rank, world_size = dist.get_rank(), dist.get_world_size()
    keys = own_keys(_get_default_store(), rank, "engine")
    agree(keys, rank, world_size, agreed, HANDSHAKE_SECONDS)
    _log_notes(engine, config)
    if not compresses:
        return

    if not engine.first_output_send or engine.pipe_recv_buf is not None:  # it has run: announce shapes again
        engine.reset_activation_shape()
    original = instruction_map(base)
    members = {"_INSTRUCTION_MAP": ChainMap(dict(mixin._AROUND), original)}
    engine.__class__ = type(f"Compressed{base.__name__}", (mixin, base), members)
    cleanup.free_unused(engine.device)
    watchdog = Watchdog(keys, rank, world_size, config.block.link.timeout_s)
    notes = PrefixStore(f"notes/{engine.grid.get_data_parallel_id()}", keys)
    connect = functools.partial(make_path, engine, config, PointToPoint.over(p2p), original, LeftAlone(keys))
    outer = sites.OuterTraffic(engine, config) if sites is not None else None
    session = engine.ds_compress = Session(engine, config, boundaries, connect, watchdog, notes, outer)
    cleanup.free_with(engine, session.stage.groups, watchdog.close)
    weakref.finalize(engine, session.monitor.close)  # when the engine goes, at the latest when Python ends


def _note_unused(engine: PipelineEngine, config: Config) -> None:
    """Note what of `config` has no effect on this `engine`."""
    connections = config.block.link.connections
    if connections != 1 and receives_hold_device(engine.device):
        config.notes[
            f"{KEY}.link.connections: {connections} has no effect over NCCL, which opens connections of "
            "its own (NCCL_SOCKET_NTHREADS, NCCL_NSOCKS_PERTHREAD)"
        ] = None
    if config.replica_codec is not None and not engine.is_data_parallel:
        config.notes[f"{KEY}.replicas has no effect: there is one replica"] = None


def _log_notes(engine: PipelineEngine, config: Config) -> None:
    for note in config.notes if engine.global_rank == 0 else ():
        logger.warning(note)
