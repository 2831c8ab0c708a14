"""Every bad block is one line with its JSON path; every good one is resolved to codecs."""

from functools import partial

import pytest

from ds_compress.config import Config
from ds_compress.registry.options import REMOVED
from tests.config.test_generated_blocks import put
from tests.support.refusals import refusal

topk, quantize, aqsgd = (partial(dict, name=name) for name in ("topk", "quantize", "aqsgd"))
FIRST = ".feedback.first_visit: "
BAD = [
    ("foward", {}, ": unknown key", "did you mean 'forward'"),
    ("enabled", "yes", ": 'yes'", "allowed: 'required', or true or false"),
    ("forward.codec", "top_k", ": 'top_k' is not registered", "did you mean 'topk'"),
    ("forward.codec", {"bits": 4}, ".name: missing", "known: "),
    ("forward.codec", topk(indices="reuse"), ": topk(", "backward"),
    ("forward.codec", quantize(bits=4.5), ".bits: 4.5", "integer"),
    ("eval", "on", ": 'on' is not allowed", "'compressed', 'uncompressed'"),
    ("tensors", "small", ": 'small'", "allowed: 'large', or a list"),
    ("tensors", [0, -1], ".1: -1 is not allowed", "greater than or equal to 0"),
    ("link", {"depth": 2, "mode": "blocking"}, ".depth: 2 is not allowed with mode 'blocking'", "use mode"),
    ("link.depth", "auot", ": 'auot' is not allowed", "did you mean 'auto'"),
    ("link.connections", "x", ": 'x'", "allowed: 'auto'"),
    ("link", {"connections": 2, "mode": "blocking"}, ".connections: 2 is not allowed with mode", "use mode"),
    ("link", {"connections": "auto", "mode": "blocking"}, ".connections: 'auto' is not allowed", "use mode"),
    # words of release 0.3 are refused with what to use: none is misread, none is guessed at
    ("forward.codec", quantize(hadamard="auto"), ".hadamard: 'auto' is not allowed", "a valid boolean"),
    ("feedback", "ef", ": unknown key (it belongs in 'forward', 'backward', 'tied', 'replicas')", ""),
    ("guard.action", "relax", ": 'relax' is not allowed (removed: use 'stop'", "allowed: 'warn', 'stop'"),
    # recipes
    *(
        ("recipe", wrong, f": {wrong!r} is not a recipe", "; known: ")
        for wrong in ("quant4_9", 5, "../recipes/topk10", "topk10.json")
    ),
    ("recipe", "topk_10", ": 'topk_10' is not a recipe (did you mean 'topk10'?)", "topk10"),
    ("recipe", "autos", ": 'autos' is not a recipe (did you mean 'auto'?)", ""),
    # replicas
    ("replicas", {"codec": "lowrank", "every": 30}, ".codec: lowrank is not allowed", ""),
    ("replicas", {"codec": "lowrank", "feedback": "ef_mixed"}, ".feedback: 'ef_mixed' is not allowed", ""),
    ("replicas", {"codec": "lossless"}, ".codec: lossless is not allowed", ""),
    ("replicas", {"codec": topk(indices="reuse")}, ".codec: topk(indices=reuse) is not allowed", ""),
    ("replicas", {"codec": "quantize", "feedback": "ef21"}, ".feedback: 'ef21' is not allowed", ""),
    ("replicas", {"every": 30, "parameters": 4}, ".parameters: 4 is not allowed with every above 1", ""),
    ("replicas", {"outer": {}, "warmup_steps": 9}, ".warmup_steps: 9 is not allowed with every above 1", ""),
    ("replicas", {"every": 30, "outer": {"delay": 31}}, ".outer.delay: 31 is not allowed", "from 0 to 30"),
    ("replicas", {"parameters": 4}, ".parameters: 4 is not allowed with codec 'none'", ""),
    ("replicas.parameters", 5, ": 5 is not allowed; allowed: 'none', 4, 8", ""),
    *(
        ("replicas", {"codec": codec, **more}, ".codec: topk", "bits per value, DeepSpeed 32;")
        for codec in (topk(density=0.6, indices="int32"), topk(density=0.9, values="bf16", indices="int32"))
        for more in ({"feedback": "ef"}, {"every": 30})
    ),
    # feedbacks
    ("forward.feedback", {"name": "ef", "scope": "sample"}, ".scope: 'sample' is not allowed", ""),
    ("backward", {"feedback": "aqsgd"}, ".feedback: 'aqsgd' is not for this direction", ""),
    *(
        ("forward", {"codec": "quantize", "feedback": aqsgd(first_visit=first)}, FIRST + line, "")
        for first, line in (
            ("lossless", "'lossless' cannot send first visits"),
            ({"name": "lowrank", "rank": 2}, "'lowrank' cannot send first visits"),
            ({"name": "entropy", "rank": 2}, "'entropy' cannot send first visits"),
            (topk(indices="reuse"), "'topk' cannot send first visits"),
            ("quantise", "'quantise' is not registered (did you mean 'quantize'"),
            (4, "4 is neither a name nor an object"),
        )
    ),
]
"""JSON path, what is there, how the message goes on after the path, what else it says; options that a codec
refuses by itself: codecs/test_codecs.py."""

