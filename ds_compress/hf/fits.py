"""Whether a model can learn what it is given: it has positions for the sequences, rows for the tokens."""

import numpy as np
from transformers import PretrainedConfig

from ds_compress.errors import CompressionError
from ds_compress.hf.settings import NAME


def check_length(config: PretrainedConfig, length: int) -> None:
    """Raises CompressionError where sequences of `length` tokens are longer than the model is made for.

    With a learned table of positions the first batch would run out of it; rotary ones would be computed, and
    mean nothing to the model."""
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if isinstance(most, int) and isinstance(factor := rope.get("factor"), (int, float)):
        most = int(most * max(factor, 1))
    if isinstance(most, int) and 0 < most < length:
        raise CompressionError(
            f"{NAME}.sequence_length: {length} is not allowed: the model's config.json has "
            f'"max_position_embeddings" for {most} tokens; should be at most that'
        )


def check_tokens(config: PretrainedConfig, sequences: np.ndarray, tokenizer: str) -> None:
    """Raises CompressionError where token ids, of any shape, are none of the model's vocabulary."""
    largest = int(sequences.max())
    size = config.get_text_config().vocab_size
    if largest >= size:
        raise CompressionError(
            f"{NAME}.tokenizer: {tokenizer}: it made a token {largest}, but the model's vocabulary has "
            f"{size}; should be the tokenizer that the model was trained with"
        )
