"""README.md and docs/: what they have you paste is accepted."""

import ast
import json
import re

import pytest

import ds_compress
from ds_compress.config import Config
from tests.support.launch_scripts import ROOT

PAGES = {page.name: page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
BLOCKS = [
    pytest.param(code, id=f"{name}-{number}")
    for name, text in PAGES.items()
    for number, code in enumerate(re.findall(r"^ *```json\n(.*?)^ *```", text, re.S | re.M))
    if "ds_compress" in code
    and '"acsgd"' not in code  # which the page defines: tests/codecs/test_own_codec.py
]
IMPORTS = sorted(
    {
        ast.unparse(node)
        for text in PAGES.values()
        for code in re.findall(r"^ *```python\n(.*?)^ *```", text, re.S | re.M)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }
)


@pytest.mark.parametrize("code", BLOCKS)
def test_blocks_are_accepted(code):
    """The one of docs/policies.md led to warnings that its bits have no effect, as its policy sets them."""
    found = json.loads(code if code.startswith("{") else f"{{{code}}}")
    assert not Config(found["ds_compress"]).notes


def test_public_names_are_on_their_page():
    """By docs/api.md `attach` and `check_codec` could change without notice."""
    found = set(re.findall(r"^::: [\w.]+\.(\w+)$", PAGES["api.md"], re.M))
    assert set(ds_compress.__all__) - found == {"__version__"}


@pytest.mark.parametrize("line", IMPORTS)
def test_imports_work(line):
    """docs/several-sites.md imported SimulatedRounds from where it is not."""
    exec(line, {})
