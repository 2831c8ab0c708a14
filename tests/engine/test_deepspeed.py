"""DeepSpeed's private names stand in one file, which is checked before an engine is changed; and `attach`."""

import ast
import functools
import inspect
import itertools
import subprocess
import sys

import deepspeed
import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule

import ds_compress
from ds_compress.engine import deepspeed as internals
from ds_compress.engine.deepspeed import (
    RELEASES,
    USED,
    BF16_Optimizer,
    DeepSpeedZeroOptimizer,
    check_release,
    p2p,
)
from ds_compress.errors import CompressionError
from ds_compress.message.part import Engine, Trainer
from tests.support.launch_scripts import ROOT
from tests.support.pipeline import batches, build, ds_config, same_weights, train, weights
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal

PACKAGE = ROOT / "ds_compress"
OWNERS = {
    "PipelineEngine": (PipelineEngine, DeepSpeedEngine),
    "PipelineModule": (PipelineModule,),
    "DeepSpeedZeroOptimizer": (DeepSpeedZeroOptimizer, *DeepSpeedZeroOptimizer.__bases__),
    "BF16_Optimizer": (BF16_Optimizer, *BF16_Optimizer.__bases__),
    "DeepSpeedConfig": (DeepSpeedConfig,),
    "p2p": (p2p,),
}


def listed():
    return {name for used in USED.values() for name in used.overridden + used.read + used.optional}


def private_names(*owners):
    """Names with an underscore that DeepSpeed's classes define, or give their objects."""
    trees = [ast.parse(inspect.getsource(inspect.getmodule(owner))) for owner in owners]
    found = itertools.chain.from_iterable(map(own_names, trees))
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


@functools.cache
def parsed():
    paths = PACKAGE.rglob("*.py")
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in paths}


