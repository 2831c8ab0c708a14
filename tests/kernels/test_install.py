"""Kernels are compiled when the package is installed, and never later."""

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
from ds_compress.kernels import library
from tests.support.kernels import COMPILER, ROOT, TARGETS

USES = """
import json, logging
import torch
from ds_compress.kernels import library
from ds_compress.kernels.backends import cpu, reference
from ds_compress.kernels.quantize.grid import Grid
logging.basicConfig(format="%(message)s")
x = torch.randn(256, 128)
parts = cpu.quantize(x, Grid(4))
assert all(map(torch.equal, parts, reference.quantize(x, Grid(4))))
loaded = library.load()
print(json.dumps(loaded and loaded._name))
"""


@pytest.fixture
def tree(tmp_path):
    """A copy of the source tree without libraries; objects that are current are taken from this one."""
    folder = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    shutil.copytree(ROOT / "ds_compress", folder / "ds_compress", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    settings = (ROOT / "setup.cfg").read_text()
    assert "build_temp = build/objects" in settings
    settings = settings.replace("build/objects", str(ROOT / "build" / "objects"))
    (folder / "setup.cfg").write_text(settings)
    return folder


def wheel(tree, **variables):
    """The wheel of `tree`, made offline, and what is in it."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(tree.parent), str(tree)],
        env={**os.environ, **variables},
        cwd=tree.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tree.parent.glob("*.whl")
    return file, zipfile.ZipFile(file).namelist()


def unpacked(file, folder):
    zipfile.ZipFile(file).extractall(folder)
    return folder


def use(site, **variables):
    """The library that a process loads which has the package in `site`, and what it logs."""
    environment = {**os.environ, "PYTHONPATH": str(site), **variables}
    command = [sys.executable, "-c", USES]
    done = subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr.splitlines()


def test_a_wheel_has_a_library_for_every_instruction_set(tree, tmp_path):
    """With a compiler that makes empty files: another one takes a minute."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor made; do :; done\n: > "$made"\n')
    compiler.chmod(0o755)
    (tree / "setup.cfg").write_text((ROOT / "setup.cfg").read_text())  # without objects of this tree
    file, names = wheel(tree, CXX=str(compiler))
    libraries = {library.file(target).name for target in TARGETS}
    assert {Path(name).name for name in names if name.endswith(".so")} == libraries
    assert not [name for name in names if name.endswith((".cpp", ".h"))]
    assert {name for name in names if name.startswith("ds_compress/recipes/")} == {
        f"ds_compress/recipes/{name}.json" for name in recipes.names()
    }
    assert "-py3-none-linux_" in file.name and file.stem.endswith(platform.machine())


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.extended
def test_of_a_wheel_the_best_library_is_used(tree, tmp_path):
    site = unpacked(wheel(tree)[0], tmp_path / "site")
    best = site / "ds_compress" / "kernels" / library.file(library.supported()[0]).name
    assert use(site) == (str(best), [])


def test_a_machine_where_nothing_can_be_written_uses_the_kernels():
    """Kernels were once compiled into the user's cache: without one, codecs were several times slower."""
    if library.load() is None:
        pytest.skip("no compiled kernels")
    nowhere = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), "/sys/ds_compress")
    assert use(ROOT, **nowhere, CXX="no-such-compiler") == (str(library.file(library.instruction_set())), [])


def test_nothing_is_left_in_the_home_of_a_user(tmp_path):
    use(ROOT, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / ".cache"))
    assert not [path for path in tmp_path.rglob("*") if "ds_compress" in path.name]


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "g++ '"])
@pytest.mark.extended(keep=1)
def test_without_a_compiler_the_package_is_installed_and_warns_once(compiler, tree, tmp_path):
    """There was one warning for each of ten sources. An open quote in CXX ended the installation."""
    (tree / "setup.cfg").write_text((ROOT / "setup.cfg").read_text())  # without objects of this tree
    file, names = wheel(tree, CXX=compiler)
    assert file.name.endswith("-py3-none-any.whl") and not [name for name in names if name.endswith(".so")]
    loaded, (message,) = use(unpacked(file, tmp_path / "site"))
    assert loaded is None and "several times slower: no compiled kernels" in message


def test_what_cannot_be_compiled_in_place_is_said(tree):
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    (tree / "setup.cfg").write_text((ROOT / "setup.cfg").read_text())
    environment = {**os.environ, "CXX": "no-such-compiler"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "No such file or directory: 'no-such-compiler'" in done.stderr
