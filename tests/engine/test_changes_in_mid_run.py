"""What DeepSpeed or a program changes while it trains is not kept from the start."""

import deepspeed
import pytest
import torch

import ds_compress  # noqa: F401  (hooks the engine)
from tests.support.pipeline import MICRO_BATCH, WIDTH, batches, build, ds_config
from tests.support.pipeline_kinds import fp16_on_cpu
from tests.support.ranks import run_ranks

SAMPLES = 64
BF16 = {"forward": {"codec": "bf16"}, "backward": {"codec": "bf16"}, "min_numel": 0}


def compressed_steps(sizes):
    """The steps, with so many micro-batches each, in which this rank compressed what it sent."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, WIDTH, generator=generator)
    data = torch.utils.data.TensorDataset(x, torch.sin(3 * x))
    engine = build(2, ds_config({**BF16, "warmup_epochs": 2}), training_data=data)
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
    "sizes, first",
    [((4,) * 10, 8), ((4,) * 4 + (8,) * 4, 6), ((8,) * 2 + (4,) * 6, 6), ((4,) * 3 + (16,) * 4, 5)],
    ids=["same", "larger", "smaller", "not whole"],
)
@pytest.mark.extended(keep=1)
def test_warmup_epochs_are_epochs_of_the_batch_size_in_force(sizes, first):
    """Once they were so many steps of the first batch size."""
    for steps in run_ranks(2, compressed_steps, sizes):
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
