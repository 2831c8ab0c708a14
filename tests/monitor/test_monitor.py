"""The sinks hold what the channels counted; monitoring changes nothing and never stops training."""

import contextlib
import errno
import io
import itertools
from functools import partial
from unittest import mock

import pytest
import torch
from deepspeed.monitor.monitor import MonitorMaster

from ds_compress.cli.runs import LOSS
from ds_compress.config import DIRECTIONS
from ds_compress.errors import CompressionError
from ds_compress.message import meters
from ds_compress.message.clock import HostClock
from ds_compress.message.meters import SendingMeter
from ds_compress.monitor import lines, metrics, monitor
from ds_compress.monitor.metrics import CHANNEL, PIPELINE, PREFIX, label
from tests.support import pipeline
from tests.support.calls import wrapped
from tests.support.launch_scripts import read_run
from tests.support.offline_wandb import finish, keep_offline, read_offline
from tests.support.pipeline import (
    MICRO_BATCH,
    MICRO_BATCHES,
    batches,
    build,
    ds_config,
    log_lines,
    same_weights,
)
from tests.support.pipeline_kinds import KINDS
from tests.support.ranks import run_ranks

STEPS = 4
BLOCK = {"min_numel": 0, "monitor": {"every": 1}}
BLOCK |= {"forward": {"codec": {"name": "quantize", "rounding": "stochastic"}, "feedback": "ef21"}}
SPARSE, INT8 = {"name": "topk", "density": 0.1}, {"name": "ef", "dtype": "int8"}
BLOCK |= {"backward": {"codec": SPARSE, "feedback": INT8}}


def sinks(folder, wandb=True):
    at = {"enabled": True, "output_path": str(folder)}
    files = {"csv_monitor": {**at, "job_name": "csv"}, "tensorboard": {**at, "job_name": "tensorboard"}}
    return files | ({"wandb": {"enabled": True, "project": "tests"}} if wandb else {})


def train_and_count(stages, config):
    """Losses, weights, and the counters of every channel this rank sends on after each step."""
    engine = build(stages, config)
    epoch = list(itertools.islice(batches(engine.grid.get_data_parallel_id()), 2 * MICRO_BATCHES))
    data = itertools.cycle(epoch)
    losses, counted = [], []
    for _ in range(STEPS):
        losses.append(engine.train_batch(data).item())
        channels = engine.ds_compress.stage.sending
        sending = {(each.boundary.number, each.direction): each.sent for each in channels}
        counted.append({place: (sent.raw_bytes, sent.wire_bytes) for place, sent in sending.items()})
    if config.get("wandb") and engine.global_rank == 0:
        finish()
    summary = engine.ds_compress.monitor.summary()
    return {"losses": losses, "weights": pipeline.weights(engine), "counted": counted, "summary": summary}


