"""How layers are shared out, where their weights are read, and where adapters go."""

import contextlib
import itertools
import re
from collections.abc import Sequence

import bitsandbytes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig

from ds_compress.hf import weights
from ds_compress.hf.part import check_lora
from ds_compress.hf.transformers_pipeline import assign_layers
from tests.support.calls import wrapped
from tests.support.finetuning import part_loaders, save
from tests.support.refusals import refusal


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.data())
def test_the_costliest_stage_costs_as_little_as_it_can(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    counts = assign_layers(costs, stages)
    assert len(counts) == stages and min(counts) >= 1 and sum(counts) == len(costs)
    assert worst(costs, counts) == min(worst(costs, other) for other in cuts(len(costs), stages))


def worst(costs: Sequence[int], counts: Sequence[int]) -> int:
    left = iter(costs)
    return max(sum(itertools.islice(left, count)) for count in counts)


def cuts(layers: int, stages: int):
    for ends in itertools.combinations(range(1, layers), stages - 1):
        yield [end - start for start, end in itertools.pairwise([0, *ends, layers])]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (5, "stages: 5 is not allowed: the model has 4 layers, and each stage needs one"),
        (0, "stages: 0 is not allowed"),
        ([2, 1], "stages: [2, 1] is not allowed: should be the layers of each stage, 1 at least, 4 together"),
        ([4, 0], "stages: [4, 0] is not allowed"),
    ],
)
def test_stages_that_cannot_be_are_refused(stages, expected):
    assert refusal(assign_layers, [1.0] * 4, stages).startswith(expected)


def test_sharded_checkpoints_are_read(tmp_path):
    save("Llama", tmp_path, max_shard_size="20KB")
    assert len(weights.list_files(tmp_path)) > 2
    assert not any(parameter.is_meta for parameter in part_loaders(tmp_path)[3]().parameters())
    weights.list_files(tmp_path)[1].unlink()
    missing = "model-00002-of-.* is missing; should be the folder of a"
    assert re.search(missing, refusal(weights.list_files, tmp_path))


class Slice:
    """A tensor on disk that tells when it is read."""

    def __init__(self, name, stored, read):
        self._name, self._stored, self._read = name, stored, read

    def __getitem__(self, index):
        self._read.append(self._name)
        return self._stored[index]

    def __getattr__(self, name):
        return getattr(self._stored, name)


@pytest.fixture
def read(monkeypatch):
    """Names of the tensors that are read from now on."""
    slices, read = weights.open_slices, []

    @contextlib.contextmanager
    def watched(checkpoint):
        with slices(checkpoint) as stored:
            yield {name: Slice(name, each, read) for name, each in stored.items()}

    monkeypatch.setattr(weights, "open_slices", watched)
    return read


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_a_layer_reads_its_own_tensors_and_no_others(tmp_path, read, family):
    save(family, tmp_path)
    part_loaders(tmp_path)[3]()
    assert {name.startswith("model.layers.1.") for name in read} == {True}


def test_a_tensor_is_quantized_before_the_next_one_is_read(tmp_path, monkeypatch, read):
    """So a rank never holds more than one of them whole."""
    save("Llama", tmp_path)
    own = bitsandbytes.functional
    quantize = wrapped(own.quantize_4bit, before=lambda *args, **options: read.append("quantized"))
    monkeypatch.setattr(own, "quantize_4bit", quantize)
    lora = LoraConfig(r=4, target_modules="all-linear")
    part = part_loaders(tmp_path, lora, "nf4")[3]()
    linear = [event for event in read if event == "quantized" or "proj" in event]
    assert [event == "quantized" for event in linear] == 7 * [False, True]
    frozen = [p for name, p in part.named_parameters() if "base_layer" in name]
    assert {p.dtype for p in frozen} == {torch.uint8}


def test_weights_that_are_not_there_are_named(tmp_path):
    save("Llama", tmp_path / "one")
    save("Qwen2", tmp_path / "two")
    (tmp_path / "one" / "config.json").write_text((tmp_path / "two" / "config.json").read_text())
    missing = "3 parameters, .*k_proj.bias, .*: the checkpoint does not have"
    assert re.search(missing, refusal(part_loaders(tmp_path / "one")[2]))


def test_adapters_that_fit_nothing_are_refused(tmp_path):
    save("Llama", tmp_path)
    said = refusal(part_loaders, tmp_path, LoraConfig(target_modules=["query"]))
    assert re.match("lora.target_modules: layer 0: .*; it has: down_proj, gate", said)
    said = refusal(check_lora, LoraConfig(modules_to_save=["lm_head"]))
    assert re.match("lora.modules_to_save: .*lm_head.* is not allowed", said)


def test_a_head_is_adapted_unless_it_is_tied(tmp_path):
    """That of an untied model was once refused: `layer 0: Target module Hollow() is not supported`."""
    save("Qwen2, tied", tmp_path)
    save("Llama", tmp_path / "untied")
    targets = LoraConfig(target_modules=["q_proj", "lm_head"])
    said = "'lm_head' is not allowed: its weight is the embedding's too"
    assert said in refusal(part_loaders, tmp_path, targets)
    last = part_loaders(tmp_path / "untied", targets)[-1]()
    assert any("lm_head.lora_" in name for name, _ in last.named_parameters())
