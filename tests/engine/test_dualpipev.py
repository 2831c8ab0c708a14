"""DualPipeV: two stages a rank, two boundaries between neighbours, in opposite directions."""

import functools
import itertools

import pytest
import torch
from deepspeed.pipe import LayerSpec

from ds_compress.config import Config
from tests.runtime.test_guard import trained
from tests.support import pipeline
from tests.support.calls import wrapped
from tests.support.pipeline import WIDTH, Block, Causal
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal
from tests.support.replicas import tied_layers

dualpipev = pytest.importorskip("deepspeed.runtime.pipe.dualpipev", reason="this DeepSpeed has no DualPipeV")

MODULE = {"module_class": dualpipev.DualPipeVModule}
MICRO_BATCHES = 8
STEPS = 3
TOPK = pipeline.reusing(0.2, min_numel=0)
QUANTIZE = {
    "forward": {"codec": {"name": "quantize", "bits": 4}},
    "backward": {"codec": {"name": "quantize", "rounding": "stochastic"}},
    "boundaries": {"1": {"forward": {"codec": "bf16"}}},
    "min_numel": 0,
}


config = functools.partial(pipeline.ds_config, micro_batches=MICRO_BATCHES)


def build(ranks, block, specs=None, **changes):
    return pipeline.build(ranks, config(block, **changes), specs or pipeline.layers(4 * ranks), **MODULE)


def train(ranks, blocks, specs=None, shape=(8, WIDTH)):
    """By block: class of the engine, an evaluation and the loss of each step, weights, what was sent."""
    results = []
    for block in blocks:
        handed_over = count_packets()
        engine = build(ranks, block, specs)
        data, held_out = pipeline.batches(shape=shape), pipeline.batches(replica=7, shape=shape)
        losses = [(engine.eval_batch(held_out).item(), engine.train_batch(data).item()) for _ in range(STEPS)]
        sending = engine.ds_compress.stage.sending if block is not None else ()
        sent = {(each.boundary.number, each.direction): each.sent.wire_bytes for each in sending}
        results.append((type(engine).__name__, losses, pipeline.weights(engine), sent, sum(handed_over)))
    return results


def count_packets():
    """Sizes of the uint8 tensors that are given to torch from now on to be sent."""
    sizes, dist = [], torch.distributed

    def count(operations):
        sent = [operation.tensor for operation in operations if operation.op is dist.isend]
        sizes.extend(tensor.numel() for tensor in sent if tensor.dtype == torch.uint8)

    dist.batch_isend_irecv = wrapped(dist.batch_isend_irecv, count)
    return sizes


def train_simulated(ranks, block, specs=None, shape=(8, WIDTH)):
    """Losses of the same model in one process; nothing crosses at the turn-around between its two halves."""
    cuts = [2 * cut for cut in range(1, 2 * ranks) if cut != ranks]
    model = pipeline.simulated(specs or pipeline.layers(4 * ranks), config(block), cuts)
    data, held_out = pipeline.batches(shape=shape), pipeline.batches(replica=7, shape=shape)
    losses = []
    for _ in range(STEPS):
        evaluated = pipeline.evaluate(model, held_out, MICRO_BATCHES)
        losses.append((evaluated, pipeline.train_step(model, data, micro_batches=MICRO_BATCHES)))
    return losses


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.extended(keep=1)
def test_none_equals_stock_and_compressed_equals_simulate(ranks):
    everything = run_ranks(ranks, train, ranks, [None, {"min_numel": 0}, TOPK, QUANTIZE])
    for stock, none, *_ in everything:
        assert (stock[0], none[0]) == ("DualPipeVEngine", "CompressedDualPipeVEngine")
        assert none[1] == stock[1]
        assert pipeline.same_weights(none[2], stock[2])
    stock, _, topk, quantize = (losses for _, losses, *_ in everything[0])
    assert topk[-1] < topk[0] and quantize[-1] < quantize[0]
    assert stock != topk != quantize != stock
    assert topk == train_simulated(ranks, TOPK)
    assert quantize == train_simulated(ranks, QUANTIZE)
    for rank, runs in enumerate(everything):
        for _, _, _, sent, handed_over in runs[1:]:
            last = 2 * ranks - 2
            after = [(rank, "forward"), (last - 1 - rank, "backward")] * (rank < ranks - 1)
            before = [(rank - 1, "backward"), (last - rank, "forward")] * (rank > 0)
            assert sorted(sent) == sorted(after + before)
            assert sum(sent.values()) == handed_over > 0


LENGTH = 16
CAST = pipeline.alike("bf16")


