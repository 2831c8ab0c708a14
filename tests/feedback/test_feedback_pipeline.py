"""Feedback in real pipelines: both sides in step, and steps that overflow in fp16 leave no trace; AQ-SGD on
the digits data set: shuffled epochs, bytes, losses, buffers."""

import hashlib

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from deepspeed.utils import RepeatingLoader
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support import pipeline
from tests.support.pipeline import MICRO_BATCHES, WIDTH, Block, alike, batches, build, ds_config
from tests.support.ranks import run_ranks

TOPK = {"name": "topk", "density": 0.3}
FOUR_BITS = {"name": "quantize", "bits": 4, "group_size": 32}


def digests(engine, role="mirror"):
    """Hash of each boundary's state of `role`, by boundary and replica."""
    found = {}
    for boundary in engine.ds_compress.stage.boundaries:
        digest = hashlib.sha256()
        for position, memory in sorted(boundary.memory.items()):
            for key in sorted(key for key in memory if f"/{role}/" in key):
                digest.update(f"{position} {key}".encode() + memory[key].view(torch.uint8).numpy().tobytes())
        found[boundary.number, boundary.replica] = digest.hexdigest()
    return found


def train(stages, config, steps, dtype=torch.float32):
    """Of each step the loss, how many were skipped and the loss scale; states of this rank, their hashes."""
    get_accelerator().is_fp16_supported = lambda: True  # it computes, if slowly
    engine = build(stages, config)
    data = batches(engine.grid.get_data_parallel_id(), dtype)
    found = {"losses": [], "skipped": [], "scales": []}
    for _ in range(steps):
        found["losses"].append(engine.train_batch(data).item())
        found["skipped"].append(engine.skipped_steps)
        found["scales"].append(getattr(engine.optimizer, "loss_scale", 1.0))
    return {**found, "state": pipeline.channel_state(engine), "digests": digests(engine)}


def assert_sides_equal(ranks, count):
    sides = {}
    for rank in ranks:
        for place, digest in rank["digests"].items():
            sides.setdefault(place, []).append(digest)
    assert len(sides) == count and all(len(both) == 2 and both[0] == both[1] for both in sides.values())


@pytest.mark.parametrize(
    "stages, replicas, link, steps",
    [
        (2, 1, "eager", 200),
        (4, 1, "eager", 40),
        (2, 2, "eager", 40),
        pytest.param(2, 2, "blocking", 200, marks=pytest.mark.slow),
    ],
)
@pytest.mark.extended
def test_ef21_sides_are_equal_after_many_steps(stages, replicas, link, steps):
    config = ds_config(alike(TOPK, "ef21", min_numel=0, link={"mode": link}), replicas=replicas)
    ranks = run_ranks(stages * replicas, train, stages, config, steps)
    assert_sides_equal(ranks, (stages - 1) * replicas)
    assert len({digest for rank in ranks for digest in rank["digests"].values()}) == (stages - 1) * replicas
    assert ranks[0]["losses"][-1] < ranks[0]["losses"][0]


STEPS = 25
FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 28, "hysteresis": 1, "loss_scale_window": 4},
    "zero_optimization": {"stage": 1},  # without ZeRO, DeepSpeed 0.19.8 does not scale the loss of a pipeline
}
CODECS = {"none": "none", "ef": TOPK, "ef21": FOUR_BITS, "loco": FOUR_BITS}


@pytest.mark.parametrize("feedback", CODECS)
@pytest.mark.extended
def test_fp16_survives_overflow(feedback):
    config = ds_config(alike(CODECS[feedback], feedback, min_numel=0, link={"mode": "blocking"}), **FP16)
    first, middle, last = run_ranks(3, train, 3, config, STEPS, torch.float16)
    assert first["skipped"] == middle["skipped"] == last["skipped"]
    assert 5 <= first["skipped"][-1] <= STEPS - 10
    assert first["scales"] == last["scales"] and len(set(first["scales"])) > 5
    assert all(torch.tensor(first["losses"]).isfinite())
    assert first["losses"][-1] < 0.9 * first["losses"][0]
    states = [entry for rank in (first, middle, last) for entry in rank["state"].items()]
    assert all(value.float().isfinite().all() for _, value in states)
    # scaled units would make the residuals of gradients as large as the loss scale
    kept = [value.float() for key, value in states if "backward" in key and "codes" not in key]
    assert all(value.abs().max() < 1 for value in kept)
    assert len(kept) >= 2 or (feedback == "none" and not states)


MICRO_BATCH = 8
SPECS = [LayerSpec(nn.Linear, 64, WIDTH), *[LayerSpec(Block)] * 6, LayerSpec(nn.Linear, WIDTH, 10)]
TWO_BITS, EIGHT_BITS = ({"name": "quantize", "bits": bits, "group_size": 32} for bits in (2, 8))


def cross_entropy(output, target):
    return nn.functional.cross_entropy(output.float(), target)


def digits(samples, replica=0, replicas=1):
    """Micro-batches (pixels, digit, index) of endlessly many epochs, shuffled anew in each."""
    data = load_digits()
    x = torch.from_numpy(data.data[:samples]).float() / 16
    dataset = TensorDataset(x, torch.from_numpy(data.target[:samples]), torch.arange(samples))
    shard = torch.utils.data.Subset(dataset, range(replica, samples, replicas))
    generator = torch.Generator().manual_seed(5 + replica)
    loader = DataLoader(shard, MICRO_BATCH, shuffle=True, generator=generator, drop_last=True)
    return iter(RepeatingLoader(loader))


