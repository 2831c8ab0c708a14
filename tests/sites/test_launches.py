"""Replicas that are launched apart: each a world of its own, which meets the others at a store."""

import hashlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed import TCPStore

from ds_compress.config.replicas import STORE
from ds_compress.sites import board, join, traffic, worker
from ds_compress.sites.outer_step import Anchor
from ds_compress.sites.simulation import SimulatedRounds
from ds_compress.sites.store import connect
from ds_compress.sites.worker import _work
from tests.support import pipeline
from tests.support.calls import wrapped
from tests.support.pipeline import batches, build, ds_config, log_lines, simulated
from tests.support.pipeline_kinds import fp16_on_cpu
from tests.support.ranks import run_launches, run_ranks
from tests.support.refusals import refusal
from tests.support.replicas import KINDS as KINDS_OF_REPLICAS
from tests.support.replicas import SPECS, WIDE, ZERO_1, digest, wide_layers

CODEC = {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef"}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.005}}}
KINDS = {name: kind for name, kind in KINDS_OF_REPLICAS.items() if name != "bf16 zero 1"}
KINDS |= {"muon": MUON, "muon zero 1": {**MUON, **ZERO_1}}


@pytest.fixture
def store(monkeypatch):
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv(STORE, f"127.0.0.1:{served.port}")
    return served


def block(every=3, delay=1, **changes):
    replicas = {**CODEC, "every": every, "outer": {"delay": delay, "grace_s": 300, **changes}}
    return {"replicas": replicas}


def train(launch, stages, config, steps, specs="wide"):
    fp16_on_cpu()
    lines = log_lines()
    config = config[launch] if isinstance(config, list) else config
    engine, data, outer = start(launch, config, stages, SPECS[specs]())
    take_seats(engine)
    go_on(engine, data, steps)
    outer.collect()
    found = {"weights": pipeline.weights(engine), "digest": digest(engine), "lines": lines}
    found |= {"anchor": torch.cat(outer.anchor).numpy().tobytes(), "position": outer.position}
    return found | {"members": outer._members, "sent": (outer.sent.raw_bytes, outer.sent.wire_bytes)}


def start(launch, config, stages=1, specs=None):
    """An engine, its data, and its exchanges with other launches."""
    engine = build(stages, config, specs or wide_layers())
    dtype = next(engine.module.parameters()).dtype
    data = batches(launch * 10 + engine.grid.get_data_parallel_id(), dtype, (8, WIDE))
    return engine, data, engine.ds_compress.traffic["replicas"]


def go_on(engine, data, steps):
    for _ in range(steps):
        engine.train_batch(data)


def take_seats(engine):
    """Wait until the ranks of two launches have come here, before the first round begins."""
    engine.ds_compress.begin_step()
    client = shared_store()
    client.add("test/seats", 1)
    while client.add("test/seats", 0) < 2 * torch.distributed.get_world_size():
        time.sleep(0.01)


def shared_store():
    """A connection to the store that all launches share."""
    return connect(os.environ[STORE], seconds=300)


@pytest.mark.parametrize("delay", [1, 0, 3])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.extended(keep=1)
def test_anchors_are_equal_after_every_round(kind, stages, delay, store):
    """I1; without delay the weights are those of the anchor, too."""
    results = run_launches(2, stages, train, stages, ds_config(block(delay=delay), **KINDS[kind]), 9)
    for own, other in zip(*results):
        assert own["anchor"] == other["anchor"] and own["position"] == other["position"]
        assert own["position"].round == 3 and own["members"] == 2
        assert (own["digest"] == other["digest"]) == (not delay)
        assert own["sent"][0] / own["sent"][1] > (20 if "fp32" in kind else 10)  # 4 bits every 3 steps
        assert not [line for line in own["lines"] if "replica" in line]


@pytest.mark.parametrize("delay, other", [(0, CODEC), (1, CODEC), (3, CODEC), (1, {"codec": "none"})])
@pytest.mark.extended(keep=1)
def test_weights_are_those_of_the_simulation(delay, other, store):
    """Also if the other launch has a codec of its own: it is not told here, its packets say it."""
    config, theirs = ds_config(block(delay=delay)), block(delay=delay)
    theirs["replicas"] |= {"feedback": "none", **other}
    configs = [config, ds_config(theirs)]
    real = run_launches(2, 2, train, 2, configs, 7)
    models = [simulated(wide_layers(), config, []) for _ in range(2)]
    rounds = SimulatedRounds(models, configs)
    data = [batches(launch * 10, shape=(8, WIDE)) for launch in range(2)]
    for _ in range(7):
        for model, own in zip(models, data):
            pipeline.train_step(model, own)
        rounds.end_step()
    for model, stages in zip(models, real):
        found = {name: value for stage in stages for name, value in stage["weights"].items()}
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, found[name]), name


