"""Kernels compile, without a warning, at installation; a process loads the best library, and no stale one."""

import _ctypes
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from ds_compress.cli import main
from ds_compress.codec import Context, TensorSpec, build
from ds_compress.config import recipes
from ds_compress.errors import CompressionError
from ds_compress.kernels import backends, library
from ds_compress.version import __version__
from tests.support.codecs import assert_same_bits
from tests.support.kernels import COMPILER, ROOT, TARGETS

SETS = library._X86_64
V4, V3, V2 = SETS
load = library.load.__wrapped__  # as a new process would


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Lets libraries for some instruction sets be there, on an x86 processor with some features."""

    def install(*names, features=SETS[V4]):
        monkeypatch.setattr(library, "FOLDER", tmp_path)
        monkeypatch.setattr(library, "instruction_sets", lambda: SETS)
        monkeypatch.setattr(library, "features", lambda: frozenset(features))
        for name in names:
            library.file(name).touch()

    return install


@pytest.mark.parametrize(
    "features, expected",
    [(SETS[V4], V4), (SETS[V3], V3), (SETS[V3] - {"fma"}, V2), (SETS[V2] - {"popcnt"}, None), ((), None)],
)
def test_the_best_library_for_the_processor_that_is_installed_is_used(features, expected, installed):
    installed(V2, features=features)
    assert library.instruction_set() == (expected and V2)
    installed(*SETS, features=features)
    assert library.instruction_set() == expected


def test_an_older_processor_can_be_asked_for(installed, monkeypatch):
    """To measure on one machine what another kind of machine would run."""
    installed(*SETS)
    monkeypatch.setenv(library.CPU, V3)
    assert library.instruction_set() == V3


REFUSED = {
    "the processor lacks it": (V4, SETS[V3], SETS, "'x86-64-v4' needs avx512bw, .*; expected .*: x86-64-v3"),
    "nobody knows it": ("haswell", SETS[V4], SETS, r"'haswell' is no instruction set .*x86-64-v4, x86-64-v3"),
    "it is not compiled": (V3, SETS[V4], [V4], r"build_ext --inplace` does it; expected one of: x86-64-v4"),
    "there is none": (V3, SETS[V4], [], "expected one of: none"),
}


@pytest.mark.parametrize("asked, features, names, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused_in_one_line(
    asked, features, names, message, installed, monkeypatch, capsys
):
    """DS_COMPRESS_CPU=x86-64-v4 without AVX-512 died of an illegal instruction."""
    installed(*names, features=features)
    monkeypatch.setenv(library.CPU, asked)
    monkeypatch.setattr(library, "load", load)
    with pytest.raises(CompressionError, match=f"^DS_COMPRESS_CPU: .*{message}"):
        backends.prepare()
    assert main(["bench", "--shape", "8,64", "--codec", "quantize"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("DS_COMPRESS_CPU: ") and error.count("\n") == 1


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A source tree of one file and the library of this process, which was made before it."""
    name = library.instruction_set()
    if name is None:
        pytest.skip("no compiled kernels")
    made, source = tmp_path / library.file(name).name, tmp_path / "changed.cpp"
    shutil.copy(library.file(name), made)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    (tmp_path.parent / "version.py").write_text("another version")
    source.write_text("// another source")
    os.utime(source, (made.stat().st_mtime + 5,) * 2)
    return made


def without(caplog):
    """The warning when no library can be used; it begins with our name, as the demo shows only such lines."""
    with caplog.at_level(logging.WARNING):
        assert load() is None
    (record,) = caplog.records
    said = "ds_compress: codecs on the CPU run in PyTorch, tens of times slower, entropy in about 0.1 s"
    assert record.getMessage().startswith(said)
    return record.getMessage()


def test_a_library_of_older_sources_is_not_used(copied, caplog):
    """A function that gained an argument would read memory that nobody gave it."""
    assert "older than its C++ sources; run `python setup.py build_ext --inplace`" in without(caplog)


def test_sources_that_were_only_touched_need_no_new_library(copied, monkeypatch):
    """git does that, from one branch to another and back."""
    _, _, after_version = copied.read_bytes().partition(f"{__version__} ".encode())
    monkeypatch.setattr(library, "sources_hash", lambda: after_version[:16].decode())
    assert load() is not None


def test_a_library_of_another_version_is_not_used(copied, caplog, monkeypatch):
    copied.with_name("changed.cpp").unlink()  # a wheel has no sources
    monkeypatch.setattr("ds_compress.version.__version__", "9.9")
    assert "this is 9.9; install ds_compress again" in without(caplog)


