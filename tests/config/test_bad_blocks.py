"""Every bad block is one line with its JSON path; every good one is resolved to codecs."""

import json

import pytest

from ds_compress.config import Config
from ds_compress.errors import CompressionError

# (block, how the message starts, what else it says)
BAD = [
    (None, "ds_compress: None", "is not an object"),
    ([], "ds_compress: []", "is not an object"),
    ("topk", "ds_compress: 'topk'", "is not an object"),
    (True, "ds_compress: True", "is not an object"),
    ({"foward": {}}, "ds_compress.foward: unknown key", "did you mean 'forward'"),
    ({"codec": "topk"}, "ds_compress.codec: unknown key", "allowed: enabled, recipe, quality, forward"),
    ({"enabled": "yes"}, "ds_compress.enabled: 'yes'", 'allowed: true, false, "required"'),
    ({"enabled": 1}, "ds_compress.enabled: 1", 'allowed: true, false, "required"'),
    ({"forward": "topk"}, "ds_compress.forward: 'topk'", "object"),
    ({"forward": None}, "ds_compress.forward: None", "object"),
    ({"forward": {"codek": "topk"}}, "ds_compress.forward.codek: unknown key", "did you mean 'codec'"),
    (
        {"forward": {"codec": "top_k"}},
        "ds_compress.forward.codec: 'top_k' is not registered",
        "did you mean 'topk'",
    ),
    (
        {"backward": {"codec": {"name": "top_k"}}},
        "ds_compress.backward.codec.name: 'top_k' is not",
        "known: ",
    ),
    ({"forward": {"codec": {"bits": 4}}}, "ds_compress.forward.codec.name: missing", "known: "),
    ({"forward": {"codec": 4}}, "ds_compress.forward.codec: 4 is neither", "known: "),
    ({"forward": {"codec": None}}, "ds_compress.forward.codec: None is neither", "known: "),
    ({"forward": {"codec": ["topk"]}}, "ds_compress.forward.codec: ['topk'] is neither", "known: "),
    ({"forward": {"codec": {"name": ["topk"]}}}, "ds_compress.forward.codec.name: ['topk']", "known: "),
    ({"forward": {"codec": {"name": "topk", "k": 5}}}, "ds_compress.forward.codec.k: unknown key", "density"),
    (
        {"forward": {"codec": {"name": "topk", "densty": 0.1}}},
        "ds_compress.forward.codec.densty",
        "mean 'density'",
    ),
    (
        {"forward": {"codec": {"name": "topk", "density": 0}}},
        "ds_compress.forward.codec.density: 0",
        "greater than 0",
    ),
    (
        {"forward": {"codec": {"name": "topk", "density": 1.5}}},
        "ds_compress.forward.codec.density: 1.5",
        "less than",
    ),
    (
        {"forward": {"codec": {"name": "topk", "density": -0.1}}},
        "ds_compress.forward.codec.density",
        "greater than 0",
    ),
    (
        {"forward": {"codec": {"name": "topk", "density": "0.1"}}},
        "ds_compress.forward.codec.density: '0.1'",
        "number",
    ),
    (
        {"forward": {"codec": {"name": "topk", "density": float("nan")}}},
        "ds_compress.forward.codec.density: nan",
        "",
    ),
    (
        {"forward": {"codec": {"name": "topk", "indices": "bitmsk"}}},
        "ds_compress.forward.codec.indices",
        "'bitmask'",
    ),
    (
        {"forward": {"codec": {"name": "topk", "rows": "row"}}},
        "ds_compress.forward.codec.rows: 'row'",
        "'sample'",
    ),
    (
        {"forward": {"codec": {"name": "topk", "values": "bf61"}}},
        "ds_compress.forward.codec.values",
        "'bf16'",
    ),
    (
        {"forward": {"codec": {"name": "topk", "values": "topk"}}},
        "ds_compress.forward.codec.values",
        "cannot carry",
    ),
    (
        {"forward": {"codec": {"name": "topk", "indices": "reuse"}}},
        "ds_compress.forward.codec: topk(",
        "backward",
    ),
    (
        {"forward": {"codec": {"name": "quantize", "bits": 0}}},
        "ds_compress.forward.codec.bits: 0",
        "greater than",
    ),
    (
        {"forward": {"codec": {"name": "quantize", "bits": 9}}},
        "ds_compress.forward.codec.bits: 9",
        "less than",
    ),
    (
        {"forward": {"codec": {"name": "quantize", "bits": 4.5}}},
        "ds_compress.forward.codec.bits: 4.5",
        "integer",
    ),
    (
        {"forward": {"codec": {"name": "quantize", "bits": True}}},
        "ds_compress.forward.codec.bits: True",
        "integer",
    ),
    (
        {"forward": {"codec": {"name": "quantize", "group_size": 100}}},
        "ds_compress.forward.codec.group_size",
        "8",
    ),
    (
        {"forward": {"codec": {"name": "quantize", "group_size": 0}}},
        "ds_compress.forward.codec.group_size",
        "",
    ),
    (
        {"forward": {"codec": {"name": "quantize", "group_size": -8}}},
        "ds_compress.forward.codec.group_size",
        "",
    ),
    (
        {"forward": {"codec": {"name": "quantize", "scheme": "max"}}},
        "ds_compress.forward.codec.scheme: 'max'",
        "asymmetric",
    ),
    (
        {"forward": {"codec": {"name": "quantize", "scale_dtype": "fp16"}}},
        "ds_compress.forward.codec.scale_dtype",
        "bf16",
    ),
    (
        {"forward": {"codec": {"name": "quantize", "hadamard": True, "group_size": 24}}},
        "ds_compress.forward.codec.hadamard",
        "power of two",
    ),
    (
        {"forward": {"codec": {"name": "minmax", "bits": 32}}},
        "ds_compress.forward.codec.bits: 32",
        "less than",
    ),
    (
        {"forward": {"codec": {"name": "none", "bits": 4}}},
        "ds_compress.forward.codec.bits: unknown",
        "allowed: none",
    ),
    ({"forward": {"feedback": "ef2"}}, "ds_compress.forward.feedback: 'ef2' is not registered", "known: "),
    ({"forward": {"feedback": {}}}, "ds_compress.forward.feedback.name: missing", "known: "),
    (
        {"forward": {"feedback": {"name": "none", "beta": 1}}},
        "ds_compress.forward.feedback.beta: unknown key",
        "",
    ),
    (
        {
            "backward": {"codec": {"name": "topk", "indices": "reuse", "density": 0.2}},
            "forward": {"codec": "topk"},
        },
        "ds_compress.backward.codec: topk.density: 0.2",
        "0.1",
    ),
    (
        {
            "backward": {"codec": {"name": "topk", "indices": "reuse", "rows": "tensor"}},
            "forward": {"codec": "topk"},
        },
        "ds_compress.backward.codec: topk.rows: 'tensor' backward with indices 'reuse'",
        "'sample' in forward 'topk'",
    ),
    ({"boundaries": []}, "ds_compress.boundaries: []", "should be an object"),
    ({"boundaries": {"first": {}}}, "ds_compress.boundaries", "'first' is not the number of a boundary"),
    ({"boundaries": {"-1": {}}}, "ds_compress.boundaries", "'-1' is not the number of a boundary"),
    (
        {"boundaries": {"0": {"codec": "topk"}}},
        "ds_compress.boundaries.0.codec: unknown key",
        "forward, backward",
    ),
    (
        {"boundaries": {"0": {"forward": {"codec": "topq"}}}},
        "ds_compress.boundaries.0.forward.codec: 'topq'",
        "known",
    ),
    (
        {"boundaries": {"1": {"backward": {"codec": {"name": "topk", "density": 2}}}}},
        "ds_compress.boundaries.1.backward.codec.density: 2",
        "less than",
    ),
    ({"warmup_steps": -1}, "ds_compress.warmup_steps: -1", "greater than or equal to 0"),
    ({"warmup_steps": 1.5}, "ds_compress.warmup_steps: 1.5", "integer"),
    ({"warmup_epochs": -1}, "ds_compress.warmup_epochs: -1", "greater than or equal to 0"),
    ({"warmup_epochs": 1, "warmup_steps": 5}, "ds_compress.warmup_epochs: 1 came", "use one"),
    ({"warmup_steps": "100"}, "ds_compress.warmup_steps: '100'", "integer"),
    ({"eval": "on"}, "ds_compress.eval: 'on' is not allowed", "'compressed', 'uncompressed'"),
    ({"eval": False}, "ds_compress.eval: False is not allowed", "'compressed', 'uncompressed'"),
    ({"min_numel": -5}, "ds_compress.min_numel: -5", "greater than or equal to 0"),
    ({"min_numel": None}, "ds_compress.min_numel: None", "integer"),
    ({"tensors": "small"}, "ds_compress.tensors: 'small'", 'allowed: "large", or a list'),
    ({"tensors": []}, "ds_compress.tensors: []", "a list of positions"),
    ({"tensors": [0, -1]}, "ds_compress.tensors: [0, -1]", "positions from 0"),
    ({"tensors": [True]}, "ds_compress.tensors: [True]", "a list of positions"),
    ({"tensors": 0}, "ds_compress.tensors: 0", "a list of positions"),
    ({"link": "eager"}, "ds_compress.link: 'eager'", "object"),
    ({"link": {"mode": "eagre"}}, "ds_compress.link.mode: 'eagre' is not allowed", "did you mean 'eager'"),
    ({"link": {"modes": "eager"}}, "ds_compress.link.modes: unknown key", "did you mean 'mode'"),
    ({"link": {"depth": 0}}, "ds_compress.link.depth: 0", "equal to 1"),
    ({"link": {"depth": 33}}, "ds_compress.link.depth: 33", "equal to 32"),
    ({"link": {"depth": 1.5}}, "ds_compress.link.depth: 1.5", "integer"),
    (
        {"link": {"depth": 2, "mode": "blocking"}},
        "ds_compress.link.depth: 2 is not allowed with mode 'blocking'",
        "use mode 'eager'",
    ),
    ({"link": {"depth": "auot"}}, "ds_compress.link.depth: 'auot' is not allowed", "did you mean 'auto'"),
    ({"link": {"depth": True}}, "ds_compress.link.depth: True is not allowed", "integer"),
    (
        {"link": {"depth": "auto", "mode": "blocking"}},
        "ds_compress.link.depth: 'auto' is not allowed with mode 'blocking'",
        "use mode 'eager'",
    ),
    ({"link": {"memory_gb": 0}}, "ds_compress.link.memory_gb: 0", "greater than 0"),
    ({"link": {"timeout_s": 0}}, "ds_compress.link.timeout_s: 0", "equal to 1"),
    ({"link": {"checksum": 1}}, "ds_compress.link.checksum: 1", "valid boolean"),
    (
        {"checkpoint": {"state": "delta"}},
        "ds_compress.checkpoint.state: 'delta' is not allowed",
        "(removed: use 'int8')",
    ),
    ({"checkpoint": "int8"}, "ds_compress.checkpoint: 'int8'", "object"),
    ({"monitor": {"every": -1}}, "ds_compress.monitor.every: -1", "greater than or equal to 0"),
    ({"monitor": {"every": 1.0}}, "ds_compress.monitor.every: 1.0", "integer"),
    ({"monitor": 10}, "ds_compress.monitor: 10", "object"),
    (
        {"forward": {"codec": "pca"}, "backward": {"codec": "pca"}},
        "ds_compress.warmup_steps: 0",
        "codec 'pca'",
    ),
    ({"forward": {"codec": "pca"}, "warmup_steps": 5}, "ds_compress.backward.codec: 'none'", "'pca' in both"),
    (
        {"forward": {"codec": "autoencoder", "feedback": "ef"}, "backward": {"codec": "autoencoder"}},
        "ds_compress.forward.feedback: 'ef' cannot follow codec 'autoencoder'",
        "only the receiver",
    ),
    ({"backward": {"codec": "autoencoder"}}, "ds_compress.forward.codec: 'none'", "'autoencoder' in both"),
    ({"seed": -1}, "ds_compress.seed: -1", "greater than or equal to 0"),
    ({"seed": "a"}, "ds_compress.seed: 'a'", "integer"),
    ({"seed": 1, "eval": "x", "min_numel": "y"}, "ds_compress.eval: 'x'", "(and 1 more)"),
]


@pytest.mark.parametrize("block, start, inside", BAD, ids=[json.dumps(block)[:60] for block, *_ in BAD])
def test_bad_block(block, start, inside):
    with pytest.raises(CompressionError) as caught:
        Config(block)
    message = str(caught.value)
    assert message.startswith(start)
    assert inside in message
    assert "\n" not in message


def test_there_are_enough_bad_blocks():
    assert len(BAD) >= 40