@pytest.mark.extended
def test_a_replica_may_have_data_parallel_ranks_with_partitions(store):
    results = run_launches(2, 2, train, 1, ds_config(block(delay=0), replicas=2, bf16={"enabled": True}), 6)
    assert len({result["digest"] for own in results for result in own}) == 1


def round_seconds(launch):
    """The duration of a round as its thread has measured it, and as the monitor has it after later steps."""
    engine, data, outer = start(launch, ds_config(block(every=3, delay=3)))
    go_on(engine, data, 3)
    measured = outer._pending.result(300).seconds
    go_on(engine, data, 3)
    return measured, outer.values()["round_s"], outer.values()["rounds"]


def test_a_round_lasts_until_its_outcome_and_not_until_it_is_applied(store):
    """The monitor once wrote the duration of `delay` steps, however fast the link was."""
    (((measured, written, rounds),),) = run_launches(1, 1, round_seconds)
    assert 0 < measured == written and rounds == 1


@pytest.mark.extended
def test_a_process_that_ends_in_a_round_ends_in_order(store):
    """Its thread was in the store when the interpreter ended, and aborted a process whose work was done."""
    program = f"""
import torch
from types import SimpleNamespace
from torch.distributed import TCPStore
from ds_compress.sites.store import connect
from ds_compress.sites.worker import Worker
torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
options, own = SimpleNamespace(grace_s=300.0), torch.distributed.HashStore()
worker = Worker(own, options, connect("127.0.0.1:{store.port}"))
def task():
    try:
        worker.rounds._wait(lambda: worker.rounds._board.outcome(99), "what never comes")
    finally:
        print("the thread has ended", flush=True)
worker.run(task)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "the thread has ended" in done.stdout


@pytest.mark.extended
def test_tied_copies_stay_equal(store):
    for stages in run_launches(2, 2, train, 2, ds_config(block(every=2)), 8, "tied"):
        copies = [value for each in stages for name, value in each["weights"].items() if "tied" in name]
        assert len(copies) == 2 and torch.equal(*copies)


def train_until_told(launch, stages, config):
    """Train until launch 2, which dies in its 8th step, has been in two rounds of its second life.

    On a busy machine others may be late for a round, so the number of members proves nothing before that.
    """
    client = shared_store()
    rank = torch.distributed.get_rank()
    is_again = client.add(f"test/runs/{launch}/{rank}", 1) > 1
    engine, data, outer = start(launch, config, stages)
    seen = []  # members, since it is back
    anchors, goes_on = {}, torch.ones(1)
    while goes_on:
        engine.train_batch(data)
        if launch == 2 and not is_again and engine.global_steps == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        outer.collect()  # between two rounds, to see each of them
        is_back = client.add("test/runs/2/0", 0) > 1
        if is_back and outer.position not in anchors:
            seen.append(outer._members)
        anchors[outer.position] = hashlib.blake2b(torch.cat(outer.anchor).numpy().tobytes()).hexdigest()
        if rank == 0:
            if launch == 0 and seen[1:].count(3) >= 2:  # the first of them may be of its first life
                client.set("test/end", "1")
            goes_on[0] = not client.check(["test/end"])
        torch.distributed.broadcast(goes_on, 0)
    return anchors


@pytest.mark.extended
def test_one_of_three_is_killed_and_comes_back(store):
    """The others never stop, and whoever is at the same position has the same anchor."""
    config = ds_config(block(every=2, delay=2, grace_s=3))
    for slots in zip(*run_launches(3, 2, train_until_told, 2, config, restarted=(2,))):
        found = {}
        for position, anchor in (item for anchors in slots for item in anchors.items()):
            assert found.setdefault(position, anchor) == anchor
        assert set.intersection(*map(set, slots)), "launch 2 is back at the anchor of the others"


def join_late(launch, config):
    """Launch 1 joins after the first round of launch 0; return the steps before its first packet."""
    client = shared_store()
    if launch:
        client.wait(["test/begun"])
    engine, data, outer = start(launch, config)
    exchanges = []
    outer._start = wrapped(outer._start, before=lambda *_: exchanges.append(engine.global_steps))
    while not (exchanges if launch else client.check(["test/end"])):
        engine.train_batch(data)
        if not launch and len(exchanges) > 1:
            client.set("test/begun", "1")
    client.set("test/end", "1")
    return engine.global_steps


@pytest.mark.parametrize(("delay", "steps"), [(1, 7), (6, 4)])
@pytest.mark.extended(keep=1)
def test_a_newcomer_sends_its_first_packet_when_the_others_do(delay, steps, store):
    """It took all steps of a round that the others had begun `delay` steps before, so they waited for it."""
    results = run_launches(2, 1, join_late, ds_config(block(every=8, delay=delay, grace_s=3)))
    assert results[1] == [steps]


def test_what_cannot_work_is_refused(monkeypatch, store):
    (line, _) = run_ranks(2, refusal, start, 0, ds_config(block(), replicas=2))
    assert line.startswith("ds_compress.replicas.every: a launch with data-parallel ranks needs ZeRO 1")
    monkeypatch.setenv(STORE, "nowhere")
    (line,) = run_ranks(1, refusal, start, 0, ds_config(block()))
    assert line.startswith(f"ds_compress.replicas.every: {STORE} is 'nowhere'; set it to HOST:PORT")
    monkeypatch.delenv(STORE)
    (line,) = run_ranks(1, refusal, start, 0, ds_config(block()))
    assert f"{STORE} is not set" in line


def save_or_resume(launch, folder, config, resumes):
    engine, data, _ = start(launch, config)
    if resumes:
        engine.load_checkpoint(f"{folder}/{launch}")
        pipeline.skip_steps(engine, data, 5)
    take_seats(engine)
    digests = []
    for step in range(6 if resumes else 11):
        engine.train_batch(data)
        digests.append(digest(engine))
        if step == 4 and not resumes:
            engine.save_checkpoint(f"{folder}/{launch}")
    return digests[-6:]


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("kind", ["fp32", "bf16 accumulation"])
@pytest.mark.extended(keep=1)
def test_resumed_launches_equal_those_that_went_on(kind, delay, store, tmp_path, monkeypatch):
    """I5. Saved in the middle of a round, with another store afterwards."""
    config = ds_config(block(delay=delay), **KINDS[kind])
    went_on = run_launches(2, 1, save_or_resume, tmp_path, config, False)
    another = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv(STORE, f"127.0.0.1:{another.port}")
    assert run_launches(2, 1, save_or_resume, tmp_path, config, True) == went_on


def test_a_store_that_is_lost_between_rounds_leaves_a_thread_that_says_it():
    """Its next sign of life failed, and the thread ended; then training waited ten minutes for a round."""

    rounds, tasks, future = mock.Mock(number=0), queue.SimpleQueue(), Future()
    rounds.idle.side_effect = RuntimeError("the store is gone")
    with mock.patch("ds_compress.sites.worker.BEAT_S", 0.001):
        thread = threading.Thread(target=_work, args=(rounds, tasks), daemon=True)
        thread.start()
        while rounds.idle.call_count < 2:
            pass
        tasks.put((future, rounds.idle))
        assert "the store is gone" in str(future.exception(600))
        tasks.put(None)
        thread.join()


def freeze(launch, config, then):
    """Train a round, freeze or unfreeze a parameter in one of two launches, and train more."""
    engine, data, outer = start(launch, config)
    if then == "unfreeze":  # as if it had been frozen in deepspeed.initialize
        del outer._trained[0]
        return refusal(outer._check_trained, engine)
    take_seats(engine)
    go_on(engine, data, 4)
    next(engine.module.parameters()).requires_grad = launch != 0
    go_on(engine, data, 5)
    outer.collect()
    return outer._members, digest(engine)


def test_a_parameter_that_is_frozen_later_stays_in_the_exchange(store):
    """The delta had fewer values than the anchor: a raw RuntimeError about sizes ended the run."""
    results = run_launches(2, 1, freeze, ds_config(block(delay=0)), "freeze")
    assert results[0] == results[1] and results[0][0][0] == 2


def test_a_parameter_that_is_unfrozen_later_is_refused(store):
    """Other replicas would never get it."""
    (line,) = run_ranks(1, freeze, 0, ds_config(block()), "unfreeze")
    assert "is trained now, but not when deepspeed.initialize was called" in line


def alone(launch, config, harm):
    """Lose the store in the middle of training; another one, with what `harm` says, takes its place."""
    lines = log_lines()
    engine, data, outer = start(launch, config)
    go_on(engine, data, 3)
    outer.collect()
    another = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    another.set("ds_compress/outer/settings", harm)
    os.environ[STORE] = f"127.0.0.1:{another.port}"
    outer._leave("why does not matter here")
    for _ in range(6):
        outer._probe.exception()
        engine.train_batch(data)
    assert outer._worker is None
    return [line for line in lines if "trains on alone" in line]


@pytest.mark.parametrize("harm", ['{"ds_compress": "0.1"}', "rubbish"])
def test_a_running_site_outlives_a_store_of_other_launches(harm, store):
    """It was ended when it joined again, though its weights were fine."""
    ((lines,),) = run_launches(1, 1, alone, ds_config(block(delay=0)), harm)
    assert len(lines) >= 2 and ("the other replicas have" in lines[1] or "the replica store has" in lines[1])


def cut_off(launch, config):
    """Train on without a store; each attempt to reach it fails at once."""
    engine, data, outer = start(launch, config)
    engine.train_batch(data)
    with mock.patch("ds_compress.sites.traffic.run_in_thread") as run:
        run.return_value.done.return_value = True
        run.return_value.exception.return_value = refusal = ConnectionRefusedError("nobody listens")
        run.return_value.result.side_effect = refusal
        outer._leave("why does not matter here")
        go_on(engine, data, 6)
    return run.call_count, outer._worker


def test_a_running_site_outlives_a_connection_that_is_refused_at_once(store):
    """It was looked for in a thread, which could be quicker than the question whether it is done: the run
    ended in a raw ConnectionRefusedError."""
    (((attempts, worker),),) = run_launches(1, 1, cut_off, ds_config(block(delay=0)))
    assert attempts > 2 and worker is None


class Waiting:
    """A connection to a store that answers nothing until an event."""

    def __init__(self, store, answers):
        self._store, self._answers = store, answers

    def __getattr__(self, name):
        return wrapped(getattr(self._store, name), before=lambda *_: self._answers.wait())


def fall_silent(outer):
    """Let the store not answer over one connection; return the event that ends it."""
    connection, answers = outer._worker._stores[-1], threading.Event()
    connection._store = Waiting(connection._store, answers)
    board.CHUNK, traffic.ANSWER_S = 64, 0.1
    return answers


def silent(launch, config):
    """Train while the store does not answer, and a step once it does; return whether its result is late, and
    the rounds that were begun and that are over, before that step and after it."""
    engine, data, outer = start(launch, config)
    engine.ds_compress.begin_step()
    answers, begun = fall_silent(outer), []
    outer._start = wrapped(outer._start, before=begun.append)
    go_on(engine, data, 7)
    found = [(outer._is_late, len(begun), outer.sent.messages)]
    answers.set()
    traffic.ANSWER_S = 600
    go_on(engine, data, 1)  # neither the step in which it was due nor one that begins a round
    return [*found, (outer._is_late, len(begun), outer.sent.messages)]


@pytest.mark.parametrize("connections", [1, 3])
def test_training_does_not_wait_for_a_store_that_does_not_answer(connections, store):
    """A store that was busy with strangers stalled a step by 16 s."""
    config = ds_config({**block(), "link": {"connections": connections}})
    assert run_launches(1, 1, silent, config) == [[[(True, 1, 0), (False, 1, 1)]]]


def save_silent(launch, config):
    """Save while a result is late; return whether a residual is saved, and what is logged."""
    lines = log_lines()
    engine, data, outer = start(launch, config)
    engine.ds_compress.begin_step()
    answers = fall_silent(outer)
    go_on(engine, data, 5)
    assert outer._is_late
    saved = outer.saved()
    answers.set()
    return any(saved[number] for number in saved if number != traffic.STATE), lines[-1]


def test_what_is_saved_while_a_result_is_late_goes_on_without_it(store):
    """Its packet may count, or not: a resumed run would not know."""
    (((has_residual, line),),) = run_launches(1, 1, save_silent, ds_config(block()))
    assert not has_residual and "trains on alone" in line and "the replica store does not answer" in line


class JoinAnew:
    """Joins as one that is far behind: the others' weights are one above its own."""

    def __init__(self, *_):
        self.worker = mock.Mock()
        self.say_own = self.ask = lambda *_: None

    def hear(self):
        return {"own": board.Position(1, "00"), "membership": (0, [9, "00"], True), "address": "there"}

    def enter(self, verdict, own):
        return Anchor(own.values + 1, own.momentum), board.Position(9, "00")


