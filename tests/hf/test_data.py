"""Documents become sequences: nothing twice, nothing learned that should not be, in an order of its own."""

import itertools
import json
import re
import time
from collections import Counter
from datetime import timedelta
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from torch import distributed
from transformers import AutoTokenizer

from ds_compress.hf import training
from ds_compress.hf.data import IDS, LABELS, POSITIONS, Sequences, pack_documents
from ds_compress.hf.documents import IGNORED, Document, read_records, split_text, tokenize
from ds_compress.hf.settings import read_settings
from tests.support.finetuning import prepare, tokenizer
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(2, 9))
def test_packing_keeps_every_token_and_its_document(sizes, length):
    numbers = (range(1000 * place, 1000 * place + size) for place, size in enumerate(sizes))
    documents = [Document([*ids], [*ids]) for ids in numbers]
    packed = pack_documents(documents, length)
    assert packed.dtype == np.int32 and packed.shape[1:] == (3, length)
    assert len(packed) <= sum(sizes) // length
    for ids, labels, positions in packed:
        for place in range(length):
            begins = place == 0 or ids[place] != ids[place - 1] + 1
            assert positions[place] == (0 if begins else positions[place - 1] + 1)
            if place:
                assert labels[place] == (IGNORED if begins else ids[place])


def test_sequences_in_which_nothing_is_learned_are_dropped():
    asked, answered = Document([1] * 8, [IGNORED] * 8), Document([2] * 8, [2] * 8)
    packed = pack_documents([asked, answered, asked], 8)
    assert packed[:, IDS].tolist() == [[2] * 8]
    assert packed[0, LABELS].tolist() == [IGNORED] + [2] * 7
    assert packed[0, POSITIONS].tolist() == list(range(8))


def one(record):
    """What is fed of the only document of a record, and what of it is learned."""
    (document,) = tokenize([record], tokenizer(), "data.train")
    assert len(document.ids) == len(document.labels)
    assert all(label in (IGNORED, token) for token, label in zip(*document))
    learned = [token for token, label in zip(*document) if label != IGNORED]
    return tokenizer().decode(document.ids), tokenizer().decode(learned)


def turns(*contents):
    """A conversation, which the user begins."""
    roles = itertools.cycle(("user", "assistant"))
    return {"messages": [{"role": role, "content": each} for role, each in zip(roles, contents)]}


def test_a_byte_order_mark_is_no_text(tmp_path):
    """Some editors begin a file with it; it was a part of the first word."""
    settings = read_settings(prepare(tmp_path))
    file = tmp_path / "marked.txt"
    file.write_text("the cat", encoding="utf-8-sig")
    assert list(read_records(str(file), settings.data)) == [{"text": "the cat"}]


def test_a_path_with_brackets_is_a_path(tmp_path):
    """`datasets` took it for a pattern, and found no file."""
    settings = read_settings(prepare(tmp_path))
    file = tmp_path / "run[1]" / "data.jsonl"
    file.parent.mkdir()
    file.write_text(json.dumps({"text": "the cat"}))
    assert list(read_records(str(file), settings.data)) == [{"text": "the cat"}]
    several = [tmp_path / f"part-{number}.jsonl" for number in range(2)]
    for part in several:
        part.write_text(json.dumps({"text": part.stem}))
    found = read_records(str(tmp_path / "part-*.jsonl"), settings.data)
    assert [row["text"] for row in found] == ["part-0", "part-1"], "other patterns are those of `datasets`"


@pytest.mark.parametrize(
    "documents, expected", [("paragraph", ["a\nb", "c", "d"]), ("file", ["a\nb\n\nc", "d"])]
)
def test_text_files_that_a_pattern_finds_are_cut_like_one(tmp_path, documents, expected):
    """Each of their lines became a document of its own, whatever `data.documents` said."""
    for name, text in {"1.txt": "\ufeffa\nb\n\nc", "2.txt": "d"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    data = read_settings(prepare(tmp_path)).data.model_copy(update={"documents": documents})
    assert [row["text"] for row in read_records(str(tmp_path / "?.txt"), data)] == expected


def test_text_is_learned_whole_and_completions_alone():
    assert one({"text": "the cat"}) == ("the cat </s>", "the cat </s>")
    assert one({"prompt": "the cat", "completion": "sees"}) == ("the cat sees </s>", "sees </s>")


def test_of_a_conversation_what_the_assistant_says_is_learned():
    whole, learned = one(turns("the cat", "sees", "the dog", "hears"))
    assert whole == "<user> the cat </s> <assistant> sees </s> <user> the dog </s> <assistant> hears </s>"
    assert learned == "sees </s> hears </s>"


def test_a_text_begins_as_the_tokenizer_begins_it():
    """Llama 3, Gemma and Mistral expect the token there; they were trained without it, and asked with it. And
    conversations that a template of Llama 3 had written, as "text", began twice."""
    known = tokenizer()
    known.add_special_tokens({"bos_token": "<s>"})
    records = [{"text": "the cat"}, {"prompt": "the cat", "completion": "sees"}, turns("the cat", "sees")]

    def begins():
        return [known.decode(document.ids).split()[0] for document in tokenize(records, known, "data.train")]

    assert begins() == ["the", "the", "<user>"]
    added = (known.bos_token, known.bos_token_id)
    known.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[added])
    assert begins() == ["<s>", "<s>", "<user>"]  # the template writes what a conversation begins with
    begun = [{"text": "<s> the cat"}, {"prompt": "<s> the cat", "completion": "sees"}]
    for document in tokenize(begun, known, "data.train"):
        assert known.decode(document.ids).count("<s>") == 1


