"""`launch/bench/net.py` hands the link and its connections on to the runs, and shows them."""

import json

from launch.bench.net import logged, stage_times
from launch.bench.net_report import link_of, show
from launch.bench.net_runs import Wire, run, settings
from tests.support.launch_scripts import ROOT


def test_the_link_reaches_two_hosts(tmp_path):
    wire = Wire(50, 20, 0.1, 5)
    log, succeeded = run(["sh", "-c", "echo $RATE $RTT_MS $LOSS $JITTER_MS"], tmp_path, wire, 1)
    assert succeeded and log == ["50mbit 20 0.1 5"]


def test_connections_are_part_of_the_block():
    assert settings("safe", 2, 4) == {"recipe": "safe", "link": {"depth": 2, "connections": 4}}
    assert settings("safe", 2, "auto")["link"] == {"depth": 2, "connections": "auto"}
    assert logged(["ds_compress: link connections 16 chosen: slowest"], "connections") == 16
    assert settings("safe", 2) == {"recipe": "safe", "link": {"depth": 2}}


def test_stages_may_share_a_line():
    """It once failed on such a line: where output is not buffered, the end of a line is written by itself."""
    line = 'stage_times {"stage": 1, "forward_ms": 59.8}stage_times {"stage": 0, "forward_ms": 55.1}'
    assert [stage["forward_ms"] for stage in stage_times(["hello", line, ""])] == [55.1, 59.8]


def test_links_that_differ_in_loss_are_two(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")  # narrower tables cut words off
    row, *_ = json.loads((ROOT / "results" / "links.json").read_text())
    show([row])
    assert "lost" in capsys.readouterr().out
    assert link_of(row) != link_of({**row, "loss": 1.0})
