"""Pipelines train Transformers models as one process does, and what they trained is merged again."""

import json
import unittest.mock
from functools import partial

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from peft import LoraConfig, inject_adapter_in_model
from safetensors import safe_open

from ds_compress.hf import pipeline_module
from ds_compress.hf.merge import merge
from ds_compress.hf.transformers_pipeline import load_config
from tests.support.finetuning import batch, load_model, prepare, run_model, save
from tests.support.pipeline import ds_config
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal

MICRO_BATCHES = 2
FEW = ("GPT-2", "Qwen2, tied", "OPT", "Mixtral")
LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "lora_dropout": 0.0}


class Recording(torch.optim.SGD):
    """Keeps the gradients of the step."""

    def step(self, *args, **kwargs):
        self.gradients = [p.grad.clone() for group in self.param_groups for p in group["params"]]
        return super().step(*args, **kwargs)


def one_step(folders, stages, lora, runs=None, **options):
    """Loss, gradients and adapters of this rank, by checkpoint; runs on every rank."""
    own = [runs and runs / str(number) for number in range(len(folders))]
    return [_one_step(folder, stages, lora, run, **options) for folder, run in zip(folders, own)]


def _one_step(folder, stages, lora, run, **options):
    module = pipeline_module(folder, stages, LoraConfig(**LORA) if lora else None, **options).eval()
    named = {name.split("model.", 1)[1]: p for name, p in module.named_parameters() if p.requires_grad}
    sizes = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 2 * MICRO_BATCHES}
    config = ds_config(gradient_accumulation_steps=MICRO_BATCHES, **sizes)
    del config["optimizer"]
    optimizer = Recording(named.values(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    values = {name: p.detach().clone() for name, p in named.items()}
    engine.module.train(False)
    batches = [batch(number) for number in range(MICRO_BATCHES)]
    loss = engine.train_batch(iter(batches)).item()
    again = engine.eval_batch(iter(batches), num_micro_batches=MICRO_BATCHES).item()
    if run:
        engine.save_checkpoint(str(run), exclude_frozen_parameters=lora)
    return loss, again, dict(zip(named, optimizer.gradients)), values if lora else {}


def expected_step(folder, adapters):
    model = load_model(folder)
    if adapters:
        model = inject_adapter_in_model(LoraConfig(**LORA), model.requires_grad_(False))
        model.load_state_dict(adapters, strict=False)
    results = [run_model(model, *batch(number)) for number in range(MICRO_BATCHES)]
    names = results[0].keys() - {"logits", "loss"}
    gradients = {name: sum(result[name] for result in results) / MICRO_BATCHES for name in names}
    for name, parameter in model.named_parameters():
        if name in gradients:
            parameter.data -= 0.1 * gradients[name]
    after = [run_model(model, *batch(number)) for number in range(MICRO_BATCHES)]
    loss, again = (sum(each["loss"].item() for each in own) / MICRO_BATCHES for own in (results, after))
    return loss, again, gradients


def is_equal(gradient, expected, scale):
    return (gradient - expected).norm() <= 1e-5 * (expected.norm() + 1e-3 * scale)


def is_alike(gradient, expected, scale):
    is_same_way = torch.cosine_similarity(gradient.flatten(), expected.flatten(), dim=0) > 0.95
    return gradient.dtype == torch.float32 and is_same_way


def check(folders, stages, lora, compare=is_equal, rel=1e-5, **options):
    ranks = run_ranks(stages, partial(one_step, **options), folders, stages, lora)
    for folder, *found in zip(folders, *ranks):
        adapters = {name: value for _, _, _, values in found for name, value in values.items()}
        assert {value.dtype for value in adapters.values()} == ({torch.float32} if lora else set())
        *losses, gradients = expected_step(folder, adapters)
        scale = max(gradient.norm() for gradient in gradients.values())
        for *ours, of_rank, _ in found:
            assert ours == pytest.approx(losses, rel=rel), folder
            for name, gradient in of_rank.items():
                assert compare(gradient, gradients[name], scale), (folder, name)
        assert set().union(*(of_rank for _, _, of_rank, _ in found)) == gradients.keys()


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return [save(family, tmp_path_factory.mktemp("model")) for family in FEW]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("stages", [2, 1, 4])
@pytest.mark.extended(keep=1)
def test_a_step_is_that_of_one_process(few, stages, lora):
    check(few, stages, lora)


@pytest.mark.extended
def test_activations_computed_again_change_nothing(few):
    check(few[:2], 2, False, activation_checkpoint_interval=1)
    check(few[:2], 2, True, activation_checkpoint_interval=2)


def test_adapters_are_in_fp32_over_weights_in_bf16(few):
    check(few[1:2], 2, True, is_alike, 0.01, dtype=torch.bfloat16)


MERGED = ("GPT-2", "GPT-NeoX", "Mixtral", "Qwen2, tied")


def names(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", MERGED)
@pytest.mark.extended(keep=1)
def test_a_merged_model_computes_what_the_pipeline_did(family, lora, tmp_path):
    folder, run = save(family, tmp_path / "model"), tmp_path / "runs" / "0"
    ((_, after, *_),), _ = run_ranks(2, one_step, [folder], 2, lora, run.parent)
    settings = {"model": str(folder), "out": "", "data": {"train": ""}, "ds_config": {}}
    if lora:
        settings["lora"] = {"r": LORA["r"], "target_modules": LORA["target_modules"], "alpha": 8}
    (run / "train.json").write_text(json.dumps(settings))
    merge(run, tmp_path / "merged")
    assert names(tmp_path / "merged") == names(folder)
    written = sorted(file.name for file in (tmp_path / "merged").glob("*") if "-of-" in file.name)
    # a layer without weights once left a gap in the numbers, as if a file were missing
    assert written == [f"model-{n + 1:05}-of-{len(written):05}.safetensors" for n in range(len(written))]
    model = load_model(tmp_path / "merged")
    losses = [run_model(model, *batch(number))["loss"].item() for number in range(MICRO_BATCHES)]
    assert sum(losses) / MICRO_BATCHES == pytest.approx(after, rel=1e-5)
    before = load_model(folder).state_dict()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_runs_that_are_not_complete_are_refused(tmp_path):
    assert "train.json: No such file" in refusal(merge, tmp_path, tmp_path / "merged")
    settings = {"model": str(tmp_path), "out": "", "data": {"train": ""}, "ds_config": {}}
    (tmp_path / "train.json").write_text(json.dumps(settings))
    assert "no complete checkpoint: latest is missing" in refusal(merge, tmp_path, tmp_path / "merged")


def test_layers_of_stages_are_counted_as_they_were_given(tmp_path):
    """Recipe `auto` proposes such counts: without embedding and head, also if these are tied."""
    for family in ("Llama", "Qwen2, tied"):
        folder = save(family, tmp_path / family)
        stages = [1, load_config(folder).num_hidden_layers - 1]
        assert run_ranks(2, lambda: pipeline_module(folder, stages).stage_layers) == [stages] * 2


def tied_copies(folder):
    """Whether a model is built without a broadcast, and both copies are equal, also after one has changed."""
    sent, broadcast = [], dist.broadcast
    with unittest.mock.patch.object(dist, "broadcast", lambda *a, **k: sent.append(a) or broadcast(*a, **k)):
        module = pipeline_module(folder, 2)
        at_the_start = len(sent)
        weight = module.tied_modules["embedding"].weight.detach()
        first = weight.sum().item()
        weight += dist.get_rank()
        module._synchronize_tied_weights()
    return at_the_start, len(sent), first, weight.sum().item()


def test_a_tied_embedding_is_sent_only_if_it_differs(tmp_path):
    """DeepSpeed broadcast it at each start: 113 MB for SmolLM2, twelve minutes at 1.2 Mbit/s."""
    ours, theirs = run_ranks(2, tied_copies, save("Qwen2, tied", tmp_path))
    assert ours == theirs
    at_the_start, sent, first, last = ours
    assert at_the_start == 0 and sent == 1 and first == last


def refused_topology(folder):
    topology = PipeDataParallelTopology(num_pp=1, num_dp=1)
    return refusal(pipeline_module, folder, 2, topology=topology)


def test_a_topology_of_other_stages(tmp_path):
    """The stages that it lacks were left out: the model was trained without its last layers and its head."""
    (line,) = run_ranks(1, refused_topology, prepare(tmp_path).parent / "model")
    assert line == "stages: 2 is not allowed: should be 1, as in the topology"
