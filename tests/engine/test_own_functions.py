"""Programs that put functions of their own over the engine's instructions, and messages before a schedule."""

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.schedule import SendActivation

from tests.support.pipeline import Block, batches, build, ds_config
from tests.support.ranks import run_ranks


def sends_another_buffer(block):
    """Losses of an engine that sends from a spare buffer what it makes of an output."""
    engine, data = build(2, ds_config(block)), batches()
    reserve, send = engine._reserve_pipe_buffers, engine._INSTRUCTION_MAP[SendActivation]
    engine._reserve_pipe_buffers = lambda count: reserve(count + 1)

    def staged(self, buffer_id):
        outputs = self.pipe_buffers["outputs"]
        outputs[-1] = 0.5 * outputs[buffer_id]
        send(self, len(outputs) - 1)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, SendActivation: staged}
    return [engine.eval_batch(data).item() for _ in range(3)]


@pytest.mark.parametrize("mode", ["blocking", "eager"])
def test_a_message_leaves_once_though_a_program_sends_another_buffer(mode):
    block = {"min_numel": 64, "link": {"mode": mode}}
    stock = run_ranks(2, sends_another_buffer, None)
    assert run_ranks(2, sends_another_buffer, block) == stock


class MaskedBlock(Block):
    def forward(self, given):
        x, mask = given if isinstance(given, tuple) else (given, torch.arange(512).view(4, 128) % 3 == 0)
        return super().forward(x), mask


def by_hand(block):
    """How many are true of the mask that the last stage gets before anything else."""
    engine = build(2, ds_config(block), [LayerSpec(MaskedBlock) for _ in range(2)])
    engine.has_bool_tensors = True
    engine.module.eval()
    engine._reserve_pipe_buffers(1)
    with torch.no_grad():
        if engine.is_first_stage():
            engine.pipe_buffers["inputs"][0] = torch.ones(4, 8, 32)
            engine._exec_forward_pass(0)
            engine._exec_send_activations(0)
            return None
        engine._exec_recv_activations(0)
        return engine.pipe_buffers["inputs"][0][1].sum().item()


def test_a_mask_crosses_as_it_is_before_any_schedule():
    block = {"forward": {"codec": {"name": "topk", "density": 0.1}}, "tensors": [0, 1], "min_numel": 64}
    assert run_ranks(2, by_hand, block) == run_ranks(2, by_hand, None)
