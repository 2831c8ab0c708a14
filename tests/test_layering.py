"""Imports run against the data, never in circles; heavy libraries stay in place; a class has its own name."""

import ast
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ds_compress"
MODULES = sorted(PACKAGE.rglob("*.py"))

PAGE = (ROOT / "docs" / "architecture.md").read_text()


def rows_of_table(title: str) -> list[str]:
    """Return the lines of the table below a title of the page."""
    section = PAGE.partition(f"## {title}")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]


PACKAGES = [
    name for row in rows_of_table("The packages") for name in re.findall(r"`(\w+)/?`", row.split("|")[1])
]
"""A package, or a module at the top, may import from those before it. The runtime watches through views of
the engine (message/part.py), which owns its parts."""
RANK = {name: rank for rank, name in enumerate(PACKAGES)}
WINGS = {"sites", "hf", "cli"}
"""What the core, all before them, works without. engine/attach.py has the module of one by name."""
ONLY_IN = {name: {"hf"} for name in ("transformers", "peft", "accelerate", "datasets")}
ONLY_IN |= {"triton": {"kernels"}, "wandb": {"monitor"}}
ONLY_IN |= {"deepspeed": {"engine", "runtime", "checkpoint", "planning", "hf"}}  # planning: its schedule


def top(path: Path) -> str:
    """The part of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path):
    """Yield the names that a file imports, anywhere in it, after those of their modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_run_against_the_data():
    """The session imported threads and stores of sites, a wing, that hardly any run has."""
    for here, path, name in ((top(each), each, name) for each in MODULES for name in imports(each)):
        first, *rest = name.split(".")
        # autoload attaches the engine when one is built
        if first == "ds_compress" and rest[0] in RANK and (here, rest[0]) != ("autoload", "engine"):
            assert RANK[rest[0]] <= RANK[here], f"{path} imports {name}"
        assert here in ONLY_IN.get(first, {here}), f"{path} imports {first}"
        assert first != "triton" or path.name.startswith("triton"), f"{path} imports triton"


def graph() -> dict[str, set[str]]:
    """Return the modules of the package that each imports, anywhere in its file, parents left out."""
    parts = (path.relative_to(ROOT).with_suffix("").parts for path in MODULES)
    names = {".".join(each).removesuffix(".__init__"): path for each, path in zip(parts, MODULES)}
    found = {name: imports(path) for name, path in names.items()}
    own = {key: {each if each in names else each.rpartition(".")[0] for each in found[key]} for key in names}
    return {name: others & names.keys() for name, others in own.items()}


def test_no_imports_go_in_circles():
    """Also inside a package, and where a function imports: that only hides them."""
    TopologicalSorter(graph()).prepare()


def test_every_package_has_its_place():
    """A module at the top counts as one. The page, which is held to the imports here, once had
    `testing` and `simulate` in other places, and let the commands import wandb."""
    assert sorted({top(path) for path in MODULES}) == sorted(PACKAGES)
    assert not WINGS & set(PACKAGES[: PACKAGES.index("sites")])


def qualified_classes(tree: ast.AST, owner: str = ""):
    """The classes in a tree: those inside another one with its name before theirs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield owner + node.name
            yield from qualified_classes(node, f"{owner}{node.name}.")
        else:
            yield from qualified_classes(node, owner)


def test_two_classes_never_share_a_name():
    """Options models inside the class of a codec, a feedback or a policy go by the name of that class."""
    names = Counter(name for path in MODULES for name in qualified_classes(ast.parse(path.read_text())))
    found = [name for name, count in names.items() if count > 1]
    assert not found, f"give each class a name of its own: {found}"


def test_a_typical_change_names_at_most_four_files_that_exist():
    """Generated pages and tests beside them do not count."""
    for row in rows_of_table("Where do I change"):
        words = re.sub(r"`make docs`.*|test: .*", "", row)
        files = [name for name in re.findall(r"`([\w./]+\.\w+)`", words) if "NAME" not in name]
        assert 1 <= len(files) <= 4, row
        assert all((PACKAGE / name).exists() or (ROOT / name).exists() for name in files if "/" in name), row


def test_switching_on_is_light():
    """`import torch` of every process runs this: no import of torch, deepspeed or pydantic."""
    heavy = ("torch", "deepspeed", "pydantic", "numpy")
    code = f"import sys, ds_compress; print([m for m in {heavy} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert done.stdout.strip() == "[]"
