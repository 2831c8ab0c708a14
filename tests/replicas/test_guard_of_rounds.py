"""The guard compares the loss before and after each round of replicas that are launched apart."""

from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from ds_compress.config.replicas import STORE
from ds_compress.errors import CompressionError
from ds_compress.replicas.outer_step import Anchor
from tests.support.pipeline import batches, build, ds_config, log_lines, same_weights, weights
from tests.support.ranks import run_launches
from tests.support.replicas import WIDE, wide_layers

COARSE = {"codec": {"name": "topk", "density": 0.2}}


def launch_alone(monkeypatch, *args):
    """The results of both ranks of a launch with a store of its own."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv(STORE, f"127.0.0.1:{served.port}")
    (results,) = run_launches(1, 2, train, *args)
    return results


def train(launch, harms, guard, steps=9, delay=1):
    """What a single replica says and measures. Its rounds triple the weights, or leave them as they are."""
    if harms:
        Anchor.step = lambda own, mean, options: Anchor(3 * own.values, own.momentum)
    replicas = {"codec": "none", "every": 2, "outer": {"lr": 1.0, "momentum": 0.0, "delay": delay}}
    boundary = {"forward": COARSE, "backward": {**COARSE, "feedback": "ef"}, "min_numel": 0}
    lines, events = log_lines(), []
    engine = build(2, ds_config({"replicas": replicas, "guard": guard, **boundary}), wide_layers())
    engine.monitor = SimpleNamespace(enabled=True, write_events=events.extend, tb_monitor=None)
    data, losses, error = batches(shape=(8, WIDE)), [], ""
    try:
        for _ in range(steps):
            losses.append(engine.train_batch(data).item())
    except CompressionError as stopped:
        error = str(stopped)
    costs = [value for name, value, _ in events if name == "Train/Compression/round_cost"]
    said = [line for line in lines if "rounds in a row" in line]
    return {"losses": losses, "weights": weights(engine), "costs": costs, "said": said, "error": error}


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.extended(keep=1)
def test_rounds_that_raise_the_loss_are_warned_of_once(delay, monkeypatch):
    first, last = launch_alone(monkeypatch, True, {}, 9, delay)
    rounds = 3 if delay == 2 else 4
    assert len(first["costs"]) == rounds and all(cost > 0 for cost in first["costs"][:3]) and not last["said"]
    (line,) = first["said"]
    assert line.startswith("ds_compress: guard: 3 rounds in a row raised the loss, the last one from ")
    assert len(first["losses"]) == 9


def test_the_guard_may_stop_all_ranks(monkeypatch):
    results = launch_alone(monkeypatch, True, {"action": "stop"})
    assert all("3 rounds in a row" in each["error"] and len(each["losses"]) == 6 for each in results)


def test_training_goes_on_as_without_the_guard(monkeypatch):
    watched, plain = (launch_alone(monkeypatch, False, {"every": every}) for every in (1000, 0))
    assert len(watched[0]["costs"]) == 4 and max(map(abs, watched[0]["costs"])) < 1e-4
    assert not plain[0]["costs"] and not watched[0]["said"]
    for one, other in zip(watched, plain):
        assert one["losses"] == other["losses"]
        assert same_weights(one["weights"], other["weights"])
