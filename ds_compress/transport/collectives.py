"""How ranks agree: small collectives of numbers, and keys in common, which all of them ask for."""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, Store


def all_gather(mine: Tensor, group: Any = None) -> list[Tensor]:
    """Gather the tensor `mine` of all ranks of `group`, None: of the job, on every one of them."""
    everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everywhere, mine, group=group)
    return everywhere


def lowest(device: torch.device, *values: int) -> list[int]:
    """Return the lowest of each of `values` over all ranks of the job."""
    everywhere = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return everywhere.tolist()


def own_keys(store: Store, rank: int, use: str) -> PrefixStore:
    """Return a part of `store` that only one more `use`, such as "engine", has, the same on all ranks.

    Counted in the store: a process may have been a rank of other jobs before.

    Args:
        store: of the job; all ranks call this alike.
    """
    return PrefixStore(f"ds_compress/{use}/{store.add(f'ds_compress/{use} of {rank}', 1)}", store)
