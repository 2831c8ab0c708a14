"""Good blocks are resolved to codecs, as DeepSpeed reads their files; options without effect are noted."""

import json

import deepspeed
import pytest
import torch

from ds_compress.cli import main
from ds_compress.cli.check import message_sizes, read_block
from ds_compress.codec import CODECS, TensorSpec
from ds_compress.config import Config
from tests.support.refusals import refusal


def test_boundary_keeps_what_it_does_not_change():
    own = {"1": {"forward": {"codec": "fp16"}}}
    config = Config({"forward": {"codec": "topk"}, "backward": {"codec": "bf16"}, "boundaries": own})
    names = [(codecs.forward.name, codecs.backward.name) for codecs in map(config.in_force.codecs, range(3))]
    assert names == [("topk", "bf16"), ("fp16", "bf16"), ("topk", "bf16")]


def test_codecs_are_built_once(monkeypatch):
    """Asking for them, for settings, second packets or sample ids built all of them anew at every call."""
    built = []
    build = CODECS.build
    monkeypatch.setattr(CODECS, "build", lambda *choice: built.append(choice) or build(*choice))
    config = Config({"forward": {"codec": "bf16", "feedback": "aqsgd"}, "boundaries": {"1": {}}})
    first = config.in_force.codecs(0)
    assert config.in_force.codecs(0) is first and config.in_force.codecs(1) is not first
    before = len(built)
    for _ in range(3):
        config.settings, config.in_force.codecs(0).settings, config.prepare()
        config.in_force.has_extra_payload("forward")
    assert len(built) == before == 3 * 3 + 2, "forward, backward, first visits; checkpoints, tied weights"


@pytest.mark.parametrize("codec, times", [("none", 0), ("quantize", 1)])
def test_compilers_start_for_training_alone(codec, times, monkeypatch):
    """`ds-compress check` builds boundaries to know their messages; it once started compilers."""
    started = []
    monkeypatch.setattr("ds_compress.config.config.prepare", lambda: started.append(codec))
    config = Config({"forward": {"codec": codec}})
    message_sizes(config, 3, TensorSpec((4, 1024), torch.float32))
    assert not started
    config.prepare()
    assert len(started) == times


def test_reuse_takes_density_and_rows_of_forward():
    forward = {"codec": {"name": "topk", "density": 0.25, "rows": "tensor"}}
    backward = {"codec": {"name": "topk", "indices": "reuse"}}
    codecs = Config({"forward": forward, "backward": backward}).in_force.codecs(None)
    assert (codecs.backward.settings["density"], codecs.backward.settings["rows"]) == (0.25, "tensor")


def test_boundaries_must_exist():
    config = Config({"boundaries": {"2": {"forward": {"codec": "bf16"}}}})
    config.in_force.check_boundaries(3)
    line = refusal(config.in_force.check_boundaries, 2)
    assert 'boundaries.2: there is no such boundary; allowed: "0", "1"' in line
    assert "a pipeline of one stage has no boundary" in refusal(config.in_force.check_boundaries, 0)


def test_reuse_without_a_selection_is_said_once_with_its_path():
    reuse = {"codec": {"name": "topk", "density": 0.1, "indices": "reuse"}}
    own = {"1": {"forward": {"codec": "quantize"}}}
    config = Config({"forward": {"codec": "topk"}, "backward": reuse, "boundaries": own})
    line = "indices 'reuse' finds nothing to reuse, 'quantize' selects no entries; using 'auto'"
    assert list(config.notes) == [f"ds_compress.boundaries.1.backward.codec: {line}"]
    assert config.in_force.codecs(1).backward.settings["indices"] == "auto"
    assert config.in_force.codecs(0).backward.settings["indices"] == "reuse"


def test_a_direction_that_does_not_change_keeps_its_codec():
    """With all that it keeps: a new one would have copied the samples of aqsgd."""
    config = Config({"forward": {"codec": "fp8", "feedback": "aqsgd"}, "backward": {"codec": "bf16"}})
    forward, backward = config.in_force.codecs(0).forward, config.in_force.codecs(0).backward
    assert config.adopt({"0": {"backward": {"codec": "fp16"}}})
    assert config.in_force.codecs(0).forward is forward and config.in_force.codecs(0).backward.name == "fp16"
    assert config.adopt({"0": {"forward": {"codec": "bf16"}}})
    assert config.in_force.codecs(0).forward is not forward and backward.name == "bf16"


