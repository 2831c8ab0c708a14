"""`ds-compress check` with replicas: bytes of gradients and parameters in a step."""

import json

import pytest

from ds_compress.cli import main

BLOCK = {"replicas": {"codec": {"name": "quantize", "bits": 4}, "parameters": 4}}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("replicas", [2, 8])
def test_bytes_of_a_step(dtype, replicas, tmp_path, capsys):
    """4.25 bits against 32 or 16; in fp32 both ways, in bf16 gradients one way and parameters back."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"ds_compress": BLOCK}))
    words = [str(path), "--stages", "2", "--shape", "4,64,256", "--dtype", dtype, "--json"]
    assert main(["check", *words, "--replicas", str(replicas), "--parameters", "4000000"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["boundary"] == "replicas"]
    sent = (replicas - 1) / replicas * 4_000_000
    one_way = pytest.approx(sent * 4.25 / 8, rel=1e-3)
    if dtype == "fp32":
        (gradients,) = rows
        assert gradients["raw_bytes"] == 2 * 4 * sent and gradients["wire_bytes"] / 2 == one_way
        return
    gradients, parameters = rows
    assert (gradients["raw_bytes"], parameters["raw_bytes"]) == (4 * sent, 2 * sent)
    assert gradients["wire_bytes"] == one_way and parameters["wire_bytes"] == one_way
    assert main(["check", *words[:-1], "--replicas", str(replicas), "--parameters", "4000000"]) == 0
    assert "parameters" in capsys.readouterr().out


def test_bytes_of_a_round(tmp_path, capsys):
    """30 all-reduces in fp32 between two launches, against one packet."""
    path = tmp_path / "ds_config.json"
    block = {"replicas": {"codec": {"name": "quantize", "bits": 4}, "every": 30}}
    path.write_text(json.dumps({"ds_compress": block}))
    words = [str(path), "--stages", "2", "--shape", "4,64,256", "--dtype", "bf16", "--json"]
    assert main(["check", *words, "--replicas", "2", "--parameters", "4000000"]) == 0
    (row,) = [row for row in json.loads(capsys.readouterr().out) if row["boundary"] == "replicas"]
    assert row["direction"] == "weights" and row["raw_bytes"] == 30 * 4 * 4_000_000
    assert row["ratio"] == pytest.approx(30 * 32 / 4.25, rel=1e-3)


def test_bytes_of_factors(tmp_path, capsys):
    """Two factors of 256 x 4 values for each matrix of 256 x 256, here in bf16, both ways of a ring."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"ds_compress": {"replicas": {"codec": {"name": "lowrank", "rank": 4}}}}))
    words = [str(path), "--stages", "1", "--shape", "4,64,256", "--json"]
    assert main(["check", *words, "--replicas", "2", "--parameters", "4000000"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["ratio"] == pytest.approx(256 * 256 * 4 / (2 * 256 * 4 * 2), rel=1e-6)
