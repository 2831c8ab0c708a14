"""Keys of the store at which replicas meet, over one connection."""

from typing import Any

PREFIX = "ds_compress/outer/"

ABSENT = "\0absent"
"""What no key has."""


class Keys:
    """Keys below `PREFIX` of a store."""

    def __init__(self, store: Any):
        """
        Args:
            store: a `torch.distributed.Store`; torch declares too few of its methods.
        """
        self._store = store

    def _read_bytes(self, key: str) -> bytes | None:
        """Return what a key has, None if it is absent; `get` waits for one that was deleted after a look."""
        found: bytes = self._store.compare_set(f"{PREFIX}{key}", ABSENT, ABSENT)  # changes nothing
        return None if found == ABSENT.encode() else found

    def _read(self, key: str) -> str | None:
        found = self._read_bytes(key)
        return None if found is None else found.decode(errors="replace")

    def _set(self, key: str, value: str | bytes) -> None:
        self._store.set(f"{PREFIX}{key}", value)

    def _decide(self, key: str, value: str, expected: str = "") -> str:
        """Write `value` if the key has `expected`, or nothing; return what it has."""
        return self._store.compare_set(f"{PREFIX}{key}", expected, value).decode(errors="replace")

    def _append(self, key: str, number: int) -> None:
        self._store.append(f"{PREFIX}{key}", f"{number},")

    def _numbers(self, key: str) -> list[int]:
        words = (self._read(key) or "").split(",")
        return sorted({int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 10})

    def _delete(self, key: str) -> bool:
        """Return whether it was there."""
        return self._store.delete_key(f"{PREFIX}{key}")

    def await_answer(self) -> None:
        """Wait until the store has all that was sent over this connection."""
        self._read_bytes("head")
