"""What a stage needs is predicted from a config alone, and is what a real pipeline takes."""

import json

import pytest
import torch
from peft import LoraConfig
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from ds_compress.cli import main
from ds_compress.hf import pipeline_module
from ds_compress.hf.footprint import predict_footprint
from ds_compress.hf.quantized import TorchaoLinear
from ds_compress.hf.settings import Settings
from ds_compress.hf.transformers_pipeline import read_config
from tests.hf.test_quantized import load
from tests.support.finetuning import config, start_engine
from tests.support.ranks import run_ranks

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "num_hidden_layers": 4}
SEQUENCES, LENGTH, MICRO_BATCHES = 2, 64, 3
DS_CONFIG = {"train_micro_batch_size_per_gpu": SEQUENCES, "gradient_accumulation_steps": MICRO_BATCHES}
DS_CONFIG |= {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}}


def storage_bytes(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def measure(settings):
    """Bytes of parameters, of optimizer state, and of the peak of a step, as PyTorch accounts for them."""
    lora = settings.lora and LoraConfig(r=settings.lora.r, target_modules="all-linear")
    options = {"activation_checkpoint_interval": settings.activation_checkpoint_interval, "positions": True}
    module = pipeline_module(settings.model, settings.stages, lora, quantize=settings.quantize, **options)
    engine = start_engine(module, SEQUENCES, MICRO_BATCHES, optimizer=DS_CONFIG["optimizer"])
    ids = torch.randint(SHAPE["vocab_size"], (SEQUENCES, LENGTH))
    batches = [((ids, torch.arange(LENGTH).repeat(SEQUENCES, 1)), ids)] * MICRO_BATCHES
    engine.train_batch(iter(batches))  # makes the state of the optimizer
    tensors = [value for state in engine.optimizer.state.values() for value in state.values()]
    fixed = storage_bytes([*module.state_dict(keep_vars=True).values(), *module.parameters(), *tensors])
    frozen = [layer.weight for layer in module.modules() if isinstance(layer, TorchaoLinear)]
    fixed += storage_bytes(getattr(weight, name) for weight in frozen for name in ("qdata", "scale"))
    fixed += storage_bytes([p.grad for p in module.parameters() if p.grad is not None])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        engine.train_batch(iter(batches))
    live = peak = 0
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return fixed, peak


LARGER = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 1024}
LORA, RECOMPUTED = {"lora": {"r": 8}}, {"activation_checkpoint_interval": 1}
CASES = {"lora": LORA, "nf4": {**LORA, "quantize": "nf4"}, "int8": {**LORA, "quantize": "int8"}}
CASES |= {"torchao": LORA, "torchao, 4 bits": LORA, "all parameters": {}}
CASES |= {f"{case}, recomputed": CASES[case] | RECOMPUTED for case in ("lora", "int8")}


@pytest.mark.extended
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [SHAPE, SHAPE | LARGER], ids=["small", "larger"])
def test_memory_is_as_predicted(tmp_path, family, case, shape):
    given = config(family)
    for key, value in shape.items():
        setattr(given, key, value)
    AutoModelForCausalLM.from_config(given, dtype=torch.float32).save_pretrained(tmp_path)
    if case.startswith("torchao"):
        load(tmp_path, case).save_pretrained(tmp_path)
    options = {"sequence_length": LENGTH, **CASES[case]}
    settings = Settings(model=str(tmp_path), out="", data={"train": ""}, ds_config=DS_CONFIG, **options)
    predicted = predict_footprint(settings, read_config(tmp_path))
    for own, (fixed, peak) in zip(predicted, run_ranks(2, measure, settings)):
        assert own.total == pytest.approx(fixed + peak, rel=0.15)


SIZES_8B = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
LLAMA_8B = LlamaConfig(dtype="bfloat16", num_hidden_layers=2, **SIZES_8B)
"""With two layers of 32; the other sizes are the defaults."""


def advise(capsys, folder, *options, **changes):
    """Code, rows and error of a run of an 8B model, of which there is a config alone."""
    LLAMA_8B.save_pretrained(folder)
    settings = {"model": str(folder), "out": "out", "data": {"train": "text.jsonl"}, "lora": {"r": 16}}
    settings |= {"quantize": "nf4", "ds_config": {**DS_CONFIG, "gradient_accumulation_steps": 16}}
    (folder / "train.json").write_text(json.dumps(settings | changes))
    words = ["--finetune", str(folder / "train.json"), "--tflops", "30", "--gbps", "1", "--codec-gbps", "50"]
    code = main(["advise", *words, *options])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_run_is_advised_from_its_config(tmp_path, capsys):
    """Two layers of an 8B model: with 32, the command takes seconds more."""
    code, out, _ = advise(capsys, tmp_path, "--json", "--memory-gb", "24")
    found = json.loads(out)
    assert code == 0
    assert found["best"] and found["rows"][0]["recipe"] == "DeepSpeed"
    first, last = found["predicted"]
    embedding, layer = 128256 * 4096, 218_103_808
    for own in (first, last):
        adapters = own["trained_values"]
        assert own["trained"] == 12 * adapters and own["layers"] == 1
        assert own["parameters"] == pytest.approx(2 * embedding + 0.516 * layer + 4 * adapters, rel=0.01)
        # of rank 16 in q, o (4096 x 4096), k, v (4096 x 1024), gate, up and down (4096 x 14336)
        assert adapters == 16 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    tokens = DS_CONFIG["train_micro_batch_size_per_gpu"] * 1024
    assert first["forward_flops"] == pytest.approx(2 * tokens * layer, rel=0.1)
    assert last["forward_flops"] == pytest.approx(2 * tokens * (layer + embedding), rel=0.1)
    assert found["rows"][0]["step_s"] > 16 * 3 * last["forward_flops"] / 30e12 / 1.5


def test_what_does_not_fit_is_said_with_what_to_do(tmp_path, capsys):
    code, _, err = advise(capsys, tmp_path, "--memory-gb", "2")
    assert code == 2
    assert "--memory-gb: 2 is too little: the stages need " in err and '"quantize": "nf4"' in err
    assert advise(capsys, tmp_path, "--stages", "2")[2].endswith(
        "--stages, --shape, --micro-batches: not allowed with --finetune, whose train.json says them\n"
    )
    _, _, err = advise(capsys, tmp_path, ds_config={"gradient_accumulation_steps": 16})
    assert "train.json.ds_config.train_micro_batch_size_per_gpu: should be 1 or more; came None" in err
    assert advise(capsys, tmp_path, model="nowhere")[2].endswith(
        "nowhere: config.json is missing; should be the folder of a Transformers model, or of its "
        "config.json alone (hf download NAME config.json --local-dir FOLDER)\n"
    )
    assert main(["advise", "--gbps", "1"]) == 2
    assert "--stages: missing; give it, or --finetune" in capsys.readouterr().err
