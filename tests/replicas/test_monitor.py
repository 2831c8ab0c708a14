"""What the monitor says of gradients between replicas."""

import contextlib
import csv
import io
import logging

import pytest

from ds_compress.monitor.metrics import REPLICAS
from tests.support.pipeline import batches, build, ds_config
from tests.support.ranks import run_ranks
from tests.support.replicas import WIDE, wide_layers

QUANTIZE = {"replicas": {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef"}, "monitor": {"every": 2}}


def watched(stages, config):
    """The lines of a run, and the bytes that torch.distributed was given beside those to this rank itself."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine = build(stages, config, wide_layers())
        data = batches(engine.grid.get_data_parallel_id(), shape=(8, WIDE))
        for _ in range(4):
            engine.train_batch(data)
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("ds_compress")]
    return lines, engine.ds_compress.monitor.summary(), engine.ds_compress.gradients.exchange.sent


@pytest.mark.parametrize("stages", [1, 2])
def test_values_of_each_stage_are_written(stages, tmp_path):
    sink = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    results = run_ranks(2 * stages, watched, stages, ds_config(QUANTIZE, replicas=2, csv_monitor=sink))
    (line,), summary, _ = results[0]
    assert line.endswith("gradients between replicas: quantize(bits=4) + ef")
    assert ("per message" in line) == (stages == 2)
    sent = [results[0][2], results[-1][2]][:stages]
    for stage, counters in enumerate(sent):
        found = {}
        for path in (tmp_path / "run").glob(f"Train_Compression_replicas_stage_{stage}_*.csv"):
            with path.open() as file:
                found[path.stem.split(f"stage_{stage}_")[1]] = [
                    float(row[1]) for row in list(csv.reader(file))[1:]
                ]
        assert set(found) == set(REPLICAS) and set(found["members"]) == {2}
        assert found["wire_bytes"] == [counters.wire_bytes / 2, counters.wire_bytes]
        # 4 matrices of 96 x 192 at 4 bytes: a ring with two replicas sends each byte once
        assert found["raw_bytes"][-1] == counters.raw_bytes == 4 * (8 // stages) * 96 * 192 * 4
        assert all(7 < ratio < 7.6 for ratio in found["ratio"])
        assert all(0.8 < cosine < 1 for cosine in found["cosine"]) and all(
            0 < e < 0.6 for e in found["relative_error"]
        )
        assert all(norm > 0 for norm in found["residual_norm"])
    assert "gradients between replicas: " in summary and "saved (7." in summary and "by step 4" in summary


def test_measuring_changes_nothing(tmp_path):
    sink = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    with_sink = run_ranks(2, final_weights, ds_config(QUANTIZE, replicas=2, csv_monitor=sink))
    assert with_sink == run_ranks(2, final_weights, ds_config(QUANTIZE, replicas=2))


def warnings_of(config, steps):
    """The warnings of this rank, and the last error of averages added up."""
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("ds_compress").addHandler(handler)
    engine = build(1, config, wide_layers())
    data = batches(engine.grid.get_data_parallel_id(), shape=(8, WIDE))
    for _ in range(steps):
        engine.train_batch(data)
    return [line for line in lines if "replicas" in line], engine.ds_compress.gradients.values()


@pytest.mark.parametrize(
    ("codec", "warns"),
    [
        ({"name": "topk", "density": 0.01}, True),
        ({"name": "entropy", "bits": 1.5, "rounding": "dither"}, False),
        ({"name": "quantize", "bits": 4}, False),
    ],
    ids=["topk", "dither", "4 bits"],
)
@pytest.mark.extended(keep=1)
def test_the_guard_warns_of_errors_that_add_up(codec, warns):
    """Without a monitor: rank 0 warns once. A large error that averages out is no harm."""
    block = {"replicas": {"codec": codec}, "guard": {"every": 8}, "monitor": {"every": 0}}
    (lines, values), (others, _) = run_ranks(2, warnings_of, ds_config(block, replicas=2), 17)
    assert len(lines) == warns and not others
    assert all("stage 0: topk(density=0.01) has an error of" in line for line in lines)
    assert (values["gradient_error"] > 0.4) == warns
    assert codec["name"] != "entropy" or values["relative_error"] > 0.3


def final_weights(config):
    engine = build(1, config, wide_layers())
    data = batches(engine.grid.get_data_parallel_id(), shape=(8, WIDE))
    for _ in range(4):
        engine.train_batch(data)
    return [parameter.sum().item() for parameter in engine.module.parameters()]
