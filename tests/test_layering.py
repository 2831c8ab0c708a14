"""Imports run against the way of the data: nothing knows what comes after it; heavy libraries stay in
place."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ds_compress"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A room (a module at the top or a package) may import from those before it
ROOMS = [
    "version",
    "errors",
    "registry",
    "kernels",
    "codec",
    "codecs",
    "feedback",
    "config",
    "transport",
    "message",
    "simulate",
    "planning",
    "monitor",
    "checkpoint",
    "pipeline",
    "autoload",
    "__init__",
    "cli",
    "__main__",
]
RANK = {name: rank for rank, name in enumerate(ROOMS)}
ONLY_IN = {
    # planning: replays DeepSpeed's schedule
    "deepspeed": {"pipeline", "checkpoint", "planning"},
    "triton": {"kernels"},
    "wandb": {"monitor", "cli"},
}


def top(path: Path) -> str:
    """The part of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "ds_compress":
                yield from (f"ds_compress.{alias.name}" for alias in node.names if alias.name in RANK)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_against_the_data(path):
    here = top(path)
    for name in imports(path):
        first, *rest = name.split(".")
        if (
            first == "ds_compress" and rest and here != "autoload"
        ):  # autoload attaches the engine when one is built
            assert RANK[rest[0]] <= RANK[here], f"{here} imports {name}"
        assert here in ONLY_IN.get(first, {here}), (
            f"only {sorted(ONLY_IN[first])} may import {first}, not {here}"
        )
        assert first != "triton" or path.parent.name == "triton", (
            f"only kernels/triton may import triton, not {path}"
        )


def test_switching_on_is_light():
    """What runs inside `import torch` of every process must not import torch, deepspeed or pydantic
    itself."""
    heavy = ("torch", "deepspeed", "pydantic", "numpy")
    code = f"import sys, ds_compress; print([m for m in {heavy} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert done.stdout.strip() == "[]"
