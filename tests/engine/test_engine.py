"""The mixin on real ranks: bytes, evaluation, announcements, and the ways other projects use the engine."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule

from ds_compress.cli import main
from ds_compress.config import Config
from tests.support import programs
from tests.support.engine_subclasses import Preference
from tests.support.pipeline import (
    MICRO_BATCH,
    MICRO_BATCHES,
    WIDTH,
    alike,
    batches,
    build,
    ds_config,
    packets_handed_over,
    printed_lines,
    reusing,
    train,
    weights,
)
from tests.support.pipeline_kinds import fp16_on_cpu
from tests.support.pipeline_kinds import train as train_kind
from tests.support.programs import program, with_schedule
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal
from tests.transport.streams import install

TOPK = reusing(0.1, min_numel=0)
LINKS = ["blocking", "eager"]


def count_bytes(block, stages):
    """Number and bytes of uint8 tensors given to torch.distributed, and those that the channels report."""
    engine = build(stages, ds_config(block))
    handed_over, data = packets_handed_over(), batches()
    for _ in range(3):
        engine.train_batch(data)
    engine.eval_batch(data)
    reported = [channel.sent for channel in engine.ds_compress.stage.sending]
    messages, nbytes = zip(*((sent.messages, sent.wire_bytes) for sent in reported))
    return (len(handed_over), sum(handed_over)), (sum(messages), sum(nbytes))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("codec", ["none", "bf16", "topk"])
def test_reported_bytes_are_those_handed_to_the_transport(codec, link, tmp_path, capsys):
    """`ds-compress check` says them before."""
    block = alike("bf16", forward={"codec": codec}, min_numel=0, link={"mode": link})
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(ds_config(block)))
    assert main(["check", str(file), "--stages", "3", "--shape", f"{MICRO_BATCH},8,{WIDTH}", "--json"]) == 0
    trained, evaluated = 3 * MICRO_BATCHES, MICRO_BATCHES
    expected = {rank: [0, 0] for rank in range(3)}
    for row in json.loads(capsys.readouterr().out):
        is_forward = row["direction"] == "forward"
        sender, messages = (row["boundary"] + (not is_forward), trained + evaluated * is_forward)
        expected[sender][0] += messages
        expected[sender][1] += messages * row["wire_bytes"]
    for rank, (handed_over, reported) in enumerate(run_ranks(3, count_bytes, block, 3)):
        assert handed_over == reported == tuple(expected[rank])


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("how", ["compressed", "uncompressed"])
def test_evaluation_leaves_training_as_it_was(how, link):
    block = {**TOPK, "eval": how, "link": {"mode": link}}
    both, trained = run_ranks(2, lambda: [evaluated(block, evaluations) for evaluations in (2, 0)])[0]
    assert both["losses"] == trained["losses"] and len(both["evaluated"]) == 6


def losses_after_evaluation(block, mode):
    """Losses of an engine that begins with an evaluation in a mode of torch."""
    engine = build(2, ds_config(block))
    with mode():
        first = engine.eval_batch(batches()).item()
    data = batches()
    return [first, *(engine.train_batch(data).item() for _ in range(2))]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.extended(keep=1)
def test_training_goes_on_after_an_evaluation_in_inference_mode(link):
    """Training sends the packets of an evaluation again, and raised that it cannot write to them."""
    block = alike({"name": "quantize", "bits": 4}, min_numel=0, link={"mode": link})
    modes = torch.inference_mode, torch.no_grad
    inference, usual = run_ranks(2, lambda: [losses_after_evaluation(block, mode) for mode in modes])[0]
    assert inference == usual


class KeepsModes(PipelineModule):
    """Trains without dropout: `train()` changes nothing, and the first stage is in evaluation mode."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        super().train(self.stage_id > 0)

    def train(self, mode=True):
        return self


def test_a_module_that_overrides_train_is_trained():
    """The stages did not agree on whether they train. Where all were in evaluation mode, no feedback, policy,
    monitor or guard took part, without a warning."""
    config = ds_config(alike({"name": "topk", "density": 0.2}, "ef", min_numel=0))
    classes = PipelineModule, KeepsModes
    usual, kept = run_ranks(2, lambda: [train(2, config, module_class=each)["losses"] for each in classes])[0]
    assert kept == usual


def two_engines():
    """A second engine with the block switched off, as a reference model, is not touched by the first."""
    compressed, stock = build(2, ds_config(TOPK)), build(2, ds_config({**TOPK, "enabled": False}))
    data = batches()
    alternating = [engine.train_batch(data).item() for engine in (compressed, stock, compressed, stock)]
    return alternating, type(compressed).__name__, type(stock).__name__


def test_engines_with_the_block_on_and_off_in_one_process():
    losses, *classes = run_ranks(2, two_engines)[0]
    assert classes == ["CompressedPipelineEngine", "PipelineEngine"]
    assert len(set(losses)) == 4


