"""A small config of the same class as a model's, for checks before anything large is loaded."""

import copy
from typing import Any

from transformers import PretrainedConfig

HEADS = 4
MOST = {
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
"""What a key may be at most."""


def small(config: PretrainedConfig) -> PretrainedConfig:
    """`config` with fewer heads, layers, experts and tokens.

    The size of a head stays, as tables depend on it, and so does every kind of layer."""
    made = copy.deepcopy(config)
    heads, width = config.num_attention_heads, config.hidden_size
    head = getattr(config, "head_dim", None) or width // heads
    few = min(heads, HEADS)
    for name, most in MOST.items():
        value = getattr(made, name, None)
        if isinstance(value, int) and value > most:
            setattr(made, name, most)
    _set(made, "hidden_size", head * few)
    _set(made, "num_attention_heads", few)
    groups = getattr(config, "num_key_value_heads", None)
    if groups:
        _set(made, "num_key_value_heads", few if groups == heads else 1 if groups == 1 else few // 2 or 1)
    if getattr(config, "word_embed_proj_dim", width) != width:
        _set(made, "word_embed_proj_dim", head)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(made, name, None) is not None:
            setattr(made, name, 1)
    _fewer_layers(made)
    return made


def _set(config: PretrainedConfig, name: str, value: Any) -> None:
    if getattr(config, name, None) is not None:
        setattr(config, name, value)


def _fewer_layers(config: PretrainedConfig) -> None:
    """As many that every kind has come, and three at least where there are."""
    count = config.num_hidden_layers
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count
    }
    rows = list(zip(*lists.values())) if lists else [()] * count
    kinds = {repr(row) for row in rows}
    needed = next(n for n in range(1, count + 1) if {repr(row) for row in rows[:n]} == kinds)
    fewer = min(count, max(3, needed))
    for name, value in lists.items():
        setattr(config, name, value[:fewer])
    config.num_hidden_layers = fewer
