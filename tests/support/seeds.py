"""Seeds for devices that are not there.

`torch.manual_seed` keeps a seed for each kind of device until one is first used, with the stack of the caller
as text: a millisecond, and DeepSpeed seeds before every layer of every forward pass.
"""

import torch


def only_where_devices_are() -> None:
    """Let this process, and those forked from it, keep none for a kind of device that the machine has not."""
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = _nowhere


def _nowhere(seed: int) -> None:
    pass
