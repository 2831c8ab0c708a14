"""Text that a pipeline continues: each token is one evaluation, whose "loss" is the token."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOKENS = 24
"""How many are written."""


def continued(engine: Any, tokenizer: Any, prompt: str, shape: tuple[int, int], positions: bool) -> str:
    """`prompt` and what the model finds likeliest after it; runs on every rank.

    DeepSpeed lets every rank know a number that the last stage computes: the loss of an evaluation. Here it
    is the likeliest token, exact in fp32 for vocabularies below 2**24.

    Args:
        shape: (micro-batch, length) of the batches that the engine was trained on.
    """
    ids = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])[: shape[1] // 2] or [0]
    loss_fn: Callable[..., Tensor] = engine.module.loss_fn
    engine.module.loss_fn, engine.gives_losses = _likeliest, False
    try:
        for _ in range(min(TOKENS, shape[1] - len(ids))):
            row = torch.tensor(ids + [0] * (shape[1] - len(ids)), dtype=torch.int64, device="cpu").repeat(
                shape[0], 1
            )
            where = torch.arange(shape[1], dtype=torch.int64, device="cpu").repeat(shape[0], 1)
            inputs = (row, where) if positions else row
            batch = inputs, torch.full((shape[0],), len(ids) - 1, dtype=torch.int64, device="cpu")
            ids.append(int(engine.eval_batch(iter([batch]), num_micro_batches=1)))
    finally:
        engine.module.loss_fn, engine.gives_losses = loss_fn, True
    return str(tokenizer.decode(ids))


def _likeliest(logits: Tensor, last: Tensor) -> Tensor:
    """The token after position `last[0]` of the first sequence, as a number."""
    return logits[0, last[0]].argmax().float()