def read_tensorboard(folder):
    """Series by label, and labels in the charts of the "Custom Scalars" page, as its plugin reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2

    events = EventAccumulator(str(folder)).Reload()
    names = events.Tags()["scalars"]
    series = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}
    (config,) = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val
    layout = layout_pb2.Layout.FromString(config)
    charts = [chart for category in layout.category for chart in category.chart]
    return series, [tag for chart in charts for tag in chart.multiline.tag]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.extended(keep=1)
def test_sinks_hold_what_the_channels_counted(stages, tmp_path, monkeypatch):
    keep_offline(tmp_path, monkeypatch)
    replicas = 2
    config = ds_config(BLOCK, replicas=replicas, **sinks(tmp_path))
    ranks = run_ranks(stages * replicas, train_and_count, stages, config)

    first_replica = ranks[::replicas]
    samples = [step * MICRO_BATCH * MICRO_BATCHES * replicas for step in range(1, STEPS + 1)]
    wandb_series, settings, _ = read_offline(tmp_path)
    tensorboard_series, charted = read_tensorboard(tmp_path / "tensorboard")
    csv_series = read_run(tmp_path / "csv").series
    found = {"csv": csv_series, "tensorboard": tensorboard_series, "wandb": wandb_series}
    places = list(itertools.product(range(stages - 1), DIRECTIONS))
    measured = ("encode_ms", "decode_ms", "relative_error", "send_ms", "wait_ms", "cosine")
    positive = [*map(label, PIPELINE), *(label(name, *place) for name in measured for place in places)]
    for sink, series in found.items():
        for name in (LOSS, *positive, *(label(name, *place) for name in CHANNEL for place in places)):
            assert [x for x, _ in series[name]] == samples, (sink, name)
        for name in positive:
            assert all(value > 0 for _, value in series[name]), (sink, name)
        for boundary, direction in places:
            rows = {name: [y for _, y in series[label(name, boundary, direction)]] for name in CHANNEL}
            sender = first_replica[boundary + (direction == "backward")]
            counted = [step[boundary, direction] for step in sender["counted"]]
            assert [*zip(rows["raw_bytes"], rows["wire_bytes"])] == counted
            assert rows["ratio"][-1] == pytest.approx(counted[0][0] / counted[0][1])
            assert max(rows["cosine"]) <= 1 and not any(rows["nonfinite_share"])
            for name in ("residual_norm", "residual_share"):  # ef keeps one, ef21 does not
                assert (rows[name][-1] > 0) == (direction == "backward")
    ours = {name for name in found["tensorboard"] if name.startswith("Train/Compression/")}
    assert len(charted) == len(ours) and set(charted) == ours
    assert settings["ds_compress"]["forward"]["name"] == "quantize"
    total = sum(sum(wire for _, wire in rank["counted"][-1].values()) for rank in first_replica)
    assert f"{total / 1e3:,.2f} kB sent instead of" in ranks[0]["summary"] and "waited" in ranks[0]["summary"]
    assert not any(rank["summary"] for rank in ranks[1:])


@pytest.mark.parametrize("feedback", ["ef21", "aqsgd"])
@pytest.mark.extended(keep=1)
def test_watching_changes_nothing(feedback, tmp_path):
    """A packet decoded by its own sender leaves feedback state, stashes and random choices as they were."""
    block = {**BLOCK, "forward": {**BLOCK["forward"], "feedback": feedback}}
    quiet = run_ranks(2, train_and_count, 2, ds_config({**block, "monitor": {"every": 0}}))
    csv_only = {"csv_monitor": sinks(tmp_path)["csv_monitor"]}
    watched = run_ranks(2, train_and_count, 2, ds_config(block, **csv_only))
    assert len(read_run(tmp_path).series[label("cosine", 0, "forward")]) == STEPS
    for mine, theirs in zip(watched, quiet):
        assert mine["losses"] == theirs["losses"] and mine["counted"] == theirs["counted"]
        assert same_weights(mine["weights"], theirs["weights"])
    assert not quiet[0]["summary"]


COLLECTIVES = ["all_reduce", "broadcast", "reduce", "gather", "scatter", "all_gather", "barrier"]
COLLECTIVES += ["all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor"]


def train_counting_work(config):
    """Count this rank's calls of each collective in training steps; also return a fake clock."""
    counts = dict.fromkeys((*COLLECTIVES, "clock"), 0)

    def counting(name, original):
        return wrapped(original, before=lambda *args, **options: counts.update({name: counts[name] + 1}))

    engine = build(2, config)
    for name in COLLECTIVES:
        setattr(torch.distributed, name, counting(name, getattr(torch.distributed, name)))
    HostClock.mark = counting("clock", HostClock.mark)
    data = batches(engine.grid.get_data_parallel_id())
    for _ in range(STEPS):
        engine.train_batch(data)
    return dict(counts)


