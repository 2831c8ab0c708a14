"""Documents as token ids and labels: from text, from records, from the turns of a conversation."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ds_compress.errors import CompressionError, in_one_line, shown
from ds_compress.hf.loss import IGNORED
from ds_compress.hf.settings import Data

LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


class Document(NamedTuple):
    ids: list[int]
    labels: list[int]
    """As many; `IGNORED` for tokens that are not learned."""


def records(source: str, data: Data) -> Iterable[dict[str, Any]]:
    """The records of a file, or of a data set of that name.

    Raises:
        CompressionError: there is none that can be read.
    """
    from datasets import load_dataset

    path = Path(source)
    if path.suffix == ".txt" and path.is_file():
        return ({"text": text} for text in split(path.read_text(), data.documents))
    try:
        if path.suffix in LOADERS:
            return load_dataset(LOADERS[path.suffix], data_files=str(path), split="train")
        return load_dataset(source, split=data.split)
    except Exception as error:  # of a reader, or of a network
        raise CompressionError(
            f"data: {shown(source)} cannot be read: {in_one_line(error)}; should be a file ending in "
            f"{', '.join(LOADERS)}, or the name of a data set"
        ) from None


def split(text: str, documents: str) -> list[str]:
    """`text` cut into documents, empty ones left out."""
    parts = {"file": [text], "line": text.splitlines(), "paragraph": re.split(r"\n\s*\n", text)}[documents]
    return [part for part in parts if part.strip()]


def tokenized(found: Iterable[dict[str, Any]], tokenizer: Any, where: str) -> Iterator[Document]:
    """Every record as a document that ends with the tokenizer's end of text, if it has one.

    Raises:
        CompressionError: a record is of no known kind.
    """
    for number, record in enumerate(found):
        if record.get("messages"):
            yield _conversation(record["messages"], tokenizer, f"{where}: record {number}")
        elif isinstance(record.get("text"), str):
            ids = _ids(tokenizer, record["text"]) + _end(tokenizer)
            yield Document(ids, ids)
        elif isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
            prompt = _ids(tokenizer, record["prompt"])
            learned = _ids(tokenizer, record["completion"]) + _end(tokenizer)
            yield Document(prompt + learned, [IGNORED] * len(prompt) + learned)
        else:
            raise CompressionError(
                f"{where}: record {number} has {shown(sorted(record))}; should have text, prompt and "
                "completion, or messages"
            )


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _conversation(messages: list[dict[str, Any]], tokenizer: Any, where: str) -> Document:
    """A conversation of which the assistant's turns are learned, in the form of the chat template."""
    if not tokenizer.chat_template:
        raise CompressionError(f"{where}: has messages, but the tokenizer has no chat template")

    def form(turns: list[dict[str, Any]], prompt: bool) -> list[int]:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        return _ids(tokenizer, text)

    ids = form(messages, False)
    labels = [IGNORED] * len(ids)
    for number, message in enumerate(messages):
        if message.get("role") == "assistant":
            before, through = form(messages[:number], True), form(messages[: number + 1], False)
            if through[: len(before)] != before or ids[: len(through)] != through:
                raise CompressionError(
                    f"{where}: message {number}: the chat template writes what came before it in another way "
                    "once it is there, so its tokens are not found"
                )
            labels[len(before) : len(through)] = through[len(before) :]
    return Document(ids, labels)
