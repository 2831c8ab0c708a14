"""Save, kill, resume: the continued run equals the uninterrupted one, or says what starts from zero."""

import contextlib
import functools
import io
import itertools
import os
import re
import resource
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import nn

from ds_compress.checkpoint import checkpointer
from ds_compress.checkpoint.restore import ABSENT, CHANGED, DIFFERENT, RESTORED, UNREADABLE, Verdict
from ds_compress.codecs.quantize import Quantize
from ds_compress.runtime import stage_profile
from ds_compress.runtime.depth import MEASURED
from ds_compress.transport.probe import LinkMeasurement
from tests.checkpoint.damaged_files import opened
from tests.support import pipeline, pipeline_kinds
from tests.support.pipeline import (
    MICRO_BATCHES,
    ParallelBlock,
    TupleBlock,
    alike,
    batches,
    build,
    channel_state,
    ds_config,
    log_lines,
)
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal

SAVED, END = 2, 5
TOPK = {"name": "topk", "density": 0.3}
QUANTIZE = {"name": "quantize", "bits": 4, "group_size": 32}
SAMPLES = {"name": "aqsgd", "offload": {"device": "cpu"}}
FEEDBACKS = {
    "ef": (TOPK, "ef"),
    "ef21": (TOPK, {"name": "ef21", "scope": "micro_batch"}),
    "ef_mixed": (TOPK, {"name": "ef_mixed", "dtype": "bf16"}),
    "state of a codec": ({"name": "lowrank", "rank": 8}, "none"),
    "loco": (QUANTIZE, "loco"),
    "aqsgd": (TOPK, "aqsgd"),
    "aqsgd in host memory": (QUANTIZE, {**SAMPLES, "scope": "micro_batch"}),
}
VISITED_AGAIN = 6  # micro-batches of an epoch


def config(name, replicas=1, **changes):
    codec, feedback = FEEDBACKS[name]
    direction = {"codec": codec, "feedback": feedback}
    backward = {"codec": codec} if name.startswith("aqsgd") else direction
    block = {"forward": direction, "backward": backward, "min_numel": 0, **changes}
    return ds_config(block, replicas=replicas)


def run(stages, ds_config, folder, start=0, end=END, kill_at=None, **load_options):
    """Train from step `start`, which is loaded from `folder`, to `end`; saves after `SAVED` steps."""
    engine = build(stages, ds_config)
    warnings = log_lines()
    data = itertools.cycle(itertools.islice(batches(engine.grid.get_data_parallel_id()), VISITED_AGAIN))
    loaded = None
    if start:
        engine.load_checkpoint(str(folder), **load_options)
        loaded = channel_state(engine)
        data = itertools.islice(data, start * MICRO_BATCHES, None)
    losses = []
    for step in range(start, end):
        if step == kill_at:
            os.kill(os.getpid(), 9)
        losses.append(engine.train_batch(data).item())
        if step + 1 == SAVED and not start:
            saved = channel_state(engine)
            engine.save_checkpoint(str(folder))
    return {
        "losses": losses,
        "saved": None if start else saved,
        "loaded": loaded,
        "end": channel_state(engine),
        "guard": engine.ds_compress.guard.state(),
        "warnings": warnings,
    }


def ranks(world, *args, check=True, **options):
    return run_ranks(world, functools.partial(run, **options), *args, check=check)


@pytest.mark.parametrize("name", FEEDBACKS)
@pytest.mark.extended(keep=1)
def test_resuming_equals_going_on(name, tmp_path):
    """The first loss of the guard is state too, with which no checkpoint was written."""
    replicas = 2 if name in ("ef", "ef21", "state of a codec", "aqsgd") else 1
    world, settings = 2 * replicas, config(name, replicas, warmup_steps=int(name == "state of a codec"))
    killed = ranks(world, 2, settings, tmp_path, kill_at=SAVED + 1, check=False)
    assert "died without a result" in killed and all(isinstance(rank, str) for rank in killed)
    whole = ranks(world, 2, settings, tmp_path / "whole")
    resumed = ranks(world, 2, settings, tmp_path, start=SAVED)
    losses, looked_at = whole[0]["losses"], None  # the guard looks at no loss beside a feedback
    if name == "state of a codec":
        looked_at = losses[0]
        assert sum(losses[-2:]) < 0.9 * sum(losses[:2])
    for ours, theirs in zip(resumed, whole):
        assert ours["losses"] == theirs["losses"][SAVED:]
        assert pipeline.same_weights(ours["loaded"], theirs["saved"])
        assert pipeline.same_weights(ours["end"], theirs["end"])
        assert ours["guard"] == theirs["guard"] == {"first_loss": looked_at}
        assert not ours["warnings"]
    if replicas == 2:
        first, second = whole[0]["end"], whole[1]["end"]
        assert first and second
        assert not any(torch.equal(first[key], second[key]) for key in first.keys() & second.keys())