def said(*content):
    return {"messages": [{"role": "user", "content": each} for each in content]}


PREFERENCES = {"prompt": "the", "chosen": "cat", "rejected": "dog"}
KINDS = "text, prompt and completion, or messages"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"body": "the cat"}, f"has ['body']; should have {KINDS}"),
        (PREFERENCES, f"has ['chosen', 'prompt', 'rejected']; should have {KINDS}; pairs for preference"),
        ({"messages": "the cat"}, "messages: 'the cat' is not allowed: should be a list of {role, content}"),
        ({"messages": ["a"]}, "messages: 'a' is not allowed: should be a list of {role, content}"),
        ({"messages": None}, "messages: None is not allowed: should be a list of {role, content}"),
        ({"messages": [{"content": "the cat"}]}, "message 0: role: None is not allowed: should be text"),
        (said("a", None), "message 1: content: None is not allowed: should be text"),
        (said([{"type": "text", "text": "a"}]), "message 0: content: [{'type': 'text', 'text': 'a'}] is not"),
        ({"prompt": "the cat", "completion": None}, "completion: None is not allowed: should be text"),
        ({"text": "\ud800"}, "cannot be tokenized: TypeError: "),
    ],
)
def test_a_value_of_another_type_is_named(record, expected):
    """They were tracebacks of Transformers; null and lists were learned as Python prints them."""
    line = refusal(lambda: list(tokenize([{"text": "the cat"}, record], tokenizer(), "here")))
    assert line.startswith(f"here: record 1: {expected}")


def test_keys_of_other_records_may_be_null():
    """`datasets` gives every record the keys of all."""
    assert one({"text": None, "prompt": "the", "completion": "cat", "messages": None})[1] == "cat </s>"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    assert one({"messages": [*said("the cat")["messages"], call]})[1]


REWRITES = "{% for m in messages %}{% if loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
FAIL = ["{% for m in %}", "{{ messages[0].a.b }}", "{{ raise_exception('no') }}"]


@pytest.mark.parametrize("template", [*FAIL, REWRITES])
def test_a_template_that_fails_or_rewrites_what_came_before_is_named(template):
    """It was a traceback of Jinja."""
    known = tokenizer()
    known.chat_template = template
    reason = "message 1: the chat template" if template == REWRITES else r"cannot be tokenized: \w+Error: "
    line = refusal(lambda: list(tokenize([turns("a cat", "sees")], known, "here")))
    assert re.match(f"here: record 0: {reason}", line)