@pytest.mark.parametrize("left", [None, 0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_no_library_of_ours_is_not_used(left, copied, caplog):
    """Another one, or ours cut off, as by a full disk: it was loaded, and its first use ended the process
    with SIGBUS."""
    copied.with_name("changed.cpp").unlink()
    if left is None:
        shutil.copy(_ctypes.__file__, copied)
    else:
        os.truncate(copied, int(left * copied.stat().st_size))
    assert f"{copied}{' is cut off; install ds_compress again' if left else ''}" in without(caplog)


CODECS = ("quantize", "topk", "fp8", "entropy", "lossless", "minmax")


def test_without_kernels_one_warning_is_logged_and_the_bytes_are_the_same(installed, caplog, monkeypatch):
    """Each of ten sources warned that it ran uncompiled."""
    compiled = [packet({"name": name}) for name in CODECS]
    installed(features=())
    library.load.cache_clear()
    with caplog.at_level(logging.WARNING):
        backends.prepare()
        for name, expected in zip(CODECS, compiled):
            assert_same_bits(packet({"name": name}), expected)
    library.load.cache_clear()
    (record,) = caplog.records
    assert "no compiled kernels for this processor" in record.getMessage()


def packet(choice):
    """What a codec makes of a long tensor, and what it decodes that to."""
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).view(64, 1024)
    codec = build(choice)
    parts = codec.encode(x, Context())
    return *parts, codec.decode(tuple(part.clone() for part in parts), TensorSpec.of(x), Context())


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
    """A copy of the source tree without libraries."""
    folder = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    shutil.copytree(ROOT / "ds_compress", folder / "ds_compress", ignore=ignored)
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def python(folder, *arguments, **variables):
    """What Python did in `folder`."""
    command, environment = [sys.executable, *arguments], {**os.environ, **variables}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def wheel(tree, **variables):
    """The wheel of `tree`, made offline, and what is in it."""
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(tree.parent)]
    python(tree.parent, "-m", "pip", "wheel", *options, str(tree), **variables)
    (file,) = tree.parent.glob("*.whl")
    return file, zipfile.ZipFile(file).namelist()


def use(file, site):
    """The library that a process loads which has the wheel in `site`, and what it logs."""
    zipfile.ZipFile(file).extractall(site)
    done = python(site, "-c", USES, PYTHONPATH=str(site))
    return json.loads(done.stdout), done.stderr.splitlines()


@pytest.mark.extended
def test_a_wheel_has_a_library_for_every_instruction_set(tree, tmp_path):
    """With a compiler that makes empty files: another one takes a minute."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor made; do :; done\n: > "$made"\n')
    compiler.chmod(0o755)
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
    """Made of the objects of this tree, where they are current."""
    settings = (ROOT / "setup.cfg").read_text()
    assert "build_temp = build/objects" in settings
    (tree / "setup.cfg").write_text(settings.replace("build/objects", str(ROOT / "build" / "objects")))
    site = tmp_path / "site"
    best = site / "ds_compress" / "kernels" / library.file(library.supported()[0]).name
    assert use(wheel(tree)[0], site) == (str(best), [])


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "g++ '"])
@pytest.mark.extended
def test_without_a_compiler_the_package_is_installed_and_warns_once(compiler, tree, tmp_path):
    """There was one warning for each of ten sources. An open quote in CXX ended the installation."""
    file, names = wheel(tree, CXX=compiler)
    assert file.name.endswith("-py3-none-any.whl") and not [name for name in names if name.endswith(".so")]
    loaded, (message,) = use(file, tmp_path / "site")
    assert loaded is None and "tens of times slower, " in message and ": no compiled kernels" in message


def test_what_cannot_be_compiled_in_place_is_said(tree):
    done = python(tree, "setup.py", "-q", "build_ext", "--inplace", CXX="no-such-compiler")
    assert "No such file or directory: 'no-such-compiler'" in done.stderr


FOREIGN = {"aarch64": "aarch64-linux-gnu-g++"}
"""Machines that this one may have a compiler for."""


@pytest.mark.parametrize("target", [*TARGETS, *FOREIGN])
@pytest.mark.parametrize(
    "source", [path for path in library.sources() if path.suffix == ".cpp"], ids=lambda path: path.stem
)
@pytest.mark.extended
def test_every_source_compiles_without_a_warning(source, target, tmp_path):
    """Version 0.1 passed vectors of 16 floats by value: a warning, and an error here, without AVX-512."""
    compiler = shutil.which(FOREIGN.get(target, "g++")) or pytest.skip("no such compiler")
    march = [f"-march={target}"] if target.startswith("x86-64") else []
    words = [compiler, *library.FLAGS, "-O0", *march, "-Werror", "-c", source, "-o", tmp_path / "made.o"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
