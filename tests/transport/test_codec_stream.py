"""Codecs beside the compute stream: nothing is read too early, or overwritten or freed while in use."""

import functools
import re

import pytest
import torch

from ds_compress.config import Config
from ds_compress.kernels import backends
from ds_compress.kernels.backends import reference
from ds_compress.message.channel import Boundary
from ds_compress.message.observer import SeenMessage
from ds_compress.runtime.policy import GradientNorms
from ds_compress.transport.codec_stream import CodecStream, DeviceCodecStream
from tests.support.pipeline import batches, build, ds_config
from tests.support.ranks import run_ranks
from tests.transport.streams import install

REUSE = {"codec": {"name": "topk", "indices": "reuse"}}
TOPK = {"forward": {"codec": {"name": "topk", "values": "bf16"}, "feedback": "ef"}, "backward": REUSE}
LOWRANK = {"codec": {"name": "lowrank", "rank": 2}}
RECIPES = {
    "topk, reuse, ef": TOPK,
    "none": {},
    "quantize, ef21": {"forward": {"codec": {"name": "quantize", "group_size": 32}, "feedback": "ef21"}},
    "lowrank, loco": {"forward": LOWRANK, "backward": {**LOWRANK, "feedback": "loco"}},
    "lossless": {"forward": {"codec": "lossless"}, "backward": {"codec": "lossless"}},
    "blocking": {**TOPK, "link": {"mode": "blocking"}},
    "depth 3": {**TOPK, "link": {"depth": 3}},
}

STAGED = ("topk, reuse, ef", "lossless", "blocking", "depth 3")
"""Over host memory too, which the codec does not touch."""


@backends.using(reference)  # numpy's work would not be seen
def train(folder, stages, block, **device_options):
    """Losses of training and evaluation, and what is wrong with the order of the work."""
    device = install(**device_options) if device_options else None
    csv = {"enabled": True, "output_path": folder, "job_name": "streams"}
    engine = build(stages, ds_config({"min_numel": 0, "monitor": {"every": 2}, **block}, csv_monitor=csv))
    data, held_out = batches(), batches(replica=7)
    losses = []
    for step in range(3):
        losses.append(engine.train_batch(data).item())
        losses.append(engine.eval_batch(held_out, num_micro_batches=5).item())
        if step == 1:
            engine.save_checkpoint(folder)
            engine.load_checkpoint(folder)
    return losses, device.problems if device else []


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.extended(keep=1)
def test_work_is_in_order(recipe, tmp_path):
    plain = run_ranks(3, functools.partial(train, str(tmp_path / "plain"), 3, RECIPES[recipe]))
    for staged in (False, True) if recipe in STAGED else (False,):
        folder = str(tmp_path / f"staged {staged}")
        ours = run_ranks(3, functools.partial(train, folder, 3, RECIPES[recipe], staged=staged))
        for (losses, problems), (expected, _) in zip(ours, plain):
            if recipe == "lossless":  # whose size the host has to know
                problems = [problem for problem in problems if "the host waits" not in problem]
            assert not problems, "\n".join(problems[:5])
            assert losses == expected


def test_codecs_work_without_the_autocast_of_a_program():
    """A program that calls train_batch within autocast had directions of messages found with 8 bits."""
    x = torch.randn(4, 4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert CodecStream().run(lambda: x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "deaf, staged, problem",
    [
        ("lane", False, "lane: .* does not wait for .* of compute"),
        ("compute", False, "compute: .* does not wait for .* of lane"),
        ("allocator", False, "compute: .* may get memory that lane uses"),
        ("host", True, "isend does not wait for .* of lane"),
    ],
)
@pytest.mark.extended
def test_what_is_left_out_is_found(deaf, staged, problem, tmp_path):
    run = functools.partial(train, str(tmp_path), 2, TOPK, staged=staged, deaf=(deaf,))
    (_, first), (_, last) = run_ranks(2, run)
    assert any(re.search(problem, line) for line in first + last), first[:5]


def add_to_norms_of_a_checkpoint():
    """The norm of a gradient message is added to what was measured before, on the stream of the codecs."""
    device, cpu = install(staged=False), torch.device("cpu")
    norms, lane = GradientNorms(Config({}), 1, cpu), DeviceCodecStream(cpu)
    norms.resume({"0": [1.0, 1.0]})
    channel, gradient = Boundary(0, Config({})).backward, torch.ones(4, 4)
    message = SeenMessage(channel, channel.message_id(0, 0), [gradient])
    lane.run(functools.partial(norms.before, message), takes=[gradient])
    torch.zeros(2)  # of the compute stream
    lane.join()
    return norms.take(), device.problems


def test_norms_of_a_checkpoint_are_not_overwritten():
    """They were freed while the stream of the codecs still had to read them: the compute stream could get
    their memory, and a resumed policy decide by other norms."""
    assert run_ranks(1, add_to_norms_of_a_checkpoint) == [([5.0, 2.0], [])]
