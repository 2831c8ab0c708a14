"""The demo's reading of DeepSpeed's CSV files, and the text its training script draws from."""

import itertools
import json
import socket

import pytest
import torch

from ds_compress.config import DIRECTIONS
from launch import demo, train_lm
from tests.support.launch_scripts import ROOT, write_csv

SAMPLES = 32  # per step


@pytest.fixture
def run_folder(tmp_path):
    """12 steps, 2 boundaries; byte totals written every 4 steps."""
    steps = range(1, 13)
    write_csv(tmp_path, "Train/Samples/train_loss", [(s * SAMPLES, 5.0 - 0.25 * s) for s in steps])
    times = [(s * SAMPLES, 900.0 if s <= 5 else 100.0 + s) for s in steps]
    write_csv(tmp_path, "Train/Samples/step_ms", times)
    for boundary, (direction, per_step) in itertools.product((0, 1), (("forward", 10), ("backward", 30))):
        for kind, size in (("raw", 1 << 30), ("wire", per_step)):
            label = f"Train/Compression/boundary_{boundary}/{direction}/{kind}_bytes"
            write_csv(tmp_path, label, [(s * SAMPLES, s * size) for s in (4, 8, 12)])
    return tmp_path


def write_bytes(folder, raw, wire):
    """Bytes of both directions of one boundary, so many in each of two steps."""
    for direction, (kind, size) in itertools.product(DIRECTIONS, (("raw", raw), ("wire", wire))):
        label = f"Train/Compression/boundary_0/{direction}/{kind}_bytes"
        write_csv(folder, label, [(SAMPLES, size), (2 * SAMPLES, 2 * size)])


def test_the_port_of_a_launch_stays_its_own():
    """The launcher takes seconds to come to rank 0, and once another process had the port by then."""
    with demo.deepspeed_launcher(2) as (launcher, _), socket.socket() as other:
        port = int(launcher[launcher.index("--master_port") + 1])
        with pytest.raises(OSError):
            other.bind(("127.0.0.1", port))


def test_summary_row(run_folder):
    raw, wire = 12 * 4 * 2**30, 12 * 2 * (10 + 30)
    assert demo.summarize("topk10", run_folder) == {
        "recipe": "topk10",
        "steps": 12,
        "first_loss": 4.25,  # steps 1-5
        "final_loss": 2.5,  # steps 8-12
        "raw_bytes": raw,
        "wire_bytes": wire,
        "ratio": round(raw / wire, 3),
        "step_ms": 109.0,  # median of 106..112: the slow first 5 steps do not count
    }


def test_summary_of_fewer_steps_than_the_window(tmp_path):
    write_csv(tmp_path, "Train/Samples/train_loss", [(32, 5.0), (64, 4.0)])
    write_csv(tmp_path, "Train/Samples/step_ms", [(32, 100), (64, 200)])
    write_bytes(tmp_path, raw=400, wire=50)
    row = demo.summarize("none", tmp_path)
    assert (row["first_loss"], row["final_loss"], row["step_ms"], row["ratio"]) == (4.5, 4.5, 150.0, 8.0)


def test_progress_shows_loss_ratio_and_bytes_saved_from_what_is_written_so_far(tmp_path):
    assert demo.read_progress(tmp_path) == (0, {})
    write_csv(tmp_path, "Train/Samples/train_loss", [(32, 5.0), (64, 4.0)])
    assert demo.read_progress(tmp_path) == (2, {"loss": "4.000"})
    write_bytes(tmp_path, raw=1000, wire=1032)
    assert demo.read_progress(tmp_path)[1]["saved"] == "0.000 GB"  # and not -0
    write_bytes(tmp_path, raw=1.5e9, wire=0.5e9)
    with open(tmp_path / "Train_Samples_train_loss.csv", "a") as file:
        file.write("96,")  # seen while DeepSpeed writes it
    assert demo.read_progress(tmp_path) == (2, {"loss": "4.000", "ratio": "3.00x", "saved": "4.000 GB"})


