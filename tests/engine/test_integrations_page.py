"""The blocks that docs/integrations.md has for other frameworks are one, and its tests are there."""

import json
import re
import sys

import pytest

from ds_compress.config import Config
from tests.engine.test_compatibility import PROGRAMS
from tests.support.launch_scripts import ROOT

PAGE = (ROOT / "docs" / "integrations.md").read_text()


def pasted(language):
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return found


def test_the_blocks_are_one():
    """In JSON, and as an entry of GPT-NeoX."""
    given = json.loads(f"{{{pasted('json')}}}")
    (block,), (entry,) = given.values(), json.loads(f"{{{pasted('yaml')}}}").values()
    assert entry == given and Config(block).in_force.codecs(0).forward.options.bits == 4


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_the_toml_is_the_same_block():
    import tomllib

    assert tomllib.loads(pasted("toml")) == json.loads(f"{{{pasted('json')}}}")


def test_what_is_passed_on_without_a_table_switches_everything_off():
    (default,) = re.findall(r"config\.get\('ds_compress', (.*)\)", pasted("diff"))
    assert json.loads(default.replace("'", '"').replace("False", "false")) == {"enabled": False}


def test_tests_that_are_named_are_there():
    table = PAGE.partition("| what they do |")[2]
    rows = [line.split("|")[-2].strip() for line in table.splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in row.split("; ")}
    assert len(named) == 9 and named <= PROGRAMS.keys()
