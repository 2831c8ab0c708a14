"""`advise --model` measures in one process what crosses a pipeline, and its proposal keeps its limits."""

import itertools
import json
import math
from functools import partial

import pytest

from ds_compress.config import DIRECTIONS, Config
from ds_compress.config.recipes import LIMITS
from ds_compress.hf import pretrained
from ds_compress.hf.model import make_layer_specs
from ds_compress.hf.part import causal_lm_loss
from ds_compress.hf.pretrained import PretrainedModel
from ds_compress.planning.evaluate import REPEATS
from ds_compress.runtime import profile_model
from tests.support.finetuning import save
from tests.support.pipeline import assert_errors_match, boundary_tensors

SEQUENCES, LENGTH, WIDTH = 4, 64, 32

SHAPE = ("--shape", f"{SEQUENCES},{LENGTH}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save("Llama", tmp_path_factory.mktemp("model"))


def test_errors_are_those_of_the_checkpoints_own_messages(advise, checkpoint):
    found = json.loads(advise("--stages", 3, "--model", checkpoint, *SHAPE, "--json"))
    specs, bounds = make_layer_specs(checkpoint, 3, None, None, False, 0)
    batches = PretrainedModel(str(checkpoint)).batches(SEQUENCES, LENGTH)
    layers = [spec.build() for spec in specs]
    micro_batches = [
        boundary_tensors(layers, bounds[1:-1], ids, partial(causal_lm_loss, labels=labels))
        for ids, labels in itertools.islice(batches, 1 + profile_model.PASSES)
    ]
    assert len(micro_batches[0]) == 2 and micro_batches[0][0][0].shape == (SEQUENCES, LENGTH, WIDTH)
    assert_errors_match(found["measured"], *micro_batches[-REPEATS:])
    largest = [
        max(message["settings"]["quant4"]["error"] for message in found["measured"]["messages"]
            if message["direction"] == direction)
        for direction in DIRECTIONS
    ]  # fmt: skip
    row = next(row for row in found["rows"] if row["recipe"] == "quant4")
    assert [row["error_forward"], row["error_backward"]] == largest


@pytest.mark.parametrize("quality", LIMITS)
def test_every_class_keeps_its_limits(advise, checkpoint, quality):
    found = json.loads(advise("--stages", 2, "--model", checkpoint, *SHAPE, "--quality", quality, "--json"))
    rows, limits = found["rows"], LIMITS[quality]
    best = next(row for row in rows if row["recipe"] == found["best"])
    assert limits.allow(best["error_forward"], best["gradient_error"])
    assert best["block"] == found["block"] and Config(found["block"])
    stages = found["measured"]["stages"]
    assert len(stages) == 2 and all(own["forward_ms"] > 0 and own["backward_ms"] > 0 for own in stages)
    assert all(math.isfinite(row["error_forward"]) and row["step_s"] > 0 for row in rows)
    assert rows[0]["recipe"] == "DeepSpeed" and rows[0]["wire_bytes"] == [4 * SEQUENCES * LENGTH * WIDTH] * 2


def test_the_answer_shows_what_was_measured_and_a_block_to_paste(advise, checkpoint):
    lines = advise("--stages", 2, "--model", checkpoint, *SHAPE).splitlines()
    assert any(line.startswith("measured here, on cpu, ") for line in lines)
    message = f"[{SEQUENCES}, {LENGTH}, {WIDTH}] float32"
    assert any(line.startswith(f"2 stages, 4 micro-batches, {message}, ") for line in lines)
    assert lines[0].startswith("Use ") and Config(json.loads(f"{{{lines[1]}}}")["ds_compress"])


def test_what_is_given_stands_in_the_place_of_what_is_measured(advise, checkpoint):
    """Times of another machine, errors of this model; a program that reads JSON is not told in between."""
    given = ("--forward-ms", "1000", "--activation-mb", "500", "--codec-gbps", "1000")
    found = json.loads(advise("--stages", 2, "--model", checkpoint, *SHAPE, *given, "--json"))
    assert "--forward-ms, --activation-mb, --codec-gbps: taken as given" in advise.err
    # 4 micro-batches through 2 stages, 1 s forward and 2 s back
    assert all(row["step_s"] >= 15 for row in found["rows"]) and found["rows"][1]["step_s"] < 20
    assert all(row["memory_bytes"] >= 1e9 for row in found["rows"][1:])
    assert found["measured"]["stages"][0]["forward_ms"] != 1000


def test_recipes_of_files_are_tried_on_the_model_too(advise, checkpoint, tmp_path):
    """Also one with settings of its own for a boundary, which without a model is refused."""
    blocks = {
        "six": {"forward": {"codec": {"name": "quantize", "bits": 6}}},
        "mixed": {
            "forward": {"codec": "bf16"},
            "boundaries": {"1": {"forward": {"codec": {"name": "quantize", "bits": 8}}}},
        },
        "small": {"forward": {"codec": {"name": "quantize", "bits": 6}}, "min_numel": 10**6},
    }
    for name, block in blocks.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"ds_compress": block}))
    files = [tmp_path / f"{name}.json" for name in blocks]
    found = json.loads(advise("--stages", 3, "--model", checkpoint, *SHAPE, "--json", "--recipe", *files))
    rows = {row["recipe"]: row for row in found["rows"]}
    assert rows.keys() == {"DeepSpeed", *blocks}
    offered = json.loads(advise("--stages", 3, "--model", checkpoint, *SHAPE, "--json"))
    errors = {row["recipe"]: row["error_forward"] for row in offered["rows"]}
    assert rows["six"]["error_forward"] == errors["quantize 6"] and rows["six"]["error_backward"] == 0
    assert rows["six"]["block"] == blocks["six"] and rows["small"]["error_forward"] == 0
    assert errors["bf16"] < rows["mixed"]["error_forward"] <= errors["quantize 8"]
    (tmp_path / "ids.json").write_text('{"ds_compress": {"forward": {"codec": "bf16", "feedback": "aqsgd"}}}')
    arguments = ("--stages", 2, "--model", checkpoint, *SHAPE, "--recipe", tmp_path / "ids.json")
    assert advise(*arguments, code=2).startswith(
        "recipe ids: cannot be measured on a few messages: it learns"
    )


