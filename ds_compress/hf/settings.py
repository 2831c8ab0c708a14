"""What train.json says: every option of `python -m ds_compress.hf.finetune`, its default, its check."""

import json
from pathlib import Path
from typing import Any, Literal

from peft import LoraConfig
from pydantic import Field

from ds_compress.errors import CompressionError
from ds_compress.registry.options import Options, Steps, validate

NAME = "train.json"
"""Of the settings, in errors and in the folder of a run."""


class Lora(Options):
    """Low-rank adapters."""

    r: int = Field(default=16, ge=1, le=4096)
    """Rank of the adapters."""
    alpha: float = Field(default=32, gt=0)
    """What they add is multiplied by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of their inputs that is dropped in training."""
    target_modules: str | list[str] = "all-linear"
    """Names of the modules that are adapted, or all linear ones."""

    def config(self, base: str) -> LoraConfig:
        """For peft; `base` names the model that they belong to."""
        targets = self.target_modules
        return LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            target_modules=targets,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )


class Subspace(Options):
    """Few coefficients cross in the place of a hidden state, in a basis that is trained with the model."""

    rank: int = Field(ge=1, le=2**16)
    """Coefficients of a hidden state."""
    samples: int = Field(default=32, ge=1, le=10**5)
    """Sequences whose hidden states the basis is found from before training: their principal components."""


class Data(Options):
    """What is learned: plain text, or records.

    Of a record either "text" is learned whole, or the "completion" to a "prompt", or what the assistant says
    in "messages" (a list of {"role", "content"}) in the form of the tokenizer's chat template.
    """

    train: str
    """A .txt, .jsonl or .parquet file, or a data set that `datasets` knows by this name."""
    eval: str | None = None
    """The same, held out; null: a share of `train`, at its end."""
    eval_share: float = Field(default=0.05, gt=0, lt=0.5)
    """How much of `train` is held out where there is no `eval`."""
    split: str = "train"
    """Which part of a named data set is read as `train`."""
    documents: Literal["file", "paragraph", "line"] = "paragraph"
    """What a document of a text file is; paragraphs are what blank lines part."""
    packing: Literal["isolated", "joined"] = "isolated"
    """Documents fill sequences one behind the other. isolated: no token attends to another document, and
    stages send each other a position beside every hidden state; joined: tokens attend to all before them."""


class Settings(Options):
    model: str
    """Folder of a Transformers checkpoint: config.json and safetensors files."""
    tokenizer: str | None = None
    """Folder of a tokenizer; null: that of the model."""
    out: str
    """Folder that the run writes: checkpoints, and what they were trained with."""
    data: Data
    """What is learned."""
    ds_config: dict[str, Any]
    """An ordinary DeepSpeed config, "ds_compress" block included."""
    lora: Lora | None = None
    """Train adapters; null: train all parameters."""
    subspace: Subspace | None = None
    """Experimental: narrower messages. What is trained computes its best only with its basis between the
    layers, which `ds-compress merge` writes beside the model; null: hidden states cross as they are."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Of the model's weights; null: as the checkpoint has them. Adapters are fp32, and so is a basis."""
    sequence_length: int = Field(default=1024, ge=8, le=2**20)
    """Tokens."""
    stages: int | list[int] = Field(default=2)
    """Of the pipeline; a list: how many layers each has."""
    steps: int | None = Field(default=None, ge=1, le=10**9)
    """Training steps; null: `epochs` say how many."""
    epochs: float = Field(default=1.0, gt=0, le=10**6)
    """How often the data are visited."""
    save_every: Steps = 0
    """Steps between checkpoints; 0: only at the end."""
    eval_sequences: int = Field(default=64, ge=1, le=10**6)
    """How many held-out sequences perplexity is measured on, at most, before and after training."""
    activation_checkpoint_interval: int = Field(default=0, ge=0, le=1000)
    """Layers at a time that are computed again in the backward pass; 0 keeps all activations."""
    prompt: str | None = None
    """Continued at the end, as a sample; null: no sample."""
    seed: int = Field(default=1234, ge=0, lt=2**32)
    """Of the order of the data, of adapters and of dropout."""


def read(path: Path) -> Settings:
    """The settings in a file.

    Raises:
        CompressionError: no such file, not JSON, or the first thing wrong with it at its JSON path.
    """
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise CompressionError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CompressionError(f"{path}: not JSON: {' '.join(str(error).split())}") from None
    return validate(Settings, value, path.name)
