"""A Transformers checkpoint as a PipelineModule: each rank builds and reads only its own stage."""

import copy
import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from peft import LoraConfig
from transformers import AutoConfig, PretrainedConfig

from ds_compress.errors import CompressionError, failures_at, shown
from ds_compress.hf.collective import gather_digests, raised_on_all_ranks
from ds_compress.hf.part import (
    EMBEDDING,
    LAYER,
    Part,
    PartId,
    add_adapters,
    causal_lm_loss,
    check_lora,
    list_parts,
    module_paths,
)
from ds_compress.hf.quantized import find_quantizer, without_quantization
from ds_compress.hf.structure import ModelTemplate
from ds_compress.hf.verify import verify_parts
from ds_compress.hf.weights import load_weights, open_slices

TIED = "embedding"
"""DeepSpeed's key of an embedding whose weight is the head's too."""


class LoadedPart(Part):
    """Hold a part with its weights, on this rank's device."""

    def __init__(
        self,
        template: ModelTemplate,
        part_id: PartId,
        checkpoint: Path,
        lora: LoraConfig | None = None,
        seed: int = 0,
    ):
        super().__init__(template, part_id)
        device = torch.device(get_accelerator().current_device_name())
        if self.tied_head:  # the checkpoint stores its weight as the embedding's
            self.set_head(LoadedEmbedding(template, PartId(EMBEDDING), checkpoint).weight)
        load_weights(self.model, checkpoint, device, template.quantizer)
        if lora:
            add_adapters(self, copy.deepcopy(lora), seed)
        if template.quantizer:
            self.register_state_dict_post_hook(_drop_quantization_state)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what a checkpoint holds, which may leave out frozen weights.

        Raises:
            CompressionError: it was trained with other adapters, or has other weights; unless `strict` is
                False.
        """
        own = self.state_dict()
        frozen = {name for name, p in self.named_parameters() if not p.requires_grad}
        common = own.keys() & state_dict.keys()
        problems = {
            "also trained": state_dict.keys() - own.keys(),
            "does not have": own.keys() - state_dict.keys() - frozen,
            "has another shape of": {name for name in common if own[name].shape != state_dict[name].shape},
        }
        for why, names in problems.items() if strict else ():
            if names:
                adapters = [name.partition(".lora_")[0] for name in names if ".lora_" in name]
                which = {name.rpartition(".")[2] for name in adapters} or names
                raise CompressionError(
                    f"lora: {self.part_id}: the checkpoint {why} {shown(sorted(which))}; should be the "
                    '"lora" that it was trained with'
                )
        return super().load_state_dict(state_dict, strict=False, assign=assign)

    def set_head(self, weight: torch.nn.Parameter) -> None:
        """Compute logits with this weight."""
        self.model.get_submodule(str(self.tied_head)).weight = weight


class LoadedEmbedding(LoadedPart):
    """Hold the embedding of tokens alone."""

    @property
    def weight(self) -> torch.nn.Parameter:
        """The weight, [vocabulary, width]."""
        return self.model.get_submodule(self._embedding).weight  # type: ignore[return-value]


class TransformersPipeline(PipelineModule):
    """Run the parts of a Transformers model as a pipeline, cut at given bounds."""

    def __init__(self, specs: list[LayerSpec], bounds: list[int], **options: Any):
        self._bounds = bounds
        super().__init__(specs, loss_fn=causal_lm_loss, **options)

    @property
    def stage_layers(self) -> list[int]:
        """Return the number of the model's layers on each stage, as `stages` lists them."""
        are_layers = [spec.module_args[1].kind == LAYER for spec in self._layer_specs]
        return [sum(are_layers[start:end]) for start, end in pairwise(self._bounds)]

    def _partition_layers(self, method: str) -> None:
        self.parts = self._bounds
        self._set_bounds(*self.parts[self.stage_id : self.stage_id + 2])

    def _build(self) -> None:
        with raised_on_all_ranks():
            super()._build()
        if TIED in self.tied_modules:  # DeepSpeed trains it as one weight, on the first and the last stage
            for part in self.children():
                if isinstance(part, LoadedPart) and part.tied_head:
                    part.set_head(self.tied_modules[TIED].weight)

    def _synchronize_tied_weights(self) -> None:
        """Have DeepSpeed send the tied embedding only where copies differ: all stages have read it."""
        for shared in self.tied_comms.values():
            weight = shared["module"].weight.detach()
            data = weight.cpu().contiguous().view(torch.uint8).numpy()
            if len({*gather_digests(data, shared["group"])}) > 1:
                super()._synchronize_tied_weights()


def _drop_quantization_state(part: LoadedPart, state: dict[str, Any], *_: Any) -> None:
    """Leave out scales of frozen quantized weights, which each run reads from the model's checkpoint."""
    known = dict(itertools.chain(part.named_parameters(), part.named_buffers()))
    for name in [name for name in state if name not in known]:
        del state[name]


def _return_logits(module: torch.nn.Module, logits: torch.Tensor) -> torch.Tensor:
    """Stand for the last layer of a tied pipeline: the head before it has computed the logits."""
    return logits


def load_config(folder: Path) -> PretrainedConfig:
    """Read the config of a checkpoint.

    Raises:
        CompressionError: there is no such checkpoint, or it is damaged.
    """
    with open_slices(folder):  # a damaged file is refused before anything is built
        return read_config(folder)


