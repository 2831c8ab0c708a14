"""Predict memory and operations of each stage of a fine-tuning run, from the config of its model alone.

Each stage runs one micro-batch on fake tensors, which have shapes but no data. A meter counts the bytes of
all live tensors, and all operations.
"""

import copy
import weakref
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry
from transformers import PretrainedConfig

from ds_compress.errors import failures_at
from ds_compress.hf.part import AFTER, EMBEDDING, LAYER, Part, add_adapters, causal_lm_loss
from ds_compress.hf.quantized import count_bytes, is_quantized
from ds_compress.hf.settings import DTYPES, Settings
from ds_compress.hf.transformers_pipeline import plan_parts

OPTIMIZER_STATES = {"sgd": 0, "lion": 1}
"""fp32 values of optimizer state per trained value, for optimizers that do not have 2 as Adam does."""


COUNTERS = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention
    ],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ],
}
"""PyTorch's functions that count operations; those for attention on GPUs also count attention on CPUs."""


@dataclass(frozen=True)
class StageFootprint:
    """Memory of a stage in bytes, and its operations per micro-batch."""

    layers: int
    parameters: int
    trained_values: int
    trained: int
    """Bytes of gradients and optimizer state."""
    activations: int
    """Bytes that a micro-batch keeps from its forward to its backward pass."""
    working: int
    """Most bytes that a pass of a micro-batch needs beyond its activations."""
    in_flight: int
    """Micro-batches that keep activations at the same time, at link depth 1."""
    forward_flops: int
    backward_flops: int
    tied_values: int = 0
    """Values of a trained weight of which another stage has a copy."""

    @property
    def total(self) -> int:
        """Bytes at the peak of a step."""
        return self.parameters + self.trained + self.in_flight * self.activations + self.working


def predict_footprint(settings: Settings, config: PretrainedConfig) -> list[StageFootprint]:
    """Return the footprint of each stage, without buffers of DeepSpeed and codecs.

    Raises:
        CompressionError: the model cannot be cut into stages, or does not run on fake tensors.
    """
    isolated, length = settings.sends_positions, settings.lengths[-1]
    lora = settings.lora.to_peft(settings.model) if settings.lora else None
    template, part_ids, bounds = plan_parts(
        config, settings.stages, lora, DTYPES[settings.dtype], isolated, settings.quantize
    )
    plain = copy.copy(template)
    plain.quantizer = None  # fake tensors stay unquantized: activations do not depend on it
    sequences, micro_batches = settings.batch_sizes
    tokens, text = sequences * length, config.get_text_config()
    shares = template.tied_head and not lora and len(bounds) > 2
    tied = text.vocab_size * text.hidden_size if shares else 0
    found = []
    for stage, (start, end) in enumerate(pairwise(bounds)):
        own = part_ids[start:end]
        stored = [Part(template, part_id) for part_id in own]
        parameters = [p for part in stored for p in part.parameters()]
        parts = [Part(plain, part_id) for part_id in own]
        for part, quantized in zip(parts, stored):
            _keep_int8_inputs(part, quantized)
            if lora:
                add_adapters(part, copy.deepcopy(lora), settings.seed)
        trained = sum(p.numel() for part in parts for p in part.parameters() if p.requires_grad)
        size, interval = (sequences, length), settings.activation_checkpoint_interval
        # it fails for a model that looks at its data
        with failures_at(f"{type(config).__name__}: memory cannot be predicted"):
            kept, peak, left, forward, backward = _measure_passes(
                parts, interval, size, text.hidden_size, isolated
            )
        extra = max((p.numel() for p in parameters if is_quantized(p)), default=0) * template.dtype.itemsize
        if stage == len(bounds) - 2:  # DeepSpeed keeps logits of two earlier micro-batches, the graph of one
            logits = tokens * text.vocab_size * template.dtype.itemsize
            extra += min(2, micro_batches - 1) * logits + min(1, micro_batches - 1) * left
        found.append(
            StageFootprint(
                sum(part_id.kind == LAYER for part_id in own),
                sum(map(count_bytes, parameters)) + (4 * trained if lora else 0),
                trained,
                trained * _trained_bytes(settings, template.dtype),
                kept,
                peak - kept + extra,
                min(len(bounds) - 1 - stage, micro_batches),
                forward,
                backward,
                tied if stage in (0, len(bounds) - 2) else 0,
            )
        )
    return found


