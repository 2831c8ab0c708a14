"""The start-up line says how messages are really sent."""

from tests.support import programs
from tests.support.pipeline import printed_lines
from tests.support.programs import Program, with_schedule
from tests.support.ranks import run_ranks

LINES = [
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
    (
        Program(with_schedule(programs.TwiceSchedule)),
        {"link": {"depth": 2}},
        "depth 2 has no effect on this schedule, but every message in the order of the schedule;",
    ),
]


def active_lines():
    """Return the start-up lines of each program on this rank."""
    found = []
    for program, block, _ in LINES:
        with printed_lines("active") as lines:
            programs.train(program, block)
        found.append(lines)
    return found


def test_the_line():
    first, other = run_ranks(2, active_lines)
    assert not any(other)
    for (line,), (_, block, expected) in zip(first, LINES, strict=True):
        assert expected in line, block