def test_warmup_epochs_need_an_epoch():
    for line in run_ranks(2, refusal, build, 2, ds_config({"warmup_epochs": 1})):
        assert line.startswith("ds_compress.warmup_epochs: 1 is not allowed where the length")


LINES = [
    (program(), {}, "link eager;"),
    (program(), {"link": {"mode": "blocking"}}, "link blocking;"),
    (program(module={"dynamic_shape": True}), {}, "link eager;"),
    (program(Preference), {}, "but every message in the order of the schedule;"),
    (program(with_schedule(programs.OnceOnly)), {}, "but every message in the order of the schedule;"),
    (program(), {"link": {"depth": 2}}, "link eager, depth 2;"),
    (program(), {"link": {"depth": 9}}, "link eager, depth 3 instead of 9 (too few micro-batches);"),
    (program(module={"dynamic_shape": True}), {"link": {"depth": 2}}, "link eager, depth 2;"),
    (program(module={"dynamic_shape": True}), {"link": {"depth": "auto"}}, "auto, 1 because of dynamic"),
    (
        program(Preference),
        {"link": {"depth": 2}},
        "depth 2 has no effect on this schedule, but every",
    ),
]


def active_lines(cases, over_nccl=False):
    """Return the start-up lines of each program on this rank."""
    if over_nccl:
        install(staged=False)
    found = []
    for kind, block, _ in cases:
        with printed_lines("active") as lines:
            train_kind(replace(kind, steps=1), block)
        found.append(lines)
    return found


def test_the_line():
    first, other = run_ranks(2, active_lines, LINES)
    assert not any(other)
    for (line,), (_, block, expected) in zip(first, LINES, strict=True):
        assert expected in line, block


@pytest.mark.extended
def test_the_line_over_nccl_says_what_later_steps_do():
    """It is printed after the first one, which is in the order of the schedule whatever the next ones are."""
    cases = [case for case in LINES if not case[0].module]
    for (line,), (_, block, expected) in zip(run_ranks(2, active_lines, cases, True)[0], cases, strict=True):
        assert expected in line, block


def compressed_steps(sizes, samples):
    """The steps, with so many micro-batches each, in which this rank compressed what it sent."""
    x = torch.randn(samples, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, torch.sin(3 * x))
    engine = build(2, ds_config(alike("bf16", min_numel=0, warmup_epochs=2)), training_data=data)
    (channel,) = engine.ds_compress.stage.sending
    steps = []
    for step, micro_batches in enumerate(sizes):
        engine.set_train_batch_size(MICRO_BATCH * micro_batches)
        before = channel.sent.raw_bytes - channel.sent.wire_bytes
        engine.train_batch()
        if channel.sent.raw_bytes - channel.sent.wire_bytes > before:
            steps.append(step)
    return steps


@pytest.mark.parametrize(
    "sizes, samples, first",
    [
        ((4,) * 5, 24, 4),  # 16 samples a step: the second of an epoch is partly of the next one
        ((4,) * 10, 64, 8),
        ((4,) * 4 + (8,) * 4, 64, 6),
        ((8,) * 2 + (4,) * 6, 64, 6),
        ((4,) * 3 + (16,) * 4, 64, 5),
    ],
    ids=["not whole", "same", "larger", "smaller", "not whole later"],
)
@pytest.mark.extended(keep=1)
def test_warmup_epochs_are_epochs_of_the_batch_size_in_force(sizes, samples, first):
    """Once they were so many steps of the first batch size."""
    for steps in run_ranks(2, compressed_steps, sizes, samples):
        assert steps == list(range(first, len(sizes)))


def evaluate_before_there_is_an_optimizer(block):
    fp16_on_cpu()
    config = ds_config(block, fp16={"enabled": True, "initial_scale_power": 8})
    del config["optimizer"]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine = build(2, config)
    engine.optimizer = None
    return engine.eval_batch(batches(dtype=torch.float16)).item()


def test_fp16_evaluation_needs_no_optimizer():
    """Some programs configure it late."""
    stock = run_ranks(2, evaluate_before_there_is_an_optimizer, None)
    assert run_ranks(2, evaluate_before_there_is_an_optimizer, {}) == stock


TENTH = {"name": "topk", "density": 0.1}
TENTH_BLOCK = {"forward": {"codec": TENTH}, "backward": {"codec": "bf16"}, "min_numel": 0}


@pytest.mark.parametrize(
    "feedback, expected",
    [("none", "compressed"), ("ef", "compressed"), ("ef21", "uncompressed"), ("aqsgd", "uncompressed")],
)
def test_changes_are_not_evaluated_as_if_they_were_messages(feedback, expected):
    """A model trained on changes was evaluated with TopK of whole messages, which it had never seen."""
    forward = {"codec": TENTH, "feedback": feedback}
    for way in (None, "both"):
        assert Config({"forward": forward, "eval": way}).eval == expected
    for way in ("compressed", "uncompressed"):
        assert Config({"forward": forward, "eval": way}).eval == way
    assert Config({"backward": {"codec": TENTH, "feedback": "ef21"}}).eval == "compressed"
    assert Config({"boundaries": {"1": {"forward": forward}}}).eval == expected