def config(feedback, codec=TWO_BITS, replicas=1, **changes):
    block = alike(codec, feedback, backward={"codec": EIGHT_BITS}, min_numel=0, **changes)
    batch = {"train_batch_size": MICRO_BATCH * MICRO_BATCHES * replicas}
    batch["train_micro_batch_size_per_gpu"] = MICRO_BATCH
    return ds_config(block, replicas=replicas, optimizer={"type": "SGD", "params": {"lr": 0.1}}, **batch)


def run(stages, config, samples, epochs, evaluate=False):
    engine = build(stages, config, SPECS, loss_fn=cross_entropy)
    replica, replicas = engine.grid.get_data_parallel_id(), engine.grid.data_parallel_size
    data = digits(samples, replica, replicas)
    steps = samples // replicas // (MICRO_BATCH * MICRO_BATCHES)
    losses, forward_bytes = [], []
    others = digits(samples, replica=7, replicas=13)
    for _ in range(epochs):
        for _ in range(steps):
            losses.append(engine.train_batch(data).item())
            if evaluate:
                engine.eval_batch(others)
        forward = (c.sent for c in engine.ds_compress.stage.sending if c.direction == "forward")
        forward_bytes.append(sum(sent.wire_bytes for sent in forward))
    nbytes = sum(value.nbytes for value in pipeline.channel_state(engine).values())
    return {"losses": losses, "bytes": forward_bytes, "digests": digests(engine), "memory": nbytes}


def run_simulated(stages, config, samples, epochs):
    model = pipeline.simulated(SPECS, config, pipeline.even_cuts(len(SPECS), stages))
    data, steps = digits(samples), epochs * samples // (MICRO_BATCH * MICRO_BATCHES)
    return [pipeline.train_step(model, data, cross_entropy, lr=0.1) for _ in range(steps)]


@pytest.mark.parametrize(
    "stages, feedback, changes",
    [
        (2, "aqsgd", {}),
        (4, {"name": "aqsgd", "ids": "hash", "offload": {"device": "cpu"}}, {"link": {"mode": "blocking"}}),
        (4, "aqsgd", {"warmup_steps": 3}),
        (4, {"name": "aqsgd", "first_visit": "none"}, {}),
        (2, {"name": "aqsgd", "max_gb": 1}, {}),
        (2, "aqsgd", {"codec": {**TWO_BITS, "rounding": "dither"}}),
    ],
)
@pytest.mark.extended(keep=2)
def test_pipeline_equals_simulate(stages, feedback, changes):
    settings = config(feedback, **changes)
    ranks = run_ranks(stages, run, stages, settings, 128, 3)
    assert ranks[0]["losses"] == run_simulated(stages, settings, 128, 3)
    assert ranks[0]["losses"] != run_simulated(stages, config("none"), 128, 3)
    assert_sides_equal(ranks, stages - 1)


@pytest.mark.parametrize("first", ["4 bits", "dense"])
@pytest.mark.extended
def test_bytes_memory_and_ids_in_four_stages(first):
    """Later epochs have static packets; the first adds dense rows, or 4 bits."""
    samples, epochs = 256, 3
    options = {"name": "aqsgd"} | ({"first_visit": "none"} if first == "dense" else {})
    ranks = run_ranks(4, run, 4, config(options), samples, epochs)
    values, messages = MICRO_BATCH * WIDTH, samples // MICRO_BATCH
    # 2-bit codes, two scales of a group, flags and ids of rows; dense rows, or codes, scales and row bits
    packet = 32 + values // 4 + 2 * values // 16 + 16 + 8 * MICRO_BATCH
    more = 32 + (4 * values if first == "dense" else values // 2 + 3 * 16)
    for stage in range(3):
        assert ranks[stage]["bytes"] == [messages * (n * packet + more) for n in range(1, epochs + 1)]
    for stage, sides in enumerate([1, 2, 2, 1]):
        assert ranks[stage]["memory"] == sides * samples * WIDTH * 2
    by_column = run_ranks(4, run, 4, config({**options, "ids": {"column": 2}}), samples, epochs)
    assert ranks[0]["losses"] == by_column[0]["losses"]


@pytest.mark.extended
def test_shards_of_replicas_and_batches():
    ranks = run_ranks(4, run, 2, config("aqsgd", replicas=2), 256, 3)
    assert_sides_equal(ranks, 2)
    assert len({digest for rank in ranks for digest in rank["digests"].values()}) == 2
    assert all(rank["memory"] == 128 * WIDTH * 2 for rank in ranks)


@pytest.mark.extended
def test_watching_changes_nothing(tmp_path):
    """Neither evaluation between the steps nor measuring the error of every message."""
    feedback = {"name": "aqsgd", "offload": {"device": "cpu"}}
    plain = run_ranks(2, run, 2, config(feedback), 128, 3)
    watched = config(feedback, monitor={"every": 1})
    watched["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path), "job_name": "digits"}
    watched = run_ranks(2, run, 2, watched, 128, 3, True)
    assert watched[0]["losses"] == plain[0]["losses"]
    assert [rank["digests"] for rank in watched] == [rank["digests"] for rank in plain]

    def written(name):
        lines = next(tmp_path.rglob(f"*boundary_0_forward_{name}.csv")).read_text().splitlines()[1:]
        return [float(line.split(",")[1]) for line in lines]

    errors = written("relative_error")
    assert all(0 < error < 0.15 for error in errors[:4]), "the second packet of the first epoch counts"
    assert all(0 < error < 1 for error in errors[4:])
    assert written("hit_rate") == [0] * 4 + [1] * 8
    rows = [min(step, 4) * MICRO_BATCHES * MICRO_BATCH for step in range(1, 13)]
    assert written("buffer_bytes") == [row * WIDTH * 2 for row in rows]
