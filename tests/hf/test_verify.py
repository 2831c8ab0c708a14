"""Every family computes in parts what it computes whole; a model that does not is refused in one line."""

import re

import pytest
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from transformers import LlamaForCausalLM

from ds_compress.hf.part import causal_lm_loss
from ds_compress.hf.transformers_pipeline import plan_parts
from ds_compress.hf.verify import make_tiny_config, verify_parts
from tests.support.finetuning import (
    FAMILIES,
    HEAD,
    SIZES,
    VOCABULARY,
    batch,
    config,
    load_model,
    part_loaders,
    run_model,
    save,
)
from tests.support.launch_scripts import ROOT
from tests.support.refusals import refusal


def keeps_documents_apart(given):
    """Whether Transformers gives the second of two packed documents the logits that it has alone."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(given).eval()
    ids, positions = torch.randint(given.vocab_size, (1, 24)), torch.cat([torch.arange(13), torch.arange(11)])
    try:
        packed = model(ids, position_ids=positions[None], use_cache=False).logits[:, 13:]
    except TypeError:  # the family takes no positions
        return False
    return torch.allclose(packed, model(ids[:, 13:], use_cache=False).logits, atol=1e-5)


def refused(given, positions=False, lora=None):
    return refusal(verify_parts, given, positions, lora)


def test_a_difference_is_named(monkeypatch):
    """A model that adds to its logits what only its first part knows."""
    forward = LlamaForCausalLM.forward

    def peeking(self, input_ids=None, inputs_embeds=None, **kwargs):
        seen = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        output = forward(self, input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)
        output.logits = output.logits + seen.mean()
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", peeking)
    assert "its logits in parts are not those of the whole: relative difference " in refused(config("Llama"))


def test_lost_gradients_are_named(monkeypatch):
    """A model that cuts the way back of what enters its last part."""
    forward = LlamaForCausalLM.forward

    def cutting(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        if kwargs.get("inputs_embeds") is not None:
            output.logits = output.logits.detach() + 0 * self.lm_head(torch.zeros(1, 1, 32)).sum()
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", cutting)
    assert "belong to no part" in refused(config("Llama"))


def test_a_model_whose_layers_or_embedding_are_not_found_is_refused():
    """The latter once as `its parts do not run alone: StopIteration:`."""
    given = transformers.MambaConfig(**SIZES, state_size=4)
    assert refused(given).startswith("MambaConfig: this model cannot be cut into stages: ")
    reason = "its embedding of tokens is inside another module, not beside the layers"
    assert refused(transformers.BertConfig(**SIZES)).endswith(reason)


@pytest.mark.parametrize("key", ["layerdrop", "output_router_logits"])
def test_what_a_pipeline_cannot_do_is_refused(key):
    given = config("OPT" if key == "layerdrop" else "Mixtral")
    setattr(given, key, 0.5 if key == "layerdrop" else True)
    assert f'"{key}" is not supported in a pipeline: switch it off' in refused(given)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.extended(keep=3)
def test_documents_are_kept_apart_or_it_is_refused(family):
    """Which families do depends on the release of Transformers: in 5.24 Falcon does, which once did not."""
    if keeps_documents_apart(config(family)):
        verify_parts(config(family), positions=True)
    else:
        assert 'choose "packing": "joined"' in refused(config(family), positions=True)


def test_most_families_keep_documents_apart():
    apart = {family for family in FAMILIES if keeps_documents_apart(config(family))}
    assert {"Llama", "Qwen3", "GPT-2", "Mixtral"} <= apart and apart.isdisjoint({"OPT", "BLOOM"})


@pytest.mark.extended(keep=3)
def test_what_is_checked_has_every_kind_of_layer_and_little_else():
    for given in map(config, FAMILIES):
        kinds = set(getattr(given, "layer_types", None) or ())
        made = make_tiny_config(given)
        assert made.num_hidden_layers == 3 if not kinds else made.num_hidden_layers >= 2
        assert set(getattr(made, "layer_types", None) or ()) == kinds


def test_the_tiny_model_has_a_projection_only_if_the_model_has_one():
    """Where a model has more than four heads, as every OPT has, it had one: `KeyError`."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    for size in (64, 32):
        given = transformers.OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=size)
        template, *_ = plan_parts(given, 2, None, None, False)
        assert ("model.decoder.project_in" in template.structure.before) is (size == 32)


