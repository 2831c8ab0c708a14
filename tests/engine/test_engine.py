"""The mixin on real ranks: bytes, evaluation, announcements, and the ways other projects use the engine."""

import pytest
import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_compress.engine import attach as attach_module
from ds_compress.errors import CompressionError
from tests.support.pipeline import MICRO_BATCHES, batches, build, ds_config, printed_lines, train
from tests.support.ranks import run_ranks

TOPK = {
    "forward": {"codec": {"name": "topk", "density": 0.1}},
    "backward": {"codec": {"name": "topk", "indices": "reuse"}},
    "min_numel": 0,
}
LINKS = ["blocking", "eager"]


def count_bytes(block, stages):
    """(bytes of uint8 tensors given to torch.distributed, bytes the channels report) of this rank."""
    handed_over = []

    def counting(original):
        def send(tensor, *args, **kwargs):
            if tensor.dtype is torch.uint8:
                handed_over.append(tensor.numel())
            return original(tensor, *args, **kwargs)

        return send

    engine = build(stages, ds_config(block))
    torch.distributed.send = counting(torch.distributed.send)
    torch.distributed.isend = counting(torch.distributed.isend)
    data = batches()
    for _ in range(3):
        engine.train_batch(data)
    engine.eval_batch(data)
    reported = [channel.sent for channel in engine.ds_compress.stage.sending]
    return {
        "handed_over": sum(handed_over),
        "wire_bytes": sum(sent.wire_bytes for sent in reported),
        "messages": sum(sent.messages for sent in reported),
        "packets": len(handed_over),
    }


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("codec", ["none", "bf16", "topk"])
def test_reported_bytes_are_those_handed_to_the_transport(codec, link):
    block = {
        "forward": {"codec": codec},
        "backward": {"codec": "bf16"},
        "min_numel": 0,
        "link": {"mode": link},
    }
    for rank, counted in enumerate(run_ranks(3, count_bytes, block, 3)):
        assert counted["handed_over"] == counted["wire_bytes"] > 0
        trained, evaluated = 3 * MICRO_BATCHES, MICRO_BATCHES
        directions = {0: trained + evaluated, 1: 2 * trained + evaluated, 2: trained}
        assert counted["packets"] == counted["messages"] == directions[rank]


def train_and_evaluate(block, evaluations):
    engine = build(2, ds_config(block))
    data, held_out = batches(), batches(replica=7)
    losses, evaluated = [], []
    for _ in range(4):
        losses.append(engine.train_batch(data).item())
        for _ in range(evaluations):
            evaluated.append(engine.eval_batch(held_out).item())
    return losses, evaluated


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("how", ["compressed", "uncompressed"])
def test_evaluation_leaves_training_as_it_was(how, link):
    block = {**TOPK, "eval": how, "link": {"mode": link}}
    (with_evaluation, evaluated), _ = run_ranks(2, train_and_evaluate, block, 2)
    (without, _), _ = run_ranks(2, train_and_evaluate, block, 0)
    assert with_evaluation == without
    assert len(evaluated) == 8


def test_eval_option_decides_what_crosses():
    """Before any training step the weights are equal, so only the messages can make a difference."""

    def first_evaluation(block):
        return build(2, ds_config(block)).eval_batch(batches()).item()

    stock = run_ranks(2, first_evaluation, None)[0]
    assert run_ranks(2, first_evaluation, {**TOPK, "eval": "uncompressed"})[0] == stock
    assert run_ranks(2, first_evaluation, TOPK)[0] != stock


def announcement(block, stages):
    with printed_lines("active") as lines:
        train(stages, ds_config(block), steps=3)
    return lines


def test_one_line_on_rank_0_says_what_is_active():
    block = {**TOPK, "boundaries": {"1": {"forward": {"codec": "bf16"}, "backward": {"codec": "none"}}}}
    first, *others = run_ranks(3, announcement, block, 3)
    assert others == [[], []]
    assert len(first) == 1
    # 4 x 8 x 32 fp32: a header, 128 bytes of bitmask and 4 x 26 kept values of 4 bytes; without the mask
    # backward
    assert "boundary 0: forward topk(density=0.1) 4,096 -> 576 bytes (7.11x)" in first[0]
    assert "4,096 -> 448 bytes (9.14x); boundary 1: forward bf16 4,096 -> 2,080 bytes" in first[0]


def test_disabled_block_changes_nothing():
    results = run_ranks(2, train, 2, ds_config({**TOPK, "enabled": False}))
    assert [result["class"] for result in results] == ["PipelineEngine"] * 2


