"""A pretrained causal language model to profile: its files, its layers, micro-batches of random tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor

from ds_compress.errors import CompressionError, in_one_line
from ds_compress.hf.model import load_config, make_layer_specs
from ds_compress.hf.part import causal_lm_loss

HUB = "hf://"
"""Prefix of a name that may be downloaded."""

FILES = ["*.json", "*.safetensors"]


class PretrainedModel:
    """A causal language model that Transformers saved."""

    loss_fn = staticmethod(causal_lm_loss)

    def __init__(self, name: str):
        """
        Args:
            name: a folder; a name on the hub whose files are in the cache of this machine; or that with
                "hf://" before it.

        Raises:
            CompressionError: there is none.
        """
        self.folder = _folder(name)
        self._config = load_config(self.folder).get_text_config()
        self.width: int = self._config.hidden_size  # of the hidden states between its layers

    def layers(self, stages: int, dtype: torch.dtype | None) -> tuple[list[Any], list[int]]:
        """Return the layers of `pipeline_module`, and where its stages begin and end."""
        return make_layer_specs(self.folder, stages, None, dtype, positions=False, seed=0)

    def batches(self, sequences: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield endless micro-batches of ids and labels, [sequences, length] int64.

        The tokens are random, and the same in every run.
        """
        generator, size = torch.Generator("cpu").manual_seed(0), (sequences, length)
        most = self._config.vocab_size
        while True:
            ids = torch.randint(most, size, generator=generator, dtype=torch.int64, device="cpu")
            yield ids, ids


def _folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    on_hub = name.removeprefix(HUB)
    try:
        return Path(snapshot_download(on_hub, allow_patterns=FILES, local_files_only=on_hub == name))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        if on_hub != name:
            raise CompressionError(in_one_line(error)) from None
        raise CompressionError(
            "no such folder, and no model of that name in the cache of this machine; should be the folder "
            f"of a Transformers model (model.save_pretrained), or a name to download: {HUB}ORG/MODEL"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise CompressionError(in_one_line(error)) from None