def evaluated(block, evaluations=2):
    """Losses of three steps and of evaluations after each, and what was written and printed."""
    engine, events = build(2, ds_config(block)), []
    engine.monitor = SimpleNamespace(enabled=True, write_events=events.extend, tb_monitor=None)
    data, held_out = batches(), batches(replica=7)
    losses, found = [], []
    with printed_lines("evaluation after step") as lines:
        for _ in range(3):
            losses.append(engine.train_batch(data).item())
            found += [engine.eval_batch(held_out).item() for _ in range(evaluations)]
    values = {}
    for name, value, _ in events:
        values.setdefault(name.removeprefix("Train/"), []).append(value)
    return {
        "losses": losses,
        "evaluated": found,
        "weights": [value for value in weights(engine).values() if torch.is_tensor(value)],
        "values": values,
        "lines": lines,
        "mode": engine.module.training,
        "next": next(held_out)[0].sum().item(),
    }


@pytest.mark.parametrize("feedback", ["none", "ef21"])
@pytest.mark.extended(keep=1)
def test_both_losses_of_one_model(feedback):
    """Each is what the setting of its name gives; training, and the data, go on as with either of them."""
    block = {**TENTH_BLOCK, "forward": {"codec": TENTH, "feedback": feedback}}
    ways = ("compressed", "uncompressed")
    ranks = run_ranks(2, lambda: [evaluated({**block, "eval": way}) for way in (*ways, "both")])
    *alone, both = zip(*ranks)
    alone = dict(zip(ways, alone))
    default = Config(block).eval
    for ours, theirs in zip(both, alone[default]):
        assert all(ours[key] == theirs[key] for key in ("losses", "evaluated", "next"))
        assert not ours["mode"] and not theirs["mode"]
        assert all(map(torch.equal, ours["weights"], theirs["weights"]))
    values = both[0]["values"]
    for way in ways:
        expected = pytest.approx(alone[way][0]["evaluated"], rel=1e-6)
        assert values[f"Compression/eval_loss_{way}"] == expected
    assert values["Samples/eval_loss"] == values[f"Compression/eval_loss_{default}"]
    compressed, plain = (values[f"Compression/eval_loss_{way}"][0] for way in ways)
    assert both[0]["lines"][0] == (
        f"ds_compress: evaluation after step 1: loss {compressed:.4f} compressed, {plain:.4f} uncompressed"
    )
    assert compressed != plain and len(both[0]["lines"]) == 6 and not both[1]["lines"]


def evaluated_on_arrays(block):
    """The loss of an evaluation whose batches are arrays of numpy until the engine has loaded them."""
    engine = build(2, ds_config(block))
    engine.set_batch_fn(lambda pair: tuple(map(torch.from_numpy, pair)))
    return engine.eval_batch(torch.stack(pair).numpy() for pair in batches()).item()


def test_both_losses_of_batches_that_are_arrays():
    """Each batch was compared with what ends the data, and numpy compares the values of an array."""
    default, both = ({**TENTH_BLOCK, "eval": how} for how in (Config(TENTH_BLOCK).eval, "both"))
    assert run_ranks(2, evaluated_on_arrays, both) == run_ranks(2, evaluated_on_arrays, default)


def evaluated_on_dictionaries(block):
    """The loss of an evaluation whose `batch_fn` takes the tensors out of each batch, and of a step after it.

    Data and `batch_fn` draw from torch's own generator.
    """
    engine = build(2, ds_config(block))
    engine.set_batch_fn(lambda batch: (batch.pop("x") + torch.rand(1), batch.pop("target")))
    data = ({"x": x, "target": x.sin()} for x in iter(lambda: torch.randn(4, 8, WIDTH), None))
    torch.manual_seed(2)
    return engine.eval_batch(data).item(), engine.train_batch(data).item()


@pytest.mark.extended
def test_both_losses_of_batches_that_batch_fn_empties():
    """`batch_fn` got each batch twice, and failed where it takes out of a dictionary what it returns.

    Random numbers that were drawn for the evaluation came again in the training after it.
    """
    default, both = ({**TENTH_BLOCK, "eval": how} for how in (Config(TENTH_BLOCK).eval, "both"))
    assert run_ranks(2, evaluated_on_dictionaries, both) == run_ranks(2, evaluated_on_dictionaries, default)


def asked_otherwise(block, options):
    engine = build(2, ds_config(block))
    batch = itertools.repeat(next(batches()))
    with printed_lines("evaluation after step") as lines:
        engine.eval_batch(batch, **options)
    return len(lines)


@pytest.mark.parametrize(
    "options, lines",
    [({"num_micro_batches": 2, "bcast_loss": False}, 1), ({"reduce_output": None, "bcast_loss": False}, 0)],
)
def test_what_is_no_mean_loss_is_given_once(options, lines):
    assert run_ranks(2, asked_otherwise, {**TENTH_BLOCK, "eval": "both"}, options) == [lines, 0]
