"""What the last bits of matrix products depend on: compared at start-up where mirrored state rests on them.

Everything else that is mirrored is exact: sums in a fixed order, so the same on every processor.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

from ds_compress.config import Config
from ds_compress.feedback.digest import absorb

SHAPES = ((64, 16, 256), (256, 64, 1024))  # rows, coefficients and columns of a message


def relied_on(config: Config, device: torch.device) -> dict[str, Any]:
    """What all ranks must have alike for the settings in `config`; empty where it does not matter."""
    pairs = ", ".join(config.mirrored_products)
    if not pairs:
        return {}
    why = f"both sides of {pairs} have to compute alike; with another feedback they need not"
    return {f"numerics.{name} ({why})": value for name, value in fingerprint(device).items()}


def fingerprint(device: torch.device) -> dict[str, Any]:
    """Names of what computes on `device`, and a hash of what comes out."""
    if device.type == "cpu":
        name = torch.backends.cpu.get_cpu_capability()
        more: dict[str, Any] = {"threads": torch.get_num_threads()}
    else:
        name, more = torch.get_device_module(device).get_device_name(device), {}
    device_name = f"{device.type} {name}"
    return {"torch": torch.__version__, "device": device_name, **more, "products": _products(device)}


def _products(device: torch.device) -> str:
    """Hash of products as `pca` and `lowrank` have them."""
    digest = hashlib.blake2b(digest_size=8)
    for rows, coefficients, columns in SHAPES:
        code, basis = _numbers(rows, coefficients, device), _numbers(columns, coefficients, device)
        absorb(digest.update, "decoded", code @ basis.T)
        message = _numbers(rows, columns, device).double()
        moment = message.T @ message
        absorb(digest.update, "basis", torch.linalg.qr(moment @ basis.double()).Q)
        absorb(digest.update, "eigenvectors", torch.linalg.eigh(moment).eigenvectors)
    return digest.hexdigest()


def _numbers(rows: int, columns: int, device: torch.device) -> Tensor:
    """fp32 in [-1, 1) that use all 24 bits, equal on every device."""
    counted = torch.arange(1, rows * columns + 1, dtype=torch.int64, device=device)
    return ((counted * 2654435761 % 2**24 - 2**23).float() / 2**23).view(rows, columns)
