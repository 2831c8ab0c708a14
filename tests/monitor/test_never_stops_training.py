"""Monitoring never stops training: settings change, sinks and meters fail, losses stay the baseline's."""

import contextlib
import errno
import io
from unittest import mock

import pytest
import torch
from deepspeed.monitor.monitor import MonitorMaster

import ds_compress  # noqa: F401  (hooks the engine)
from ds_compress.message import meters
from ds_compress.message.clock import HostClock
from ds_compress.monitor import monitor
from ds_compress.monitor.metrics import CHANNEL, PREFIX, label
from tests.support.launch_scripts import read_run
from tests.support.pipeline import (
    MICRO_BATCH,
    MICRO_BATCHES,
    batches,
    build,
    ds_config,
    same_weights,
    weights,
)
from tests.support.pipeline_kinds import KINDS
from tests.support.programs import warnings_of_ours
from tests.support.ranks import run_ranks

STEPS = 6
SIZES = (6, 6, 9, 9, 4, 5)
"""Micro-batches of each step; more than before, then fewer."""

BLOCK = {"monitor": {"every": 1}}


def sinks(folder):
    at = {"enabled": True, "output_path": str(folder)}
    names = {"csv_monitor": "csv", "tensorboard": "tensorboard"}
    return {sink: {**at, "job_name": name} for sink, name in names.items()}


def keep(engine, step):
    """Changes nothing."""


def resize(engine, step):
    replicas = engine.grid.get_data_parallel_world_size()
    engine.set_train_batch_size(MICRO_BATCH * SIZES[step] * replicas)


def train(config, before_step=keep, **options):
    """Losses, weights and warnings of one engine; `before_step` is called with engine and step."""
    with warnings_of_ours() as warnings:
        engine = build(2, config, **options)
        data, losses = batches(engine.grid.get_data_parallel_id()), []
        for step in range(STEPS):
            before_step(engine, step)
            losses.append(engine.train_batch(data).item())
    return {"losses": losses, "weights": weights(engine), "warnings": warnings}


def same(mine, stock):
    return mine["losses"] == stock["losses"] and same_weights(mine["weights"], stock["weights"])


def train_with_other_sizes(kind, folder):
    """By name of the run: stock, and `none` over both links, written every step and every second one."""
    with contextlib.redirect_stdout(io.StringIO()):
        runs = {"stock": train(ds_config(), resize, **kind.module)}
        for mode in ("blocking", "eager"):
            for every in (1, 2):
                block = {**BLOCK, "link": {"mode": mode}, "monitor": {"every": every}}
                config = ds_config(block, **sinks(folder / f"{mode}{every}"))
                runs[f"{mode}{every}"] = train(config, resize, **kind.module)
        return runs


