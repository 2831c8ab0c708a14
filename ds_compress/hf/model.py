"""A Transformers checkpoint as a PipelineModule: each rank builds and reads its own stage alone."""

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from peft import LoraConfig
from transformers import AutoConfig, PretrainedConfig

from ds_compress.engine.subspace import SubspacePipeline
from ds_compress.errors import CompressionError, in_one_line
from ds_compress.hf import lora as adapters
from ds_compress.hf import weights
from ds_compress.hf.loss import causal_lm_loss
from ds_compress.hf.part import EMBEDDING, Part, Place, own_paths, places
from ds_compress.hf.skeleton import Skeleton
from ds_compress.hf.stages import layers_per_stage
from ds_compress.hf.verify import check

TIED = "embedding"
"""Key of the embedding that also makes the logits."""


class LoadedPart(Part):
    """A part with its weights, on this rank's device."""

    def __init__(
        self,
        skeleton: Skeleton,
        place: Place,
        checkpoint: Path,
        lora: LoraConfig | None = None,
        seed: int = 0,
    ):
        super().__init__(skeleton, place)
        device = torch.device(get_accelerator().current_device_name())
        if self.tied_head:  # its weight is stored as the embedding's
            self.set_head(LoadedEmbedding(skeleton, Place(EMBEDDING), checkpoint).weight)
        weights.load(self.model, checkpoint, device)
        if lora:
            adapters.adapt(self, copy.deepcopy(lora), seed)

    def set_head(self, weight: torch.nn.Parameter) -> None:
        """Make logits with this weight."""
        self.model.get_submodule(str(self.tied_head)).weight = weight


class LoadedEmbedding(LoadedPart):
    """The embedding by itself."""

    @property
    def weight(self) -> torch.nn.Parameter:
        return self.model.get_submodule(self._embedding).weight  # type: ignore[return-value]


class TransformersPipeline(SubspacePipeline):
    """Parts of a Transformers model, cut where it is told."""

    def __init__(self, specs: list[LayerSpec], bounds: list[int], **options: Any):
        self._bounds = bounds
        super().__init__(specs, loss_fn=causal_lm_loss, **options)

    def _partition_layers(self, method: str) -> None:
        self.parts = self._bounds
        self._set_bounds(*self.parts[self.stage_id : self.stage_id + 2])

    def _build(self) -> None:
        super()._build()
        if TIED in self.tied_modules:  # trained as one weight, on the first stage and on the last
            for part in self.children():
                if isinstance(part, LoadedPart) and part.tied_head:
                    part.set_head(self.tied_modules[TIED].weight)


def _as_they_are(module: torch.nn.Module, logits: torch.Tensor) -> torch.Tensor:
    return logits


def config_of(folder: Path) -> PretrainedConfig:
    """The config of a checkpoint.

    Raises:
        CompressionError: no such checkpoint.
    """
    weights.files(folder)
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CompressionError(f"{folder}: {in_one_line(error)}") from None


def layer_specs(
    folder: Path,
    stages: int | Sequence[int],
    lora: LoraConfig | None,
    dtype: torch.dtype | None,
    positions: bool,
    seed: int,
) -> tuple[list[LayerSpec], list[int]]:
    """All layers of the pipeline, and where its stages begin and end in them; arguments as of
    `pipeline_module`.

    The embedding stays with the first layer of the model, what makes logits with the last one.
    """
    config: Any = config_of(folder)
    if lora:
        adapters.check(lora)
    anatomy = check(config, positions)
    skeleton = Skeleton(config, dtype or config.dtype or torch.float32, anatomy)
    parts = places(config.num_hidden_layers)
    sizes = skeleton.sizes()
    costs = [float(sum(sizes[path] for path in own_paths(skeleton, place))) for place in parts]
    per_layer = costs[2:-1]
    per_layer[0] += costs[0] + costs[1]
    per_layer[-1] += costs[-1]
    counts = layers_per_stage(per_layer, stages)
    specs = [LayerSpec(LoadedPart, skeleton, place, folder, lora, seed) for place in parts]
    if skeleton.tied and not lora:
        specs[0] = TiedLayerSpec(TIED, LoadedEmbedding, skeleton, parts[0], folder)
        specs.append(
            TiedLayerSpec(TIED, LoadedEmbedding, skeleton, parts[0], folder, forward_fn=_as_they_are)
        )
    bounds = [0, *(2 + end for end in itertools.accumulate(counts))]
    bounds[-1] = len(specs)
    return specs, bounds


def pipeline_module(
    checkpoint: str | Path,
    stages: int | Sequence[int],
    lora: LoraConfig | None = None,
    *,
    dtype: torch.dtype | None = None,
    positions: bool = False,
    activation_checkpoint_interval: int = 0,
    seed: int = 1234,
    topology: Any = None,
    rank: int | None = None,
    samples: Sequence[Any] = (),
) -> PipelineModule:
    """A causal language model that Transformers saved, as a pipeline for `deepspeed.initialize`.

    Its batches are (ids, labels), both [batch, length] int64, labels as in `causal_lm_loss`; with `positions`
    ((ids, positions), labels). `deepspeed.init_distributed` has been called, by all ranks, as this is.

    Args:
        checkpoint: folder with config.json and safetensors files.
        stages: their number, so that parameters are spread evenly, or how many layers each has.
        lora: train adapters, in fp32, and nothing else; None trains all parameters.
        dtype: of the weights; None: as the checkpoint has them.
        positions: batches say where documents begin, and no token attends to another document.
        activation_checkpoint_interval: layers that are computed again in the backward pass at a time; 0 keeps
            all activations.
        seed: of the adapters.
        topology: of DeepSpeed, where there is more than stages and replicas.
        rank, samples: experimental, as of `SubspacePipeline`: so many coefficients cross in the place of a
            hidden state, in a basis that begins as principal components for these inputs.

    Raises:
        CompressionError: no such checkpoint, or the model cannot be cut into stages.
    """
    specs, bounds = layer_specs(Path(checkpoint), stages, lora, dtype, positions, seed)
    return TransformersPipeline(
        specs,
        bounds,
        num_stages=None if topology else len(bounds) - 1,
        topology=topology,
        activation_checkpoint_interval=activation_checkpoint_interval,
        activation_checkpoint_func=non_reentrant_checkpoint,
        rank=rank,
        samples=samples,
    )