def read_config(folder: Path) -> PretrainedConfig:
    """Read the config in a folder, which may hold no weights.

    Raises:
        CompressionError: there is none.
    """
    if not (folder / "config.json").exists():
        raise CompressionError(
            f"{folder}: config.json is missing; should be the folder of a Transformers model, or of its "
            "config.json alone (hf download NAME config.json --local-dir FOLDER)"
        )
    with failures_at(str(folder)):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)  # by default, every rank asks


def assign_layers(costs: Sequence[float], stages: int | Sequence[int]) -> list[int]:
    """Return how many layers each stage gets, at least one.

    Args:
        costs: of each layer; the first includes the embedding, the last the head.
        stages: their number, for the least cost of the most expensive stage; or the layers of each.

    Raises:
        CompressionError: there are more stages than layers, or the given counts do not add up.
    """
    if not isinstance(stages, int):
        given = list(stages)
        if min(given, default=0) < 1 or sum(given) != len(costs):
            raise CompressionError(
                f"stages: {shown(given)} is not allowed: should be the layers of each stage, 1 at least, "
                f"{len(costs)} together"
            )
        return given
    if not 1 <= stages <= len(costs):
        raise CompressionError(
            f"stages: {stages} is not allowed: the model has {len(costs)} layers, and each stage needs one"
        )

    @lru_cache(None)
    def balance(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Return the largest cost of a stage, and the counts, for layers from `start` on `left` stages."""
        if left == 1:
            return sum(costs[start:]), (len(costs) - start,)
        choices = []
        for count in range(1, len(costs) - start - left + 2):
            largest, counts = balance(start + count, left - 1)
            choices.append((max(largest, sum(costs[start : start + count])), (count, *counts)))
        return min(choices)

    return list(balance(0, stages)[1])


def plan_parts(
    config: PretrainedConfig,
    stages: int | Sequence[int],
    lora: LoraConfig | None,
    dtype: torch.dtype | None,
    positions: bool,
    quantize: str | None = None,
) -> tuple[ModelTemplate, list[PartId], list[int]]:
    """Return the template of the parts, the parts, and the bounds of the stages in them; reads no weights.

    The embedding is on the stage of the first layer, the head on that of the last. Arguments are those of
    `pipeline_module`.
    """
    if lora:
        check_lora(lora)
    chosen: Any = dtype or config.dtype or torch.float32
    quantizer = find_quantizer(config, quantize, chosen, lora is None)
    config = without_quantization(config)
    structure = verify_parts(config, positions, lora)
    template = ModelTemplate(config, chosen, structure, quantizer)
    parts = list_parts(config.num_hidden_layers)
    sizes = template.count_parameters()
    costs = [float(sum(sizes[path] for path in module_paths(template, part_id))) for part_id in parts]
    layer_costs = costs[2:-1]
    layer_costs[0] += costs[0] + costs[1]
    layer_costs[-1] += costs[-1]
    counts = assign_layers(layer_costs, stages)
    bounds = [0, *(2 + end for end in itertools.accumulate(counts))]
    bounds[-1] = len(parts)
    return template, parts, bounds


def pipeline_module(
    checkpoint: str | Path,
    stages: int | Sequence[int],
    lora: LoraConfig | None = None,
    *,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    positions: bool = False,
    activation_checkpoint_interval: int = 0,
    seed: int = 1234,
    topology: Any = None,
) -> PipelineModule:
    """Build a pipeline for `deepspeed.initialize` from a causal language model that Transformers saved.

    Batches are (ids, labels), both [batch, length] int64, labels as in `causal_lm_loss`; with `positions`
    they are ((ids, positions), labels). All ranks call this, after `deepspeed.init_distributed`.

    Args:
        checkpoint: folder with config.json and safetensors files.
        stages: their number, to balance parameters; or the number of layers of each.
        lora: train fp32 adapters and nothing else; None: train all parameters.
        dtype: of the weights; None: as in the checkpoint.
        quantize: "nf4" or "int8": hold the linear layers in 4 or 8 bits of bitsandbytes; None: as in the
            checkpoint.
        positions: batches hold positions that restart with each document, and no token attends to another
            document.
        activation_checkpoint_interval: layers to recompute together in the backward pass; 0: keep all
            activations.
        seed: of the adapters' initial weights.
        topology: DeepSpeed's process topology, needed for more than stages and replicas.

    Raises:
        CompressionError: there is no such checkpoint, or the model cannot be cut into stages.
    """
    with raised_on_all_ranks():
        folder = Path(checkpoint)
        template, parts, bounds = plan_parts(load_config(folder), stages, lora, dtype, positions, quantize)
        specs = [LayerSpec(LoadedPart, template, part_id, folder, lora, seed) for part_id in parts]
        if template.tied_head and not lora:
            tied = template, parts[0], folder
            specs[0] = TiedLayerSpec(TIED, LoadedEmbedding, *tied)
            specs.append(TiedLayerSpec(TIED, LoadedEmbedding, *tied, forward_fn=_return_logits))
            bounds[-1] += 1
        if topology and topology.get_dim("pipe") != len(bounds) - 1:
            raise CompressionError(
                f"stages: {shown(stages)} is not allowed: should be {topology.get_dim('pipe')}, as in "
                "the topology"
            )
    return TransformersPipeline(
        specs,
        bounds,
        num_stages=None if topology else len(bounds) - 1,
        topology=topology,
        activation_checkpoint_interval=activation_checkpoint_interval,
        activation_checkpoint_func=non_reentrant_checkpoint,
    )
