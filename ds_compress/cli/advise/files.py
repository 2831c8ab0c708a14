"""`--recipe`: blocks of ds_config.json files in the place of what is offered."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ds_compress.cli.check import read_block
from ds_compress.config import Config
from ds_compress.errors import CompressionError, errors_at
from ds_compress.planning.choice import Candidate, Message
from ds_compress.planning.depth import Room

Files = dict[str, tuple[Any, Config]]
"""Blocks as they were written, and what they mean, by name."""

Messages = tuple[Sequence[Message], Sequence[Message]]
"""Forward and backward, each by boundary."""


def read(paths: Sequence[Path]) -> Files:
    """
    Raises:
        CompressionError: a file or its block is bad, or files have one name.
    """
    blocks = {path.stem: read_block(path) for path in paths}
    if len(blocks) < len(paths):
        raise CompressionError("--recipe: files of one name came; give each a name of its own")
    found: Files = {}
    for name, block in blocks.items():
        with errors_at(f"recipe {name}"):
            found[name] = block, Config(block)
    return found


def candidates(
    files: Files,
    messages: Callable[[str, Config], Messages],
    rooms: Callable[[float | None], Sequence[Room]],
) -> Iterator[Candidate]:
    """
    Args:
        messages: those under a recipe: its name, and its config.
        rooms: of all stages, where a block allows so many GB.

    Raises:
        CompressionError: there can be no such messages.
    """
    for name, (block, config) in files.items():
        with errors_at(f"recipe {name}"):
            both = messages(name, config)
        forward, backward = (tuple(message.traffic for message in own) for own in both)
        ahead, back = (max(message.error for message in own) for own in both)
        link = config.block.link
        eager, room = link.mode == "eager", rooms(link.memory_gb)
        yield Candidate(name, block, forward, backward, eager, link.depth, (ahead, back), room)
