"""Rows in files: a full disk, and a folder that cannot be used, are errors in one line, on all ranks."""

import errno
import os
import re
import resource
import subprocess
from pathlib import Path

import pytest
import torch

import ds_compress.codecs  # noqa: F401  (registers)
from ds_compress.codec import Context, build
from ds_compress.config import Config
from ds_compress.errors import CompressionError
from ds_compress.feedback import FEEDBACKS
from ds_compress.feedback.aqsgd import sample_buffers
from tests.support.interpreters import interpreter
from tests.support.pipeline import build as build_engine
from tests.support.pipeline import ds_config
from tests.support.ranks import run_ranks

FILE = sample_buffers.FILE_BYTES
WIDTH = 1024
ADVICE = 'free space there, or name another folder in "offload": {"nvme_path": ...}'


def on_disk(folder):
    return {"name": "aqsgd", "offload": {"device": "nvme", "nvme_path": str(folder)}}


def store(folder, messages):
    """Send so many messages of two new samples each, 4 KiB; the number that are remembered, or the error."""
    codec = FEEDBACKS.build(on_disk(folder), "feedback").wrap(build("bf16"))
    memory = {}
    for first in range(0, 2 * messages, 2):
        ctx = Context(boundary=3, sample_ids=torch.tensor([first, first + 1]), memory=memory)
        try:
            codec.encode(torch.randn(2, WIDTH), ctx)
        except CompressionError as error:
            return str(error)
    return len(memory)


def is_no_room(message, folder, reason="No space left on device"):
    return re.fullmatch(
        rf"aqsgd: boundary 3: [\d,]+ bytes cannot be reserved in {re.escape(str(folder))} \({reason}\); "
        + re.escape(ADVICE),
        message,
    )


FULL_DISK = """
import sys
from tests.feedback import test_sample_buffer_files as here
here.sample_buffers.FILE_BYTES = 300_000
print(here.store(sys.argv[1], messages=1000))
"""


def test_a_full_disk_is_an_error(tmp_path):
    """Files had holes: writing to one on a full disk ended the process with SIGBUS."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True
    ).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    try:
        root = Path(__file__).parents[2]
        command = [interpreter(), "-c", FULL_DISK, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert is_no_room(done.stdout.strip(), tmp_path)


def refuse(descriptor, offset, nbytes):
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


def test_room_is_reserved_when_a_file_is_made(tmp_path, monkeypatch):
    assert store(tmp_path, 3) == 6
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert is_no_room(store(tmp_path, 3), tmp_path, "Disk quota exceeded")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("numel", [1, 1000, FILE // 4 - 1, FILE // 2, FILE])
def test_files_are_of_one_size_unless_a_row_is_larger(numel, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "posix_fallocate", lambda descriptor, offset, nbytes: asked.append(nbytes))
    rows = sample_buffers.SampleBuffers("nvme", torch.bfloat16, str(tmp_path))._map(numel)
    assert asked == [len(rows) * numel * 2] and len(rows) >= 1
    assert asked[0] <= max(FILE, 2 * numel) and len(rows) <= sample_buffers.ROWS_PER_FILE


def test_a_row_without_entries_needs_no_file(tmp_path):
    codec = FEEDBACKS.build(on_disk(tmp_path / "absent"), "feedback").wrap(build("bf16"))
    memory = {}
    codec.encode(torch.zeros(2, 0), Context(sample_ids=torch.tensor([1, 2]), memory=memory))
    assert len(memory) == 2


def start(folder, limited_rank=None):
    """The error at start-up; `limited_rank`: may write only 1 MiB to a file, as where a disk is full."""
    if torch.distributed.get_rank() == limited_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    block = {"forward": {"codec": "bf16", "feedback": on_disk(folder)}}
    try:
        build_engine(2, ds_config(block))
    except CompressionError as error:
        return str(error)


def test_the_folder_is_made_and_left_empty(tmp_path):
    assert run_ranks(2, start, tmp_path / "new" / "folder") == [None, None]
    assert not list((tmp_path / "new" / "folder").iterdir())


def test_a_folder_that_cannot_be_made_stops_all_ranks_alike(tmp_path):
    """It was noticed at the first message, by one rank; the others waited for that message."""
    (tmp_path / "file").touch()
    message = run_ranks(2, start, tmp_path / "file" / "folder")
    assert (
        message[0]
        == message[1]
        == (
            f"ds_compress.forward.feedback.offload.nvme_path: {tmp_path}/file/folder cannot be made "
            f"(Not a directory); {ADVICE} [rank 0]"
        )
    )


def test_a_folder_without_room_on_one_rank_stops_all(tmp_path):
    message = run_ranks(2, start, tmp_path, 1)
    assert (
        message[0]
        == message[1]
        == (
            f"ds_compress.forward.feedback.offload.nvme_path: {FILE:,} bytes cannot be reserved in "
            f"{tmp_path} (File too large); {ADVICE} [rank 1]"
        )
    )


def test_no_folder_at_all_is_said_too(tmp_path, monkeypatch):
    """nvme_path null, on a machine without a temporary folder."""
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(tmp_path / "absent")])
    with pytest.raises(CompressionError, match="in the system's temporary folder .No usable temp"):
        FEEDBACKS.build({"name": "aqsgd", "offload": {"device": "nvme"}}, "feedback").prepare()


def test_nothing_is_touched_where_compression_is_off(tmp_path):
    block = {"enabled": False, "forward": {"feedback": on_disk(tmp_path / "folder")}}
    run_ranks(2, build_engine_alone, block)
    assert not (tmp_path / "folder").exists()


def build_engine_alone(block):
    build_engine(2, ds_config(block))


@pytest.mark.parametrize("path", ["/tmp/a\0b", "/tmp/\ud800"], ids=["NUL", "surrogate"])
def test_what_is_no_path_is_refused_in_one_line(path):
    """os.makedirs raised ValueError and UnicodeEncodeError."""
    feedback = {"name": "aqsgd", "offload": {"device": "nvme", "nvme_path": path}}
    with pytest.raises(CompressionError) as caught:
        Config({"forward": {"codec": "bf16", "feedback": feedback}}).prepare()
    line = str(caught.value)
    assert line.startswith("ds_compress.forward.feedback.offload.nvme_path: ") and "\n" not in line
    line.encode()
