"""The grid of the paper's experiments, at the size of the preset `smoke`, on data made here."""

import io
import json
import sys
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import BertConfig, BertModel, BertTokenizerFast, GPT2Config, GPT2LMHeadModel

from ds_compress.config.recipes import LIMITS
from launch.reproduce.architectures import ARCHITECTURES, as_layers
from launch.reproduce.command import main
from launch.reproduce.grid import missing, read_rows
from launch.reproduce.language import in_stages
from launch.reproduce.launched import compared
from launch.reproduce.pipeline import executed
from launch.reproduce.presets import PRESETS, ReplicatedSize
from launch.reproduce.run import KINDS, Run, execute, task_of
from launch.reproduce.settings import SETTINGS
from tests.support.interpreters import TRAINING, interpreter
from tests.support.ranks import once

NAMES = ["vision/none", "vision/topk10-aqsgd", "language/none", "language/topk10-ef-warmup"]
PASSING = ("seconds",)  # columns that differ from run to run


@pytest.fixture(scope="module")
def data():
    """Images whose class is their colour, and text."""
    return once("data", draw)


def draw(folder):
    drawing = np.random.default_rng(0)
    (folder / "cifar10").mkdir()
    for split, count in (("train", 32), ("test", 16)):
        labels = drawing.integers(10, size=count)
        images = [drawing.integers(25 * label, 25 * label + 25, (32, 32, 3), np.uint8) for label in labels]
        files = [{"bytes": png(image), "path": None} for image in images]
        table = pyarrow.table({"img": files, "label": labels})
        pyarrow.parquet.write_table(table, folder / "cifar10" / f"{split}.parquet")
    (folder / "wikitext2").mkdir()
    for split, repeats in (("train", 200), ("valid", 10)):
        words = "the quick brown fox jumps over the lazy dog . "
        (folder / "wikitext2" / f"{split}.txt").write_text(words * repeats)


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def grid(data, results, *arguments):
    """Run it; its rows without what passes, by name and seed."""
    main(["--preset", "smoke", "--data", str(data), "--results", str(results), *arguments])
    return rows_of(results)


def rows_of(results):
    rows = ({k: v for k, v in row.items() if k not in PASSING} for row in read_rows(results / "smoke.jsonl"))
    return {(f"{row['task']}/{row['setting']}", row["seed"]): row for row in rows}


@pytest.fixture(scope="module")
def whole(data):
    """The results of an uninterrupted grid."""
    return once("whole", lambda results: grid(data, results, "--seeds", "0", "1", "--only", *NAMES))


@pytest.fixture
def warm(monkeypatch):
    """The launcher is that of an interpreter which need not import DeepSpeed: six times for a pipeline."""
    monkeypatch.setattr(sys, "executable", interpreter(TRAINING))


@pytest.mark.extended
def test_rows_say_what_was_measured(whole):
    rows = rows_of(whole)
    assert set(rows) == {(name, seed) for name in NAMES for seed in (0, 1)}
    for (name, seed), row in rows.items():
        metric = "accuracy" if name.startswith("vision") else "perplexity"
        assert {f"{metric}_on", f"{metric}_off", "steps", "raw_bytes", "wire_bytes", "processor"} <= set(row)
        assert row["steps"] == 8 and row["seed"] == seed and not row["diverged"]
        assert row["block"] == SETTINGS[row["task"]][row["setting"]]
        assert row["versions"]["torch"] == torch.__version__
        if name.endswith("none"):
            assert row[f"{metric}_on"] == row[f"{metric}_off"]
            assert 32 <= row["bits_forward"] < 32.6 and row["error_forward"] in (0, None)
    assert "### vision, 2 settings" in (whole / "evidence.md").read_text()
    losses = {row["train_loss"] for row in rows.values()}
    assert len(losses) == len(rows), "every setting and seed trains otherwise"