def test_other_stages_and_settings(tmp_path):
    ranks(4, 4, config("ef21"), tmp_path, end=SAVED)
    # cuts at layers 2, 4, 6 become one at layer 4; the parameter groups no longer fit, so the optimizer
    # starts anew
    halved = ranks(2, 2, config("ef21"), tmp_path, start=SAVED, load_optimizer_states=False)
    assert halved[0]["loaded"] and not halved[0]["warnings"]
    loaded = {key.replace("0/", "1/", 1): value for key, value in halved[0]["loaded"].items()}
    assert pipeline.same_weights(loaded, saved_at(tmp_path, 1, 4))
    other = config("ef21", boundaries={"1": {"forward": {"codec": "bf16"}}})
    changed = ranks(4, 4, other, tmp_path, start=SAVED)
    assert [bool(rank["loaded"]) for rank in changed] == [True] * 4
    assert not any(key.startswith("1/") for rank in changed for key in rank["loaded"])
    said = "state of channels starts from zero: its settings have changed (layer 4, replica 0)"
    assert changed[0]["warnings"] == [f"ds_compress: {tmp_path}/global_step{SAVED}: {said}"]
    assert not any(rank["warnings"] for rank in changed[1:])


def save_as_in_0_3(ds_config, folder):
    """What `run` returns, and a checkpoint that names options which are gone."""
    gone = {"scheme": "asymmetric", "scale_dtype": "bf16", "grid": None}
    today = Quantize.settings.fget
    with mock.patch.object(Quantize, "settings", property(lambda self: today(self) | gone)):
        return run(2, ds_config, folder, end=SAVED)


def test_a_checkpoint_with_options_that_are_gone_is_read(tmp_path):
    """Residuals started from zero, as settings were compared with options that only the file had."""
    saved = run_ranks(2, save_as_in_0_3, config("loco"), tmp_path)
    resumed = ranks(2, 2, config("loco"), tmp_path, start=SAVED)
    for ours, theirs in zip(resumed, saved):
        assert theirs["saved"] and not ours["warnings"]
        assert pipeline.same_weights(ours["loaded"], theirs["saved"])


def save_untrained(folder, block):
    build(2, ds_config(block)).save_checkpoint(str(folder), tag="saved")


def warnings_of_loading(folder, block):
    engine, warnings = build(2, ds_config(block)), log_lines()
    engine.load_checkpoint(str(folder), tag="saved")
    return warnings


both_ways = functools.partial(alike, min_numel=0)
STATELESS, STATEFUL = both_ways(QUANTIZE, "none"), both_ways(TOPK, "ef")


@pytest.mark.parametrize(
    "saved, loaded, why",
    [
        (None, both_ways("none", "none"), ""),
        (None, STATEFUL, "the checkpoint has none for both sides"),
        (both_ways("bf16", "none"), STATELESS, ""),
        (STATEFUL, STATELESS, ""),
        (STATELESS, STATEFUL, "its settings have changed"),
    ],
)
@pytest.mark.extended(keep=2)
def test_only_what_has_state_starts_from_zero(saved, loaded, why, tmp_path):
    """Recipe `none` said so of each boundary when it loaded a checkpoint of DeepSpeed alone, and one of a
    codec without state when another one had been used before."""
    run_ranks(2, save_untrained, tmp_path, saved)
    first, _ = run_ranks(2, warnings_of_loading, tmp_path, loaded)
    said = f"state of channels starts from zero: {why} (layer 4, replica 0)"
    line = f"ds_compress: {tmp_path}/saved: {said}"
    assert [each for each in first if "starts from zero" in each] == [line] * bool(why)