def _trained_bytes(settings: Settings, dtype: torch.dtype) -> int:
    """Return the bytes of gradient and optimizer state per trained value."""
    name = str(settings.ds_config.get("optimizer", {}).get("type", "")).lower()
    states = 4 * OPTIMIZER_STATES.get(name, 2)
    if settings.lora or dtype == torch.float32:
        return 4 + states
    return dtype.itemsize + 4 + 4 + states  # fp32 copies of gradients and weights, see `complete_ds_config`


class FakeTensorMeter(TorchDispatchMode):
    """Counts operations, and the bytes of live tensors that were created while it is active."""

    def __init__(self, known: list[Tensor]):
        """Count no tensors in `known`."""
        super().__init__()
        self.now = self.peak = self.flops = 0
        self._storages = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if count := COUNTERS.get(func._overloadpacket):
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._storages:
                self._storages.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, storage.nbytes())
        return result

    def _forget(self, nbytes: int) -> None:
        self.now -= nbytes


def _measure_passes(
    parts: list[Part], interval: int, shape: tuple[int, int], width: int, isolated: bool
) -> tuple[int, int, int, int, int]:
    """Run one micro-batch forward and backward through the parts of a stage, on fake tensors.

    Args:
        interval: number of parts that one activation checkpoint covers; 0: no recomputation.
        shape: sequences and tokens of the micro-batch.
        width: of hidden states.
        isolated: whether token positions accompany the hidden states.

    Returns:
        Bytes kept between the passes, at the peak and by the graph afterwards; the operations of both passes.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        known = [tensor for part in parts for tensor in _make_fake(part)]
        with FakeTensorMeter(known) as meter:
            ids = torch.zeros(shape, dtype=torch.int64, device="cpu")
            x: Any = torch.zeros(*shape, width, dtype=parts[0].dtype, device="cpu", requires_grad=True)
            if parts[0].part_id.kind == EMBEDDING:
                x = ids
            if isolated:
                x = x, torch.zeros(shape, dtype=torch.int64, device="cpu")
            step = interval or len(parts)
            for own in (parts[start : start + step] for start in range(0, len(parts), step)):
                if interval:
                    x = checkpoint(nn.Sequential(*own), x, use_reentrant=False, preserve_rng_state=False)
                else:
                    x = nn.Sequential(*own)(x)
            is_last = parts[-1].part_id.kind == AFTER
            output = causal_lm_loss(x, ids) if is_last else x[0] if isolated else x
            del x
            kept, forward_flops = meter.now, meter.flops
            output.backward(torch.ones_like(output))
            before = meter.now
            del output
            left = before - meter.now
    return kept, meter.peak, left, forward_flops, meter.flops - forward_flops


def _keep_int8_inputs(part: Part, quantized: Part) -> None:
    """Keep inputs as long as bitsandbytes does in int8: until the graph is gone, also where it is recomputed.

    Args:
        part: with unquantized layers.
        quantized: the same part, with quantized layers.
    """
    for name, module in quantized.named_modules():
        if hasattr(getattr(module, "weight", None), "SCB"):
            part.get_submodule(name).register_forward_hook(_keep_input)


def _keep_input(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    node: Any = output.grad_fn
    if node is not None:
        node.metadata["input"] = inputs[0]


def _make_fake(part: Part) -> list[Tensor]:
    """Replace parameters and buffers of `part` by fake ones with gradients, and return all of them."""
    part.to_empty(device="cpu")
    gradients = []
    for parameter in part.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    return [*part.parameters(), *part.buffers(), *gradients]
