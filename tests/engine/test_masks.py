"""Masks and tables that travel beside a hidden state as floats are sent uncompressed (see `test_story`)."""

import functools

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from tests.support.pipeline import (
    MICRO_BATCHES,
    WIDTH,
    Block,
    Causal,
    alike,
    batches,
    build,
    ds_config,
    printed_lines,
)
from tests.support.ranks import run_ranks

LENGTH = 64
block_of = functools.partial(alike, min_numel=64)


def data():
    return batches(shape=(LENGTH, WIDTH))


def first_evaluation(block, stages=2):
    """The loss before any training, and what the last stage has in place of the mask."""
    engine = build(stages, ds_config(block), Causal.layers(4))
    loss = engine.eval_batch(data()).item()
    return loss, engine.pipe_buffers["inputs"][0][1] if engine.is_last_stage() else None


def test_story():
    """A mask of 0 and finfo.min became nan, -inf or zeros: a causal model saw the future without an error."""
    block = block_of({"name": "quantize", "bits": 8})
    (loss, mask), (stock, stock_mask) = (run_ranks(2, first_evaluation, each)[1] for each in (block, None))
    assert torch.equal(mask, stock_mask)
    assert mask.min() == torch.finfo(torch.float32).min and mask.max() == 0
    assert loss != stock and loss == pytest.approx(stock, rel=0.5)


class Frozen(Causal):
    """A first layer that is not trained: its hidden state carries no gradient either."""

    def __init__(self, **options):
        super().__init__(**options)
        self.requires_grad_(not self.first)


class RecomputedCausal(Causal):
    """Recomputes in the backward pass: to autograd, mask and hidden state come from one operation."""

    def forward(self, inputs):
        if self.first:
            return super().forward(inputs)
        return torch.utils.checkpoint.checkpoint(
            lambda *tensors: super(RecomputedCausal, self).forward(tensors), *inputs
        )


class Lone(Block):
    """One float tensor, from a layer without parameters that are trained."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.elsewhere = nn.Parameter(torch.zeros(1))  # an optimizer wants one

    def forward(self, x):
        return super().forward(x).requires_grad_(torch.is_grad_enabled())


class Unseen(torch.autograd.Function):
    """Copies its input, as a kernel of Triton does: without an operation of torch."""

    @staticmethod
    def forward(ctx, x):
        made = torch.empty(x.shape)
        made.numpy()[:] = x.detach().numpy()
        return made

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class UnseenCausal(Causal):
    def forward(self, inputs):
        made = super().forward(inputs)
        return Unseen.apply(made) if self.last else (Unseen.apply(made[0]), *made[1:])


class UnseenBlock(Block):
    def forward(self, x):
        return Unseen.apply(super().forward(x))


def trained(block, specs, stages, evaluate_first):
    """Bytes of the first training step by boundary and direction, and the announcement, on rank 0."""
    engine = build(stages, ds_config(block), specs)
    with printed_lines("active") as lines:
        if evaluate_first:
            engine.eval_batch(data())
        before = [channel.sent.wire_bytes for channel in engine.ds_compress.stage.sending]
        losses = [engine.train_batch(data()).item() for _ in range(2)]
    sent = [channel.sent.wire_bytes - b for channel, b in zip(engine.ds_compress.stage.sending, before)]
    return losses, sent, lines


HIDDEN, MASK, TABLE = 4 * LENGTH * WIDTH, 4 * LENGTH * LENGTH, 4 * LENGTH * WIDTH // Causal.HEADS
BYTES = 2 * HIDDEN + 4 * (MASK + 2 * TABLE) + 32  # of a message with bf16: one header


@pytest.mark.parametrize("layer", [Causal, Frozen, RecomputedCausal])
@pytest.mark.parametrize("evaluate_first", [False, True])
def test_hidden_states_are_compressed_and_nothing_else(layer, evaluate_first):
    """The line at the start once had 779 characters for six tensors."""
    ranks = run_ranks(3, trained, block_of("bf16"), layer.layers(6), 3, evaluate_first)
    for _, sent, _ in ranks:
        assert sent == [2 * MICRO_BATCHES * BYTES] * len(sent)
    (line,) = ranks[0][2]
    why = "[tensor 0 compressed; tensor 1, 2, 3 uncompressed, it depends on no parameter or holds a mask]"
    assert line.count(why) == line.count("[as forward]") == 1 and len(line) < 350
    assert "per message: boundaries 0, 1: forward bf16" in line


def dependence_before_the_choice():
    engine = build(2, ds_config({"recipe": "auto"}), Causal.layers(4))
    engine.train_batch(data())
    (boundary,) = engine.ds_compress.stage.boundaries
    assert {channel.codec.name for channel in boundary.channels} == {"none"}
    return boundary.dependence


def test_recipe_auto_knows_what_depends_on_parameters_before_its_choice():
    """Else no message of several tensors would be compressed after it."""
    assert run_ranks(2, dependence_before_the_choice) == [(True, False, False, False)] * 2


def test_a_lone_tensor_is_compressed_though_nothing_of_it_is_trained():
    specs = [LayerSpec(layer) for layer in (Lone, Lone, Block, Block)]
    _, sent, _ = run_ranks(2, trained, block_of("bf16"), specs, 2, False)[0]
    assert sent == [2 * MICRO_BATCHES * (2 * HIDDEN + 32)]


def test_a_hidden_state_from_a_kernel_that_torch_does_not_see():
    """It was sent uncompressed, without a line."""
    for specs, size in (([LayerSpec(UnseenBlock)] * 4, 2 * HIDDEN + 32), (UnseenCausal.layers(4), BYTES)):
        _, sent, _ = run_ranks(2, trained, block_of("bf16"), specs, 2, False)[0]
        assert sent == [2 * MICRO_BATCHES * size]


def test_positions_may_be_named_all_the_same():
    _, sent, _ = run_ranks(2, trained, block_of("bf16", tensors=[0, 1]), Causal.layers(4), 2, False)[0]
    assert sent == [2 * MICRO_BATCHES * (2 * (HIDDEN + MASK) + 4 * 2 * TABLE + 32)]


def judged_after(block, steps):
    """What the guard judges of the last step, on a rank that reports."""
    engine = build(2, ds_config({**block, "guard": {"every": 1}}), Causal.layers(4))
    examples = data()
    for _ in range(steps):
        engine.train_batch(examples)
    return engine.ds_compress.monitor.message_quality()


def test_the_guard_looks_at_what_is_compressed():
    """In the light of a mask's finfo.min every message once was perfect; one with -inf was never finite."""
    judged, _ = run_ranks(2, judged_after, block_of({"name": "topk", "density": 0.1}), 2)
    assert set(judged) == {(0, "forward"), (0, "backward")}
    assert all(0.01 < max(each.error, each.gradient_error) < 1 for each in judged.values()), judged
