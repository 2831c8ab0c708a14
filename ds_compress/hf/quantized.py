"""Load models whose linear layers have 4-bit or 8-bit weights, with the quantizers of Transformers.

Transformers replaces each linear layer by one of bitsandbytes, or its weight by a tensor of torchao, and
reads or quantizes one weight at a time. Quantized weights are frozen, so only adapters are trained (QLoRA,
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

METHODS = BITSANDBYTES, TORCHAO = "bitsandbytes", "torchao"
"""The supported values of "quant_method" in a config.json."""
WEIGHT_ONLY = "Int8WeightOnlyConfig", "IntxWeightOnlyConfig"
"""The supported values of "quant_type" of torchao. The second has 4 bits as well, a byte for each value.
Packed 4 bits (Int4WeightOnlyConfig) are refused: only kernels for GPUs read them, and peft trains no adapters
over them. No gradient passes through activations that torchao quantizes."""


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
    given: dict[str, Any] = getattr(config, "quantization_config", None) or {}
    if not given and not requested:
        return None
    if given and requested:
        raise CompressionError(
            f"{NAME}.quantize: {requested!r} is not allowed: the checkpoint is quantized; leave it out"
        )
    _check_method(given)
    if is_trained_whole:
        raise CompressionError(
            f'{NAME}.lora: missing, but the weights are quantized and cannot be trained; give "lora": {{}}'
        )
    try:
        options: dict[str, Any] = {"load_in_8bit": True}
        if requested != "int8":
            options = {"load_in_4bit": True, "bnb_4bit_quant_type": requested}
            options |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
        chosen = copy.deepcopy(given) if given else BitsAndBytesConfig(**options)
        quantizer = AutoHfQuantizer.from_config(chosen, pre_quantized=bool(given))
        quantizer.validate_environment()
    except (ImportError, RuntimeError) as error:
        package = TORCHAO if given.get("quant_method") == TORCHAO else '"ds_compress[quantized]"'
        raise CompressionError(f"{in_one_line(error)}; pip install {package}") from None
    # The first warns of each part without anything to quantize, the second of each 8-bit product
    for name in ("transformers.integrations.bitsandbytes", "bitsandbytes.autograd._functions"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return quantizer


def _check_method(given: dict[str, Any]) -> None:
    """Refuse a "quantization_config" of a config.json that no adapters can be trained over.

    Raises:
        CompressionError: naming the value and what is allowed.
    """
    values = {"quant_method": given.get("quant_method", BITSANDBYTES)}
    allowed: dict[str, tuple[Any, ...]] = {"quant_method": METHODS}
    if values["quant_method"] == TORCHAO:
        kind = given.get("quant_type")
        values["quant_type"] = kind.get("default", {}).get("_type") if isinstance(kind, dict) else kind
        values["include_input_output_embeddings"] = given.get("include_input_output_embeddings", False)
        allowed |= {"quant_type": WEIGHT_ONLY, "include_input_output_embeddings": (False,)}
    for key, value in values.items():
        if value not in allowed[key]:
            raise CompressionError(
                f'config.json: quantization_config: "{key}": {shown(value)} is not supported in a pipeline; '
                f"should be {' or '.join(map(repr, allowed[key]))}, or a checkpoint with whole weights and "
                f'"quantize": "nf4" in {NAME}'
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
    name = "modules_to_not_convert" if config.quant_method == TORCHAO else "llm_int8_skip_modules"
    setattr(config, name, quantizer.get_modules_to_not_convert(model, getattr(config, name), kept))


def prepare_quantization(model: PreTrainedModel, quantizer: HfQuantizer, dtype: torch.dtype) -> None:
    """Give the linear layers of `model`, which is on the meta device, quantized weights."""
    quantizer.preprocess_model(model, dtype=dtype, device_map=None)
    config: Any = quantizer.quantization_config
    if config.quant_method == TORCHAO:  # it does so while it reads, but `count_bytes` needs it before
        from torchao.quantization import quantize_

        quantize_(
            model,
            config.quant_type,
            lambda module, name: (
                isinstance(module, nn.Linear) and quantizer.param_needs_quantization(model, f"{name}.weight")
            ),
        )


class _FrozenProduct(torch.autograd.Function):
    """Multiply by a frozen weight of torchao, and dequantize it again in the backward pass.

    In torchao's own product, autograd keeps each weight in the dtype of the activations.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:  # type: ignore[override]
        ctx.weight = module.weight
        return nn.functional.linear(x, module.weight, module.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient @ ctx.weight.dequantize().to(gradient.dtype), None


class TorchaoLinear(nn.Linear):
    """A linear layer with a frozen weight of torchao, which is not among its parameters.

    DeepSpeed's engine can neither move nor broadcast such tensors; each replica reads them from the
    checkpoint.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Multiply `x` [..., inputs] by the weight."""
        product: Tensor = _FrozenProduct.apply(x, self)  # type: ignore[no-untyped-call]
        return product


def finish_quantization(model: PreTrainedModel, quantizer: HfQuantizer) -> None:
    """Mark the loaded `model` as quantized, for peft, and keep the layout of its weights in evaluation."""
    quantizer.postprocess_model(model)
    vars(model)["hf_quantizer"] = quantizer  # where peft looks for it
    module: Any
    for module in model.modules():
        if hasattr(weight := module._parameters.get("weight"), "qdata"):
            del module._parameters["weight"]
            module.weight = weight.data
            module.__class__ = TorchaoLinear
        # On some CPUs, bitsandbytes would otherwise repack the weights for inference and compute in bf16
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def count_bytes(parameter: Any) -> int:
    """Return the bytes of a loaded parameter with its scales; `parameter` may be on the meta device."""
    count: int = parameter.numel()
    if hasattr(parameter, "qdata"):
        return sum(count_bytes(getattr(parameter, name)) for name in parameter.__tensor_flatten__()[0])
    if hasattr(parameter, "quant_state"):
        blocks = count // parameter.blocksize
        return count // 2 + (blocks + blocks // 64 if parameter.compress_statistics else 4 * blocks)
    if hasattr(parameter, "SCB"):
        return count + 4 * len(parameter)
    return count * int(parameter.element_size())


def is_quantized(weight: Any) -> bool:
    """Return whether a parameter has 4-bit or 8-bit values."""
    return any(hasattr(weight, name) for name in ("quant_state", "SCB", "qdata"))


def dequantize(module: nn.Module) -> Tensor | None:
    """Return the weight of a quantized module, [outputs, inputs] fp32; None if the module is plain."""
    weight: Any = getattr(module, "weight", None)
    if not is_quantized(weight):
        return None
    if hasattr(weight, "qdata"):
        whole: Tensor = weight.dequantize().float()
        return whole
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
