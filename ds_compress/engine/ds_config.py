"""A ds_config.json as DeepSpeed reads it: with comments, and without keys that come twice."""

from pathlib import Path
from typing import Any

from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config


def load(path: Path) -> Any:
    """What the file holds, for `deepspeed.initialize` as for us.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: what it holds is not what DeepSpeed reads.
    """
    path.stat()  # DeepSpeed takes what is not a file for base64
    try:
        return load_ds_config(str(path))
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deep") from error
