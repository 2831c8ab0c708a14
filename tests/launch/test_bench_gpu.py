"""The benchmark for GPUs, on the CPU: that it runs and counts right, not how fast anything is."""

import json
import sys

import pytest

from ds_compress.cli.bench import benchmark_tensor
from ds_compress.codec import TensorSpec, build
from ds_compress.message.packet import PacketLayout
from tests.support.launch_scripts import load_script


@pytest.fixture
def script():
    return load_script("bench/gpu")


def test_every_codec_has_its_row(script, monkeypatch, tmp_path):
    monkeypatch.setattr(
        script,
        "peers",
        lambda x: [script.Method("torch.topk", script.sparse, lambda parts: script.dense(parts, x))],
    )
    path = tmp_path / "rows.json"
    monkeypatch.setattr(
        sys,
        "argv",
        ["bench_gpu", "--device", "cpu", "--shape", "2,64,256", "--rounds", "3", "--json", str(path)],
    )
    script.main()
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    x = benchmark_tensor((2, 64, 256), script.DTYPES["bf16"], script.torch.device("cpu"))
    for choice, _ in script.CODECS:
        codec = build(choice)
        layout = PacketLayout(codec.layout(TensorSpec.of(x)), None)
        assert rows[str(codec)]["bits"] == 8 * layout.nbytes / x.numel()
        assert rows[str(codec)]["of_copy"] > 0
    assert rows["torch.topk"]["bits"] == pytest.approx(0.1 * 48, rel=0.01)


@pytest.mark.parametrize("share, verdict", [(0.85, 0), (0.84, 1)])
def test_a_missed_goal_is_an_exit_status(share, verdict, script, monkeypatch):
    row = {"name": "quantize", "encode_s": 1, "decode_s": 1, "bits": 8, "of_copy": share, "goal": 0.85}
    monkeypatch.setattr(script, "measure", lambda x, rounds: [row])
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--device", "cpu", "--shape", "2,2"])
    assert script.main() == verdict
