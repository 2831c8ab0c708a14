"""Commands at 80 columns: every value is there whole. Once they were cut to "topk(den…" and "12,582,9…"."""

import json
import re

import pytest

from ds_compress.cli import main
from ds_compress.cli.reference import reference

LONG = {"name": "topk", "density": 0.123456, "indices": "rice", "values": {"name": "quantize", "bits": 4}}
BLOCK = {"forward": {"codec": LONG, "feedback": "ef21"}, "backward": {"codec": "bf16"}}
SIZES = ["--stages", "3", "--shape", "4,1024,4096"]
WORKLOAD = ["--micro-batches", "8", "--forward-ms", "16", "--gbps", "1", "--codec-gbps", "1000"]
WIDTHS = [40, 80, 100, 300]


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    file = tmp_path / "a_recipe_with_a_name_that_is_so_long_that_it_fills_a_line_of_eighty_columns_alone.json"
    file.write_text(json.dumps({"ds_compress": BLOCK}))

    def run(width, *arguments):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main([argument.replace("DS_CONFIG", str(file)) for argument in arguments]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.extended(keep=2)
def test_check(width, printed):
    out = printed(width, "check", "DS_CONFIG", *SIZES)
    for row in json.loads(printed(width, "check", "DS_CONFIG", *SIZES, "--json")):
        assert row["codec"] in out and f"{row['raw_bytes']:,}" in out and f"{row['wire_bytes']:,}" in out
        assert f"{row['ratio']:.2f}" in out and f"{row['bits_per_value']:.3f}" in out
    assert "…" not in out and "wire bytes" in out


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.extended(keep=2)
def test_advise(width, printed):
    arguments = ["advise", *SIZES, *WORKLOAD, "--recipe", "DS_CONFIG"]
    out = printed(width, *arguments)
    for row in json.loads(printed(width, *arguments, "--json"))["rows"]:
        assert row["recipe"] in out and row["link"] in out and f"{1e3 * row['step_s']:.1f}" in out
    assert "…" not in out and "limited by" in out


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.extended(keep=2)
def test_bench(width, printed, tmp_path):
    out = printed(width, "bench", "--shape", "2,64", "--codec", json.dumps(LONG))
    assert "topk(density=0.123456, indices=rice, values={'name': 'quantize', 'bits': 4})" in out
    assert "…" not in out and "round trip" in out


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.extended(keep=2)
def test_list(width, printed):
    out = printed(width, "list")
    assert max(map(len, out.splitlines())) <= max(width, 60)  # a word longer than a line stays whole
    words = " ".join(out.split())
    for entries in reference().values():
        for entry in entries:
            options = entry.get("options", {entry["name"]: entry})
            assert entry["name"] in out and entry.get("summary", "") in words
            for name, option in options.items():
                assert re.search(rf"^ +{re.escape(name)} = ", out, re.MULTILINE)
                assert option["description"] in words and f"({option['allowed']})" in words
                assert "default" not in option or f"{name} = {json.dumps(option['default'])}" in words
