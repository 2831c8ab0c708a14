"""What follows from the measurements of a step, and what of it is shown: charts, lines, progress."""

import io
import itertools
import re
from pathlib import Path

import pytest

from ds_compress.config import DIRECTIONS, Config
from ds_compress.monitor import metrics
from ds_compress.monitor.lines import Waited, announcement, summary
from ds_compress.monitor.metrics import CHANNEL, PIPELINE, stage_ms, uncompressed_step_ms
from ds_compress.monitor.progress import LINES, Progress


@pytest.mark.parametrize("skew", [-5000.0, 0.0, 123.0])
def test_transfer_time_needs_no_common_clock(skew):
    """Packets of 3000 and 1000 bytes that take 30 and 10 ms; the receiver was late for some."""
    sent = {"forward": [0.0, 50.0, 60.0], "backward": [100.0 + skew, 150.0 + skew, 200.0 + skew]}
    arrived = {"forward": [30.0 + skew, 95.0 + skew, 110.0 + skew], "backward": [140.0, 160.0, 900.0]}
    passed = {name: [end - start for start, end in zip(sent[name], arrived[name])] for name in sent}
    found = metrics.transfer_ms(passed, {"forward": 3000.0, "backward": 1000.0})
    assert found == pytest.approx({"forward": 30.0, "backward": 10.0})


def channel_values(**values):
    times = dict.fromkeys(("encode_ms", "decode_ms", "wait_ms", "send_ms", "transfer_ms"), 0.0)
    return times | {"ratio": 1.0} | values


def channels_of(*values):
    """Channels with these values, boundary by boundary."""
    return dict(zip(itertools.product(range(len(values)), DIRECTIONS), values))


def test_estimate_of_the_uncompressed_step():
    free = channel_values()
    codec_only = channels_of(channel_values(encode_ms=5.0, decode_ms=3.0), free)
    assert uncompressed_step_ms(100.0, codec_only, 2) == 97.0  # less stage 1's 3 ms: both must get faster
    exposed = channels_of(channel_values(wait_ms=20.0, transfer_ms=10.0, ratio=4.0), free)
    assert uncompressed_step_ms(100.0, exposed, 2) == 130.0
    saturated = channels_of(channel_values(transfer_ms=60.0, ratio=4.0), free)
    assert uncompressed_step_ms(100.0, saturated, 2) == 240.0
    # DualPipeV on two ranks: both send and receive at both boundaries, out and back, and both get faster by 8
    # ms
    there_and_back = channels_of(*2 * list(codec_only.values()))
    assert uncompressed_step_ms(100.0, there_and_back, 2) == 92.0
    assert stage_ms(codec_only, 0)["encode"] == 5.0 and stage_ms(codec_only, 1)["decode"] == 3.0


def test_the_page_on_metrics_explains_every_label():
    """A second table had other words for the same labels."""
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    explained = re.findall(r"^\| `[\w/]+/(\w+)` \|", page.read_text(), re.MULTILINE)
    assert explained == [*CHANNEL, *PIPELINE, *metrics.EXCHANGE, *metrics.EVALUATIONS]


def channels(raw, wire, count=1):
    totals = {"raw_bytes": raw, "wire_bytes": wire, "message_raw_bytes": raw, "message_wire_bytes": wire}
    return channels_of(*2 * count * [totals])


def test_nothing_is_saved_where_headers_are_all_that_is_added():
    """A run of codec `none` once ended with "-2.2 kB saved"."""
    line = summary(channels(1_000_000, 1_001_100), 1, 5, Waited(), {}, {})
    assert line == "ds_compress: 2.00 MB sent instead of 2.00 MB, 2.20 kB more (1.00x) by step 5"
    assert "1.50 MB saved (4.00x) by step 5" in summary(channels(1_000_000, 250_000), 1, 5, Waited(), {}, {})


def test_waiting_is_counted_in_steps_alone():
    """A site that had trained 20 steps in 2 s, after it had waited for the weights of another, said
    "about 29.6 s"."""
    line = summary(channels(1_000_000, 250_000), 11, 30, Waited(2, 0.25 + 0.35, 0.02 + 0.04), {}, {})
    assert line.endswith(
        "by step 30, from step 11 on; a stage waited 30% of a step for messages, about 0.6 s"
    )


def test_boundaries_alike_are_named_once():
    """A line on six tensors once had 779 characters."""
    config = Config({"boundaries": {"1": {"forward": {"codec": "bf16"}}}})
    line = announcement(config, channels(400, 200, 4), "eager", lambda place: "tensor 0 compressed", {})
    message = line.split("per message: ")[1]
    none = "none 400 -> 200 bytes (2.00x)"
    others = f"boundaries 0, 2, 3: forward {none} [tensor 0 compressed], backward {none} [as forward]; "
    assert message.startswith(f"{others}boundary 1: forward bf16 400 -> 200")
    many = announcement(config, channels(400, 200, 63), "eager", lambda place: "", {})
    assert "per message: boundaries 0, 2-62: " in many


def progress(numbers, *said, is_terminal=False, **options):
    """What is written of these steps."""
    output = io.StringIO()
    output.isatty = lambda: is_terminal
    shown = Progress("training", output=output, **options)
    for step in numbers:
        shown.update(step, {"loss": "1.0"})
    for line in said:
        shown.say(line)
    shown.close()
    return output.getvalue()


def test_a_log_file_gets_a_line_every_few_percent():
    lines = progress(range(1, 1001), steps=1000).splitlines()
    assert len(lines) == LINES
    assert lines[0] == "training: 40/1000 steps, 00:00 left loss=1.0"
    assert lines[-1] == "training: 1000/1000 steps, 00:00 left loss=1.0"


def test_a_resumed_run_counts_on():
    assert progress([50, 52], steps=100, done=50) == "training: 52/100 steps, 00:00 left loss=1.0\n"


def test_a_terminal_gets_a_bar():
    written = progress([10], steps=10, is_terminal=True)
    assert "10/10" in written and "loss=1.0" in written


def test_other_ranks_write_nothing():
    assert progress([10], "done", steps=10, shown=False) == ""
