"""Checkpoints that hold changes to the one before: size, error, and what happens if one is missing."""

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ds_compress  # noqa: F401
from ds_compress.checkpoint.checkpointer import Chain, state_of
from ds_compress.checkpoint.file import (
    FULL_EVERY,
    DamagedFile,
    StateFile,
    delta_decode,
    delta_encode,
    pack,
    write,
)
from ds_compress.checkpoint.search import ORPHANED, RESTORED, UNREADABLE, Found, Rank, Side, Verdict, load
from ds_compress.config import Config
from ds_compress.message.channel import Boundary
from tests.checkpoint.test_checkpointer import assert_same, config
from tests.support.pipeline import batches, build, channel_state, log_lines
from tests.support.ranks import run_ranks

NAME = "state.safetensors"
KEY = "4/upstream/0/forward/mirror/ef21"


def steps(value):
    """Of the int8 grid, for each value: in float64, the largest magnitude of its 128 neighbours over 127."""
    flat = value.double().flatten()
    each = [part.abs().max().expand(part.numel()) / 127 for part in flat.split(128)]
    return torch.cat(each).view(value.shape) if each else flat.view(value.shape)


def assert_within(loaded, exact, share_of_step):
    """fp32 arithmetic may add a little of the value's own rounding."""
    assert ((loaded.double() - exact.double()).abs() <= share_of_step * steps(exact) + 1e-45).all()


