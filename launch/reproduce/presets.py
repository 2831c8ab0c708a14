"""How large the two experiments are: `paper` as published, `cpu` for small machines, `revisits` the same with
samples that come back more often, `smoke` for tests."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class VisionSize:
    """Size of the vision task: a ResNet trained from nothing with SGD and a cosine schedule; one group per
    stage."""

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


@dataclass(frozen=True)
class LanguageSize:
    """Size of the language task: a GPT-2 fine-tuned with AdamW and linear decay; four stages of equally many
    blocks."""

    layers: int
    hidden: int
    heads: int
    seq: int  # tokens of a block of text
    tokenizer: str | None  # folder beside the text; None: a token is a byte
    weights: str | None  # folder beside the text; None: pretrained here, without compression
    pretrain_steps: int
    pretrain_batch: int
    pretrain_lr: float
    blocks: int | None  # of text to fine-tune on; None: all of train.txt
    test_blocks: int | None
    epochs: int
    batch: int
    lr: float
    dropout: float
    gradient_clipping: float = 1.0  # DeepSpeed's default, and that of the paper's trainer


@dataclass(frozen=True)
class Preset:
    vision: VisionSize
    language: LanguageSize


CPU = Preset(
    VisionSize(10_000, 5_000, 16, 1, stem_stride=2, epochs=8, cosine_epochs=8, batch=128, lr=0.01),
    LanguageSize(
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
    ),
)

PRESETS = {
    "cpu": CPU,
    # how often a sample comes back is what AQ-SGD lives on
    "revisits": replace(CPU, language=replace(CPU.language, epochs=6)),
    "paper": Preset(
        VisionSize(50_000, 10_000, 64, 2, stem_stride=1, epochs=100, cosine_epochs=200, batch=128, lr=0.01),
        LanguageSize(
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
    ),
    "smoke": Preset(
        VisionSize(32, 16, 8, 1, stem_stride=2, epochs=2, cosine_epochs=2, batch=8, lr=0.01),
        LanguageSize(
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
    ),
}
