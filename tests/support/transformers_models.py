"""Small Transformers models with random weights, one of each family, and what they compute whole."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from ds_compress.hf.part import causal_lm_loss

logging.disable_progress_bar()

VOCABULARY = 96
LAYERS = 4
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 8}
WINDOW = {"sliding_window": 6}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROTARY = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
LATENT = {
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
NO_GROUPS = {"num_key_value_heads": None, "intermediate_size": None}
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, **NO_GROUPS}),
    "Llama": ("Llama", {}),
    "Llama, tied, linear rotary scaling": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        },
    ),
    "Qwen2": ("Qwen2", {}),
    "Qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen2, windows": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2, **WINDOW}),
    "Qwen3": ("Qwen3", HEAD),
    "Mistral": ("Mistral", WINDOW),
    "Gemma": ("Gemma", HEAD),
    "Gemma 2": ("Gemma2", {**HEAD, **WINDOW}),
    "Gemma 3": ("Gemma3Text", {**HEAD, **WINDOW}),
    "Phi-3": ("Phi3", {}),
    "OLMo 2": ("Olmo2", {}),
    "OPT": ("OPT", {"dropout": 0, "ffn_dim": 48, "word_embed_proj_dim": 16, **NO_GROUPS}),
    "Cohere": ("Cohere", {}),
    "SmolLM3": ("SmolLM3", {}),
    "GLM-4": ("Glm4", HEAD),
    "GPT-NeoX": ("GPTNeoX", {"num_key_value_heads": None}),
    "Granite": ("Granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3Moe", {"num_experts": 4, **HEAD, **EXPERTS}),
    "DeepSeek-V3": (
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            **LATENT,
            **EXPERTS,
        },
    ),
    "GPT-OSS": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, **HEAD, **WINDOW}),
    "BLOOM": ("Bloom", NO_GROUPS),
    "Falcon": ("Falcon", NO_GROUPS),
    "GPT-J": ("GPTJ", {"rotary_dim": 8, **NO_GROUPS}),
}
FAMILIES = tuple(CHANGES)


def config(family: str) -> PretrainedConfig:
    name, changes = CHANGES[family]
    keys = {key: value for key, value in {**SIZES, **changes}.items() if value is not None}
    return getattr(transformers, f"{name}Config")(**keys)


def save(family: str, folder: Path, **options: Any) -> Path:
    """A checkpoint of that family, as a user has it."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config(family), dtype=torch.float32)
    for parameter in model.parameters():  # no bias or gain that hides a mistake
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder, **options)
    return folder


def whole(folder: Path) -> PreTrainedModel:
    """The checkpoint as Transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def batch(number: int = 0, length: int = 17) -> tuple[Tensor, Tensor]:
    """Token ids and labels, [2, length] int64, some labels left out."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(VOCABULARY, (2, length), generator=generator)
    labels = ids.clone()
    labels[0, : length // 3] = -100
    return ids, labels


def outcome(model: Any, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Logits, loss and gradients by name of parameter."""
    logits = model(ids, use_cache=False).logits
    loss = causal_lm_loss(logits, labels)
    model.zero_grad()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "loss": loss.detach(), **gradients}
