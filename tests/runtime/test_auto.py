"""`"recipe": "auto"`: as the baseline until the choice, then by the block that it prints, on all ranks."""

import contextlib
import functools
import io
import json
import math
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import ForwardPass

from ds_compress.planning.step_time import Workload
from ds_compress.runtime import auto, stage_profile
from ds_compress.transport.probe import LinkMeasurement
from tests.support import pipeline_kinds, programs
from tests.support.engine_subclasses import Preference
from tests.support.pipeline import batches, build, ds_config, printed_lines, train_on
from tests.support.ranks import run_ranks

FAR = LinkMeasurement(incoming=1e5, latency=0.01)  # slower than every processor, however busy
FREE = LinkMeasurement(incoming=1e15, latency=0.0)
STEPS = 7
CHOSEN = 3  # steps done when it is chosen
SHAPE = (64, 32)


def block(quality="balanced", **changes):
    return {"recipe": "auto", "quality": quality, "min_numel": 0, "guard": {"every": 0}, **changes}


def knows(name):
    """A rank that knows the errors of `name` and of sending all as it is, and holds them for none."""

    def error(key):
        return 0.0 if f": {name}, " in key or ": none, " in key else math.inf

    return lambda row: {key: error(key) if key.endswith("error") else row[key] for key in row}


def trained(config, found=FAR, stages=2, folder=None, start=0, evaluates=False, says=None):
    """Train with `auto`; return losses, output and final settings.

    Args:
        start: the step to load from `folder`; 0 saves every step there.
        says: by rank, a change to the row that it measured.
    """
    stage_profile.probe = lambda sender, receiver, first: found
    evaluate, printed = auto.evaluate_candidates, io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine = build(stages, config)
        change = (says or {}).get(engine.global_rank, lambda row: row)
        auto.evaluate_candidates = lambda *args: change(evaluate(*args))
        losses = train_on(engine, STEPS, folder, start, evaluates, shape=SHAPE)["losses"]
    config = engine.ds_compress.config
    return {
        "losses": losses,
        "printed": printed.getvalue(),
        "adopted": config.adopted,
        "depth": engine.ds_compress.depth.now,
        "codecs": [config.in_force.codecs(number).settings for number in range(stages - 1)],
    }


def run(config, ranks=2, **options):
    return run_ranks(ranks, functools.partial(trained, **options), config)


def names(result):
    return [[own[direction]["name"] for direction in ("forward", "backward")] for own in result["codecs"]]


def pasted(result):
    (line,) = (line for line in result["printed"].splitlines() if line.startswith('"ds_compress": '))
    return json.loads(f"{{{line}}}")["ds_compress"]


def trained_stock():
    engine, data = build(2, ds_config()), batches(shape=SHAPE)
    return [engine.train_batch(data).item() for _ in range(STEPS)]


@pytest.fixture(scope="module")
def stock():
    """Losses of DeepSpeed alone."""
    return run_ranks(2, trained_stock)[0]


def test_it_trains_as_stock_until_the_choice_and_then_as_the_block_that_it_prints(stock):
    first, second = run(ds_config(block()), evaluates=True)
    assert (first["losses"], first["adopted"]) == (second["losses"], second["adopted"])
    assert second["printed"].count("recipe auto, quality") == 0
    assert "none" not in names(first)[0]
    found = pasted(first)
    assert "recipe" not in found and found["warmup_steps"] == CHOSEN and found["min_numel"] == 0
    assert first["losses"] == run(ds_config(found))[0]["losses"]
    assert first["losses"][:CHOSEN] == stock[:CHOSEN] and first["losses"][CHOSEN:] != stock[CHOSEN:]


def takes(seconds):
    """A rank whose forward pass takes so long, and its backward pass twice that."""
    quartiles = {"forward lower": seconds, "forward upper": seconds}
    return lambda row: {**row, **quartiles, "forward": seconds, "backward": 2 * seconds}


def test_it_says_when_stages_are_uneven_and_how_to_cut_them():
    """Where one GPU was slower than the others, nothing said so. The block has the connections that it chose:
    with "auto" again, each start would probe for a minute."""
    says = {0: takes(0.03), 1: takes(0.01)}
    first, second = run(ds_config(block(link={"connections": "auto"})), says=says)
    assert "stages, for ds-compress advise: --forward-ms 30,10 --backward-ms 60,20" in first["printed"]
    assert (
        "stages are uneven: a forward pass of stage 0 takes 3.00 times as long as stage 1; to balance them, "
        "cut its layers at [0, 2, 8] (partition_method, docs/auto.md)\n"
    ) in first["printed"]
    assert pasted(first)["link"]["connections"] == 1 and "stages" not in second["printed"]


def lines(forward, spread=1.0, **module):
    both = forward, tuple(2 * seconds for seconds in forward)
    rows = [
        {"stage": float(stage), "forward lower": seconds / spread, "forward upper": seconds * spread}
        for stage, seconds in enumerate(forward)
    ]
    return auto.format_stages(Workload(*both, 4, 0.001), rows, SimpleNamespace(**module))