def call_directly():
    """Some projects drive the engine by hand (a sampling loop, for example) with a positional argument."""
    engine = build(2, ds_config(TOPK))
    engine.train_batch(batches())
    before = sum(channel.sent.messages for channel in engine.ds_compress.stage.sending)
    engine._compute_loss = True
    if engine.is_first_stage():
        engine.pipe_buffers["outputs"][0] = torch.ones(4, 8, 32)
        engine._exec_send_activations(0)
        return sum(channel.sent.messages for channel in engine.ds_compress.stage.sending) - before
    engine._exec_recv_activations(0)
    return (engine.pipe_buffers["inputs"][0] != 0).sum().item()


def test_direct_calls_are_compressed_too():
    assert run_ranks(2, call_directly) == [1, 4 * 26]


def patched_map(when):
    """Projects replace entries of the instruction map: in a subclass before, or in DeepSpeed's map after."""
    called = []

    def patch():
        original = PipelineEngine._INSTRUCTION_MAP[schedule.SendActivation]

        def send(self, buffer_id):
            called.append(buffer_id)
            original(self, buffer_id)

        PipelineEngine._INSTRUCTION_MAP[schedule.SendActivation] = send

    if when == "before":
        patch()
    engine = build(2, ds_config(TOPK))
    if when == "after":
        patch()
    engine.train_batch(batches())
    return len(called), sum(channel.sent.messages for channel in engine.ds_compress.stage.sending)


@pytest.mark.parametrize("when", ["before", "after"])
def test_patched_instructions_stay_in_force(when):
    assert run_ranks(2, patched_map, when) == [(MICRO_BATCHES, MICRO_BATCHES), (0, MICRO_BATCHES)]


def two_engines():
    """A second engine without the block, as a reference model, is not touched by the first."""
    compressed, stock = build(2, ds_config(TOPK)), build(2, ds_config())
    data = batches()
    alternating = [engine.train_batch(data).item() for engine in (compressed, stock, compressed, stock)]
    return alternating, type(compressed).__name__, type(stock).__name__


def test_engines_with_and_without_the_block_in_one_process():
    losses, *classes = run_ranks(2, two_engines)[0]
    assert classes == ["CompressedPipelineEngine", "PipelineEngine"]
    assert len(set(losses)) == 4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"_INSTRUCTION_MAP": {}}, "unknown way to run ForwardPass"),
        ({"_send_tensor_meta": None}, "its pipeline engine has no _send_tensor_meta"),
    ],
)
def test_unknown_releases_are_refused(change, message):
    import deepspeed.runtime.pipe.engine as module

    with pytest.raises(CompressionError, match=message):
        attach_module.check_release(type("Changed", (PipelineEngine,), change), module)


def test_old_releases_are_refused(monkeypatch):
    import deepspeed.runtime.pipe.engine as module

    monkeypatch.setattr(attach_module.deepspeed, "__version__", "0.19.2+abc")
    with pytest.raises(CompressionError, match='DeepSpeed 0.19.2.* pip install "deepspeed>=0.19.3"'):
        attach_module.check_release(PipelineEngine, module)
    monkeypatch.setattr(attach_module.deepspeed, "__version__", "0.19.3+abc")
    attach_module.check_release(PipelineEngine, module)


def raw_steps(samples, epochs, steps=5):
    """Which of the first training steps sent uncompressed packets."""
    data = batches()
    dataset = [next(data)[0][0] for _ in range(samples)]
    engine = build(2, ds_config({**TOPK, "warmup_epochs": epochs}), training_data=[(x, x) for x in dataset])
    channel, raw = engine.ds_compress.stage.sending[0], []
    for step in range(steps):
        before = channel.sent.wire_bytes
        engine.train_batch()
        if channel.sent.wire_bytes - before > 0.9 * channel.sent.latest.raw_bytes * MICRO_BATCHES:
            raw.append(step)
    return raw


def test_warmup_may_be_counted_in_epochs():
    """16 samples a step: 24 samples are two steps, the second of them partly of the next epoch."""
    assert run_ranks(2, raw_steps, 24, 2) == [[0, 1, 2, 3]] * 2


def epochs_of_unknown_length():
    with pytest.raises(
        CompressionError, match="ds_compress.warmup_epochs: 1 is not allowed where the length"
    ):
        build(2, ds_config({"warmup_epochs": 1}))


def test_warmup_epochs_need_an_epoch():
    run_ranks(2, epochs_of_unknown_length)
