"""Hashes of mirrored state: every bit counts, and one comparison reads no more than a window of it."""

import pytest
import torch

from ds_compress.feedback import digest
from ds_compress.feedback.digest import mirror_digest, window_digest


def memories(rows=10, numel=50):
    torch.manual_seed(0)
    return {
        position: {
            "backward/mirror/ef21": torch.randn(numel),
            **{f"forward/mirror/host/aqsgd/{row:016x}": torch.randn(numel) for row in range(rows)},
            "forward/sender/ef": torch.randn(numel),
        }
        for position in (0, 1)
    }


def hashes(state, turns=1):
    return [window_digest(state, "forward", turn) for turn in range(turns)]


def test_only_what_is_mirrored_in_the_direction_counts():
    state, before, whole = memories(), hashes(memories()), mirror_digest(memories())
    state[0]["forward/sender/ef"] += 1
    assert hashes(state) == before and mirror_digest(state) == whole
    state[0]["backward/mirror/ef21"] += 1
    assert hashes(state) == before and mirror_digest(state) != whole
    assert window_digest(state, "backward", 0) != window_digest(memories(), "backward", 0)


@pytest.mark.parametrize("window", [1, 7, 200, 333, 3999, 4000, 10**6])
def test_every_bit_is_seen_in_turn(window, monkeypatch):
    monkeypatch.setattr(digest, "WINDOW", window)
    total = 2 * 10 * 50 * 4
    turns = -(-total // window)
    before = hashes(memories(), turns)
    for position, row, byte in [(0, 0, 0), (0, 3, 17), (1, 0, 199), (1, 9, 199)]:
        state = memories()
        state[position][f"forward/mirror/host/aqsgd/{row:016x}"].view(torch.uint8)[byte] ^= 1
        seen = [turn for turn, pair in enumerate(zip(before, hashes(state, turns))) if len(set(pair)) > 1]
        assert len(seen) == 1, "once in so many turns"
        assert window_digest(state, "forward", seen[0] + turns) != before[seen[0]], "and again after them"
        assert seen[0] == (position * 2000 + row * 200 + byte) // window


def test_what_is_missing_is_seen_at_once(monkeypatch):
    monkeypatch.setattr(digest, "WINDOW", 100)
    state = memories()
    del state[1]["forward/mirror/host/aqsgd/0000000000000009"]
    assert all(ours != theirs for ours, theirs in zip(hashes(state, 40), hashes(memories(), 40)))
    renamed = memories()
    renamed[0]["forward/mirror/host/aqsgd/x"] = renamed[0].pop("forward/mirror/host/aqsgd/0000000000000000")
    assert any(ours != theirs for ours, theirs in zip(hashes(renamed, 40), hashes(memories(), 40)))


def test_a_turn_reads_one_window(monkeypatch):
    monkeypatch.setattr(digest, "WINDOW", 1000)
    read = []
    absorb = digest.absorb
    monkeypatch.setattr(digest, "absorb", lambda *args: read.append(args[2].nbytes) or absorb(*args))
    state = memories(rows=2000)
    for turn in range(20):
        read.clear()
        window_digest(state, "forward", turn)
        assert sum(read) == 1000


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5)])
def test_any_shape_dtype_and_layout(dtype, shape):
    value = torch.ones(shape).to(dtype)
    state = {0: {"forward/mirror/x": value}}
    turned = {0: {"forward/mirror/x": value.mT.contiguous().mT if value.dim() > 1 else value}}
    assert hashes(state) == hashes(turned) and mirror_digest(state) == mirror_digest(turned)
    other = {0: {"forward/mirror/x": value.reshape(*shape, 1)}}
    assert mirror_digest(state) != mirror_digest(other)


def test_nothing_mirrored():
    assert hashes({}) == hashes({0: {}}) == hashes({0: {"forward/sender/ef": torch.ones(3)}})
