"""Pipelines over 4-bit and 8-bit weights train as one process does, resume, and merge into whole weights."""

import json
from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig
from transformers.quantizers import quantizer_bnb_4bit

from ds_compress.hf import pipeline_module
from ds_compress.hf.merge import merge
from ds_compress.hf.quantized import dequantize
from ds_compress.hf.settings import read_settings
from ds_compress.hf.training import FinetuneRun
from tests.support import finetuning
from tests.support.finetuning import (
    batch,
    load_model,
    losses,
    part_loaders,
    perplexity,
    prepare,
    run_model,
    save,
)
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal

STEPS, RATE = 3, 0.5
LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "lora_alpha": 8}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
KINDS = {"nf4": NF4, "int8": {"load_in_8bit": True}}
"""Options of bitsandbytes."""
CASES = [("Llama", "nf4", False), ("Qwen3", "nf4", True), ("GPT-2", "nf4", False)]
CASES += [("Qwen2, tied", "int8", False), ("Mixtral", "int8", True)]
CASES += [("Llama", "torchao", True), ("Qwen2, tied", "torchao", True), ("Llama", "torchao, 4 bits", True)]


def quantization(kind):
    if kind.startswith("torchao"):
        torchao = pytest.importorskip("torchao.quantization")
        if kind == "torchao":
            return TorchAoConfig(torchao.Int8WeightOnlyConfig())
        groups = torchao.PerGroup(16)
        return TorchAoConfig(torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups))
    return BitsAndBytesConfig(**KINDS[kind])


def load(folder, kind=None):
    """A quantized checkpoint, or a whole one to quantize, in one process as Transformers loads it."""
    options = {"quantization_config": quantization(kind)} if kind else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    for module in model.modules():  # in evaluation, some CPUs would compute in bf16
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def train(folder, quantize, out):
    """Losses, the adapters before the first step, and the loss after the last one, on this rank."""
    module = pipeline_module(folder, 2, LoraConfig(**LORA), quantize=quantize)
    trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    before = {name.split("model.", 1)[1]: p.detach().clone() for name, p in trained}
    engine = finetuning.start_engine(module, 2, 1, optimizer={"type": "SGD", "params": {"lr": RATE}})
    found = [engine.train_batch(iter([batch(step)])).item() for step in range(STEPS)]
    engine.save_checkpoint(str(out), exclude_frozen_parameters=True)
    return found, before, engine.eval_batch(iter([batch(STEPS)])).item()


def train_in_one_process(model, adapters):
    """Losses, and what the model computes after the last step."""
    model = inject_adapter_in_model(LoraConfig(**LORA), model.requires_grad_(False)).train()
    assert not model.load_state_dict(adapters, strict=False).unexpected_keys
    found = []
    for step in range(STEPS):
        result = run_model(model, *batch(step))
        found.append(result["loss"].item())
        for name, parameter in model.named_parameters():
            if name in result:
                parameter.data -= RATE * result[name]
    return found, run_model(model.eval(), *batch(STEPS))


@pytest.mark.parametrize(("family", "kind", "is_stored"), CASES)
@pytest.mark.extended(keep=1)
def test_two_stages_train_and_merge_as_one_process(tmp_path, family, kind, is_stored):
    folder, out, merged = save(family, tmp_path / "model"), tmp_path / "out", tmp_path / "merged"
    # In evaluation, int8 rounds activations too, so whole weights compute something else
    tolerance = 0.05 if kind == "int8" else 1e-5
    if is_stored:
        load(folder, kind).save_pretrained(folder)
        kind = None
    ranks = run_ranks(2, train, folder, kind, out)
    adapters = {name: value for _, before, _ in ranks for name, value in before.items()}
    expected, end = train_in_one_process(load(folder, kind), adapters)
    for found, _, last in ranks:
        assert found == pytest.approx(expected, rel=1e-5)
        assert last == pytest.approx(end["loss"].item(), rel=1e-5)
    for file in out.glob("*/layer_*"):  # a run's checkpoint holds what it trained
        assert all(".lora_" in name for name in torch.load(file))

    settings = {"model": str(folder), "out": "", "data": {"train": ""}, "ds_config": {}, "quantize": kind}
    settings["lora"] = {"r": LORA["r"], "alpha": LORA["lora_alpha"]}
    (out / "train.json").write_text(json.dumps(settings))
    merge(out, merged)
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    adapted = PeftModel.from_pretrained(load(folder, kind), str(merged / "adapter")).eval()
    for model, allowed in ((adapted, 1e-5), (load_model(merged), tolerance)):
        with torch.no_grad():
            logits = model(batch(STEPS)[0], use_cache=False).logits
        assert (logits - end["logits"]).norm() <= allowed * end["logits"].norm()