def test_byte_counts_that_stop_early_or_are_not_there_are_refused(run_folder):
    write_csv(run_folder, "Train/Samples/train_loss", [(13 * SAMPLES, 1.0)])
    with pytest.raises(SystemExit, match=f"end at sample {12 * SAMPLES}, the run at {13 * SAMPLES}"):
        demo.summarize("none", run_folder)
    for file in run_folder.glob("*_bytes.csv"):
        file.unlink()
    with pytest.raises(SystemExit, match=r"^demo: .*: no raw_bytes: .*not active[^\n]*$"):
        demo.summarize("none", run_folder)


@pytest.mark.parametrize("steps, every", [(120, 10), (125, 5), (7, 1)])
def test_derived_config_adds_only_the_monitors(tmp_path, steps, every):
    settings = json.loads((ROOT / "ds_configs" / "safe.json").read_text())
    derived = demo.derive_config(settings, steps, tmp_path)
    assert derived.pop("csv_monitor") == {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"}
    assert derived["ds_compress"].pop("monitor") == {"every": every}
    assert derived == settings


def test_default_text_is_deterministic_and_capped():
    train, held_out = train_lm.load_text(None)
    again, _ = train_lm.load_text(None)
    assert torch.equal(train, again)
    assert len(train) + len(held_out) <= train_lm.DEFAULT_DATA_BYTES
    assert b"import" in bytes(train[:100_000].tolist())


def test_splits_are_disjoint_and_cover_the_text(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, place in {"b.txt": (100, 200), "a.txt": (0, 100), "sub/c.txt": (200, 256)}.items():
        (tmp_path / name).write_bytes(bytes(range(*place)))
    train, held_out = train_lm.load_text(str(tmp_path))
    assert train.tolist() + held_out.tolist() == list(range(256)) and len(held_out) == 26
    single, _ = train_lm.load_text(str(tmp_path / "a.txt"))
    assert single.tolist() == list(range(90))


def test_empty_data_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no file there"):
        train_lm.load_text(str(tmp_path))
    with pytest.raises(SystemExit, match="10 bytes in one split"):
        next(train_lm.batches(torch.zeros(10, dtype=torch.uint8), 1, 10, seed=0))


def test_batches_follow_from_seed_replica_and_position():
    tokens = torch.arange(250, dtype=torch.uint8)

    def draw(count, **options):
        batches = itertools.islice(train_lm.batches(tokens, 4, 16, **options), count)
        return torch.stack([torch.stack(pair) for pair in batches])

    stream = draw(6, seed=1)
    assert stream.shape == (6, 2, 4, 16) and stream.dtype == torch.int64
    assert torch.equal(stream, draw(6, seed=1))
    assert torch.equal(stream[2:], draw(4, seed=1, start=2))
    assert not torch.equal(stream, draw(6, seed=2))
    assert not torch.equal(stream, draw(6, seed=1, replica=1))
    # the label is the next byte; here each byte is its position
    assert torch.equal(stream[:, 1], stream[:, 0] + 1)
    inputs, labels = next(train_lm.batches(torch.arange(20, dtype=torch.uint8), 200, 16, seed=0))
    assert inputs.min() == 0 and labels.max() == 19, "both ends of the text are reached"


def test_model_is_causal_and_starts_at_chance():
    args = train_lm.argparse.Namespace(layers=2, hidden=32, heads=4, seq=16)
    model = torch.nn.Sequential(*(spec.build() for spec in train_lm.build_layers(args)))
    ids = torch.randint(256, (2, 16))
    changed = ids.clone()
    changed[:, 10] = (ids[:, 10] + 1) % 256
    logits, other = model(ids), model(changed)
    assert torch.allclose(logits[:, :10], other[:, :10], atol=1e-6)
    assert not torch.allclose(logits[:, 10:], other[:, 10:], atol=1e-3)
    assert train_lm.loss_fn(logits, ids).item() == pytest.approx(5.545, abs=0.3)  # ln 256