LOSSY = {"forward": {"codec": "quantize"}}
WITH_EF = {"forward": {"codec": "quantize", "feedback": "ef"}}
BACKWARD = {"backward": {"codec": "topk"}}
IDLE = {"codec": "none", "feedback": "ef"}
IDLE_AT_1 = {"1": {"backward": IDLE}}
TWO_BITS = {"name": "quantize", "bits": 2}
RANDOM = {"name": "randomk", "density": 0.1}
BIASED = {"name": "entropy", "bits": 2}
AQSGD = {"name": "aqsgd", "scope": "micro_batch", "batch_dim": 1}
BESIDE = "beside randomk(density=0.1), which drops all other entries"
WITH_SCOPE = "has no effect with scope 'micro_batch'"
ACCORDION = {"name": "accordion", "forward": {"bits": [8, 4]}}
SET_BY_POLICY = {"forward": {"codec": TWO_BITS}, "policy": ACCORDION}
NO_WATCH = {"guard": {"every": 0, "error": 0.1}, "monitor": {"every": 0}}

UNUSED = [
    ({"warmup_steps": 5}, "warmup_steps: 5", "no codec is set"),
    ({"eval": "both"}, "eval: 'both'", "no codec is set"),
    ({"recipe": "none", "warmup_steps": 5}, "warmup_steps: 5", "no codec is set"),
    ({**LOSSY, "tensors": [0], "min_numel": 5}, "min_numel: 5", "tensors names positions"),
    ({**BACKWARD, "eval": "compressed"}, "eval: 'compressed'", "activations"),
    ({**WITH_EF, "state_check_every": 5}, "state_check_every: 5", "no feedback mirrors its state"),
    ({"forward": IDLE}, "forward.feedback: 'ef'", "its codec is 'none'"),
    ({"tied": IDLE}, "tied.feedback: 'ef'", "its codec is 'none'"),  # nothing was said of the next three
    ({"replicas": IDLE}, "replicas.feedback: 'ef'", "its codec is 'none'"),
    ({"replicas": {"warmup_steps": 5}}, "replicas.warmup_steps: 5", "its codec is 'none'"),
    ({"boundaries": IDLE_AT_1}, "boundaries.1.backward.feedback: 'ef'", "its codec is 'none'"),
    ({**LOSSY, "guard": {"loss": 0.1, "every": 0}}, "guard.loss: 0.1", "guard.every is 0"),
    ({**WITH_EF, "guard": {"loss": 0.1}}, "guard.loss: 0.1", "activations have a feedback"),
    ({**BACKWARD, "guard": {"loss": 0.1}}, "guard.loss: 0.1", "no codec of act"),
    ({**LOSSY, "guard": {"residual": 9.0}}, "guard.residual: 9.0", "no feedback keeps a residual"),
    ({"forward": {"codec": "lossless"}, "guard": {"error": 0.1}}, "guard.error: 0.1", "no codec loses"),
    ({**LOSSY, **NO_WATCH}, "guard.error: 0.1", "guard.every and monitor.every are 0"),
    (SET_BY_POLICY, "forward.codec.bits: 2", "policy 'accordion' sets it to 8, 4"),
]
NOTED = [
    *((block, f"{option} has no effect: {reason}") for block, option, reason in UNUSED),
    ({"replicas": {"codec": RANDOM}}, f"replicas.feedback: 'none' {BESIDE}"),
    ({"forward": {"codec": "bf16", "feedback": AQSGD}}, f"forward.feedback.batch_dim: 1 {WITH_SCOPE}"),
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
    {**LOSSY, "policy": ACCORDION},
    {"replicas": {"codec": RANDOM, "feedback": "ef"}},
    {**LOSSY, "boundaries": {"1": {"forward": {"feedback": "ef"}}}},
    {**WITH_EF, "boundaries": {"1": {"forward": {"codec": "none"}}}},
    {"forward": {"feedback": "ef"}, "boundaries": {"1": {"forward": {"codec": "topk"}}}},
    # what a feedback beside a coarse biased codec of gradients is warned of is not said of these
    {"forward": {"codec": BIASED, "feedback": "ef"}},
    {"backward": {"codec": BIASED}},
    {"backward": {"codec": {"name": "quantize", "bits": 8}, "feedback": "ef"}},
    {"backward": {"codec": {**TWO_BITS, "rounding": "stochastic"}, "feedback": "ef"}},
]