def own_names(tree):
    """Names that a file defines or stores itself."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@pytest.mark.extended
def test_private_names_of_deepspeed_stand_in_one_file():
    """They stood in eight files: nobody could say what a release of DeepSpeed has to keep."""
    theirs = private_names(*itertools.chain.from_iterable(OWNERS.values()))
    theirs |= {name for name in listed() if name.startswith("_")}
    # `autoload` runs before DeepSpeed is imported
    early = [("autoload.py", "_config"), ("autoload.py", "_param_dict")]
    for path, tree in parsed().items():
        if path == "engine/deepspeed.py":
            continue
        own = set(own_names(tree))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or node.attr not in theirs or node.attr in own:
                continue
            whose = ast.unparse(node.value)
            # of a mixin or a subclass
            allowed = whose in ("self", "super()") or (path, node.attr) in early
            assert allowed and node.attr in listed(), f"{path}: {whose}.{node.attr}"


@pytest.mark.extended
def test_overridden_names_are_listed():
    nodes = itertools.chain.from_iterable(map(ast.walk, parsed().values()))
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    mixins = {
        "PipelineEngine": "CompressedEngine",
        "DualPipeVEngine": "CompressedDualPipeV",
        "PipelineModule": "TransformersPipeline",
        "DeepSpeedZeroOptimizer": "CompressedZeroOptimizer",
        "BF16_Optimizer": "CompressedBF16Optimizer",
    }
    for owner, name in mixins.items():
        theirs = set().union(*(dir(base) for base in OWNERS.get(owner, ())))
        own = {node.name for node in classes[name].body if isinstance(node, ast.FunctionDef)}
        assert own & theirs - {"__init__"} <= set(USED[owner].overridden), name
        assert set(USED[owner].overridden) <= own, name


def test_the_installed_release_has_what_is_listed():
    release = deepspeed.__version__.split("+")[0]
    if release not in RELEASES:
        pytest.skip(f"{release} is in no table")
    for owner, bases in OWNERS.items():
        sources = "".join(inspect.getsource(inspect.getmodule(base)) for base in bases)
        for name in USED[owner].overridden + USED[owner].read:
            assert name in sources, f"{owner}.{name}"


def refused(change, message):
    engine = build(2, ds_config())
    engine.__class__ = type("Changed", (PipelineEngine,), change)
    with pytest.raises(CompressionError, match=message):
        ds_compress.attach(engine, {})
    assert not hasattr(engine, "ds_compress")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"_INSTRUCTION_MAP": {}}, "unknown way to run ForwardPass"),
        ({"_send_tensor_meta": None}, "its PipelineEngine has no _send_tensor_meta"),
    ],
)
def test_unknown_releases_are_refused(change, message):
    run_ranks(2, refused, change, message)


def test_old_releases_are_refused(monkeypatch):
    monkeypatch.setattr(deepspeed, "__version__", "0.19.2+abc")
    line = refusal(check_release, None)
    assert "DeepSpeed 0.19.2+abc has" in line and 'pip install "deepspeed>=0.19.3"' in line


BLOCK = {"forward": {"codec": {"name": "topk", "density": 0.5}, "feedback": "ef21"}, "min_numel": 0}


PROTOCOLS = Trainer, Engine, internals.PipelineEngine
"""What this package says of the type of an engine; a type checker cannot know whether it is true."""


def compressed(block, by_hand):
    engine = build(2, ds_config(None if by_hand else block))
    if by_hand:
        ds_compress.attach(engine, block)
    with pytest.raises(CompressionError, match="compressed already"):
        ds_compress.attach(engine, block)
    data = batches()
    losses = [engine.train_batch(data).item() for _ in range(4)]
    used = itertools.chain.from_iterable((*vars(each), *each.__annotations__) for each in PROTOCOLS)
    assert not [name for name in used if not name.startswith("_") and not hasattr(engine, name)]
    sent = [channel.sent.wire_bytes for channel in engine.ds_compress.stage.sending]
    return losses, sent, weights(engine)


def test_attaching_does_what_the_hook_does():
    """There was no way without an import hook."""
    pairs = zip(*(run_ranks(2, compressed, BLOCK, by_hand) for by_hand in (True, False)), strict=True)
    for ours, theirs in pairs:
        assert ours[:2] == theirs[:2] and same_weights(ours[2], theirs[2])


@pytest.mark.extended
def test_the_hook_can_be_switched_off():
    code = (
        "import sys, torch, ds_compress; from deepspeed.runtime.engine import DeepSpeedEngine as E; "
        "print(hasattr(E.__init__, '_ds_compress'), [f for f in sys.meta_path if '_Finder' in str(type(f))])"
    )
    environment = {"DS_COMPRESS_HOOK": "0", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == "False []", done.stderr


GUARDED = {"forward": {"codec": {"name": "topk", "density": 0.5}}, "min_numel": 0, "guard": {"every": 2}}


def without_the_schedule():
    """As in 0.19.3 and 0.19.6: `_inference_schedule` came with DualPipeV."""
    if hasattr(PipelineEngine, "_inference_schedule"):
        del PipelineEngine._inference_schedule
    return train(2, ds_config(GUARDED))


@pytest.mark.extended
def test_the_guard_evaluates_where_deepspeed_has_no_schedule_for_it():
    """It ended in AttributeError at the first check of a loss in DeepSpeed 0.19.3 and 0.19.6."""
    ours, theirs = run_ranks(2, without_the_schedule), run_ranks(2, train, 2, ds_config(GUARDED))
    assert [each["losses"] for each in ours] == [each["losses"] for each in theirs]


def attached_late(block):
    engine, data = build(2, ds_config()), batches()
    engine.train_batch(data)
    engine.eval_batch(data)
    if block is not None:
        ds_compress.attach(engine, block)
    losses = [engine.train_batch(data).item() for _ in range(3)]
    return losses, [channel.sent.messages for channel in engine.ds_compress.stage.sending] if block else []


def test_attaching_to_an_engine_that_has_run():
    """Its shapes had been announced already: messages were left to DeepSpeed, and sent too early for that, so
    both ranks waited for each other without end."""
    stock, _ = run_ranks(2, attached_late, None)[0]
    losses, sent = run_ranks(2, attached_late, {"recipe": "none"})[0]
    assert losses == stock and sent == [12]