AUTO = {"recipe": "auto"}
MEMORY = {"link": {"memory_gb": 2.0}}
DIFFERENT = {"density": 0.2}, {"rows": "tensor"}
ROWS = ".backward.codec: topk.rows: 'tensor' backward with indices 'reuse'"
LOSSY = {"forward": {"codec": "quantize"}}
FORWARD = {"forward": {"codec": "topk"}}
OTHER_DENSITY, OTHER_ROWS = ({"codec": topk(indices="reuse", **other)} for other in DIFFERENT)
PER_BATCH = {"forward": {"feedback": aqsgd(scope="micro_batch")}}
OTHER_IDS = {"forward": {"feedback": "aqsgd"}, "boundaries": {"1": PER_BATCH}}
SPLIT = {"codec": topk(indices="reuse"), "feedback": "ef_mixed"}
BAD_BLOCKS = [
    (None, ": None", "is not an object"),
    ({**FORWARD, "backward": OTHER_DENSITY}, ".backward.codec: topk.density: 0.2", "0.1"),
    ({**FORWARD, "backward": OTHER_ROWS}, ROWS, "'sample' in forward 'topk'"),
    ({**FORWARD, "backward": SPLIT}, ".backward.feedback: 'ef_mixed' cannot split", ""),
    (OTHER_IDS, ".boundaries.1.forward.feedback: {'name': 'aqsgd',", "than ds_compress.forward.feedback;"),
    ({"warmup_epochs": 1, "warmup_steps": 5}, ".warmup_epochs: 1 came", "use one"),
    ({"seed": 1, "eval": "x", "min_numel": "y"}, ".eval: 'x'", "(problems in all: 2)"),
    (MEMORY, ".link.memory_gb: 2 limits depth 'auto', but depth is 1", "use depth 'auto'"),
    ({**AUTO, "link": {"memory_gb": 2.0, "depth": 3}}, ".link.memory_gb: 2 limits depth 'auto', but", ""),
    ({**LOSSY, "guard": {"every": 0, "action": "stop"}}, ".guard.action: 'stop'", "with guard.every 0"),
    ({"quality": "safe"}, ".quality: 'safe' is not allowed with no recipe 'auto'; allowed: a", ""),
    ({**AUTO, "quality": "good"}, ".quality: 'good'", ""),
    ({**AUTO, "forward": {"codec": "bf16"}}, ".forward:", "is not allowed with recipe 'auto'"),
    ({**AUTO, "boundaries": {"0": {}}}, ".boundaries:", "is not allowed with recipe 'auto'"),
    ({**AUTO, "link": {"mode": "blocking"}}, ".link.mode: 'blocking'", "is not allowed with"),
    ({**AUTO, "policy": "accordion"}, ".policy: 'accordion'", "is not allowed with recipe 'auto'"),
]


@pytest.mark.parametrize("path, value, start, inside", BAD)
def test_bad_value(path, value, start, inside):
    test_bad_block(put({}, tuple(path.split(".")), value), f".{path}{start}", inside)


@pytest.mark.parametrize("block, start, inside", BAD_BLOCKS)
def test_bad_block(block, start, inside):
    message = refusal(Config, block)
    assert message.startswith(f"ds_compress{start}") and inside in message


@pytest.mark.parametrize("word", [word for word in REMOVED if word.isidentifier()])
def test_what_was_removed_is_refused_with_what_to_use(word):
    line = refusal(Config, {"replicas": {word: 1}})
    assert line.startswith(f"ds_compress.replicas.{word}: unknown key (removed: {REMOVED[word]}); allowed: ")
