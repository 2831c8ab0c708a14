"""Fine-tuning with narrow messages: trained, resumed, merged, and put together again in Transformers."""

import json
import math
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_compress.cli import main
from ds_compress.errors import CompressionError
from ds_compress.hf.data import Sequences
from ds_compress.hf.settings import read
from ds_compress.hf.subspace import FILE, restore
from tests.support.finetuning import copy_of, finetune, losses, perplexities, plain_run, prepare, told
from tests.support.shared import once
from tests.support.warm import TRAINING, interpreter

WIDTH = 32  # of the hidden states
RANK = 8
TOKENS = 2 * 32  # of a message
POSITIONS = 8 * TOKENS  # bytes that cross beside hidden states
HEADER = 32  # of a packet


def trained(folder, rank, **changes):
    path = prepare(folder, subspace={"rank": rank, "samples": 8}, **changes)
    told(path, interpreter(TRAINING))
    return path


@pytest.fixture(scope="module")
def run():
    """train.json of a finished run with adapters, and what it said."""
    folder = once("subspace", lambda folder: trained(folder, rank=RANK))
    return folder / "train.json", (folder / "said").read_text()


def perplexity(path, model):
    """Of the sequences that a run with this train.json holds out."""
    settings = read(path)
    data = Sequences(settings, AutoTokenizer.from_pretrained(settings.model))
    found = []
    for (ids, positions), labels in data.held_out(2, 0, 1):
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, :-1]
        found.append(torch.nn.functional.cross_entropy(logits.mT, labels[:, 1:], ignore_index=-100).item())
    return math.exp(sum(found) / len(found))


def messages(path):
    """Bytes of a message before and after compression: forward, backward."""
    line = re.search(r"^ds_compress .* active, .*$", (path.parent / "printed").read_text(), re.MULTILINE)[0]
    sizes = re.findall(r"([\d,]+) -> ([\d,]+) bytes", line)
    return [tuple(int(size.replace(",", "")) for size in both) for both in sizes]


def test_it_sends_no_more_than_its_coefficients(run):
    """Of a quarter of the values, that many bytes: 8 bits forward with a scale for 128, bf16 back; and of a
    hidden state it was once asked only for a ratio above 1."""
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
    whole_before, whole = perplexities((plain_run().parent / "said").read_text())
    assert after < 0.95 * before and before == pytest.approx(whole_before, rel=0.055)
    assert after <= 1.055 * whole


def test_a_merged_run_computes_the_same_with_its_pairs(run, tmp_path, capsys):
    path, said = run
    merged = tmp_path / "merged"
    assert main(["merge", str(path.parent / "out"), "--to", str(merged)]) == 0
    assert f"{FILE} belongs between its layers" in capsys.readouterr().out
    model = restore(AutoModelForCausalLM.from_pretrained(merged).eval(), merged)
    assert perplexity(path, model) == pytest.approx(perplexities(said)[1], rel=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(merged).eval()
    assert perplexity(path, plain) != pytest.approx(perplexities(said)[1], rel=1e-3)


def test_a_stopped_run_goes_on_as_if_nothing_had_been(run, tmp_path):
    path = copy_of(run[0], tmp_path / "copy")
    settings = json.loads(path.read_text())
    for steps in (4, 6):
        path.write_text(json.dumps(settings | {"steps": steps}))
        said = finetune("torchrun", path, python=interpreter(TRAINING)).stderr
    assert "goes on from step 4" in said
    assert losses(path.parent / "out") == losses(run[0].parent / "out")
    assert perplexities(said)[1] == perplexities(run[1])[1]


def test_a_basis_as_wide_as_the_model_changes_no_perplexity(tmp_path):
    uncompressed = json.loads(prepare(tmp_path / "none").read_text())["ds_config"]
    del uncompressed["ds_compress"]
    found = [
        trained(tmp_path / str(rank), rank=rank, ds_config=uncompressed, steps=1, lora=None)
        for rank in (WIDTH, WIDTH // 4)
    ]
    full, narrow = (perplexities((path.parent / "said").read_text())[0] for path in found)
    settings = read(found[0])
    model = AutoModelForCausalLM.from_pretrained(settings.model).eval()
    assert perplexity(found[0], model) == pytest.approx(full, rel=1e-4)
    assert narrow != pytest.approx(full, rel=1e-4)


def test_what_no_run_left_is_refused(run, tmp_path):
    with pytest.raises(CompressionError, match=f"{FILE} is missing"):
        restore(AutoModelForCausalLM.from_pretrained(run[0].parent / "model"), tmp_path)
    path = copy_of(run[0], tmp_path / "wide")
    settings = json.loads(path.read_text()) | {"subspace": {"rank": WIDTH + 1}}
    path.write_text(json.dumps(settings))
    done = finetune("torchrun", path, check=False, python=interpreter(TRAINING))
    assert done.returncode
    assert f"rank {WIDTH + 1}; hidden states are {WIDTH} wide there: should be 1..{WIDTH}" in done.stderr
