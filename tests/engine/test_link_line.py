"""The start-up line says how messages are really sent."""

import contextlib
import io

import pytest

from tests.support import programs
from tests.support.programs import Program, with_schedule
from tests.support.ranks import run_ranks


def said(program, block):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        programs.train(program, block)
    return [line for line in printed.getvalue().splitlines() if "active" in line]


@pytest.mark.parametrize("program, block, expected", [
    (Program(), {}, "link eager;"),
    (Program(), {"link": {"mode": "blocking"}}, "link blocking;"),
    (Program(before_batch=lambda engine, step: engine.reset_activation_shape()), {}, "link eager;"),
    (Program(module={"dynamic_shape": True}), {}, "link eager;"),
    (Program(with_schedule(programs.TwiceSchedule)), {}, "but every message in the order of the schedule;"),
    (Program(with_schedule(programs.OnceOnly)), {}, "but every message in the order of the schedule;"),
    (Program(), {"link": {"depth": 2}}, "link eager, depth 2;"),
    (Program(), {"link": {"depth": 9}}, "link eager, depth 3 instead of 9 (too few micro-batches);"),
    (Program(module={"dynamic_shape": True}), {"link": {"depth": 2}}, "link eager, depth 2;"),
    (Program(module={"dynamic_shape": True}), {"link": {"depth": "auto"}}, "auto, 1 because of dynamic"),
    (Program(with_schedule(programs.TwiceSchedule)), {"link": {"depth": 2}},
     "link eager, depth 2 has no effect on this schedule, but every message in the order of the schedule;"),
], ids=["eager", "blocking", "reset", "dynamic", "twice", "own iteration",
        "deep", "short of micro-batches", "deep and dynamic", "auto and dynamic",
        "deep and twice"])  # fmt: skip
def test_the_line(program, block, expected):
    lines, others = run_ranks(2, said, program, block)
    assert len(lines) == 1 and others == []
    assert expected in lines[0]
