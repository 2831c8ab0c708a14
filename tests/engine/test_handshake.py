"""All ranks agree on settings, kernels and numerics, or all stop with the same line."""

import contextlib
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ds_compress.codec import CODECS, Context, names
from ds_compress.codec import build as build_codec
from ds_compress.codecs.lowrank import LowRank
from ds_compress.config import Config
from ds_compress.engine import attach as attach_module
from ds_compress.engine import handshake
from ds_compress.engine.handshake import agree, numerics_to_match
from ds_compress.errors import CompressionError
from ds_compress.kernels import backends
from ds_compress.kernels.backends import reference
from ds_compress.transport.collectives import own_keys
from tests.support.calls import wrapped
from tests.support.pipeline import batches, build, ds_config
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal


def start(configs, timeout=None):
    if timeout:
        attach_module.HANDSHAKE_SECONDS = timeout
    try:
        build(2, configs[torch.distributed.get_rank()])
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return None


def forward(codec):
    return {"forward": {"codec": codec}}


DIFFERENT = [
    ({"seed": 1}, {"seed": 2}, "seed", ("1", "2")),
    (forward("bf16"), forward("fp16"), "forward.name", ("'bf16'", "'fp16'")),
    (forward("topk"), forward({"name": "topk", "density": 0.2}), "forward.density", ("0.1", "0.2")),
    ({}, {"enabled": False}, "enabled", ("True", "False")),
    ({}, {"boundaries": {"0": forward("bf16")}}, "boundaries.0", ("None", "bf16")),
    ({}, {"link": {"connections": 4}}, "link.connections", ("1", "4")),
]


def start_each():
    return [start(list(map(ds_config, blocks))) for *blocks, _, _ in DIFFERENT]


def test_different_blocks():
    ours, theirs = run_ranks(2, start_each)
    assert ours == theirs
    for error, (*_, path, (here, there)) in zip(ours, DIFFERENT, strict=True):
        assert error.startswith(f"CompressionError: ds_compress.{path}: rank 0 has {here}, rank 1 has ")
        assert there in error and "\n" not in error


def start_after_another_job():
    if torch.distributed.get_rank() == 0:
        store = torch.distributed.HashStore()
        agree(own_keys(store, 0, "engine"), 0, 1, {}, 10)
    attach_module.HANDSHAKE_SECONDS = 60
    engine = build(2, ds_config({}))
    return engine.train_batch(batches()).item(), engine.ds_compress.watchdog._is_connected.wait(60)


def test_a_process_may_have_been_a_rank_of_another_job():
    """Ranks counted their engines by themselves: one that had trained alone before was not heard of ("rank 1
    did not answer within 300 s")."""
    first, second = run_ranks(2, start_after_another_job)
    assert first == second and first[1]


def start_without_triton_on_one(config):
    is_other = torch.distributed.get_rank() == 1
    with backends.using(reference) if is_other else contextlib.nullcontext():
        return start([config, config])


def test_different_kernels():
    """The last bits of a rotation differ between Triton and torch: the states of ef21 would drift apart."""
    line = "ds_compress.kernels: rank 0 has 'cpu', rank 1 has 'reference'; use the same on all nodes"
    for error in run_ranks(2, start_without_triton_on_one, ds_config({}), check=False):
        assert error == f"CompressionError: {line}"


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.extended(keep=1)
def test_one_bad_block_stops_all(bad):
    blocks = [{"eval": "off"} if rank == bad else {} for rank in range(2)]
    line = rf"CompressionError: ds_compress.eval: 'off' is not allowed.* \[rank {bad}\]"
    for error in run_ranks(2, start, [ds_config(block) for block in blocks]):
        assert re.fullmatch(line, error)


@pytest.mark.parametrize("absent", [0, 1])
@pytest.mark.extended(keep=1)
def test_a_rank_without_the_key_is_named(absent):
    """A node without the package or the key trains on uncompressed; the others must not wait for ever."""
    configs = [ds_config(None if rank == absent else {}) for rank in range(2)]
    results = run_ranks(2, start, configs, 1.0, check=False)
    error = results[1 - absent]
    assert f"rank {absent} did not answer within 1 s: is ds_compress installed there" in error


def test_rank_0_stays_until_the_others_have_read_why(monkeypatch):
    """The store goes with it, and they would learn that the connection was lost."""
    wait = handshake._wait  # a busy machine needs more than a second
    monkeypatch.setattr(handshake, "_wait", lambda store, names, seconds: wait(store, names, 60))
    keys = torch.distributed.HashStore()
    late = SimpleNamespace(
        set=keys.set, wait=keys.wait, get=wrapped(keys.get, before=lambda key: time.sleep(0.2))
    )
    with ThreadPoolExecutor(2) as ranks:
        other = ranks.submit(refusal, agree, late, 1, 2, {"seed": 2}, 60)
        line = refusal(agree, keys, 0, 2, {"seed": 1}, 60)
        assert keys.check(["1/read"])
        assert other.result() == line and line.startswith("ds_compress.seed: rank 0 has 1, rank 1 has 2")


class WaitingStore(torch.distributed.Store):
    """A store that notes for how many seconds it was waited for, and how often, without a clock."""

    def __init__(self, comes):
        """`comes`: by key, what is there once it was waited for so many seconds, and when."""
        super().__init__()
        self.comes, self.here, self.waited, self.waits = comes, {}, 0.0, 0

    def set(self, key, value):
        self.here[key] = value

    def wait(self, keys, timeout):
        self.waits += 1
        end = self.waited + timeout.total_seconds()
        due = [self.comes.get(key, (None, 0.0 if key in self.here else 1e9))[1] for key in keys]
        self.waited = min(end, max([self.waited, *due]))
        self.here |= {key: value for key, (value, when) in self.comes.items() if when <= self.waited}
        if not self.check(keys):
            raise RuntimeError("wait timeout")

    def check(self, keys):
        return all(key in self.here for key in keys)

    def get(self, key):
        return self.here[key]

    def multi_get(self, keys):
        return [self.here[key] for key in keys]


