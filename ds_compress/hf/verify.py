"""Check that a model computes in parts what it computes whole, on a tiny model of the same class.

Every model is checked at start-up, before a weight is read. A family that hands more than hidden states from
layer to layer, or computes with a module that a part lacks, is refused rather than trained wrongly.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ds_compress.errors import CompressionError, errors_at, failures_at, in_one_line, shown
from ds_compress.hf.part import LINEAR, Part, add_adapters, causal_lm_loss, list_parts
from ds_compress.hf.structure import ModelStructure, ModelTemplate, find_structure

TOLERANCE = 1e-5
"""Largest norm of a difference, relative to the norm of what the whole model computes."""

LENGTHS = (13, 11)
"""Tokens of the two documents that the check packs into a sequence."""


def verify_parts(config: PretrainedConfig, positions: bool, lora: LoraConfig | None = None) -> ModelStructure:
    """Compare logits and gradients of a tiny model with those of its parts.

    Args:
        config: of the model; nothing of its size is built.
        positions: whether parts are told where documents begin.
        lora: adapters that the run trains; None: it trains all parameters.

    Returns:
        The structure of the model.

    Raises:
        CompressionError: the model cannot be cut into parts, or they compute something else; or peft's
            adapters do not run in it.
    """
    name = type(config).__name__
    if config.get_text_config() is not config:
        raise CompressionError(
            f"{name}: models of images and text are not supported in a pipeline: should be a text model; "
            "docs/transformers.md says how to save the language part alone"
        )
    for key in ("layerdrop", "output_router_logits"):
        if getattr(config, key, False):
            raise CompressionError(f'{name}: "{key}" is not supported in a pipeline: switch it off')
    refused = f"{name}: this model cannot be cut into stages"
    alone = "its parts do not run alone"  # a model that lacks most of itself can fail anywhere
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        with errors_at(refused), failures_at(alone):
            tiny = make_tiny_config(config)
            whole, parts, structure = _build(tiny, positions)
            inputs = _draw_inputs(whole, positions)
        if lora:
            _add_adapters(whole, parts, lora)
            _check_adapters_run(whole, inputs)
        with errors_at(refused), failures_at(alone):
            _compare_parts(whole, parts, inputs)
    return structure


def _build(config: PretrainedConfig, positions: bool) -> tuple[PreTrainedModel, list[Part], ModelStructure]:
    """Build the whole model with random weights, and its parts with copies of them."""
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in whole.parameters():  # a bias of 0 or a gain of 1 could hide a mistake
        parameter.data += 0.02 * torch.randn_like(parameter)
    structure = find_structure(whole)
    template = ModelTemplate(config, torch.float32, structure)
    parts = [Part(template, part_id) for part_id in list_parts(config.num_hidden_layers)]
    copies = {id(p): nn.Parameter(p.detach().clone()) for p in whole.parameters()}
    by_name = {name: copies[id(p)] for name, p in whole.named_parameters(remove_duplicate=False)}
    for part in parts:
        for name, _ in list(part.model.named_parameters()):
            path, _, last = name.rpartition(".")
            setattr(part.model.get_submodule(path), last, by_name[name])
        part.eval()
    return whole, parts, structure


def _draw_inputs(whole: PreTrainedModel, positions: bool) -> dict[str, Tensor]:
    """Draw token ids, with positions of two documents if the parts are told where documents begin."""
    size = whole.config.vocab_size
    ids = torch.randint(size, (2, sum(LENGTHS)), dtype=torch.int64, device="cpu")
    if not positions:
        return {"input_ids": ids}
    documents = [torch.arange(length, dtype=torch.int64, device="cpu") for length in LENGTHS]
    inputs = {"input_ids": ids, "position_ids": torch.cat(documents).repeat(2, 1)}
    _check_documents_apart(whole, inputs)
    return inputs


def _check_documents_apart(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    """Refuse a model whose tokens attend to documents before their own."""
    first, ids = LENGTHS[0], inputs["input_ids"]
    other = torch.cat([(ids[:, :first] + 1) % model.config.vocab_size, ids[:, first:]], dim=1)
    with torch.no_grad():
        one, two = (
            model(**{**inputs, "input_ids": x}, use_cache=False).logits[:, first:] for x in (ids, other)
        )
    if not torch.allclose(one, two, rtol=1e-4, atol=1e-5):
        raise CompressionError('it does not keep documents in one sequence apart; choose "packing": "joined"')


def _add_adapters(whole: PreTrainedModel, parts: list[Part], lora: LoraConfig) -> None:
    """Put equal adapters with random weights into the whole model and its parts."""
    random = copy.deepcopy(lora)
    random.init_lora_weights = False
    for part in parts:
        add_adapters(part, copy.deepcopy(random), seed=0)
        part.eval()
    _check_names(lora.target_modules, whole)
    inject_adapter_in_model(random, whole.requires_grad_(False)).eval()
    adapters = {name: p.detach().clone() for part in parts for name, p in part.model.named_parameters()}
    lost = {name for name, p in whole.named_parameters() if p.requires_grad} - adapters.keys()
    if lost:
        modules = ", ".join(sorted({name.partition(".lora_")[0] for name in lost})[:4])
        raise CompressionError(
            f"lora: {modules}: is not trained in a pipeline, only linear modules are; leave it out"
        )
    whole.load_state_dict(adapters, strict=False)


def _check_names(targets: Iterable[str] | None, whole: PreTrainedModel) -> None:
    """Refuse names that no module has: peft minds only if it finds none of them."""
    if targets is None or isinstance(targets, str):  # a pattern, or "all-linear"
        return
    modules = dict(whole.named_modules())
    known = [f".{_unnumbered(name)}" for name in modules]
    unknown = [own for own in sorted(targets) if not any(n.endswith(f".{_unnumbered(own)}") for n in known)]
    if unknown:
        linear = {name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, LINEAR)}
        raise CompressionError(
            f"lora.target_modules: {shown(unknown)}: no module of {type(whole).__name__} is called that; its "
            f"linear ones are: {', '.join(sorted(linear))}"
        )


def _unnumbered(name: str) -> str:
    """Return the name of a module for any layer, and any expert: a tiny model has the first ones alone."""
    return ".".join("N" if part.isdigit() else part for part in name.split("."))


def _check_adapters_run(whole: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    """Refuse adapters with which not even the whole model runs."""
    try:
        with torch.no_grad():
            whole(**inputs, use_cache=False)
    except Exception as error:  # peft adapts a subclass of nn.Linear whatever it returns
        forwards = [kind.forward for kind in LINEAR]
        unusual = {
            name.rpartition(".")[2]
            for name, module in whole.named_modules()
            if isinstance(module, LoraLayer)
            and isinstance(base := module.get_base_layer(), LINEAR)
            and type(base).forward not in forwards
        }
        reason = f"; no plain linear layer, leave out: {', '.join(sorted(unusual))}" if unusual else ""
        raise CompressionError(
            f"lora.target_modules: {type(whole).__name__} does not run with these adapters of peft: "
            f"{in_one_line(error)}{reason}"
        ) from None


def _compare_parts(whole: PreTrainedModel, parts: list[Part], inputs: dict[str, Tensor]) -> None:
    """Compare logits and gradients of the whole model with those of its parts."""
    ids = inputs["input_ids"]
    expected = whole(**inputs, use_cache=False).logits
    x = nn.Sequential(*parts)((ids, inputs["position_ids"]) if "position_ids" in inputs else ids)
    _compare("logits", x, expected)
    causal_lm_loss(expected, ids).backward()
    causal_lm_loss(x, ids).backward()
    expected_gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    of_parts: dict[str, Any] = {name: p.grad for part in parts for name, p in part.model.named_parameters()}
    lost = [name for name in expected_gradients if of_parts.get(name) is None]
    if lost:
        raise CompressionError(f"{lost[0]} and {len(lost) - 1} more belong to no part")
    ours = torch.cat([torch.flatten(of_parts[name]) for name in expected_gradients])
    _compare("gradients", ours, torch.cat([each.flatten() for each in expected_gradients.values()]))


def _compare(what: str, ours: Tensor, expected: Tensor) -> None:
    difference = float(((ours - expected).norm() / expected.norm()).detach())
    if not difference <= TOLERANCE:
        raise CompressionError(
            f"its {what} in parts are not those of the whole: relative difference {difference:.2g}, "
            f"allowed {TOLERANCE:g}"
        )


HEADS = 4
MAXIMA = {
    "vocab_size": 96,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "ffn_dim": 96,
    "n_inner": 96,
    "sliding_window": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
"""The largest value of a key in a tiny config."""


def make_tiny_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of `config` with fewer heads, layers, experts and tokens.

    The size of a head stays, as tables depend on it, and so does every kind of layer.
    """
    tiny = copy.deepcopy(config)
    heads, width = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or width // heads
    few = min(heads, HEADS)
    for name, maximum in MAXIMA.items():
        value = getattr(tiny, name, None)
        if isinstance(value, int) and value > maximum:
            setattr(tiny, name, maximum)
    _set_if_used(tiny, "hidden_size", head_dim * few)
    _set_if_used(tiny, "num_attention_heads", few)
    for name in ("num_key_value_heads", "num_kv_heads"):
        groups = getattr(config, name, None)
        _set_if_used(tiny, name, few if groups == heads else 1 if groups == 1 else few // 2 or 1)
    is_projected = getattr(config, "word_embed_proj_dim", width) != width
    _set_if_used(tiny, "word_embed_proj_dim", head_dim * few // (2 if is_projected else 1))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        _set_if_used(tiny, name, 1)
    _drop_layers(tiny)
    return tiny


def _set_if_used(config: PretrainedConfig, name: str, value: Any) -> None:
    """Set a key unless the model leaves it out."""
    if getattr(config, name, None) is not None:
        setattr(config, name, value)


def _drop_layers(config: PretrainedConfig) -> None:
    """Keep the first layers: at least three, and so many that every kind of layer is among them."""
    count = config.num_hidden_layers
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count
    }
    rows = list(zip(*lists.values())) if lists else [()] * count
    kinds = {repr(row) for row in rows}
    needed = next(n for n in range(1, count + 1) if {repr(row) for row in rows[:n]} == kinds)
    kept = min(count, max(3, needed))
    for name, value in lists.items():
        setattr(config, name, value[:kept])
    config.num_hidden_layers = kept
