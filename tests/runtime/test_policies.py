"""Policies on real ranks: alike on all of them, whatever each has measured; what they decide from."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from ds_compress.codec import MessageId
from ds_compress.config import Config
from ds_compress.config.policies.base import POLICIES as REGISTRY
from ds_compress.config.policies.base import LadderOptions, Policy
from ds_compress.errors import CompressionError
from ds_compress.message.channel import Boundary
from ds_compress.message.observer import SeenMessage
from ds_compress.runtime.policy import GradientNorms, PolicyController
from ds_compress.simulate import evaluating, simulate
from tests.checkpoint.damaged_files import opened, signed
from tests.support.calls import wrapped
from tests.support.pipeline import (
    MICRO_BATCHES,
    batches,
    build,
    ds_config,
    layers,
    log_lines,
    printed_lines,
    same_weights,
    simulated,
    train_on,
    train_step,
    weights,
)
from tests.support.pipeline_kinds import ZERO_1, fp16_on_cpu
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal

STEPS = 9
QUANTIZE = {"codec": {"name": "quantize", "bits": 6, "group_size": 32}}
TWO = {"bits": [8, 2]}
ACCORDION = {"name": "accordion", "every": 2, "threshold": 0.1, "forward": TWO, "backward": TWO}


def block(policy, forward=QUANTIZE, backward=QUANTIZE, **changes):
    both = {"forward": forward, "backward": {**backward, "feedback": "ef"}}
    return {**both, "min_numel": 0, "guard": {"every": 0}, "policy": policy, **changes}


def trained(config, stages=2, folder=None, saved=0, evaluates=False, disturb=None, steps=STEPS):
    """What `train_on` returns, rungs by step, and the weights."""
    if disturb:
        disturb()
    with printed_lines("policy") as printed:
        engine, rungs = build(stages, config), []

        def note(step):
            rungs.append(dict(engine.ds_compress.policy.rungs))

        found = train_on(engine, steps, folder, saved, evaluates, note)
    return {**found, "rungs": rungs, "weights": weights(engine), "printed": printed}


def same(ours, theirs, start=0):
    assert ours["losses"] == theirs["losses"][start:] and ours["rungs"] == theirs["rungs"][start:]
    assert same_weights(ours["weights"], theirs["weights"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run's checkpoints of all steps, and what its ranks return."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(2, trained, ds_config(block(ACCORDION)), 2, folder)


@pytest.mark.parametrize("link", [{"mode": "blocking"}, {"depth": 2}], ids=["blocking", "depth 2"])
@pytest.mark.extended(keep=1)
def test_resuming_goes_on_exactly_and_evaluation_does_not_disturb(link, saved):
    """From the middle of an interval, over another link, and with evaluation before every step."""
    folder, whole = saved
    resumed = run_ranks(2, trained, ds_config(block(ACCORDION, link=link)), 2, folder, 5, True)
    for ours, theirs in zip(resumed, whole):
        same(ours, theirs, 5)
        assert ours["rungs"] == whole[0]["rungs"][5:]
    rungs = [str(rungs) for rungs in whole[0]["rungs"]]
    assert len(set(rungs)) > 1, rungs
    assert whole[0]["printed"] and not whole[1]["printed"]
    assert whole[0]["printed"][0].startswith("ds_compress: policy accordion: from step ")


@pytest.mark.parametrize("left", ["nothing", "a file of another step"])
@pytest.mark.extended(keep=1)
def test_a_rank_without_a_file_has_the_settings_of_the_others(left, saved, tmp_path):
    """A replica that finds no file of this run starts its residuals from zero, and logs that. It goes on
    with the settings of the others, also if a run with more replicas left a file there: then all ranks had
    started with those of the block."""
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    (file,) = (tmp_path / "step5").glob("ds_compress_pp00*.safetensors")
    file.unlink()
    if left != "nothing":
        shutil.copy(tmp_path / "step4" / file.name, file)
    resumed = run_ranks(2, trained, ds_config(block(ACCORDION)), 2, tmp_path, 5)
    for ours, theirs in zip(resumed, saved[1]):
        assert ours["rungs"] == theirs["rungs"][5:] and ours["sent"] == theirs["sent"][5:]


REWRITTEN = {
    "adopted is no block": {"course": {"adopted": {"0": {"forward": 5}}}},
    "another boundary": {"policy": {"rungs": [[7, "forward", 0]]}},
    "no such rung": {"policy": {"rungs": [[0, "forward", 9], [0, "backward", -1]]}},
    "state": {"policy": {"state": {"lr": "x", "norms": [1]}}},
    "noted of another boundary": {"noted": {"99": [1.0, 2.0]}},
}


def resumed_from(config, folder):
    """Go on after step 5; what is logged."""
    logged = log_lines()
    return {**trained(config, 2, folder, 5, steps=7), "logged": logged}


@pytest.mark.parametrize("how", REWRITTEN)
@pytest.mark.extended(keep=1)
def test_a_rewritten_state_of_the_policy_starts_again(how, saved, tmp_path):
    """Hashes match, as if a program had written it: ranks raised KeyError, TypeError and the like."""
    config = ds_config(block(ACCORDION))
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "step5").glob("ds_compress_pp*.safetensors"):
        entries, texts = opened(path)
        metadata, changes = json.loads(texts["state"]), REWRITTEN[how]
        course = metadata["course"] | changes.get("course", {})
        course["policy"] |= changes.get("policy", {})
        noted = changes.get("noted", metadata["noted"])
        path.write_bytes(signed(path, entries, course=course, noted=noted))
    upstream, downstream = run_ranks(2, resumed_from, config, tmp_path)
    assert upstream["rungs"] == downstream["rungs"]
    assert all(torch.tensor(upstream["losses"]).isfinite())
    logged = upstream["logged"] + downstream["logged"]
    assert any("start" in line and f"{tmp_path}/step5" in line for line in logged), logged
    assert not any("\n" in line for line in logged)


def lie():
    """Every rank measures other numbers than it should, and than all others."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    stock = PolicyController._gather

    def gather(self, engine):
        def wrong(value):
            return value * torch.rand(value.shape, generator=generator)

        norms, factor = self._norms, wrong(torch.ones(())).item()
        norms._norms = {number: wrong(noted) for number, noted in norms._norms.items()}
        return stock(self, SimpleNamespace(get_lr=lambda: [factor * lr for lr in engine.get_lr()]))

    PolicyController._gather = gather


