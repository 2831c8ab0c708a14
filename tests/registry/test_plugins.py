"""Codecs and feedbacks of a user are known wherever names are; what is wrong with one is one line."""

import json
import sys

import pytest

from ds_compress import Codec, register
from ds_compress.cli import main
from ds_compress.codec import CODECS
from ds_compress.feedback import FEEDBACKS
from ds_compress.registry import Named, Options, Registry, plugins
from tests.support.launch_scripts import ROOT
from tests.support.pipeline import alike, ds_config, train, train_simulated
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal

MINE = (ROOT / "tests" / "codecs" / "half_scale.py").read_text()
"""A user's module: codec "half_scale" with the option `dtype`."""
BACKWARD = {"codec": "half_scale", "feedback": "ef"}
BLOCK = alike({"name": "half_scale", "dtype": "bf16"}, backward=BACKWARD, min_numel=0)


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """What a test registers and imports goes with it."""
    for registry in (CODECS, FEEDBACKS):
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    plugins.load_installed.cache_clear()
    yield
    plugins.load_installed.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith(("my_", "ds_compress_import_")):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a module `my_codecs` and a config that names its codec."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_codecs.py").write_text(MINE)
    (tmp_path / "ds_config.json").write_text(json.dumps({"ds_compress": BLOCK}))
    return tmp_path


def came_by(place, folder):
    """Arguments of a command line by which the module is imported; none where it is installed."""
    if place == "installed":
        install(folder)
        return []
    return ["--import", place]


def install(folder, value="my_codecs"):
    """As pip leaves it: a package that declares `value` as a plugin."""
    information = folder / "my_plugin-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[ds_compress.plugins]\nmine = {value}\n")
    sys.path.insert(0, str(folder))


SIZES = ["--stages", "2", "--shape", "4,256"]
ADVISED = ["--micro-batches", "4", "--forward-ms", "9", "--gbps", "1", "--codec-gbps", "1", "--json"]
COMMANDS = {
    "list": ["list", "--json"],
    "check": ["check", "ds_config.json", *SIZES, "--json"],
    "bench": ["bench", "--shape", "4,256", "--codec", "half_scale"],
    "advise": ["advise", *SIZES, *ADVISED, "--recipe", "ds_config.json"],
    "schema": ["schema"],
}


@pytest.mark.parametrize("place", ["my_codecs", "my_codecs.py", "./my_codecs.py", "installed"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_knows_it(command, place, folder, capsys):
    assert main([*COMMANDS[command], *came_by(place, folder)]) == 0
    assert "half_scale" in capsys.readouterr().out
    assert "half_scale" in CODECS.names()


def test_it_is_listed_with_its_options(folder, capsys):
    assert main(["list", "--json", "--import", "my_codecs"]) == 0
    (mine,) = (c for c in json.loads(capsys.readouterr().out)["codecs"] if c["name"] == "half_scale")
    assert mine["summary"] == "Eight bits for each value, in steps of a 127th of the largest."
    assert mine["options"]["dtype"]["description"] == "Dtype in which the step is sent."


def test_the_same_module_may_come_several_ways(folder, capsys):
    install(folder)
    twice = ["--import", "my_codecs", "--import", "my_codecs.py"]
    assert main(["list", *twice, "--import", str(folder / "my_codecs.py")]) == 0


def test_training_and_simulate_know_what_is_installed(folder):
    install(folder)
    config = ds_config(BLOCK)
    first, last = (rank["losses"] for rank in run_ranks(2, train, 2, config))
    assert "half_scale" not in CODECS.names()  # the ranks loaded it
    assert first == last == train_simulated(2, config) != train_simulated(2, ds_config())
    assert "half_scale" in CODECS.names()


TAKEN = MINE.replace('"half_scale"', '"bf16"')
OWN = "from ds_compress import Codec, register\n@register({})\nclass X({}): pass"
LOOSE = MINE.replace("(CodecOptions)", "(__import__('pydantic').BaseModel)")
BROKEN = {
    "syntax": ("def", "SyntaxError: "),
    "import": ("import my_no_such_module", "ModuleNotFoundError: No module named 'my_no_such_module'"),
    "exit": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "lines": ("raise ValueError('first\\nsecond')", "ValueError: first second"),
    "taken": (TAKEN, "CompressionError: codec 'bf16': already registered by BFloat16"),
    "no codec": (OWN.format("'x'", "object"), "codec 'x': <class 'my_codecs.X'> does not derive from Codec"),
    "no name": (OWN.format(5, "Codec"), "a name is a string"),
    "loose options": (LOOSE, "Options does not derive from CodecOptions, so unknown keys would pass"),
    "name": (MINE.replace("dtype: L", "name: str = ''\n        dtype: L"), 'has an option "name"'),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("place", ["my_codecs", "my_codecs.py", "installed"])
def test_a_broken_module_is_one_line(kind, place, folder, capsys):
    code, reason = BROKEN[kind]
    (folder / "my_codecs.py").write_text(code)
    assert main(["list", *came_by(place, folder)]) == 2
    printed = capsys.readouterr()
    what = "plugin 'my_codecs' of my-plugin" if place == "installed" else f"--import {place}"
    if place == "my_codecs.py":
        reason = reason.replace("my_codecs.X", "ds_compress_import_my_codecs.X")
    assert printed.err.startswith(f"{what} cannot be imported: ") and printed.err.count("\n") == 1
    assert reason in printed.err and printed.out == ""


def test_a_module_that_is_not_there(folder, capsys):
    for place in ("my_other_codecs", "my_other_codecs.py", "", "..", "my_codecs/"):
        assert main(["list", "--import", place]) == 2
        assert capsys.readouterr().err.startswith(f"--import {place} cannot be imported: ")


def test_a_broken_plugin_stops_every_rank_with_one_line(folder):
    install(folder, "my_codecs:no_such_name")
    for line in run_ranks(2, refusal, train, 2, ds_config(BLOCK)):
        what = "plugin 'my_codecs:no_such_name' of my-plugin"
        assert line.startswith(f"{what} cannot be imported: AttributeError")
        assert line.endswith("[rank 0]")


@pytest.mark.parametrize("choice", ["picky", {"name": "picky"}])
def test_an_option_that_must_be_given(choice):
    """By its name alone, such a codec of a user's own once ended in pydantic's error, of four lines."""
    things: Registry[Named] = Registry("thing", Named)

    @things.register("picky")
    class Picky(Named):
        class Options(Options):
            bits: int
            """There is no default."""

    assert refusal(things.build, choice, "ds_compress.thing") == "ds_compress.thing.bits: missing"
    assert things.build({"name": "picky", "bits": 4}, "").options.bits == 4


def test_what_lacks_a_part_of_the_contract_is_not_registered():
    """It once was, and ended in a TypeError of Python's own when a config named it."""
    half = type("Half", (Codec,), {"encode": lambda self, x, ctx: (x,), "__doc__": "Encodes alone."})
    line = refusal(register("half"), half)
    assert line.startswith("codec 'half': ") and line.endswith("Half does not define decode, layout")
