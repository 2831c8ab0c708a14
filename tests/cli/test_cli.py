"""The commands: stable JSON, tables that are whole at any width, an error in one line with exit code 2."""

import argparse
import io
import json
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from ds_compress.cli import bench, main
from ds_compress.cli.reference import reference
from ds_compress.codec import TensorSpec, build, names
from ds_compress.config import DIRECTIONS
from ds_compress.feedback import FEEDBACKS
from tests.support.calls import wrapped

FOUR_BITS = {"name": "quantize", "bits": 4}
BLOCK = {"forward": {"codec": FOUR_BITS}, "backward": {"codec": "bf16"}}
BLOCK |= {"boundaries": {"0": {"forward": {"codec": "none"}}}}


@pytest.fixture
def check(tmp_path, capsys):
    """Return a function that runs `check` on a ds_config; it returns stdout and stderr."""

    def run(content, *words, code=0):
        path = tmp_path / "ds_config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        assert main(["check", str(path), *words]) == code
        return capsys.readouterr()

    return run


def rows_of(printed, boundary=None):
    return [row for row in json.loads(printed.out) if boundary in (None, row["boundary"])]


def test_list_json(capsys):
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [codec["name"] for codec in listed["codecs"]] == names()
    assert [feedback["name"] for feedback in listed["feedbacks"]] == FEEDBACKS.names()
    options = {codec["name"]: codec["options"] for codec in listed["codecs"]}
    assert options["topk"]["density"]["default"] == 0.1
    bits = options["quantize"]["bits"]
    assert bits == {"default": 4, "allowed": "integer >= 1, <= 8", "description": bits["description"]}


