"""The benchmark for GPUs, on the CPU: what it counts, not how fast it is; and errors on captured messages."""

import json
import sys

import pytest
import torch
from torch import nn

from ds_compress.cli.bench import benchmark_tensor
from ds_compress.codec import TensorSpec, build
from ds_compress.message.packet import PacketLayout
from launch import capture as capturing
from launch.bench import gpu as script
from launch.capture import CODECS, capture, errors, save
from tests.support import messages
from tests.support.pipeline import boundary_tensors


def test_every_codec_has_its_row(monkeypatch, tmp_path):
    def peers(x):
        return [script.Method("torch.topk", script.sparse, lambda parts: script.dense(parts, x))]

    monkeypatch.setattr(script, "peers", peers)
    path = tmp_path / "rows.json"
    words = ["--device", "cpu", "--shape", "2,64,256", "--rounds", "3", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench_gpu", *words])
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
def test_a_missed_goal_is_an_exit_status(share, verdict, monkeypatch):
    row = {"name": "quantize", "encode_s": 1, "decode_s": 1, "bits": 8, "of_copy": share, "goal": 0.85}
    monkeypatch.setattr(script, "measure", lambda x, rounds: [row])
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--device", "cpu", "--shape", "2,2"])
    assert script.main() == verdict


def named(messages):
    """Messages as `capture` names them."""
    directions = zip(("forward", "backward"), messages)
    return {f"{cut}.{direction}": x for direction, own in directions for cut, x in enumerate(own)}


def test_what_crosses_is_captured():
    layers, x = [nn.Linear(8, 8) for _ in range(4)], torch.randn(3, 8)
    (one, other) = boundary_tensors(layers, [1, 3], x, lambda y: y.square().mean())
    found = capture(layers, [1, 3], x, lambda y: y.square().mean())
    assert [*found] == ["1.forward", "1.backward", "3.forward", "3.backward"]
    assert all(map(torch.equal, found.values(), (*one, *other)))


def by_bits(messages, direction):
    """Size and error of each codec that rotates, and of each that does not."""
    sent = named(messages)
    kinds = ([codec for codec in CODECS if codec.get("hadamard") == on] for on in (True, None))
    return [{codec["bits"]: errors(sent, codec, direction) for codec in kind} for kind in kinds]


@pytest.mark.extended
def test_a_rotation_pays_for_gradients_of_a_transformer():
    rotated, plain = by_bits(messages.transformer(), "backward")
    for bits in (2, 3):
        size = bits + 0.25 + 1 / 64  # the last: a bit for each row, as groups cross rows of 64 values
        assert rotated[bits][0] == plain[bits][0] == size and rotated[bits][1] < plain[bits][1]


@pytest.mark.extended
def test_behind_a_relu_a_rotation_does_not_pay():
    """At 4 bits a group's own range, without a rotation, loses less: what the docs say."""
    rotated, plain = by_bits(messages.cnn(), "forward")
    assert plain[4][1] < rotated[4][1] < 0.11


def test_files_can_be_read_again(tmp_path, monkeypatch, capsys):
    save(named(torch.randn(2, 2, 2, 64, 128).unbind()), tmp_path / "messages.safetensors")
    monkeypatch.setattr("sys.argv", ["capture.py", str(tmp_path / "messages.safetensors")])
    capturing.main()
    assert "hadamard" in capsys.readouterr().out
