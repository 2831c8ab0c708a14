"""Options without effect are noted in one line, or refused where they contradict another one."""

import json

import pytest

from ds_compress.cli import main
from ds_compress.config import Config
from ds_compress.errors import CompressionError

LOSSY = {"forward": {"codec": "quantize"}}
WITH_EF = {"forward": {"codec": "quantize", "feedback": "ef"}}
BUDGET = {"name": "budget", "forward": {"bits": [8, 4]}, "error": 0.1}

UNUSED = [
    ({"warmup_steps": 5}, "warmup_steps: 5 has no effect: no codec is set"),
    ({"warmup_epochs": 5}, "warmup_epochs: 5 has no effect: no codec is set"),
    ({"eval": "both"}, "eval: 'both' has no effect: no codec is set"),
    ({"tensors": [0]}, "tensors: [0] has no effect: no codec is set"),
    ({"min_numel": 9}, "min_numel: 9 has no effect: no codec is set"),
    ({"recipe": "none", "warmup_steps": 5}, "warmup_steps: 5 has no effect: no codec is set"),
    ({**LOSSY, "tensors": [0], "min_numel": 5}, "min_numel: 5 has no effect: tensors names positions"),
    ({"backward": {"codec": "topk"}, "eval": "compressed"}, "eval: 'compressed' has no effect: activations"),
    (
        {**WITH_EF, "state_check_every": 5},
        "state_check_every: 5 has no effect: no feedback mirrors its state",
    ),
    (
        {"forward": {"codec": "none", "feedback": "ef"}},
        "forward.feedback: 'ef' has no effect: its codec is 'none'",
    ),
    (
        {"boundaries": {"1": {"backward": {"codec": "none", "feedback": "ef"}}}},
        "boundaries.1.backward.feedback: 'ef' has no effect: its codec is 'none'",
    ),
    (
        {"boundaries": {"1": {"forward": {"feedback": "ef"}}}},
        "boundaries.1.forward.feedback: 'ef' has no effect: its codec is 'none'",
    ),
    ({**LOSSY, "guard": {"loss": 0.1, "every": 0}}, "guard.loss: 0.1 has no effect: guard.every is 0"),
    ({**WITH_EF, "guard": {"loss": 0.1}}, "guard.loss: 0.1 has no effect: activations have a feedback"),
    (
        {"backward": {"codec": "topk"}, "guard": {"loss": 0.1}},
        "guard.loss: 0.1 has no effect: no codec of act",
    ),
    (
        {**LOSSY, "guard": {"residual": 9.0}},
        "guard.residual: 9.0 has no effect: no feedback keeps a residual",
    ),
    (
        {"forward": {"codec": "lossless"}, "guard": {"error": 0.1}},
        "guard.error: 0.1 has no effect: no codec loses",
    ),
    (
        {**LOSSY, "guard": {"every": 0, "error": 0.1}, "monitor": {"every": 0}},
        "guard.error: 0.1 has no effect: guard.every and monitor.every are 0",
    ),
    (
        {"forward": {"codec": {"name": "quantize", "bits": 2}}, "policy": BUDGET},
        "forward.codec.bits: 2 has no effect: policy 'budget' sets it to 8, 4",
    ),
    (
        {"forward": {"codec": "bf16", "feedback": {"name": "aqsgd", "scope": "micro_batch", "batch_dim": 1}}},
        "forward.feedback.batch_dim: 1 has no effect with scope 'micro_batch'",
    ),
]

CONTRADICTORY = [
    ({"link": {"memory_gb": 2.0}}, "link.memory_gb: 2 limits depth 'auto', but depth is 1; use depth 'auto'"),
    (
        {"recipe": "auto", "link": {"memory_gb": 2.0, "depth": 3}},
        "link.memory_gb: 2 limits depth 'auto', but",
    ),
    (
        {**LOSSY, "guard": {"every": 0, "action": "stop"}},
        "guard.action: 'stop' is not allowed with guard.every 0",
    ),
    (
        {**LOSSY, "guard": {"every": 0, "action": "relax"}},
        "guard.action: 'relax' is not allowed with guard.every",
    ),
]

USED = [
    {},
    {**LOSSY, "min_numel": 5},
    {**LOSSY, "warmup_steps": 5, "eval": "both", "min_numel": 5, "guard": {"loss": 0.1, "error": 0.1}},
    {**WITH_EF, "guard": {"residual": 9.0}, "tensors": [0]},
    {"forward": {"codec": "quantize", "feedback": "ef21"}, "state_check_every": 5},
    {"boundaries": {"1": {"forward": {"codec": "bf16"}}}, "min_numel": 5, "warmup_steps": 3},
    {"recipe": "auto", "min_numel": 5, "guard": {"residual": 9.0}, "link": {"memory_gb": 2.0}},
    {"recipe": "balanced", "warmup_steps": 5},
    {"enabled": False, "warmup_steps": 5},
    {**LOSSY, "policy": BUDGET},
    {**LOSSY, "boundaries": {"1": {"forward": {"feedback": "ef"}}}},
    {**WITH_EF, "boundaries": {"1": {"forward": {"codec": "none"}}}},
    {"forward": {"feedback": "ef"}, "boundaries": {"1": {"forward": {"codec": "topk"}}}},
]


@pytest.mark.parametrize("block, line", UNUSED, ids=[line.split(":")[0] for _, line in UNUSED])
def test_an_option_without_effect_is_noted(block, line):
    """All of these were once accepted without a word."""
    (note,) = Config(block).notes
    assert note.startswith(f"ds_compress.{line}")


@pytest.mark.parametrize("block, line", CONTRADICTORY, ids=[line.split(":")[0] for _, line in CONTRADICTORY])
def test_an_option_that_another_contradicts_is_refused(block, line):
    with pytest.raises(CompressionError) as caught:
        Config(block)
    assert str(caught.value).startswith(f"ds_compress.{line}")


@pytest.mark.parametrize("block", USED, ids=str)
def test_options_with_effect_are_not_noted(block):
    assert not Config(block).notes


def test_check_prints_the_notes(tmp_path, capsys):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"ds_compress": {**LOSSY, "state_check_every": 5}}))
    assert main(["check", str(file), "--stages", "2", "--shape", "4,64,256"]) == 0
    assert capsys.readouterr().err.startswith("ds_compress.state_check_every: 5 has no effect")


BIASED = {"name": "entropy", "bits": 2}
UNBIASED = {"name": "quantize", "bits": 2, "rounding": "stochastic"}


@pytest.mark.parametrize("feedback", ["ef", "ef21", "loco"])
def test_a_feedback_beside_a_coarse_biased_codec_of_gradients_is_warned_of(feedback):
    """From scratch such runs collapsed, and no warning came."""
    backward = {"codec": BIASED, "feedback": feedback}
    (note,) = Config({"backward": backward}).notes
    assert note.startswith(f"ds_compress.backward.feedback: '{feedback}' keeps residuals of other samples")
    assert '"feedback": "none"' in note and '"rounding": "dither"' in note
    (note,) = Config({"boundaries": {"1": {"backward": backward}}}).notes
    assert note.startswith("ds_compress.boundaries.1.backward.feedback: ")


@pytest.mark.parametrize(
    "block",
    [
        {"forward": {"codec": BIASED, "feedback": "ef"}},
        {"backward": {"codec": BIASED}},
        {"backward": {"codec": {"name": "quantize", "bits": 8}, "feedback": "ef"}},
        {"backward": {"codec": UNBIASED, "feedback": "ef"}},
    ],
)
def test_other_feedbacks_are_not_warned_of(block):
    assert not Config(block).notes
