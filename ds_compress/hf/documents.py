"""Documents as token ids and labels, from text, records and conversations."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ds_compress.errors import CompressionError, in_one_line, shown
from ds_compress.hf.settings import Data

IGNORED = -100
"""Label of a token that is not learned."""
LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


class Document(NamedTuple):
    """Hold one tokenized document."""

    ids: list[int]
    labels: list[int]
    """One for each id: the id itself, or `IGNORED`."""


def read_records(source: str, data: Data) -> Iterable[dict[str, Any]]:
    """Read the records of a file, or of a data set of that name.

    Raises:
        CompressionError: `source` cannot be read.
    """
    path = Path(source)
    if path.suffix == ".txt" and path.is_file():
        return ({"text": text} for text in split_text(path.read_text(), data.documents))
    try:
        from datasets import load_dataset

        if path.suffix in LOADERS:
            return load_dataset(LOADERS[path.suffix], data_files=str(path), split="train")
        return load_dataset(source, split=data.split)
    except Exception as error:  # each reader, and the network, has its own
        raise CompressionError(
            f"data: {shown(source)} cannot be read: {in_one_line(error)}; should be a file ending in "
            f"{', '.join(LOADERS)}, or the name of a data set"
        ) from None


def split_text(text: str, documents: str) -> list[str]:
    """Cut `text` into documents and leave out empty ones."""
    parts = {"file": [text], "line": text.splitlines(), "paragraph": re.split(r"\n\s*\n", text)}[documents]
    return [part for part in parts if part.strip()]


def tokenize(found: Iterable[dict[str, Any]], tokenizer: Any, where: str) -> Iterator[Document]:
    """Turn every record into a document that ends with the tokenizer's end-of-text token, if it has one.

    Raises:
        CompressionError: a record has none of the known keys; `where` begins the error.
    """
    for number, record in enumerate(found):
        if record.get("messages"):
            yield _tokenize_conversation(record["messages"], tokenizer, f"{where}: record {number}")
        elif isinstance(record.get("text"), str):
            ids = _encode(tokenizer, record["text"]) + _end_of_text(tokenizer)
            yield Document(ids, ids)
        elif isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
            prompt = _encode(tokenizer, record["prompt"])
            completion = _encode(tokenizer, record["completion"]) + _end_of_text(tokenizer)
            yield Document(prompt + completion, [IGNORED] * len(prompt) + completion)
        else:
            pairs = "; pairs for preference training (DPO) are not supported" if "chosen" in record else ""
            raise CompressionError(
                f"{where}: record {number} has {shown(sorted(record))}; should have text, prompt and "
                f"completion, or messages{pairs}"
            )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _end_of_text(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _tokenize_conversation(messages: list[dict[str, Any]], tokenizer: Any, where: str) -> Document:
    """Apply the chat template to a conversation, of which the assistant's turns are learned."""
    if not tokenizer.chat_template:
        raise CompressionError(f"{where}: has messages, but the tokenizer has no chat template")

    def encode_turns(turns: list[dict[str, Any]], prompt: bool) -> list[int]:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        return _encode(tokenizer, text)

    ids = encode_turns(messages, False)
    labels = [IGNORED] * len(ids)
    for number, message in enumerate(messages):
        if message.get("role") == "assistant":
            before = encode_turns(messages[:number], True)
            through = encode_turns(messages[: number + 1], False)
            if through[: len(before)] != before or ids[: len(through)] != through:
                raise CompressionError(
                    f"{where}: message {number}: the chat template changes earlier turns when this one is "
                    "added, so the tokens of this turn cannot be located"
                )
            labels[len(before) : len(through)] = through[len(before) :]
    return Document(ids, labels)
