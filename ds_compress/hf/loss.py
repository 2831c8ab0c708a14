"""The loss of a causal language model."""

from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

IGNORED = -100
"""Label of a token that is not to be predicted."""


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats, as Transformers' models compute it: the logits at a token are compared with
    the label of the next one.

    Args:
        logits: [batch, length, vocabulary].
        labels: [batch, length] int64, the tokens themselves, or `IGNORED`.
    """
    loss: Tensor = ForCausalLMLoss(logits, labels, vocab_size=logits.shape[-1])
    return loss
