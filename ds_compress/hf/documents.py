"""Documents as token ids and labels, from text, records and conversations."""

import glob
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ds_compress.errors import CompressionError, errors_at, failures_at, in_one_line, shown
from ds_compress.hf.settings import Data

IGNORED = -100
"""Label of a token that is not learned."""
MESSAGES = "a list of {role, content}, both of them text"
KEYS = {"messages": MESSAGES, "text": "text", "prompt": "text", "completion": "text"}
"""What the value of each known key of a record should be."""
LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


class Document(NamedTuple):
    """Hold one tokenized document."""

    ids: list[int]
    labels: list[int]
    """One for each id: the id itself, or `IGNORED`."""


def list_texts(folder: Path) -> list[Path]:
    """Return the files in the folder of a model or a tokenizer that hold no weights; none without it."""
    found = (file for suffix in ("json", "txt", "model", "jinja") for file in folder.glob(f"*.{suffix}"))
    return sorted(file for file in found if not file.name.endswith("index.json"))


def read_records(source: str, data: Data) -> Iterable[dict[str, Any]]:
    """Read the records of a file, or of a data set of that name.

    Raises:
        CompressionError: `source` cannot be read.
    """
    path = Path(source)
    try:
        if path.suffix == ".txt" and path.is_file():
            text = path.read_text(encoding="utf-8-sig")  # a byte order mark is no text
            return ({"text": part} for part in split_text(text, data.documents))
        from datasets import load_dataset

        if path.suffix in LOADERS:
            files = glob.escape(str(path)) if path.exists() else source  # which may be a pattern, or a URL
            if path.suffix == ".txt":
                # by default each line is a record
                whole = {"sample_by": "document", "encoding": "utf-8-sig"}
                texts = load_dataset("text", data_files=files, split="train", **whole)["text"]
                return ({"text": part} for text in texts for part in split_text(text, data.documents))
            return load_dataset(LOADERS[path.suffix], data_files=files, split="train")
        return load_dataset(source, split=data.split)
    except Exception as error:  # each reader, and the network, has its own
        reason = in_one_line(error.__cause__ or error)  # an error of `datasets` names none
        raise CompressionError(
            f"data: {shown(source)} cannot be read: {reason}; should be a file ending in "
            f"{', '.join(LOADERS)}, or the name of a data set"
        ) from None


def split_text(text: str, documents: str) -> list[str]:
    """Cut `text` into documents and leave out empty ones."""
    parts = {"file": [text], "line": text.splitlines(), "paragraph": re.split(r"\n\s*\n", text)}[documents]
    return [part for part in parts if part.strip()]


def tokenize(found: Iterable[dict[str, Any]], tokenizer: Any, where: str) -> Iterator[Document]:
    """Turn every record into a document that ends with the tokenizer's end-of-text token, if it has one, and
    begins with its begin-of-text token, if it begins texts with that (a chat template writes its own).

    A conversation whose template changes earlier turns becomes several, one for each turn of the assistant.

    Raises:
        CompressionError: a record has none of the known keys, a value of another type, or one that the
            tokenizer or its chat template does not take; `where` begins the error.
    """
    begin = _begin_of_text(tokenizer)
    with failures_at(f"{where} cannot be read"):  # `datasets` decodes a record when it is its turn
        for number, record in enumerate(found):
            with errors_at(f"{where}: record {number}"), failures_at("cannot be tokenized"):
                documents = _tokenize_record(record, tokenizer, begin)
            yield from documents


def _tokenize_record(record: dict[str, Any], tokenizer: Any, begin: list[int]) -> list[Document]:
    messages, text, prompt, completion = map(record.get, KEYS)
    if messages:
        return _tokenize_conversation(messages, tokenizer)
    if isinstance(text, str):
        ids = _begun(_encode(tokenizer, text), begin) + _end_of_text(tokenizer)
        return [Document(ids, ids)]
    if isinstance(prompt, str) and isinstance(completion, str):
        learned = _encode(tokenizer, completion) + _end_of_text(tokenizer)
        ignored = _begun(_encode(tokenizer, prompt), begin)
        return [Document(ignored + learned, [IGNORED] * len(ignored) + learned)]
    wrong = next((key for key in reversed(KEYS) if key in record and not isinstance(record[key], str)), None)
    if wrong:
        raise CompressionError(f"{wrong}: {shown(record[wrong])} is not allowed: should be {KEYS[wrong]}")
    pairs = "; pairs for preference training (DPO) are not supported" if "chosen" in record else ""
    raise CompressionError(
        f"has {shown(sorted(record))}; should have text, prompt and completion, or messages{pairs}"
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _begin_of_text(tokenizer: Any) -> list[int]:
    begin = [tokenizer.bos_token_id]  # some tokenizers have one that they put nowhere
    return begin if tokenizer("a")["input_ids"][:1] == begin else []


def _begun(ids: list[int], begin: list[int]) -> list[int]:
    """Let a text begin with `begin`, once: what a chat template has written does already."""
    return ids if ids[:1] == begin else begin + ids


def _end_of_text(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _tokenize_conversation(messages: list[dict[str, Any]], tokenizer: Any) -> list[Document]:
    """Apply the chat template to a conversation, of which the assistant's turns are learned.

    Some templates leave something out of all turns but the last (Qwen3: its thoughts). Each turn of the
    assistant is then learned in a document that ends with it, as the model will write it.
    """
    _check_messages(messages)
    if not tokenizer.chat_template:
        raise CompressionError("has messages, but the tokenizer has no chat template")

    def encode_turns(turns: list[dict[str, Any]], prompt: bool) -> list[int]:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        return _encode(tokenizer, text)

    ids = encode_turns(messages, False)
    labels = [IGNORED] * len(ids)
    turns: list[Document] = []
    for number, message in enumerate(messages):
        if message.get("role") == "assistant":
            before = encode_turns(messages[:number], True)
            through = encode_turns(messages[: number + 1], False)
            if through[: len(before)] != before:
                raise CompressionError(
                    f"message {number}: the chat template changes earlier turns when this one is "
                    "added, so the tokens of this turn cannot be located"
                )
            learned = through[len(before) :]
            turns.append(Document(through, [IGNORED] * len(before) + learned))
            labels[len(before) : len(through)] = learned
    is_whole = all(ids[: len(turn.ids)] == turn.ids for turn in turns)
    return [Document(ids, labels)] if is_whole else turns


def _check_messages(messages: Any) -> None:
    """Refuse what a chat template would write as Python prints it, or leave out.

    A message with "tool_calls" needs no content.
    """
    if not isinstance(messages, list):
        raise CompressionError(f"messages: {shown(messages)} is not allowed: should be {MESSAGES}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise CompressionError(f"messages: {shown(message)} is not allowed: should be {MESSAGES}")
        for key in ("role", "content"):
            value = message.get(key)
            if not isinstance(value, str) and (key == "role" or value or not message.get("tool_calls")):
                raise CompressionError(
                    f"message {number}: {key}: {shown(value)} is not allowed: should be text"
                )
