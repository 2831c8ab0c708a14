"""Read a part's weights, and no others, from the safetensors files of a checkpoint.

Names and shapes on disk may differ from those of the model (fused or split matrices, experts one by one).
Transformers' own loader converts them while it reads.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging as transformers_logging

from ds_compress.errors import CompressionError, failures_at
from ds_compress.hf.quantized import finish_quantization

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def list_files(checkpoint: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint.

    Raises:
        CompressionError: it has none, a file that its index names is missing, or the index is damaged.
    """
    index = checkpoint / INDEX
    if index.exists():
        with failures_at(f"{index} is damaged"):
            names = json.loads(index.read_text())["weight_map"].values()
            found = sorted({checkpoint / name for name in names})
    else:
        found = [checkpoint / SINGLE]
    for file in found:
        if not file.exists():
            raise CompressionError(
                f"{checkpoint}: {file.name} is missing; should be the folder of a Transformers model with "
                f"{SINGLE} or {INDEX} (model.save_pretrained, or: hf download NAME --local-dir FOLDER)"
            )
    return found


@contextlib.contextmanager
def open_slices(checkpoint: Path) -> Iterator[dict[str, Any]]:
    """Open every tensor of a checkpoint, by its name on disk, without reading it.

    Raises:
        CompressionError: a file is missing, or no whole safetensors file.
    """
    with contextlib.ExitStack() as stack:
        found = {}
        for file in list_files(checkpoint):
            with failures_at(f"{file} is no whole safetensors file"):
                opened = stack.enter_context(safe_open(file, framework="pt"))
                found.update({name: opened.get_slice(name) for name in opened.keys()})  # noqa: SIM118
        yield found


def load_weights(
    model: PreTrainedModel, checkpoint: Path, device: torch.device, quantizer: HfQuantizer | None = None
) -> None:
    """Read the parameters of `model`, which are on the meta device, in their own dtype.

    A quantizer whose checkpoint has whole weights quantizes each tensor when it is read, before the next one.

    Raises:
        CompressionError: the checkpoint lacks some of them, or has them in another shape.
    """
    if quantizer and hasattr(quantizer, "set_metadata"):  # torchao's tensors are described beside them
        quantizer.set_metadata([str(file) for file in list_files(checkpoint)])
    mapping: Any = get_model_conversion_mapping(model)
    dtype: Any = model.config.dtype
    settings = LoadStateDictConfig(
        device_map={"": device},
        dtype=dtype,
        weight_mapping=quantizer.update_weight_conversions(mapping, model) if quantizer else mapping,
        hf_quantizer=quantizer,
    )
    with open_slices(checkpoint) as stored, contextlib.ExitStack() as stack:
        if transformers_logging.is_progress_bar_enabled():  # one would appear for every part
            transformers_logging.disable_progress_bar()
            stack.callback(transformers_logging.enable_progress_bar)
        info, _ = convert_and_load_state_dict_in_model(model, stored, settings)
    if quantizer:
        # `merge` writes whole weights: it reverts the model's conversions, not the quantizer's
        used: Any = model._weight_conversions
        model._weight_conversions = [each for each in mapping if each in used]  # type: ignore[assignment]
        finish_quantization(model, quantizer)
    wrong = {name for name, *_ in info.mismatched_keys} | info.conversion_errors.keys()
    absent = {name for name, parameter in model.named_parameters() if parameter.is_meta} - wrong
    for names, why in ((wrong, "has them in another shape"), (absent, "does not have them")):
        if names:
            shown = ", ".join(sorted(names)[:4])
            raise CompressionError(f"{checkpoint}: {len(names)} parameters, {shown}: the checkpoint {why}")
