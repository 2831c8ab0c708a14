"""Settings that change between two steps: on all ranks, on both sides, and as if they had always been so."""

import functools

import pytest
import torch

from ds_compress.simulate.boundary import SimulatedBoundary
from tests.support import pipeline
from tests.support.pipeline import Block, Skip
from tests.support.pipeline_kinds import KINDS, of
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal

STEPS = 6
TOPK = {"codec": {"name": "topk", "density": 0.25}}
QUANTIZE = {"codec": {"name": "quantize", "bits": 6, "group_size": 32}}
NONE = {"codec": "none", "feedback": "none"}


def bits(number, **feedback):
    return {"codec": {"name": "quantize", "bits": number, "group_size": 32}, **feedback}


EF = {"feedback": "ef"}
STARTS = {
    "from nothing": {},
    "codecs": {"forward": QUANTIZE, "backward": TOPK},
    "feedback": {"forward": bits(8, feedback="ef21"), "backward": {**QUANTIZE, **EF}},
    "learned": {"forward": {"codec": {"name": "lowrank", "rank": 2}}, "backward": TOPK},
}
COURSES = {
    "from nothing": {1: {"forward": QUANTIZE}, 3: {"backward": TOPK}, 5: {"forward": NONE}},
    "codecs": {
        2: {"forward": bits(2), "backward": {"codec": {"name": "topk", "density": 0.5}}},
        3: {"forward": TOPK},
        4: {"backward": {"codec": {"name": "topk", "indices": "reuse"}}},
        5: {"forward": {"codec": {"name": "topk", "density": 0.1}}},
    },
    "feedback": {
        2: {"forward": bits(3), "backward": bits(3)},
        4: {"forward": bits(3, feedback="none"), "backward": {**TOPK, **EF}},
    },
    "learned": {
        2: {"forward": {"codec": {"name": "lowrank", "rank": 4}}},
        4: {"forward": {"codec": "lossless"}, "backward": bits(4, feedback="ef")},
    },
}
COURSES = {name: {step: {"0": own} for step, own in course.items()} for name, course in COURSES.items()}
"""By steps done, what is adopted then, at boundary 0."""


def block(name, **changes):
    return {**STARTS[name], "min_numel": 0, "guard": {"every": 0}, **changes}


def trained(config, course, stages=2, folder=None, start=0, evaluates=False, **module):
    """What `train_on` returns, and what is remembered at the end."""
    engine = pipeline.build(stages, config, **module)

    def adopt(step):
        if step in course:
            engine.ds_compress.reconfigure(course[step])

    found = pipeline.train_on(engine, STEPS, folder, start, evaluates, adopt)
    return {**found, "memory": pipeline.channel_state(engine), "weights": pipeline.weights(engine)}


def trained_simulated(config, course):
    model = pipeline.simulated(pipeline.layers(), config, [4])
    (boundary,) = (layer for layer in model if isinstance(layer, SimulatedBoundary))
    data, losses, evaluated, adopted = pipeline.batches(), [], [], {}
    for step in range(STEPS):
        for direction, settings in course.get(step, {}).get("0", {}).items():
            adopted[direction] = {**adopted.get(direction, {}), **settings}
        boundary.config.adopt({"0": adopted})
        boundary.upstream.adopt()
        boundary.downstream.adopt()
        evaluated.append(pipeline.evaluate(model, pipeline.batches()))
        losses.append(pipeline.train_step(model, data))
    return losses, evaluated


@pytest.mark.parametrize("name, link, module", [
    *((name, {}, {}) for name in COURSES),
    *((name, {"mode": "blocking"}, {}) for name in ("codecs", "learned")),
    ("codecs", {"depth": 3}, {}),
    ("codecs", {}, {"dynamic_shape": True}),
])  # fmt: skip
@pytest.mark.extended(keep=1)
def test_a_pipeline_changes_as_its_simulation_does(name, link, module):
    """With evaluation before every step, which meets the new settings first."""
    config, run = pipeline.ds_config(block(name, link=link)), functools.partial(trained, **module)
    ranks = run_ranks(2, run, config, COURSES[name], 2, None, 0, True)
    expected = trained_simulated(pipeline.ds_config(block(name)), COURSES[name])
    assert [(rank["losses"], rank["evaluated"]) for rank in ranks] == [expected] * 2


@pytest.mark.extended
def test_every_boundary_and_replica():
    """Only boundary 1 of 3 stages; packets have the sizes that the same settings have from the start."""
    course = {3: {"1": {"forward": bits(2), "backward": bits(5)}}}

    def run(course, **changes):
        return run_ranks(6, trained, pipeline.ds_config(block("codecs", **changes), replicas=2), course, 3)

    ranks, blocking = run(course), run(course, link={"mode": "blocking"})
    constant = run({}, boundaries=course[3])
    for one, other, always in zip(ranks, blocking, constant):
        assert one["losses"] == other["losses"] == ranks[0]["losses"]
        assert one["sent"][3:] == always["sent"][3:]
    assert [rank["sent"][0] == rank["sent"][-1] for rank in ranks] == [True] * 2 + [False] * 4


