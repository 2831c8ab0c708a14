"""One compile for all processes of a user, kept where nobody else can put anything."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_compress.kernels.native import build, cache, prebuilt
from tests.support.compiled import COMPILER, ROOT, compiles, environment, messages, waiting

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def kept(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".so")


def test_eight_processes_at_once_compile_once(tmp_path):
    ranks = [waiting(tmp_path) for _ in range(8)]
    assert [rank.communicate()[0].split() for rank in ranks] == [["True"]] * 8
    assert compiles(tmp_path) == 1
    assert messages(tmp_path)["compiled"] and compiles(tmp_path) == 1
    folder = tmp_path / "cache" / "ds_compress"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.suffix for path in folder.iterdir()} == {".so", ".lock"}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("whole_group", [True, False], ids=["with its compiler", "alone"])
def test_a_process_that_is_killed_while_it_compiles_leaves_nothing(whole_group, tmp_path):
    """It holds the lock, and has files: the next one neither waits nor finds them."""
    first = waiting(tmp_path, before="echo $$ > $STATE/compiling; exec sleep 600")
    compiling = tmp_path / "compiling"
    while not compiling.exists() or not compiling.read_text().strip():
        assert first.poll() is None
        time.sleep(0.02)
    first.kill()
    first.wait()
    compiler = int(compiling.read_text())
    if whole_group:
        os.kill(compiler, signal.SIGKILL)
    assert messages(tmp_path)["compiled"]
    folder = tmp_path / "cache" / "ds_compress"
    assert len(kept(folder)) == 1 and not list(folder.glob("*.build"))
    if not whole_group:
        os.kill(compiler, signal.SIGKILL)


def test_a_process_that_ends_takes_its_compiler_along(tmp_path):
    before = "echo $$ > $STATE/compiling; exec sleep 600"
    code = """
import os, time
from ds_compress.kernels import native
assert not native.serves("selection", 1 << 20)
while not os.path.exists(os.environ["STATE"] + "/compiling"):
    time.sleep(0.02)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(tmp_path, before),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "compiling").read_text()), 0)
    assert not list((tmp_path / "cache" / "ds_compress").glob("*.build"))


def test_a_compiler_that_is_killed_is_tried_again(tmp_path):
    """The first one is; the warning says that another try follows, and the next process finds its work."""
    before = "test -e $STATE/killed || { touch $STATE/killed; kill -9 $$; }"
    done = messages(tmp_path, before=before, again_seconds=0.0)
    assert done["attempts"] == [False, True] and done["compiled"]
    (said,) = done["said"].splitlines()
    assert "will be tried again" in said


def test_messages_go_on_beside_a_slow_compiler_and_are_the_same_when_it_is_done(tmp_path):
    before = "until test -e $STATE/go; do sleep 0.02; done"
    done = messages(tmp_path, before=before, slow_first=True)
    assert done["slow"] and done["compiled"]
    assert done["slow"] == done["fast"]


REFUSED = {
    "of others to write": lambda folder: folder.chmod(0o777),
    "of others to read": lambda folder: folder.chmod(0o755),
    "a link": lambda folder: (folder.rename(folder.with_name("other")), folder.symlink_to("other")),
    "no folder": lambda folder: (folder.rename(folder.with_name("other")), folder.touch(0o600)),
    "in the hands of all": lambda folder: folder.parent.chmod(0o777),
    "of another user": lambda folder: os.chown(folder, 65534, 65534),
}


@pytest.mark.parametrize("spoil", REFUSED.values(), ids=REFUSED)
def test_a_folder_that_is_not_ours_alone_is_not_used(spoil, tmp_path):
    folder = tmp_path / "cache" / "ds_compress"
    folder.mkdir(0o700, parents=True)
    try:
        spoil(folder)
    except PermissionError:
        pytest.skip("only root gives a folder away")
    done = messages(tmp_path)
    assert done["compiled"] and compiles(tmp_path) == 1
    (said,) = done["said"].splitlines()
    assert "is not kept in" in said and "0700" in said
    assert not folder.is_dir() or not kept(folder)
    assert messages(tmp_path)["compiled"] and compiles(tmp_path) == 1  # beside the temporary files


WRONG = {
    "of others to write": lambda file: file.chmod(0o666),
    "a link": lambda file: (
        file.rename(file.with_suffix(".other")),
        file.symlink_to(file.with_suffix(".other")),
    ),
    "cut short": lambda file: os.truncate(file, 5000),
    "empty": lambda file: os.truncate(file, 0),
    "one bit is another": lambda file: file.write_bytes(
        file.read_bytes()[:9000] + bytes([file.read_bytes()[9000] ^ 1]) + file.read_bytes()[9001:]
    ),
    "another user's": lambda file: os.chown(file, 65534, 65534),
}


