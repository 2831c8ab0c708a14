"""Training sequences, packed or of several lengths, in an order that follows from the seed."""

import bisect
import hashlib
import itertools
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_compress.errors import CompressionError, failures_at
from ds_compress.hf.documents import IGNORED, Document, list_texts, read_records, tokenize
from ds_compress.hf.settings import NAME, Settings

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


def sort_documents(documents: Iterable[Document], lengths: Sequence[int]) -> list[np.ndarray]:
    """Return documents by the smallest length that holds them: [2, tokens] int32 of ids and labels each.

    A document that is longer than the largest length goes on in further rows. Rows in which nothing is
    learned are dropped.

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
    return list(itertools.chain(*rows))


def _pad(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Stack rows of ids and labels, and of positions if there are any, at a common length.

    Only tokens after the last one of a document are added, which it does not attend to.
    """
    padded = np.zeros((len(rows), len(rows[0]), length), dtype=np.int32)
    padded[:, LABELS] = IGNORED
    for target, row in zip(padded, rows):
        target[:, : row.shape[1]] = row
    return padded


@dataclass
class Rows:
    """Hold sequences one after the other, without padding."""

    tokens: np.ndarray
    """[tokens, 2 or 3] int32: ids, labels and, if there are any, positions."""
    bounds: np.ndarray
    """[rows + 1] int64: where in `tokens` each row begins, and where the last one ends."""

    def __getitem__(self, number: int) -> np.ndarray:
        """Return ids, labels and positions of a row: [2 or 3, tokens]."""
        return self.tokens[slice(*self.bounds[number : number + 2])].T


class Sequences:
    """Hold sequences for training and for evaluation: those of each length apart."""

    def __init__(self, settings: Settings, tokenizer: Any):
        data = settings.data
        rows, self.train = _load(settings, data.train, tokenizer)
        self.sources = [rows]
        """Those that `train` has the numbers of, by length, and if they are others, those of `eval`."""
        if data.eval is None:
            sizes = [len(each) for each in self.train]
            held_out = [max(1, round(size * data.eval_share)) if size > 1 else 0 for size in sizes]
            if any(sizes) and not any(held_out):
                held_out[sizes.index(1)] = 1
            found, ends = self.train, [size - count for size, count in zip(sizes, held_out)]
            self.train = [each[:end] for each, end in zip(found, ends)]
            self.eval = [each[end:] for each, end in zip(found, ends)]
        else:
            rows, self.eval = _load(settings, data.eval, tokenizer)
            self.sources.append(rows)
        for name, sequences in (("train", self.train), ("eval", self.eval)):
            if not sum(map(len, sequences)):
                missing = f"no {name} document in which something is learned; give more"
                if isinstance(settings.sequence_length, int):
                    length = f"{settings.lengths[-1]} tokens; give more text, or a smaller sequence_length"
                    missing = f"no {name} sequence of {length}"
                raise CompressionError(f"data: too little text: {missing}")
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
            yield [self._batch(self.sources[0], row, length) for row in chosen]

    def _draw_steps(self, together: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the length of each step, and the numbers of its `together` sequences.

        In each epoch every sequence comes once. What does not fill a step of its length joins the next larger
        length, or, of the largest, the next epoch.
        """
        next_epoch = np.empty(0, dtype=np.int64)
        for epoch in itertools.count():
            draw = np.random.default_rng((self._settings.seed, epoch))
            steps, remaining = list[tuple[int, np.ndarray]](), next_epoch[:0]
            for length, sequences in zip(self._settings.lengths, self.train):
                carried = next_epoch if length == self._settings.lengths[-1] else next_epoch[:0]
                numbers = np.concatenate([carried, remaining, draw.permutation(sequences)])
                full = len(numbers) // together
                steps += [(length, each) for each in numbers[: full * together].reshape(full, together)]
                remaining = numbers[full * together :]
            next_epoch = remaining
            order = draw.permutation(len(steps)) if len(self.train) > 1 else range(len(steps))
            yield from (steps[index] for index in order)

    def held_out(self, micro_batch: int, replica: int, replicas: int) -> list[Any]:
        """Return this replica's held-out micro-batches, of the largest length; the last ones may repeat
        sequences."""
        order, together = np.concatenate(self.eval), micro_batch * replicas
        count = -(-min(len(order), self._settings.eval_sequences) // together)
        if len(self.eval) > 1:
            order = np.random.default_rng(self._settings.seed).permutation(order)
        numbers = np.resize(order, (count, replicas, micro_batch))[:, replica]
        return [self._batch(self.sources[-1], row, self._settings.lengths[-1]) for row in numbers]

    def _batch(self, rows: Rows, numbers: np.ndarray, length: int) -> tuple[Any, Tensor]:
        found = torch.from_numpy(_pad([rows[number] for number in numbers], length)).long().unbind(1)
        inputs = (found[IDS], found[POSITIONS]) if self._settings.sends_positions else found[IDS]
        return inputs, found[LABELS]


def _load(settings: Settings, source: str, tokenizer: Any) -> tuple[Rows, list[np.ndarray]]:
    """Load the sequences of `source`, and the numbers of those of each length; the first call writes them to
    the folder of the run."""
    path, folder = Path(source), settings.tokenizer or settings.model
    texts = [path] if path.is_file() else []
    stats = [(file.name, file.stat()) for file in (*texts, *list_texts(Path(folder)))]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    key = [source, files, settings.data.model_dump(), settings.sequence_length, folder]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    caches = [Path(settings.out, "data", f"{name}-{part}.npy") for part in ("tokens", "bounds")]
    if not all(cache.exists() for cache in caches):
        documents = tokenize(read_records(source, settings.data), tokenizer, source)
        if isinstance(settings.sequence_length, int):
            rows = list(pack_documents(documents, settings.sequence_length))
        else:
            rows = sort_documents(documents, settings.lengths)
        none = np.empty((0, 2), dtype=np.int32)
        made = (
            np.ascontiguousarray(np.concatenate(rows, axis=1).T) if rows else none,
            np.cumsum([0, *(row.shape[1] for row in rows)], dtype=np.int64),
        )
        for cache, array in zip(caches, made):
            with failures_at(f"{NAME}.out: {cache} cannot be written"):
                cache.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=cache.parent) as own:
                    part = Path(own, cache.name)
                    np.save(part, array)
                    part.rename(cache)
    with failures_at(f"{NAME}.out: {caches[0].parent}: damaged, remove this folder"):
        tokens, bounds = (np.load(cache, mmap_mode="r") for cache in caches)
    counts = np.searchsorted(np.sort(np.diff(bounds)), settings.lengths, side="right")
    return Rows(tokens, bounds), np.split(np.arange(len(bounds) - 1), counts[:-1])
