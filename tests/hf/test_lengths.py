"""Sequences of several lengths: documents in sequences of their own, steps of one length, nothing lost."""

import random
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import inject_adapter_in_model
from transformers import AutoModelForCausalLM

from ds_compress.hf.data import Sequences
from ds_compress.hf.documents import IGNORED
from ds_compress.hf.part import causal_lm_loss
from ds_compress.hf.settings import read_settings
from ds_compress.hf.training import FinetuneRun
from tests.hf.test_data import own_rows, rows_of, take
from tests.support.finetuning import DS_CONFIG, losses, prepare, tokenizer
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal

LENGTHS, STEPS = [8, 16, 32], 8
STATEFUL = {"codec": {"name": "lowrank", "rank": 8}}
SGD = {"type": "SGD", "params": {"lr": 0.5}}  # Adam would make the last bits of small gradients large
KEPT = {"codec": {"name": "quantize", "bits": 4}, "feedback": {"name": "ef", "on_new_shape": "keep"}}


def prepare_lengths(folder: Path, **changes) -> Path:
    """train.json of a run on documents of 5 to 51 tokens, most of them short."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(1)
    rows = folder / "rows.txt"
    rows.write_text("\n".join("cat dog " * draw.choice([2, 2, 3, 5, 6, 7, 25]) for _ in range(99)))
    options = {"lora": {"r": 4}, "steps": STEPS, "eval_sequences": 4, "sequence_length": LENGTHS, "seed": 2}
    options |= {"data": {"train": str(rows), "documents": "line"}}
    return prepare(folder, **options | changes)


@pytest.fixture
def sequences(tmp_path):
    return Sequences(read_settings(prepare_lengths(tmp_path)), tokenizer())


def test_documents_have_the_smallest_length_that_holds_them(sequences):
    for length, numbers in zip(LENGTHS, sequences.train):
        sizes = [sequences.sources[0][number].shape[1] for number in numbers]
        assert max(sizes) <= length and (min(sizes) > length // 2 or length == LENGTHS[0])


def test_what_is_kept_is_as_large_as_the_documents(tmp_path):
    """Rows were kept at their length: 2000 documents of 200 tokens took 65 MB at 4096."""
    sequences = Sequences(read_settings(prepare_lengths(tmp_path, sequence_length=[4096])), tokenizer())
    tokens = len(re.findall(r"\w+", (tmp_path / "rows.txt").read_text())) + 99  # each document has an end
    assert len(sequences.sources[0].tokens) == tokens
    kept = sum(file.stat().st_size for file in tmp_path.rglob("*-*.npy"))
    assert kept < 2 * 4 * tokens + 8 * 100 + 500


@pytest.mark.parametrize("documents", [["cat " * 5, "cat " * 20], ["cat " * 5] * 9 + ["cat " * 20]])
def test_of_a_length_with_one_document_none_is_held_out(tmp_path, documents):
    """A single document of a length was held out, so a length was never trained on."""
    path = prepare_lengths(tmp_path)
    (tmp_path / "rows.txt").write_text("\n".join(documents))
    sequences = Sequences(read_settings(path), tokenizer())
    assert (len(sequences), sum(map(len, sequences.eval))) == (len(documents) - 1, 1)
    assert len(sequences.train[-1]) == 1


def test_documents_in_which_nothing_is_learned_are_not_said_to_be_short(tmp_path):
    path = prepare_lengths(tmp_path)
    (tmp_path / "rows.txt").write_text("cat")
    said = refusal(Sequences, read_settings(path), tokenizer())
    assert "no train document in which something is learned; give more" in said


def test_all_replicas_have_the_lengths_of_steps_and_nothing_is_lost(sequences):
    together, epochs = 2 * 2 * 3, 5
    count = epochs * len(sequences) // together
    steps = [take(sequences, count, 2, 3, replica=replica, replicas=2) for replica in (0, 1)]
    lengths = [[{labels.shape[1] for _, labels in step} for step in each] for each in steps]
    assert lengths[0] == lengths[1] and set.union(*lengths[0]) == set(LENGTHS)
    assert {*map(len, lengths[0])} == {1}
    found = Counter(rows_of(steps[0]) + rows_of(steps[1]))
    own = Counter(row for row in own_rows(sequences) for _ in range(epochs))
    assert not found - own and (own - found).total() < together


def test_held_out_sequences_have_the_largest_length(sequences):
    batches = sequences.held_out(2, 0, 1)
    assert {ids.shape for ids, _ in batches} == {(2, LENGTHS[-1])} and len(batches) == 2


def run(path, **changes):
    """Losses, perplexity and bytes of a run, and its first adapters, on this rank."""
    done = FinetuneRun(read_settings(path).model_copy(update=changes))
    named = done.engine.module.named_parameters()
    before = {n.split("model.", 1)[1]: p.detach().clone() for n, p in named if p.requires_grad}
    done.run()
    return losses(path.parent / "out"), done.perplexity(), before, done._count_bytes()


def train_in_one_process(path, adapters):
    """Losses of the run, by Transformers and peft alone; a mask hides what sequences are filled up with."""
    settings = read_settings(path)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32).requires_grad_(False)
    model = inject_adapter_in_model(settings.lora.to_peft(settings.model), model)
    assert not model.load_state_dict(adapters, strict=False).unexpected_keys
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **SGD["params"])
    found = {}
    steps = take(Sequences(settings, tokenizer()), STEPS, 2, 2)
    for number, step in enumerate(steps, 1):
        optimizer.zero_grad()
        loss = 0
        for ids, labels in step:
            logits = model(ids, attention_mask=labels != IGNORED, use_cache=False).logits
            loss = loss + causal_lm_loss(logits, labels) / 2
        loss.backward()
        optimizer.step()
        found[number] = loss.item()
    return found, len({labels.shape for step in steps for _, labels in step})


def test_two_stages_train_as_one_process_with_fewer_bytes(tmp_path):
    config = {**DS_CONFIG, "optimizer": SGD, "ds_compress": {"recipe": "none"}}
    path = prepare_lengths(tmp_path / "all", ds_config=config)
    ranks = run_ranks(2, run, path)
    expected, lengths = train_in_one_process(path, ranks[0][2] | ranks[1][2])
    assert lengths == len(LENGTHS)
    for found, *_ in ranks:
        assert found == pytest.approx(expected, rel=1e-5)
    longest = prepare_lengths(tmp_path / "one", sequence_length=LENGTHS[-1:], ds_config=config)
    for (*_, fewer), (*_, more) in zip(ranks, run_ranks(2, run, longest)):
        assert fewer[1] < 0.8 * more[1]


@pytest.mark.extended
def test_a_stopped_run_goes_on_as_if_nothing_had_been(tmp_path):
    block = {"forward": STATEFUL, "backward": KEPT, "min_numel": 1, "eval": "both", "guard": {"every": 2}}
    config = {**DS_CONFIG, "ds_compress": block}
    whole, parts = (prepare_lengths(tmp_path / name, ds_config=config) for name in ("whole", "parts"))
    expected = run_ranks(2, run, whole)
    run_ranks(2, partial(run, steps=3), parts)
    assert [rank[:2] for rank in run_ranks(2, run, parts)] == [rank[:2] for rank in expected]
