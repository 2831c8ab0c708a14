"""The guard measures what compression adds to the loss, says so once, and leaves training as it is."""

import itertools
import json
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_compress.config import Config
from ds_compress.config.block import FIRST_CHECK
from ds_compress.engine.deepspeed import evaluating
from ds_compress.errors import CompressionError
from ds_compress.message.channel import evaluated as sent_as
from ds_compress.monitor.guard_limits import LOSSLESS
from ds_compress.runtime.guard import Guard
from tests.support import pipeline
from tests.support.pipeline import WIDTH, Block
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal

COARSE = {"codec": {"name": "topk", "density": 0.02}}
REUSE = {"codec": {"name": "topk", "density": 0.02, "indices": "reuse"}}
NOISE = {"codec": {"name": "quantize", "bits": 1}}
FINE = {"codec": {"name": "quantize", "bits": 8}}
STOCHASTIC = {"codec": {"name": "quantize", "bits": 2, "rounding": "stochastic", "hadamard": True}}


def block(forward, backward=None, **guard):
    return {"forward": forward, "backward": backward or {"codec": "bf16"}, "min_numel": 0, "guard": guard}


def trained(
    stages, config, steps=3, specs=None, evaluate=False, engine_of=None, watched=True, data=None, options=None
):
    """Losses of training, what the guard measured and said, and what is left on the engine."""
    logged, events, logger = [], [], logging.getLogger("ds_compress")
    logger.setLevel(logging.INFO)
    logger.addFilter(lambda record: logged.append((record.levelname, record.getMessage())) or True)
    engine = pipeline.build(stages, config, specs, **options or {})
    if engine_of:
        engine_of(engine)
    engine.monitor = SimpleNamespace(enabled=watched, write_events=events.extend, tb_monitor=None)
    dtype = next(engine.module.parameters()).dtype
    data = data or pipeline.batches(engine.grid.get_data_parallel_id(), dtype)
    losses, error, evaluated = [], "", {}
    try:
        losses = [engine.train_batch(data).item() for _ in range(steps)]
    except CompressionError as stopped:
        error = str(stopped)
    if evaluate:
        last = next(itertools.islice(pipeline.batches(), steps * engine.micro_batches - 1, None))
        for mode in ("compressed", "uncompressed"):
            with sent_as(engine.ds_compress.stage.boundaries, mode):
                evaluated[mode] = engine.eval_batch(itertools.repeat(last), num_micro_batches=1).item()
    return {
        "losses": losses,
        "weights": pipeline.weights(engine),
        "cost": [value for name, value, _ in events if name == "Train/Compression/loss_cost"],
        "logged": [(level, line) for level, line in logged if line.startswith("ds_compress: ")],
        "error": error,
        "warned": [line for _, line in logged if line.startswith("boundary ")],
        "written": len(events),
        "evaluated": evaluated,
        "total": getattr(engine, "total_loss", None),
        "random": torch.get_rng_state().sum().item(),
        "modes": [module.training for module in engine.module.modules()],
    }