@pytest.mark.extended
def test_signals_that_differ_cannot_make_the_ends_disagree():
    """3 stages, 2 replicas; a packet of another size or fingerprint than expected would end the run."""
    config = ds_config(block({**ACCORDION, "every": 1, "threshold": 0.6}), replicas=2)
    ranks = run_ranks(6, trained, config, 3, None, 0, False, lie)
    assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks)
    assert all(rank["rungs"] == ranks[0]["rungs"] for rank in ranks)
    assert len({str(rungs) for rungs in ranks[0]["rungs"]}) > 2  # they do change, at random


def collectives(policy):
    """Of torch.distributed, per step."""
    made, calls = [], []
    for name in ("all_gather", "all_reduce", "broadcast"):
        setattr(dist, name, wrapped(getattr(dist, name), lambda *args, **kwargs: made.append(args)))
    engine, data = build(2, ds_config(block(policy, monitor={"every": 0}))), batches()
    for _ in range(7):
        made.clear()
        engine.train_batch(data)
        calls.append(len(made))
    return calls


def test_steps_where_nothing_can_change_cost_no_collective():
    """One more in the others; the first steps have some of DeepSpeed's own."""
    due = [2, 4, 6]
    constant, calls = (run_ranks(2, collectives, policy)[0] for policy in ("constant", ACCORDION))
    assert [step for step in range(1, 8) if calls[step - 1] != constant[step - 1]] == due
    assert all(calls[step - 1] == constant[step - 1] + 1 for step in due)


