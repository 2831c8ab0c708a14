"""README.md and the generated pages of docs/ say what results, options and commands say."""

import subprocess
import sys


def test_pages_are_up_to_date(pytestconfig):
    command = [sys.executable, "launch/pages.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=pytestconfig.rootpath)
    assert done.returncode == 0, done.stderr


def test_the_readme_is_short(pytestconfig):
    text = (pytestconfig.rootpath / "README.md").read_text()
    assert len(text.split()) <= 1300
    assert len(text.splitlines()) <= 130
