"""`ds-compress report`: what it reads, what it draws, and that a browser shows it."""

import html
import itertools
import json
import math
import re
import sys
from pathlib import Path

import pytest

from ds_compress.cli import main
from ds_compress.cli.report import headlines, summarize
from ds_compress.cli.runs import LOSS, headline, read_runs
from ds_compress.config import DIRECTIONS
from ds_compress.monitor.metrics import exchange_label, label
from tests.support.launch_scripts import read_run, write_csv

PLOTS = {"loss.png", "bytes.png", "step_time.png"}


def write_run(folder, wire, loss=1.0):
    """Return what is written, by label."""
    samples = [32 * step for step in range(1, 21)]
    write_csv(folder, LOSS, [(x, loss + 10 / x) for x in samples])
    written = samples[9::10]
    for name, value in (("step_ms", 100.0), ("uncompressed_step_ms", 150.0)):
        write_csv(folder, label(name), [(x, value) for x in written])
    values = {"relative_error": 0.1, "encode_ms": 5.0, "decode_ms": 4.0, "wait_ms": 20.0, "send_ms": 1.0}
    for place in itertools.product(range(2), DIRECTIONS):
        for name, size in (("raw_bytes", 1000), ("wire_bytes", wire)):
            write_csv(folder, label(name, *place), [(x, size * x) for x in written])
        for name, value in values.items():
            write_csv(folder, label(name, *place), [(x, value) for x in written])
    return read_run(folder).series


def runs(tmp_path):
    write_run(tmp_path / "none" / "csv", 1000)
    write_run(tmp_path / "topk" / "csv", 100, loss=1.2)
    write_run(tmp_path / "<quantize>" / "csv", 250, loss=1.01)
    return [str(tmp_path / name) for name in ("none", "topk", "<quantize>")]