def test_steps_have_the_bytes_of_their_rungs_and_another_policy_begins_anew(saved):
    folder, (first, _) = saved
    rungs = [rungs[0, "forward"] for rungs in first["rungs"]]
    assert {0, 1} == {*rungs} and rungs[7] == 1
    for rung, bits in enumerate((8, 2)):
        codec = {"codec": {"name": "quantize", "bits": bits, "group_size": 32}}
        constant = ds_config(block("constant", codec, codec))
        (sent, *_) = run_ranks(2, trained, constant, 2, None, 0, False, None, 1)[0]["sent"]
        assert {first["sent"][step] for step in range(STEPS) if rungs[step] == rung} == {sent}
    other = ds_config(block({**ACCORDION, "threshold": 0.2}))
    resumed, _ = run_ranks(2, trained, other, 2, folder, 7, False, None, 8)
    assert [rungs[0, "forward"] for rungs in resumed["rungs"]] == [0]


def test_warmup_comes_first():
    config = ds_config(block({**ACCORDION, "threshold": 1e5}, warmup_steps=3))
    first, _ = run_ranks(2, trained, config)
    assert [rungs[0, "backward"] for rungs in first["rungs"]] == [0] * 7 + [1] * 2


def test_a_policy_is_never_ignored_in_silence():
    replaced = {"forward": QUANTIZE, "boundaries": {"0": {"forward": {"codec": "bf16"}}}}
    config = ds_config({**replaced, "policy": {"name": "accordion", "forward": TWO}})
    for line in run_ranks(2, refusal, build, 2, config):
        assert line.startswith("ds_compress.policy: no boundary of this pipeline has a codec")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(CompressionError, match="policy 'accordion' may follow the learning rate"):
        simulate(model, ds_config(block(ACCORDION)), [1])


def test_a_simulated_policy_gives_the_losses_of_a_pipeline(saved):
    """`simulate` refused every policy."""
    real = saved[1][0]
    for evaluates in (False, True):
        with printed_lines("policy") as printed:
            model = simulated(layers(), ds_config(block(ACCORDION)), [4], lr=lambda: [0.05])
            data, losses = batches(), []
            for _ in range(STEPS):
                if evaluates:
                    with evaluating(model, "compressed"):
                        model(next(batches())[0])
                losses.append(train_step(model, data))
        assert losses == real["losses"]
        assert real["printed"][: len(printed)] == printed
        assert len(real["printed"]) - len(printed) <= 1  # after the last step


def scaled(power):
    """Norms noted at a loss scale."""
    fp16_on_cpu()
    fp16 = {"enabled": True, "loss_scale": float(2**power)}
    # without ZeRO DeepSpeed 0.19.8 does not scale the loss
    engine = build(2, ds_config(block({**ACCORDION, "every": 100}), fp16=fp16, **ZERO_1))
    engine.train_batch(batches(dtype=torch.float16))
    return engine.ds_compress.policy.own_state()


@pytest.mark.extended
def test_norms_are_without_the_loss_scale():
    """Noted where gradients leave, rank 1; fp16 rounds alike at powers of two."""
    (none, small), (_, large) = (run_ranks(2, scaled, power) for power in (4, 9))
    assert none == {} and small["0"][1] == 4.0
    assert small["0"][0] == pytest.approx(large["0"][0], rel=1e-3) and small["0"][0] > 0


def test_norms_of_messages_with_float64():
    """A step of "accordion" raised: norms of float64 are not computed in float32."""
    config = Config(block(ACCORDION))
    norms, channel = GradientNorms(config, 1, "cpu"), Boundary(0, config).backward
    tensors = [torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)]
    norms.before(SeenMessage(channel, MessageId(0, "backward"), tensors))
    assert norms.take() == [5.0, 1.0]


def test_a_norm_that_is_not_finite_does_not_count():
    """As one of fp16 that overflowed: the mean of its interval is that of the others."""
    norms, message_id = (
        GradientNorms(Config({}), 2, "cpu"),
        SimpleNamespace(training=True, step=0, boundary=1),
    )
    channel = SimpleNamespace(boundary=SimpleNamespace(loss_scale=2.0))
    for value in (6.0, math.inf, math.nan, 10.0):
        tensors = [torch.tensor([value]), torch.tensor([7])]
        norms.before(SimpleNamespace(message_id=message_id, tensors=tensors, channel=channel))
    assert norms.take() == [0.0, 0.0, 8.0, 2.0] and norms.take() == [0.0] * 4


HEARD_STEPS, EVERY = 6, 2
GUARD = {"every": 1, "error": 0.001, "gradient_error": 1e-5, "loss": 1e6}
"""It looks at every step, and warns of any error."""
HEARD = []
"""What a policy was told, in this process."""


