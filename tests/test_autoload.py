"""The hook: whatever is imported first, the engine's constructor is wrapped once, and errors never reach
torch."""

import subprocess
import sys

import pytest

from ds_compress import autoload

STATE = "hasattr(sys.modules['deepspeed.runtime.pipe.engine'].PipelineEngine.__init__, '_ds_compress')"


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
def test_order_of_imports_does_not_matter(imports):
    code = f"import sys; {imports}; print('wrapped', {STATE})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "wrapped True" in done.stdout


def test_without_autoload_nothing_is_hooked_until_the_import():
    code = f"import sys, torch, deepspeed; print({STATE}); import ds_compress; print({STATE})"
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split()[-2:] == ["False", "True"], done.stderr


def test_an_error_in_the_hook_is_logged_and_swallowed(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, autoload.TARGET, object())
    monkeypatch.setattr(autoload, "_wrap", lambda module: 1 / 0)
    autoload.hook()
    assert "could not hook" in caplog.text


@pytest.mark.parametrize("key", ["ds_compres", "ds-compress", "dscompress", "DS_COMPRESS", "ds_compresss"])
def test_near_misses_are_found(key):
    assert autoload.near_misses({key: {}, "optimizer": {}}) == [key]


@pytest.mark.parametrize(
    "key", ["compression_training", "communication_data_type", "train_batch_size", "ds", "amp"]
)
def test_other_keys_are_not_near_misses(key):
    assert autoload.near_misses({key: {}}) == []
