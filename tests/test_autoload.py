"""The hook: the engine's constructor is wrapped once in any import order, and errors never reach torch."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ds_compress import autoload
from ds_compress.errors import CompressionError

ENGINES = "[deepspeed.runtime.engine.DeepSpeedEngine, deepspeed.runtime.pipe.engine.PipelineEngine]"
STATE = f"[getattr(engine.__init__, '_ds_compress', None) for engine in {ENGINES}]"
WRAPPED = "['DeepSpeedEngine', 'PipelineEngine']"


@pytest.mark.parametrize(
    "imports",
    [
        "import torch, deepspeed",
        "import deepspeed, torch",
        "import deepspeed",
        "import ds_compress, deepspeed",
        "import deepspeed, ds_compress",
        "import ds_compress, torch, deepspeed; ds_compress.autoload.hook()",
    ],
)
@pytest.mark.extended(keep=1)
def test_order_of_imports_does_not_matter(imports):
    code = f"import sys; {imports}; print('wrapped', {STATE})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"wrapped {WRAPPED}" in done.stdout


def test_without_autoload_nothing_is_hooked_until_the_import():
    code = f"import sys, torch, deepspeed; print({STATE}); import ds_compress; print({STATE})"
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-2:] == ["[None, None]", WRAPPED], done.stderr


def test_an_error_in_the_hook_is_logged_and_swallowed(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, autoload.PIPELINE, object())
    monkeypatch.setattr(autoload, "_wrap", lambda module: 1 / 0)
    autoload.hook()
    assert "could not hook" in caplog.text
    monkeypatch.setenv("DS_COMPRESS_REQUIRE", "1")
    with pytest.raises(CompressionError, match="DS_COMPRESS_REQUIRE is set, but DeepSpeed could not be"):
        autoload.hook()


def test_a_deepspeed_without_the_engine_is_missing_a_module_and_nothing_else(tmp_path):
    """Looking for it once ended in AttributeError: 'NoneType' object has no attribute 'loader'."""
    (tmp_path / "deepspeed" / "runtime" / "pipe").mkdir(parents=True)
    for folder in ("deepspeed", "deepspeed/runtime", "deepspeed/runtime/pipe"):
        (tmp_path / folder / "__init__.py").touch()
    code = """
        import importlib, importlib.util, ds_compress
        for name in ("deepspeed.runtime.pipe.engine", "deepspeed.runtime.engine"):
            print(importlib.util.find_spec(name))
            for _ in range(2):
                try:
                    importlib.import_module(name)
                except ModuleNotFoundError as error:
                    print(error)
    """
    path = os.pathsep.join([str(tmp_path), str(Path(autoload.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    missing = [f"No module named 'deepspeed.runtime.{name}'" for name in ("pipe.engine", "engine")]
    assert done.stdout.splitlines() == ["None", *[missing[0]] * 2, "None", *[missing[1]] * 2], done.stderr


def test_an_engine_that_cannot_be_entered_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ds_compress.engine.attach", None)
    monkeypatch.delattr("ds_compress.engine.attach", raising=False)
    with pytest.raises(CompressionError, match="this DeepSpeed or torch is not supported"):
        autoload._entrance()


@pytest.mark.parametrize("key", ["ds_compres", "ds-compress", "dscompress", "DS_COMPRESS", "ds_compresss"])
def test_near_misses_are_found(key):
    assert autoload.near_misses({key: {}, "optimizer": {}}) == [key]


@pytest.mark.parametrize(
    "key", ["compression_training", "communication_data_type", "train_batch_size", "ds", "amp"]
)
def test_other_keys_are_not_near_misses(key):
    assert autoload.near_misses({key: {}}) == []
