"""Training sequences: documents packed one after the other, in an order that follows from the seed."""

import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
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


class Sequences:
    """Hold packed sequences for training and for evaluation."""

    def __init__(self, settings: Settings, tokenizer: Any):
        length, data = settings.sequence_length, settings.data
        packed = _load_packed(settings, data.train, tokenizer)
        if data.eval is None:
            held_out = max(1, round(len(packed) * data.eval_share))
            self.train, self.eval = packed[:-held_out], packed[-held_out:]
        else:
            self.train, self.eval = packed, _load_packed(settings, data.eval, tokenizer)
        for name, sequences in (("train", self.train), ("eval", self.eval)):
            if not len(sequences):
                raise CompressionError(
                    f"data: too little text: no {name} sequence of {length} tokens; give more text, or a "
                    "smaller sequence_length"
                )
        self._settings = settings

    def batches(self, micro_batch: int, replica: int, replicas: int, start: int) -> Iterator[Any]:
        """Yield micro-batches for training without end, from the one with number `start`.

        The sequences of a micro-batch follow from its number and the seed, so a resumed run continues with
        the batches that are due. In each epoch every sequence comes once.
        """
        for number in itertools.count(start):
            first = (number * replicas + replica) * micro_batch
            yield self._batch(self.train[[self._index(first + offset) for offset in range(micro_batch)]])

    def _index(self, number: int) -> int:
        epoch, index = divmod(number, len(self.train))
        if getattr(self, "_epoch", None) != epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._settings.seed, epoch)).permutation(len(self.train))
        return int(self._order[index])

    def held_out(self, micro_batch: int, replica: int, replicas: int) -> list[Any]:
        """Return this replica's held-out micro-batches; the last ones may repeat sequences."""
        together = micro_batch * replicas
        count = -(-min(len(self.eval), self._settings.eval_sequences) // together)
        indices = np.arange(count * together).reshape(count, replicas, micro_batch)[:, replica]
        return [self._batch(self.eval[row % len(self.eval)]) for row in indices]

    def _batch(self, rows: np.ndarray) -> tuple[Any, Tensor]:
        ids, labels, positions = torch.from_numpy(np.array(rows)).long().unbind(1)
        inputs = (ids, positions) if self._settings.data.packing == "isolated" else ids
        return inputs, labels


def _load_packed(settings: Settings, source: str, tokenizer: Any) -> np.ndarray:
    """Load the packed sequences of `source`; the first call writes them to the folder of the run."""
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
    cache = Path(settings.out, "data", f"{name}.npy")
    if not cache.exists():
        packed = pack_documents(
            tokenize(read_records(source, settings.data), tokenizer, source), settings.sequence_length
        )
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache.parent, delete=False) as file:
            np.save(file, packed)
        Path(file.name).rename(cache)
    loaded: np.ndarray = np.load(cache, mmap_mode="r")
    return loaded