def test_a_monitor_that_is_off_does_nothing(tmp_path):
    """Beside DeepSpeed's own collectives there is one sum, for the start-up line, even with sinks on."""

    sink = {"csv_monitor": sinks(tmp_path)["csv_monitor"]}
    blocks = None, *({**BLOCK, "monitor": {"every": every}} for every in (0, 1))
    configs = [ds_config(block, replicas=2, **sink) for block in blocks]
    for stock, off, on in run_ranks(4, lambda: [train_counting_work(config) for config in configs]):
        assert stock["all_reduce"] > 0 and stock["clock"] == 0
        assert off == {**stock, "all_reduce": stock["all_reduce"] + 1}
        assert on == {**stock, "all_reduce": stock["all_reduce"] + STEPS, "clock": on["clock"]}
        assert on["clock"] > 2 * STEPS * MICRO_BATCHES


def compared_messages(config):
    """Micro-batches that rank 0 compares in eight steps."""
    seen = []

    def noting(clock, compared, gradients):
        seen.extend(compared)
        return SendingMeter(clock, compared, gradients)

    monitor.SendingMeter = noting
    engine, data = build(2, config), batches()
    for _ in range(8):
        engine.train_batch(data)
    return seen


def test_every_message_of_a_step_is_compared_in_turn(tmp_path):
    """The step number once chose the micro-batch: with some "every" it was always the same one."""
    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "turns"}
    config = ds_config({"monitor": {"every": 2}}, csv_monitor=csv)
    assert run_ranks(2, compared_messages, config)[0] == [0, 1, 2, 3]


def last_lines(steps, every, folder):
    """What a run of so many steps, and one resumed from it for as many, say at the end; and their bytes."""
    output = []
    for resumed in (False, True):
        engine, data = build(2, ds_config({**BLOCK, "monitor": {"every": every}})), batches()
        if resumed:
            engine.load_checkpoint(folder)
        for _ in range(steps):
            engine.train_batch(data)
        engine.save_checkpoint(folder)
        sent = torch.tensor([sum(channel.sent.wire_bytes for channel in engine.ds_compress.stage.sending)])
        torch.distributed.all_reduce(sent)
        output.append((engine.ds_compress.monitor.summary(), sent.item()))
    return output


def test_a_run_shorter_than_every_counts_to_its_end(tmp_path):
    """The line at the end told of step 1 alone."""
    first, resumed = run_ranks(2, last_lines, 7, 10, str(tmp_path))[0]
    for line, sent in (first, resumed):
        assert line.startswith(f"ds_compress: {sent / 1e3:,.2f} kB sent instead of ")
    assert first[0].endswith("by step 7") and resumed[0].endswith("by step 14, from step 8 on")


def quality_before_and_after_loading(folder):
    """What the guard judges by: after a measured step, and once a checkpoint has been loaded."""
    engine = build(2, ds_config({**BLOCK, "guard": {"every": 1}}))
    engine.train_batch(batches())
    engine.save_checkpoint(folder)
    measured = engine.ds_compress.monitor.message_quality()
    engine.load_checkpoint(folder)
    return measured, engine.ds_compress.monitor.message_quality()


def test_no_quality_is_known_between_a_checkpoint_and_the_next_step(tmp_path):
    """The step before it counted as measured, by values that a checkpoint does not hold: a KeyError."""
    measured, loaded = run_ranks(2, quality_before_and_after_loading, str(tmp_path))[0]
    assert len(measured) == 2 and not loaded


def test_what_is_summed_up_early_is_little():
    found = [steps for steps in range(1, 2000) if lines.is_early(steps, 1000)]
    assert found == [digit * unit for unit in (1, 10, 100) for digit in range(1, 10)]
    assert not any(lines.is_early(steps, every) for steps in range(1, 20) for every in (0, 1))


LONGER = 6
SIZES = (6, 6, 9, 9, 4, 5)
"""Micro-batches of each step; more than before, then fewer."""
WRITTEN = {"blocking": 1, "eager": 2}
"""By mode of the link: every so many steps."""

EVERY_STEP = {"monitor": {"every": 1}}
QUANTIZED = {"forward": {"codec": "quantize"}, "min_numel": 0, "eval": "both", "guard": {"every": 1}}


