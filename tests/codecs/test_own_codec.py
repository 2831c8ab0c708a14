"""A codec of 20 lines in a user's own file works wherever those of the package do."""

import importlib
import json
import subprocess
import sys

import pytest
import torch

from ds_compress import CompressionError, Context, TensorSpec, build, check_codec
from ds_compress.cli import main
from ds_compress.feedback import FEEDBACKS
from tests.support.codecs import own_codecs, roundtrip
from tests.support.launch_scripts import ROOT
from tests.support.pipeline import MICRO_BATCHES, batches, ds_config, train_simulated
from tests.support.pipeline import build as build_engine
from tests.support.ranks import run_ranks

MODULE = "tests.codecs.half_scale"
HALF_BLOCK = {
    "forward": {"codec": "half_scale"},
    "backward": {"codec": "half_scale", "feedback": "ef"},
    "min_numel": 0,
}


@pytest.fixture(autouse=True)
def imported():
    with own_codecs():
        sys.modules.pop(MODULE, None)
        importlib.import_module(MODULE)
        yield
    sys.modules.pop(MODULE)


def train_counting(config):
    engine, data = build_engine(2, config), batches()
    losses = [engine.train_batch(data).item() for _ in range(4)]
    sent = [channel.sent for channel in engine.ds_compress.stage.sending]
    return losses, [(counters.messages, counters.raw_bytes / counters.wire_bytes) for counters in sent]


def test_contract():
    check_codec("half_scale")


def run_example(word):
    """Run the example of the page that has `word` in it, which registers a class."""
    examples = (ROOT / "docs" / "write-a-codec.md").read_text().split("```python\n")[1:]
    example = next(text.split("```")[0] for text in examples if word in text)
    exec(compile(example, "write-a-codec.md", "exec"), {"__name__": "contributing"})


def test_the_example_of_the_page():
    run_example("@register(")
    check_codec("acsgd")


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_example_matches_the_formula_of_its_paper(bits):
    run_example("@register(")
    x = torch.randn(3, 7, 10, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 9, 10)
    wide, half = x.double(), 2.0 ** (bits - 1)
    s = wide.abs().amax((0, 1))
    expected = torch.round(wide / (s * (1 + 1e-6)) * half).clamp(-half, half - 1) / half * s
    error = (roundtrip({"name": "acsgd", "bits": bits}, x).double() - expected).abs()
    assert (error <= 1e-6 * s).all()


def test_the_feedback_of_the_page(monkeypatch):
    """It adds half of what the last gradient lost."""
    monkeypatch.setattr(FEEDBACKS, "_classes", dict(FEEDBACKS._classes))
    run_example("@register_feedback(")
    codec = FEEDBACKS.build("half_ef", "feedback").wrap(build({"name": "quantize", "bits": 2}))
    x, ctx = torch.randn(4, 64), Context(direction="backward", memory={})
    (first, second) = (codec.decode(codec.encode(x, ctx), TensorSpec.of(x), ctx) for _ in range(2))
    plain, fresh = build({"name": "quantize", "bits": 2}), Context(direction="backward", memory={})
    wanted = x + 0.5 * (x - first)
    assert torch.equal(first, plain.decode(plain.encode(x, fresh), TensorSpec.of(x), fresh))
    assert torch.equal(second, plain.decode(plain.encode(wanted, fresh), TensorSpec.of(x), fresh))


def test_training_and_simulate():
    config = ds_config(HALF_BLOCK)
    first, last = run_ranks(2, train_counting, config)
    assert first[0] == last[0] == train_simulated(2, config) != train_simulated(2, ds_config({}))
    for _, ((messages, ratio),) in (first, last):
        assert messages == 4 * MICRO_BATCHES and 3.5 < ratio < 4


def test_what_it_refuses_is_said_in_one_line(tmp_path, capsys, monkeypatch):
    """By the boundary, for whoever asks: the codec itself only declares it."""
    refusal = "half_scale refuses bfloat16 [4, 1024, 768]: no bf16 today"
    monkeypatch.setattr(type(build("half_scale")), "refuses", lambda self, spec: "no bf16 today")
    file = tmp_path / "ds_config.json"
    arguments = ["--stages", "2", "--shape", "4,1024,768", "--dtype", "bf16"]
    for block in (HALF_BLOCK, {**HALF_BLOCK, "warmup_steps": 5}):
        file.write_text(json.dumps({"ds_compress": block}))
        assert main(["check", str(file), *arguments]) == 2
        assert capsys.readouterr().err == f"boundary 0, forward: codec {refusal}\n"
    assert main(["bench", *arguments[2:], "--codec", "half_scale"]) == 2
    assert refusal in capsys.readouterr().err
    for rank in run_ranks(2, train_counting, ds_config(HALF_BLOCK), check=False):
        assert "codec half_scale refuses float32 [4, 8, 32]: no bf16 today" in rank
    with pytest.raises(CompressionError, match="half_scale refuses float32"):
        train_simulated(2, ds_config(HALF_BLOCK))


def test_what_it_refuses_is_refused_wherever_it_serves(monkeypatch):
    monkeypatch.setattr(type(build("half_scale")), "refuses", lambda self, spec: f"not {spec}")
    spec = TensorSpec((2, 10), torch.float32)
    with_feedback = FEEDBACKS.build("ef", "feedback").wrap(build("half_scale"))
    assert with_feedback.refuses(spec) == "not float32 [2, 10]"
    assert build({"name": "topk", "values": "half_scale"}).refuses(spec) == "not float32 [2]"


def test_build_knows_the_codecs_of_the_package():
    """It knew none in a process that had imported nothing else."""
    code = "import ds_compress; print(ds_compress.build('bf16'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "bf16\n", done.stderr
