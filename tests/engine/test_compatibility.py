"""Programs that do more with the engine than DeepSpeed's examples train the same with ds_compress."""

import itertools

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import SendActivation
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import nn

from tests.support import engine_subclasses as engines
from tests.support import pipeline, programs
from tests.support.pipeline import MICRO_BATCH, MICRO_BATCHES, WIDTH, Causal, Masked
from tests.support.pipeline_kinds import OwnEngine, different, of, of_lengths, train, train_all
from tests.support.programs import program, with_schedule
from tests.support.ranks import run_ranks

SEND = PipelineEngine._INSTRUCTION_MAP[SendActivation]


def sample(engine):
    """Passes by hand, as a sampling loop makes them between training steps."""
    found = []
    engine.module.eval()
    with torch.no_grad():
        for number in range(3):
            if engine.is_first_stage():
                engine.pipe_buffers["inputs"][0] = torch.full((MICRO_BATCH, 8, WIDTH), 0.1 * number)
                engine._exec_forward_pass(0)
                engine._exec_send_activations(0)
            else:
                engine._exec_recv_activations(0)
                engine.pipe_buffers["labels"][0] = torch.zeros(MICRO_BATCH, 8, WIDTH)
                engine._exec_forward_pass(0)
                found.append(engine.loss.item())
    engine.module.train()
    return found


def evaluate(engine):
    return [engine.eval_batch(pipeline.batches()).item() for _ in range(2)]


def reset(engine):
    engine.reset_activation_shape()


def other_batch_size(engine):
    engine.set_train_batch_size(MICRO_BATCH * (MICRO_BATCHES, 2 * MICRO_BATCHES, 1)[engine.global_steps % 3])


def other_micro_batches(engine):
    engine.micro_batches = (4, 7, 2)[engine.global_steps % 3]


def late_optimizer(engine):
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    engine._configure_optimizer(torch.optim.SGD(parameters, lr=0.05), parameters)


def compiled(engine):
    engine.compile(backend="eager")


def replace_later(engine):
    """Let projects replace entries of the instruction map after the engine is there."""
    engine.calls = 0

    def send(self, buffer_id):
        engine.calls += 1
        SEND(self, buffer_id)

    PipelineEngine._INSTRUCTION_MAP[SendActivation] = send


def calls(engine):
    return [engine.calls]


def use_another_buffer(engine):
    """Send from a spare buffer what is made of an output."""
    reserve, send = engine._reserve_pipe_buffers, engine._INSTRUCTION_MAP[SendActivation]
    engine._reserve_pipe_buffers = lambda count: reserve(count + 1)

    def staged(self, buffer_id):
        outputs = self.pipe_buffers["outputs"]
        outputs[-1] = 0.5 * outputs[buffer_id]
        send(self, len(outputs) - 1)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, SendActivation: staged}


two_lengths = of_lengths([8] * MICRO_BATCHES + [5] * MICRO_BATCHES)


def turned(engine):
    """Micro-batches of as many values, turned one way and the other."""
    generator = torch.Generator().manual_seed(3)
    while True:
        for sides in ((3, 8), (8, 3)):
            x = torch.randn(MICRO_BATCH, *sides, pipeline.WIDTH, generator=generator)
            yield x, torch.sin(3 * x)


def image_layers():
    """A small network of convolutions, as that of DeepSpeed's pipeline test on CIFAR-10."""
    return [
        LayerSpec(nn.Conv2d, 3, 16, 3, 2, 1), nn.ReLU(), LayerSpec(nn.Conv2d, 16, 32, 3, 2, 1), nn.ReLU(),
        lambda x: x.mean(dim=(2, 3)), LayerSpec(nn.Linear, 32, 32), nn.ReLU(), LayerSpec(nn.Linear, 32, 10),
    ]  # fmt: skip


def images(engine):
    generator = torch.Generator().manual_seed(3)
    while True:
        images = torch.randn(MICRO_BATCH, 3, 16, 16, generator=generator)
        yield images, torch.randint(10, (MICRO_BATCH,), generator=generator)