def test_what_is_said_of_stages():
    (even,) = lines((0.02, 0.0225), parts=[0, 4, 8])
    assert even.endswith("--forward-ms 20,22.5 --backward-ms 40,45 --step-ms 1")
    # of a Transformers model, "stages" counts its layers without embedding and head
    _, counted = lines((0.01, 0.02), parts=[0, 8, 15], stage_layers=[6, 6])
    assert counted.endswith('stage 1 takes 2.00 times as long as stage 0; to balance them: "stages": [8, 4]')
    assert lines((0.01, 0.012), parts=[0, 2, 4])[1].endswith("; no other cut is more even")
    for module in ({}, {"parts": [0, 0, 4]}, {"parts": [0, 4]}):  # a module that cuts itself
        assert lines((0.01, 0.02), **module)[1].endswith("times as long as stage 0")


def test_equal_stages_on_a_busy_machine_are_not_called_uneven():
    """Beside other programs, passes of equal stages vary: medians of two batches differed by 1.3 to 3 times,
    in more than half of the choices, and `auto` proposed to cut the layers otherwise."""
    assert len(lines((0.02, 0.03), spread=1.2, parts=[0, 4, 8])) == 1
    assert len(lines((0.02, 0.03), spread=1.1, parts=[0, 4, 8])) == 2  # really slower


def overflowed(config):
    """One rank's messages are useless the first time."""
    stock, asked = auto.is_informative, []

    def is_informative(messages):
        asked.append(messages)
        return stock(messages) and len(asked) > 1

    auto.is_informative = is_informative
    return trained(config)


def test_messages_that_tell_nothing_are_looked_at_again(stock):
    """A gradient that overflowed once had left everything uncompressed for good."""
    whole = [torch.ones(3), torch.ones(3, dtype=torch.int64)]
    assert auto.is_informative({(0, "forward"): {0: whole}, (0, "backward"): {0: whole}})
    for value in (0.0, math.inf, math.nan):
        messages = {(0, "forward"): {0: whole, 1: whole}, (0, "backward"): {0: [torch.full((3,), value)]}}
        assert not auto.is_informative(messages)
        messages = {(0, "forward"): {0: whole, 1: whole}, (0, "backward"): {0: [whole[0] * value], 1: whole}}
        assert auto.is_informative(messages) and all([*own] == [1] for own in messages.values())
    first, second = run_ranks(2, overflowed, ds_config(block()))
    assert first["adopted"] == second["adopted"] and "none" not in names(first)[0]
    later = 2 * CHOSEN
    assert first["losses"][:later] == stock[:later] and first["losses"][later:] != stock[later:]


def chosen_after_weights_were_loaded(folder, before):
    """The codec chosen where the first two attempts after the load learn nothing; `before`: whether each
    attempt of before did."""
    stage_profile.probe = lambda sender, receiver, first: FAR
    stock, tells = auto.is_informative, before
    auto.TRIES, auto.is_informative = 3, lambda messages: stock(messages) and (not tells or tells.pop(0))
    engine, data = build(2, ds_config(block())), batches(shape=SHAPE)
    engine.save_checkpoint(str(folder))
    config = engine.ds_compress.config
    if not before:
        config.gave_up = True  # as after messages without an error of any candidate
    for _ in range(3 * len(before)):
        engine.train_batch(data)
    engine.load_checkpoint(str(folder), load_module_only=True)
    tells[:] = [False, False]
    for _ in range(3 * CHOSEN):
        engine.train_batch(data)
    return [config.in_force.codecs(0).forward.name, len(tells)]


@pytest.mark.parametrize("before", [[], [False, False, False]], ids=["gave up", "all attempts made"])
def test_a_choice_begins_anew_where_weights_alone_are_loaded(before, tmp_path):
    """Attempts of before the load counted, and one that had given up never chose."""
    first, second = run_ranks(2, chosen_after_weights_were_loaded, tmp_path, before)
    assert first == second and first[0] != "none" and first[1] == 0


@pytest.mark.parametrize("quality, link, connections", [("lossless", FAR, 1), ("aggressive", FREE, 2)])
def test_lossless_and_a_free_link_are_stock_to_the_end(quality, link, connections, stock):
    """Over several connections DeepSpeed, which has one, was said to take a tenth of what it takes."""
    result, _ = run(ds_config(block(quality, link={"connections": connections})), found=link)
    assert ("DeepSpeed's step is predicted over 2 connections" in result["printed"]) == (connections == 2)
    assert result["losses"] == stock
    assert {name for both in names(result) for name in both} <= {"none", "lossless"}
    assert result["adopted"] and "<- chosen" in result["printed"]
    if link is FREE:
        assert names(result) == [["none", "none"]]
        assert "no setting of quality aggressive makes a step 5 % faster" in result["printed"]


