"""Eager links: nothing is lost, reordered, overwritten or left behind, however the two sides are delayed."""

import random
import time
from types import SimpleNamespace

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe import schedule

from ds_compress.errors import CompressionError
from ds_compress.transport import p2p
from ds_compress.transport.p2p import Receiver, Sender
from tests.support.calls import wrapped
from tests.support.pipeline import Skip, batches, build, ds_config, same_weights, weights
from tests.support.pipeline_kinds import of
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
EAGER = {"link": {"mode": "eager"}, "min_numel": 0}


def deep(depth):
    return {**EAGER, "link": {"mode": "eager", "depth": depth}}


def delay_link(mean: float) -> None:
    """Let every send and receive of this process wait before and after, a random time of `mean` seconds."""
    times = random.Random(dist.get_rank())

    def pause(*args):
        time.sleep(times.expovariate(1 / mean))

    Sender.send = wrapped(Sender.send, pause, pause)
    Receiver.receive = wrapped(Receiver.receive, pause, pause)


def train(stages, block, steps, mean_delay=0.0, evaluate=0, specs=None):
    """Return losses of `steps` batches, of `evaluate` micro-batches after each, and the final weights."""
    if mean_delay:
        delay_link(mean_delay)
    engine = build(stages, ds_config(block), specs)
    data, held_out = batches(), batches(replica=7)
    losses, held_out_losses = [], []
    for _ in range(steps):
        losses.append(engine.train_batch(data).item())
        if evaluate:
            held_out_losses.append(engine.eval_batch(held_out, num_micro_batches=evaluate).item())
        for end in engine.ds_compress.stage.ends if block else ():
            left = getattr(end.link, "_in_flight", ()) or getattr(end.link, "_posted", ())
            assert not left, "a transfer is under way, or a receive waits"
    return losses, held_out_losses, weights(engine)


def assert_equal(ours, stock):
    for mine, theirs in zip(ours, stock):
        assert mine[:2] == theirs[:2]
        assert same_weights(mine[2], theirs[2])


@pytest.mark.parametrize("stages, specs, depth", [(2, of(Skip), 1), (3, None, 1), (4, None, 1), (3, None, 3)])
@pytest.mark.extended(keep=1)
def test_random_delays_change_nothing(stages, specs, depth):
    evaluate = 9  # micro-batches; more than a training step has
    ours = run_ranks(stages, train, stages, deep(depth), 4, 0.003, evaluate, specs)
    assert_equal(ours, run_ranks(stages, train, stages, None, 4, 0.0, evaluate, specs))


def order_of_events(dynamic, depth):
    """What a first stage sends (s) and receives (r) at each of three steps, by micro-batch."""
    engine = build(2, ds_config(deep(depth)), dynamic_shape=dynamic)
    events = []
    if engine.is_first_stage():
        sender = engine.ds_compress.stage.senders[schedule.SendActivation, 0].link
        receiver = engine.ds_compress.stage.receivers[schedule.RecvGrad, 0].link
        sender.send = wrapped(sender.send, before=lambda packet: events.append("s"))
        receiver.receive = wrapped(receiver.receive, before=lambda nbytes: events.append("r"))
    data, steps = batches(), []
    for _ in range(3):
        engine.train_batch(data)
        steps.append("".join(events))
        events.clear()
    return steps


ORDERS = {1: "ssrsrsrr", 2: "sssrsrrr", 3: "ssssrrrr"}
"""By depth."""


def test_an_activation_leaves_before_the_gradient_that_deepspeed_awaits_first():
    """Under dynamic_shape too: it once left where the schedule says so."""
    cases = [(False, 1), (False, 2), (False, 3), (True, 1), (True, 2)]
    found, _ = run_ranks(2, lambda: [order_of_events(*case) for case in cases])
    assert found == [[ORDERS[depth]] * 3 for _, depth in cases]


@pytest.fixture
def posts(monkeypatch):
    """The receives that are posted, without a neighbour."""

    class Transport:
        def irecv(self, memory, peer, groups):
            posts.append(memory)
            return SimpleNamespace(wait=lambda timeout: None)

    posts = []
    monkeypatch.setattr(p2p, "transport_for", lambda device: Transport())
    return posts


@pytest.mark.parametrize("holds, posted", [(False, [2, 2, 3, 4, 4]), (True, [0, 2, 3, 4, 4])])
def test_a_receive_that_holds_the_device_is_posted_when_it_is_asked_for(holds, posted, posts, monkeypatch):
    """Posted at the start of a step, NCCL's receive would spin until this rank's warm-up: a deadlock."""
    monkeypatch.setattr(p2p, "receives_hold_device", lambda device: holds)
    receiver = Receiver(1, CPU)
    receiver.expect(64, 4)
    counts = [len(posts)]
    for _ in range(4):
        receiver.receive(64)
        counts.append(len(posts))
    assert counts == posted
    receiver.receive(64)  # one that nobody announced
    assert len(posts) == 5
    receiver.depth = 2
    receiver.expect(64, 4)
    assert len(posts) == (5 if holds else 8)


def test_a_sender_waits_for_the_oldest_packet_and_keeps_memory_of_one_size(monkeypatch):
    sent, waited = [], []

    class Transport:
        def isend(self, memory, peer, groups):
            number = len(sent)
            sent.append(memory.data_ptr())
            return SimpleNamespace(wait=lambda timeout: waited.append(number))

    monkeypatch.setattr(p2p, "transport_for", lambda device: Transport())
    sender, most = Sender(1, CPU), [p2p.packets_in_flight(depth) for depth in (1, 3)]
    for _ in range(most[0] + 2):
        sender.send(sender.memory(64))
    assert waited == [0, 1]
    sender.depth = 3
    for _ in range(2):
        sender.send(sender.memory(64))
    assert waited == [0, 1]
    sender.drain()
    assert waited == [*range(len(sent))] and len(set(sent)) == most[1]
    sender.memory(128)
    assert not sender._free


def test_an_interrupted_batch_is_named(posts):
    receiver = Receiver(0, CPU)
    receiver.expect(64, 4)  # two are posted
    with pytest.raises(CompressionError, match="4 packets from rank 0 that were expected never came"):
        receiver.expect(64, 2)