@pytest.mark.extended
def test_bits_count_warmup_and_first_visits(whole):
    """Half of the two epochs went uncompressed; 10 % are kept as 32-bit values, with 1 bit for each place."""
    rows = rows_of(whole)
    kept = 0.1 * 32 + 1
    assert rows["language/topk10-ef-warmup", 0]["bits_forward"] == pytest.approx((32 + kept) / 2, rel=0.1)
    visits = rows["vision/topk10-aqsgd", 0]
    assert visits["bits_forward"] == pytest.approx(32 / 2 + kept, rel=0.1), "codes beside the dense rows"
    assert visits["bits_backward"] == pytest.approx(kept, rel=0.2)


@pytest.mark.extended
def test_an_interrupted_grid_goes_on_to_the_same_rows(whole, data, tmp_path):
    """Its file ends in the middle of a row; the rest is done by two processes."""
    lines = (whole / "smoke.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "smoke.jsonl").write_text("".join(lines[:5]) + lines[5][:40])
    runs = [Run("smoke", *name.split("/", 1), seed) for name in NAMES for seed in (0, 1)]
    assert len(missing(runs, read_rows(tmp_path / "smoke.jsonl"))) == 3
    assert grid(data, tmp_path, "--seeds", "0", "1", "--jobs", "2", "--only", *NAMES) == rows_of(whole)
    assert (tmp_path / "smoke.jsonl").read_text().startswith("".join(lines[:5])), "what was there stays"


@pytest.mark.extended
def test_replicas_train_on_parts_of_a_batch(data, tmp_path, monkeypatch):
    """Uncompressed they compute what one replica does, up to rounding."""
    size = replace(PRESETS["smoke"]["language"], hidden=64)  # matrices large enough to be compressed
    rows = []
    for replicas, setting in ((1, "none"), (2, "none"), (2, "replicas8-ef")):
        sizes = size if replicas == 1 else ReplicatedSize(**vars(size), replicas=replicas)
        monkeypatch.setitem(PRESETS["smoke"], "language", sizes)
        task = KINDS["language"](sizes, data, tmp_path)
        rows.append(execute(Run("smoke", "language", setting, 0), task, torch.device("cpu")))
    one, exact, compressed = rows
    assert "replica_raw_bytes" not in one and exact["steps"] == 8
    assert exact["perplexity_off"] == pytest.approx(one["perplexity_off"], rel=1e-4)
    assert exact["replica_raw_bytes"] == exact["replica_wire_bytes"] == compressed["replica_raw_bytes"]
    assert compressed["replica_wire_bytes"] < 0.6 * compressed["replica_raw_bytes"]
    assert 0 < abs(compressed["perplexity_off"] / exact["perplexity_off"] - 1) < 0.02


@pytest.mark.extended
def test_one_row_from_its_seed(whole, data, tmp_path, capsys):
    arguments = ("--only", "vision/topk10-aqsgd", "--seed", "1")
    rows = grid(data, tmp_path, *arguments)
    assert rows == {(arguments[1], 1): rows_of(whole)[arguments[1], 1]}
    capsys.readouterr()
    assert grid(data, tmp_path, *arguments) == rows
    assert capsys.readouterr().out.startswith("1 runs, 1 of them have their rows")


@pytest.mark.extended
def test_a_setting_that_has_changed_is_run_anew(whole, monkeypatch):
    run = Run("smoke", "vision", "topk10-aqsgd", 0)
    rows = read_rows(whole / "smoke.jsonl")
    assert missing([run], rows) == []
    monkeypatch.setitem(SETTINGS["vision"], "topk10-aqsgd", {"forward": {"codec": "bf16"}})
    assert missing([run], rows) == [run]


@pytest.mark.parametrize("name", ["vision/none", "language/none"])
def test_absent_data_is_one_line(name, tmp_path, data):
    for arguments in (["--data", str(tmp_path)], []):
        with pytest.raises(SystemExit, match=r"^reproduce: .*--data[^\n]*$"):
            main(["--preset", "smoke", "--results", str(tmp_path), "--only", name, *arguments])
    with pytest.raises(SystemExit, match=r"^reproduce: .*the preset needs [^\n]*$"):
        main(["--preset", "cpu", "--data", str(data), "--results", str(tmp_path), "--only", name])
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_run_that_fails_stops_no_other(data, tmp_path, monkeypatch, capsys):
    """Its codec has an option that is refused."""
    monkeypatch.setitem(SETTINGS["vision"], "none", {"forward": {"codec": {"name": "lowrank", "rank": 0}}})
    with pytest.raises(SystemExit, match="reproduce: 1 of 2 runs failed"):
        grid(data, tmp_path, "--only", "vision/none", "language/none", "--seed", "0")
    assert set(rows_of(tmp_path)) == {("language/none", 0)}
    line = "vision/none seed 0: failed: CompressionError: ds_compress.forward.codec.rank: 0 is not allowed"
    assert line in capsys.readouterr().out


def test_a_name_that_is_no_setting(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "vision/topk11"])
    assert "--only: 'vision/topk11' is not a setting; known: vision/none, " in capsys.readouterr().err


