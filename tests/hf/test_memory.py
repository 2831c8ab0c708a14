"""No rank holds the whole model, only its share."""

from pathlib import Path

import deepspeed
import pytest
import torch
import transformers
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from ds_compress.hf import pipeline_module
from tests.support.pipeline import ds_config
from tests.support.ranks import run_ranks

MB = 1e6
LAYERS, VOCABULARY = 8, 4096
SHAPE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
TOKENS = (2, 64)
"""Of a micro-batch."""
LORA = {"r": 8, "target_modules": "all-linear"}
BLOCK = {
    "forward": {"codec": {"name": "quantize", "bits": 4}},
    "backward": {"codec": {"name": "quantize", "bits": 8}},
}
CONSTANT = 400 * MB
"""Imports, activations of four micro-batches, packets; measured: up to 290 MB."""


def save(folder: Path) -> Path:
    """A Llama of 252 MB in fp32, 226 MB of them in layers alike, in files of 50 MB."""
    config = transformers.LlamaConfig(**SHAPE, num_attention_heads=12, max_position_embeddings=128)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="50MB")
    return folder


def status(name: str) -> float:
    """`VmRSS`, or `VmHWM`, its peak, of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measured(folder: Path, stages: int) -> dict[str, float]:
    """Return this rank's parameters and its peak memory while loading and while training, in bytes."""
    forget_peak()
    before = status("VmRSS")
    module = pipeline_module(folder, stages, LoraConfig(**LORA))
    loading = status("VmHWM") - before
    parameters = sum(p.nbytes for p in module.parameters())
    config = ds_config(BLOCK, train_micro_batch_size_per_gpu=TOKENS[0], gradient_accumulation_steps=4)
    config["train_batch_size"] = TOKENS[0] * 4
    trained = [p for p in module.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=module, config=config, model_parameters=trained)
    forget_peak()
    ids = torch.randint(VOCABULARY, TOKENS)
    for _ in range(2):
        engine.train_batch(iter([(ids, ids)] * 4))
    return {"parameters": parameters, "loading": loading, "training": status("VmHWM") - before}


@pytest.mark.slow
def test_a_rank_takes_its_share_and_a_constant(tmp_path):
    run_ranks(1, save, tmp_path)
    for stages in (1, 2, 4):
        for found in run_ranks(stages, measured, tmp_path, stages):
            assert found["parameters"] < 1.15 * 255 * MB / stages
            assert found["loading"] < found["parameters"] + 100 * MB
            assert found["training"] < found["parameters"] + CONSTANT
