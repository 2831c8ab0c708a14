"""Options of train.json, which `python -m ds_compress.hf.finetune` reads."""

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from peft import LoraConfig
from pydantic import AfterValidator, Field

from ds_compress.errors import CompressionError, shown
from ds_compress.registry.options import Options, Steps, validate

NAME = "train.json"
"""Name of the settings in errors, and of their copy in the folder of a run."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
"""Values of `dtype`."""


def _check_text(text: str) -> str:
    """Refuse characters that neither a file system nor a tokenizer takes."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("is not allowed: should be text without NUL and without half a surrogate pair")
    return text


Text = Annotated[str, AfterValidator(_check_text)]


class Lora(Options):
    """Low-rank adapters."""

    r: int = Field(default=16, ge=1, le=4096)
    """Rank of the adapters."""
    alpha: float = Field(default=32, gt=0)
    """Their output is multiplied by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of their inputs that is dropped in training."""
    target_modules: str | list[str] = "all-linear"
    """Names of the modules to adapt, or all linear ones."""

    def to_peft(self, base: str) -> LoraConfig:
        """Return peft's config; `base` is the model that the adapters belong to."""
        return LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            target_modules=self.target_modules,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )


class Data(Options):
    """Training data: plain text, or records.

    A record has "text", which is learned whole; or "prompt" and "completion", of which the completion is
    learned; or "messages" (a list of {"role", "content"}), of which the assistant's turns are learned, in the
    form of the tokenizer's chat template.
    """

    train: Text
    """A .txt, .json, .jsonl or .parquet file, or the name of a data set for `datasets`."""
    eval: Text | None = None
    """Held-out data, given like `train`; null: the last `eval_share` of `train`."""
    eval_share: float = Field(default=0.05, gt=0, lt=0.5)
    """Share of `train` that is held out if there is no `eval`."""
    split: Text = "train"
    """Split of a named data set to read as `train`."""
    documents: Literal["file", "paragraph", "line"] = "paragraph"
    """What a document of a text file is; blank lines separate paragraphs."""
    packing: Literal["isolated", "joined"] = "isolated"
    """How documents fill sequences of one length, one after the other. isolated: no token attends to another
    document, and stages send a position beside every hidden state; joined: tokens attend to all tokens before
    them."""


class LearningRate(Options):
    """How the learning rate changes during the run, by the schedules of Transformers."""

    name: Literal[
        "constant",
        "constant_with_warmup",
        "cosine",
        "cosine_with_restarts",
        "inverse_sqrt",
        "linear",
        "polynomial",
    ]
    """Name of the schedule, as in `transformers.get_scheduler`; it ends with the last step."""
    warmup_steps: float = Field(default=0, ge=0, le=10**9)
    """Steps in which the rate grows from 0 to that of the optimizer; below 1: their share of all steps."""

    def count_warmup_steps(self, steps: int) -> int:
        """Return the number of warm-up steps in a run of so many `steps`."""
        return math.ceil(self.warmup_steps * (steps if self.warmup_steps < 1 else 1))


Length = Annotated[int, Field(ge=8, le=2**20)]


class Settings(Options):
    model: Text
    """Folder of a Transformers checkpoint: config.json and safetensors files."""
    tokenizer: Text | None = None
    """Folder of a tokenizer; null: the model's."""
    out: Text
    """Folder for checkpoints, losses and a copy of the settings. Machines that do not share it keep the
    checkpoints of their own stages; rank 0's machine gets the weights of all when the run ends."""
    data: Data
    """What to train on."""
    ds_config: dict[str, Any]
    """An ordinary DeepSpeed config, "ds_compress" block included."""
    lora: Lora | None = None
    """Train adapters; null: train all parameters."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of the model's weights; null: as in the checkpoint. Adapters are fp32. If all parameters are
    trained in bf16, the optimizer keeps an fp32 copy of them."""
    quantize: Literal["nf4", "int8"] | None = None
    """Hold the linear layers of a whole checkpoint in 4 bits (nf4, double quantization) or 8 bits of
    bitsandbytes; needs "lora". null: as in the checkpoint, whose config.json may name a quantization."""
    sequence_length: Length | Annotated[list[Length], Field(min_length=1, max_length=64)] = 1024
    """Tokens of a sequence, which documents fill one after the other; or a list of lengths: each document has
    a sequence of its own, of the smallest length that holds it. All sequences of a step have one length."""
    stages: int | list[int] = Field(default=2)
    """Number of pipeline stages, or a list: the number of layers of each."""
    steps: int | None = Field(default=None, ge=1, le=10**9)
    """Training steps; null: as `epochs` says."""
    epochs: float = Field(default=1.0, gt=0, le=10**6)
    """Passes over the training data."""
    save_every: Steps = 0
    """Steps between checkpoints; 0: one at the end."""
    eval_every: Steps = 0
    """Steps between evaluations; the checkpoint with the lowest perplexity is kept under the name `best`.
    0: evaluate before and after the run alone."""
    early_stop: int | None = Field(default=None, ge=1, le=10**6)
    """Evaluations in a row without a new lowest perplexity that end the run; null: none do."""
    lr_schedule: LearningRate | None = None
    """null: the "scheduler" of `ds_config`, or a constant rate."""
    eval_sequences: int = Field(default=64, ge=1, le=10**6)
    """Largest number of held-out sequences for the perplexity before and after training."""
    activation_checkpoint_interval: int = Field(default=0, ge=0, le=1000)
    """Layers to recompute together in the backward pass; 0: keep all activations."""
    seed: int = Field(default=1234, ge=0, lt=2**32)
    """Seed of the order of the data, of adapters and of dropout."""

    @property
    def lengths(self) -> list[int]:
        """Lengths of sequences in tokens, ascending."""
        given = self.sequence_length
        return [given] if isinstance(given, int) else sorted(set(given))

    @property
    def sends_positions(self) -> bool:
        """Whether stages send positions, which keep documents in one sequence apart."""
        return isinstance(self.sequence_length, int) and self.data.packing == "isolated"

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """Sequences of a micro-batch, and micro-batches of a step, as `ds_config` says.

        Raises:
            CompressionError: it says no number of sequences.
        """
        found = []
        for key, default in (("train_micro_batch_size_per_gpu", None), ("gradient_accumulation_steps", 1)):
            value = self.ds_config.get(key, default)
            if type(value) is not int or value < 1:  # true is an int, too
                raise CompressionError(f"{NAME}.ds_config.{key}: should be 1 or more; came {shown(value)}")
            found.append(value)
        return found[0], found[1]


def read_settings(path: Path) -> Settings:
    """Read and check the settings in a file.

    Raises:
        CompressionError: there is no such file, it is not JSON, or a value is not allowed; the first such
            value is named by its JSON path.
    """
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise CompressionError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CompressionError(f"{path}: not JSON: {' '.join(str(error).split())}") from None
    return validate(Settings, value, path.name)