def saved_at(folder, stage, layer):
    """Upstream state at `layer`, with names as `channel_state` has them for boundary 1."""
    entries, _ = opened(folder / f"global_step{SAVED}" / f"ds_compress_pp{stage:02d}_dp00_tp00.safetensors")
    prefix = f"{layer}/upstream/"
    return {k.replace(prefix, "1/"): value for k, value in entries.items() if k.startswith(prefix)}


def test_a_damaged_side_resets_both(tmp_path):
    ranks(2, 2, config("ef21"), tmp_path, end=SAVED)
    (tmp_path / f"global_step{SAVED}" / "ds_compress_pp01_dp00_tp00.safetensors").write_bytes(b"\x10" * 100)
    upstream, downstream = ranks(2, 2, config("ef21"), tmp_path, start=SAVED)
    assert not upstream["loaded"] and not downstream["loaded"]
    assert "its file is damaged or cannot be read (layer 4, replica 0)" in upstream["warnings"][0]
    assert all(torch.tensor(upstream["losses"]).isfinite())


def test_verdict_needs_both_sides_alike():
    alike = [[4, 0, 0, 0, RESTORED, 11], [4, 0, 0, 1, RESTORED, 11]]
    different = [[4, 1, 0, 0, RESTORED, 11], [4, 1, 0, 1, RESTORED, 12]]
    changed = [[8, 0, 0, 0, RESTORED, 0], [8, 0, 0, 1, CHANGED, 0]]
    verdict = Verdict([*alike, [-1] * 6, *different, *changed])
    assert verdict.status == {(4, 0): RESTORED, (4, 1): DIFFERENT, (8, 0): CHANGED}
    said = (
        "settings have changed (layer 8, replica 0), the two sides do not have the same (layer 4, replica 1)"
    )
    assert verdict.report("f").endswith(said)


def test_many_layers_and_replicas_that_start_from_zero_are_named_together(tmp_path):
    """The warning listed each: 1,800 characters with 64 stages of 4 replicas."""
    rows = [[n, r, 0, side, ABSENT, 0] for n in range(1, 64) for r in range(4) for side in range(2)]
    lost = [[40, 3, 0, 0, UNREADABLE, 0]]
    report = Verdict(rows + lost).report(tmp_path)
    assert "(layer 1-39, 41-63, replica 0-3; layer 40, replica 0-2)" in report
    assert report.endswith("(layer 40, replica 3)")


def test_tensor_parallel_ranks_decide_together():
    """One that started from zero while its neighbour went on would send other bytes of the same tensor."""
    rows = [[4, 0, rank, side, RESTORED, 10 + rank] for rank in (0, 1) for side in (0, 1)]
    assert Verdict(rows).status == {(4, 0): RESTORED}, "slices of a tensor have states of their own"
    for status in (ABSENT, UNREADABLE):
        assert Verdict([*rows[:3], [4, 0, 1, 1, status, 0]]).status == {(4, 0): status}
    assert Verdict([*rows[:3], [4, 0, 1, 1, RESTORED, 12]]).status == {(4, 0): DIFFERENT}


def load_where_one_rank_finds_nothing(folder):
    """Settings changed in training once a checkpoint is loaded that rank 1 cannot see; what is logged."""
    engine, lines = build(2, ds_config(STATELESS)), log_lines()
    engine.train_batch(batches())
    session, rank = engine.ds_compress, torch.distributed.get_rank()
    session.reconfigure({"0": {"forward": {"codec": "bf16"}}})
    engine.save_checkpoint(str(folder), tag="saved")
    assert session.config.adopted
    checkpointer.load(session, folder if rank == 0 else folder / "nothing", "saved", True)
    return session.config.adopted, lines


def test_settings_that_not_all_ranks_find_begin_as_in_the_block(tmp_path):
    (first, lines), (second, others) = run_ranks(2, load_where_one_rank_finds_nothing, tmp_path)
    assert not first and not second and not others
    assert "settings that changed during training start again from the block" in lines[-1]


def save_in_parallel(folder):
    engine = build(2, config("ef"), [LayerSpec(ParallelBlock)] * 8, tensor_parallel=2)
    engine.train_batch(batches())
    engine.save_checkpoint(str(folder), tag="saved")


