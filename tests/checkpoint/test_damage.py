"""Damaged state files, and old ones: a verdict, the same kind on every rank; nothing damaged is loaded."""

import logging
import os
import random
import re
import resource
from types import SimpleNamespace

import pytest
import torch

from ds_compress.checkpoint import restore
from ds_compress.checkpoint.checkpointer import entries_of
from ds_compress.checkpoint.file import StateFile, write
from ds_compress.checkpoint.restore import ABSENT, CHANGED, RESTORED, UNFIT, UNREADABLE, Found, Rank, Side
from ds_compress.codec import TensorSpec
from ds_compress.config import Config
from ds_compress.config.replicas import ReplicasOptions, build_replica_codec
from ds_compress.message.channel import Boundary
from ds_compress.replicas.slices import GRADIENT, Slice, SliceCodec
from tests.checkpoint.damaged_files import damaged, opened, signed

RANK, STEP, EXACT = Rank(1, 0, 0), 7, Config({}).checkpoint_codec
LOWRANK, QUANTIZE = {"name": "lowrank", "rank": 2}, {"name": "quantize", "bits": 4}
BLOCK = {
    "forward": {"codec": LOWRANK, "feedback": "ef"},
    "backward": {"codec": QUANTIZE, "feedback": "loco"},
    "min_numel": 0,
}
EF21 = {"codec": QUANTIZE, "feedback": "ef21"}
BLOCK |= {"boundaries": {"0": {"backward": {"feedback": "ef"}}, "1": {"forward": EF21}}}


def train(sides, steps=2):
    """Fill the memory of a stage between two others."""
    torch.manual_seed(0)
    for step in range(steps):
        for side in sides:
            for channel in side.boundary.channels:
                channel.encode([torch.randn(4, 8, 16)], channel.message_id(step, 0))


