"""accelerate.prepare of a PipelineModule trains as deepspeed.initialize does; other models get a warning."""

import pytest
import torch
from deepspeed.pipe import PipelineModule

from tests.support.pipeline import batches, ds_config, layers, log_lines, loss_fn, train
from tests.support.ranks import run_ranks

BLOCK = {"forward": {"codec": {"name": "quantize", "bits": 4}}, "backward": {"codec": "bf16"}, "min_numel": 1}
STEPS = 3


def prepared(model, config):
    """What `accelerate launch --use_deepspeed` has a script do, with the plugin from a DeepSpeed config."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        plugin = DeepSpeedPlugin(hf_ds_config={**config, "zero_optimization": {"stage": 0}})
        return Accelerator(deepspeed_plugin=plugin).prepare(model)


def pipeline(config):
    torch.manual_seed(1)
    options = {"loss_fn": loss_fn, "partition_method": "uniform", "seed_layers": True}
    engine = prepared(PipelineModule(layers(), num_stages=2, **options), config)
    data = batches()
    return [engine.train_batch(data).item() for _ in range(STEPS)]


def test_a_pipeline_is_compressed_as_without_accelerate():
    config = ds_config(BLOCK)
    expected = [found["losses"] for found in run_ranks(2, train, 2, config, STEPS)]
    assert run_ranks(2, pipeline, config) == expected
    assert run_ranks(2, pipeline, {**config, "train_batch_size": "auto"}) == expected
    del config["train_batch_size"]
    assert run_ranks(2, pipeline, config) == expected
    assert expected != [found["losses"] for found in run_ranks(2, train, 2, ds_config(), STEPS)]


def plain(config):
    lines = log_lines()
    engine = prepared(torch.nn.Linear(4, 4), config)
    return type(engine).__name__, lines


def test_of_another_model_it_is_said_that_nothing_is_compressed():
    (first, lines), other = run_ranks(2, plain, ds_config(BLOCK, replicas=2))
    assert first == "DeepSpeedEngine" and other == (first, [])
    assert len(lines) == 1 and 'the "ds_compress" key has no effect' in lines[0]
    assert "DeepSpeedEngine is not a pipeline" in lines[0]