def test_each_tensor_parallel_rank_has_a_file(tmp_path):
    run_ranks(4, save_in_parallel, tmp_path)
    names = {path.name for path in tmp_path.rglob("*.safetensors")}
    assert names == {f"ds_compress_pp0{pp}_dp00_tp0{tp}.safetensors" for pp in (0, 1) for tp in (0, 1)}


class Biased(TupleBlock):
    """Passes on a learned bias of attention, to which the first layer adds a mask of the padding."""

    def __init__(self, last=False):
        super().__init__(last)
        self.bias = nn.Parameter(torch.randn(8, 8))

    def forward(self, inputs):
        if torch.is_tensor(inputs):
            padding = (inputs == 0).all(-1)[:, None]
            inputs = inputs, self.bias + torch.zeros(len(inputs), 8, 8).masked_fill(padding, -1e9)
        x, bias = inputs
        x = super().forward(x + bias.softmax(-1) @ x)
        return x if self.last else (x, bias)


def trained_with_padding(folder, is_padded, start, evaluates=False):
    """Losses of the steps after `start`, and the bytes that each sends.

    Args:
        is_padded: of each step, whether its batch has padding.
        evaluates: a batch unlike the first one, before the checkpoint of `start` is loaded.
    """
    engine, data = build(2, ds_config(both_ways(QUANTIZE, "none")), pipeline_kinds.of(Biased)), batches()

    def batch(has_padding, data=data):
        for x, target in itertools.islice(data, MICRO_BATCHES):
            x[:, 5:] *= not has_padding
            yield x, target

    if evaluates:
        engine.eval_batch(batch(not is_padded[0], batches()))
    if start:
        engine.load_checkpoint(str(folder), tag=str(start))
        pipeline.skip_steps(engine, data, start)
    found = []
    for step in range(start, len(is_padded)):
        # before the first batch, too: a run may end there
        engine.save_checkpoint(str(folder), tag=str(step), save_latest=False)
        before = pipeline.sent_bytes(engine)
        found.append(
            (engine.train_batch(batch(is_padded[step])).item(), pipeline.sent_bytes(engine) - before)
        )
    return found


@pytest.mark.parametrize("is_padded", [(True, False, False), (False, True, True)], ids=["first", "later"])
@pytest.mark.extended(keep=1)
def test_the_same_tensors_are_compressed_as_in_the_saved_run(is_padded, tmp_path):
    """Which hold a mask was found anew in the first batch, and that may have none where that of the saved run
    had one: other tensors were compressed, and the losses were others."""
    whole = run_ranks(2, trained_with_padding, tmp_path, is_padded, 0)
    for evaluates in (False, True):  # the second goes on from what the first saved before any batch
        resumed = run_ranks(2, trained_with_padding, tmp_path, is_padded, 1, evaluates)
        assert resumed == [found[1:] for found in whole]
    (tmp_path / "1" / "ds_compress_pp01_dp00_tp00.safetensors").unlink()
    anew = run_ranks(2, trained_with_padding, tmp_path, is_padded, 1)
    assert anew[0][0][1] != whole[0][1][1], "all ranks find out anew"


class EmptyStage(PipelineModule):
    """Of three stages, the one in the middle has no layers."""

    def _partition_layers(self, method):
        self.parts = [0, 2, 2, 4]
        self._set_bounds(*self.parts[self.stage_id : self.stage_id + 2])


def load_with_an_empty_stage(folder):
    """What the first sender remembers before a checkpoint and after it was loaded, and what is logged."""
    topology = PipeDataParallelTopology(num_pp=3, num_dp=1)
    module = EmptyStage(pipeline.layers(4), loss_fn=pipeline.loss_fn, topology=topology)
    parameters = [{"params": list(module.parameters())}]  # torch takes an empty list in a group alone
    given = {"config": ds_config(STATEFUL), "model_parameters": parameters}
    engine, lines = deepspeed.initialize(model=module, **given)[0], log_lines()
    engine.train_batch(batches())
    engine.save_checkpoint(str(folder), tag="saved")
    saved = channel_state(engine)
    engine.load_checkpoint(str(folder), tag="saved")
    return saved, channel_state(engine), lines


