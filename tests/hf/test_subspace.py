"""Fine-tuning with narrow messages: trained, resumed, merged, and put together again in Transformers."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from ds_compress.cli import main
from ds_compress.errors import CompressionError
from ds_compress.hf.settings import read_settings
from ds_compress.hf.subspace import FILE, restore
from ds_compress.hf.training import FinetuneRun
from tests.support.finetuning import (
    DS_CONFIG,
    copy_of,
    losses,
    perplexities,
    perplexity,
    plain_run,
    prepare,
    run_to_the_end,
)
from tests.support.interpreters import TRAINING, interpreter
from tests.support.ranks import once, run_ranks

WIDTH = 32  # of the hidden states
RANK = 8
TOKENS = 2 * 32  # of a message
POSITIONS = 8 * TOKENS  # bytes that cross beside hidden states
HEADER = 32  # of a packet


def finish(path):
    """Run up to the last step; the perplexities before and after, or what is refused. Runs on every rank."""
    try:
        run = FinetuneRun(read_settings(path))
    except CompressionError as error:
        return str(error)
    run.resume()
    before = run.perplexity()
    run.train()
    return before, run.perplexity()


def in_forked_ranks(path, **changes):
    """What the first of two ranks returns from `finish` after `changes` to train.json."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    Path(read_settings(path).out).mkdir(exist_ok=True)
    return run_ranks(2, finish, path)[0]


def narrow(rank):
    return {"rank": rank, "samples": 8}


@pytest.fixture(scope="module")
def run():
    """train.json of a finished run with adapters, and what it said."""
    folder = once(
        "subspace",
        lambda folder: run_to_the_end(prepare(folder, subspace=narrow(RANK)), interpreter(TRAINING)),
    )
    return folder / "train.json", (folder / "output").read_text()


def messages(path):
    """Bytes of a message before and after compression: forward, backward."""
    line = re.search(r"^ds_compress .* active, .*$", (path.parent / "printed").read_text(), re.MULTILINE)[0]
    sizes = re.findall(r"([\d,]+) -> ([\d,]+) bytes", line)
    return [tuple(int(size.replace(",", "")) for size in both) for both in sizes]


def test_it_sends_no_more_than_its_coefficients(run):
    """A quarter of the values cost that many bytes: 8 bits forward with a scale for 128, bf16 back."""
    (raw, wire), (raw_back, wire_back) = messages(run[0])
    assert (raw - POSITIONS, raw_back) == (4 * TOKENS * RANK, 4 * TOKENS * RANK)
    assert wire <= HEADER + POSITIONS + TOKENS * RANK * (1 + 4 / 128) + 16
    assert wire_back == HEADER + 2 * TOKENS * RANK
    (whole, _), (_, whole_wire_back) = messages(plain_run())
    assert whole - POSITIONS == (raw - POSITIONS) * WIDTH // RANK
    assert whole_wire_back - HEADER == (wire_back - HEADER) * WIDTH // RANK


def test_it_learns_what_the_whole_width_does(run):
    """docs/subspace.md: a quarter of the coefficients costs 5.5 % of perplexity."""
    before, after = perplexities(run[1])
    whole_before, whole = perplexities((plain_run().parent / "output").read_text())
    assert after < 0.95 * before and before == pytest.approx(whole_before, rel=0.055)
    assert after <= 1.055 * whole


def test_a_merged_run_computes_the_same_with_its_pairs(run, tmp_path, capsys):
    path, output = run
    merged = tmp_path / "merged"
    assert main(["merge", str(path.parent / "out"), "--to", str(merged)]) == 0
    assert f"{FILE} holds layers that the model needs" in capsys.readouterr().out
    model = restore(AutoModelForCausalLM.from_pretrained(merged).eval(), merged)
    assert perplexity(path, model) == pytest.approx(perplexities(output)[1], rel=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(merged).eval()
    assert perplexity(path, plain) != pytest.approx(perplexities(output)[1], rel=1e-3)


def test_a_stopped_run_goes_on_as_if_nothing_had_been(run, tmp_path):
    path = copy_of(run[0], tmp_path / "copy")
    in_forked_ranks(path, steps=4)
    _, after = in_forked_ranks(path, steps=6)
    assert losses(path.parent / "out") == losses(run[0].parent / "out")
    assert after == pytest.approx(perplexities(run[1])[1], abs=1e-4)


@pytest.mark.extended
def test_a_basis_as_wide_as_the_model_changes_no_perplexity(tmp_path):
    path = prepare(tmp_path, subspace=narrow(WIDTH), ds_config=DS_CONFIG, steps=1, save_every=0, lora=None)
    full, _ = in_forked_ranks(path)
    small, _ = in_forked_ranks(path, subspace=narrow(RANK), out=str(tmp_path / "small"))
    model = AutoModelForCausalLM.from_pretrained(read_settings(path).model).eval()
    assert perplexity(path, model) == pytest.approx(full, rel=1e-5)
    assert small != pytest.approx(full, rel=1e-4)


@pytest.mark.extended
def test_what_no_run_left_is_refused(run, tmp_path):
    with pytest.raises(CompressionError, match=f"{FILE} is missing"):
        restore(AutoModelForCausalLM.from_pretrained(run[0].parent / "model"), tmp_path)
    path = copy_of(run[0], tmp_path / "wide")
    message = in_forked_ranks(path, subspace=narrow(WIDTH + 1))
    assert f"rank {WIDTH + 1}; hidden states are {WIDTH} wide there: should be 1..{WIDTH}" in message
