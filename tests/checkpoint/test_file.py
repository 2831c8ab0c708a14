"""What of a rank's state is stored in 8 bits, and that it comes back in its own dtype."""

import torch

from ds_compress.checkpoint.file import StateFile, pack, write


def test_only_large_states_of_feedbacks_are_in_8_bits(tmp_path):
    row, residual, basis, small = (
        f"4/upstream/0/{key}"
        for key in ("forward/mirror/aqsgd/1", "backward/sender/ef", "lowrank/q", "backward/sender/few")
    )
    state = {row: torch.randn(300).bfloat16(), residual: torch.randn(300), basis: torch.randn(300)}
    state[small] = torch.randn(5)
    entries, packed = pack(state, eight_bits=True)
    names = {f"{key}#{part}" for key in (row, residual) for part in ("codes", "scales")}
    assert set(entries) == names | {basis, small}
    path = tmp_path / "state.safetensors"
    write(path, entries, version="0", step=7, settings={}, **packed)
    file = StateFile(path)
    assert file.keys == state.keys() and file.read(row).dtype == torch.bfloat16
    for key in (basis, small):
        assert torch.equal(file.read(key), state[key])
    for key, share in ((row, 1.01), (residual, 0.501)):  # half a step, and the rounding to bf16
        read, exact = file.read(key).float(), state[key].float()
        for ours, theirs in zip(read.split(128), exact.split(128)):
            assert (ours - theirs).abs().max() <= share * theirs.abs().max() / 127


def test_a_file_of_release_0_2_is_read(tmp_path):
    """It has an id, and no base where its tensors are not changes to those of another file."""
    path = tmp_path / "state.safetensors"
    entries, packed = pack({"4/upstream/0/lowrank/q": torch.ones(3)}, eight_bits=False)
    write(path, entries, version="0.2.0", step=7, settings={}, id="1", base=None, **packed)
    assert StateFile(path).read("4/upstream/0/lowrank/q").tolist() == [1, 1, 1]