@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
def test_a_file_that_is_not_whole_and_ours_is_never_loaded_but_made_again(spoil, tmp_path):
    expected = messages(tmp_path)
    (file,) = (tmp_path / "cache" / "ds_compress").glob("*.so")
    try:
        spoil(file)
    except PermissionError:
        pytest.skip("only root gives a file away")
    assert messages(tmp_path) == expected and compiles(tmp_path) == 2
    assert messages(tmp_path) == expected and compiles(tmp_path) == 2
    assert file.is_file() and not file.is_symlink() and file.stat().st_mode & 0o777 == 0o600


def test_what_an_older_processor_runs_is_kept_beside(tmp_path, monkeypatch):
    expected = messages(tmp_path)
    target = min(prebuilt.targets(), key=lambda target: len(prebuilt.targets()[target]))
    monkeypatch.setenv(prebuilt.CPU, target)
    assert messages(tmp_path) == expected and compiles(tmp_path) == 2
    assert messages(tmp_path) == expected and compiles(tmp_path) == 2


def test_old_builds_go_when_there_is_a_new_one(tmp_path):
    folder = tmp_path / "cache" / "ds_compress"
    folder.mkdir(0o700, parents=True)
    for name in ("old.so", "old.lock", "recent.so", "other.txt"):
        (folder / name).touch()
    (folder / "old.build").mkdir()
    for name in ("old.so", "old.lock", "other.txt", "old.build"):
        os.utime(folder / name, (0, 0))
    assert messages(tmp_path)["compiled"]
    names = {path.name for path in folder.iterdir()}
    assert {"recent.so", "other.txt"} <= names and not {"old.so", "old.lock", "old.build"} & names


def test_another_source_compiler_flag_or_processor_is_another_key(tmp_path, monkeypatch):
    def key(compiler=COMPILER, source="selection"):
        return cache.key(build.identity(compiler), build.files(source))

    usual = key()
    found = [usual, key(source="fp8"), key(f"{COMPILER} -DOTHER")]
    script = tmp_path / "c++"
    for version in (1, 2):
        script.write_text(f"#!/bin/sh\necho {version}\n")
        script.chmod(0o700)
        found.append(key(str(script)))
    with monkeypatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
        found.append(key())
    with monkeypatch.context() as patch:
        shutil.copytree(build.HERE, tmp_path / "sources")
        patch.setattr(build, "HERE", tmp_path / "sources")
        assert key() == usual
        (tmp_path / "sources" / "quantize" / "bits.h").write_text("// another one")
        found.append(key())
    for name, flags in (("one", "sse avx2"), ("other", "sse")):
        (tmp_path / name).write_text(f"cpu MHz: 7\nflags : {flags}\n\nprocessor : 1\nflags : none\n")
        monkeypatch.setattr(cache, "CPUINFO", tmp_path / name)
        found.append(key())
    (tmp_path / "other").write_text("cpu MHz: 8\nflags : sse\n\n")
    assert key() == found[-1]
    monkeypatch.setattr(cache, "CPUINFO", tmp_path / "none")
    found.append(key())
    assert len({*found}) == len(found) == 10


def test_nobody_waits_for_a_process_that_hangs(tmp_path):
    """It is stopped while it holds the lock: after the time that a build may take the next one goes ahead."""
    first = waiting(tmp_path, before="touch $STATE/compiling; exec sleep 600")
    while not (tmp_path / "compiling").exists():
        assert first.poll() is None
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGSTOP)
    try:
        assert messages(tmp_path, turn_seconds=0.2)["compiled"]
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()


def test_a_fork_while_a_thread_compiles_has_a_build_of_its_own(tmp_path):
    code = """
import os, time
from pathlib import Path
from ds_compress.kernels import native
state = Path(os.environ["STATE"])
assert not native.serves("selection", 1 << 20)
while not (state / "compiling").exists():
    time.sleep(0.02)
child = os.fork()
if not child:
    (state / "go").touch()
    os._exit(0 if native.wait("selection") else 1)
assert os.waitpid(child, 0)[1] == 0
assert native.wait("selection")
"""
    before = "touch $STATE/compiling; until test -e $STATE/go; do sleep 0.02; done"
    environ = environment(tmp_path, before)
    subprocess.run([sys.executable, "-c", code], env=environ, cwd=ROOT, check=True, timeout=600)
    assert compiles(tmp_path) == 1


def test_nothing_is_written_beside_the_sources():
    assert not [path for path in Path(ROOT, "ds_compress").rglob("*.so") if "prebuilt" not in path.parts]
