"""One run, one number: packets, CSV, W&B, the demo's summary and `ds-compress check` count the same bytes."""

import itertools
import json

import pytest

from ds_compress.cli import main
from ds_compress.config import DIRECTIONS
from ds_compress.monitor.metrics import label
from launch.demo import summarize
from tests.support.launch_scripts import read_run
from tests.support.offline_wandb import read_offline
from tests.support.pipeline import (
    MICRO_BATCH,
    MICRO_BATCHES,
    WIDTH,
    batches,
    build,
    ds_config,
    packets_handed_over,
)
from tests.support.ranks import run_ranks

STEPS = 4
BLOCK = {
    "forward": {"codec": {"name": "quantize", "bits": 4}},
    "backward": {"codec": {"name": "topk", "density": 0.1, "values": "bf16"}, "feedback": "ef"},
    "min_numel": 0,
    "monitor": {"every": 2},
}


def train_counting_packets(config):
    """Return the sizes of the uint8 tensors handed to torch.distributed in train_lm.py's training."""
    engine = build(2, config)
    packets = packets_handed_over()
    data = itertools.cycle(itertools.islice(batches(), MICRO_BATCHES))
    for _ in range(STEPS):
        engine.train_batch(data)
        engine.monitor.write_events([("Train/Samples/step_ms", 1.0, engine.global_samples)])
    if engine.global_rank == 0:
        import wandb

        wandb.finish()
        wandb.teardown()  # waits for the process that writes the file
    return packets


@pytest.mark.parametrize("link", ["blocking", "eager"])
def test_every_count_of_wire_bytes_is_the_same(link, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = ds_config(
        {**BLOCK, "link": {"mode": link}},
        csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "csv"},
        wandb={"enabled": True, "project": "tests"},
    )
    packets = dict(
        zip(DIRECTIONS, run_ranks(2, train_counting_packets, config))
    )  # stage 0 sends forward, 1 backward

    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    shape = f"{MICRO_BATCH},8,{WIDTH}"
    assert main(["check", str(file), "--stages", "2", "--shape", shape, "--json"]) == 0
    checked = {row["direction"]: row for row in json.loads(capsys.readouterr().out)}
    (offline,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    written = {"csv": read_run(tmp_path / "csv").series, "wandb": read_offline(offline)[0]}

    messages = STEPS * MICRO_BATCHES
    for direction in DIRECTIONS:
        assert packets[direction] == [checked[direction]["wire_bytes"]] * messages
        for sink, series in written.items():
            for name in ("wire_bytes", "raw_bytes"):
                total = series[label(name, 0, direction)][-1][1]
                assert total == checked[direction][name] * messages, (sink, direction, name)
    summary = summarize("a recipe", tmp_path / "csv")
    assert summary["wire_bytes"] == sum(map(sum, packets.values()))
    assert summary["raw_bytes"] == messages * sum(row["raw_bytes"] for row in checked.values())
