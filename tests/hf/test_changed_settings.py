"""A run that goes on with another train.json follows it, and says what has changed."""

import pytest

from ds_compress.hf.settings import read_settings
from ds_compress.hf.training import FinetuneRun
from tests.support.calls import wrapped
from tests.support.finetuning import DS_CONFIG, change, prepare
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal


def start(path):
    """The learning rate of each step, and what the rank said."""
    run, rates, said = FinetuneRun(read_settings(path)), [], []
    engine = run.engine
    engine.train_batch = wrapped(engine.train_batch, before=lambda _: rates.extend(engine.get_lr()))
    run._say = said.append
    run.run()
    return rates, said


def with_rate(lr):
    return {**DS_CONFIG, "optimizer": {"type": "Adam", "params": {"lr": lr, "torch_adam": True}}}


LINEAR = {"name": "linear"}
LR = "ds_config.optimizer.params.lr"


@pytest.mark.parametrize(
    ("first", "then", "expected", "named"),
    [
        ({}, {"lr_schedule": LINEAR}, [0.01, 0.005], "lr_schedule"),
        ({"lr_schedule": LINEAR}, {"lr_schedule": None}, [0.02, 0.02], "lr_schedule"),
        ({"lr_schedule": LINEAR}, {"ds_config": with_rate(0.2)}, [0.1, 0.05], LR),
        ({}, {"ds_config": with_rate(0.1)}, [0.1, 0.1], LR),
    ],
    ids=["schedule added", "schedule removed", "rate of a schedule", "constant rate"],
)
@pytest.mark.extended(keep=1)
def test_the_learning_rate_is_that_of_train_json(tmp_path, first, then, expected, named):
    """An added schedule ended in an AttributeError. After one that was removed the rate stayed at its last
    value, which is 0 after the last step. Another rate had no effect."""
    path = prepare(tmp_path, stages=1, eval_sequences=1, steps=2, ds_config=with_rate(0.02), **first)
    run_ranks(1, start, path)
    ((rates, said),) = run_ranks(1, start, change(path, steps=4, **then))
    assert rates == pytest.approx(expected)
    assert said[0] == f"goes on from step 2 (changed since its last start: {named}, steps)"


def refused(path):
    return refusal(start, path)


def test_what_a_checkpoint_does_not_fit_is_named(tmp_path):
    """SGD ended in its first step, in `KeyError: 'momentum'`, and amsgrad in `KeyError: 'max_exp_avg_sq'`;
    DeepSpeed's reasons do not tell the cause."""
    path = prepare(tmp_path, stages=1, eval_sequences=1, steps=2, ds_config=with_rate(0.02))
    run_ranks(1, start, path)
    other = {**DS_CONFIG, "optimizer": {"type": "SGD", "params": {"lr": 0.02}}}
    (said,) = run_ranks(1, refused, change(path, ds_config=other))
    assert said.startswith("train.json.ds_config.optimizer.type: 'SGD' is not allowed: step2 in ")
    assert said.endswith(" has the state of 'Adam'; use that, or choose a new folder")
    other = {**DS_CONFIG, "optimizer": {"type": "adam", "params": {"torch_adam": True, "amsgrad": True}}}
    (said,) = run_ranks(1, refused, change(path, ds_config=other))
    assert said.startswith("train.json.ds_config.optimizer.params.amsgrad: True is not allowed: step2 in ")
    other = {**with_rate(0.02), "zero_optimization": {"stage": 1}}
    (said,) = run_ranks(1, refused, change(path, ds_config=other))
    cause = "(changed since its last start: ds_config.zero_optimization)"
    assert said.startswith(f"train.json.out: step2 cannot be loaded {cause}: ")


@pytest.mark.parametrize("lora", [None, {"r": 8}], ids=["all parameters", "adapters"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.extended(keep=1)
def test_other_layers_of_stages_are_refused_on_every_rank(tmp_path, lora, dtype):
    """Of all parameters in bf16, the stage that got fewer layers said "The size of tensor a (10848) must
    match the size of tensor b (26336)", and the other one waited until that had ended."""
    path = prepare(tmp_path, eval_sequences=1, steps=1, stages=[1, 2], dtype=dtype, lora=lora, layers=3)
    run_ranks(2, start, path)
    said = run_ranks(2, refused, change(path, stages=[2, 1], steps=2), timeout=60)
    assert said == 2 * [
        f"train.json.stages: [2, 1] is not allowed: step1 in {tmp_path / 'out'} is of stages with [1, 2] "
        "layers; use [1, 2], or choose a new folder"
    ]
