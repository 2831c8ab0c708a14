"""Load models whose linear layers have 4-bit or 8-bit weights, with the quantizers of Transformers.

Transformers replaces each linear layer by one of bitsandbytes, and reads or quantizes its weight, one tensor
at a time. Quantized weights are frozen, so only adapters are trained (QLoRA,
https://arxiv.org/abs/2305.14314).
"""

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer

from ds_compress.errors import CompressionError, in_one_line, shown
from ds_compress.hf.settings import NAME

METHOD = "bitsandbytes"
"""The one "quant_method" of a config.json that a pipeline supports. DeepSpeed's engine can neither move nor
broadcast tensors of torchao, and peft trains no adapters over its 4-bit weights."""


def find_quantizer(
    config: PretrainedConfig, requested: str | None, dtype: torch.dtype, is_trained_whole: bool
) -> HfQuantizer | None:
    """Return the quantizer of a checkpoint, or the requested one; None if weights are not quantized.

    Args:
        config: config of the checkpoint.
        requested: value of `quantize` in train.json.
        dtype: dtype in which layers of a requested quantizer compute.
        is_trained_whole: whether all parameters are trained.

    Raises:
        CompressionError: the method is not supported, not installed, or cannot be trained.
    """
    stored: Any = getattr(config, "quantization_config", None)
    if not stored and not requested:
        return None
    if stored and requested:
        raise CompressionError(
            f"{NAME}.quantize: {requested!r} is not allowed: the checkpoint is quantized; leave it out"
        )
    given = stored if isinstance(stored, dict | None) else stored.to_dict()
    method = given.get("quant_method", METHOD) if given else METHOD
    if method != METHOD:
        raise CompressionError(
            f'config.json: "quant_method": {shown(method)} is not supported in a pipeline; should be '
            f'{METHOD!r}, or a checkpoint with whole weights and "quantize": "nf4" in {NAME}'
        )
    if is_trained_whole:
        raise CompressionError(
            f'{NAME}.lora: missing, but the weights are quantized and cannot be trained; give "lora": {{}}'
        )
    try:
        chosen = copy.deepcopy(given) if given else _request(str(requested), dtype)
        quantizer = AutoHfQuantizer.from_config(chosen, pre_quantized=bool(given))
        quantizer.validate_environment()
    except (ImportError, RuntimeError) as error:
        raise CompressionError(f'{in_one_line(error)}; pip install "ds_compress[quantized]"') from None
    # The first warns of each part without anything to quantize, the second of each 8-bit product
    for name in ("transformers.integrations.bitsandbytes", "bitsandbytes.autograd._functions"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return quantizer


def _request(name: str, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the bitsandbytes config for `name`, a value of `quantize` in train.json."""
    if name == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=name,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def without_quantization(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of `config` without quantization, for the model with unquantized weights."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def fix_skipped_modules(quantizer: HfQuantizer, model: PreTrainedModel) -> None:
    """Have `quantizer` skip the same modules in each part of `model` as in the whole model (the head)."""
    config: Any = quantizer.quantization_config
    kept: Any = model._keep_in_fp32_modules
    config.llm_int8_skip_modules = quantizer.get_modules_to_not_convert(
        model, config.llm_int8_skip_modules, kept
    )


def finish_quantization(model: PreTrainedModel, quantizer: HfQuantizer) -> None:
    """Mark the loaded `model` as quantized, for peft, and keep the layout of its weights in evaluation."""
    quantizer.postprocess_model(model)
    module: Any
    for module in model.modules():
        # On some CPUs, bitsandbytes would otherwise repack the weights for inference and compute in bf16
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def count_bytes(parameter: Any) -> int:
    """Return the bytes of a loaded parameter with its scales; `parameter` may be on the meta device."""
    count: int = parameter.numel()
    if hasattr(parameter, "quant_state"):
        blocks = count // parameter.blocksize
        return count // 2 + (blocks + blocks // 64 if parameter.compress_statistics else 4 * blocks)
    if hasattr(parameter, "SCB"):
        return count + 4 * len(parameter)
    return count * int(parameter.element_size())


def is_quantized(weight: Any) -> bool:
    """Return whether a parameter has 4-bit or 8-bit values."""
    return hasattr(weight, "quant_state") or hasattr(weight, "SCB")


def dequantize(module: nn.Module) -> Tensor | None:
    """Return the weight of a quantized module, [outputs, inputs] fp32; None if the module is plain."""
    weight: Any = getattr(module, "weight", None)
    if not is_quantized(weight):
        return None
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    return dequantize_bnb_weight(weight, getattr(module, "state", None)).float()


def make_plain(module: Any, weight: Tensor, dtype: torch.dtype) -> nn.Module:
    """Return an unquantized replacement of `module`, with the parameters of an unquantized checkpoint.

    Args:
        module: a linear layer that Transformers quantized.
        weight: [outputs, inputs].
        dtype: of the parameters.
    """
    plain = nn.Module()
    is_transposed = getattr(module, "source_cls", None) is Conv1D
    plain.weight = nn.Parameter((weight.T if is_transposed else weight).to(dtype), requires_grad=False)
    plain.register_parameter("bias", module.bias)
    return plain