def test_report_of_three_runs(tmp_path, capsys):
    assert main(["report", *runs(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert f"wrote {tmp_path}/out/report.html and 3 PNG files" in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "out").iterdir()} == PLOTS | {"report.html"}
    text = (tmp_path / "out" / "report.html").read_text()
    assert re.findall(r'<img [^>]*src="([\w:/;]+),', text) == ["data:image/png;base64"] * 3
    assert not re.search("<(script|link|iframe)", text)  # nothing is fetched
    assert "&lt;quantize&gt;" in text and "<quantize>" not in text


def test_numbers_are_those_of_the_files(tmp_path):
    write_run(tmp_path / "topk" / "csv", 100, loss=1.2)
    row = summarize(read_run(tmp_path / "topk"))
    assert row["steps"] == 20 and row["ratio"] == 10 and row["ms per step"] == 100
    assert row["MB sent"] == pytest.approx(4 * 100 * 640 / 1e6)
    assert row["final loss"] == pytest.approx(1.2 + sum(10 / (32 * step) for step in range(16, 21)) / 5)


def test_bytes_between_replicas(tmp_path, capsys):
    """A run that compresses these alone was taken for the uncompressed one."""
    for name, wire in (("none", None), ("quantize", 250)):
        folder = tmp_path / name / "csv"
        write_csv(folder, LOSS, [(32, 2.0), (64, 1.0)])
        for stage in range(2 if wire else 0):
            for what, each in (("raw_bytes", 2000), ("wire_bytes", wire)):
                write_csv(folder, exchange_label("replicas", stage, what), [(x, each * x) for x in (32, 64)])
    row = summarize(read_run(tmp_path / "quantize"))
    assert row["ratio between replicas"] == 8 and row["MB between replicas"] == 2 * 250 * 64 / 1e6
    paths = [str(tmp_path / name) for name in ("quantize", "none")]
    assert main(["report", *paths, "--out", str(tmp_path / "out")]) == 0
    assert "quantize: 8x fewer bytes between replicas, +0.000 loss against none" in capsys.readouterr().out


def test_rounds_between_launches(tmp_path):
    """Values before the first round do not count."""
    folder = tmp_path / "apart" / "csv"
    write_csv(folder, LOSS, [(32, 2.0), (64, 1.0), (96, 1.0)])
    values = {"rounds": (0, 1, 3), "members": (0, 3, 2)}
    values |= {"raw_bytes": (0, 40e6, 120e6), "wire_bytes": (0, 1e6, 3e6)}
    for stage, seconds in enumerate(((0, 2.0, 4.0), (0, 4.0, 8.0))):
        for name, each in (values | {"round_s": seconds}).items():
            write_csv(folder, exchange_label("replicas", stage, name), zip((32, 64, 96), each))
    run = read_run(tmp_path / "apart")
    said = "40x fewer bytes between replicas, 3 rounds of 2 to 3 replicas, 2 MB and 6 s each"
    assert said in headline(run, None)
    row = summarize(run)
    assert (row["rounds"], row["s per round"]) == (3, 6)


def test_a_run_that_went_on_in_the_same_folder(tmp_path):
    """DeepSpeed appends to its CSV: a resume adds a second header, and repeated steps count once."""
    write_csv(tmp_path, LOSS, [(32, 5.0), (64, 4.0), (96, 3.5)])
    write_csv(tmp_path, LOSS, [(96, 3.4), (128, 3.0)])
    assert read_run(tmp_path).series[LOSS] == [(32, 5.0), (64, 4.0), (96, 3.4), (128, 3.0)]


def test_bytes_of_a_run_that_went_on(tmp_path):
    """Totals began at 0 again: the report had the bytes since, and bars of all steps too low, or below 0."""
    folder = tmp_path / "csv"
    for samples in ((32, 64, 96, 128), (128, 160)):  # the last step was done twice
        write_csv(folder, LOSS, [(at, 1.0) for at in samples])
        for direction in DIRECTIONS:
            for name, size in (("raw_bytes", 1000), ("wire_bytes", 100)):
                totals = [(at, size * number) for number, at in enumerate(samples, 1)]
                write_csv(folder, label(name, 0, direction), totals)
        rounds = [0, 1, 2, 3][: len(samples)]
        for name, values in (("rounds", rounds), ("members", [2 * bool(each) for each in rounds])):
            write_csv(folder, exchange_label("replicas", 0, name), zip(samples, values))
        write_csv(folder, exchange_label("replicas", 0, "round_s"), [(at, 4.0) for at in samples])
        write_csv(folder, exchange_label("replicas", 0, "wire_bytes"), [(at, 1e6) for at in samples])
    run = read_run(folder)
    assert (summarize(run)["MB sent"], summarize(run)["ratio"]) == (2 * 5 * 100 / 1e6, 10)
    assert run.per_step("wire_bytes", 0, "forward") == 100
    assert (run.rounds()["rounds"], run.rounds()["members_least"]) == (3, 2)


@pytest.mark.parametrize("parts", [2, 3])
def test_bytes_of_runs_that_went_on_after_one_value_each(parts, tmp_path):
    """Tried for ten steps, then resumed for ten more: the total of both was the same, so the report had half
    of the bytes, and a step that sent none."""
    for part in range(parts):
        samples = range(10 * part + 1, 10 * part + 11)
        write_csv(tmp_path, LOSS, [(at, 1.0) for at in samples])
        for direction, name in itertools.product(DIRECTIONS, ("raw_bytes", "wire_bytes")):
            write_csv(tmp_path, label(name, 0, direction), [(samples[-1], 1000.0)])
    run = read_run(tmp_path)
    assert summarize(run)["MB sent"] == 2 * parts * 1000 / 1e6
    assert run.per_step("wire_bytes", 0, "forward") == 100


def test_names_with_dots(tmp_path, capsys):
    """Runs in the folders lr0.1 and lr0.2 were both named lr0, so no report was made of them."""
    folders = [tmp_path / "lr0.1" / "csv", tmp_path / "lr0.2"]
    for folder in folders:
        write_csv(folder, LOSS, [(32, 2.0), (64, 1.0)])
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "lr0.1: loss 1.5" in said and "lr0.2: +0.000 loss against lr0.1" in said
    assert [read_run(folder).name for folder in folders] == ["lr0.1", "lr0.2"]


def test_stock_runs_have_a_loss_but_no_bytes(tmp_path):
    write_csv(tmp_path / "stock", LOSS, [(32, 5.0), (64, 4.0)])
    assert main(["report", str(tmp_path / "stock"), "--out", str(tmp_path / "out")]) == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"loss.png", "report.html"}


