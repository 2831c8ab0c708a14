"""Training sequences, packed or of several lengths, in an order that follows from the seed."""

import bisect
import hashlib
import itertools
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_compress.errors import CompressionError
from ds_compress.hf.documents import IGNORED, Document, read_records, tokenize
from ds_compress.hf.settings import Settings

IDS, LABELS, POSITIONS = range(3)


def pack_documents(documents: Iterable[Document], length: int) -> np.ndarray:
    """Pack documents into sequences: [sequences, 3, length] int32 of ids, labels and positions.

    Positions restart with each document. The first token of a document is not learned, as nothing before it
    predicts it. A document may go on in the next sequence; an incomplete last sequence, and sequences in
    which nothing is learned, are dropped.
    """
    rows: list[np.ndarray] = []
    for document in documents:
        size = len(document.ids)
        labels = [IGNORED, *document.labels[1:]][:size]
        rows.append(np.array([document.ids, labels, range(size)], dtype=np.int32).reshape(3, size))
    tokens = np.concatenate(rows, axis=1) if rows else np.empty((3, 0), dtype=np.int32)
    count = tokens.shape[1] // length
    packed = tokens[:, : count * length].reshape(3, count, length).transpose(1, 0, 2).copy()
    # the rest of a document that began in the sequence before starts at position 0 again
    first = packed[:, POSITIONS, :1]
    is_rest = packed[:, POSITIONS] - np.arange(length) == first
    packed[:, POSITIONS] -= np.where(np.logical_and.accumulate(is_rest, axis=1), first, 0)
    return packed[(packed[:, LABELS, 1:] != IGNORED).any(axis=1)]


def pad_documents(documents: Iterable[Document], lengths: Sequence[int]) -> list[np.ndarray]:
    """Give each document a row of the smallest length that holds it: [rows, 2, length] int32 for each length.

    Rows hold ids and labels. A document that is longer than the largest length goes on in further rows. Rows
    in which nothing is learned are dropped.

    Args:
        documents: to store.
        lengths: in tokens, ascending.
    """
    rows: list[list[np.ndarray]] = [[] for _ in lengths]
    for document in documents:
        pair = np.array([document.ids, document.labels], dtype=np.int32)
        for start in range(0, pair.shape[1], lengths[-1]):
            piece = pair[:, start : start + lengths[-1]]
            if (piece[LABELS, 1:] != IGNORED).any():
                rows[bisect.bisect_left(lengths, piece.shape[1])].append(piece)
    return [_pad(each, length) for each, length in zip(rows, lengths)]


