"""Sequences to train on: documents packed one behind the other, in an order that follows from the seed."""

import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_compress.errors import CompressionError
from ds_compress.hf.documents import records, tokenized
from ds_compress.hf.loss import IGNORED
from ds_compress.hf.settings import Settings

IDS, LABELS, POSITIONS = range(3)


def pack(documents: Any, length: int) -> np.ndarray:
    """[sequences, 3, length] int32: ids, labels, and positions, which restart with each document.

    The first token of a document is not learned: nothing before it says what it is. Documents go on in the
    next sequence; what is left at the end, and sequences in which nothing is learned, are dropped.
    """
    rows: list[np.ndarray] = []
    for document in documents:
        size = len(document.ids)
        labels = [IGNORED, *document.labels[1:]][:size]
        rows.append(np.array([document.ids, labels, range(size)], dtype=np.int32).reshape(3, size))
    tokens = np.concatenate(rows, axis=1) if rows else np.empty((3, 0), dtype=np.int32)
    count = tokens.shape[1] // length
    packed = tokens[:, : count * length].reshape(3, count, length).transpose(1, 0, 2).copy()
    # a document that goes on in another sequence starts there anew
    first = packed[:, POSITIONS, :1]
    own = packed[:, POSITIONS] - np.arange(length) == first
    packed[:, POSITIONS] -= np.where(np.logical_and.accumulate(own, axis=1), first, 0)
    return packed[(packed[:, LABELS, 1:] != IGNORED).any(axis=1)]


class Sequences:
    """Packed sequences for training, and held-out ones."""

    def __init__(self, settings: Settings, tokenizer: Any):
        length, data = settings.sequence_length, settings.data
        packed = _packed(settings, data.train, tokenizer)
        if data.eval is None:
            held = max(1, round(len(packed) * data.eval_share))
            self.train, self.eval = packed[:-held], packed[-held:]
        else:
            self.train, self.eval = packed, _packed(settings, data.eval, tokenizer)
        for name, sequences in (("train", self.train), ("eval", self.eval)):
            if not len(sequences):
                raise CompressionError(
                    f"data: too little text: no {name} sequence of {length} tokens; give more text, or a "
                    "smaller sequence_length"
                )
        self._settings = settings

    def batches(self, micro_batch: int, replica: int, replicas: int, start: int) -> Iterator[Any]:
        """Endless micro-batches for training, from the one with number `start`.

        Which sequences the micro-batch has follows from its number and the seed alone, so a run that is
        resumed goes on where it was. In each epoch every sequence comes once.
        """
        for number in itertools.count(start):
            first = (number * replicas + replica) * micro_batch
            yield self._batch(self.train[[self._place(first + offset) for offset in range(micro_batch)]])

    def _place(self, number: int) -> int:
        epoch, place = divmod(number, len(self.train))
        if getattr(self, "_epoch", None) != epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._settings.seed, epoch)).permutation(len(self.train))
        return int(self._order[place])

    def held_out(self, micro_batch: int, replica: int, replicas: int) -> list[Any]:
        """The held-out sequences of this replica as micro-batches; of the last ones some may come again."""
        together = micro_batch * replicas
        count = -(-min(len(self.eval), self._settings.eval_sequences) // together)
        places = np.arange(count * together).reshape(count, replicas, micro_batch)[:, replica]
        return [self._batch(self.eval[row % len(self.eval)]) for row in places]

    def _batch(self, rows: np.ndarray) -> tuple[Any, Tensor]:
        ids, labels, positions = torch.from_numpy(np.array(rows)).long().unbind(1)
        inputs = (ids, positions) if self._settings.data.packing == "isolated" else ids
        return inputs, labels


def _packed(settings: Settings, source: str, tokenizer: Any) -> np.ndarray:
    """Packed sequences of `source`, kept in the folder of the run once they are made."""
    path = Path(source)
    stamp = path.stat() if path.is_file() else None
    key = [
        source,
        stamp and (stamp.st_size, stamp.st_mtime_ns),
        settings.data.model_dump(),
        settings.sequence_length,
        str(settings.tokenizer or settings.model),
    ]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    kept = Path(settings.out, "data", f"{name}.npy")
    if not kept.exists():
        found = records(source, settings.data)
        packed = pack(tokenized(found, tokenizer, source), settings.sequence_length)
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            np.save(file, packed)
        Path(file.name).rename(kept)
    loaded: np.ndarray = np.load(kept, mmap_mode="r")
    return loaded