@given(
    st.integers(1, 700),
    st.sampled_from([1e-30, 1.0, 1e30]),
    st.sampled_from([0.0, 1e-6, 0.01, 1.0, -1.0, 3.0, 1e5]),
    st.sampled_from([0.0, 0.001, 1.0]),
    st.integers(0, 99),
)
def test_error_is_half_a_step_whatever_the_base(numel, scale, base_scale, distance, seed):
    generator = torch.Generator().manual_seed(seed)
    value, other = torch.randn(2, numel, generator=generator) * scale
    base = base_scale * value + distance * other
    codes, scales = delta_encode(value, base)
    assert codes.dtype == torch.int8 and codes.abs().max() <= 127 and scales.numel() == -(-numel // 128)
    assert_within(delta_decode(codes, scales, base), value, 0.501)


def test_zeros_and_no_change():
    value = torch.randn(5, 70)
    codes, scales = delta_encode(value, value)
    assert not codes.any() and torch.equal(delta_decode(codes, scales, value), value)
    nothing = torch.zeros(5, 70)
    for base in (value, nothing):
        assert not delta_decode(*delta_encode(nothing, base), base).any()
    with pytest.raises(ValueError, match="350 codes came for a change to 128 values"):
        delta_decode(codes, scales, torch.zeros(128))


def boundary(numel=64 * 128):
    """One side with the state of EF21."""
    codec = {"codec": {"name": "topk", "density": 0.1}, "feedback": "ef21"}
    one = Boundary(0, Config({"forward": codec, "min_numel": 0}))
    return one, torch.randn(numel, generator=torch.Generator().manual_seed(0))


def save(path, tensors, base=None, **metadata):
    entries, packed = pack(tensors, True, base)
    write(path, entries, **{"version": "0", "step": 7, "settings": {}, **metadata}, **packed)


def store(folder, tag, tensors, chain):
    """As the engine does it; the chain that now ends with `tag`."""
    chain = chain.before(folder, tag)
    base = StateFile(folder, chain.tags[-1], NAME) if chain.tags else None
    (folder / tag).mkdir(exist_ok=True)
    save(folder / tag / NAME, tensors, base)
    return chain.then(tag)


def size(folder, tag):
    return (folder / tag / NAME).stat().st_size


def is_complete(folder, tag):
    return StateFile(folder, tag, NAME).metadata.base is None


def test_slow_state_takes_fewer_bytes_with_the_same_error(tmp_path):
    one, x = boundary()
    for step in range(20):  # the state has come near the messages
        one.forward.encode([x], one.forward.message_id(step, 0))
    chain, complete = Chain(), []
    for number in range(2 * FULL_EVERY + 3):
        x = x + 0.002 * torch.randn(x.shape, generator=torch.Generator().manual_seed(number))
        one.forward.encode([x], one.forward.message_id(20 + number, 0))
        state = state_of([Side(one, 4, "upstream")])
        assert list(state) == [KEY]
        chain = store(tmp_path, f"delta{number}", state, chain)
        store(tmp_path, f"int8_{number}", state, Chain())
        exact, loaded = state[KEY], StateFile(tmp_path, f"delta{number}", NAME).read(KEY)
        assert_within(loaded, exact, 0.501)
        complete.append(is_complete(tmp_path, f"delta{number}"))
        if not complete[-1]:
            assert size(tmp_path, f"delta{number}") < 0.5 * size(tmp_path, f"int8_{number}")
    assert [number for number, is_it in enumerate(complete) if is_it] == [
        0,
        FULL_EVERY + 1,
        2 * FULL_EVERY + 2,
    ]


def test_only_what_both_sides_hold_is_a_change(tmp_path):
    state = {
        f"4/upstream/0/{key}": torch.randn(300)
        for key in (
            "forward/mirror/device/aqsgd/1",
            "forward/mirror/device/aqsgd/2",
            "backward/sender/ef",
            "lowrank/q",
        )
    }
    row, reshaped, residual, basis = state
    state[row] = state[row].bfloat16()
    chain = store(tmp_path, "a", state, Chain())
    new = "4/upstream/0/forward/mirror/device/aqsgd/3"
    state[reshaped], state[new] = torch.randn(3, 100), torch.randn(300)
    store(tmp_path, "b", state, chain)
    file = StateFile(tmp_path, "b", NAME)
    entries = {entry for entry in file._link(0).hashes if not entry.endswith("#scales")}
    assert entries == {f"{row}#delta", f"{reshaped}#codes", f"{new}#codes", f"{residual}#codes", basis}
    assert file.read(row).dtype == torch.bfloat16 and torch.equal(file.read(basis), state[basis])
    assert_within(file.read(row), state[row], 1.01)  # half a step, and the rounding to bf16


def test_chain():
    chain = functools.reduce(Chain.then, "abc", Chain("here"))
    assert chain.before("here", "d").tags == ("a", "b", "c")
    assert chain.before("there", "d").tags == ()
    assert chain.before("here", "b").tags == ("a",)  # written again: it can no longer be built on
    assert chain.before("here", "a").tags == ()


def test_a_base_that_was_written_again_is_not_taken_for_the_old_one(tmp_path):
    state = {KEY: torch.randn(300)}
    chain = functools.reduce(lambda chain, tag: store(tmp_path, tag, state, chain), "abc", Chain())
    store(tmp_path, "b", state, chain)
    assert StateFile(tmp_path, "b", NAME).read(KEY).shape == (300,)
    file = StateFile(tmp_path, "c", NAME)
    with pytest.raises(DamagedFile, match="written again") as caught:
        file.read(KEY)
    assert caught.value.tag == "b"


def test_no_more_bases_than_allowed(tmp_path):
    """Written without a chain, which would have begun anew."""
    for number in range(FULL_EVERY + 2):
        base = StateFile(tmp_path, str(number - 1), NAME) if number else None
        (tmp_path / str(number)).mkdir()
        save(tmp_path / str(number) / NAME, {KEY: torch.randn(300)}, base)
    StateFile(tmp_path, str(FULL_EVERY), NAME).read(KEY)
    with pytest.raises(DamagedFile, match=f"more than {FULL_EVERY} bases"):
        StateFile(tmp_path, str(FULL_EVERY + 1), NAME).read(KEY)


@pytest.mark.parametrize("damaged", ["a", "b"])
def test_damage_is_seen_in_the_right_file(damaged, tmp_path):
    one, x = boundary()
    side, rank, chain = Side(one, 4, "upstream"), Rank(0, 0, 0), Chain()
    name = rank.path(tmp_path).name
    for step, tag in enumerate("ab"):
        one.forward.encode([x], one.forward.message_id(step, 0))
        chain = chain.before(tmp_path, tag)
        base = StateFile(tmp_path, chain.tags[-1], name) if chain.tags else None
        (tmp_path / tag).mkdir()
        save(tmp_path / tag / name, state_of([side]), base, settings={side.key: side.settings})
        chain = chain.then(tag)
    found = load(tmp_path, "b", rank, side, 7)
    assert_within(found.memories[0]["forward/mirror/ef21"], one.memory[0]["forward/mirror/ef21"], 0.501)
    path = tmp_path / damaged / name
    path.write_bytes(path.read_bytes()[:-50])
    lost = load(tmp_path, "b", rank, side, 7)
    assert not lost.memories
    assert lost == (Found(ORPHANED, {}, "a") if damaged == "a" else Found(UNREADABLE))


def test_a_flipped_bit_of_a_change_is_seen(tmp_path):
    chain = store(tmp_path, "a", {KEY: torch.randn(3000)}, Chain())
    store(tmp_path, "b", {KEY: torch.randn(3000)}, chain)
    path = tmp_path / "b" / NAME
    content = bytearray(path.read_bytes())
    frame = content.index(b"\x28\xb5\x2f\xfd")
    content[frame + 500] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFile):
        StateFile(tmp_path, "b", NAME).read(KEY)


