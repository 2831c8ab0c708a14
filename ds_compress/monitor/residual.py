"""What a feedback keeps, and how much of it error feedback holds back."""

import math

import torch

from ds_compress.feedback.state import residuals
from ds_compress.message.channel import Channel


def residual_values(channel: Channel, message_norm: float) -> dict[str, float]:
    """Of the sender of `channel`, by column, 0 without feedback.

    residual_norm: of all that is held back.
    residual_share: root mean square over the micro-batches that have a residual of their own, as a multiple
    of `message_norm`, both in units that the loss scale does not change; nan where the message is nothing or
    no number.
    buffer_bytes: of all that is kept, what both sides hold alike included.
    """
    memories, prefix = channel.boundary.memory.values(), f"{channel.direction}/"
    kept = sum(value.nbytes for memory in memories for key, value in memory.items() if key.startswith(prefix))
    of_tensors = [
        [torch.linalg.vector_norm(each.float()) for each in residuals(memory, channel.direction)]
        for memory in memories
    ]
    held = [norm for norms in of_tensors for norm in norms]
    if not held:
        return {"residual_norm": 0.0, "residual_share": 0.0, "buffer_bytes": kept}
    total = torch.linalg.vector_norm(torch.stack(held)).item()
    scale = channel.boundary.loss_scale if channel.direction == "backward" else 1.0
    message = message_norm / scale * math.sqrt(max(map(len, of_tensors)))
    share = total / message if message > 0 else math.nan
    return {"residual_norm": total, "residual_share": share, "buffer_bytes": kept}
