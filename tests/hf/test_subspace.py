"""Fine-tuning with narrow messages: trained, resumed, merged, and put together again in Transformers."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_compress.cli import main
from ds_compress.errors import CompressionError
from ds_compress.hf.data import Sequences
from ds_compress.hf.settings import read
from ds_compress.hf.subspace import FILE, restore
from tests.support.finetuning import copy_of, finetune, losses, perplexities, prepare
from tests.support.shared import once
from tests.support.warm import TRAINING, interpreter

WIDTH = 32  # of the hidden states


def trained(folder, rank, **changes):
    path = prepare(folder, subspace={"rank": rank, "samples": 8}, **changes)
    (folder / "said").write_text(finetune("torchrun", path, python=interpreter(TRAINING)).stderr)
    return path


@pytest.fixture(scope="module")
def run():
    """train.json of a finished run with adapters, and what it said."""
    folder = once("subspace", lambda folder: trained(folder, rank=8))
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


def test_it_trains_and_sends_less(run):
    _, said = run
    before, after = perplexities(said)
    assert after < 0.95 * before
    # of narrow messages: forward 8 bits, backward bf16, and positions, which are beside so few values much
    last = [line for line in said.splitlines() if line.startswith("training: 6/6")][-1]
    assert float(last.partition("ratio=")[2].rstrip("x")) > 1


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