PROGRAMS = {
    "instructions of its own": program(OwnEngine, stages=3),
    "backward passes in reverse": program(with_schedule(programs.ReversedSchedule), stages=3),
    "all sent at the end": program(with_schedule(programs.LateSchedule), config={"micro_batches": 9}),
    "sent in another order": program(with_schedule(programs.ShuffledSchedule)),
    "a schedule iterated its own way": program(with_schedule(programs.OnceOnly), stages=3),
    "micro-batches are loaded first": program(with_schedule(programs.LoadsFirst), stages=3),
    "passes by hand": program(after_batch=sample),
    "shapes reset before every batch": program(before_batch=reset, stages=3),
    "masks and tables, shapes reset": program(
        before_batch=reset, stages=3, specs=lambda: Causal.layers(6), data=two_lengths,
    ),
    "masks and tables, dynamic shapes": program(
        stages=2, specs=lambda: Causal.layers(6), data=two_lengths,
        module={"dynamic_shape": True},
    ),
    "as many values in other shapes": program(stages=3, data=turned, module={"dynamic_shape": True}),
    "another batch size at every step": program(before_batch=other_batch_size, steps=6),
    "other micro-batches at every step": program(before_batch=other_micro_batches, steps=4),
    "names and tensors through a p2p of its own": program(engines.NamedTensors, stages=3),
    "an engine copied into another module": program(engines.CopiedEngine, stages=3),
    "an engine that builds itself": program(engines.BuiltItsOwnWay),
    "functions taken from p2p": program(engines.OwnFunctions),
    "a note behind each message": program(engines.SendsMore, stages=3, after_batch=engines.received_notes),
    "a note before each message": program(engines.SendsFirst, stages=3, after_batch=engines.received_notes),
    "a note like the message": program(engines.SendsAlike, after_batch=engines.received_notes),
    "zero bubble": program(
        engines.ZeroBubble, stages=3, specs=lambda: [LayerSpec(engines.LaterBlock) for _ in range(6)]
    ),
    "preference training": program(engines.Preference, stages=3, after_batch=evaluate),
    "a late optimizer": program(config={"optimizer": None}, prepare=late_optimizer),
    "a convolutional network": program(
        stages=4, specs=image_layers, data=images, module={"loss_fn": nn.CrossEntropyLoss()}
    ),
    "compiled": program(prepare=compiled),
    "an instruction replaced later": program(prepare=replace_later, after_batch=calls),
    "a message from another buffer": program(prepare=use_another_buffer, after_batch=evaluate),
}  # fmt: skip
LOSSLESS = ("blocking", "eager")
LEFT_ALONE = ("names and tensors through a p2p of its own", "functions taken from p2p")
BLOCKS = dict.fromkeys((*LEFT_ALONE, "compiled", "a message from another buffer"), LOSSLESS)
BLOCKS["a note like the message"] = (*LOSSLESS, "quantize")


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.extended(keep=1)
def test_program(name):
    blocks = {block: programs.BLOCKS[block] for block in BLOCKS.get(name, programs.BLOCKS)}
    ranks = run_ranks(PROGRAMS[name].stages, train_all, PROGRAMS[name], blocks)
    for block in LOSSLESS:
        assert sum(len(runs[block]["left alone"]) for runs in ranks) == (name in LEFT_ALONE), block
    for rank, runs in enumerate(ranks):
        stock = runs["stock"]
        for link in LOSSLESS:
            assert runs[link]["class"] == f"Compressed{stock['class']}"
            assert not different(runs[link], stock), f"{link}, rank {rank}"
        if "quantize" in runs:
            assert runs["quantize"]["losses"] == pytest.approx(stock["losses"], rel=0.03)
            assert runs["quantize"]["losses"] != stock["losses"]
        if "topk eager" in runs:
            assert runs["topk eager"]["losses"] == runs["topk blocking"]["losses"] != stock["losses"]


def train_numbered(axes, blocks):
    """Losses and weights by block, of the stage and replica that this rank has in such a topology."""
    found = []
    topology = ProcessTopology(axes=axes, dims=[2, 2])
    for block in blocks:
        engine = pipeline.build(2, pipeline.ds_config(block, replicas=2), topology=topology)
        replica = engine.grid.get_data_parallel_id()
        data = pipeline.batches(replica)
        found.append(([engine.train_batch(data).item() for _ in range(3)], pipeline.weights(engine)))
    return (engine.stage_id, replica), found


@pytest.mark.extended
def test_stages_of_a_replica_have_consecutive_ranks():
    """As qlora-pipe numbers them, so that only gradients of adapters cross machines; once untested."""
    eight = {"codec": {"name": "quantize", "bits": 8}}
    blocks = [None, {"link": {"mode": "eager"}}, programs.EIGHT_BITS | {"replicas": eight, "min_numel": 1}]
    orders = (["pipe", "data"], ["data", "pipe"])
    rows, columns = (dict(run_ranks(4, train_numbered, axes, blocks)) for axes in orders)
    assert rows.keys() == columns.keys() and len(rows) == 4
    for place, runs in columns.items():
        for (losses, own), (expected, theirs) in zip(runs, rows[place]):
            assert losses == expected and pipeline.same_weights(own, theirs)
        (stock, _), (none, _), (quantized, _) = runs
        assert none == stock != quantized == pytest.approx(stock, rel=0.03)