@pytest.mark.parametrize("kind", [{"alibi": True}, {"new_decoder_architecture": True, "num_kv_heads": 8}])
def test_a_falcon_of_more_heads_than_the_tiny_model(kind):
    """It kept the key and value heads of the whole, so falcon-rw and falcon-40b could not be cut."""
    sizes = {"hidden_size": 128, "num_attention_heads": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    verify_parts(transformers.FalconConfig(**sizes, multi_query=False, **kind), False)


def test_tables_are_as_exact_as_those_of_transformers(tmp_path):
    """The rotary table of GPT-J was computed in bf16: 0.86 off at position 2047."""
    folder = save("GPT-J", tmp_path)
    parts = part_loaders(folder, dtype=torch.bfloat16)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, table in parts[2]().model.named_buffers():
        assert torch.equal(table, whole.get_buffer(name)), name


def test_an_embedding_to_adapt_is_named():
    """It was said that a Llama cannot be cut into stages, as its logits differ."""
    said = "lora: model.embed_tokens: is not trained in a pipeline, only linear modules are; leave it out"
    assert refused(config("Llama"), lora=LoraConfig(target_modules=["q_proj", "embed_tokens"])) == said


def test_a_name_that_no_module_has_is_refused_beside_others():
    """It was left out in silence, so half of the adapters were never trained."""
    said = refused(config("Llama"), lora=LoraConfig(target_modules=["q_proj", "self_attn.v_porj"]))
    assert said == (
        "lora.target_modules: ['self_attn.v_porj']: no module of LlamaForCausalLM is called that; its linear "
        "ones are: down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    )
    verify_parts(config("Llama"), False, LoraConfig(target_modules=["q_proj", "self_attn.v_proj"]))


def test_modules_of_later_layers_may_be_named():
    """A tiny model has the first three layers alone: names of others were refused."""
    given = config("Llama")
    given.num_hidden_layers = 5
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(given.num_hidden_layers)]
    verify_parts(given, False, LoraConfig(target_modules=names))


def test_experts_in_groups_are_checked():
    """DeepSeek-V3 was checked without experts, which follow three dense layers; V2, with one, was refused."""
    given = config("DeepSeek-V3")
    for key, value in {"n_routed_experts": 64, "n_group": 8, "topk_group": 3, "num_hidden_layers": 6}.items():
        setattr(given, key, value)
    for dense in (1, 3):
        given.first_k_dense_replace = dense
        tiny = transformers.AutoModelForCausalLM.from_config(make_tiny_config(given))
        assert any(".experts." in name for name, _ in tiny.named_parameters())
        verify_parts(given, False)


def llama4():
    """Its router is a linear layer that returns two tensors."""
    own = {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 64}
    return transformers.Llama4TextConfig(**SIZES, **HEAD, **own)


def test_adapters_with_which_a_model_does_not_run_are_named():
    """The check was once made without adapters, and the first step ended in 200 lines of traceback."""
    assert refused(llama4(), lora=LoraConfig(r=16, target_modules="all-linear")) == (
        "lora.target_modules: Llama4ForCausalLM does not run with these adapters of peft: AttributeError: "
        "'tuple' object has no attribute 'dtype'; no plain linear layer, leave out: router"
    )
    verify_parts(llama4(), False, LoraConfig(r=16, target_modules=["q_proj", "v_proj", "down_proj"]))


def test_a_large_config_is_checked_in_small():
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    given = transformers.LlamaConfig(hidden_size=8192, num_hidden_layers=80, **heads)
    made = make_tiny_config(given)
    assert (made.hidden_size, made.num_attention_heads, made.num_key_value_heads) == (512, 4, 2)
    assert made.num_hidden_layers == 3
    verify_parts(given, False)


IMAGES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
IMAGES |= {"image_size": 28, "patch_size": 14}


@pytest.mark.parametrize("name", ["Llava", pytest.param("Gemma3", marks=pytest.mark.extended)])
def test_of_models_of_images_and_text_the_language_part_is_trained(tmp_path, monkeypatch, name):
    """Its `save_pretrained` alone, which the refusal once named, lacks the head of LLaVA and Mistral 3."""
    text = config("Gemma 3" if name == "Gemma3" else "Llama")
    kind = transformers.SiglipVisionConfig if name == "Gemma3" else transformers.CLIPVisionConfig
    given = getattr(transformers, f"{name}Config")(text_config=text, vision_config=kind(**IMAGES))
    assert refused(given) == (
        f"{name}Config: models of images and text are not supported in a pipeline: should be a text model; "
        "docs/transformers.md says how to save the language part alone"
    )
    whole = transformers.AutoModelForImageTextToText.from_config(given).eval()
    whole.save_pretrained(tmp_path / "IMAGE_MODEL")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "transformers.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "ImageTextToText" in code)
    exec(code, {})
    ids = torch.arange(3, 12)[None]
    logits = run(built(tmp_path / "MODEL"), ids)
    torch.testing.assert_close(logits, whole(input_ids=ids).logits, rtol=1e-5, atol=1e-6)


def test_the_plan_of_transformers_names_the_layers(monkeypatch):
    """A model with two lists of as many modules as it has layers was once refused."""
    built = LlamaForCausalLM.__init__

    def with_another_list(self, config):
        built(self, config)
        self.model.others = torch.nn.ModuleList(torch.nn.Identity() for _ in range(config.num_hidden_layers))

    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_another_list)
    verify_parts(config("Llama"), False)
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_pp_plan", None)
    assert "its list of 3 layers is not found: ['model.layers', 'model.others']" in refused(config("Llama"))


def lora():
    """Not shared: peft writes into it what it found."""
    return LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    return save(request.param, tmp_path_factory.mktemp("model"))


def built(checkpoint, lora=None, positions=False):
    """All parts of a model; where its embedding is tied, one weight serves twice, as in a pipeline."""
    parts = [load().eval() for load in part_loaders(checkpoint, lora, positions=positions)]
    if parts[-1].tied_head and lora is None:
        parts[-1].set_head(parts[0].model.get_input_embeddings().weight)
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


@pytest.mark.extended(keep=3)
def test_logits_loss_and_gradients_are_those_of_the_whole(checkpoint):
    parts, model = built(checkpoint), load_model(checkpoint)
    assert_equal(parts, model, *batch())
    own = {id(p): p.numel() for part in parts for p in part.model.parameters()}
    assert sum(own.values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.extended(keep=3)
def test_adapters_learn_what_they_learn_in_the_whole(checkpoint):
    parts = built(checkpoint, lora())
    model = inject_adapter_in_model(lora(), load_model(checkpoint).requires_grad_(False))
    trained = {name: p for name, p in parameters(parts).items() if p.requires_grad}
    assert trained.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    model.load_state_dict({name: p.detach() for name, p in trained.items()}, strict=False)
    assert_equal(parts, model, *batch())