@pytest.mark.parametrize("block, line", NOTED, ids=[line.split(":")[0] for _, line in NOTED])
def test_an_option_without_effect_is_noted(block, line):
    """All of these were once accepted without a word."""
    (note,) = Config(block).notes
    assert note.startswith(f"ds_compress.{line}")


@pytest.mark.parametrize("block", USED, ids=str)
def test_options_with_effect_are_not_noted(block):
    assert not Config(block).notes


def test_check_prints_the_notes(tmp_path, capsys):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"ds_compress": {**LOSSY, "state_check_every": 5}}))
    assert main(["check", str(file), "--stages", "2", "--shape", "4,64,256"]) == 0
    assert capsys.readouterr().err.startswith("ds_compress.state_check_every: 5 has no effect")


@pytest.mark.parametrize("feedback", ["ef", "ef21", "loco"])
def test_a_feedback_beside_a_coarse_biased_codec_of_gradients_is_warned_of(feedback):
    """From scratch such runs collapsed, and no warning came."""
    backward = {"codec": BIASED, "feedback": feedback}
    (note,) = Config({"backward": backward}).notes
    assert note.startswith(f"ds_compress.backward.feedback: '{feedback}' keeps residuals of other samples")
    assert '"feedback": "none"' in note and '"rounding": "dither"' in note
    (note,) = Config({"boundaries": {"1": {"backward": backward}}}).notes
    assert note.startswith("ds_compress.boundaries.1.backward.feedback: ")


@pytest.mark.parametrize("options", [None, {}, {"codec": "none", "feedback": "ef"}])
def test_nothing_is_compressed_between_replicas_unless_asked_for(options):
    assert Config({"replicas": options}).replica_codec is None


@pytest.mark.parametrize(("every", "delay"), [(30, 2), (2, 2), (1, 1)])
def test_a_round_is_applied_before_the_next_one_begins(every, delay):
    assert Config({"replicas": {"every": every, "outer": {}}}).outer.delay == delay


FILES = {
    "plain": '{"train_batch_size": 1, "ds_compress": {"seed": 1}}',
    "comments": '{// one\n# other\n"train_batch_size": 1, /* several\nlines */ "ds_compress": {"seed": 1}}',
    "trailing commas": '{"train_batch_size": 1, "ds_compress": {"seed": 1,},}',
    "no quotes": "{train_batch_size: 1\nds_compress: {seed: 1}}",
    "no braces": 'train_batch_size: 1\n"ds_compress": {"seed": 1}',
    "a word": '{"train_batch_size": 1, "ds_compress": {"seed": 1, "eval": compressed\n}}',
    "not finite": '{"train_batch_size": 1, "ds_compress": {"link": {"timeout_s": NaN\n}}}',
    "twice": '{"train_batch_size": 1, "ds_compress": {"seed": 1}, "ds_compress": {"seed": 2}}',
    "twice inside": '{"train_batch_size": 1, "ds_compress": {"seed": 1, "seed": 2}}',
    "cut": '{"train_batch_size": 1, "ds_compress": {"seed": 1',
    "empty": "",
    "list": "[1, 2]",
    "binary": "\x00\x01\udcff",
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", FILES)
def test_read_as_deepspeed_does(tmp_path, name):
    """Comments once were refused here and accepted there, keys that come twice the other way round."""
    file = tmp_path / "ds_config.json"
    file.write_text(FILES[name], errors="surrogateescape")
    try:
        theirs = deepspeed.DeepSpeedConfig(str(file))._param_dict["ds_compress"]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, AssertionError):
        assert refusal(read_block, file).startswith(f"{file}: ")
    else:
        assert read_block(file) == theirs


def test_what_the_corpus_holds(tmp_path):
    """Comments are accepted, and keys that come twice are refused with their name."""
    file = tmp_path / "ds_config.json"
    file.write_text(FILES["comments"])
    assert read_block(file) == {"seed": 1}
    file.write_text(FILES["twice inside"])
    line = refusal(read_block, file)
    assert "not JSON as DeepSpeed reads it: " in line and "['seed']" in line
