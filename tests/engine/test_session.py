"""What ds_compress puts on DeepSpeed's engine: one attribute, whose parts know nothing of each other."""

import types

from deepspeed.runtime.pipe.engine import PipelineEngine

import ds_compress  # noqa: F401  (hooks the engine)
from ds_compress.engine.mixin import CompressedEngine
from ds_compress.engine.session import Session
from tests.support.pipeline import batches, build, ds_config
from tests.support.ranks import run_ranks

PARTS = ("monitor", "guard", "policy", "depth", "replica_check", "watchdog")
SHARED = ("stage", "config")
"""What parts may know of: the traffic that they watch, and the settings in force."""

EVERYTHING = {
    "forward": {"codec": {"name": "topk", "density": 0.5}, "feedback": "ef21"},
    "backward": {"codec": {"name": "topk", "density": 0.5}},
    "policy": {"name": "accordion", "every": 2, "backward": {"density": [0.5, 0.1]}},
    "min_numel": 0,
    "guard": {"every": 2},
    "monitor": {"every": 1},
    "link": {"depth": "auto"},
}


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
        elif isinstance(each, (list, tuple, set, frozenset)):
            waiting += each
        elif isinstance(each, types.FunctionType):
            waiting += [cell.cell_contents for cell in each.__closure__ or ()]
        elif isinstance(each, types.MethodType):
            waiting.append(each.__self__)
        elif type(each).__module__.startswith("ds_compress"):
            waiting += [getattr(each, "__dict__", {})]
        elif hasattr(each, "func") and hasattr(each, "keywords"):  # functools.partial
            waiting += [each.func, *each.args, *each.keywords.values()]
    return found


def looked_at(block):
    """Our attributes of an engine and of its class, and which part reaches which other object."""
    stock, engine, data = build(2, ds_config()), build(2, ds_config(block)), batches()
    stock.train_batch(data)
    ours = []
    for _ in range(3):  # in the middle of the measurements of depth "auto"
        engine.train_batch(data)
        ours.append(sorted(vars(engine).keys() - vars(stock).keys()))
    session = engine.ds_compress
    owned = {name: getattr(session, name) for name in PARTS} | {"session": session, "engine": engine}
    known, shared = [], [getattr(session, name) for name in SHARED]
    for name in PARTS:
        found = reached(owned[name], shared)
        known += [(name, other) for other in owned if other != name and id(owned[other]) in found]
    mro = [each.__name__ for each in type(engine).__mro__]
    return ours, known, mro[: mro.index("PipelineEngine")]


def test_one_attribute_and_parts_apart():
    """Once eleven private attributes: the guard reached into the reconfiguration, and that one back."""
    for ours, known, classes in run_ranks(2, looked_at, EVERYTHING):
        assert ours == [["ds_compress"]] * 3
        assert known == []
        assert classes == ["CompressedPipelineEngine", "CompressedEngine"]


def test_the_mixin_adds_one_name_to_the_class():
    """An engine of another project may have methods of any name."""
    own = {name for name in vars(CompressedEngine) if not name.startswith("__")}
    assert own - set(dir(PipelineEngine)) == {"_AROUND"}


def test_reaching_is_found():
    class SessionPart:
        __module__ = "ds_compress.test"

    first, second, third = SessionPart(), SessionPart(), SessionPart()
    first.hook, second.parts = lambda: second, [{"third": third}]
    assert {id(second), id(third)} <= reached(first, []).keys()
    assert id(third) not in reached(first, [second])
    assert id(Session) not in reached(first, [])
