"""What the monitor says of gradients between replicas."""

import pytest

from ds_compress.monitor.metrics import EXCHANGE, exchange_label
from tests.support.launch_scripts import read_run
from tests.support.pipeline import build, ds_config, log_lines, printed_lines
from tests.support.ranks import run_ranks
from tests.support.replicas import tied_layers, train_steps, wide_layers

QUANTIZE = {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef"}
MEASURED = {"monitor": {"every": 2}}


def watched(stages, config, steps=4, specs=wide_layers):
    """The line at the start, the engine's parts that count and tell, what was logged, and the weights."""
    logged = log_lines()
    with printed_lines("ds_compress") as lines:
        engine = build(stages, config, specs())
        train_steps(engine, steps)
    traffic = engine.ds_compress.gradients or engine.ds_compress.tied
    return {
        "lines": lines,
        "summary": engine.ds_compress.monitor.summary(),
        "sent": traffic.exchange.sent,
        "values": traffic.values(),
        "logged": [line for line in logged if "replicas" in line],
        "weights": [parameter.sum().item() for parameter in engine.module.parameters()],
    }


BETWEEN = {"replicas": "between replicas", "tied": "of tied weights between stages"}


@pytest.mark.parametrize("kind, stages", [("replicas", 1), ("replicas", 2), ("tied", 2)])
@pytest.mark.extended(keep=1)
def test_values_of_each_stage_are_written(kind, stages, tmp_path):
    sink = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    specs, replicas, matrices = (tied_layers, 1, 1) if kind == "tied" else (wide_layers, 2, 8 // stages)
    config = ds_config({kind: QUANTIZE, **MEASURED}, replicas=replicas, csv_monitor=sink)
    results = run_ranks(replicas * stages, watched, stages, config, 4, specs)
    (line,), summary = results[0]["lines"], results[0]["summary"]
    assert line.endswith(f"gradients {BETWEEN[kind]}: quantize(bits=4) + ef")
    assert ("per message" in line) == (stages == 2)
    sent = [results[0]["sent"], results[-1]["sent"]][:stages]
    series = read_run(tmp_path / "run").series
    for stage, counters in enumerate(sent):
        labels = {name: exchange_label(kind, stage, name) for name in EXCHANGE}
        found = {name: [value for _, value in series[label]] for name, label in labels.items()}
        assert set(found["members"]) == {2}
        assert found["wire_bytes"] == [counters.wire_bytes / 2, counters.wire_bytes]
        # 4 steps, matrices of 96 x 192 at 4 bytes: a ring of two sends each byte once
        assert found["raw_bytes"][-1] == counters.raw_bytes == 4 * matrices * 96 * 192 * 4
        assert all(7 < ratio < 7.6 for ratio in found["ratio"])
        assert all(0.8 < cosine < 1 for cosine in found["cosine"])
        assert all(0 < error < 0.6 for error in found["relative_error"])
        assert all(norm > 0 for norm in found["residual_norm"])
    assert f"gradients {BETWEEN[kind]}: " in summary and "saved (7." in summary and "by step 4" in summary


def test_measuring_changes_nothing(tmp_path):
    sink = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    block = {"replicas": QUANTIZE, **MEASURED}
    configs = [ds_config(block, replicas=2, **sinks) for sinks in ({"csv_monitor": sink}, {})]
    ours, plain = (run_ranks(2, watched, 1, config) for config in configs)
    assert [each["weights"] for each in ours] == [each["weights"] for each in plain]


TOPK, DITHER = {"name": "topk", "density": 0.01}, {"name": "entropy", "bits": 1.5, "rounding": "dither"}


@pytest.mark.parametrize(
    "codec", [TOPK, DITHER, {"name": "quantize", "bits": 4}], ids=["topk", "dither", "4 bits"]
)
@pytest.mark.extended(keep=1)
def test_the_guard_warns_of_errors_that_add_up(codec):
    """Without a monitor: rank 0 warns once. A large error that averages out is no harm."""
    warns = codec is TOPK
    block = {"replicas": {"codec": codec}, "guard": {"every": 8}, "monitor": {"every": 0}}
    first, other = run_ranks(2, watched, 1, ds_config(block, replicas=2), 17)
    lines, values = first["logged"], first["values"]
    assert len(lines) == warns and not other["logged"]
    assert all("stage 0: topk(density=0.01) has an error of" in line for line in lines)
    assert (values["gradient_error"] > 0.4) == warns
    assert codec["name"] != "entropy" or values["relative_error"] > 0.3