def sent_by(config, course):
    """Bytes that this rank has sent in each step: messages of two large float tensors and a small one."""
    engine = pipeline.build(2, pipeline.ds_config(config), of(Skip))
    return pipeline.train_on(
        engine, 4, prepare=lambda step: engine.ds_compress.reconfigure(course.get(step, {}))
    )["sent"]


@pytest.mark.parametrize("link", [{}, {"mode": "blocking"}])
def test_what_begins_uncompressed_may_compress_several_tensors_later(link):
    """Nobody looks which tensors depend on parameters while all are sent as they are; from the change on they
    stayed uncompressed."""
    settings = dict.fromkeys(("forward", "backward"), QUANTIZE)
    start = {"guard": {"every": 0}, "min_numel": 64, "link": link}
    changed = run_ranks(2, sent_by, start, {2: {"0": settings}})
    always = run_ranks(2, sent_by, {**start, **settings}, {})
    for (*before, one, two), (*_, three, four) in zip(changed, always):
        assert [one, two] == [three, four] and min(before) > 3 * two


class Fewer(Skip):
    """Passes on two large tensors; a small one, too, where `gains` is true."""

    gains = True

    def forward(self, inputs):
        x, *others = (inputs, inputs / 2) if torch.is_tensor(inputs) else inputs
        x = Block.forward(self, x) + 0.1 * others[0] + sum(other.view(-1, 1, 1) for other in others[1:])
        gains = [x.mean(dim=(1, 2))] if self.gains else []
        return x if self.last else (x, x / 2, *gains)


def sent_without_gains(first, course, module):
    """Bytes that this rank has sent in each step; from step `first` on messages have one tensor less."""
    settings = {**dict.fromkeys(("forward", "backward"), QUANTIZE), "guard": {"every": 0}, "min_numel": 64}
    engine = pipeline.build(2, pipeline.ds_config(settings), of(Fewer), **module)

    def prepare(step):
        if step == first:
            Fewer.gains = False
            engine.reset_activation_shape()
        engine.ds_compress.reconfigure(course.get(step, {}))

    return pipeline.train_on(engine, 5, prepare=prepare)["sent"]


BREAK = {
    step: {"0": dict.fromkeys(("forward", "backward"), codec)} for step, codec in ((1, NONE), (3, QUANTIZE))
}


@pytest.mark.parametrize("course", [{}, BREAK], ids=["", "none for a while"])
@pytest.mark.parametrize("kind", ["floats", "mixed-dynamic", "dualpipev"])
def test_messages_of_another_number_of_tensors_are_compressed_too(kind, course):
    """Nobody looked which of them depend on parameters: that was known of messages of another number."""
    if kind not in KINDS:
        pytest.skip("this DeepSpeed has no such pipeline")
    always, later = (run_ranks(2, sent_without_gains, first, course, KINDS[kind].module) for first in (0, 2))
    assert [sent[-1] for sent in later] == [sent[-1] for sent in always]


def test_none_is_bit_equal_to_stock_whatever_it_is_called():
    course = {step: {"0": {"forward": NONE, "backward": {"codec": "lossless"}}} for step in (1, 3)}
    ranks = run_ranks(2, trained, pipeline.ds_config(block("from nothing")), course)
    for rank, stock in zip(ranks, run_ranks(2, pipeline.train, 2, pipeline.ds_config(), STEPS)):
        assert rank["losses"] == stock["losses"]
        assert pipeline.same_weights(rank["weights"], stock["weights"])


@pytest.mark.parametrize("name", COURSES)
@pytest.mark.extended(keep=1)
def test_resuming_goes_on_with_what_was_adopted(name, tmp_path):
    """From after the last but one change, whose block a resumed run does not have."""
    config = pipeline.ds_config(block(name))
    whole = run_ranks(2, trained, config, COURSES[name], 2, tmp_path)
    resumed = run_ranks(2, trained, config, COURSES[name], 2, tmp_path, 4)
    for ours, theirs in zip(resumed, whole):
        assert ours["losses"] == theirs["losses"][4:] and ours["sent"] == theirs["sent"][4:]
        assert pipeline.same_weights(ours["memory"], theirs["memory"])


def resumed_with_another_block(folder):
    log = pipeline.log_lines()
    engine = pipeline.build(2, pipeline.ds_config(block("codecs", forward=bits(7))))
    engine.load_checkpoint(str(folder), tag="step4")
    codec = str(engine.ds_compress.config.in_force.codecs(0).forward)
    return codec, [line for line in log if "start again" in line]


def test_another_block_begins_as_it_says(tmp_path):
    run_ranks(2, trained, pipeline.ds_config(block("codecs")), COURSES["codecs"], 2, tmp_path)
    (codec, log), (_, silent) = run_ranks(2, resumed_with_another_block, tmp_path)
    assert "bits=7" in codec and not silent
    assert len(log) == 1 and "settings that changed during training start again from the block" in log[0]