class Noisy(nn.Module):
    """Draws random numbers wherever it runs, and has a part that stays in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.frozen = nn.BatchNorm1d(8).eval()

    def forward(self, x):
        return self.block(x) + 1e-3 * torch.randn_like(x)


SETTINGS = {
    "topk": (COARSE, REUSE),
    "stochastic": ({"codec": {"name": "quantize", "bits": 3, "rounding": "stochastic"}}, FINE),
    "feedback back": (FINE, {**COARSE, "feedback": "ef"}),
    "mirrored back": (FINE, {**FINE, "feedback": "ef21"}),
    "state": ({"codec": {"name": "lowrank", "rank": 2}}, FINE),
    "unbiased back": (FINE, {**STOCHASTIC, "feedback": "ef"}),
}


@pytest.mark.parametrize(
    "name, specs, changes",
    [
        *((name, None, {}) for name in SETTINGS),
        ("topk", [LayerSpec(Noisy)] * 4, {}),  # layers that draw at every pass would train on other noise
        ("unbiased back", None, {"bf16": {"enabled": True}}),
    ],
    ids=[*SETTINGS, "noisy layers", "bf16"],
)
@pytest.mark.extended(keep=1)
def test_training_goes_on_as_without_it(name, specs, changes):
    configs = [pipeline.ds_config(block(*SETTINGS[name], every=every), **changes) for every in (1, 0)]
    ranks = run_ranks(2, lambda: [trained(2, config, 3, specs) for config in configs])
    for one, other in ranks:
        assert all(one[key] == other[key] for key in ("losses", "random", "modes"))
        assert pipeline.same_weights(one["weights"], other["weights"])
        assert (one["total"] is None) == (other["total"] is None)
        assert one["total"] is None or torch.equal(one["total"], other["total"])
    (guarded, plain), _ = ranks
    assert len(guarded["cost"]) == 3 and not plain["cost"]


@pytest.mark.parametrize("stages, replicas, link", [(3, 1, {"depth": 2}), (2, 2, {"mode": "blocking"})])
@pytest.mark.extended
def test_every_layout_of_ranks(stages, replicas, link):
    blocks = [{**block(COARSE, REUSE, every=every), "link": link} for every in (2, 0)]
    configs = [pipeline.ds_config(each, replicas=replicas) for each in blocks]
    guarded, plain = (run_ranks(stages * replicas, trained, stages, config, 4) for config in configs)
    assert [rank["losses"] for rank in guarded] == [rank["losses"] for rank in plain]
    assert len(guarded[0]["cost"]) == 2
    assert not any(rank["cost"] for rank in guarded[1:])


@pytest.mark.parametrize("forward", [COARSE, {"codec": {"name": "quantize", "bits": 2}}])
@pytest.mark.extended(keep=1)
def test_the_cost_is_that_of_two_evaluations(forward):
    first = run_ranks(2, trained, 2, pipeline.ds_config(block(forward, every=3)), 3, None, True)[0]
    (cost,) = first["cost"]
    assert cost == first["evaluated"]["compressed"] - first["evaluated"]["uncompressed"]
    assert cost != 0


def test_what_hurts_is_said_once_by_one_rank():
    ranks = run_ranks(2, trained, 2, pipeline.ds_config(block(NOISE, every=1)))
    ((level, line),), nothing = (rank["logged"] for rank in ranks)
    assert level == "WARNING" and nothing == []
    assert "after step 1 a loss of" in line and "ds_compress.guard.loss: 2%): it hurts" in line
    assert "quantize(bits=1)" in line
    assert len(ranks[0]["losses"]) == 3


def test_what_does_not_hurt_is_not_mentioned():
    ranks = run_ranks(2, trained, 2, pipeline.ds_config(block(FINE, FINE, every=1)))
    assert [rank["logged"] for rank in ranks] == [[], []]
    assert len(ranks[0]["cost"]) == 3


TOPK, EF_TOPK = COARSE["codec"], {"codec": {"name": "topk", "density": 0.1}, "feedback": "ef"}
COLLAPSING = {
    "1 bit": {"codec": {"name": "quantize", "bits": 1}},
    "2 bits": {"codec": {"name": "quantize", "bits": 2}},
    "TopK": COARSE,
    "TopK with error feedback": EF_TOPK,
    "TopK with EF21": {**COARSE, "feedback": "ef21"},
}
"""Forward settings (8 bits back) whose loss, after 150 steps of Adam, was over 1.5 times that of none."""


@pytest.mark.parametrize("name", COLLAPSING)
@pytest.mark.extended(keep=1)
def test_a_setting_that_collapses_is_stopped(name):
    """Two, TopK with a feedback, ran on with a warning: "stop" acted only at limits that the block set."""
    config = pipeline.ds_config(block(COLLAPSING[name], FINE, every=5, action="stop"))
    (line,) = {rank["error"] for rank in run_ranks(2, trained, 2, config, 5)}
    assert "guard: after step 5 " in line


BOTH_WAYS = {
    "TopK of 30 %": ({"codec": {"name": "topk", "density": 0.3}}, "guard.gradient_error: too much together"),
    "2 bits": ({"codec": {"name": "quantize", "bits": 2}}, "token error"),
    "8 bits": (FINE, ""),
    "entropy of 4 bits": ({"codec": {"name": "entropy", "bits": 4}}, ""),
}


@pytest.mark.parametrize("codec, why", BOTH_WAYS.values(), ids=BOTH_WAYS)
@pytest.mark.extended(keep=1)
def test_harm_in_both_directions_ends_a_run(codec, why):
    """TopK had cost 10 % of the loss by step 30 and went on: loss, activations and gradients are each within
    their limits at the first check. So did 2 bits."""
    config = pipeline.ds_config(block(codec, codec, action="stop"))
    (line,) = {rank["error"] for rank in run_ranks(2, trained, 2, config, FIRST_CHECK)}
    assert why in line and bool(line) == bool(why), line


@pytest.mark.parametrize("backward, ends", [(STOCHASTIC, False), (COARSE, True)])
@pytest.mark.extended(keep=1)
def test_gradients_are_judged_by_what_does_not_average_out(backward, ends):
    """Unbiased ones were warned of for their error of 0.7; biased ones trained on at any error."""
    config = pipeline.ds_config(block(FINE, backward, every=5, action="stop"), replicas=2)
    ranks = run_ranks(4, trained, 2, config, 5)
    (line,) = {rank["error"] for rank in ranks}
    assert ("boundary 0, backward: an error of accumulated gradients of" in line) == ends
    assert ranks[0]["warned"] == [] or ends


class Shift(nn.Module):
    """Adds what it has learned."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + self.bias