@pytest.mark.parametrize("ranks", [8, 512])
@pytest.mark.parametrize("late", [False, True])
def test_rank_0_answers_in_the_time_that_others_wait_for_it_however_many_are_absent(ranks, late):
    """It waited 0.1 s more for each: with more than 50 all others were told that rank 0 did not answer, and
    torch wrote four lines for each. And after one that was late it waited for the next one as long again."""
    keys = WaitingStore({"1": ('{"settings": {}}', 200.0), "2": ('{"settings": {}}', 400.0)} if late else {})
    line = refusal(agree, keys, 0, ranks, {}, 300)
    absent = f"{2 if late else 1}-{ranks - 1}"
    assert line.startswith(f"ds_compress: rank {absent} did not answer within 300 s: is ds_compress")
    assert keys.waits <= 2 and keys.waited <= 300 + 1  # for the answers, and until the line was read


OLDER = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
"""What makes torch and MKL compute as on a processor without vector instructions."""
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
LOWRANK = {"name": "lowrank", "rank": 4}


@pytest.mark.parametrize("feedback", ["ef21", "aqsgd"])
@pytest.mark.parametrize("codec", [LOWRANK, {"name": "entropy", "rank": 8}])
def test_products_are_not_mirrored(codec, feedback):
    """The two sides of EF21 over a matrix product drifted apart, 4e-3 after 12 steps, unnoticed."""
    forward = {"codec": codec, "feedback": feedback}
    line = f"ds_compress.forward.feedback: '{feedback}' is not allowed with codec {codec['name']}"
    line += ".*: both sides keep the same state, but a matrix product"
    with pytest.raises(CompressionError, match=line):
        Config({"forward": forward})
    line = line.replace("compress.forward", "compress.boundaries.3.forward")
    with pytest.raises(CompressionError, match=line):
        Config({"boundaries": {"3": {"forward": forward}}})


def test_replicas_of_products_need_like_processors():
    found = numerics_to_match(Config({"replicas": {"codec": LOWRANK}}), CPU)
    why = "replicas with codec 'lowrank' have to compute alike; with another codec they need not"
    assert [*found] == [f"numerics.{name} ({why})" for name in ("torch", "device", "threads")]
    assert not numerics_to_match(Config({"replicas": {"codec": "quantize"}}), CPU)


def test_random_entries_need_like_gpus(monkeypatch):
    """Two GPUs with other numbers of multiprocessors draw other entries of a large message: its values would
    be decoded to wrong places, and nothing would tell."""
    gpu, named = torch.device("cuda", 0), SimpleNamespace(get_device_name=lambda device: "A")
    monkeypatch.setattr(torch, "get_device_module", lambda device: named)
    why = "both sides of codec 'randomk' have to draw alike; with another codec they need not"
    for block in (
        {"forward": {"codec": "randomk"}},
        {"backward": {"codec": "randomk", "feedback": {"name": "ef", "decay": 0.5}}},
        {"boundaries": {"1": {"backward": {"codec": "randomk"}}}},
        {"replicas": {"codec": "randomk"}},
    ):
        found = numerics_to_match(Config(block), gpu)
        assert [*found] == [f"numerics.{name} ({why})" for name in ("torch", "device")]
        assert found[f"numerics.device ({why})"] == "cuda A"
        assert not numerics_to_match(Config(block), CPU)
    assert not numerics_to_match(Config({"forward": {"codec": "topk"}}), gpu)


DECODES = """
import hashlib
import sys

import torch

import ds_compress.codecs
from ds_compress.codec import Context, TensorSpec, build

torch.set_num_threads(int(sys.argv[2]))
for choice, parts, shape, dtype, memory in torch.load(sys.argv[1]):
    decoded = build(choice).decode(parts, TensorSpec(shape, dtype), Context(step=1, memory=memory))
    print(choice, shape, dtype, hashlib.sha256(decoded.contiguous().view(torch.uint8).numpy()).hexdigest())
"""


def exact_codecs():
    """Classes of ours that promise to decode a packet to the same bits everywhere."""
    classes = [CODECS.find(name, "") for name in names()]
    ours = [each for each in classes if each.__module__.startswith("ds_compress.")]
    return [each for each in ours if each is not LowRank]


def packets():
    """Payloads of each of them."""
    for kind in exact_codecs():
        for options in kind.examples:
            choice = {"name": kind.name, **options}
            for shape, dtype in (((3, 5, 96), torch.float32), ((64, 2048), torch.bfloat16)):
                ctx = Context(step=1)
                try:
                    parts = build_codec(choice).encode(torch.randn(shape).to(dtype), ctx)
                except CompressionError:  # for backward only
                    continue
                yield choice, parts, shape, dtype, dict(ctx.memory)


@pytest.mark.extended
def test_a_packet_is_the_same_to_every_processor(tmp_path):
    """Of all codecs but those that say otherwise."""
    made = list(packets())
    assert {choice["name"] for choice, *_ in made} == {kind.name for kind in exact_codecs()}
    torch.save(made, tmp_path / "packets.pt")
    decoded = []
    for environment, threads in (({}, 1), (OLDER, 3)):
        command = [sys.executable, "-c", DECODES, str(tmp_path / "packets.pt"), str(threads)]
        options = {"cwd": ROOT, "env": {**os.environ, **environment}}
        done = subprocess.run(command, capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stderr
        decoded.append(done.stdout.splitlines())
    assert len(decoded[0]) == len(made)
    assert decoded[0] == decoded[1]