def _pad(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Stack rows of ids and labels, and of positions if there are any, at a common length.

    Only tokens after the last one of a document are added, which it does not attend to.
    """
    padded = np.zeros((len(rows), len(rows[0]) if rows else 2, length), dtype=np.int32)
    padded[:, LABELS] = IGNORED
    for target, row in zip(padded, rows):
        target[:, : row.shape[1]] = row
    return padded


class Sequences:
    """Hold sequences for training and for evaluation: an array for each length."""

    def __init__(self, settings: Settings, tokenizer: Any):
        data = settings.data
        found = _load(settings, data.train, tokenizer)
        if data.eval is None:
            held_out = [max(1, round(len(each) * data.eval_share)) for each in found]
            self.train = [each[:-count] for each, count in zip(found, held_out)]
            self.eval = [each[-count:] for each, count in zip(found, held_out)]
        else:
            self.train, self.eval = found, _load(settings, data.eval, tokenizer)
        for name, sequences in (("train", self.train), ("eval", self.eval)):
            if not sum(map(len, sequences)):
                raise CompressionError(
                    f"data: too little text: no {name} sequence of {settings.lengths[-1]} tokens; give more "
                    "text, or a smaller sequence_length"
                )
        self._settings = settings

    def __len__(self) -> int:
        """Return how many sequences an epoch has."""
        return sum(map(len, self.train))

    def steps(
        self, micro_batch: int, replica: int, replicas: int, micro_batches: int, start: int
    ) -> Iterator[list[Any]]:
        """Yield this replica's micro-batches of each step, without end, from the step with number `start`.

        The sequences of a step follow from its number and the seed, so a resumed run continues with those
        that are due. All of a step have one length, on all replicas.
        """
        sizes = micro_batches, replicas, micro_batch
        for length, numbers in itertools.islice(self._draw_steps(math.prod(sizes)), start, None):
            chosen = numbers.reshape(sizes)[:, replica]
            yield [self._batch([_find(self.train, number) for number in row], length) for row in chosen]

    def _draw_steps(self, together: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the length of each step, and the numbers of its `together` sequences.

        In each epoch every sequence comes once. What does not fill a step of its length joins the next larger
        length, or, of the largest, the next epoch.
        """
        next_epoch = np.empty(0, dtype=np.int64)
        for epoch in itertools.count():
            draw = np.random.default_rng((self._settings.seed, epoch))
            steps, first, remaining = list[tuple[int, np.ndarray]](), 0, next_epoch[:0]
            for length, sequences in zip(self._settings.lengths, self.train):
                carried = next_epoch if length == self._settings.lengths[-1] else next_epoch[:0]
                numbers = np.concatenate([carried, remaining, first + draw.permutation(len(sequences))])
                first += len(sequences)
                full = len(numbers) // together
                steps += [(length, each) for each in numbers[: full * together].reshape(full, together)]
                remaining = numbers[full * together :]
            next_epoch = remaining
            order = draw.permutation(len(steps)) if len(self.train) > 1 else range(len(steps))
            yield from (steps[index] for index in order)

    def held_out(self, micro_batch: int, replica: int, replicas: int) -> list[Any]:
        """Return this replica's held-out micro-batches, of the largest length; the last ones may repeat
        sequences."""
        total, together = sum(map(len, self.eval)), micro_batch * replicas
        count = -(-min(total, self._settings.eval_sequences) // together)
        draw = np.random.default_rng(self._settings.seed)
        order = draw.permutation(total) if len(self.eval) > 1 else np.arange(total)
        numbers = np.resize(order, (count, replicas, micro_batch))[:, replica]
        return [
            self._batch([_find(self.eval, number) for number in row], self._settings.lengths[-1])
            for row in numbers
        ]

    def _batch(self, rows: Sequence[np.ndarray], length: int) -> tuple[Any, Tensor]:
        found = torch.from_numpy(_pad(rows, length)).long().unbind(1)
        inputs = (found[IDS], found[POSITIONS]) if self._settings.sends_positions else found[IDS]
        return inputs, found[LABELS]


def _find(arrays: Sequence[np.ndarray], number: int) -> np.ndarray:
    """Return the row with this number, counted over all arrays."""
    for array in arrays:
        if number < len(array):
            return array[number]
        number -= len(array)
    raise IndexError(number)


def _load(settings: Settings, source: str, tokenizer: Any) -> list[np.ndarray]:
    """Load the sequences of `source`, by length; the first call writes them to the folder of the run."""
    path = Path(source)
    stat = path.stat() if path.is_file() else None
    key = [
        source,
        stat and (stat.st_size, stat.st_mtime_ns),
        settings.data.model_dump(),
        settings.sequence_length,
        str(settings.tokenizer or settings.model),
    ]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    caches = [Path(settings.out, "data", f"{name}-{length}.npy") for length in settings.lengths]
    if not all(cache.exists() for cache in caches):
        documents = tokenize(read_records(source, settings.data), tokenizer, source)
        if isinstance(settings.sequence_length, int):
            made = [pack_documents(documents, settings.sequence_length)]
        else:
            made = pad_documents(documents, settings.lengths)
        for cache, sequences in zip(caches, made):
            cache.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=cache.parent, delete=False) as file:
                np.save(file, sequences)
            Path(file.name).rename(cache)
    return [np.load(cache, mmap_mode="r") for cache in caches]