@pytest.mark.parametrize("kind", [name for name in ("tensor", "dualpipev") if name in KINDS])
def test_the_batch_size_may_change(kind, tmp_path):
    """The number of micro-batches was kept from the start: the first logged step after a change failed."""
    for runs in run_ranks(2, train_with_other_sizes, KINDS[kind], tmp_path):
        for name, run in runs.items():
            assert same(run, runs["stock"]), name
            assert not run["warnings"]
    for mode in ("blocking", "eager"):
        for every in (1, 2):
            series = read_run(tmp_path / f"{mode}{every}" / "csv").series
            for name in CHANNEL:
                assert len(series[label(name, 0, "forward")]) == STEPS // every
            # `none` changes nothing, whichever message of the step is compared
            assert [value for _, value in series[label("cosine", 0, "forward")]] == [1.0] * (STEPS // every)


def watch_sometimes(everywhere):
    def change(engine, step):
        if everywhere or engine.global_rank == 1:
            engine.monitor.enabled = step not in (2, 3)

    return change


def train_watched_sometimes(folder):
    """Stock, and with sinks that DeepSpeed's monitor drops and takes up again: on all ranks, on one."""
    with contextlib.redirect_stdout(io.StringIO()):
        return {
            name: train(ds_config(block, **sinks(folder / name)), watch_sometimes(name != "one"))
            for name, block in {"stock": None, "all": BLOCK, "one": BLOCK}.items()
        }


def test_sinks_may_come_and_go(tmp_path):
    """Once they were kept from the start. What one stage has not measured is not written."""
    ranks = run_ranks(2, train_watched_sometimes, tmp_path)
    for name in ("all", "one"):
        assert all(same(runs[name], runs["stock"]) and not runs[name]["warnings"] for runs in ranks)
        series = read_run(tmp_path / name / "csv").series
        steps = [x // (MICRO_BATCH * MICRO_BATCHES) for x, _ in series[label("cosine", 0, "forward")]]
        assert steps == [1, 2, 5, 6], name


def on_rank(broken, target, name):
    """Lets `target.name` fail on rank `broken` from the second step on."""
    original, calls = getattr(target, name), 0

    def fail(*args, **kwargs):
        nonlocal calls
        calls += 1
        if torch.distributed.get_rank() == broken and calls > 2:
            raise RuntimeError("the meter is\nbroken")
        return original(*args, **kwargs)

    return mock.patch.object(target, name, fail)


def full_disk():
    original, steps = MonitorMaster.write_events, 0

    def write(self, events):
        nonlocal steps
        if events[0][0].startswith(PREFIX):
            steps += 1
            if steps > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
        original(self, events)

    return mock.patch.object(MonitorMaster, "write_events", write)


def closed_output():
    def closed(*args, **kwargs):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    return mock.patch.object(monitor, "print", closed, create=True)


BREAKS = {
    "nothing": contextlib.nullcontext,
    "sink": full_disk,
    "output": closed_output,
    "run": lambda: mock.patch.object(monitor, "record_settings", mock.Mock(side_effect=OSError("W&B"))),
    "layout": lambda: mock.patch.object(
        monitor, "add_tensorboard_layout", mock.Mock(side_effect=OSError("disk"))
    ),
    "sender's values": lambda: on_rank(1, meters.SendingMeter, "values"),
    "receiver's values": lambda: on_rank(0, meters.ReceivingMeter, "values"),
    "stamps": lambda: on_rank(1, meters.ReceivingMeter, "stamps"),
    "comparison": lambda: on_rank(1, meters, "norms"),
    "largest": lambda: on_rank(0, meters, "largest"),
    "clock": lambda: on_rank(1, HostClock, "mark"),
    "norm of a residual": lambda: on_rank(0, monitor, "residual_values"),
    "estimate": lambda: on_rank(0, monitor, "uncompressed_step_ms"),
    "making a meter": lambda: on_rank(1, monitor, "SendingMeter"),
}


def train_with_breaks(folder, mode):
    """By name of what breaks: what one rank has to show."""
    with contextlib.redirect_stdout(io.StringIO()):
        runs = {"stock": train(ds_config())}
        for name, broken in BREAKS.items():
            block = {**BLOCK, "link": {"mode": mode}}
            with broken():
                runs[name] = train(ds_config(block, **sinks(folder / name)))
    return runs


@pytest.mark.parametrize("mode", ["blocking", "eager"])
@pytest.mark.extended(keep=1)
def test_what_breaks_is_said_once_and_switches_monitoring_off(mode, tmp_path):
    ranks = run_ranks(2, train_with_breaks, tmp_path, mode)
    for name in BREAKS:
        assert all(same(runs[name], runs["stock"]) for runs in ranks), name
        warnings = [warning for runs in ranks for warning in runs[name]["warnings"]]
        written = len(read_run(tmp_path / name / "csv").series.get(label("step_ms"), ()))
        if name == "nothing":
            assert not warnings and written == STEPS
        else:
            assert len(warnings) == 1 and "\n" not in warnings[0], (name, warnings)
            assert "monitoring is off" in warnings[0], warnings
            assert written < STEPS, name