def judge_many_boundaries():
    config = Config(block(COARSE, action="stop", every=1))
    judged = {(number, "forward"): LOSSLESS._replace(error=0.6 + number / 200) for number in range(63)}
    engine = SimpleNamespace(device=torch.device("cpu"), global_steps=5)
    return refusal(Guard(config, 0, 63)._check_limits, engine, judged)


def test_a_stop_names_the_worst_of_many_boundaries():
    """It listed each channel: 4,700 characters for activations of 64 stages."""
    (line,) = run_ranks(1, judge_many_boundaries)
    assert "guard: after step 5 boundaries 0-62, forward, at worst: a token error of 0.91 (" in line


def near_zero(codec, floor, unit):
    """Train a model that learns to hand on its input; `unit`: factor of its loss."""
    settings = block({"codec": codec}, {"codec": codec}, every=10, action="stop", **floor)
    changes = {"optimizer": {"type": "SGD", "params": {"lr": 1.0 / unit}}}
    data, specs = ((x, x) for x, _ in pipeline.batches()), [Shift() for _ in range(4)]
    scaled = {"loss_fn": lambda output, target: unit * nn.functional.mse_loss(output, target)}
    return trained(2, pipeline.ds_config(settings, **changes), 30, specs, data=data, options=scaled)


@pytest.mark.parametrize("unit", [1.0, 1e6])
@pytest.mark.parametrize("codec", ["bf16", {"name": "quantize", "bits": 8}])
@pytest.mark.extended
def test_a_run_near_zero_loss_is_not_stopped(codec, unit):
    """Of a loss of 1e-5 any rounding is more than 5 %: such runs ended, later in another unit."""
    floors = {}, {"loss_floor": 0.0}
    (found, stopped), _ = run_ranks(2, lambda: [near_zero(codec, floor, unit) for floor in floors])
    first, loss, cost = found["losses"][0], found["losses"][-1], found["cost"][-1]
    assert found["error"] == "" and 0 < loss < 1e-3 * first and cost > 0.05 * (loss - cost)
    assert "it hurts" in stopped["error"]


def test_a_resumed_run_knows_its_first_loss():
    guard, resumed = (Guard(Config({"forward": FINE}), 0, 1) for _ in range(2))
    for loss in (math.nan, -8.0, 1.0):
        guard._note_loss(torch.tensor(loss))
    resumed.resume(None, json.loads(json.dumps(guard.state())), {})
    assert resumed.state() == guard.state() == {"first_loss": 8.0}
    for damaged in ("x", math.inf):
        resumed.resume(None, {"first_loss": damaged}, {})
        assert resumed.state() == {"first_loss": None}


def test_errors_are_looked_at_where_nothing_is_written():
    """Who has no monitor hears of a message that is lost, too: once for each channel."""
    config = pipeline.ds_config(block(FINE, COARSE, every=2))
    first, other = run_ranks(2, trained, 2, config, 4, None, False, None, False)
    assert first["written"] == 0 and other["warned"] == []
    (line,) = first["warned"]
    assert line.startswith("boundary 0, backward: topk(density=0.02) has an error of accumulated gradients")


def own_loading(engine):
    """As projects do that feed the pipeline by hand."""
    loads = engine._INSTRUCTION_MAP

    def load(self, buffer_id):
        x, target = self.own
        if self.is_first_stage():
            self.pipe_buffers["inputs"][buffer_id] = x.clone()
        self.pipe_buffers["labels"][buffer_id] = target

    engine.own = next(pipeline.batches())
    (kind,) = (kind for kind in loads if kind.__name__ == "LoadMicroBatch")
    loads[kind] = load


def test_a_program_that_loads_by_itself_is_left_alone():
    """There is no micro-batch to look at on the stages that load one: on all ranks the guard is off."""
    ranks = run_ranks(2, trained, 2, pipeline.ds_config(block(COARSE, every=1)), 3, None, False, own_loading)
    assert all(len(rank["losses"]) == 3 and not rank["cost"] for rank in ranks)
    assert [level for level, _ in ranks[0]["logged"]] == ["INFO"]
    assert "loads its micro-batches by itself" in ranks[0]["logged"][0][1]


