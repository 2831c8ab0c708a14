"""What the "replicas" options allow, and what they say of the rest."""

import pytest

from ds_compress.config import Config
from ds_compress.errors import CompressionError


@pytest.mark.parametrize("codec", ["quantize", "topk", "fp8", "bf16", "entropy", "randomk", "lowrank"])
def test_codecs_without_state_are_allowed(codec):
    assert Config({"replicas": {"codec": codec}}).replica_codec.name == codec


LEARNED = {"name": "entropy", "rotate": "learned"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": LEARNED}, "replicas.codec: entropy(rotate=learned) is not allowed between replicas"),
        ({"codec": "lowrank", "every": 30}, "replicas.codec: lowrank is not allowed"),
        ({"codec": "lowrank", "feedback": "ef_mixed"}, "replicas.feedback: 'ef_mixed' is not allowed with"),
        ({"codec": "lossless"}, "replicas.codec: lossless is not allowed"),
        (
            {"codec": {"name": "topk", "indices": "reuse"}},
            "replicas.codec: topk(indices=reuse) is not allowed",
        ),
        ({"codec": "quantise"}, "replicas.codec: 'quantise' is not registered (did you mean 'quantize'?)"),
        ({"codec": "quantize", "feedback": "ef21"}, "replicas.feedback: 'ef21' is not allowed"),
        ({"codec": "quantize", "feedback": "aqsgd"}, "replicas.feedback: 'aqsgd' is not allowed"),
        ({"codec": "quantize", "every": 0}, "replicas.every: 0 is not allowed"),
        ({"codec": LEARNED, "every": 30}, "replicas.codec: entropy(rotate=learned) is not allowed between"),
        ({"every": 30, "parameters": 4}, "replicas.parameters: 4 is not allowed with every above 1"),
        ({"outer": {}, "warmup_steps": 9}, "replicas.warmup_steps: 9 is not allowed with every above 1"),
        ({"every": 30, "outer": {"momentum": 1.0}}, "replicas.outer.momentum: 1.0 is not allowed"),
        (
            {"every": 30, "outer": {"delay": 31}},
            "replicas.outer.delay: 31 is not allowed with every 30; allowed: integers from 0 to 30",
        ),
        (
            {"every": 30, "outer": {"delayed": False}},
            "replicas.outer.delayed: unknown key (did you mean 'delay'?)",
        ),
        ({"parameters": 4}, "replicas.parameters: 4 is not allowed with codec 'none'"),
        (
            {"codec": "quantize", "parameters": 5},
            "replicas.parameters: 5 is not allowed; allowed: 'none', 4, 8",
        ),
        ({"bucket_mb": 0}, "replicas.bucket_mb: 0 is not allowed"),
        ("quantize", "replicas: 'quantize' is not allowed: should be an object"),
    ],
    ids=str,
)
def test_others_are_refused_with_their_place(options, words):
    with pytest.raises(CompressionError) as error:
        Config({"replicas": options})
    assert str(error.value).startswith(f"ds_compress.{words}")


@pytest.mark.parametrize("options", [None, {}, {"codec": "none", "feedback": "ef"}])
def test_nothing_is_compressed_unless_asked_for(options):
    assert Config({"replicas": options}).replica_codec is None


@pytest.mark.parametrize(("every", "delay"), [(30, 2), (2, 2), (1, 1)])
def test_a_round_is_applied_before_the_next_one_begins(every, delay):
    assert Config({"replicas": {"every": every, "outer": {}}}).outer.delay == delay
