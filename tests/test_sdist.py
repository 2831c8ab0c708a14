"""The source distribution has all of the tree; its pages say what options and commands say, links lead on."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from email.parser import Parser

import pytest

from tests.support.launch_scripts import ROOT, load_script

IGNORED = (ROOT / ".gitignore").read_text().replace("/", " ").split()
LEFT_OUT = {".git", *IGNORED} - {"results", "images"}

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


def test_links_of_the_readme_lead_to_files():
    links = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / "README.md").read_text())
    assert links and [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.slow
def test_tests_run_from_it(unpacked):
    _, out = unpacked
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SOME_TESTS],
        cwd=out,
        env={**os.environ, "PYTHONPATH": str(out)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


def test_pages_are_up_to_date(monkeypatch):
    monkeypatch.setattr("sys.argv", ["pages.py", "--check"])
    assert not load_script("pages").main()


def test_the_readme_is_short(pytestconfig):
    text = (pytestconfig.rootpath / "README.md").read_text()
    assert len(text.split()) <= 1300
    assert len(text.splitlines()) <= 130
