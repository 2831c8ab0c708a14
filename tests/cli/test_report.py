"""`ds-compress report`: what it reads, what it prints, and what it draws."""

import itertools
import math
import re
import shutil
import sys
from pathlib import Path

import pytest

from ds_compress.cli import main
from ds_compress.cli.report import summarize, table
from ds_compress.cli.runs import LOSS, find_baseline, headline, read_runs
from ds_compress.config import DIRECTIONS
from ds_compress.monitor.metrics import exchange_label, label
from tests.support.launch_scripts import read_run, write_csv

PLOTS = ["loss.png", "bytes.png", "step_time.png"]


def write_run(folder, wire, loss=1.0):
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


def runs(tmp_path):
    write_run(tmp_path / "none" / "csv", 1000)
    write_run(tmp_path / "topk" / "csv", 100, loss=1.2)
    write_run(tmp_path / "<quantize>" / "csv", 250, loss=1.01)
    return [str(tmp_path / name) for name in ("none", "topk", "<quantize>")]


def test_report_of_three_runs(tmp_path, capsys, monkeypatch):
    """Columns without a value in any run are left out, and a name is no markup of the terminal's."""
    monkeypatch.setenv("COLUMNS", "100")
    write_csv(tmp_path / "[red]stock" / "csv", LOSS, [(32, 5.0)])
    paths = [*runs(tmp_path), str(tmp_path / "[red]stock")]
    assert main(["report", *paths, "--out", str(tmp_path / "out")]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    header, *rows = filter(None, ([cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in lines))
    assert title.startswith("loss: the mean of the last 5; MB sent: by one replica")
    assert header == ["run", "steps", "loss", "MB sent", "ratio", "ms/step", "ms uncompressed"]
    assert rows == [
        ["none", "20", "1.017", "2.56", "1", "100", "150"],
        ["topk", "20", "1.217", "0.256", "10", "100", "150"],
        ["<quantize>", "20", "1.027", "0.64", "4", "100", "150"],
        ["[red]stock", "1", "5", "-", "-", "-", "-"],
    ]
    assert lines[-1] == f"wrote {', '.join(f'{tmp_path}/out/{name}' for name in PLOTS)}"
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(PLOTS)


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
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"loss.png"}


def test_refusals(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not there" in capsys.readouterr().err
    write_run(tmp_path / "a" / "csv", 1)
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "a" / "csv")]) == 2
    assert "2 runs are named 'a'" in capsys.readouterr().err