def test_refusals(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    (tmp_path / "run-1.wandb").write_bytes(b":W&B")
    assert main(["report", str(tmp_path)]) == 2
    for error in capsys.readouterr().err.splitlines():
        assert "holds no run; allowed: a folder of DeepSpeed's csv_monitor or of TensorBoard, one" in error
        assert error.endswith("file of an offline run is no longer read: switch csv_monitor on beside W&B")
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not there" in capsys.readouterr().err
    write_run(tmp_path / "a" / "csv", 1)
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "a" / "csv")]) == 2
    assert "2 runs are named 'a'" in capsys.readouterr().err


def test_a_folder_of_runs(tmp_path):
    runs(tmp_path / "runs" / "demo")
    write_run(tmp_path / "runs" / "later" / "topk" / "csv", 100, loss=1.3)
    names = [run.name for run in read_runs(tmp_path / "runs")]
    assert sorted(names) == ["demo/<quantize>", "demo/none", "demo/topk", "later/topk"]
    assert [run.name for run in read_runs(tmp_path / "runs" / "later")] == ["later"]


def write_wandb(folder, name, series, **more):
    """As an online run below `folder`: its summary has the last value of each label."""
    files = folder / "wandb" / f"run-20261122_000000-{name}" / "files"
    files.mkdir(parents=True)
    last = {key: points[-1] for key, points in series.items()}
    step = max((samples for samples, _ in last.values()), default=0)
    values = {key: value for key, (_, value) in last.items()}
    (files / "wandb-summary.json").write_text(json.dumps({"_step": step, "_runtime": 9, **values, **more}))


def test_one_run_that_two_monitors_wrote(tmp_path):
    """It is one run, with the name of its folder; its summary has the last of the values alone."""
    write_wandb(tmp_path / "mine", "abc123", write_run(tmp_path / "mine" / "csv", 100))
    write_run(tmp_path / "other" / "csv", 100, loss=3.0)
    assert {run.name: len(run.series[LOSS]) for run in read_runs(tmp_path)} == {"mine": 20, "other": 20}


def test_a_summary_of_wandb_alone(tmp_path):
    """It has no steps to count, and values that are no numbers: a report, nan as a word."""
    write_run(tmp_path / "mine" / "csv", 100)
    run = read_run(tmp_path / "mine")
    (cosine, *_) = (name for name in run.series if name.endswith("relative_error"))
    page = {"_type": "html-file", "path": "media/html/report.html"}
    series = {**run.series, cosine: [(640, math.nan)]}
    write_wandb(tmp_path / "online", "one", series, **{"Train/Compression/report": page, "report": "42 MB"})
    alone = read_run(tmp_path / "online")
    assert alone.series.keys() == {*run.series, "_step", "_runtime"} and alone.name == "online"
    expected = {**summarize(run), "steps": math.nan, "final loss": run.series[LOSS][-1][1]}
    assert summarize(alone) == pytest.approx(expected, nan_ok=True)
    assert main(["report", str(tmp_path / "online"), "--out", str(tmp_path / "out")]) == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == PLOTS - {"bytes.png"} | {"report.html"}


def test_runs_of_one_monitor_with_equal_losses_stay_apart(tmp_path):
    """A run with codec `none` was once left out, or taken for the CSV files of DeepSpeed alone."""
    series = write_run(tmp_path / "none" / "csv", 1000)
    write_wandb(tmp_path, "one", series)
    for name in ("two", "three"):
        write_wandb(tmp_path, name, {LOSS: series[LOSS]})
    found = {run.name: run.boundaries for run in read_runs(tmp_path)}
    assert found == {"none": 2, "run-two": 0, "run-three": 0}


def test_runs_of_wandb_given_one_by_one(tmp_path, capsys):
    """`report runs/wandb/run-*` was refused: all of them had the name of the folder `runs`."""
    series = write_run(tmp_path / "runs" / "csv", 1000)
    for name in ("one", "two"):
        write_wandb(tmp_path / "runs", name, series)
    folders = sorted(map(str, (tmp_path / "runs" / "wandb").iterdir()))
    assert main(["report", *folders, "--out", str(tmp_path / "out")]) == 0
    assert "run-one: " in (printed := capsys.readouterr().out) and "run-two: " in printed
    assert main(["report", folders[0], folders[0]]) == 2
    assert "2 runs are named 'run-one'" in capsys.readouterr().err