def test_the_layers_of_a_gpt_compute_what_it_computes(data, tmp_path):
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=4, n_head=2, bos_token_id=None)
    gpt, ids = GPT2LMHeadModel(config).eval(), torch.randint(256, (2, 32))
    layers = as_layers(gpt)
    with torch.no_grad():
        expected = gpt(ids).logits
        assert torch.equal(nn.Sequential(*layers)(ids), expected)
        assert torch.equal(nn.Sequential(*in_stages(layers))(ids), expected)
    assert len(in_stages(layers)) == 4


def test_an_encoder_is_trained_in_four_stages(data, tmp_path, monkeypatch):
    """From a checkpoint of Transformers, which the stages together compute."""
    words = ["[UNK]", "[CLS]", "[SEP]", *(set((data / "wikitext2" / "train.txt").read_text().split()))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=len(words), **shape)).eval()
    model.save_pretrained(tmp_path / "bert")
    (tmp_path / "wikitext2").symlink_to(data / "wikitext2")
    changes = {"tokenizer": "bert", "weights": "bert", "seq": 8, "blocks": 80, "test_blocks": 8, "lr": 1e-3}
    size = replace(PRESETS["real"]["minilm-full"], **changes)
    task = KINDS[size.kind](size, tmp_path, tmp_path)
    inputs, labels, ids = next(task.epoch(0, 0))
    with torch.no_grad():
        assert torch.equal(nn.Sequential(*task.stages(0)).eval()(inputs), model(inputs)[0].mean(1))
    assert inputs.shape == (16, 8) and labels.tolist() == list(range(8)) and len(set(ids.tolist())) == 8
    row = execute(Run("real", "minilm-full", "entropy3.3/dither2", 0), task, torch.device("cpu"))
    assert row["steps"] == 10 and row["perplexity_on"] != row["perplexity_off"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_predicts_from_earlier_tokens_alone(name):
    """A token that changes leaves what was predicted before it."""
    size = replace(PRESETS["smoke"]["language"], architecture=name)
    model, ids = nn.Sequential(*ARCHITECTURES[name](size)).eval(), torch.randint(256, (1, 32))
    changed = ids.clone()
    changed[0, 20] = (ids[0, 20] + 1) % 256
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert before.shape == (1, 32, 256)
    assert torch.equal(before[:, :20], after[:, :20]) and not torch.equal(before[:, 20:], after[:, 20:])
    swapped = ids.clone()
    swapped[0, :2] = ids[0, [1, 0]]
    with torch.no_grad():
        assert not torch.allclose(model(swapped)[:, -1], before[:, -1], atol=1e-7), "positions count"


FINE_TUNED = {"train_images": 16, "pretrain_images": 16, "pretrain_epochs": 1}
STARTS = [("language", {"pretrain_steps": 0}, False), ("language", {}, True)]
STARTS += [("vision", {}, False), ("vision", FINE_TUNED, True)]


@pytest.mark.parametrize("name, changes, is_shared", STARTS)
def test_runs_start_from_shared_weights_or_from_their_seed(name, changes, is_shared, data, tmp_path):
    size = replace(PRESETS["smoke"][name], **changes)
    task = KINDS[size.kind](size, data, tmp_path)
    task.prepare()
    weights = [nn.Sequential(*task.stages(seed)).state_dict() for seed in (0, 1)]
    assert all(torch.equal(*pair) for pair in zip(*(own.values() for own in weights))) is is_shared


@pytest.mark.parametrize(("quality", "bits"), [("safe", 4), ("aggressive", 2.5)])
@pytest.mark.extended(keep=1)
def test_auto_trains_with_what_its_budget_allows(quality, bits, data, tmp_path):
    """Behind a slow link it takes the fewest bytes whose errors are within the budget, from the fourth step
    on."""
    task = task_of("smoke", "language", data, tmp_path)
    task.prepare()
    row = execute(Run("smoke", "language", f"auto-{quality}", 0), task, torch.device("cpu"))
    chosen, limits = row["chosen"], LIMITS[quality]
    assert 0 < chosen["token_error"] <= limits.forward and 0 < chosen["gradient_error"] <= limits.backward
    assert chosen["block"]["warmup_steps"] == 3
    sent = (3 * 32 + 5 * chosen["block"]["forward"]["codec"]["bits"]) / 8
    assert row["bits_forward"] == pytest.approx(sent, rel=0.2)


@pytest.mark.parametrize("name", ["language/topk10-ef-warmup", "vision/topk10-aqsgd"])
@pytest.mark.extended
def test_a_real_pipeline_has_the_same_losses_and_bytes(name, data, tmp_path, warm):
    """The deepspeed launcher gives the same run; the language task clips gradients by the global norm."""
    row = compared(Run("smoke", *name.split("/", 1), 0), data, tmp_path)
    assert row["losses_equal"] and row["bytes_equal"], json.dumps(row)
    assert row["steps"] == 8 and row["first_difference"] is None


@pytest.mark.parametrize("name", ["language/topk10-ef-warmup", "vision/topk10-aqsgd"])
@pytest.mark.extended
def test_a_row_from_a_pipeline_is_that_from_simulate(name, whole, data, tmp_path, warm):
    """But for the errors, which are not measured there."""
    run = Run("smoke", *name.split("/", 1), 0)
    row = executed(run, task_of("smoke", run.task, data, whole / "cache"), data, whole, torch.device("cpu"))
    errors = (f"{kind}_{way}" for kind in ("error", "token_error") for way in ("forward", "backward"))
    expected = rows_of(whole)[name, 0] | dict.fromkeys([*errors, "gradient_error", "warnings"])
    assert {k: v for k, v in row.items() if k not in PASSING} == expected


@pytest.mark.extended
def test_a_policy_trains_as_a_pipeline(data, tmp_path, monkeypatch, warm):
    """4 bits in the first six of eight steps, as norms change, then 2."""
    ladders = {direction: {"bits": [4, 2]} for direction in ("forward", "backward")}
    policy = {"name": "accordion", "every": 2, "threshold": 1e5, **ladders}
    block = SETTINGS["language"]["group4/4-hadamard"]
    monkeypatch.setitem(SETTINGS["language"], "group4/4-hadamard", {**block, "policy": policy})
    grid(data, tmp_path, "--only", "language/group4/4-hadamard", "--seed", "0")
    [row] = read_rows(tmp_path / "smoke.jsonl")
    assert row["steps"] == 8 and row["perplexity_on"] != row["perplexity_off"]
    assert 3.6 < row["bits_forward"] < 4 and 3.6 < row["bits_backward"] < 4  # 3.5, and ranges
