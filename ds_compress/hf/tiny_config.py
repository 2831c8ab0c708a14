"""A tiny config of the same class as a model's, for checks before anything large is loaded."""

import copy
from typing import Any

from transformers import PretrainedConfig

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
    groups = getattr(config, "num_key_value_heads", None)
    if groups:
        _set_if_used(
            tiny, "num_key_value_heads", few if groups == heads else 1 if groups == 1 else few // 2 or 1
        )
    if getattr(config, "word_embed_proj_dim", width) != width:
        _set_if_used(tiny, "word_embed_proj_dim", head_dim)
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