def test_a_hub_name_is_taken_from_the_cache_and_downloaded_only_where_it_says_so(checkpoint, monkeypatch):
    asked = []

    def snapshot(name, allow_patterns, local_files_only):
        asked.append((name, local_files_only))
        return str(checkpoint)

    monkeypatch.setattr(pretrained, "snapshot_download", snapshot)
    assert PretrainedModel("someone/model").width == PretrainedModel("hf://someone/model").width == WIDTH
    assert PretrainedModel(str(checkpoint)).folder == checkpoint
    assert asked == [("someone/model", True), ("someone/model", False)]


@pytest.mark.parametrize("changes, message", [
    (("--shape", "4,64,31"), "--model MODEL: --shape: 31 is not allowed in last place: the model has"),
    (("--shape", "4"), "--shape: with --model it should be sequences of a micro-batch, and tokens"),
    (("--stages", "9"), "--model MODEL: stages: 9 is not allowed: the model has 4 layers"),
    (("--stages", "1"), "--stages: 1 is not allowed: should be 2 or more"),
    (("--probe", "x.py:f"), "argument --probe: not allowed with argument --model"),
    (("--recipe", "no_such.json"), "no_such.json: No such file or directory"),
    (("--backward-ms", "3"), "--backward-ms: came without --forward-ms; give both, or none of them"),
    (("--forward-ms", "1,2,3"), "--forward-ms: 3 numbers for 2 stages; give 1 or 2"),
    (("--model", "no_such/model"), "--model no_such/model: no such folder, and no model of that name"),
    (("--model", "no/such/model"), "--model no/such/model: no such folder, and no model of that name"),
])  # fmt: skip
def test_refusals(advise, checkpoint, changes, message):
    error = advise("--stages", 2, "--model", checkpoint, *SHAPE, *changes, code=2)
    assert error.replace(str(checkpoint), "MODEL").split("advise: ")[-1].startswith(message)
    assert error.count("\n") == 1


def test_without_a_shape_and_without_files(advise, checkpoint, tmp_path):
    assert advise("--stages", 2, "--model", checkpoint, code=2).startswith(
        "--shape: with --model it should be"
    )
    error = advise("--stages", 2, "--model", tmp_path, *SHAPE, code=2)
    assert error.startswith(f"--model {tmp_path}: ") and error.count("\n") == 1


def test_what_fails_in_the_model_is_named(advise, tmp_path):
    """Positions for 128 tokens."""
    folder = save("GPT-2", tmp_path)
    error = advise("--stages", 2, "--model", folder, "--shape", "1,300", code=2)
    assert error.startswith(f"--model {folder}: stage 0: IndexError: ") and error.count("\n") == 1