def due(settings, steps=2000):
    guard = Guard(Config({"min_numel": 0, **settings}), 0, 2)
    found = []
    for step in range(1, steps + 1):
        guard.batch(SimpleNamespace(global_steps=step - 1), 1, dict, None, None).__enter__()
        if guard.due:
            found.append(step)
    return found


def test_when_it_looks():
    assert due({"forward": COARSE}, 450) == [FIRST_CHECK, 200, 400]
    assert due({"forward": COARSE, "guard": {"every": 10}}, 30) == [10, 20, 25, 30]
    assert due({"forward": COARSE, "warmup_steps": 100}, 350) == [100 + FIRST_CHECK, 300]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"forward": {"codec": "lossless"}},
        {"forward": COARSE, "guard": {"every": 0}},
        {"backward": COARSE},
        {"forward": {**FINE, "feedback": "ef"}},
        {"forward": {**FINE, "feedback": {"name": "aqsgd"}}},
        {"forward": COARSE, "boundaries": {"1": {"forward": {"codec": "bf16", "feedback": "ef21"}}}},
    ],
)
def test_where_there_is_nothing_to_look_at(settings):
    assert due(settings) == []


class Merges(nn.Linear):
    """As adapters do that are merged for evaluation, and taken out again for training."""

    def train(self, mode=True):
        raise AssertionError("it would change the weights")


def test_a_look_evaluates_without_what_modules_do_for_evaluation():
    """A checkpoint saved right after a look had the adapters in the weights, and beside them."""
    module = nn.Sequential(nn.Dropout(), Merges(2, 2))
    module.micro_offset = 0
    module[0].training = False
    with evaluating(SimpleNamespace(module=module)):
        assert not any(part.training for part in module.modules())
    assert [part.training for part in module.modules()] == [True, False, True]


class Brittle(nn.Module):
    """Evaluates to nan what has few different values, as messages of few bits have."""

    def forward(self, x):
        return x if self.training or x.unique().numel() > x.numel() / 2 else x * float("nan")


def test_a_loss_that_is_no_number_with_compression_stops():
    """No comparison with nan is true, so nothing followed but a warning."""
    config = pipeline.ds_config(block({"codec": {"name": "quantize", "bits": 4}}, every=1, action="stop"))
    specs = [LayerSpec(layer) for layer in (Block, Block, Brittle, Block)]
    ranks = run_ranks(2, trained, 2, config, 2, specs)
    assert all(" is nan with compression " in rank["error"] for rank in ranks)


@pytest.mark.parametrize(
    "compressed, meaning",
    [
        (1.97, "too much together): the model has come to need it"),
        (2.03, "too much together): it hurts"),
        (1.8, "ds_compress.guard.loss: 2%): the model has come to need it"),
    ],
)
def test_a_loss_that_is_lower_with_compression_does_not_hurt(compressed, meaning):
    """Where it was too much only together with errors of messages, the line said "-1.5% ...: it hurts"."""
    engine = SimpleNamespace(global_steps=25)
    guard = Guard(Config({"forward": COARSE, "guard": {"action": "stop"}}), 0, 1)
    guard._worst = LOSSLESS._replace(error=0.45)
    assert meaning in refusal(guard._judge, engine, compressed, 2.0)
    guard._worst = LOSSLESS._replace(error=0.9)  # above its own limit, for which there is another warning
    guard._judge(engine, 2.0, 2.0)
    guard._judge(engine, 0.0, 0.0)
    assert "(all of it; ds_compress.guard.loss: 2%): it hurts" in refusal(guard._judge, engine, 0.1, 0.0)


def judged(config, folder, saved=0):
    """What the guard judges each step by, after `saved` steps of a run that saves each of its steps."""
    engine, found = pipeline.build(2, config), []
    quality = engine.ds_compress.monitor.message_quality
    pipeline.train_on(engine, 4, folder, saved, prepare=lambda step: found.append(quality()))
    return [*found[1:], quality()]


@pytest.mark.parametrize("saved", [1, 3])
@pytest.mark.extended(keep=1)
def test_a_resumed_run_is_judged_by_the_same_measurements(saved, tmp_path):
    """It was judged by another micro-batch, and forgot which residual had lasted."""
    limits = {"residual": 1e6, "error": 9.0, "gradient_error": 1e6, "loss": 1e6}
    config = pipeline.ds_config(block(NOISE, EF_TOPK, every=1, action="stop", **limits))
    whole, resumed = run_ranks(2, judged, config, tmp_path), run_ranks(2, judged, config, tmp_path, saved)
    assert resumed == [rank[saved:] for rank in whole]
    assert len({quality[0, "forward"].error for quality in whole[0]}) == 4
    assert any(quality[0, "backward"].residual > 0.5 for quality in whole[1])