def test_boundaries_round_a_stage_without_layers_start_from_zero(tmp_path):
    """Checkpoints name both by one layer: the second got the residuals of the first, and no line said so."""
    first, *others = run_ranks(3, load_with_an_empty_stage, tmp_path)
    assert all(saved and not loaded for saved, loaded, _ in (first, *others))
    said = "a stage has no layers, so two boundaries are at one (layer 2, replica 0)"
    assert [line for line in first[2] if "starts from zero" in line] == [
        f"ds_compress: {tmp_path}/saved: state of channels starts from zero: {said}"
    ]


def save_where_one_rank_fails(ds_config, folder, failing, fault):
    """The rank `failing` may write 64 bytes of its file, and the system refuses the rest, as where a disk is
    full; or its codec raises."""
    engine, data = build(2, ds_config), batches()
    engine.train_batch(data)
    engine.save_checkpoint(folder, tag="first")
    write, free = checkpointer.write, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*args, **metadata):
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, free[1]))
        try:
            write(*args, **metadata)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, free)

    def encode(x, ctx):
        raise RuntimeError("no memory is left, or the message is too large")

    if torch.distributed.get_rank() == failing:
        if fault == "disk":
            checkpointer.write = limited
        else:
            engine.ds_compress.config.checkpoint_codec.encode = encode
    return refusal(engine.save_checkpoint, folder, tag="second")


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("fault", ["disk", "codec"])
def test_a_rank_that_cannot_write_stops_all_and_leaves_the_checkpoint_before(fault, failing, tmp_path):
    """The rank that failed left the others in DeepSpeed's barrier, for as long as its time-out."""
    ds_config = config("ef21")
    ds_config["ds_compress"]["checkpoint"] = {"codec": {"name": "quantize", "bits": 8}}
    messages = run_ranks(2, save_where_one_rank_fails, ds_config, tmp_path, failing, fault)
    failed, other = messages[failing], messages[1 - failing]
    start = "ds_compress: checkpoint second is not complete: "
    file = f"{tmp_path}/second/ds_compress_pp0{failing}"
    assert re.fullmatch(rf"{start}{file}\S+ cannot be written: .*too large.*", failed)
    assert other == f"{start}rank {failing} could not write its part"
    assert (tmp_path / "latest").read_text() == "first"
    assert not list(tmp_path.rglob("*.part"))


MANY = 9
CHOSEN = MEASURED[-1] + 1
AUTO = {"depth": "auto", "memory_gb": 1}


def run_at_depth(folder, start, link, latency, micro_batches=MANY):
    """Losses, and the depth of each batch; of a run that saves, or of one that goes on from there."""
    stage_profile.probe = lambda sender, receiver, first: LinkMeasurement(incoming=1e9, latency=latency)
    engine, depths = build(2, ds_config({"link": link}, micro_batches=micro_batches)), []
    session = engine.ds_compress

    def note(step):
        depths.append((session.depth.now, session.stage.ends[0].link.depth))

    with contextlib.redirect_stdout(io.StringIO()):
        losses = pipeline.train_on(engine, 2 * CHOSEN, folder, start, prepare=note)["losses"]
    return losses, depths


def test_a_resumed_run_goes_on_at_its_depth_until_it_is_measured_anew(tmp_path):
    whole = run_ranks(2, run_at_depth, tmp_path, 0, AUTO, 0.5)
    resumed = run_ranks(2, run_at_depth, tmp_path, CHOSEN, AUTO, 0.0)
    for (losses, depths), (again, now) in zip(whole, resumed):
        assert again == losses[CHOSEN:]
        assert depths[-1] > (1, 1) and now[: MEASURED[-1]] == [depths[CHOSEN]] * MEASURED[-1]
        assert now[-1] == (1, 1)  # the link has become fast


@pytest.mark.parametrize("link, micro_batches, expected", [
    (AUTO, MANY + 1, 1),  # more may be under way than were when memory was measured
    ({"depth": 2}, MANY, 2),  # the block says so
], ids=["other micro-batches", "a fixed depth"])  # fmt: skip
@pytest.mark.extended
def test_what_does_not_take_the_depth_from_a_checkpoint(link, micro_batches, expected, tmp_path):
    run_ranks(2, run_at_depth, tmp_path, 0, AUTO, 0.5)
    for _, depths in run_ranks(2, run_at_depth, tmp_path, CHOSEN, link, 0.5, micro_batches):
        assert depths[0] == (expected, expected)