def forgets(folder, only_weights):
    """A checkpoint of before the change takes the change back, and so do weights alone of after it."""
    engine, data = pipeline.build(2, pipeline.ds_config(block("codecs"))), pipeline.batches()
    engine.train_batch(data)
    if not only_weights:
        engine.save_checkpoint(str(folder))
    engine.ds_compress.reconfigure({"0": {"forward": bits(2)}})
    engine.train_batch(data)
    if only_weights:
        engine.save_checkpoint(str(folder))
    changed = str(engine.ds_compress.config.in_force.codecs(0).forward)
    engine.load_checkpoint(str(folder), load_module_only=only_weights)
    engine.train_batch(data)
    return changed, str(engine.ds_compress.config.in_force.codecs(0).forward)


@pytest.mark.parametrize("only_weights", [False, True])
def test_loading_what_was_before_a_change_takes_it_back(only_weights, tmp_path):
    """What changed settings stayed when weights alone were loaded, though all other state began anew."""
    for changed, back in run_ranks(2, forgets, tmp_path, only_weights):
        assert "bits=2" in changed and "bits=6" in back


def forgotten(course):
    """Keys of what this rank remembers no more after an adoption."""
    start = block("feedback") | {"backward": {"codec": {"name": "lowrank", "rank": 2}, **EF}}
    engine, data = pipeline.build(2, pipeline.ds_config(start)), pipeline.batches()
    engine.train_batch(data)
    before = pipeline.channel_state(engine)
    engine.ds_compress.reconfigure({"0": course})
    after = pipeline.channel_state(engine)
    assert all(torch.equal(value, before[key]) for key, value in after.items())
    engine.train_batch(data)
    return sorted(before.keys() - after.keys())


LOWRANK = "0/0/lowrank.0.backward.32x2"
RANK = {"codec": {"name": "lowrank", "rank": 3}}


MIRROR, RESIDUAL = "0/0/forward/mirror/ef21", "0/0/backward/sender/ef"
FORGOTTEN = [
    # what is adopted, what the upstream rank forgets, and the downstream one
    ({"forward": bits(8)}, [], []),
    ({"forward": bits(2)}, [], []),
    ({"forward": bits(2, feedback={"name": "ef21", "dtype": "bf16"})}, [MIRROR], [MIRROR]),
    ({"forward": bits(2, feedback="ef")}, [MIRROR], [MIRROR]),
    ({"backward": RANK}, [], [LOWRANK]),
    ({"backward": {**RANK, "feedback": "none"}}, [], [RESIDUAL, LOWRANK]),
    ({"backward": {**NONE, **EF}}, [], [LOWRANK]),
]


def test_what_goes_on_and_what_begins_anew():
    for number, found in enumerate(run_ranks(2, lambda: [forgotten(course) for course, *_ in FORGOTTEN])):
        assert found == [case[1 + number] for case in FORGOTTEN]


REFUSED = {
    "0.forward.codec.bits: 9 is not allowed": {"0": {"forward": bits(9)}},
    "1.forward: 'none' is not allowed": {"1": {"forward": "none"}},
    "1: there is no such boundary": {"1": {"forward": QUANTIZE}},
    "0.backward.feedback: ef21": {"0": {"backward": bits(1, feedback="ef21")}},
}


def refusals():
    engine, data = pipeline.build(2, pipeline.ds_config(block("codecs"))), pipeline.batches()
    engine.train_batch(data)
    found = [refusal(engine.ds_compress.reconfigure, boundaries) for boundaries in REFUSED.values()]
    engine.ds_compress.stage.in_schedule = True
    found.append(refusal(engine.ds_compress.reconfigure, {}))
    engine.ds_compress.stage.in_schedule = False
    return found, [engine.train_batch(data).item() for _ in range(2)]


def test_what_cannot_be_is_refused_and_changes_nothing():
    (lines, losses), _ = run_ranks(2, refusals)
    starts = [f"ds_compress.boundaries.{start}" for start in REFUSED]
    starts.append("ds_compress: settings cannot change while a step runs")
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start), line
    assert losses == run_ranks(2, trained, pipeline.ds_config(block("codecs")), {})[0]["losses"][1:3]


LARGER = {"codec": {"name": "topk", "density": 1.0, "values": "raw", "indices": "int32"}}


def follows():
    """What the parts that look at codecs say before and after something is adopted."""
    log = pipeline.log_lines()
    settings = {"min_numel": 0, "guard": {"every": 2}, "monitor": {"every": 1}}
    engine, data, found = pipeline.build(2, pipeline.ds_config(settings)), pipeline.batches(), []
    for settings in ({}, {"0": {"forward": {**QUANTIZE, "feedback": "ef21"}, "backward": LARGER}}):
        engine.ds_compress.reconfigure(settings)
        engine.train_batch(data)
        found.append((engine.ds_compress.guard.judges(2), engine.ds_compress.replica_check.every))
    return found, [line for line in log if "makes messages larger" in line]


def test_guard_mirrors_and_monitor_follow():
    (found, log), _ = run_ranks(2, follows)
    assert found == [(False, 0), (True, 100)]
    assert len(log) == 1 and log[0].startswith("ds_compress.boundaries.0.backward.codec: topk(")