def logged_by(engine_class, block):
    """What is logged of messages that are left to DeepSpeed, and the line that tells what is active."""
    with pipeline.printed_lines(" active") as lines:
        run = train(program(engine_class), block)
    return run["left alone"] + lines


NOT_TENSORS = "boundary 0, forward: its message is a dict, not tensors"


def test_what_is_logged_by_messages_that_are_left_to_deepspeed():
    (why, line), other = run_ranks(2, logged_by, engines.NamedTensors, programs.EIGHT_BITS)
    assert why == NOT_TENSORS.replace("forward: ", "forward: left to DeepSpeed, uncompressed: ")
    assert line.endswith("boundary 0: forward no packets, backward no packets") and other == []
    (why, line), other = run_ranks(2, logged_by, engines.OwnFunctions, programs.EIGHT_BITS)
    assert why.endswith("its instruction sends no tensor through deepspeed.runtime.pipe.p2p")
    assert "no packets, backward quantize(bits=8) 4,096 -> 1,104 bytes" in line and other == []


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1 << 20))

    def forward(self, x):
        return x * self.scale


def with_shapes_of_its_own(block):
    """Train with messages of 4 MiB, whose shapes the program sends by itself."""

    def send_shape(engine, buffer, stage):
        p2p.send(torch.tensor(buffer.shape), stage)

    def receive_shape(engine, stage):
        shape = torch.empty(2, dtype=torch.int64)
        p2p.recv(shape, stage)
        return torch.empty(shape.tolist())

    PipelineEngine._send_tensor_meta, PipelineEngine._recv_tensor_meta = send_shape, receive_shape
    engine = pipeline.build(2, pipeline.ds_config(block), [LayerSpec(Scaled)] * 2)
    data = itertools.repeat((torch.ones(1, 1 << 20), torch.zeros(1, 1 << 20)))
    return [engine.train_batch(data).item() for _ in range(2)]


@pytest.mark.extended
def test_messages_that_are_left_to_deepspeed_leave_at_their_places():
    """In the first batch they left as soon as they were computed. DeepSpeed's sends wait for the receiver, so
    stages that sent to each other waited without end."""
    ours, stock = (run_ranks(2, with_shapes_of_its_own, block) for block in ({}, None))
    assert ours == stock


def test_messages_are_not_left_to_deepspeed_where_compression_is_required():
    block = {**programs.EIGHT_BITS, "enabled": "required", "link": {"timeout_s": 300}}
    error, _ = run_ranks(2, logged_by, engines.NamedTensors, block, check=False)
    assert '"enabled": "required" in ds_compress asks for compression, but ' + NOT_TENSORS in error


def changed_by_training(block):
    """What of DeepSpeed's pipeline modules is another object after training."""
    parts = (p2p, schedule, pipe_engine, PipelineEngine, PipelineEngine._INSTRUCTION_MAP)
    before = [dict(part if isinstance(part, dict) else vars(part)) for part in parts]
    run = train(program(), block)
    after = [part if isinstance(part, dict) else vars(part) for part in parts]
    # p2p keeps the topology of the latest engine
    changed = {name for a, b in zip(before, after, strict=True) for name in b if a.get(name) is not b[name]}
    return run["class"], changed - {"_grid"}


def test_without_the_key_nothing_of_deepspeed_is_changed():
    assert run_ranks(2, changed_by_training, None) == [("PipelineEngine", set())] * 2
    assert run_ranks(2, changed_by_training, {}) == [("CompressedPipelineEngine", {"send", "recv"})] * 2


def by_hand(block):
    """How many values of the hidden state and the mask, which the last stage gets by a direct call, are not
    zero: before and after a schedule has run."""
    engine, found = pipeline.build(2, pipeline.ds_config(block), of(Masked)), []
    engine.has_bool_tensors = True
    for _ in range(2):
        engine._reserve_pipe_buffers(1)
        with torch.no_grad():
            if engine.is_first_stage():
                engine.pipe_buffers["inputs"][0] = torch.linspace(-1, 1, 1024).view(4, 8, WIDTH)
                engine._exec_forward_pass(0)
                engine._exec_send_activations(0)
            else:
                engine._exec_recv_activations(0)
                found.append([(each != 0).sum().item() for each in engine.pipe_buffers["inputs"][0]])
        engine.train_batch(pipeline.batches())
    return found


def test_direct_calls_are_compressed_too_and_a_mask_crosses_as_it_is():
    """Some projects drive the engine by hand (a sampling loop, for example) with a positional argument."""
    block = {"forward": {"codec": {"name": "topk", "density": 0.1}}, "tensors": [0, 1], "min_numel": 64}
    for (values, mask), (_, stock) in zip(*(run_ranks(2, by_hand, each)[1] for each in (block, None))):
        assert values == 4 * 26 and mask == stock
