"""What a small GPT-2 is made from and learns in test_real_run.py: text that is drawn, or WikiText-2."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from tests.support.finetuning import text, tokenizer

FOLDER = "DS_COMPRESS_DATA"
"""Variable of the environment: a folder with wikitext2/{train,valid}.txt and gpt2_tokenizer/."""


class Material(NamedTuple):
    tokenizer: Any
    width: int
    """Hidden size."""
    first: str
    """Text for the first training, which starts from random weights."""
    second: str
    """For the adapters."""
    held_out: str


def material() -> Material:
    """Real text where the environment says where it is."""
    if os.environ.get(FOLDER):
        folder = Path(os.environ[FOLDER])
        train, valid = ((folder / "wikitext2" / f"{part}.txt").read_text() for part in ("train", "valid"))
        known = AutoTokenizer.from_pretrained(folder / "gpt2_tokenizer")
        return Material(known, 128, train[:600_000], train[600_000:1_000_000], valid[:60_000])
    drawn = text(400).split("\n\n")
    first, second, held_out = (
        "\n\n".join(drawn[at]) for at in (slice(200), slice(200, 350), slice(350, 400))
    )
    return Material(tokenizer(), 32, first, second, held_out)
