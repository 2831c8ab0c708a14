"""The source distribution, pages, Dockerfile and batch script: nothing missing, no dead links."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from email.parser import Parser

import pytest

from tests.support.finetuning import losses, prepare
from tests.support.launch_scripts import ROOT, load_script

LEFT_OUT = {".git", *(ROOT / ".gitignore").read_text().replace("/", " ").split()} - {"results", "images"}

SOME_TESTS = ("tests/config", "tests/registry", "tests/cli/test_cli.py", "tests/test_layering.py")
"""That need most kinds of files."""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The tree that goes into a source distribution, made offline, and what comes out of it."""
    folder = tmp_path_factory.mktemp("sdist")
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    made = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", made, str(folder)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        archive.extractall(folder / "out", filter="data")
    (out,) = (folder / "out").iterdir()
    return tree, out


def files(folder):
    inner = (path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return {str(path) for path in inner if not re.search("egg-info|^results/images", str(path))}


def test_nothing_of_the_tree_is_missing(unpacked):
    tree, out = unpacked
    assert files(out) - {"PKG-INFO"} == files(tree)
    assert (out / "ds_configs" / "none.json").read_text() == (tree / "ds_configs" / "none.json").read_text()


def test_the_description_has_no_links_that_lead_nowhere(unpacked):
    """README.md names files of the tree: on a package index each link was a page that is not there."""
    tree, out = unpacked
    readme = (tree / "README.md").read_text()
    assert "](docs/" in readme and "![" in readme
    about = Parser().parsestr((out / "PKG-INFO").read_text())
    text = about.get_payload()
    assert about["Description-Content-Type"] == "text/markdown"
    assert re.findall(r"\]\((?!https?://)[^)]*\)", text) == []
    assert "choose settings" in text and len(text) > 0.75 * len(readme)
    assert {line.split(",")[0] for line in about.get_all("Project-URL")} == {"DeepSpeed", "Paper"}


def test_the_readme_is_short_and_its_links_lead_to_files():
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\((?!https?://)([^)#]+)", text)
    assert links and [link for link in links if not (ROOT / link).exists()] == []
    assert len(text.split()) <= 1300 and len(text.splitlines()) <= 130


@pytest.mark.slow
def test_tests_run_from_it(unpacked):
    _, out = unpacked
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=out, check=True, capture_output=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SOME_TESTS]
    environment = {**os.environ, "PYTHONPATH": str(out)}
    done = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.extended
def test_pages_are_up_to_date(monkeypatch):
    monkeypatch.setattr("sys.argv", ["pages.py", "--check"])
    assert not load_script("pages").main()


DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
SLURM = ROOT / "deploy" / "finetune.slurm"

SRUN = f"""#!{sys.executable}
import subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith("--kill-on-bad-exit")]
words[0] = sys.executable if words[0] == "python" else words[0]
tasks = [subprocess.Popen(words) for _ in range(2)]
sys.exit(max(task.wait() for task in tasks))
"""


def instructions():
    """Of the Dockerfile: (name, words)."""
    lines = re.sub(r"\\\n", " ", DOCKERFILE).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip() and not line.startswith("#")]


def test_the_dockerfile_copies_what_is_there_and_runs_what_a_shell_can_read():
    found = instructions()
    assert {name for name, _ in found} <= {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "CMD"}
    assert found[0][0] == "FROM"
    for name, words in found:
        if name == "COPY":
            *sources, _ = words.split()
            assert [source for source in sources if not (ROOT / source).exists()] == []
        elif name == "RUN":
            subprocess.run(["sh", "-n", "-c", words], check=True)
        elif name == "CMD":
            assert json.loads(words) == ["ds-compress", "doctor"]
    given = {words.partition("=")[0] for name, words in found if name == "ARG"}
    assert given == set(re.findall(r"\$([A-Z_]+)", DOCKERFILE))


def test_what_the_dockerfile_copies_is_enough_to_install():
    """setup.py reads these; tests/kernels/test_library.py makes a wheel of no more."""
    copied = {word for name, words in instructions() if name == "COPY" for word in words.split()[:-1]}
    assert copied == {"pyproject.toml", "setup.cfg", "setup.py", "README.md", "LICENSE", "ds_compress"}


def test_slurm_can_read_the_batch_script():
    subprocess.run(["bash", "-n", SLURM], check=True)
    lines = SLURM.read_text().splitlines()
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    known = "--(job-name|nodes|ntasks-per-node|cpus-per-task|time|requeue|open-mode|output)(=.+)?"
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert directives and max(directives) < first, "sbatch reads none after the first command"
    for number in directives:
        (word,) = shlex.split(lines[number])[1:]
        assert re.fullmatch(known, word)


@pytest.mark.slow
def test_a_job_over_two_machines_is_looked_at_and_trained(tmp_path):
    settings = prepare(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho localhost\necho other\n"}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "both", "SLURM_NNODES": "2", "SLURM_JOB_ID": str(os.getpid())}
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **job, "PATH": path, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([SLURM, settings], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the slowest link gives" in done.stdout and "perplexity after: " in done.stderr
    assert sorted(losses(tmp_path / "out")) == [1, 2, 3, 4, 5, 6]