def test_rank_0_names_the_tag_that_another_rank_misses():
    one, _ = boundary()
    tag = "a tag of ümlauts " + "x" * 80
    rows = [
        Verdict.row((4, 0, 0), Side(one, 4, "upstream"), Found(RESTORED)).tolist(),
        Verdict.row((4, 0, 0), Side(one, 4, "downstream"), Found(ORPHANED, {}, tag)).tolist(),
    ]
    assert all(len(row) == Verdict.WIDTH for row in rows)
    named = tag.encode()[:64].decode()
    assert (
        Verdict(rows)
        .report("f")
        .endswith(f"the checkpoint that it builds on is missing or damaged: {named} (layer 4, replica 0)")
    )


def train(settings, folder, steps=(), start=0, forget=None):
    """Train and save at each of `steps`; `forget`: (step, file) to delete after the save of that step."""
    engine = build(2, settings)
    warnings = log_lines()
    if start:
        engine.load_checkpoint(str(folder), tag=f"global_step{start}")
    loaded, saved, losses = channel_state(engine), {}, []
    data = itertools.islice(batches(), start * 4, None)
    for step in range(start + 1, max(steps, default=start + 2) + 1):
        losses.append(engine.train_batch(data).item())
        if step in steps:
            saved[step] = channel_state(engine)
            engine.save_checkpoint(str(folder))
            assert_same(channel_state(engine), saved[step])
            if forget and forget[0] == step and torch.distributed.get_rank() == 0:
                (folder / forget[1]).unlink()
            torch.distributed.barrier()
    return {
        "loaded": loaded,
        "saved": saved,
        "losses": losses,
        "warnings": warnings,
        "end": channel_state(engine),
    }


def ranks(*args, **options):
    return run_ranks(2, functools.partial(train, **options), *args)


def delta(name):
    return config(name, checkpoint={"state": "delta"})


@pytest.mark.parametrize("name", ["ef21", "aqsgd"])
def test_both_sides_load_the_same(name, tmp_path):
    saved = ranks(delta(name), tmp_path, steps=(2, 3, 5))
    upstream, downstream = ranks(delta(name), tmp_path, start=5)
    assert not upstream["warnings"] and not downstream["warnings"]
    assert upstream["loaded"].keys() == saved[0]["saved"][5].keys() and upstream["loaded"]
    assert_same(upstream["loaded"], downstream["loaded"])
    assert_same(upstream["end"], downstream["end"])
    for key, value in upstream["loaded"].items():
        assert_within(value, saved[0]["saved"][5][key], 1.0)
    files = [
        StateFile(tmp_path, f"global_step{step}", f"ds_compress_pp0{stage}_dp00_tp00.safetensors")
        for step in (2, 3, 5)
        for stage in (0, 1)
    ]
    assert [file.metadata.base and file.metadata.base[0] for file in files] == [
        None,
        None,
        "global_step2",
        "global_step2",
        "global_step3",
        "global_step3",
    ]


def test_a_base_that_one_rank_misses(tmp_path):
    name = "ds_compress_pp01_dp00_tp00.safetensors"
    saved = ranks(delta("ef21"), tmp_path, steps=(1, 2, 3), forget=(2, f"global_step1/{name}"))
    assert not saved[0]["warnings"]
    assert (
        "this one is complete" in saved[1]["warnings"][0]
        and f"global_step1/{name}" in saved[1]["warnings"][0]
    )
    for stage in (0, 1):
        file = StateFile(tmp_path, "global_step3", f"ds_compress_pp0{stage}_dp00_tp00.safetensors")
        assert file.metadata.base is None
    upstream, downstream = ranks(delta("ef21"), tmp_path, start=3)
    assert upstream["loaded"] and not upstream["warnings"]
    assert_same(upstream["loaded"], downstream["loaded"])
    orphans = ranks(delta("ef21"), tmp_path, start=2)
    assert not any(rank["loaded"] for rank in orphans)
    assert orphans[0]["warnings"] == [
        f"ds_compress: {tmp_path}/global_step2: state of channels starts from zero: "
        "the checkpoint that it builds on is missing or damaged: global_step1 (layer 4, replica 0)"
    ]
    assert all(torch.tensor(rank["losses"]).isfinite().all() for rank in orphans)
