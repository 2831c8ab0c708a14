"""AQ-SGD in real pipelines on the digits data set: shuffled epochs, bytes, losses, buffers."""

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.utils import RepeatingLoader
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.feedback.test_feedback_pipeline import assert_sides_equal, digests
from tests.support.pipeline import (
    MICRO_BATCHES,
    WIDTH,
    Block,
    build,
    ds_config,
    even_cuts,
    simulated,
    train_step,
)
from tests.support.ranks import run_ranks

MICRO_BATCH = 8
SPECS = [LayerSpec(nn.Linear, 64, WIDTH), *[LayerSpec(Block)] * 6, LayerSpec(nn.Linear, WIDTH, 10)]
TWO_BITS = {"name": "quantize", "bits": 2, "group_size": 32}
EIGHT_BITS = {"name": "quantize", "bits": 8, "group_size": 32}


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
    direction = {"codec": codec, "feedback": feedback}
    block = {"forward": direction, "backward": {"codec": EIGHT_BITS}, "min_numel": 0, **changes}
    sizes = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "train_batch_size": MICRO_BATCH * MICRO_BATCHES * replicas,
    }
    return ds_config(block, replicas=replicas, optimizer={"type": "SGD", "params": {"lr": 0.1}}, **sizes)


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
    boundaries = engine.ds_compress.stage.boundaries
    memories = [memory for boundary in boundaries for memory in boundary.memory.values()]
    nbytes = sum(value.nbytes for memory in memories for value in memory.values())
    return {"losses": losses, "bytes": forward_bytes, "digests": digests(engine), "memory": nbytes}


def run_simulated(stages, config, samples, epochs):
    model = simulated(SPECS, config, even_cuts(len(SPECS), stages))
    data, steps = digits(samples), epochs * samples // (MICRO_BATCH * MICRO_BATCHES)
    return [train_step(model, data, cross_entropy, lr=0.1) for _ in range(steps)]


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
@pytest.mark.extended(keep=3)
def test_pipeline_equals_simulate(stages, feedback, changes):
    settings = config(feedback, **changes)
    ranks = run_ranks(stages, run, stages, settings, 128, 3)
    assert ranks[0]["losses"] == run_simulated(stages, settings, 128, 3)
    assert ranks[0]["losses"] != run_simulated(stages, config("none"), 128, 3)
    assert_sides_equal(ranks, stages - 1)


def aligned(nbytes):
    return -(-nbytes // 16) * 16


@pytest.mark.parametrize("first", ["4 bits", "dense"])
@pytest.mark.extended
def test_bytes_memory_and_ids_in_four_stages(first):
    """Later epochs have static packets; the first adds dense rows, or 4 bits."""
    samples, epochs = 256, 3
    options = {"name": "aqsgd"} | ({"first_visit": "none"} if first == "dense" else {})
    ranks = run_ranks(4, run, 4, config(options), samples, epochs)
    values = MICRO_BATCH * WIDTH
    codes, scales = values * 2 // 8, 2 * values // 32
    packet = 32 + aligned(codes) + 2 * aligned(scales) + aligned(MICRO_BATCH) + aligned(8 * MICRO_BATCH)
    # codes, two scales of a group, a bit of a row
    four_bits = aligned(values * 4 // 8) + 2 * aligned(2 * values // 128) + aligned(MICRO_BATCH // 8)
    dense = 32 + (4 * values if first == "dense" else four_bits)
    messages = samples // MICRO_BATCH
    for stage in range(3):
        first, *later = ranks[stage]["bytes"]
        assert first == messages * (packet + dense)
        assert later == [first + n * messages * packet for n in range(1, epochs)]
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


@pytest.mark.extended
def test_learns_better_than_plain_quantization():
    """Two epochs at two bits, on from a model that both trained uncompressed, where samples change slowly."""
    samples, warmup = 512, 4
    steps = samples // (MICRO_BATCH * MICRO_BATCHES)
    configs = (config(feedback, warmup_steps=warmup * steps) for feedback in ("aqsgd", "none"))
    buffered, plain = (run_ranks(4, run, 4, each, samples, warmup + 2)[0]["losses"] for each in configs)
    assert buffered[: warmup * steps] == plain[: warmup * steps]
    assert sum(buffered[-2 * steps :]) < 0.9 * sum(plain[-2 * steps :])
