"""The library that a process loads: the best one for its processor, and no other than that of its sources."""

import _ctypes
import logging
import os
import shutil

import pytest
import torch

from ds_compress.cli import main
from ds_compress.codec import Context, TensorSpec, build
from ds_compress.errors import CompressionError
from ds_compress.kernels import backends, library
from tests.support.codecs import assert_same_bits

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
def test_the_best_library_for_the_processor_is_used(features, expected, installed):
    installed(*SETS, features=features)
    assert library.instruction_set() == expected


def test_the_best_one_that_is_installed_is_used(installed):
    installed(V2)
    assert library.instruction_set() == V2


def test_an_older_processor_can_be_asked_for(installed, monkeypatch):
    """To measure on one machine what another kind of machine would run."""
    installed(*SETS)
    monkeypatch.setenv(library.CPU, V3)
    assert library.instruction_set() == V3


REFUSED = {
    "the processor lacks it": (
        V4,
        SETS[V3],
        SETS,
        r"'x86-64-v4' needs avx512bw, .*; expected one of: x86-64-v3",
    ),
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
    """What is said when no library can be used."""
    with caplog.at_level(logging.WARNING):
        assert load() is None
    (record,) = caplog.records
    assert "codecs on the CPU run in PyTorch, several times slower: " in record.getMessage()
    return record.getMessage()


def test_a_library_of_older_sources_is_not_used(copied, caplog):
    """A function that gained an argument would read memory that nobody gave it."""
    assert "older than its C++ sources; run `python setup.py build_ext --inplace`" in without(caplog)


def test_sources_that_were_only_touched_need_no_new_library(copied, monkeypatch):
    """git does that, from one branch to another and back."""
    monkeypatch.setattr(
        library, "sources_hash", lambda: copied.read_bytes().split(library_id())[1][:16].decode()
    )
    assert load() is not None


def library_id():
    from ds_compress.version import __version__

    return f"{__version__} ".encode()


def test_a_library_of_another_version_is_not_used(copied, caplog, monkeypatch):
    copied.with_name("changed.cpp").unlink()  # a wheel has no sources
    monkeypatch.setattr("ds_compress.version.__version__", "9.9")
    assert "this is 9.9; install ds_compress again" in without(caplog)


@pytest.mark.parametrize("foreign", ["another library", "empty"])
def test_a_file_that_is_no_library_of_ours_is_not_used(foreign, copied, caplog):
    copied.with_name("changed.cpp").unlink()
    if foreign == "another library":
        shutil.copy(_ctypes.__file__, copied)
    else:
        os.truncate(copied, 0)
    assert str(copied) in without(caplog)


CODECS = ("quantize", "topk", "fp8", "entropy", "lossless", "minmax", "acsgd")


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
