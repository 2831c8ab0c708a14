"""The tasks of each preset and their sizes.

paper       the two experiments of arXiv 2401.07788 as published
cpu         the same for small machines
revisits    the same with samples that come back more often
small       several architectures, fine-tuned and from scratch: a minute a run
guard       the same, smaller from scratch: settings that may hurt, which the guard is judged by
wide        the same task with hidden states of 256 values
real        a pretrained model of 135 million parameters (SmolLM2, a Llama with attention sinks)
long        from scratch for 300 to 4,800 steps, fine-tuned for 1,000: what a setting costs as time goes on
tied        from scratch with one embedding for input and output and a large vocabulary
replicas    the same on two data-parallel replicas, with hidden states of 128 values
smoke       for tests
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar


@dataclass(frozen=True)
class VisionSize:
    """Size of a vision task: a ResNet trained with SGD and a cosine schedule; one group per stage."""

    kind: ClassVar = "vision"
    train_images: int
    test_images: int
    width: int  # channels of the first group; each later one has twice as many
    blocks: int  # of a group
    stem_stride: int
    epochs: int
    cosine_epochs: int  # length of the annealing; the paper's notebook stops half way
    batch: int
    lr: float
    momentum: float = 0.9
    weight_decay: float = 5e-4
    pretrain_images: int = 0  # images of their own, on which the model is pretrained here; 0: from scratch
    pretrain_epochs: int = 0


@dataclass(frozen=True)
class LanguageSize:
    """Size of a language task: a model trained with AdamW and linear decay; four stages of equally many
    blocks."""

    kind: ClassVar = "language"
    layers: int
    hidden: int
    heads: int
    seq: int  # tokens of a block of text
    tokenizer: str | None  # folder beside the text; None: a token is a byte
    weights: str | None  # folder beside the text; None: trained here
    pretrain_steps: int  # without compression; 0: from scratch
    pretrain_batch: int
    pretrain_lr: float
    blocks: int | None  # of text to fine-tune on; None: all of train.txt
    test_blocks: int | None
    epochs: int
    batch: int
    lr: float
    dropout: float
    gradient_clipping: float = 1.0  # DeepSpeed's default, and that of the paper's trainer
    architecture: str = "gpt"  # of `architectures.py`


@dataclass(frozen=True)
class CheckpointSize(LanguageSize):
    """Size of a language task that fine-tunes a checkpoint of Transformers."""

    lora_rank: int = 0  # of adapters of every linear layer, which alone are trained; 0: all weights are


@dataclass(frozen=True)
class TiedSize(LanguageSize):
    """Size of a language task whose first and last layer have one weight, [vocabulary, hidden]."""

    vocabulary: int = 0


@dataclass(frozen=True)
class EncoderSize(LanguageSize):
    """Size of a task that fine-tunes an encoder of sentences; a block is two passages of `seq` tokens."""

    kind: ClassVar = "encoder"


@dataclass(frozen=True)
class ReplicatedSize(LanguageSize):
    """Size of a language task that data-parallel replicas train, each on its part of every batch."""

    replicas: int = 2


Size = VisionSize | LanguageSize
Preset = Mapping[str, Size]
"""By the name of the task."""

LANGUAGE = LanguageSize(
    layers=4,
    hidden=128,
    heads=4,
    seq=128,
    tokenizer=None,
    weights=None,
    pretrain_steps=2500,
    pretrain_batch=16,
    pretrain_lr=1e-3,
    blocks=400,
    test_blocks=192,
    epochs=4,
    batch=8,
    lr=3e-4,
    dropout=0.0,
)

CPU: Preset = {
    "vision": VisionSize(10_000, 5_000, 16, 1, stem_stride=2, epochs=8, cosine_epochs=8, batch=128, lr=0.01),
    "language": LANGUAGE,
}

FINETUNED = replace(
    LANGUAGE,
    hidden=64,
    pretrain_steps=800,
    pretrain_batch=8,
    pretrain_lr=2e-3,
    epochs=1,
    batch=4,
    lr=1e-3,
)


def both(name: str, **options: Any) -> dict[str, LanguageSize]:
    """An architecture in its two tasks: 100 steps of fine-tuning, and 300 steps from scratch."""
    finetuned = replace(FINETUNED, architecture=name, **options)
    scratch = replace(finetuned, pretrain_steps=0, blocks=1200, lr=2e-3)
    return {f"{name}-finetuned": finetuned, f"{name}-scratch": scratch}


WIDE_CNN = VisionSize(2_560, 2_000, 32, 1, stem_stride=2, epochs=3, cosine_epochs=3, batch=64, lr=0.02)

SMALL: Preset = {
    **both("llama"),
    **both("gpt"),
    **both("neox"),
    "cnn-finetuned": replace(WIDE_CNN, epochs=2, cosine_epochs=2, pretrain_images=5_120, pretrain_epochs=3),
    "cnn-scratch": WIDE_CNN,
}

GUARD: Preset = {
    **{
        f"{name}-scratch": replace(
            FINETUNED,
            architecture=name,
            pretrain_steps=0,
            seq=64,
            blocks=1600,
            batch=8,
            test_blocks=384,
            lr=3e-3,
        )
        for name in ("llama", "gpt", "neox")
    },
    **{f"{name}-finetuned": SMALL[f"{name}-finetuned"] for name in ("llama", "gpt", "neox", "cnn")},
    "cnn-scratch": SMALL["cnn-scratch"],
}

REPLICATED: Preset = {
    task: ReplicatedSize(**vars(size))
    for name in ("gpt", "llama")
    for task, size in both(name, hidden=128).items()
}

PRETRAINED: Any = {"pretrain_steps": 0, "pretrain_batch": 0, "pretrain_lr": 0.0, "epochs": 1}
"""What tasks have in common whose weights others made."""
SMOLLM2 = CheckpointSize(
    **PRETRAINED,
    layers=30,
    hidden=576,
    heads=9,
    seq=128,
    tokenizer="smollm2",
    weights="smollm2",
    blocks=400,
    test_blocks=64,
    batch=2,
    lr=1e-4,
    dropout=0.0,
)
MINILM = EncoderSize(
    **PRETRAINED,
    layers=6,
    hidden=384,
    heads=12,
    seq=64,
    tokenizer="minilm",
    weights="minilm",
    blocks=1600,
    test_blocks=512,
    batch=8,
    lr=5e-5,
    dropout=0.1,
)

REAL: Preset = {
    "smollm2-full": SMOLLM2,
    "smollm2-lora": replace(SMOLLM2, lr=5e-4, lora_rank=16),
    "minilm-full": MINILM,
}


def long(name: str, steps: int, **options: Any) -> LanguageSize:
    """An architecture from random weights, a block of text for each step and sample."""
    size = replace(
        LANGUAGE, architecture=name, pretrain_steps=0, blocks=4 * steps, batch=4, epochs=1, lr=1e-3
    )
    return replace(size, **options)


LONG: Preset = {
    **{f"{name}-{steps}": long(name, steps) for name in ("llama", "moe") for steps in (300, 1200, 4800)},
    "llama-300-batch16": long("llama", 300, batch=16, blocks=16 * 300),
    "llama-1200-wide": long("llama", 1200, hidden=512, heads=8),
    "smollm2-lora-1000": replace(REAL["smollm2-lora"], blocks=2000),
}
"""Hidden states of 128 values, and of 512; 4 samples a step, and 16; and SmolLM2 for 1,000 steps, not 200."""

TIED: Preset = {
    f"tied-{steps}": TiedSize(
        **{
            **vars(long("llama", steps)),
            "architecture": "tied",
            "tokenizer": "gpt2_tokenizer",
            "vocabulary": 50_257,
        }
    )
    for steps in (300, 1200)
}
"""The Llama of `LONG` with a vocabulary of which most tokens are rare."""

HELD_OUT = ("neox-finetuned", "neox-scratch")
"""Tasks that no setting was chosen on: they were run after the settings were fixed."""

PRESETS: dict[str, Preset] = {
    "cpu": CPU,
    "small": SMALL,
    "guard": GUARD,
    "wide": both("llama", hidden=256),
    "real": REAL,
    "long": LONG,
    "tied": TIED,
    "replicas": REPLICATED,
    # how often a sample comes back is what AQ-SGD lives on
    "revisits": {"vision": CPU["vision"], "language": replace(CPU["language"], epochs=6)},
    "paper": {
        "vision": VisionSize(
            50_000, 10_000, 64, 2, stem_stride=1, epochs=100, cosine_epochs=200, batch=128, lr=0.01
        ),
        "language": LanguageSize(
            layers=12,
            hidden=768,
            heads=12,
            seq=1024,
            tokenizer="gpt2_tokenizer",
            weights="gpt2",
            pretrain_steps=0,
            pretrain_batch=0,
            pretrain_lr=0.0,
            blocks=None,
            test_blocks=None,
            epochs=4,
            batch=8,
            lr=5e-5,
            dropout=0.1,
        ),
    },
    "smoke": {
        "vision": VisionSize(32, 16, 8, 1, stem_stride=2, epochs=2, cosine_epochs=2, batch=8, lr=0.01),
        "language": LanguageSize(
            layers=4,
            hidden=32,
            heads=2,
            seq=32,
            tokenizer=None,
            weights=None,
            pretrain_steps=3,
            pretrain_batch=4,
            pretrain_lr=1e-3,
            blocks=16,
            test_blocks=4,
            epochs=2,
            batch=4,
            lr=1e-3,
            dropout=0.0,
        ),
    },
}