SHORTENS = (
    "{% for m in messages %}<{{ m['role'] }}> "
    "{% if loop.last and m['role'] == 'assistant' %}the {% endif %}{{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
"""A template in the form of Qwen3's, which writes thoughts ("the") in the last turn alone."""


def test_turns_that_a_template_shortens_later_are_learned_one_by_one():
    """Conversations of Qwen3 with two turns of the assistant were refused."""
    known = tokenizer()
    known.chat_template = SHORTENS
    documents = list(tokenize([turns("dog", "sees", "cat", "hears")], known, "here"))
    assert [known.decode(document.ids) for document in documents] == [
        "<user> dog </s> <assistant> the sees </s>",
        "<user> dog </s> <assistant> sees </s> <user> cat </s> <assistant> the hears </s>",
    ]
    learned = [[token for token in document.labels if token != IGNORED] for document in documents]
    assert [known.decode(each) for each in learned] == ["the sees </s>", "the hears </s>"]
    assert len(list(tokenize([turns("dog", "sees")], known, "here"))) == 1


def test_text_files_are_cut_where_it_is_said():
    text = "a b\nc\n \n\nd\n"
    assert split_text(text, "file") == [text]
    assert split_text(text, "line") == ["a b", "c", "d"]
    assert split_text(text, "paragraph") == ["a b\nc", "d\n"]


def load_slowly():
    """Load for longer than a collective waits."""
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    training.ALIVE_S = 0.2
    rank = distributed.get_rank()
    return training._call_in_turn(lambda: time.sleep(4 * (1 - rank)) or rank)


def test_ranks_wait_for_one_that_tokenizes_for_long():
    """After the 10 minutes of a collective they ended, and so did each start after that one."""
    assert run_ranks(2, load_slowly) == [0, 1]


@pytest.fixture
def sequences(tmp_path):
    return Sequences(read_settings(prepare(tmp_path)), tokenizer())


def take(sequences, steps, *sizes, replica=0, replicas=1, start=0):
    """So many steps of one replica; `sizes`: sequences of a micro-batch, micro-batches of a step."""
    micro_batch, micro_batches = sizes
    return list(islice(sequences.steps(micro_batch, replica, replicas, micro_batches, start), steps))


def rows_of(steps):
    """Each sequence of these steps, without what was added to it."""
    batches = [batch for step in steps for batch in step]
    rows = [(ids[0] if isinstance(ids, tuple) else ids, labels) for ids, labels in batches]
    return [tuple(row[own != IGNORED].tolist()) for ids, labels in rows for row, own in zip(ids, labels)]


def own_rows(sequences):
    rows = [sequences.sources[0][number] for numbers in sequences.train for number in numbers]
    return [tuple(row[IDS][row[LABELS] != IGNORED].tolist()) for row in rows]


def test_every_sequence_comes_once_an_epoch_whoever_asks(sequences):
    count = len(sequences)
    steps = [take(sequences, count // 8, 2, 2, replica=replica, replicas=2) for replica in (0, 1)]
    rows = rows_of(steps[0]) + rows_of(steps[1])
    assert len(rows) == count - count % 8
    assert not Counter(rows) - Counter(own_rows(sequences))


def test_a_resumed_run_gets_the_batches_that_are_due(sequences):
    steps = 2 * len(sequences) // 3
    whole = take(sequences, steps + 1, 3, 1)
    (again,) = take(sequences, 1, 3, 1, start=steps)
    assert rows_of([again]) == rows_of(whole[-1:]) != rows_of(whole[-2:-1])


def test_held_out_sequences_are_not_trained_on(sequences):
    assert len(sequences.eval[0]) == max(1, round(0.05 * (len(sequences.eval[0]) + len(sequences))))
    (ids, _), _ = sequences.held_out(2, 0, 1)[0]
    assert ids.tolist() == [sequences.sources[0][number][IDS].tolist() for number in sequences.eval[0][:2]]


def test_a_tokenizer_that_was_changed(tmp_path, sequences):
    """Who replaced a wrong tokenizer, and started again, still got the tokens of the wrong one."""
    settings = read_settings(tmp_path / "train.json")
    file = Path(settings.model) / "tokenizer.json"
    file.write_text(file.read_text().replace('"cat":', '"tac":').replace('"dog":', '"cat":'))
    changed = Sequences(settings, AutoTokenizer.from_pretrained(settings.model))
    before, after = ([*rows.tokens[:, IDS]] for (rows,) in (sequences.sources, changed.sources))
    cat, dog, unknown = tokenizer().convert_tokens_to_ids(["cat", "dog", "<unk>"])
    assert after == [{cat: dog, dog: unknown}.get(token, token) for token in before]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_of_records_are_read(tmp_path, kind):
    from datasets import Dataset

    rows = Dataset.from_list([{"text": "the cat sees a dog ."}] * 40)
    file = tmp_path / f"rows.{kind}"
    {"jsonl": rows.to_json, "parquet": rows.to_parquet}[kind](str(file))
    settings = read_settings(prepare(tmp_path, data={"train": str(file)}))
    assert len(Sequences(settings, tokenizer())) == 7  # 40 documents of 7 tokens, one of 8 held out


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("missing.jsonl", None, "missing.jsonl' cannot be read: "),
        # it was DatasetGenerationError: An error occurred while generating the dataset
        ("damaged.jsonl", "{}\n{", "damaged.jsonl' cannot be read: ArrowInvalid: JSON parse error: "),
        ("latin.txt", b"a caf\xe9", "latin.txt' cannot be read: UnicodeDecodeError: 'utf-8' codec"),
        ("latin.jsonl", b'{"text": "a caf\xe9"}', "latin.jsonl cannot be read: UnicodeDecodeError: 'utf-8'"),
        ("short.txt", "the cat", "data: too little text: no train sequence of 32 tokens; give more text"),
    ],
)
def test_data_that_cannot_be_used_are_refused(tmp_path, monkeypatch, name, text, expected):
    monkeypatch.chdir(tmp_path)  # an error quotes a long path in part
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert expected in refusal(Sequences, read_settings(prepare(tmp_path, data={"train": name})), tokenizer())
