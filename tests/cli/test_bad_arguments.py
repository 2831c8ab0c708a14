"""Whatever is wrong with a command's arguments or files: one line, exit code 2."""

import pytest

from ds_compress.cli import main
from ds_compress.monitor.metrics import label
from ds_compress.version import __version__
from tests.support.launch_scripts import write_csv

CHECK = ["check", "DS_CONFIG", "--stages", "2", "--shape", "4,1024"]
ADVISE = ["advise", "--stages", "2", "--micro-batches", "4", "--forward-ms", "16", "--shape", "4,1024"]
ADVISE += ["--gbps", "1", "--codec-gbps", "1000"]
BENCH = ["bench", "--shape", "2,64", "--codec", "bf16"]
NUMBERS = ["-1", "nan", "inf", "-inf", "1e400", "x", "", "0x10", "1e30"]
COUNTS = ["0", "-1", "1.5", "nan", "9" * 9, "9" * 5000, "1_0", " 5", "+5", "\u0663"]


def each(command, options, values):
    return ([*command, option, value] for option in options for value in values)


BAD = [
    *each(ADVISE, ("--step-ms", "--latency-ms"), NUMBERS),
    *each(ADVISE, ("--forward-ms", "--backward-ms"), [*NUMBERS, "1,", "1,-2", "1,2,3"]),
    *each(ADVISE, ("--gbps", "--codec-gbps"), [*NUMBERS, "0"]),
    *each(ADVISE, ("--forward-ms",), ["0"]),
    *each(ADVISE, ("--stages", "--micro-batches"), COUNTS),
    *each(ADVISE, ("--shape",), ["", "0", "0,4", "4,", "4,x", "a", "-1,4", f"{2**62},{2**62}", "9" * 5000]),
    *each(ADVISE, ("--recipe",), ["no_such_file.json", "."]),
    *each(ADVISE, ("--device",), ["cuda:99", "nonsense", "", "meta", "cpu:x"]),
    *each(BENCH, ("--codec",), ["topq", "{", "[]", "{}", '{"name": "fp8", "bits": 99}', '{"name": NaN}']),
    *each(BENCH, ("--codec",), ['{"name":' * 100_000]),
    *each(BENCH, ("--json",), ["no_such_folder/rows.json", "."]),
    *each(BENCH, ("--shape",), ["99999,99999,9999"]),
    *each(CHECK, ("--stages",), COUNTS),
    *each(CHECK, ("--shape",), [",".join(["9" * 9] * 9)]),
    *each(CHECK, ("--dtype",), ["int8"]),
    *each(["replica-store"], ("--port",), ["-1", "65536", "x"]),
    *each(CHECK, ("--replicas", "--parameters", "--no-such-option"), ["2"]),
    [*ADVISE, "--recipe", "DS_CONFIG", "DS_CONFIG"],
    *([CHECK[0], path, *CHECK[2:]] for path in (".", "no_such_file.json")),
    *(["check"], [], ["no_such_command"], ["report"]),
]


def refusal(arguments, capsys):
    try:
        code = main(arguments)
    except SystemExit as stopped:  # argparse
        code = stopped.code
    printed = capsys.readouterr()
    assert code == 2 and printed.out == ""
    assert printed.err.count("\n") == 1 and len(printed.err) < 1000
    return printed.err


@pytest.mark.parametrize("arguments", BAD, ids=lambda arguments: " ".join(arguments)[-50:])
def test_one_line_and_exit_code_2(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "DS_CONFIG").write_text('{"ds_compress": {}}')
    refusal(arguments, capsys)


LOSS = "Train_Samples_train_loss.csv"


@pytest.mark.parametrize(
    "name, content",
    [
        (LOSS, "step,train_loss\n1,x\n"),
        (LOSS, "step,train_loss\n1\n"),
        (LOSS, "step,train_loss\n1,2,3\n"),
        (LOSS, "\x00\x01\udcff\udcfe"),
        (LOSS, ""),
        (f"{label('wire_bytes', 0, 'forward').replace('/', '_')}.csv", "step,wire_bytes\nx,1\n"),
    ],
)
def test_a_damaged_run_is_named(name, content, tmp_path, capsys):
    write_csv(tmp_path, "Train/Samples/train_loss", [(1, 2.0)])
    (tmp_path / name).write_text(content, errors="surrogateescape")
    assert str(tmp_path) in refusal(["report", str(tmp_path), "--out", str(tmp_path / "out")], capsys)


def test_a_report_that_cannot_be_written(tmp_path, capsys):
    write_csv(tmp_path, "Train/Samples/train_loss", [(1, 2.0)])
    (tmp_path / "out").write_text("a file")
    assert str(tmp_path / "out") in refusal(["report", str(tmp_path), "--out", str(tmp_path / "out")], capsys)


def test_a_removed_command_names_what_to_use(capsys):
    error = refusal(["stage-times", "train.py"], capsys)
    assert 'stage-times was removed: "recipe": "auto" measures the model in its run' in error


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"ds-compress {__version__}\n"
