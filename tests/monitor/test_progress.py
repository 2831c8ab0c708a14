"""How far a run is: a bar for those who watch, few lines for those who read later."""

import io

from ds_compress.monitor.progress import LINES, Progress


def test_a_log_file_gets_a_line_every_few_percent():
    output = io.StringIO()
    progress = Progress("training", 1000, output=output)
    for step in range(1, 1001):
        progress.update(step, {"loss": "1.0"})
    progress.close()
    lines = output.getvalue().splitlines()
    assert len(lines) == LINES
    assert lines[0] == "training: 40/1000 steps, 0:00 left loss=1.0"
    assert lines[-1] == "training: 1000/1000 steps, 0:00 left loss=1.0"


def test_a_resumed_run_counts_on():
    output = io.StringIO()
    progress = Progress("training", 100, done=50, output=output)
    progress.update(50, {})
    assert output.getvalue() == ""
    progress.update(52, {})
    assert output.getvalue() == "training: 52/100 steps, 0:00 left\n"


def test_a_terminal_gets_a_bar():
    output = io.StringIO()
    output.isatty = lambda: True
    progress = Progress("training", 10, output=output)
    progress.update(10, {"loss": "1.0"})
    progress.close()
    assert "10/10" in output.getvalue()
    assert "loss=1.0" in output.getvalue()


def test_other_ranks_write_nothing():
    output = io.StringIO()
    progress = Progress("training", 10, output=output, shown=False)
    progress.update(10, {})
    progress.say("done")
    assert output.getvalue() == ""
