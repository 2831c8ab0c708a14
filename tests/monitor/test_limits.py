"""Measurements of messages against the limits of the guard."""

import math

from ds_compress.config import Config
from ds_compress.monitor import lines
from ds_compress.monitor.limits import MessageQuality

COARSE = {"codec": {"name": "topk", "density": 0.02}}
FINE = {
    "message_norm": 1.0,
    "relative_error": 0.01,
    "gradient_error": 0.0,
    "residual_share": 0.0,
    "nonfinite_share": 0.0,
}


def over(values, before=FINE, direction="forward", **limits):
    """The limits that a channel is over, and what is said of it."""
    config = Config({"forward": COARSE, "backward": COARSE, "guard": limits})
    violations = MessageQuality.of({**FINE, **values}, before, direction).violations(config.block.guard)
    return [each.limit for each in violations], lines.violation_note(config, 0, direction, violations)


def test_limits_of_messages():
    found, note = over({"relative_error": 0.93})
    assert found == ["error"]
    assert note == (
        "boundary 0, forward: topk(density=0.02) has a relative error of 0.93 (ds_compress.guard.error: "
        "0.5): use more bits or a higher density, or another codec"
    )
    nothing_known = {"relative_error": math.nan, "residual_share": math.nan}
    for values in ({}, {"relative_error": 0.5, "residual_share": 100.0}, nothing_known):
        assert over(values)[0] == []
    assert over({"relative_error": 0.93}, error=1)[0] == []
    zeros = {"message_norm": 0.0, "relative_error": math.inf}
    assert over(zeros)[0] == [], "error feedback sent what it had held back"


def test_gradients_are_judged_by_what_does_not_average_out():
    """The best setting from scratch, stochastic rounding at an error of 0.70, was warned of."""
    stochastic = {"relative_error": 0.7, "gradient_error": 0.2}
    assert over(stochastic, direction="backward")[0] == []
    assert over(stochastic)[0] == ["error"]
    found, note = over({"relative_error": 0.15, "gradient_error": 0.9}, direction="backward")
    assert found == ["gradient_error"] and over({"gradient_error": 0.9})[0] == []
    assert "has an error of accumulated gradients of 0.90 (ds_compress.guard.gradient_error: 0.4)" in note
    assert over({"gradient_error": math.nan}, direction="backward")[0] == []


def test_residuals_that_stay_large():
    """One small gradient makes any residual a large share."""
    large = {**FINE, "residual_share": 338.0}
    assert over(large)[0] == over({}, large)[0] == over(large, {})[0] == []
    found, note = over({"residual_share": 966.4}, large)
    assert found == ["residual"] and "a residual of 338 messages (ds_compress.guard.residual: 100)" in note


def test_a_step_that_overflows_is_no_excess_but_two_in_a_row_are():
    """fp16 training skips a step now and then."""
    overflown = {**FINE, "nonfinite_share": 0.5}
    assert over(overflown)[0] == over(overflown, {})[0] == over({}, overflown)[0] == []
    found, note = over(overflown, overflown)
    assert found == ["nonfinite"] and "inf or nan in 50% of all (ds_compress.guard.nonfinite: 0)" in note
