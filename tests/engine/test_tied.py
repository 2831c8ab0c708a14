"""Gradients of tied weights between stages: exact under `none`, copies stay equal, and nothing is lost."""

import functools
import itertools
import math

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import ReduceTiedGrads
from torch import nn

import ds_compress
from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.monitor.metrics import EXCHANGE, exchange_label
from tests.replicas.test_checkpoints import resume, train_and_save
from tests.support.launch_scripts import read_run
from tests.support.pipeline import Block, batches, build, ds_config, log_lines, printed_lines
from tests.support.pipeline_kinds import fp16_on_cpu
from tests.support.ranks import run_ranks
from tests.support.replicas import KINDS as ALL_KINDS
from tests.support.replicas import WIDE, Projection, digest, tied_layers, wide_layers

KINDS = {name: options for name, options in ALL_KINDS.items() if name != "bf16 accumulation"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TIED = {"tied": {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef"}}


def tie(key, layer=Projection, width=WIDE, **options):
    return TiedLayerSpec(key, layer, width, tied_weight_attr=["weight"], **options)


def back(key, layer=Projection):
    return tie(key, layer, forward_fn=transposed)


class Frozen(Projection):
    """Its weight is not trained."""

    def __init__(self, width):
        super().__init__(width)
        self.weight.requires_grad = False


def transposed(own, x):
    return x @ own.weight


def grown(own, x):
    return x * own.weight


class Scale(nn.Module):
    """A vector, which stays exact."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return grown(self, x)


scale = functools.partial(tie, "scale", Scale, 2 * WIDE)


def wide():
    return LayerSpec(Block, 2 * WIDE)


SPECS = {
    "ends": tied_layers,
    # three copies of one weight
    "three": lambda: [tie("m"), back("m"), tie("m"), wide(), wide(), back("m")],
    # several weights, a vector among them, on different sets of stages
    "several": lambda: [
        *(tie("outer"), scale(), wide()),
        *(back("inner"), LayerSpec(Block, WIDE), tie("deep")),
        *(back("deep"), tie("inner"), wide()),
        *(scale(forward_fn=grown), wide(), back("outer")),
    ],
    # two weights that overlapping sets of stages share: the second stays exact
    "chain": lambda: [tie("a"), wide(), back("a"), tie("b"), wide(), back("b")],
    "frozen": lambda: [
        *(tie("outer"), back("outer"), LayerSpec(Block, WIDE), tie("frozen", Frozen)),
        *(back("frozen", Frozen), tie("outer"), wide(), back("outer")),
    ],
}
"""A stage without weights of its own is nothing for DeepSpeed's BF16_Optimizer, which clips by their norm."""
STAGES = {"ends": 2, "three": 3, "several": 4, "chain": 3, "frozen": 2}


CASES = [
    (kind, specs, replicas)
    for kind, (specs, replicas) in itertools.product(KINDS, [("ends", 2), *((specs, 1) for specs in SPECS)])
    if not (specs == "frozen" and "bf16" in kind)  # DeepSpeed's BF16_Optimizer fails
]


def copies(engine):
    """The tied weights of this rank, by key."""
    return {key: own["module"].weight.detach().clone() for key, own in engine.module.tied_comms.items()}


def train(specs, config, steps=4, infinite=()):
    fp16_on_cpu()
    engine = build(STAGES[specs], config, SPECS[specs]())
    dtype = next(DTYPES[name] for name in ("bf16", "fp16", "fp32") if config.get(name) or name == "fp32")
    replica = engine.grid.get_data_parallel_id()
    data, losses = batches(replica, dtype, (8, WIDE)), []
    for step in range(steps):
        broken = ((x, y * math.inf) for x, y in data)
        losses.append(engine.train_batch(broken if step in infinite else data).item())
    tied = getattr(getattr(engine, "ds_compress", None), "tied", None)
    saved = tied.saved().values() if tied else ()
    return {
        "losses": losses,
        "digest": digest(engine),
        "copies": copies(engine),
        "replica": replica,
        "sent": tied.exchange.sent if tied else None,
        "residuals": [value.abs().max().item() for own in saved for value in own.values()],
        "skipped": engine.skipped_steps,
    }


def run(specs, config, replicas=1, **options):
    return run_ranks(STAGES[specs] * replicas, functools.partial(train, **options), specs, config)


@pytest.mark.parametrize("kind, specs, replicas", CASES)
@pytest.mark.extended(keep=3)
def test_none_is_deepspeeds_all_reduce(kind, specs, replicas):
    """I1. Also in the warm-up, in which nothing is compressed yet."""
    settings = {**KINDS[kind], "replicas": replicas}
    stock = run(specs, ds_config(**settings), replicas)
    for block in ({"tied": {"codec": "none"}}, {**TIED, "warmup_steps": 9}):
        ours = run(specs, ds_config(block, **settings), replicas)
        assert [each["digest"] for each in ours] == [each["digest"] for each in stock]
        assert [each["losses"] for each in ours] == [each["losses"] for each in stock]


@pytest.mark.parametrize("kind, specs, replicas", CASES)
@pytest.mark.extended(keep=4)
def test_copies_stay_equal_and_learn_the_same(kind, specs, replicas):
    settings = {**KINDS[kind], "replicas": replicas, "gradient_clipping": 1.0}
    stock = run(specs, ds_config(**settings), replicas)
    ours = run(specs, ds_config(TIED, **settings), replicas)
    by_place = {}
    for each in ours:
        for key, weight in each["copies"].items():
            by_place.setdefault((each["replica"] if replicas == 1 else 0, key), []).append(weight)
    assert all(len(found) > 1 and all(w.equal(found[0]) for w in found) for found in by_place.values())
    assert ours[0]["digest"] != stock[0]["digest"]
    for mine, theirs in zip(ours, stock):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=0.02)
        if sent := mine["sent"]:
            itemsize = 2 if kind in ("fp16 zero 1", "bf16") else 4
            assert 7 < sent.raw_bytes / sent.wire_bytes * 4 / itemsize < 7.6, kind
    exchanging = {**STAGES, "chain": 2}[specs]
    assert sum(each["sent"] is not None for each in ours) == replicas * exchanging


def test_what_is_lost_comes_later():
    """With feedback, sums of many steps differ from exact ones by the residuals alone."""
    blocks = {}, TIED, {"tied": {"codec": {"name": "quantize", "bits": 2}}}
    exact, ours, without = (run("ends", ds_config(block), steps=30) for block in blocks)
    start = run("ends", ds_config(), steps=0)[0]["copies"]["matrix"]

    def error(found):
        moved = exact[0]["copies"]["matrix"] - start
        return ((found[0]["copies"]["matrix"] - exact[0]["copies"]["matrix"]).norm() / moved.norm()).item()

    assert error(ours) < 0.1 < error(without)


def test_a_skipped_step_leaves_residuals_as_they_were():
    config = ds_config(TIED, **KINDS["fp16 zero 1"])
    usual, skipping = run("ends", config, steps=1), run("ends", config, steps=2, infinite=[1])
    assert [each["skipped"] for each in skipping] == [1, 1]
    assert all(each["residuals"] and all(map(math.isfinite, each["residuals"])) for each in skipping)
    assert [each["residuals"] for each in skipping] == [each["residuals"] for each in usual]


def test_a_resumed_run_equals_one_that_went_on(tmp_path):
    """I5: residuals are in the checkpoint; with another codec they start from zero, said once."""
    went_on = run_ranks(2, train_and_save, tmp_path, 2, ds_config(TIED), tied_layers)
    resumed = run_ranks(2, resume, tmp_path, 2, ds_config(TIED), tied_layers)
    assert [found for found, _ in resumed] == went_on and not any(lines for _, lines in resumed)
    other = {"tied": {"codec": {"name": "quantize", "bits": 8}, "feedback": "ef"}}
    results = run_ranks(2, resume, tmp_path, 2, ds_config(other), tied_layers)
    (line,) = (line for _, own in results for line in own)
    assert "gradients of tied weights between stages start from zero: the codec" in line


def watched(specs, config):
    with printed_lines("ds_compress") as lines:
        engine = build(STAGES[specs], config, SPECS[specs]())
        data = batches(0, shape=(8, WIDE))
        for _ in range(4):
            engine.train_batch(data)
    session = engine.ds_compress
    return lines, session.monitor.summary(), session.tied.exchange.sent


original = PipelineEngine._INSTRUCTION_MAP[ReduceTiedGrads]


class Foreign(PipelineEngine):
    """An engine that reduces tied gradients by itself."""

    def reduce(self):
        original(self)

    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, ReduceTiedGrads: reduce}


def told(specs, block, foreign):
    logged = log_lines()
    with printed_lines("ds_compress") as lines:
        engine = build(2, ds_config(), specs())
        if foreign:
            engine.__class__ = Foreign
        ds_compress.attach(engine, block)
        data = batches(0, shape=(8, WIDE))
        engine.train_batch(data)
    return engine.ds_compress.tied is None, [line for line in [*logged, *lines] if "tied" in line]


@pytest.mark.parametrize(
    ("specs", "block", "foreign", "says"),
    [
        (wide_layers, TIED, False, "no trained weight"),
        (wide_layers, {"recipe": "safe", "min_numel": 0}, False, ""),
        (tied_layers, TIED, True, "the engine has a function of its own for ReduceTiedGrads"),
    ],
)
def test_what_has_no_effect_is_said(specs, block, foreign, says):
    """A recipe alone may have nothing to do."""
    for rank, (is_exact, lines) in enumerate(run_ranks(2, told, specs, block, foreign)):
        assert is_exact and len(lines) == bool(says and rank == 0)
        assert all(f"ds_compress.tied has no effect: {says}" in line for line in lines)


def test_bytes_are_said_and_written(tmp_path):
    sink = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    block = {**TIED, "monitor": {"every": 2}}
    results = run_ranks(2, watched, "ends", ds_config(block, csv_monitor=sink))
    (line,), summary, sent = results[0]
    assert line.endswith("gradients of tied weights between stages: quantize(bits=4) + ef")
    assert "gradients of tied weights between stages: " in summary and "(7." in summary
    raw = 4 * 2 * WIDE * WIDE * 4  # a ring of two sends each byte once
    assert sent.raw_bytes == raw and 7 < raw / sent.wire_bytes < 7.6
    series = read_run(tmp_path / "run").series
    for stage in (0, 1):
        labels = {name: exchange_label("tied", stage, name) for name in EXCHANGE}
        found = {name: [value for _, value in series[label]] for name, label in labels.items()}
        assert found["wire_bytes"] == [sent.wire_bytes / 2, sent.wire_bytes]
        assert all(0.8 < cosine < 1 for cosine in found["cosine"])


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"codec": "lossless"}, "codec"),
        ({"codec": {"name": "lowrank", "rank": 4}}, "codec"),
        ({"codec": "bf16", "feedback": "ef21"}, "feedback"),
        ({"codec": "bf17"}, "codec"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(options, place):
    with pytest.raises(CompressionError, match=f"ds_compress.tied.{place}: "):
        Config({"tied": options})


@pytest.mark.parametrize("key", ["tied", "replicas"])
def test_options_that_exchanged_gradients_obey_have_an_effect(key):
    """Beside messages without a codec, `warmup_steps` and the guard's limit were said to have none."""
    options = {"warmup_steps": 1} if key == "tied" else {}
    block = {key: TIED["tied"], "guard": {"gradient_error": 0.2}, **options}
    assert not any("has no effect" in note for note in Config(block).notes)
    assert any("has no effect" in note for note in Config({**block, key: {"codec": "none"}}).notes)