class Listens(Policy):
    """Changes nothing."""

    norms = True

    class Options(LadderOptions):
        every: int = EVERY

    def decide(self, now, state):
        HEARD.append({place: signal.norm for place, signal in now.signals.items()})
        return dict(now.rungs)


def train_listening(guard):
    """Losses, what the policy was told, what was warned of, and the norms of gradient messages, on a rank."""
    warned, norms = log_lines(), []
    policy = {"name": "listens", "forward": TWO, "backward": TWO}
    engine = build(2, ds_config(block(policy, guard=guard, warmup_steps=EVERY)))

    def note(tensors, message_id):
        norms.append(torch.stack([x.detach().double().norm() for x in tensors]).norm().item())

    for end in engine.ds_compress.stage.ends:
        if end.sends and end.channel.direction == "backward":
            end.transmit = wrapped(end.transmit, note)
    data = batches()
    losses = [engine.train_batch(data).item() for _ in range(HEARD_STEPS)]
    return {"losses": losses, "heard": HEARD, "warned": warned, "norms": norms}


def test_norms_are_those_of_the_messages_that_were_sent(monkeypatch):
    """The evaluations of the guard add nothing, and its limits see the rung in force."""
    monkeypatch.setattr(REGISTRY, "_classes", dict(REGISTRY._classes))
    REGISTRY.register("listens")(Listens)
    plain, guarded = (run_ranks(2, train_listening, guard) for guard in ({"every": 0}, GUARD))
    size = EVERY * MICRO_BATCHES
    for first, last in (plain, guarded):
        assert first["norms"] == [] and len(last["norms"]) == HEARD_STEPS * MICRO_BATCHES
        assert first["heard"] == last["heard"] and len(first["heard"]) == HEARD_STEPS // EVERY - 1
        for number, heard in enumerate(last["heard"], 1):  # those of the warm-up do not count
            mean = sum(last["norms"][number * size : (number + 1) * size]) / size
            assert heard.keys() == {(0, "forward"), (0, "backward")}
            assert [*heard.values()] == [pytest.approx(mean, rel=1e-5)] * 2
    assert [rank["losses"] for rank in plain] == [rank["losses"] for rank in guarded]
    limits = "ds_compress.guard.error:", "ds_compress.guard.gradient_error:"
    warned = [[line for line in rank["warned"] if limit in line] for rank in guarded for limit in limits]
    assert sum(map(len, warned[:2])) == 2, "one of activations, one of gradients"
    assert all("quantize(bits=8" in line for lines in warned for line in lines)  # the rung in force
    assert not any(limit in line for rank in plain for line in rank["warned"] for limit in limits)


def test_a_pipeline_of_one_stage_has_nothing_to_follow():
    """One with replicas was refused: no boundary had such a codec, give it to forward or backward."""
    policy = PolicyController(Config(block(ACCORDION)), 0, "cpu", lambda tensor: [tensor])
    engine = SimpleNamespace(global_steps=0, get_lr=lambda: [0.1])
    assert policy.start(engine, SimpleNamespace(ends=())) == {}
    for engine.global_steps in range(1, 2 * ACCORDION["every"] + 1):
        assert policy.decide(engine) is None
    assert policy.resume(SimpleNamespace(engine=engine), policy.state(), policy.own_state()) is None
    assert policy.rungs == {}


def test_one_line_for_many_boundaries(capsys):
    """It listed each boundary and direction: 3,500 characters at each change with 64 stages."""
    policy = PolicyController(Config(block(ACCORDION)), 63, "cpu", lambda tensor: [tensor])
    stronger = {key: int(key != (9, "forward")) for key in policy._lengths}
    policy.rungs = dict.fromkeys(policy._lengths, 0)
    policy._policy.decide = lambda given, state: stronger
    policy.decide(SimpleNamespace(global_steps=2, get_lr=lambda: [0.1])).report()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.partition(" on: ")[2].split("; ") == [
        "boundaries 0-62 backward bits 2",
        "boundaries 0-8, 10-62 forward bits 2",
        "boundary 9 forward bits 8",
    ]
