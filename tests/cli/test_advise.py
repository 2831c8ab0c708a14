"""ds-compress advise: what it recommends, and what it refuses."""

import json
import os
import re
import subprocess
import sys

import pytest

from ds_compress.cli import main
from ds_compress.config import DIRECTIONS, Config
from ds_compress.config.recipes import LIMITS, ErrorLimits
from ds_compress.planning.choice import candidates_for

ARGUMENTS = ["--stages", "4", "--micro-batches", "8", "--forward-ms", "16.4"]
ARGUMENTS += ["--shape", "1,2048,4096", "--dtype", "bf16"]
FAST_CODECS = ["--codec-gbps", "1000"]
SLOW_LINK = ["--gbps", "0.1", *FAST_CODECS]
FAR = ["--gbps", "100", "--latency-ms", "60", "--micro-batches", "32"]


def advise(capsys, *arguments, code=0):
    assert main(["advise", *ARGUMENTS, *arguments]) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


def plan(capsys, *arguments):
    return json.loads(advise(capsys, *arguments, "--json"))


def chosen(found):
    """The row that is proposed."""
    return next(row for row in found["rows"] if row["recipe"] == found["best"])


@pytest.fixture
def recipe(tmp_path):
    """Return a function that writes a recipe to a file; it returns the words that name it."""

    def write(block, name="mine"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"ds_compress": block}))
        return "--recipe", str(tmp_path / f"{name}.json")

    return write


@pytest.mark.extended
def test_the_answer_comes_first_one_line_and_a_block_to_paste(capsys):
    """On a terminal of 80 columns it once came after 300 lines."""
    answer, pasted = advise(capsys, "--gbps", "1", *FAST_CODECS).splitlines()[:2]
    assert answer.startswith("Use ") and " times as fast, " in answer and "limits it then" in answer
    block = json.loads(f"{{{pasted}}}")["ds_compress"]
    assert f"link depth {block['link']['depth']}" in answer and Config(block)


