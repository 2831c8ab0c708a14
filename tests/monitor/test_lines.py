"""The lines of the monitor at the start and at the end of training."""

from ds_compress.config import DIRECTIONS, Config
from ds_compress.monitor.lines import announcement, summary


def channels(raw, wire, count=1):
    totals = {"raw_bytes": raw, "wire_bytes": wire, "message_raw_bytes": raw, "message_wire_bytes": wire}
    return [dict.fromkeys(DIRECTIONS, totals) for _ in range(count)]


def test_nothing_is_saved_where_headers_are_all_that_is_added():
    """A run of codec `none` once ended with "-2.2 kB saved"."""
    line = summary(channels(1_000_000, 1_001_100), 1, 5, [], 1.0)
    assert line == "ds_compress: 2.00 MB sent instead of 2.00 MB, 2.2 kB more (1.00x) by step 5"
    assert "1.50 MB saved (4.00x) by step 5" in summary(channels(1_000_000, 250_000), 1, 5, [], 1.0)


def test_boundaries_alike_are_named_once():
    """A line on six tensors once had 779 characters."""
    config = Config({"boundaries": {"1": {"forward": {"codec": "bf16"}}}})
    line = announcement(config, channels(400, 200, 4), "eager", lambda place: "tensor 0 compressed")
    message = line.split("per message: ")[1]
    none = (
        "forward none 400 -> 200 bytes (2.00x) [tensor 0 compressed], backward none 400 -> 200 bytes (2.00x) "
    )
    assert message.startswith(f"boundaries 0, 2, 3: {none}[as forward]; boundary 1: forward bf16 400 -> 200")