def test_a_folder_without_csv_files(tmp_path, capsys):
    """The line names what is there: these monitors compare runs themselves."""
    for file, found in (
        ("notes.txt", ""),
        ("tensorboard/events.out.tfevents.1.host", ", but files of TensorBoard"),
        ("wandb/run-20261122_000000-abc/run-abc.wandb", ", but files of TensorBoard and W&B"),
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
        assert main(["report", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert f'{tmp_path} holds no CSV files of a run{found}; switch "csv_monitor" on' in error
        assert error.count("\n") == 1


def test_a_folder_of_runs(tmp_path):
    runs(tmp_path / "runs" / "demo")
    write_run(tmp_path / "runs" / "later" / "topk" / "csv", 100, loss=1.3)
    names = [run.name for run in read_runs(tmp_path / "runs")]
    assert sorted(names) == ["demo/<quantize>", "demo/none", "demo/topk", "later/topk"]
    assert [run.name for run in read_runs(tmp_path / "runs" / "later")] == ["later"]


def test_a_run_that_cannot_be_read_is_passed_over(tmp_path, capsys):
    """A run that ended before its first step ended the report of all others."""
    write_run(tmp_path / "good" / "csv", 100)
    write_csv(tmp_path / "died" / "csv", LOSS, [])
    write_csv(tmp_path / "damaged" / "csv", LOSS, [(32, "x")])
    assert [run.name for run in read_runs(tmp_path)] == ["good"]
    damaged, died = capsys.readouterr().err.splitlines()
    assert "damaged/csv/Train_Samples_train_loss.csv is not lines" in damaged and damaged.endswith(
        "; skipped"
    )
    assert died.endswith("died/csv holds no Train/Samples/train_loss: the run wrote no step; skipped")


def test_files_that_do_not_reach_as_far_as_others(tmp_path, capsys):
    """A run was killed while it wrote, or its disk was full: one value fewer in any of its files was a
    traceback, and no report of the others."""
    whole = tmp_path / "whole" / "csv"
    write_csv(whole, LOSS, [(32, 2.0), (64, 1.0)])
    write_csv(whole, label("step_ms"), [(32, 100.0), (64, 100.0)])
    for direction, name in itertools.product(DIRECTIONS, ("raw_bytes", "wire_bytes")):
        write_csv(whole, label(name, 0, direction), [(32, 1000.0), (64, 2000.0)])
    for name, values in {
        "rounds": (0, 1),
        "members": (0, 2),
        "round_s": (0, 4.0),
        "wire_bytes": (0, 1),
    }.items():
        write_csv(whole, exchange_label("replicas", 0, name), zip((32, 64), values))
    for number, file in enumerate(sorted(whole.iterdir())):
        for kept in range(4):  # lines, the header among them; 3: it is no file at all
            cut = shutil.copytree(whole, tmp_path / f"{number}_{kept}") / file.name
            cut.unlink()
            cut.mkdir() if kept == 3 else cut.write_text("".join(file.read_text().splitlines(True)[:kept]))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert "whole: messages uncompressed, 1 rounds of 2 replicas, 1e-06 MB and 4 s each" in printed.out
    assert "Is a directory" in printed.err and all(
        line.endswith("; skipped") for line in printed.err.splitlines()
    )


def test_losses_of_both_infinities(tmp_path):
    write_csv(tmp_path, LOSS, [(32, math.inf), (64, -math.inf)])
    assert math.isnan(summarize(read_run(tmp_path))["loss"])


def test_a_run_whose_loss_became_nan(tmp_path, capsys):
    """The table showed it like an unknown loss: by a dash, or without a column if no run had another loss."""
    write_csv(tmp_path / "csv", LOSS, [(32, 2.0), (64, 1e22), (96, math.nan), (128, math.nan)])
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert ": loss nan\n" in capsys.readouterr().out
    assert table([read_run(tmp_path)]) == [{"run": tmp_path.name, "steps": "4", "loss": "nan"}]


def pictures(folder, names):
    """The figures of runs of these names, in this order, in which no name of a bar lies upon another one."""
    from ds_compress.cli.plots import PLOTS

    for name in names:
        write_run(folder / name / "csv", 1000)
    found = sorted(read_runs(folder), key=lambda run: names.index(run.name))
    figures = [plot(found) for plot in PLOTS.values()]
    for figure in figures:
        figure.savefig(folder / "picture.png")
    for figure in figures[1:]:
        boxes = [text.get_window_extent() for text in figure.axes[0].get_xticklabels()]
        assert all(one.x1 <= next_one.x0 + 1 for one, next_one in itertools.pairwise(boxes))
    return figures


def test_names_are_shown_as_they_are(tmp_path):
    """A name with two dollar signs was a formula, a wrong one a traceback; one that began with _ had no entry
    in the legend; and the names of many bars lay upon each other."""
    names = ["none", "_mine", "lr$10^$", "a run with a long name"]
    losses, *_ = pictures(tmp_path, names)
    assert [text.get_text() for text in losses.axes[0].get_legend().get_texts()] == names


@pytest.mark.extended
def test_pictures_of_many_runs(tmp_path):
    """The legend pushed the losses out of their picture, and names of bars lay upon each other."""
    losses, *_ = pictures(tmp_path, [f"a_run_with_a_name_{number}" for number in range(30)])
    axes = losses.axes[0]
    assert axes.get_position().height > 0.8 and axes.get_position().width > 0.6
    frame = axes.get_legend().get_window_extent()
    assert losses.bbox.y0 <= frame.y0 and frame.x1 <= losses.bbox.x1
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 30


def test_without_matplotlib_there_is_still_text(tmp_path, capsys, monkeypatch):
    """It was once refused, headlines and table included."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "ds_compress.cli.plots", raising=False)
    assert main(["report", *runs(tmp_path), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert "none: messages uncompressed" in printed.out and "wrote" not in printed.out
    assert "report: no plots: " in printed.err and not (tmp_path / "out").exists()


def test_headlines(tmp_path, capsys):
    """The bytes, the price and the gain of each run against the one that compressed nothing."""
    found = [read_run(path) for path in map(Path, runs(tmp_path))]
    base = find_baseline(found)
    by_name = {run.name: headline(run, base) for run in found}
    assert by_name["topk"] == "topk: 10x fewer bytes, +0.200 loss, 1.00x steps/s against none"
    assert by_name["<quantize>"] == "<quantize>: 4x fewer bytes, +0.010 loss, 1.00x steps/s against none"
    assert by_name["none"].startswith("none: messages uncompressed, loss 1.0")
    assert find_baseline(found[1:]) is None
    assert headline(found[1], None).startswith("topk: 10x fewer bytes, loss 1.2")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert by_name["topk"] in capsys.readouterr().out


def test_a_headline_has_what_the_guard_measured(tmp_path):
    write_run(tmp_path / "topk" / "csv", 100)
    write_csv(tmp_path / "topk" / "csv", label("loss_cost"), [(32, 0.5), (640, 0.25)])
    said = "the guard last measured +0.250 loss by compression"
    assert headline(read_run(tmp_path / "topk"), None).endswith(said)