def test_a_run_that_cannot_be_read_is_passed_over(tmp_path, capsys):
    """A run that ended before its first step, or a profiler's events, ended the report of all others."""
    write_run(tmp_path / "good" / "csv", 100)
    write_wandb(tmp_path, "died", {})
    write_wandb(tmp_path, "empty", {})
    (tmp_path / "wandb" / "run-20261122_000000-empty" / "files" / "wandb-summary.json").write_text("")
    assert [run.name for run in read_runs(tmp_path)] == ["good"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.endswith("; skipped") for line in lines)
    assert "run-died holds no Train/Samples/train_loss" in "".join(lines)


def test_a_tensorboard_folder(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    series = write_run(tmp_path / "mine" / "csv", 100)
    for folder in ("mine/tensorboard", "alone"):
        with SummaryWriter(tmp_path / folder) as writer:
            for name, points in series.items():
                for samples, value in points:
                    writer.add_scalar(name, value, samples)
    alone = read_run(tmp_path / "alone")
    assert alone.name == "alone" and alone.series.keys() == series.keys()
    assert alone.final_loss == pytest.approx(read_run(tmp_path / "mine").final_loss)
    assert [run.name for run in read_runs(tmp_path / "mine")] == ["mine"]


def test_a_run_whose_loss_became_nan(tmp_path, capsys):
    """Two monitors wrote it, and as nan equals nothing it counted as two runs of one name: no report."""
    from torch.utils.tensorboard import SummaryWriter

    losses = [(32, 2.0), (64, 1e22), (96, math.nan), (128, math.nan)]
    write_csv(tmp_path / "diverged" / "csv", LOSS, losses)
    with SummaryWriter(tmp_path / "diverged" / "tensorboard") as writer:
        for samples, value in losses:
            writer.add_scalar(LOSS, value, samples)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("diverged: loss nan\n")


def test_names_are_shown_as_they_are(tmp_path):
    """A name with two dollar signs was a formula, a wrong one a traceback; one that began with _ had no entry
    in the legend; and the names of many bars lay upon each other."""
    from ds_compress.cli.plots import PLOTS

    names = ["none", "_mine", "lr$10^$", "a run with a long name"]
    for name in names:
        write_run(tmp_path / name / "csv", 1000)
    found = sorted(read_runs(tmp_path), key=lambda run: names.index(run.name))
    figures = [plot(found) for plot, _ in PLOTS.values()]
    for figure in figures:
        figure.savefig(tmp_path / "picture.png")
    shown = [text.get_text().replace(r"\$", "$") for text in figures[0].axes[0].get_legend().get_texts()]
    assert shown == names
    for figure in figures[1:]:
        boxes = [text.get_window_extent() for text in figure.axes[0].get_xticklabels()]
        assert all(one.x1 <= next_one.x0 + 1 for one, next_one in itertools.pairwise(boxes))


def test_without_matplotlib_there_is_still_text(tmp_path, capsys, monkeypatch):
    """It was once refused, headlines and table included."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "ds_compress.cli.plots", raising=False)
    assert main(["report", *runs(tmp_path), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("none: messages uncompressed") and "and 0 PNG files" in printed.out
    assert "report: no plots: " in printed.err
    assert "10x fewer bytes" in (tmp_path / "out/report.html").read_text()


def test_headlines(tmp_path, capsys):
    """The bytes, the price and the gain of each run against the one that compressed nothing."""
    found = [read_run(path) for path in map(Path, runs(tmp_path))]
    by_name = dict(zip([run.name for run in found], headlines(found)))
    assert by_name["topk"] == "topk: 10x fewer bytes, +0.200 loss, 1.00x steps/s against none"
    assert by_name["<quantize>"] == "<quantize>: 4x fewer bytes, +0.010 loss, 1.00x steps/s against none"
    assert by_name["none"].startswith("none: messages uncompressed, loss 1.0")
    assert headlines(found[1:2])[0].startswith("topk: 10x fewer bytes, loss 1.2")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert by_name["topk"] in capsys.readouterr().out
    assert html.escape(by_name["topk"]) in (tmp_path / "out" / "report.html").read_text()


def test_a_headline_has_what_the_guard_measured(tmp_path):
    write_run(tmp_path / "topk" / "csv", 100)
    write_csv(tmp_path / "topk" / "csv", label("loss_cost"), [(32, 0.5), (640, 0.25)])
    said = "the guard last measured +0.250 loss by compression"
    assert headline(read_run(tmp_path / "topk"), None).endswith(said)
