"""What goes to a sink beside the values: settings to W&B, panels to TensorBoard."""

import sys
from typing import Any

from ds_compress.config import KEY
from ds_compress.monitor.metrics import DASHBOARD, labels


def record_settings(settings: dict[str, Any]) -> None:
    """Put the resolved block into the config of the W&B run that this process has, if it has one."""
    wandb = sys.modules.get("wandb")  # nobody can have a run without having imported it
    if wandb is not None and wandb.run is not None:
        wandb.run.config.update({KEY: settings}, allow_val_change=True)


def add_tensorboard_layout(writer: Any, boundaries: int) -> None:
    """Give TensorBoard's "Custom Scalars" page a chart per quantity, with all channels of a pipeline in each.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`.
    """
    writer.add_custom_scalars(
        {
            f"Compression: {title}": {name: ["Multiline", labels(boundaries, name)] for name in names}
            for title, names in DASHBOARD.items()
        }
    )
