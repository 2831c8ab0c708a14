"""Every documented family computes in parts, in one process, what it computes whole."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from ds_compress.hf.model import make_layer_specs
from ds_compress.hf.part import causal_lm_loss
from tests.support.finetuning import FAMILIES, LAYERS, batch, load_model, run_model, save


def lora():
    """Not shared: peft writes into it what it found."""
    return LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    return save(request.param, tmp_path_factory.mktemp("model"))


def built(checkpoint, lora=None, positions=False):
    """All parts of a model; where its embedding is tied, one weight serves twice, as in a pipeline."""
    specs, _ = make_layer_specs(checkpoint, 2, lora, None, positions, seed=0)
    parts = [spec.build().eval() for spec in specs[: LAYERS + 3]]
    if parts[-1].tied_head and lora is None:
        parts[-1].set_head(parts[0].weight)
    return parts


def run(parts, x):
    for part in parts:
        x = part(x)
    return x


def parameters(parts):
    return {name: p for part in parts for name, p in part.model.named_parameters()}


def assert_equal(parts, model, ids, labels):
    expected = run_model(model, ids, labels)
    logits = run(parts, ids)
    loss = causal_lm_loss(logits, labels)
    loss.backward()
    torch.testing.assert_close(logits, expected.pop("logits"), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss, expected.pop("loss"), rtol=1e-5, atol=0)
    ours = {name: p.grad for name, p in parameters(parts).items() if p.grad is not None}
    scale = max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * (gradient.norm() + 1e-3 * scale), name


@pytest.mark.extended(keep=8)
def test_logits_loss_and_gradients_are_those_of_the_whole(checkpoint):
    parts, model = built(checkpoint), load_model(checkpoint)
    assert_equal(parts, model, *batch())
    own = {id(p): p.numel() for part in parts for p in part.model.parameters()}
    assert sum(own.values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.extended(keep=5)
def test_adapters_learn_what_they_learn_in_the_whole(checkpoint):
    parts = built(checkpoint, lora())
    model = inject_adapter_in_model(lora(), load_model(checkpoint).requires_grad_(False))
    trained = {name: p for name, p in parameters(parts).items() if p.requires_grad}
    assert trained.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    model.load_state_dict({name: p.detach() for name, p in trained.items()}, strict=False)
    assert_equal(parts, model, *batch())
