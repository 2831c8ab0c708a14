"""`import ds_compress` wraps the engine's constructor in any order; what it promises is there, and typed."""

import ast
import itertools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ds_compress
from ds_compress import autoload
from tests.support.refusals import refusal

ROOT = Path(ds_compress.__file__).parents[1]


def test_every_name_is_there_and_typed():
    stub = ast.parse((ROOT / "ds_compress" / "__init__.pyi").read_text())
    typed = [alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(typed) == ds_compress.__all__
    assert all(getattr(ds_compress, name) is not None for name in ds_compress.__all__)


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="has no attribute 'Nonexistent'"):
        ds_compress.Nonexistent


GOOD = """
    from typing import Literal
    import torch
    from torch import Tensor
    from ds_compress import *
    from ds_compress import __version__

    @register("half")
    class Half(Codec):
        class Options(CodecOptions):
            digits: Literal[4, 8] = 4
        def layout(self, spec: TensorSpec) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
            return ((spec.shape, torch.bfloat16),)
        def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
            return (x.bfloat16(),)
        def decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, ctx: Context) -> Tensor:
            return parts[0].to(spec.dtype)
        def own(self) -> int:
            return 1

    @register_feedback("mine")
    class Mine(Feedback):
        def wrap(self, codec: Codec) -> Codec:
            return codec

    number: int = Half().own()
    codec: Codec = build({"name": "half"})
    size: int = TensorSpec((2, 3), torch.float32).nbytes
    forward: Codec = Config({"forward": {"codec": "half"}}).in_force.codecs(0).forward
    error: type[ValueError] = CompressionError
    release: str = __version__
    check_codec("half")
"""
BAD = {
    "from ds_compress import Nonexistent": 'has no attribute "Nonexistent"',
    "import ds_compress; ds_compress.Nonexistent": 'has no attribute "Nonexistent"',
    "from ds_compress import register; register(5)": 'incompatible type "int"',
    "from ds_compress import register\n@register('x')\nclass X: ...": "Value of type variable",
    "from ds_compress import Config; Config()": "Missing positional argument",
    "from ds_compress import TensorSpec; TensorSpec(1, 2)": "incompatible type",
    "from ds_compress import build; build('bf16').no_such_method()": 'has no attribute "no_such_method"',
    "from ds_compress import Codec; Codec().layout()": "Missing positional argument",
}


@pytest.mark.extended
def test_types_hold(tmp_path):
    """`from ds_compress import Nonexistent` was fine for mypy, as any name was: `py.typed` was not true."""
    pytest.importorskip("mypy")
    files = {"good.py": textwrap.dedent(GOOD)} | {f"bad{i}.py": f"{code}\n" for i, code in enumerate(BAD)}
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    # what torch's own types are is not looked into: that takes a minute
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\n")
    options = ["--config-file", "mypy.ini", "--follow-imports", "silent"]
    done = run_python("-m", "mypy", *options, *files, cwd=tmp_path, env={"MYPYPATH": str(ROOT), "PATH": ""})
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    found = {name: [line for line in lines if line.startswith(f"{name}:")] for name in files}
    assert found["good.py"] == []
    for (code, message), name in zip(BAD.items(), list(files)[1:], strict=True):
        assert any(message in line for line in found[name]), (code, done.stdout, done.stderr)


def run_python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)


ENGINES = "[deepspeed.runtime.engine.DeepSpeedEngine, deepspeed.runtime.pipe.engine.PipelineEngine]"
STATE = f"[getattr(engine.__init__, '_ds_compress', None) for engine in {ENGINES}]"
WRAPPED = "['DeepSpeedEngine', 'PipelineEngine']"


ORDERS = [", ".join(names) for names in itertools.permutations(("torch", "deepspeed"))]
ORDERS += ["deepspeed", "ds_compress, deepspeed", "deepspeed, ds_compress"]
ORDERS += ["ds_compress, torch, deepspeed; ds_compress.autoload.hook()"]


@pytest.mark.parametrize("imports", ORDERS)
@pytest.mark.extended
def test_order_of_imports_does_not_matter(imports):
    done = run_python("-c", f"import sys, {imports}; print('wrapped', {STATE})")
    assert f"wrapped {WRAPPED}" in done.stdout and done.returncode == 0, done.stderr


@pytest.mark.extended
def test_without_autoload_nothing_is_hooked_until_the_import():
    code = f"import sys, torch, deepspeed; print({STATE}); import ds_compress; print({STATE})"
    done = run_python("-c", code, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu"})
    assert done.stdout.splitlines()[-2:] == ["[None, None]", WRAPPED], done.stderr


def test_an_error_in_the_hook_is_logged_and_swallowed(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, autoload.PIPELINE, object())
    monkeypatch.setattr(autoload, "_wrap", lambda module: 1 / 0)
    autoload.hook()
    assert "could not hook" in caplog.text
    monkeypatch.setenv("DS_COMPRESS_REQUIRE", "1")
    assert "DS_COMPRESS_REQUIRE is set, but DeepSpeed could not be" in refusal(autoload.hook)


def test_a_deepspeed_without_the_engine_is_missing_a_module_and_nothing_else(tmp_path):
    """Looking for it once ended in AttributeError: 'NoneType' object has no attribute 'loader'."""
    (tmp_path / "deepspeed" / "runtime" / "pipe").mkdir(parents=True)
    for folder in ("deepspeed", "deepspeed/runtime", "deepspeed/runtime/pipe"):
        (tmp_path / folder / "__init__.py").touch()
    code = """if True:
        import importlib.util, ds_compress
        for name in ("deepspeed.runtime.pipe.engine", "deepspeed.runtime.engine"):
            print(importlib.util.find_spec(name))
            for _ in range(2):
                try:
                    importlib.import_module(name)
                except ModuleNotFoundError as error:
                    print(error)
    """
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = run_python("-c", code, env=environment)
    missing = [f"No module named 'deepspeed.runtime.{name}'" for name in ("pipe.engine", "engine")]
    assert done.stdout.splitlines() == ["None", *[missing[0]] * 2, "None", *[missing[1]] * 2], done.stderr


def test_an_engine_that_cannot_be_entered_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ds_compress.engine.attach", None)
    monkeypatch.delattr("ds_compress.engine.attach", raising=False)
    assert "this DeepSpeed or torch is not supported" in refusal(autoload._entrance)


def test_near_misses_are_found():
    wrong = ["ds_compres", "ds-compress", "dscompress", "DS_COMPRESS", "ds_compresss"]
    others = ["compression_training", "communication_data_type", "train_batch_size", "ds", "amp"]
    assert autoload.near_misses(dict.fromkeys(others + wrong)) == wrong
