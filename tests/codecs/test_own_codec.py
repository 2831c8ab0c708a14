"""A codec of 20 lines in a user's own file works wherever those of the package do."""

import importlib
import json
import subprocess
import sys

import pytest
import torch

from ds_compress import CompressionError, TensorSpec, build, check_codec
from ds_compress.cli import main
from ds_compress.codec import CODECS
from ds_compress.feedback import FEEDBACKS
from tests.support.codecs import Pair, own_codecs, roundtrip
from tests.support.launch_scripts import ROOT
from tests.support.pipeline import alike, ds_config, train, train_simulated
from tests.support.ranks import run_ranks

MODULE = "tests.codecs.half_scale"
HALF_BLOCK = alike("half_scale", min_numel=0)


@pytest.fixture(autouse=True)
def imported():
    with own_codecs():
        sys.modules.pop(MODULE, None)
        importlib.import_module(MODULE)
        yield
    sys.modules.pop(MODULE)


def run_example(word):
    """Run the example of the page that has `word` in it, which registers a class."""
    examples = (ROOT / "docs" / "write-a-codec.md").read_text().split("```python\n")[1:]
    example = next(text.split("```")[0] for text in examples if word in text)
    exec(compile(example, "write-a-codec.md", "exec"), {"__name__": "contributing"})


@pytest.mark.extended
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
    two_bits, x = {"name": "quantize", "bits": 2}, torch.randn(4, 64)
    pair = Pair(two_bits, "half_ef", "backward")
    first, second = pair(x), pair(x)
    assert torch.equal(first, roundtrip(two_bits, x))
    assert torch.equal(second, roundtrip(two_bits, x + 0.5 * (x - first)))


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
    for rank in run_ranks(2, train, 2, ds_config(HALF_BLOCK), check=False):
        assert "codec half_scale refuses float32 [4, 8, 32]: no bf16 today" in rank
    with pytest.raises(CompressionError, match="half_scale refuses float32"):
        train_simulated(2, ds_config(HALF_BLOCK))


def test_what_it_refuses_is_refused_wherever_it_serves(monkeypatch):
    monkeypatch.setattr(type(build("half_scale")), "refuses", lambda self, spec: f"not {spec}")
    spec = TensorSpec((2, 10), torch.float32)
    with_feedback = FEEDBACKS.build("ef", "feedback").wrap(build("half_scale"))
    assert with_feedback.refuses(spec) == "not float32 [2, 10]"
    assert build({"name": "topk", "values": "half_scale"}).refuses(spec) == "not float32 [2]"


@pytest.mark.extended
def test_build_knows_the_codecs_of_the_package():
    """It knew none in a process that had imported nothing else."""
    code = "import ds_compress; print(ds_compress.build('bf16'))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT) == "bf16\n"


def test_the_error_says_how_to_import_it(monkeypatch):
    """Of the page's own example a command said "removed", and not that it needs --import."""
    monkeypatch.delitem(CODECS._classes, "acsgd", raising=False)
    for name in ("acsgd", "my_codec"):
        with pytest.raises(CompressionError, match="--import"):
            CODECS.find(name, "codec")
