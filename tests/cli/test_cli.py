"""The commands: their JSON is stable, their tables are readable, an error is one line and exit code 2."""

import json
import subprocess
import sys

import pytest

from ds_compress.cli import main
from ds_compress.codec import names
from ds_compress.feedback import FEEDBACKS

BLOCK = {
    "forward": {"codec": {"name": "quantize", "bits": 4}},
    "backward": {"codec": "bf16"},
    "boundaries": {"0": {"forward": {"codec": "none"}}},
}


@pytest.fixture
def ds_config(tmp_path):
    def write(content):
        path = tmp_path / "ds_config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_list_json(capsys):
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [codec["name"] for codec in listed["codecs"]] == names()
    assert [feedback["name"] for feedback in listed["feedbacks"]] == FEEDBACKS.names()
    options = {codec["name"]: codec["options"] for codec in listed["codecs"]}
    assert options["topk"]["density"]["default"] == 0.1
    assert options["quantize"]["bits"] == {
        "default": 4,
        "allowed": "integer >= 1, <= 8",
        "description": options["quantize"]["bits"]["description"],
    }
    for entry in listed["codecs"] + listed["feedbacks"]:
        assert entry["summary"].endswith(".")


def run_python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


@pytest.mark.extended
def test_list_without_docstrings(capsys):
    """`python -OO` throws them away, and `list` ended in IndexError: list index out of range."""
    stripped = run_python("-OO", "-m", "ds_compress", "list", "--json")
    assert stripped.returncode == 0 and main(["list", "--json"]) == 0, stripped.stderr
    assert stripped.stdout == (usual := capsys.readouterr().out)
    assert '"summary": "Keeps the entries of largest' in usual


def test_output_may_be_cut_off():
    """`ds-compress list | head` said: [Errno 32] Broken pipe."""
    command = f"{sys.executable} -m ds_compress list --json | true"
    assert subprocess.run(command, shell=True, capture_output=True, text=True).stderr == ""


def test_check_says_that_auto_chooses_in_training(ds_config, capsys):
    """It once printed a ratio of 1.00, and no word on why."""
    path = ds_config({"ds_compress": {"recipe": "auto", "quality": "balanced"}})
    assert main(["check", path, "--stages", "2", "--shape", "4,64,256"]) == 0
    output = capsys.readouterr().err
    assert "recipe: 'auto' chooses codecs in the first steps of training" in output
    assert "errors up to 0.05 forward and 0.17 of accumulated gradients" in output


def test_check_json(ds_config, capsys):
    path = ds_config({"ds_compress": BLOCK})
    assert main(["check", path, "--stages", "3", "--shape", "4,1024,768", "--dtype", "bf16", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["boundary"], row["direction"]) for row in rows] == [
        (0, "forward"),
        (0, "backward"),
        (1, "forward"),
        (1, "backward"),
    ]
    numel = 4 * 1024 * 768
    assert [row["raw_bytes"] for row in rows] == [2 * numel] * 4
    header = 32
    expected = [
        2 * numel + header,
        2 * numel + header,
        numel // 2 + numel // 128 * 4 + header,
        2 * numel + header,
    ]
    assert [row["wire_bytes"] for row in rows] == expected
    assert rows[2]["bits_per_value"] == pytest.approx(4.25, abs=0.001)
    assert rows[2]["ratio"] == pytest.approx(16 / 4.25, abs=0.001)


LARGER = {"forward": {"codec": {"name": "topk", "density": 0.9, "indices": "int32"}}}


def test_check_says_where_a_packet_is_larger_than_the_tensor(ds_config, capsys):
    """It was a ratio of 0.56 in a table, and nothing in training."""
    path = ds_config({"ds_compress": LARGER})
    assert main(["check", path, "--stages", "4", "--shape", "4,1024,768", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "ds_compress.forward.codec: topk(density=0.9, indices=int32) makes messages larger: "
        "22,649,280 bytes instead of 12,582,912; use other options, or codec 'none'"
    ]
    assert json.loads(printed.out)[0]["ratio"] < 1


@pytest.mark.parametrize("codec", [None, "lossless", "bf16"])
def test_headers_alone_are_not_worth_a_note(codec, ds_config, capsys):
    path = ds_config({"ds_compress": {"forward": {"codec": codec}, "min_numel": 0} if codec else {}})
    assert main(["check", path, "--stages", "2", "--shape", "64", "--dtype", "bf16"]) == 0
    assert capsys.readouterr().err == ""


def test_check_knows_small_messages(ds_config, capsys):
    path = ds_config({"ds_compress": BLOCK})
    assert main(["check", path, "--stages", "3", "--shape", "4,8", "--json"]) == 0
    assert {row["codec"] for row in json.loads(capsys.readouterr().out)} == {"none (below min_numel)"}


@pytest.mark.parametrize(
    "content, message",
    [
        (
            {"ds_compress": {"backward": {"codec": "top_k"}}},
            "ds_compress.backward.codec: 'top_k' is not registered",
        ),
        ({"ds_compress": {"boundaries": {"5": {}}}}, "ds_compress.boundaries.5: there is no such boundary"),
        ({"ds-compress": {}}, "has no 'ds_compress' key (did you mean it by 'ds-compress'?)"),
        ({}, "has no 'ds_compress' key"),
        ([], "has no 'ds_compress' key"),
        ("{", "not JSON"),
    ],
)
def test_check_refuses_in_one_line(content, message, ds_config, capsys):
    assert main(["check", ds_config(content), "--stages", "2", "--shape", "4,8"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert message in printed.err


def test_bench_json(tmp_path, capsys):
    path = tmp_path / "rows.json"
    chosen = [
        "bf16",
        '{"name": "quantize", "bits": 8}',
        '{"name": "topk", "indices": "reuse", "values": "bf16"}',
    ]
    assert main(["bench", "--shape", "2,64,128", "--codec", *chosen, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert [row["codec"] for row in rows] == ["bf16", "quantize", "topk"]
    assert [row["bits_per_value"] for row in rows] == pytest.approx([16, 8.25, 1.6], abs=0.01)
    for row in rows:
        assert row["shape"] == [2, 64, 128] and row["dtype"] == "fp32" and row["device"] == "cpu"
        assert row["copy_fraction"] == pytest.approx(row["roundtrip_gbps"] / row["copy_gbps"])
        assert row["encode_gbps"] > 0 and row["decode_gbps"] > 0
    assert rows[1]["relative_error"] < 0.02 < rows[2]["relative_error"]


def test_runs_as_a_module_and_prints_nothing_but_json():
    """Importing deepspeed is slow and logs to stdout: commands that do not need it must not import it."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ds_compress", "list", "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert {"quantize", "topk"} <= {codec["name"] for codec in json.loads(done.stdout)["codecs"]}
    assert "deepspeed.comm" not in done.stderr