@pytest.mark.extended
def test_json_is_all_that_is_printed():
    """Without a GPU, DeepSpeed logs to stdout which accelerator it takes: that stood before the JSON."""
    command = [sys.executable, "-m", "ds_compress", "advise", *ARGUMENTS, *SLOW_LINK, "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert json.loads(done.stdout)["best"], done.stderr


def test_what_loses_too_much_is_never_proposed(capsys):
    """2 bits without rotation, whose error is that of sending nothing, were once the best."""
    found = plan(capsys, *SLOW_LINK)
    assert found["rows"][1]["token_error"] > 0.1 and found["best"] != found["rows"][1]["recipe"]
    assert plan(capsys, *SLOW_LINK, "--quality", "lossless")["best"] == "lossless"


@pytest.mark.parametrize("quality", LIMITS)
def test_every_class_keeps_its_limits(capsys, quality):
    found = plan(capsys, *SLOW_LINK, "--quality", quality)
    rows, best = found["rows"], chosen(found)
    assert rows[0]["recipe"] == "DeepSpeed" and rows[0]["speedup"] == 1 and rows[0]["limit"] == "link"
    steps = [row["step_s"] for row in rows[1:]]
    assert steps == sorted(steps) and best["speedup"] > 1.5 and best["block"] == found["block"]
    assert LIMITS[quality].allow(best["token_error"], best["gradient_error"])
    assert {row["recipe"] for row in rows} >= {each.name for each in candidates_for(quality)}


def test_a_gradient_at_the_places_of_its_activation_loses_nearly_all(capsys, recipe):
    """The places of the largest entries of one tensor were once taken to be those of the other."""
    topk = plan(capsys, "--gbps", "1", *FAST_CODECS, *recipe({"recipe": "topk10"}, "topk"))["rows"][1]
    assert topk["error_forward"] < 0.7 < 0.9 < topk["error_backward"] < 1


def test_directions_are_mixed_where_each_has_its_own_limit(capsys, monkeypatch):
    monkeypatch.setitem(LIMITS, "balanced", ErrorLimits(0.4, 0.01))
    found = plan(capsys, *SLOW_LINK, "--quality", "balanced")
    assert found["best"] == "entropy 2 dither / lossless"
    settings = Config(found["block"]).in_force.codecs(0).settings
    assert [settings[direction]["name"] for direction in DIRECTIONS] == ["entropy", "lossless"]
    assert settings["forward"]["bits"] == 2


def test_on_a_fast_link_it_says_that_nothing_pays(capsys):
    found = plan(capsys, "--gbps", "400", *FAST_CODECS)
    assert found["best"] is None and found["block"] == {"enabled": False}
    assert "Nothing will pay" in advise(capsys, "--gbps", "400", *FAST_CODECS)


def test_nothing_is_faster_than_a_link_without_any_cost(capsys):
    """A deeper schedule also computes faster between unequal stages: advise once claimed 3.92 times."""
    unlike = ("--stages", "2", "--micro-batches", "4", "--shape", "4,64,32", "--dtype", "fp32")
    times = ("--forward-ms", "9.05,6.53", "--backward-ms", "8.54,6.41", "--codec-gbps", "100")
    out = advise(capsys, *unlike, *times, "--gbps", "0.01")
    gain, ceiling = map(float, re.findall(r"([0-9.]+) times as fast", out))
    assert 3 < gain <= ceiling


def test_a_slow_codec_is_seen_through(capsys):
    out = advise(capsys, "--gbps", "25", "--codec-gbps", "0.2")
    assert "Compression will not pay, none with link depth" in out


def test_lossless_is_compression(capsys):
    """ "Compression will not pay, lossless with link depth 1 will" contradicted itself."""
    assert advise(capsys, *SLOW_LINK, "--quality", "lossless").startswith("Use lossless with link depth")


def test_depth_pays_where_round_trips_are_waited_for(capsys):
    far = [*FAR, *FAST_CODECS]
    steps = [plan(capsys, *far, "--depth", depth)["rows"][1]["step_s"] for depth in ("1", "2", "3")]
    assert steps[0] > 1.2 * steps[1] > 1.2 * steps[2]
    assert all(row["depth"] > 3 and row["step_s"] < steps[2] for row in plan(capsys, *far)["rows"][1:])


def test_depth_stays_within_the_memory_that_is_given(capsys):
    """Stage 0 of 4 holds 1 GB for each of 3 * depth + 1 micro-batches; packets take a tenth at most."""
    far = [*FAR, "--activation-mb", "1000", *FAST_CODECS]
    for gigabytes, depth in (("7.5", 2), ("10.9", 3)):
        rows = plan(capsys, *far, "--memory-gb", gigabytes)["rows"]
        assert {row["depth"] for row in rows[1:]} == {depth}
        assert all((3 * depth + 1) * 1e9 <= row["memory_bytes"] <= float(gigabytes) * 1e9 for row in rows[1:])


def test_a_recipe_whose_depth_is_auto(capsys, recipe):
    row = plan(capsys, *FAR, *recipe({"link": {"depth": "auto", "memory_gb": 0.16}}))["rows"][1]
    assert row["depth"] > 1 and row["memory_bytes"] <= 0.16e9
    assert row["block"] == {"link": {"depth": row["depth"]}} and Config(row["block"])


def test_a_recipe_from_its_file(capsys, recipe):
    mine = recipe({"forward": {"codec": "none"}, "link": {"mode": "blocking"}})
    rows = plan(capsys, "--gbps", "1", *mine)["rows"]
    assert [(row["recipe"], row["link"]) for row in rows] == [("DeepSpeed", "blocking"), ("mine", "blocking")]
    assert rows[1]["speedup"] == pytest.approx(1, rel=0.001)


def test_a_codec_that_does_not_make_messages_smaller_still_takes_its_time(capsys, recipe):
    """Such a message was once predicted as if it were sent as it is, at no cost."""
    steps = {}
    for name in ("none", "lossless"):
        words = recipe({"forward": {"codec": name}, "backward": {"codec": name}}, name)
        steps[name] = plan(capsys, "--gbps", "10", "--codec-gbps", "1", *words)["rows"][1]["step_s"]
    assert steps["lossless"] > 1.2 * steps["none"]


def test_boundaries_of_a_recipe(capsys, recipe):
    """Boundary 0 was once taken for all of them, and boundary 2 of four stages said not to be there."""
    for number in ("2", "0"):
        mine = recipe({"boundaries": {number: {"forward": {"codec": "bf16"}}}})
        words = ("--gbps", "1", *FAST_CODECS, *mine)
        error = advise(capsys, *words, code=2)
        assert "recipe mine: ds_compress.boundaries: gives boundaries codecs" in error
    advise(capsys, *words, "--stages", "2")


def test_a_recipe_that_needs_to_know_its_samples(capsys, recipe):
    """It was once refused for want of sample ids, with advice for a pipeline."""
    mine = recipe({"forward": {"codec": "bf16", "feedback": "aqsgd"}})
    assert plan(capsys, "--gbps", "1", *mine, "--shape", "4,8,256")["rows"][1]["recipe"] == "mine"


def test_a_feedback_counts(capsys, recipe):
    """The error of a message has the residuals of earlier ones; in sums they make up for each other."""
    found = {}
    for feedback in ("none", "ef"):
        backward = {"codec": {"name": "quantize", "bits": 4}, "feedback": feedback}
        found[feedback] = plan(capsys, "--gbps", "1", *FAST_CODECS, *recipe({"backward": backward}))
    plain, ef = (found[feedback]["rows"][1] for feedback in ("none", "ef"))
    assert ef["error_backward"] > 1.2 * plain["error_backward"]
    assert ef["gradient_error"] < 0.5 * plain["gradient_error"]


def test_a_recipe_that_loses_tokens(capsys, recipe):
    """`auto` uses none; in a comparison its error is that of sending nothing, not inf."""
    mine = recipe({"forward": {"codec": {"name": "randomk", "density": 0.001}}})
    found = plan(capsys, *SLOW_LINK, *mine, "--shape", "1,64,256")
    assert found["best"] is None and found["rows"][1]["token_error"] == 1


def test_the_best_recipe_is_not_compared_with_itself(capsys):
    """It once said: none ... makes a step 1.62 times as fast, none 1.62 times."""
    assert advise(capsys, "--gbps", "1", "--codec-gbps", "0.02").splitlines()[0].count("none") == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--gbps", "1", "--stages", "1"], "--stages: 1 is not allowed: should be 2 or more"),
        (["--gbps", "1", "--forward-ms", "1,2"], "--forward-ms: 2 numbers for 4 stages; give 1 or 4"),
        (["--gbps", "-1"], "argument --gbps: '-1' is not allowed: should be 1e-06 to 1000000"),
        (["--gbps", "1", "--depth", "deep"], "argument --depth: 'deep' is not allowed"),
        # torch's own error was a traceback: Torch not compiled with CUDA enabled
        (["--gbps", "1", "--device", "cuda:99"], "argument --device: 'cuda:99' is not here; allowed: cpu"),
        (["--gbps", "1", "--model", "M"], 'model M; --model was removed: "recipe": "auto" measures the'),
        (["--gbps", "1", "--probe=x.py:f"], "; --probe was removed: "),
    ],
)
def test_refusals(capsys, arguments, message):
    try:
        error = advise(capsys, *arguments, *FAST_CODECS, code=2)
    except SystemExit as ended:  # of argparse
        error = capsys.readouterr().err
        assert ended.code == 2
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("given, missing", [("--shape", "--forward-ms"), ("--forward-ms", "--shape")])
def test_what_is_missing_is_named(capsys, given, missing):
    words = ("advise", "--stages", "2", "--micro-batches", "4", "--gbps", "1", given, "4")
    assert main([*words]) == 2
    assert capsys.readouterr().err == (
        f"{missing}: missing; give it, or --finetune, whose train.json says it; "
        '"recipe": "auto" measures it in a run\n'
    )