def test_masks_and_tables_are_sent_uncompressed_and_hidden_states_are_not():
    """Of a message of several float tensors nothing was compressed, while `simulate` compressed the hidden
    state."""
    hidden, mask, table = (4 * LENGTH * size for size in (WIDTH, LENGTH, WIDTH // Causal.HEADS))
    message = 2 * hidden + 4 * (mask + 2 * table) + 32
    block = {**CAST, "min_numel": 64}
    losses = train_simulated(2, block, Causal.layers(8), (LENGTH, WIDTH))
    for ((_, found, _, sent, _),) in run_ranks(2, train, 2, [block], Causal.layers(8), (LENGTH, WIDTH)):
        assert found == losses
        for (_, direction), nbytes in sent.items():
            assert nbytes == (2 if direction == "forward" else 1) * STEPS * MICRO_BATCHES * message


REFUSED = {
    # boundaries are counted without the turn-around
    'boundaries.2: there is no such boundary; allowed: "0", "1" [rank 0]': {"boundaries": {"2": CAST}},
    # messages of unknown size
    "forward: DualPipeV posts receives": {"forward": {"codec": "bf16", "feedback": "aqsgd"}},
    "backward: DualPipeV posts receives": {"backward": {"codec": "lossless"}},
}


def refusals():
    return [refusal(build, 2, block) for block in REFUSED.values()]


def test_what_it_cannot_do_is_refused():
    for lines in run_ranks(2, refusals):
        for line, said in zip(lines, REFUSED):
            assert line.startswith(f"ds_compress.{said}")


EF21 = pipeline.alike("topk", "ef21", min_numel=0)


def trained_on(folder, start):
    return pipeline.train_on(build(2, EF21), 4, folder, start)["losses"]


def test_checkpoints_hold_both_stages(tmp_path):
    whole, resumed = (run_ranks(2, trained_on, tmp_path, start) for start in (0, 2))
    assert resumed == [losses[2:] for losses in whole]


def measured(folder):
    engine = build(2, {**TOPK, "monitor": {"every": 1}}, csv_monitor={"enabled": True, "output_path": folder})
    data = pipeline.batches()
    for _ in range(2):
        engine.train_batch(data)
    return engine.ds_compress.monitor.summary()


def test_the_monitor_knows_both_boundaries(tmp_path):
    summary, nothing = run_ranks(2, measured, str(tmp_path))
    assert nothing == "" and "saved" in summary
    share = int(summary.split("a stage waited ")[1].split("%")[0])
    assert 0 <= share <= 100
    written = {path.name for path in tmp_path.rglob("*wait_ms.csv")}
    channels = itertools.product((0, 1), ("forward", "backward"))
    assert written == {f"Train_Compression_boundary_{n}_{way}_wait_ms.csv" for n, way in channels}


def test_it_keeps_its_schedule_at_any_depth_and_says_so():
    from ds_compress.engine.dualpipev import DualPipeVPath

    block = Config({"link": {"depth": 2}})
    assert DualPipeVPath.check(block, 3) == 4
    (note,) = block.notes
    assert note == "ds_compress.link.depth: 2 has no effect: DualPipeV has a schedule of its own"


NOISE = {"forward": {"codec": {"name": "quantize", "bits": 1}}, "min_numel": 0}
LOST = {"backward": {"codec": {"name": "topk", "density": 0.02}}, "min_numel": 0}


def guarded(block):
    return trained(2, config(block), options=MODULE)


@pytest.mark.extended
def test_the_guard_measures_what_compression_costs_and_leaves_training_as_it_is():
    """Two passes of all micro-batches of the step: its schedule takes no fewer than four."""
    looked, plain = (run_ranks(2, guarded, {**TOPK, "guard": {"every": each}}) for each in (1, 0))
    assert len(looked[0]["cost"]) == 3 and all(looked[0]["cost"]) and not looked[1]["cost"]
    for one, other in zip(looked, plain):
        assert one["losses"] == other["losses"] and not other["cost"]
        assert pipeline.same_weights(one["weights"], other["weights"])


@pytest.mark.parametrize(
    "block, limits, output",
    [
        (NOISE, {"loss": 0.01, "error": 9.0}, "a loss of"),
        (LOST, {"gradient_error": 0.5}, "boundary 1, backward: an error of accumulated gradients"),
    ],
    ids=["loss", "error"],
)
def test_the_guard_stops_all_ranks(block, limits, output):
    """Its limits had no effect, whatever "action" said."""
    ranks = run_ranks(2, guarded, {**block, "guard": {"every": 2, "action": "stop", **limits}})
    (line,) = {rank["error"] for rank in ranks}
    assert line.startswith(f"ds_compress: guard: after step 2 {output}")


def train_tied(block, are_neighbours):
    """Losses, weights, and the line at the start; the tied layers are at the ends, or in stages 0 and 1."""
    width = 4 * WIDTH
    first, *_, last = specs = tied_layers(width)
    if are_neighbours:
        specs = [first, last, *(LayerSpec(Block, width) for _ in range(2))]
    with pipeline.printed_lines("ds_compress") as lines:
        engine = build(2, block, specs)
        data = pipeline.batches(shape=(8, width))
        losses = [engine.train_batch(data).item() for _ in range(2)]
    return losses, pipeline.weights(engine), lines


def test_copies_on_two_ranks_exchange_their_gradients():
    """The line at the start promised it, and none was compressed."""
    tied = {"tied": {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef"}}
    ours, stock = run_ranks(2, train_tied, tied, True), run_ranks(2, train_tied, None, True)
    copies = [value for _, own, _ in ours for name, value in own.items() if "tied_modules" in name]
    assert len(copies) == 2 and torch.equal(*copies)
    (line,), nothing = (lines for *_, lines in ours)
    assert "active, link of DualPipeV; per message: boundar" in line, "it promises no link mode"
    assert "gradients of tied weights between stages: quantize" in line and not nothing
    assert not pipeline.same_weights(ours[0][1], stock[0][1])
    assert ours[0][0] == pytest.approx(stock[0][0], rel=0.02)


@pytest.mark.extended
def test_tied_weights_are_on_one_rank_and_sent_nowhere():
    """The first and the last stage are on rank 0, which has one copy."""
    tied = {"tied": {"codec": {"name": "quantize", "bits": 2}}}
    ranks = run_ranks(2, train_tied, tied, False), run_ranks(2, train_tied, None, False)
    for (losses, ours, lines), (stock, theirs, _) in zip(*ranks):
        assert losses == stock and pipeline.same_weights(ours, theirs)
        assert not any("tied" in line for line in lines)
