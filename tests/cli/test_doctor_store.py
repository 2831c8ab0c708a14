"""`ds-compress doctor --replica-store`: the way to the store, who is there, and whether settings agree."""

import json

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from ds_compress.cli import main
from ds_compress.cli.doctor import store as store_module
from ds_compress.config import Config
from ds_compress.config.replicas import OuterOptions
from ds_compress.sites.board import PREFIX, Position
from ds_compress.sites.outer_step import Anchor
from ds_compress.sites.rounds import Rounds
from ds_compress.sites.store import shared_settings

BLOCK = {"replicas": {"codec": {"name": "quantize", "bits": 4}, "feedback": "ef", "every": 30}}


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def doctor(store, capsys, monkeypatch, tmp_path):
    """Runs the command with a block; returns its exit code, report, and findings on the store as text."""
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "ds_config.json"

    def run(block=BLOCK, address=f"127.0.0.1:{store.port}", seconds=300):
        path.write_text(json.dumps({"ds_compress": block}))
        words = ["--replica-store", address, "--ds-config", str(path), "--timeout", str(seconds)]
        code = main(["doctor", "--json", *words])
        report = json.loads(capsys.readouterr().out)
        found = [f"{each['level']} {each['said']}" for each in report["findings"]]
        return code, report["replica_store"], [line for line in found if "replica" in line]

    return run


def join_site(store):
    rounds = Rounds(store, HashStore(), 0, 2, OuterOptions())
    rounds.number = rounds.join(shared_settings(Config(BLOCK)), Position(0, "first")).number
    rounds.take_part(Anchor(torch.zeros(1), torch.zeros(1)), Position(0, "first"))


def test_the_way_to_a_store_without_replicas(doctor, store):
    code, found, lines = doctor()
    assert code == 0 and min(found[key] for key in ("rtt_ms", "up_gbps", "down_gbps")) > 0
    assert lines[0].startswith("good replica store 127.0.0.1:") and "MB/s there" in lines[0]
    assert lines[1].endswith("no replica is there yet")
    assert not [key for key in store.list_keys() if "doctor" in key]


def test_who_is_there_and_with_which_settings(doctor, store, monkeypatch):
    # while the doctor waits, a replica gives a sign of life
    monkeypatch.setattr(store_module.time, "sleep", lambda seconds: store.add(f"{PREFIX}beat", 1))
    join_site(store), join_site(store)
    code, found, lines = doctor()
    assert code == 0 and found["announced"] == [1, 2] and found["is_alive"]
    assert lines[1].endswith("replicas 1, 2 meet in round 0")
    assert lines[2].endswith("the replicas there have the settings of this machine")
    code, _, lines = doctor({"replicas": {**BLOCK["replicas"], "every": 50}})
    assert code == 1
    assert "bad ds_compress.replicas.every: the replicas there have 30, this machine has 50" in lines


def test_replicas_that_are_gone(doctor, store, monkeypatch):
    monkeypatch.setattr(store_module, "BEAT_S", 0.1)
    join_site(store)
    _, found, lines = doctor()
    assert not found["is_alive"] and "look" in lines[1] and "no sign of life for 0.2 s" in lines[1]


def test_a_store_that_is_not_there_or_damaged(doctor, store):
    store.set(f"{PREFIX}head", "nonsense")
    code, _, (line,) = doctor()
    assert code == 1 and "the replica store has 'nonsense'" in line
    code, _, (line,) = doctor(address="127.0.0.1:1", seconds=1)
    assert code == 1 and line.startswith("bad replica store 127.0.0.1:1 cannot be reached: ")


def test_bad_options(doctor, capsys, tmp_path):
    assert main(["doctor", "--replica-store", "nowhere"]) == 2
    assert "--replica-store is 'nowhere'; set it to HOST:PORT" in capsys.readouterr().err
    (tmp_path / "x.json").write_text(json.dumps({"ds_compress": {}}))
    assert main(["doctor", "--replica-store", "127.0.0.1:1", "--ds-config", str(tmp_path / "x.json")]) == 2
    assert '"every" above 1' in capsys.readouterr().err
