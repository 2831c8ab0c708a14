"""Good blocks are resolved to codecs."""

import json

import pytest
import torch

from ds_compress.cli.check import message_sizes
from ds_compress.codec import CODECS, TensorSpec
from ds_compress.config import Config
from ds_compress.errors import CompressionError


def test_documented_block_is_accepted():
    block = json.loads("""{
      "forward":  {"codec": {"name": "quantize", "bits": 4, "group_size": 128, "hadamard": true}},
      "backward": {"codec": {"name": "topk", "density": 0.1, "indices": "reuse"}, "feedback": "none"},
      "boundaries": {"0": {"forward": {"codec": "none"}}},
      "warmup_steps": 100, "eval": "compressed",
      "min_numel": 4096, "link": {"mode": "eager"}, "monitor": {"every": 10}, "seed": 1234
    }""")
    config = Config(block)
    assert config.codecs(0).forward.name == "none"
    assert config.codecs(1).forward.settings["bits"] == 4
    json.dumps(config.settings)


def test_boundary_keeps_what_it_does_not_change():
    config = Config(
        {
            "forward": {"codec": {"name": "topk", "density": 0.2}},
            "backward": {"codec": "bf16"},
            "boundaries": {"1": {"forward": {"codec": "fp16"}}},
        }
    )
    assert [config.codecs(b).forward.name for b in (0, 1, 2)] == ["topk", "fp16", "topk"]
    assert [config.codecs(b).backward.name for b in (0, 1, 2)] == ["bf16"] * 3


def test_codecs_are_built_once(monkeypatch):
    """Asking for them, for settings, second packets or sample ids built all of them anew at every call."""
    built = []
    build = CODECS.build
    monkeypatch.setattr(CODECS, "build", lambda *choice: built.append(choice) or build(*choice))
    config = Config({"forward": {"codec": "bf16", "feedback": "aqsgd"}, "boundaries": {"1": {}}})
    first = config.codecs(0)
    assert config.codecs(0) is first and config.codecs(1) is not first
    before = len(built)
    for _ in range(3):
        config.settings, config.has_extra_payload("forward"), config.codecs(0).settings, config.prepare()
    assert len(built) == before == 3 * 3, "forward, backward, first visits"


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


def test_reuse_takes_the_density_of_forward():
    codecs = Config(
        {
            "forward": {"codec": {"name": "topk", "density": 0.25}},
            "backward": {"codec": {"name": "topk", "indices": "reuse"}},
        }
    ).codecs(None)
    assert codecs.backward.settings["density"] == 0.25


def test_boundaries_must_exist():
    config = Config({"boundaries": {"2": {"forward": {"codec": "bf16"}}}})
    config.check_boundaries(3)
    with pytest.raises(CompressionError, match=r'boundaries.2: there is no such boundary; allowed: "0", "1"'):
        config.check_boundaries(2)
    with pytest.raises(CompressionError, match="a pipeline of one stage has no boundary"):
        config.check_boundaries(0)


def test_reuse_without_a_selection_is_said_once_with_its_path():
    reuse = {"codec": {"name": "topk", "density": 0.1, "indices": "reuse"}}
    config = Config(
        {
            "forward": {"codec": "topk"},
            "backward": reuse,
            "boundaries": {"1": {"forward": {"codec": "quantize"}}},
        }
    )
    assert list(config.notes) == [
        "ds_compress.boundaries.1.backward.codec: indices 'reuse' finds nothing to reuse, "
        "'quantize' selects no entries; using 'auto'"
    ]
    assert config.codecs(1).backward.settings["indices"] == "auto"
    assert config.codecs(0).backward.settings["indices"] == "reuse"


def test_a_direction_that_does_not_change_keeps_its_codec():
    """With all that it keeps: a new one would have copied the samples of aqsgd."""
    config = Config({"forward": {"codec": "fp8", "feedback": "aqsgd"}, "backward": {"codec": "bf16"}})
    forward, backward = config.codecs(0).forward, config.codecs(0).backward
    assert config.adopt(config.changed({"boundaries": {"0": {"backward": {"codec": "fp16"}}}}))
    assert config.codecs(0).forward is forward and config.codecs(0).backward.name == "fp16"
    assert config.adopt(config.changed({"boundaries": {"0": {"forward": {"codec": "bf16"}}}}))
    assert config.codecs(0).forward is not forward and backward.name == "bf16"