def keep(name, engine, step):
    """Changes nothing."""


def resize(name, engine, step):
    engine.set_train_batch_size(MICRO_BATCH * SIZES[step] * engine.grid.get_data_parallel_world_size())


def train(config, before_step, **options):
    """Losses, weights and warnings of one engine; `before_step` is called with engine and step."""
    warnings = pipeline.log_lines()
    engine = build(2, config, **options)
    data, losses = batches(engine.grid.get_data_parallel_id()), []
    for step in range(LONGER):
        before_step(engine, step)
        losses.append(engine.train_batch(data).item())
    return {"losses": losses, "weights": pipeline.weights(engine), "warnings": [*warnings]}


def same(mine, stock):
    return mine["losses"] == stock["losses"] and same_weights(mine["weights"], stock["weights"])


def train_each(folder, blocks, before_step=keep, **options):
    """By name of the run: stock, and with each block; `BREAKS` says what breaks in the run of a name."""
    runs = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for name, block in {"stock": None, **blocks}.items():
            config = ds_config(block, **sinks(folder / name, wandb=False))
            with BREAKS.get(name, contextlib.nullcontext)():
                runs[name] = train(config, partial(before_step, name), **options)
    return runs


@pytest.mark.parametrize("kind", [name for name in ("tensor", "dualpipev") if name in KINDS])
@pytest.mark.extended
def test_the_batch_size_may_change(kind, tmp_path):
    """The number of micro-batches was kept from the start: the first logged step after a change failed."""
    blocks = {mode: {"link": {"mode": mode}, "monitor": {"every": every}} for mode, every in WRITTEN.items()}
    for runs in run_ranks(2, partial(train_each, tmp_path, blocks, resize, **KINDS[kind].module)):
        for name, run in runs.items():
            assert same(run, runs["stock"]), name
            assert not run["warnings"]
    for mode, every in WRITTEN.items():
        series = read_run(tmp_path / mode / "csv").series
        for name in CHANNEL:
            assert len(series[label(name, 0, "forward")]) == LONGER // every
        # `none` changes nothing, whichever message of the step is compared
        assert [value for _, value in series[label("cosine", 0, "forward")]] == [1.0] * (LONGER // every)


def watch_sometimes(name, engine, step):
    """DeepSpeed's monitor drops its sinks and takes them up again: on all ranks, or on one."""
    if name != "one" or engine.global_rank == 1:
        engine.monitor.enabled = step not in (2, 3)


def test_sinks_may_come_and_go(tmp_path):
    """Once they were kept from the start. What one stage has not measured is not written."""
    ranks = run_ranks(2, train_each, tmp_path, {"all": EVERY_STEP, "one": EVERY_STEP}, watch_sometimes)
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


def evaluate_on_a_full_disk(folder, block):
    """Losses of steps and evaluations, and warnings."""
    config = ds_config(block, **sinks(folder, wandb=False))
    warnings, engine, data = pipeline.log_lines(), build(2, config), batches()
    with full_disk(), contextlib.redirect_stdout(io.StringIO()):
        losses = [each(data).item() for each in 3 * [engine.train_batch, engine.eval_batch]]
    return losses, [line for line in warnings if "monitoring is off" in line]


def test_what_evaluations_write_may_fail(tmp_path):
    """What the guard measures, and both losses of an evaluation, ended the run where they could not be
    written, though monitoring never does."""
    ranks = run_ranks(2, evaluate_on_a_full_disk, tmp_path, {**QUANTIZED, "monitor": {"every": 0}})
    losses, warnings = zip(*ranks)
    assert len(losses[0]) == 6 and losses[0] == losses[1]
    ((line,), ()) = warnings
    assert "stage 0: OSError: [Errno 28] No space left on device" in line


STOPS = {"guard": {"every": 1, "action": "stop", "error": 0.3, "loss": 1e9}, **EVERY_STEP}


def become_coarse_on_a_full_disk(folder, block):
    """What the guard says when a codec becomes coarse after monitoring has been switched off."""
    engine, data = build(2, ds_config(block, **sinks(folder, wandb=False))), batches()
    with full_disk(), contextlib.redirect_stdout(io.StringIO()):
        for _ in range(4):
            engine.train_batch(data)
        engine.ds_compress.reconfigure({"0": {"forward": {"codec": {"name": "quantize", "bits": 1}}}})
        with pytest.raises(CompressionError) as stopped:
            engine.train_batch(data)
    return str(stopped.value)


@pytest.mark.extended
def test_the_guard_stops_a_run_after_monitoring_was_switched_off(tmp_path):
    """It judged messages by what the monitor measured: after a sink had failed, by nothing."""
    lines = run_ranks(2, become_coarse_on_a_full_disk, tmp_path, {**QUANTIZED, **STOPS})
    assert all("after step 5 boundary 0, forward: a token error of" in line for line in lines)


BREAKS = {
    "nothing": contextlib.nullcontext,
    "sink": full_disk,
    "output": closed_output,
    "run": lambda: mock.patch.object(monitor, "record_settings", side_effect=OSError("W&B")),
    "layout": lambda: mock.patch.object(monitor, "add_tensorboard_layout", side_effect=OSError("disk")),
    "sender's values": lambda: on_rank(1, meters.SendingMeter, "values"),
    "receiver's values": lambda: on_rank(0, meters.ReceivingMeter, "values"),
    "stamps": lambda: on_rank(1, meters.ReceivingMeter, "stamps"),
    "comparison": lambda: on_rank(1, meters, "compare"),
    "largest": lambda: on_rank(0, meters, "largest"),
    "clock": lambda: on_rank(1, HostClock, "mark"),
    "norm of a residual": lambda: on_rank(0, metrics, "residual_values"),
    "estimate": lambda: on_rank(0, metrics, "uncompressed_step_ms"),
    "making a meter": lambda: on_rank(1, monitor, "SendingMeter"),
}


@pytest.mark.parametrize("mode", ["blocking", "eager"])
@pytest.mark.extended
def test_what_breaks_is_said_once_and_switches_monitoring_off(mode, tmp_path):
    block = {**EVERY_STEP, "link": {"mode": mode}}
    ranks = run_ranks(2, train_each, tmp_path, dict.fromkeys(BREAKS, block))
    for name in BREAKS:
        assert all(same(runs[name], runs["stock"]) for runs in ranks), name
        warnings = [warning for runs in ranks for warning in runs[name]["warnings"]]
        written = len(read_run(tmp_path / name / "csv").series.get(label("step_ms"), ()))
        if name == "nothing":
            assert not warnings and written == LONGER
        else:
            assert len(warnings) == 1 and "\n" not in warnings[0], (name, warnings)
            assert "monitoring is off" in warnings[0], warnings
            assert written < LONGER, name


def logged_while_settings_alternate(folder):
    block = {"min_numel": 0, "monitor": {"every": 1}, "guard": {"every": 0}}
    engine, data, lines = build(2, ds_config(block, **sinks(folder, wandb=False))), batches(), log_lines()
    coarse = {"name": "quantize", "bits": 1}, {"name": "topk", "density": 1.0}
    for step in range(10):
        codecs = coarse if step % 2 else ("none", "none")
        changes = {direction: {"codec": codec} for direction, codec in zip(DIRECTIONS, codecs)}
        engine.ds_compress.reconfigure({"0": changes})
        engine.train_batch(data)
    return lines


def test_settings_that_come_again_are_warned_of_once(tmp_path):
    """A policy may go back to a setting thousands of times; each time its warnings were logged again."""
    lines, _ = run_ranks(2, logged_while_settings_alternate, tmp_path)
    assert [line.partition(":")[0] for line in lines] == [
        "ds_compress.boundaries.0.backward.codec",  # makes messages larger
        "boundary 0, forward",  # has a token error
    ]
