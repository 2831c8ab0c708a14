"""An installed package compiles nothing: its wheel brings libraries for every kind of processor."""

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ds_compress.config import recipes
from ds_compress.kernels.native import prebuilt
from ds_compress.kernels.native.loader import SOURCES
from tests.support.compiled import COMPILER, ROOT, compiles, environment
from tests.support.native import built

LIBRARIES = {f"{source}.{target}.so" for source in SOURCES for target in prebuilt.targets()}

COMPILED_BEFORE = """
for word; do
    case "$word" in -march=*) target=${word#-march=};; *.cpp) source=$(basename "$word" .cpp);; esac
    [ "$last" = -o ] && file=$word
    last=$word
done
"$COMPILER" "$@" -E && cp "$FOLDER/$source.$target/made.so" "$file" && exit
"""
"""In the place of a compiler: it finds every file that is included, and the library is there already."""

USES = """
import json
import torch
from ds_compress.kernels import native, reference, cpu
from ds_compress.kernels.quantize.grid import Grid
x = torch.randn(256, 128)
parts = cpu.quantize(x, Grid(4))
assert all(map(torch.equal, parts, reference.quantize(x, Grid(4))))
print(json.dumps([native.library("quantize")._name, native.wait()]))
"""


def wheel(folder, **variables):
    """The wheel of a copy of the source tree, made offline, and what is in it."""
    tree = folder / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "ds_compress", tree / "ds_compress", ignore=ignored)
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(tree)],
        env={**os.environ, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("*.whl")
    return file, zipfile.ZipFile(file).namelist()


@pytest.mark.skipif(COMPILER is None or not LIBRARIES, reason="no C++ compiler, or not for this machine")
def test_an_installed_package_compiles_nothing(tmp_path):
    """The compiler that makes the wheel is another than the one of the installed package. What it would make
    of these sources other tests have, for the same processors."""
    builder = tmp_path / "builder"
    builder.mkdir()
    (made,) = {built(source, target).parents[1] for source in SOURCES for target in prebuilt.targets()}
    variables = {"COMPILER": COMPILER, "FOLDER": str(made)}
    file, names = wheel(tmp_path, **environment(builder, COMPILED_BEFORE), **variables)
    assert compiles(builder) == len(LIBRARIES)
    assert {Path(name).name for name in names if name.endswith(".so")} == LIBRARIES
    assert {name for name in names if name.startswith("ds_compress/recipes/")} == {
        f"ds_compress/recipes/{name}.json" for name in recipes.names()
    }
    assert "-py3-none-" in file.name and file.stem.endswith(platform.machine())
    site = tmp_path / "site"
    zipfile.ZipFile(file).extractall(site)
    environ = {**environment(tmp_path), "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", USES], env=environ, cwd=site, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded, all_there = json.loads(done.stdout)
    assert all_there and Path(loaded).parent == site / "ds_compress/kernels/native/prebuilt"
    assert not (tmp_path / "compiles").exists() and not (tmp_path / "cache").exists()


def test_without_a_compiler_the_package_installs_all_the_same(tmp_path):
    file, names = wheel(tmp_path, CXX="false")
    assert file.name.endswith("-py3-none-any.whl") and not [name for name in names if name.endswith(".so")]
    assert {f"{source}.cpp" for source in SOURCES} <= {Path(name).name for name in names}


def test_the_best_library_that_the_processor_can_run_is_taken(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(prebuilt, "__file__", str(tmp_path / "prebuilt.py"))
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(prebuilt.ctypes, "CDLL", lambda path: asked.append(Path(path).name) or path)
    (tmp_path / "prebuilt").mkdir()
    assert prebuilt.load("quantize") is None
    for target in prebuilt.targets():
        (tmp_path / "prebuilt" / prebuilt.name("quantize", target)).touch()
    kinds = prebuilt.targets()
    for has in (kinds["x86-64-v4"], kinds["x86-64-v3"], kinds["x86-64-v3"] - {"fma"}):
        prebuilt.load("quantize", lambda has=has: has)
    assert asked == [f"quantize.{target}.so" for target in ("x86-64-v4", "x86-64-v3", "x86-64")]


def test_an_older_processor_can_be_asked_for(tmp_path, monkeypatch):
    """To measure on one machine what another kind of machine would take."""
    asked = []
    monkeypatch.setattr(prebuilt, "__file__", str(tmp_path / "prebuilt.py"))
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(prebuilt.ctypes, "CDLL", lambda path: asked.append(Path(path).name) or path)
    (tmp_path / "prebuilt").mkdir()
    kinds = prebuilt.targets()
    for target in kinds:
        (tmp_path / "prebuilt" / prebuilt.name("quantize", target)).touch()
    assert prebuilt.instructions(lambda: kinds["x86-64-v4"]) == "x86-64-v4"
    monkeypatch.setenv(prebuilt.CPU, "x86-64-v3")
    assert prebuilt.instructions(lambda: kinds["x86-64-v4"]) == "x86-64-v3"
    prebuilt.load("quantize", lambda: kinds["x86-64-v4"])
    assert asked == ["quantize.x86-64-v3.so"]
    assert prebuilt.load("quantize", lambda: kinds["x86-64"]) is None  # it would be killed