def test_ranks_that_measured_otherwise_choose_alike():
    """One rank of four holds all but one setting for too lossy: nobody uses another one."""
    results = run(ds_config(block(), replicas=2), ranks=4, says={3: knows("quantize 6")})
    assert len({json.dumps(result["adopted"], sort_keys=True) for result in results}) == 1
    assert all(names(result) == [["quantize", "quantize"]] for result in results)
    assert results[0]["codecs"][0]["forward"]["bits"] == 6
    assert len({tuple(result["losses"]) for result in results}) == 1


@pytest.mark.extended
def test_boundaries_choose_for_themselves():
    """The rank in the middle knows what is mild at the one and at the other."""

    def middle(row):
        before, after = knows("quantize 6")(row), knows("bf16")(row)
        return {key: (before if key.startswith("before") else after).get(key) for key in row}

    config = ds_config(block("aggressive"))
    results = run(config, ranks=3, stages=3, says={1: middle})
    assert names(results[0]) == [["quantize", "quantize"], ["bf16", "bf16"]]
    assert len({tuple(result["losses"]) for result in results}) == 1
    found = pasted(results[0])
    assert len(found["boundaries"]) == 1
    assert run(ds_config(found), ranks=3, stages=3)[0]["losses"] == results[0]["losses"]


def test_a_resumed_run_goes_on_with_what_was_chosen(tmp_path):
    whole = run(ds_config(block()), folder=tmp_path)
    # what would be measured now would lead to another choice
    now = {"found": FREE, "folder": tmp_path, "says": dict.fromkeys((0, 1), knows("none"))}
    for start in (CHOSEN, CHOSEN + 2):
        resumed = run(ds_config(block()), start=start, evaluates=True, **now)
        for before, after in zip(whole, resumed, strict=True):
            assert after["losses"] == before["losses"][start:] and after["adopted"] == before["adopted"]
            assert "recipe auto, quality" not in resumed[0]["printed"]
    other = run(ds_config(block("lossless")), start=4, found=FREE, folder=tmp_path)[0]
    assert "recipe auto, quality lossless" in other["printed"]


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.extended
def test_a_run_resumed_before_the_choice_makes_it_when_it_would_have_anyway(warmup, tmp_path):
    """It counted three steps from where it was resumed, whatever had been done before."""
    config, says = ds_config(block(warmup_steps=warmup)), dict.fromkeys((0, 1), knows("quantize 6"))
    whole = run(config, folder=tmp_path, says=says)[0]
    due = warmup or CHOSEN
    assert f"from step {due + 1} on" in whole["printed"] and whole["adopted"]
    for done in (due - 2, due - 1):
        resumed = run(config, folder=tmp_path, start=done, says=says)[0]
        late = due - done < 2  # its first step has costs of its own
        assert resumed["printed"].count("<- chosen") == 1 and resumed["adopted"] == whole["adopted"]
        assert f"from step {due + 1 + late} on" in resumed["printed"]
        assert (resumed["losses"] == whole["losses"][done:]) != late


def test_the_end_of_a_longer_warm_up_is_measured():
    result = run(ds_config(block(warmup_steps=5, link={"depth": 2})))[0]
    assert "from step 6 on" in result["printed"] and pasted(result)["warmup_steps"] == 5
    assert result["depth"] == 2 and pasted(result)["link"]["depth"] == 2


def trained_by_an_own_schedule():
    program = programs.program(Preference, steps=CHOSEN + 2)
    with printed_lines("recipe auto: ") as lines:
        losses = pipeline_kinds.train(program, block())["losses"]
    return lines, losses == pipeline_kinds.train(program, None)["losses"]


def test_what_it_cannot_predict_stays_uncompressed():
    why = "the time of a step of PreferenceSchedule cannot be predicted"
    line = f"ds_compress: recipe auto: messages stay uncompressed: {why}"
    assert run_ranks(2, trained_by_an_own_schedule) == [([line], True), ([], True)]


def trained_by_a_forward_pass_of_its_own(stage):
    with printed_lines("recipe auto") as lines:
        engine = build(2, ds_config(block()))
        if engine.stage_id == stage:
            run = PipelineEngine._INSTRUCTION_MAP[ForwardPass]
            own = {ForwardPass: lambda engine, buffer_id: run(engine, buffer_id)}
            engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, **own}
        losses = train_on(engine, CHOSEN + 2, shape=SHAPE)["losses"]
    return [line for line in lines if "active" not in line], losses


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.extended(keep=1)
def test_passes_that_are_not_measured_leave_messages_uncompressed(stage, stock):
    """A program that replaces an instruction of a live engine, as public ones do, ended in its third step by
    a division by zero."""
    why = "this program runs passes of a stage by functions that are not measured"
    first, second = run_ranks(2, trained_by_a_forward_pass_of_its_own, stage)
    assert first[0] == [f"ds_compress: recipe auto: messages stay uncompressed: {why}"] and not second[0]
    assert first[1] == second[1] == stock[: CHOSEN + 2]