@pytest.mark.extended
def test_list_as_a_module_without_docstrings(capsys):
    """`python -OO` throws them away, and `list` ended in IndexError: list index out of range.

    Importing deepspeed is slow and logs to stdout: commands that do not need it must not import it.
    """
    command = [sys.executable, "-OO", "-X", "importtime", "-m", "ds_compress", "list", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and main(["list", "--json"]) == 0, done.stderr
    usual, bare = json.loads(capsys.readouterr().out), json.loads(done.stdout)
    assert bare["block"] == usual["block"] and all(entry["summary"] for entry in usual["codecs"])
    assert {entry["summary"] for entry in bare["codecs"]} == {""} and "deepspeed.comm" not in done.stderr


@pytest.mark.extended
def test_output_may_be_cut_off():
    """`ds-compress list | head` said: [Errno 32] Broken pipe."""
    command = f"{sys.executable} -m ds_compress list --json | true"
    assert subprocess.run(command, shell=True, capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(
    "encoding, shown", [("ascii", r"\xe4\udcff.json"), ("utf-8", r"\udcff.json"), (None, "")]
)
def test_output_that_cannot_take_every_name(encoding, shown, tmp_path, monkeypatch):
    """Names of files are any bytes, and terminals have encodings: a traceback, as was no output at all."""
    path = tmp_path / "\xe4\udcff.json"
    path.write_text('{"ds_compress": {}}')
    output = encoding and io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["list"]) == 0 and main(["check", str(path), "--stages", "2", "--shape", "4,8"]) == 0
    if output:
        output.flush()
        assert shown in output.buffer.getvalue().decode()


def test_interrupted_in_silence(monkeypatch, capsys):
    """Ctrl-C in `ds-compress bench` ended in a traceback; with exit code 130, a loop of a shell went on."""
    monkeypatch.setattr("ds_compress.cli.bench.run", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        main(["bench"])
    sys.excepthook(interrupted.type, interrupted.value, interrupted.tb)
    assert capsys.readouterr() == ("", "")


def test_check_says_that_auto_chooses_in_training(check):
    """It once printed a ratio of 1.00, and no word on why."""
    block = {"ds_compress": {"recipe": "auto", "quality": "balanced"}}
    output = check(block, "--stages", "2", "--shape", "4,64,256").err
    assert "recipe: 'auto' chooses codecs in the first steps of training" in output
    assert "token errors up to 0.1 forward and errors up to 0.23 of accumulated gradients" in output


def test_check_says_that_a_policy_sets_the_options(check):
    """It printed the sizes of 4 bits, in silence, of a run that begins with 8 and goes on with 2."""
    policy = {"name": "accordion", "forward": {"bits": [8, 4]}, "backward": {"bits": [8, 2]}}
    codecs = {direction: {"codec": "quantize"} for direction in DIRECTIONS}
    words = ["--stages", "2", "--shape", "4,64,256"]
    output = check({"ds_compress": {**codecs, "policy": policy}}, *words).err
    assert "'accordion' sets codecs" in output
    assert "forward: bits 8, then bits 4; backward: bits 8, then bits 2" in output
    assert check({"ds_compress": codecs}, *words).err == ""
    own = {"0": {direction: {"codec": "bf16"} for direction in DIRECTIONS}}
    block = {**codecs, "boundaries": own, "policy": policy}  # a run refused it, and `check` did not
    assert "no boundary of this pipeline has a codec" in check({"ds_compress": block}, *words, code=2).err
    one = {"ds_compress": {**codecs, "policy": policy}}
    assert "one stage sends no messages" in check(one, "--stages", "1", *words[2:]).err


def test_check_json(check):
    words = ["--stages", "3", "--shape", "4,1024,768", "--dtype", "bf16", "--json"]
    rows = rows_of(check({"ds_compress": BLOCK}, *words))
    places = [(boundary, direction) for boundary in (0, 1) for direction in DIRECTIONS]
    assert [(row["boundary"], row["direction"]) for row in rows] == places
    numel, header = 4 * 1024 * 768, 32
    assert [row["raw_bytes"] for row in rows] == [2 * numel] * 4
    expected = [2 * numel, 2 * numel, numel // 2 + numel // 128 * 4, 2 * numel]
    assert [row["wire_bytes"] - header for row in rows] == expected
    assert rows[2]["bits_per_value"] == pytest.approx(4.25, abs=0.001)
    assert rows[2]["ratio"] == pytest.approx(16 / 4.25, abs=0.001)


LARGER = {"forward": {"codec": {"name": "topk", "density": 0.9, "indices": "int32"}}}


def test_check_says_where_a_packet_is_larger_than_the_tensor(check):
    """It was a ratio of 0.56 in a table, and nothing in training."""
    printed = check({"ds_compress": LARGER}, "--stages", "4", "--shape", "4,1024,768", "--json")
    assert printed.err.splitlines() == [
        "ds_compress.forward.codec: topk(density=0.9, indices=int32) makes messages larger: "
        "22,649,280 bytes instead of 12,582,912; use other options, or codec 'none'"
    ]
    assert rows_of(printed)[0]["ratio"] < 1


@pytest.mark.parametrize("codec", [None, "lossless", "bf16"])
def test_headers_alone_are_not_worth_a_note(codec, check):
    block = {"forward": {"codec": codec}, "min_numel": 0} if codec else {}
    assert check({"ds_compress": block}, "--stages", "2", "--shape", "64", "--dtype", "bf16").err == ""


def test_check_says_where_a_codec_is_slower_than_the_link(check):
    """The recommended recipe took 2.4 s for what 1 Gbit/s sends in 0.13 s, and nothing said so."""
    block = {"forward": {"codec": "quantize"}, "backward": {"codec": FOUR_BITS}}
    words = ("--stages", "3", "--shape", "4,64,256")
    fast, slow = (check({"ds_compress": block}, *words, "--gbps", gbps).err for gbps in ("1e6", "1e-4"))
    places = [line.split(":")[0] for line in fast.splitlines()]
    assert slow == "" and places == [f"ds_compress.{direction}.codec" for direction in DIRECTIONS]
    assert " s to encode and decode a message on this device (cpu, " in fast


def test_check_knows_small_messages(check):
    rows = rows_of(check({"ds_compress": BLOCK}, "--stages", "3", "--shape", "4,8", "--json"))
    assert {row["codec"] for row in rows} == {"none (below min_numel)"}


TOP_K = {"backward": {"codec": "top_k"}}


@pytest.mark.parametrize(
    "content, message",
    [
        ({"ds_compress": TOP_K}, "ds_compress.backward.codec: 'top_k' is not registered"),
        ({"ds_compress": {"boundaries": {"5": {}}}}, "ds_compress.boundaries.5: there is no such boundary"),
        ({"ds-compress": {}}, "has no 'ds_compress' key (did you mean it by 'ds-compress'?)"),
        ({}, "has no 'ds_compress' key"),
        ([], "has no 'ds_compress' key"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON as DeepSpeed reads it: lists or objects are nested too deep"),
        ('{"ds_compress": {"min_numel": 1e999}}', "a number is beyond the range of floats"),
        ('{"train_batch_size": -1e999, "ds_compress": {}}', "a number is beyond the range of floats"),
    ],
)
def test_check_refuses_in_one_line(content, message, check):
    printed = check(content, "--stages", "2", "--shape", "4,8", code=2)
    assert printed.out == "" and printed.err.count("\n") == 1
    assert message in printed.err


MILLIONS = ("--shape", "4,64,256", "--parameters", "4000000")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("replicas", [2, 8])
def test_bytes_between_replicas_in_a_step(dtype, replicas, check):
    """4.25 bits against 32 or 16; in fp32 both ways, in bf16 gradients one way and parameters back."""
    block = {"ds_compress": {"replicas": {"codec": FOUR_BITS, "parameters": 4}}}
    words = ["--stages", "2", *MILLIONS, "--dtype", dtype, "--replicas", str(replicas)]
    rows = rows_of(check(block, *words, "--json"), "replicas")
    sent = (replicas - 1) / replicas * 4_000_000
    one_way = pytest.approx(sent * 4.25 / 8, rel=1e-3)
    raw = [2 * 4 * sent] if dtype == "fp32" else [4 * sent, 2 * sent]
    assert [row["raw_bytes"] for row in rows] == raw
    assert all(row["wire_bytes"] * len(raw) / 2 == one_way for row in rows)
    assert ("parameters" in check(block, *words).out) == (dtype == "bf16")


def test_bytes_between_replicas_in_a_round(check):
    """30 all-reduces in fp32 between two launches, against one packet."""
    block = {"ds_compress": {"replicas": {"codec": FOUR_BITS, "every": 30}}}
    words = ["--stages", "2", *MILLIONS, "--dtype", "bf16", "--replicas", "2", "--json"]
    (row,) = rows_of(check(block, *words), "replicas")
    assert row["direction"] == "weights" and row["raw_bytes"] == 30 * 4 * 4_000_000
    assert row["ratio"] == pytest.approx(30 * 32 / 4.25, rel=1e-3)


def test_bytes_of_factors_between_replicas(check):
    """Two factors of 256 x 4 values for each matrix of 256 x 256, here in bf16, both ways of a ring."""
    block = {"ds_compress": {"replicas": {"codec": {"name": "lowrank", "rank": 4}}}}
    (row,) = rows_of(check(block, "--stages", "1", *MILLIONS, "--replicas", "2", "--json"))
    assert row["ratio"] == pytest.approx(256 * 256 * 4 / (2 * 256 * 4 * 2), rel=1e-6)


@pytest.mark.parametrize("name, chosen", [("cpu", []), ("cuda", []), ("cuda:0", []), ("cuda:1", ["cuda:1"])])
def test_bench_times_the_gpu_that_it_runs_on(name, chosen, monkeypatch):
    """torch's timer waits for the current GPU: the times of any other one were those of its launches."""
    current, row = [], dict.fromkeys(("bits_per_value", "relative_error", "token_error", "copy_fraction"), 1)
    row |= dict.fromkeys(("encode_gbps", "decode_gbps", "roundtrip_gbps"), 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    monkeypatch.setattr(bench, "benchmark_tensor", lambda *asked: None)
    monkeypatch.setattr(bench, "measure", lambda codec, x: row)
    options = {"shape": (2, 64), "dtype": "fp32", "codec": ["bf16"], "json": None}
    assert bench.run(argparse.Namespace(device=torch.device(name), **options)) == 0
    assert current == chosen


def test_bench_json(tmp_path, capsys):
    path = tmp_path / "rows.json"
    chosen = ['{"name": "quantize", "bits": 8}', '{"name": "topk", "indices": "reuse", "values": "bf16"}']
    assert main(["bench", "--shape", "2,64,128", "--codec", "bf16", *chosen, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert [row["codec"] for row in rows] == ["bf16", "quantize", "topk"]
    assert [row["bits_per_value"] for row in rows] == pytest.approx([16, 8.25, 1.6], abs=0.01)
    for row in rows:
        assert row["shape"] == [2, 64, 128] and row["dtype"] == "fp32" and row["device"] == "cpu"
        assert row["copy_fraction"] == pytest.approx(row["roundtrip_gbps"] / row["copy_gbps"])
        assert row["encode_gbps"] > 0 and row["decode_gbps"] > 0
    assert rows[1]["token_error"] < 0.02 < rows[2]["token_error"]
    assert rows[2]["relative_error"] < 0.02, "the sink hides what the others lose"


def test_bench_measures_a_gradient_beside_its_activation(monkeypatch):
    """It measured the codec alone, without the components along activations: a quarter too fast."""
    measured = []
    seen = wrapped(bench.size_and_error, before=lambda *asked: measured.append(asked))
    monkeypatch.setattr(bench, "size_and_error", seen)
    monkeypatch.setattr(bench, "SECONDS", 0.01)
    codec = build({"name": "entropy", "bits": 1.5, "rounding": "dither"})
    bench.measure(codec, bench.benchmark_tensor((64, 128), torch.float32, torch.device("cpu")))
    ((used, x),) = measured
    assert used.wants_activation(TensorSpec.of(x)) and str(used) == str(codec)


LONG = {"name": "topk", "density": 0.123456, "indices": "rice", "values": FOUR_BITS}
LONG_BLOCK = {"forward": {"codec": LONG, "feedback": "ef21"}, "backward": {"codec": "bf16"}}
SIZES = ["--stages", "3", "--shape", "4,1024,4096"]


@pytest.mark.parametrize("width", ["40", "300"])
def test_check(width, check, monkeypatch):
    monkeypatch.setenv("COLUMNS", width)
    out = check({"ds_compress": LONG_BLOCK}, *SIZES).out
    for row in rows_of(check({"ds_compress": LONG_BLOCK}, *SIZES, "--json")):
        assert row["codec"] in out and f"{row['raw_bytes']:,}" in out and f"{row['wire_bytes']:,}" in out
        assert f"{row['ratio']:.2f}" in out and f"{row['bits_per_value']:.3f}" in out
    assert "…" not in out and "wire bytes" in out


def test_list(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 40
    letters = re.sub(r"[\s•]", "", out)  # lines break anywhere
    for entries in reference().values():
        for entry in entries:
            options = entry.get("options", {entry["name"]: entry})
            assert re.sub(r"[\s`]", "", entry["name"] + entry.get("summary", "")) in letters
            for name, option in options.items():
                default = json.dumps(option["default"]) if "default" in option else "(must be given)"
                line = f"{name} = {default} ({option['allowed']}): {option['description']}"
                assert re.sub(r"[\s`]", "", line) in letters
