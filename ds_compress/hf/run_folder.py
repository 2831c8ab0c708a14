"""The folder of a run, on one disk that all machines share or on a disk of each machine.

Machines that share no folder keep the checkpoints of their own stages, which is enough to resume. When the
run ends, rank 0's machine receives the weights of all stages, which `ds-compress merge` reads.
"""

import fcntl
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deepspeed import comm as dist

from ds_compress.errors import CompressionError, failures_at, shown
from ds_compress.hf.collective import broadcast_bytes, gather_integers, raised_on_all_ranks, send_bytes
from ds_compress.hf.settings import NAME

LATEST = "latest"
"""File that names the last complete checkpoint, for DeepSpeed and for `merge`."""
BEST = "best"
"""File that names the checkpoint with the lowest perplexity."""
LOCK = ".lock"
"""File that a process of each machine locks while it runs."""
CHUNK = 16 * 2**20
"""Bytes of a file that are sent at once."""


class RunFolder:
    """Know which ranks share the folder, and make several folders serve as one."""

    def __init__(self, path: Path, replicas: int):
        """
        Args:
            path: the folder, on this rank's machine.
            replicas: data-parallel replicas of the pipeline.

        Raises:
            CompressionError: on every rank, if one of them cannot write to the folder; if another run has not
                ended that writes to it; or if replicas of a stage do not share it: only the first of them
                writes the weights that all of them resume from.
        """
        self.path = path
        self._rank, ranks = dist.get_rank(), dist.get_world_size()
        token = gather_integers(secrets.randbits(62))[0]
        own = path / f".rank-{token:x}-{self._rank}"
        with self.write("files"):
            path.mkdir(parents=True, exist_ok=True)
            own.touch()
        # the first one is enough: of a shared folder that is rank 0's, and not each rank looks for all
        first = next(other for other in range(ranks) if (path / f".rank-{token:x}-{other}").exists())
        self._owners = gather_integers(first)
        """For each rank, the first rank that sees the same folder."""
        self.is_shared = not any(self._owners)
        """Whether all ranks see one folder."""
        self.is_owner = self._owners[self._rank] == self._rank
        """Whether this rank writes what its folder has once."""
        own.unlink()
        self._lock()
        for rank in range(ranks):
            first = rank - rank % replicas  # DeepSpeed numbers the replicas of a stage one after the other
            if self._owners[rank] != self._owners[first]:
                raise CompressionError(
                    f"{NAME}.out: rank {rank} does not see what rank {first} writes there, and both train "
                    "the same stage; should be a folder that all machines share, or a hostfile that puts the "
                    "replicas of a stage on one machine"
                )

    def _lock(self) -> None:
        """Keep other runs out of the folder until this process ends; all ranks call it.

        Ranks train on where their launcher was killed, and the checkpoints of two runs would mix.

        Raises:
            CompressionError: on every rank, if a process of another run has the lock.
        """
        with self.write(LOCK):
            if self.is_owner:
                self._locked = (self.path / LOCK).open("a")  # closed, it would be free again
                try:
                    fcntl.lockf(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    raise CompressionError(
                        f"{NAME}.out: {self.path}: a run that has not ended writes there; end its processes, "
                        "also where its launcher has ended, or choose a new folder"
                    ) from None
                except OSError:  # a file system without locks
                    pass

    def name_complete(self, step: int, name: str = LATEST) -> None:
        """Name the checkpoint of `step`, which is complete, as `name` says, in every folder.

        A process that reads at the same time gets the old name or the new one.
        """
        with self.write(name):
            if self.is_owner:
                new = self.path / f"{name}.new"
                new.write_text(checkpoint_name(step))
                new.replace(self.path / name)

    @contextmanager
    def write(self, name: str) -> Iterator[None]:
        """Have all ranks raise an error of one of them in writing `name`; all of them call this.

        Raises:
            CompressionError: on every rank, the same line.
        """
        with raised_on_all_ranks(), failures_at(f"{NAME}.out: {self.path}: {name} cannot be written"):
            yield

    def find_last_step(self, files: Sequence[str] = ("",)) -> int | None:
        """Return the step of the last complete checkpoint; None if there is none.

        Args:
            files: that this rank needs from its folder.

        Raises:
            CompressionError: on every rank, if one of them does not find its files, or what `latest` says is
                no checkpoint.
        """
        # A machine that was stopped before it wrote the name has that checkpoint too, so the largest counts
        with raised_on_all_ranks():
            named = read_name(self.path, LATEST)
        step = max(gather_integers(-1 if named is None else int(named.rpartition("step")[2])))
        if step < 0:
            return None
        found = gather_integers(all((self.path / checkpoint_name(step) / file).exists() for file in files))
        if not all(found):
            raise CompressionError(
                f"{NAME}.out: rank {found.index(0)} does not find its part of {checkpoint_name(step)} on its "
                "machine; start with the stages and the order of machines of before, or copy that folder "
                "from the machine that has it, or choose a new folder"
            )
        return step

    def collect_weights(self, step: int) -> None:
        """Copy the weights in the checkpoint of `step` from the other folders to rank 0's.

        Raises:
            CompressionError: on every rank, if one cannot read its files, or rank 0 cannot write them.
        """
        folder = self.path / checkpoint_name(step)
        for source in sorted(set(self._owners) - {0}):
            files = sorted(folder.glob("layer_*")) if self._rank == source else []
            listed = json.dumps([(file.name, file.stat().st_size) for file in files]).encode()
            listed = broadcast_bytes(listed, gather_integers(len(listed))[source], source)
            for name, size in json.loads(listed):
                self._copy_to_first(folder / name, size, source)

    def _copy_to_first(self, file: Path, size: int, source: int) -> None:
        """Copy `file` of rank `source`, of `size` bytes, to the same path on rank 0.

        All ranks take part, and agree once a chunk: none of them waits longer than one takes.

        Raises:
            CompressionError: on every rank, if `source` cannot read the file, or rank 0 cannot write it.
        """
        part, data = file.with_name(f"{file.name}.part"), b""
        for start in [*range(0, size, CHUNK), size]:
            with raised_on_all_ranks():
                if self._rank == 0 and start:  # the chunk before this one
                    with (
                        failures_at(f"{NAME}.out: {part} cannot be written"),
                        part.open("ab" if start > CHUNK else "wb") as written,
                    ):
                        written.write(data)
                if self._rank == source and start < size:
                    with failures_at(f"{NAME}.out: {file} cannot be read"), file.open("rb") as stored:
                        stored.seek(start)
                        data = stored.read(CHUNK)
            if start < size:
                data = send_bytes(data, min(CHUNK, size - start), source, 0)
        if self._rank == 0:
            part.replace(file)


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's folder in the folder of its run."""
    return f"step{step}"


def read_name(path: Path, name: str) -> str | None:
    """Return the name of the checkpoint that the file `name` in the folder of a run holds; None without it.

    Names are those of `checkpoint_name`, and DeepSpeed's own.

    Raises:
        CompressionError: it names none.
    """
    with failures_at(f"{path / name} cannot be read"):
        if not (path / name).exists():
            return None
        data = (path / name).read_bytes()
    found = re.fullmatch(rb"((?:global_)?step\d{1,18})\s*", data)
    if not found:
        raise CompressionError(
            f"{path / name}: {shown(data)} is not allowed: should name a checkpoint of the run: write the "
            "name of the last complete folder beside it (step100) there, or choose a new folder"
        )
    return found[1].decode()