def run(path, **changes):
    """Losses and perplexity of a whole run of this rank."""
    done = FinetuneRun(read_settings(path).model_copy(update=changes))
    done.run()
    return losses(path.parent / "out"), done.perplexity()


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.extended
def test_a_run_is_resumed_and_merged(tmp_path, family):
    path = prepare(tmp_path / "whole", family, quantize="nf4", eval_sequences=4, steps=4)
    (found, after), _ = run_ranks(2, run, path)
    stopped = prepare(tmp_path / "stopped", family, quantize="nf4", eval_sequences=4, steps=4)
    run_ranks(2, partial(run, steps=2), stopped)
    resumed, _ = run_ranks(2, run, stopped)
    assert resumed == (found, after)
    merge(path.parent / "out", tmp_path / "merged")
    assert perplexity(path, load_model(tmp_path / "merged")) == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize("quantize", KINDS)
def test_a_merged_model_has_the_values_that_the_adapters_were_trained_over(tmp_path, quantize):
    """`merge` quantized the checkpoint's fp32 values, the run those in its bf16: weights differed by 3 %."""
    still = {**finetuning.DS_CONFIG, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    sizes = {"steps": 1, "eval_sequences": 2, "stages": 1}
    path = prepare(tmp_path, quantize=quantize, dtype="bf16", ds_config=still, **sizes)
    run_ranks(1, run, path)
    merge(tmp_path / "out", tmp_path / "merged")
    merged = load_model(tmp_path / "merged").state_dict()
    files = [load_file(file) for file in (tmp_path / "merged").glob("*.safetensors")]
    assert {tensor.dtype for tensors in files for tensor in tensors.values()} == {torch.float32}
    lora = read_settings(path).lora.to_peft("")
    parts = part_loaders(tmp_path / "model", lora, quantize, torch.bfloat16)
    for name, module in parts[2]().model.named_modules():
        if name.endswith(".base_layer"):
            weight = merged[f"{name.removesuffix('.base_layer')}.weight"]
            assert torch.equal(weight, dequantize(module)), name


def refused(folder, lora=None, quantize=None):
    return refusal(part_loaders, folder, lora, quantize)


def test_what_cannot_be_is_refused(tmp_path, monkeypatch):
    folder, lora = save("Llama", tmp_path), LoraConfig(**LORA)
    assert refused(folder, None, "nf4").startswith("train.json.lora: missing, but the weights are quantized")
    load(folder, "nf4").save_pretrained(folder)
    assert refused(folder, lora, "nf4").startswith("train.json.quantize: 'nf4' is not allowed: the")
    monkeypatch.setattr(quantizer_bnb_4bit, "is_bitsandbytes_available", lambda: False)
    assert refused(folder, lora).endswith('; pip install "ds_compress[quantized]"')
    int4 = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}
    for stored, key, allowed in (
        ({"quant_method": "gptq"}, "\"quant_method\": 'gptq'", "'bitsandbytes' or 'torchao'"),
        (int4, "\"quant_type\": 'Int4WeightOnlyConfig'", "'Int8WeightOnlyConfig' or 'IntxWeightOnlyConfig'"),
    ):
        finetuning.change(folder / "config.json", quantization_config=stored)
        assert refused(folder, lora) == (
            f"config.json: quantization_config: {key} is not supported in a pipeline; should be {allowed}, "
            'or a checkpoint with whole weights and "quantize": "nf4" in train.json'
        )
