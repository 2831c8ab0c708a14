"""A read-only root without a temporary folder: codecs run uncompiled, say so, and give the same bytes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# In /sys not even root can make a folder
ENCODES = """
import hashlib, logging, tempfile
import torch
import ds_compress.codecs
from ds_compress.codec import Context, build
from ds_compress.kernels import native

logging.basicConfig(format="%(message)s")
if {read_only}:
    tempfile._candidate_tempdir_list = lambda: ["/sys/ds_compress"]
    tempfile.tempdir = None  # found already where dill is installed, which torch imports
native.wait("quantize")
codec = build({{"name": "quantize", "bits": 4}})
for seed in range(3):
    x = torch.randn(2**17, generator=torch.Generator().manual_seed(seed))
    parts = codec.encode(x, Context())
    print(*(hashlib.sha256(part.view(torch.uint8).numpy().tobytes()).hexdigest() for part in parts))
"""


def encode(read_only):
    nowhere = dict.fromkeys(("TMPDIR", "XDG_CACHE_HOME"), "/sys/ds_compress") if read_only else {}
    environment = {**os.environ, **nowhere}
    command = [sys.executable, "-c", ENCODES.format(read_only=read_only)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def test_codecs_fall_back():
    """The first long tensor ended the run: `No usable temporary directory found`."""
    without, usual = encode(True), encode(False)
    assert without.returncode == 0, without.stderr
    assert without.stdout == usual.stdout and len(usual.stdout.splitlines()) == 3
    (said,) = (line for line in without.stderr.splitlines() if "uncompiled" in line)
    assert "No usable temporary directory" in said
