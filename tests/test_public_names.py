"""`ds_compress.*`: what is promised is there, and typed."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ds_compress

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

    from ds_compress import (
        Codec, CodecOptions, CompressionError, Config, Context, Feedback, TensorSpec, __version__, build,
        check_codec, register, register_feedback,
    )


    @register("half")
    class Half(Codec):
        '''Sends half of the bits.'''

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
    forward: Codec = Config({"forward": {"codec": "half"}}).codecs(0).forward
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


def test_types_hold(tmp_path):
    """`from ds_compress import Nonexistent` was fine for mypy, as any name was: `py.typed` was not true."""
    files = {"good.py": textwrap.dedent(GOOD)} | {f"bad{i}.py": f"{code}\n" for i, code in enumerate(BAD)}
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    # what torch's own types are is not looked into: that takes a minute
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--follow-imports", "silent"]
    command += files
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={"MYPYPATH": str(ROOT), "PATH": ""}
    )
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    found = {name: [line for line in lines if line.startswith(f"{name}:")] for name in files}
    assert found["good.py"] == []
    for (code, message), name in zip(BAD.items(), list(files)[1:], strict=True):
        assert any(message in line for line in found[name]), (code, done.stdout, done.stderr)
