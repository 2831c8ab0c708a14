"""Files of earlier releases."""

import torch

from ds_compress.checkpoint.file import StateFile, write


def test_a_file_of_release_0_2_is_read(tmp_path):
    """It has an id, and no base where its tensors are not changes to those of another file."""
    path = tmp_path / "state.safetensors"
    entries, old = {"4/upstream/0/lowrank/q": torch.ones(3)}, {"id": "1", "base": None, "eight_bits": {}}
    write(path, entries, version="0.2.0", step=7, settings={}, **old)
    assert StateFile(path).read("4/upstream/0/lowrank/q").tolist() == [1, 1, 1]