def come_back(launch, config):
    """Return to others that are far ahead; return residuals and base, and how far the weights have moved."""
    engine, data, outer = start(launch, config)
    go_on(engine, data, 5)
    assert any(outer.codec.residuals().values())
    outer.close()
    outer.base, before = outer._read(engine), outer.anchor.values
    with mock.patch("ds_compress.sites.traffic.Join", JoinAnew):
        assert outer._join(engine)
    moved = outer._read(engine) - before
    return [*outer.codec.residuals().values()], outer.base, moved.unique().tolist()


def test_one_that_comes_back_as_a_newcomer_has_nothing_of_its_own(store):
    """Its residual and its progress belong to weights that it has no more."""
    (((residuals, base, moved),),) = run_launches(1, 1, come_back, ds_config(block()))
    assert not any(residuals) and base is None and moved == pytest.approx([1.0] * len(moved), abs=1e-5)


def failing(launch, config):
    """Let an exchange fail once its packet is made; return whether that left a residual, and whether what is
    remembered then is what was before."""
    engine, data, outer = start(launch, config)
    go_on(engine, data, 5)
    before = outer.codec.residuals()
    go_on(engine, data, 1)
    outer._pending.result(300)
    with_packet, outer._pending = outer.codec.residuals(), Future()
    outer._pending.set_exception(RuntimeError("the store is gone"))
    outer.collect()
    return [
        all(torch.equal(found[n][key], value) for n, own in before.items() for key, value in own.items())
        for found in (with_packet, outer.codec.residuals())
    ]


def test_a_packet_that_nobody_counted_leaves_no_residual(store):
    """The next delta has all of what it said, so what it lost would count twice."""
    assert run_launches(1, 1, failing, ds_config(block())) == [[[False, True]]]


def join_silent(launch, config):
    """Come back to a store that accepts the connection, and then does not answer; return what is logged."""
    lines = log_lines()
    engine, data, outer = start(launch, config)
    go_on(engine, data, 3)
    outer.collect()
    outer._leave("why does not matter here")
    outer._probe, answers = Future(), threading.Event()
    outer._probe.set_result(SimpleNamespace(compare_set=lambda *_: answers.wait()))
    join.CONNECT_S = worker.EXIT_S = 0.1
    go_on(engine, data, 3)
    answers.set()
    return lines[-1]


def test_training_goes_on_if_a_store_falls_silent_while_a_site_joins(store):
    """A site waited for ever: the host of the store was stopped after it had accepted the connection."""
    ((line,),) = run_launches(1, 1, join_silent, ds_config(block(delay=0)))
    assert "trains on alone" in line and "the replica store does not answer" in line