def load(sides, root, rank=RANK):
    """What is found of each side under tag "b"."""
    return [restore.load_side(root, "b", rank, side, STEP) for side in sides]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Sides, root, path under tag "b", and what was found when all was well."""
    root = tmp_path_factory.mktemp("checkpoints")
    config = Config(BLOCK)
    sides = [Side(Boundary(0, config), 4, "downstream"), Side(Boundary(1, config), 8, "upstream")]
    train(sides, 4)
    path = RANK.path(root / "b")
    path.parent.mkdir()
    settings = {side.key: side.settings for side in sides}
    entries = entries_of({side.key: side.boundary.memory for side in sides})
    write(path, entries, EXACT, version="0.2", step=STEP, settings=settings)
    whole = load(sides, root)
    assert [found.status for found in whole] == [RESTORED] * 2
    return sides, root, path, whole


def attack(saved, count, seed):
    """Damage the file so many times; by way, how often a side was refused, and how often none was."""
    sides, root, target, whole = saved
    content, rng = target.read_bytes(), random.Random(seed)
    refused, held = {}, {}
    try:
        for _ in range(count):
            target.write_bytes(content)
            bad, way = damaged(target, content, rng)
            if bad == content:
                continue
            target.write_bytes(bad)
            found = load(sides, root)
            for ours, before in zip(found, whole):
                if ours.status == RESTORED:
                    torch.testing.assert_close(ours.memories, before.memories, rtol=0, atol=0, msg=way)
                assert ours.memories == {} or ours.status == RESTORED
            rows = [restore.Verdict.row((side.layer, 0, 0), side, own) for side, own in zip(sides, found)]
            restore.Verdict(row.tolist() for row in rows).report(root)
            survived = all(ours.status == RESTORED for ours in found)
            counted = held if survived else refused
            counted[way] = counted.get(way, 0) + 1
    finally:
        target.write_bytes(content)
    return refused, held


@pytest.mark.extended
def test_no_damaged_file_is_loaded(saved, caplog):
    """Without hashes 100 of 100 flipped bits were."""
    caplog.set_level(logging.ERROR, "ds_compress")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused, held = attack(saved, 1600, seed=0)
    assert sum(refused.values()) > 1590 and len(refused) == 9 and not held, (refused, held)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def found(saved):
    return load(*saved[:2])


@pytest.fixture
def path(saved):
    """Path under tag "b", which the test may damage."""
    content = saved[2].read_bytes()
    yield saved[2]
    saved[2].unlink(missing_ok=True)
    saved[2].write_bytes(content)


def test_damage_to_one_side_leaves_the_other(saved, path, caplog):
    content, (entries, _) = path.read_bytes(), opened(path)
    name = "8/upstream/0/forward/mirror/ef21"
    at = content.index(entries[name].numpy().tobytes())
    path.write_bytes(content[: at + 30] + bytes([content[at + 30] ^ 1]) + content[at + 31 :])
    assert [each.status for each in found(saved)] == [RESTORED, UNREADABLE]
    assert f"{path} cannot be read: ValueError: entry {name} is not what was written" in caplog.text


def test_a_damaged_file_of_another_stage_is_no_reason(saved, path, caplog):
    other = Rank(0, 0, 0).path(path.parent)
    other.write_bytes(b"\x10" * 100)
    try:
        assert [each.status for each in found(saved)] == [RESTORED] * 2 and not caplog.text
        path.unlink()
        assert found(saved) == [Found(UNREADABLE)] * 2
    finally:
        other.unlink()


def test_the_file_of_another_rank_in_its_place(saved, path):
    path.rename(Rank(1, 1, 0).path(path.parent))
    assert load(*saved[:2], Rank(1, 1, 0)) == [Found(UNREADABLE)] * 2
    Rank(1, 1, 0).path(path.parent).unlink()


def test_what_lies_at_the_path_is_not_a_file(saved, path):
    for make in (os.mkdir, os.mkfifo, lambda path: os.symlink(path, path)):
        path.unlink(missing_ok=True)
        make(path)
        assert found(saved) == [Found(UNREADABLE)] * 2
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    "key, value, logged",
    [
        ("forward/mirror/ef21", torch.zeros(4, 8, 16, dtype=torch.bfloat16), "is torch.bfloat16 .4, 8"),
        ("backward/sender/loco.scales", torch.zeros(3), "expected torch.float32 .4."),
        ("backward/sender/loco.codes", None, "loco.scales' is torch.float32 .4., expected torch.int8"),
        ("lowrank.0.forward.16x2", torch.zeros(16, 3), "expected torch.float32 .16, 2."),
        ("lowrank.0.forward.x", torch.zeros(16, 3), "expected torch.float32 .-1, -1."),
    ],
)
def test_entries_that_do_not_fit(saved, path, key, value, logged, caplog):
    """Sound, but not what these settings leave behind: a release that keeps its state in another way."""
    entries = {f"{s.key}/0/{k}": v for s in saved[0] for k, v in s.boundary.memory[0].items()}
    side = "4/downstream" if key.startswith("lowrank") else "8/upstream"
    assert entries.pop(f"{side}/0/{key}", None) is not None or key.endswith(".x")
    entries.update({f"{side}/0/{key}": value} if value is not None else {})
    path.write_bytes(signed(path, entries))
    expected = {s.key: UNFIT if s.key == side else RESTORED for s in saved[0]}
    assert [each.status for each in found(saved)] == [*expected.values()]
    assert re.search(logged, caplog.text), caplog.text


def test_residuals_of_gradients_that_do_not_fit(tmp_path, caplog):
    """As of boundaries: they would have been noticed where the next gradient is encoded."""
    options = ReplicasOptions(codec=QUANTIZE, feedback="loco")
    codec = SliceCodec(build_replica_codec(options, "replicas"), 1, True, 0)
    own = Slice(0, 0, TensorSpec((4096,), torch.float32))
    packet = torch.zeros(codec.layout(own).nbytes, dtype=torch.uint8)
    codec.encode(own, torch.randn(4096), packet, GRADIENT, 0, 0)
    traffic = SimpleNamespace(kind="replicas", settings={"of": "this run"}, codec=codec)
    key, file = restore.gradients_key("replicas"), RANK.path(tmp_path / "b")
    file.parent.mkdir()
    (scales,) = (name for name in own.memory if name.endswith(".scales"))
    for memory, status in ((own.memory, RESTORED), ({**own.memory, scales: torch.zeros(3)}, UNFIT)):
        settings = {key: traffic.settings}
        write(file, entries_of({key: {0: memory}}), EXACT, version="0.4", step=STEP, settings=settings)
        assert restore.load_gradients(tmp_path, "b", RANK, traffic, STEP).status == status
    assert f"{file} does not fit" in caplog.text


def test_other_steps_and_settings_are_as_before(saved, path):
    entries, _ = opened(path)
    path.write_bytes(signed(path, entries, step=8))
    assert found(saved) == [Found(ABSENT)] * 2
    settings = {side.key: side.settings for side in saved[0]}
    settings["4/downstream"] = {**settings["4/downstream"], "forward": {}}
    path.write_bytes(signed(path, entries, step=STEP, settings=settings))
    assert [each.status for each in found(saved)] == [CHANGED, RESTORED]


def test_a_new_replica_takes_the_state_of_others_and_not_what_they_measured(saved, path):
    state = {"written": {}, "adopted": {"0": {}}, "policy": {"rungs": [], "state": {}}}
    path.write_bytes(signed(path, opened(path)[0], course=state, noted={"0": [1.0, 2.0]}))
    root, new = saved[1], Rank(1, 1, 0)
    (own, measured), (others, none) = (restore.saved_state(root, "b", rank, STEP) for rank in (RANK, new))
    assert own == others and own["adopted"] == {"0": {}}
    assert measured == {"0": [1.0, 2.0]} and none == {}
    assert restore.saved_state(root, "b", RANK, STEP + 1) == ({}, {})


def test_what_release_0_3_wrote_is_read(saved, tmp_path):
    """It had the depth in a field of its own, and no state of it. It has an id, and no base where its tensors
    are not changes to those of another file."""
    path = tmp_path / saved[2].name
    policy = {"rungs": [[0, "backward", 1]], "state": {}}
    course = {"written": {}, "adopted": {}, "policy": policy, "guard": {"first_loss": 2.0}}
    old = {"schedule": [3, 2, 8], "id": "1", "base": None, "eight_bits": {}}
    path.write_bytes(signed(saved[2], opened(saved[2])[0], course=course, **old))
    state = StateFile(path).metadata.state.model_dump(mode="json")
    assert state["guard"] == {"first_loss": 2.0} and state["depth"] == {}
    assert state["policy"]["rungs"] == [[0, "backward", 1]]
