"""What ds_compress puts on DeepSpeed's engine: one attribute, whose parts know nothing of each other."""

import re
import types
from collections import deque

import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

import ds_compress  # noqa: F401  (hooks the engine)
from ds_compress.config.replicas import STORE
from ds_compress.engine.mixin import CompressedEngine
from tests.support.launch_scripts import ROOT
from tests.support.pipeline import batches, build, ds_config
from tests.support.ranks import run_ranks
from tests.support.replicas import tied_layers, wide_layers

SHARED = ("stage", "config")
"""What parts may know of: the traffic that they watch, and the settings in force."""

HOLDERS = ("gradients", "tied")
"""What holds the engine, because DeepSpeed calls it; docs/architecture.md names it."""

REPLICAS = {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef"}
EVERYTHING = {
    "forward": {"codec": {"name": "topk", "density": 0.5}, "feedback": "ef21"},
    "backward": {"codec": {"name": "topk", "density": 0.5}},
    "policy": {"name": "accordion", "every": 2, "backward": {"density": [0.5, 0.1]}},
    "min_numel": 0,
    "guard": {"every": 2},
    "monitor": {"every": 1},
    "link": {"depth": "auto", "connections": "auto"},
}

SHARED_KEYS = "min_numel", "guard", "monitor", "link"
AUTO = {"recipe": "auto", **{key: EVERYTHING[key] for key in SHARED_KEYS}}


def reached(start, stops):
    """Return all objects that `start` refers to without passing `stops`, classes and modules left out."""
    found, waiting = {}, [start]
    while waiting:
        each = waiting.pop()
        if id(each) in found or isinstance(each, (type, types.ModuleType)):
            continue
        found[id(each)] = each
        if each is not start and any(each is stop for stop in stops):
            continue
        if isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset, deque)):
            waiting += each
        elif isinstance(each, types.FunctionType):
            waiting += [cell.cell_contents for cell in each.__closure__ or ()]
        elif isinstance(each, types.MethodType):
            waiting.append(each.__self__)
        elif type(each).__module__.startswith("ds_compress"):
            slots = (name for base in type(each).__mro__ for name in getattr(base, "__slots__", ()))
            waiting += [getattr(each, "__dict__", {}), *(getattr(each, name, None) for name in slots)]
        elif hasattr(each, "func") and hasattr(each, "keywords"):  # functools.partial
            waiting += [each.func, *each.args, *each.keywords.values()]
    return found


def known(engine):
    """Which part of a session knows which other one, the session, its message path, or the engine."""
    session = engine.ds_compress
    names = {id(value): name for name, value in reversed(vars(session).items())}
    parts = {names.get(id(part), type(part).__name__): part for part in (*session.parts, session.watchdog)}
    others = {**parts, "session": session, "path": session.path, "engine": engine}
    stops, found = [*(getattr(session, name) for name in SHARED), *others.values()], set()
    for name, part in parts.items():
        objects = reached(part, stops)
        found |= {(name, other) for other in others if other != name and id(others[other]) in objects}
    return sorted(parts), found


def looked_at(block):
    """Our attributes of an engine and of its class, its parts, and which of them knows which other object."""
    stock, engine, data = build(2, ds_config()), build(2, ds_config(block)), batches()
    stock.train_batch(data)
    ours, found = [], set()
    for _ in range(4):  # with the measurements of depth "auto" in their middle
        engine.train_batch(data)
        ours.append(sorted(vars(engine).keys() - vars(stock).keys()))
        parts, of_batch = known(engine)
        found |= of_batch
    mro = [each.__name__ for each in type(engine).__mro__]
    return ours, mro[: mro.index("PipelineEngine")], parts, found, type(engine.ds_compress.depth).__name__


@pytest.mark.parametrize("block, depth", [(EVERYTHING, "DepthController"), (AUTO, "AutoController")])
def test_one_attribute_and_parts_apart(block, depth):
    """Once eleven private attributes: the guard reached into the reconfiguration, and that one back."""
    for ours, classes, parts, found, controller in run_ranks(2, looked_at, block):
        assert ours == [["ds_compress"]] * 4
        assert classes == ["CompressedPipelineEngine", "CompressedEngine"]
        assert parts == ["connections", "depth", "guard", "monitor", "policy", "replica_check", "watchdog"]
        assert found == set()
        assert controller == depth


def known_in(block, stages, layers):
    replicas = torch.distributed.get_world_size() // stages
    return known(build(stages, ds_config(block, replicas=replicas), layers()))


@pytest.mark.parametrize(
    "part, block, ranks, stages, layers",
    [
        ("gradients", {"replicas": REPLICAS}, 2, 1, wide_layers),
        ("OuterTraffic", {"replicas": {**REPLICAS, "every": 9, "outer": {}}}, 1, 1, wide_layers),
        ("tied", {"tied": REPLICAS}, 2, 2, tied_layers),
    ],
)
def test_few_parts_hold_the_engine(part, block, ranks, stages, layers, monkeypatch):
    """DeepSpeed calls them to average: docs/architecture.md said that no part does."""
    monkeypatch.setenv(STORE, "127.0.0.1:9")  # is not connected to before the first step
    for parts, found in run_ranks(ranks, known_in, block, stages, layers):
        assert part in parts
        assert found == ({(part, "engine")} if part in HOLDERS else set())
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.search(r"one exception:\n(.*?) hold the engine", page, re.DOTALL).group(1)
    assert re.findall(r"`(\w+)`", named) == list(HOLDERS)


def test_the_mixin_adds_one_name_to_the_class():
    """An engine of another project may have methods of any name."""
    own = {name for name in vars(CompressedEngine) if not name.startswith("__")}
    assert own - set(dir(PipelineEngine)) == {"_AROUND"}
