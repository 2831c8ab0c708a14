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
from ds_compress.runtime import stage_profile
from ds_compress.runtime.stage_profile import StageProfiler
from ds_compress.transport.probe import LinkMeasurement
from tests.replicas.test_checkpoints import resume, train_and_save
from tests.support.pipeline import Block, batches, build, ds_config, log_lines, printed_lines
from tests.support.ranks import run_ranks
from tests.support.replicas import KINDS as ALL_KINDS
from tests.support.replicas import WIDE, Projection, tied_layers, train_replicas, train_steps, wide_layers

KINDS = {name: options for name, options in ALL_KINDS.items() if name != "bf16 accumulation"}
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


def run(specs, config, replicas=1, **options):
    train = functools.partial(train_replicas, specs=SPECS[specs], **options)
    return run_ranks(STAGES[specs] * replicas, train, STAGES[specs], config)


def copies(result):
    """The tied weights of this rank, by name."""
    return {name: weight for name, weight in result["weights"].items() if "tied_modules" in name}


@pytest.mark.parametrize("kind, specs, replicas", CASES)
@pytest.mark.extended(keep=1)
def test_none_is_deepspeeds_all_reduce(kind, specs, replicas):
    """I1. Also in the warm-up, in which nothing is compressed yet."""
    settings = {**KINDS[kind], "replicas": replicas}
    stock = run(specs, ds_config(**settings), replicas)
    for block in ({"tied": {"codec": "none"}}, {**TIED, "warmup_steps": 9}):
        ours = run(specs, ds_config(block, **settings), replicas)
        assert [each["digests"] for each in ours] == [each["digests"] for each in stock]
        assert [each["losses"] for each in ours] == [each["losses"] for each in stock]


@pytest.mark.extended
def test_recipe_auto_leaves_them_exact_until_its_choice():
    """They were compressed from the first step on, so that steps before the choice were not DeepSpeed's, and
    the block that auto prints, whose warm-up ends with the choice, trained another model."""
    stock, auto, pasted = (
        [each["digests"] for each in run("ends", ds_config(block), steps=4)]
        for block in (None, {"recipe": "auto", "quality": "lossless", **TIED}, {**TIED, "warmup_steps": 3})
    )
    assert auto == pasted and all(each[:3] == own[:3] for each, own in zip(auto, stock)) and auto != stock


def choose_beside_a_large_weight():
    """Settings that auto chooses on a slow link where the sum of exact gradients takes most of a step."""
    stage_profile.probe = lambda *_: LinkMeasurement(incoming=1e4, latency=0.01)
    measure = StageProfiler.row
    StageProfiler.row = lambda own: {**(row := measure(own)), "step": 1e3, "tied": 1e3 * bool(row["tied"])}
    block = {"recipe": "auto", "quality": "balanced", "min_numel": 0, "guard": {"every": 0}}
    engine = build(2, ds_config(block), tied_layers())
    data = batches(shape=(8, WIDE))
    for _ in range(3):
        engine.train_batch(data)
    return engine.ds_compress.config.adopted


def test_recipe_auto_counts_them_as_they_will_be_sent():
    """What their exact sum takes hid what messages take: these stayed uncompressed beside an embedding."""
    first, second = run_ranks(2, choose_beside_a_large_weight)
    assert first == second and "none" not in [each["codec"] for each in first["0"].values()]


@pytest.mark.parametrize("kind, specs, replicas", CASES)
@pytest.mark.extended(keep=1)
def test_copies_stay_equal_and_learn_the_same(kind, specs, replicas):
    settings = {**KINDS[kind], "replicas": replicas, "gradient_clipping": 1.0}
    stock = run(specs, ds_config(**settings), replicas)
    ours = run(specs, ds_config(TIED, **settings), replicas)
    by_place = {}
    for each in ours:
        for key, weight in copies(each).items():
            by_place.setdefault((each["replica"] if replicas == 1 else 0, key), []).append(weight)
    assert all(len(found) > 1 and all(w.equal(found[0]) for w in found) for found in by_place.values())
    assert ours[0]["digests"] != stock[0]["digests"]
    for mine, theirs in zip(ours, stock):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=0.02)
        if mine["sent"]:
            itemsize = 2 if kind in ("fp16 zero 1", "bf16") else 4
            assert 7 < mine["raw"] / mine["sent"] * 4 / itemsize < 7.6, kind
    exchanging = {**STAGES, "chain": 2}[specs]
    assert sum(each["sent"] > 0 for each in ours) == replicas * exchanging


def test_a_skipped_step_leaves_residuals_as_they_were():
    config = ds_config(TIED, **KINDS["fp16 zero 1"])
    usual, skipping = run("ends", config, steps=1), run("ends", config, steps=2, overflows=[1])
    assert [each["skipped"] for each in skipping] == [[0, 1]] * 2
    assert all(each["residuals"] and all(math.isfinite(r) for _, r in each["residuals"]) for each in skipping)
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
        train_steps(engine, 1)
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
