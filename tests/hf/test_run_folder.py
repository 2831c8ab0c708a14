"""Checkpoints of machines without a shared folder, and of ranks of which one is slow: nothing is lost."""

import errno
import fcntl
import os
import re
import resource
import shutil
import time
from pathlib import Path

import pytest
from deepspeed.runtime import engine
from torch import distributed
from transformers import AutoModelForCausalLM

from ds_compress.errors import CompressionError
from ds_compress.hf import collective, run_folder
from ds_compress.hf.merge import merge
from ds_compress.hf.run_folder import RunFolder
from ds_compress.hf.settings import read_settings
from ds_compress.hf.training import FinetuneRun
from tests.support.calls import wrapped
from tests.support.finetuning import BLOCK, DS_CONFIG, losses, perplexity, prepare
from tests.support.ranks import run_ranks
from tests.support.refusals import refusal

WEIGHTS = "layer_03-model_states.pt"


def machine(folder):
    """The folder of this rank's machine; each rank has a machine to itself."""
    return folder / f"machine{distributed.get_rank()}"


def start(path, **changes):
    """The run, with `out` on this rank's machine."""
    settings = read_settings(path).model_copy(update={"out": str(machine(path.parent)), **changes})
    return FinetuneRun(settings)


def finetune(path, steps):
    run_folder.CHUNK = 1000  # many for a file
    run = start(path, steps=steps)
    run.run()
    return run.perplexity()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """train.json of a run that was started twice, and its last perplexity."""
    path = prepare(tmp_path_factory.mktemp("machines"), eval_sequences=4)
    run_ranks(2, finetune, path, 2)
    found = run_ranks(2, finetune, path, 4)
    assert found[0] == found[1]
    return path, found[0]


@pytest.fixture
def copy(trained, tmp_path):
    """A folder like that of the run, which a test may damage."""
    return shutil.copytree(trained[0].parent, tmp_path / "copy")


def test_a_run_goes_on_and_is_merged_on_the_first_machine(trained, tmp_path):
    path, after = trained
    out = path.parent / "machine0"
    merge(out, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert perplexity(path, model) == pytest.approx(after, rel=1e-5)
    shared = prepare(tmp_path / "shared", eval_sequences=4, steps=4)
    run_ranks(2, lambda: FinetuneRun(read_settings(shared)).run())
    assert losses(out) == losses(tmp_path / "shared" / "out")


def test_a_machine_that_lost_its_checkpoint_is_named_on_every_rank(copy):
    for lost in ("layer_03-model_states.pt", "mp_rank_01_model_states.pt"):
        (copy / "machine1" / "step4" / lost).unlink()
        first, second = run_ranks(2, refusal, finetune, copy / "train.json", 6)
        assert first == second
        assert first.startswith("train.json.out: rank 1 does not find its part of step4 on its machine; ")


def finetune_alone(path, steps):
    """Train, and exit with the error on this rank alone: the other one then waits for it, as in a launch."""
    try:
        finetune(path, steps)
    except CompressionError as error:
        raise SystemExit(str(error)) from None


@pytest.mark.parametrize("name", ["layer_03-model_states.pt", "mp_rank_01_model_states.pt"])
@pytest.mark.extended(keep=1)
def test_a_file_that_is_damaged_is_named(copy, name):
    """A copy that was cut short ended in `EOFError: Ran out of input`, of a file that nothing named."""
    (copy / "machine1" / "step4" / name).write_bytes(b"")
    for said in run_ranks(2, finetune_alone, copy / "train.json", 6, check=False):
        assert f"machine1/step4/{name} cannot be read: copy it again, or name an earlier" in said


@pytest.mark.extended
def test_a_machine_whose_settings_are_damaged_goes_on_with_the_others(trained, copy):
    """It compared them with nothing, and was in another collective than the others."""
    _, after = trained
    (copy / "machine1" / "train.json").write_text("{")
    assert run_ranks(2, finetune, copy / "train.json", 4) == [after, after]


def test_layers_that_are_on_another_machine_are_explained(trained, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(trained[0].parent / "machine0", out)
    (out / "latest").write_text("step2")  # of the first start, which ended before the second one
    for file in (out / "step2").glob("layer_04*"):
        file.unlink()
    said = refusal(merge, out, tmp_path / "merged")
    assert "layer 4 of the pipeline is missing; if the machines do not" in said


def test_replicas_need_a_folder_of_their_stage(tmp_path):
    first, second = run_ranks(2, lambda: refusal(RunFolder, machine(tmp_path), 2))
    assert first == second
    assert first.startswith("train.json.out: rank 1 does not see what rank 0 writes there, and both train")
    assert run_ranks(2, lambda: RunFolder(machine(tmp_path), 1).is_shared) == [False, False]


def test_a_folder_in_which_a_run_goes_on_is_refused(tmp_path):
    """Ranks whose launcher had been killed trained on, and the run that was started again wrote among their
    checkpoints."""
    with (tmp_path / ".lock").open("a") as other:
        fcntl.lockf(other, fcntl.LOCK_EX)
        first, second = run_ranks(2, lambda: refusal(RunFolder, tmp_path, 1))
    assert first.startswith(f"train.json.out: {tmp_path}: a run that has not ended writes there; ")
    assert second == f"{first} [rank 0]"
    assert run_ranks(2, lambda: RunFolder(tmp_path, 1).is_shared) == [True, True]


def last_step(folder):
    """What each rank resumes from if rank 0 alone had named the checkpoint of step 4 when it was killed."""
    path = machine(folder)
    for step in (2, 4):
        (path / f"step{step}").mkdir(parents=True)
    (path / "latest").write_text("step2" if distributed.get_rank() else "step4")
    return RunFolder(path, 1).find_last_step()


def test_a_checkpoint_that_one_machine_had_named_is_complete_on_all(tmp_path):
    assert run_ranks(2, last_step, tmp_path) == [4, 4]


def collect(folder, rank, file):
    """What each rank says if there is a folder where `rank` has to read, or write, `file`."""
    path = machine(folder)
    step = path / "step1"
    step.mkdir(parents=True)
    if distributed.get_rank() == rank:
        (step / file).mkdir()
    if not (step / WEIGHTS).exists():
        (step / WEIGHTS).write_bytes(bytes(40_000_000))
    return refusal(RunFolder(path, 1).collect_weights, 1)


@pytest.mark.parametrize("rank, file, doing", [(0, f"{WEIGHTS}.part", "written"), (1, WEIGHTS, "read")])
def test_weights_that_cannot_be_collected_are_said_on_every_rank(tmp_path, rank, file, doing):
    """The others said only that their connection to it was lost."""
    said = run_ranks(2, collect, tmp_path, rank, file)
    assert f"{file} cannot be {doing}: IsADirectoryError: " in said[rank]
    assert said[1 - rank] == f"{said[rank]} [rank {rank}]"


def allow_files_up_to(size):
    """Have this process fail to write beyond, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def fill_disk(path, size, before_start):
    """What a rank says if rank 1 can write files of `size` bytes; its machine has a cache of the data."""
    limited = distributed.get_rank() == 1

    def train():
        if limited and before_start:
            allow_files_up_to(size)
        run = start(path)
        if limited:
            allow_files_up_to(size)
        run.run()

    try:
        return refusal(train)
    finally:
        allow_files_up_to(resource.RLIM_INFINITY)


@pytest.mark.parametrize(
    ("block", "size", "before_start", "expected"),
    [
        (BLOCK, 500, True, "-tokens.npy cannot be written: OSError: "),
        (BLOCK, 500, False, ": train.json cannot be written: OSError: "),
        (BLOCK, 4_000, False, ": step1 cannot be written: "),
        (None, 4_000, False, ": step1 cannot be written: "),
    ],
    ids=["data", "settings", "checkpoint", "checkpoint of DeepSpeed alone"],
)
@pytest.mark.extended(keep=1)
def test_a_full_disk_of_one_machine_is_said_on_every_rank(tmp_path, block, size, before_start, expected):
    """That rank ended with a traceback of NumPy or torch, the others with one of gloo."""
    config = {**DS_CONFIG, "ds_compress": block} if block else DS_CONFIG
    first, second = run_ranks(2, fill_disk, prepare(tmp_path, steps=1, ds_config=config), size, before_start)
    assert expected in second and first == f"{second} [rank 1]"


def fill_disk_at_losses(path):
    """What rank 0 says if its disk has no space for the second line of losses."""
    run, said = FinetuneRun(read_settings(path)), []
    run._say = said.append
    run._record = wrapped(
        run._record,
        before=lambda *_: allow_files_up_to(50),
        after=lambda *_: allow_files_up_to(resource.RLIM_INFINITY),
    )
    run.train()
    return said


def test_a_loss_that_cannot_be_written_is_left_out(tmp_path):
    """A part of its line was left, to which the next start appended, and the run ended: rank 0 with this
    reason, the others with a traceback of gloo."""
    path = prepare(tmp_path, steps=2, save_every=0)
    first, second = run_ranks(2, fill_disk_at_losses, path)
    file = tmp_path / "out" / "losses.jsonl"
    assert first == [f"train.json.out: {file}: step 2 cannot be written: No space left on device"]
    assert second == [] and list(losses(tmp_path / "out")) == [1]
    assert (tmp_path / "out" / "latest").read_text() == "step2"


def train_without_a_folder(path):
    """What a rank says if rank 1 cannot make the folder of the first checkpoint."""
    run = start(path)
    if distributed.get_rank() == 1:
        (run.folder.path / "step1").write_text("in its place")
    return refusal(run.run)


@pytest.mark.parametrize("block", [BLOCK, None], ids=["compressed", "DeepSpeed alone"])
@pytest.mark.extended
def test_a_checkpoint_without_a_folder_is_said_on_every_rank(tmp_path, block):
    """A full disk may have no place for a folder, either; that rank ended alone, with a traceback."""
    config = {**DS_CONFIG, "ds_compress": block} if block else DS_CONFIG
    for said in run_ranks(2, train_without_a_folder, prepare(tmp_path, steps=1, ds_config=config)):
        assert ": step1 cannot be written: " in said or "checkpoint step1 is not complete: " in said


def copy_nothing(*paths):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def train_without_scripts(path):
    engine.copyfile = copy_nothing  # in this forked process
    return refusal(FinetuneRun(read_settings(path)).train)


@pytest.mark.extended
def test_a_script_of_deepspeed_for_which_there_is_no_space_is_said_on_every_rank(tmp_path):
    """With ZeRO, DeepSpeed copies two scripts beside the checkpoint: rank 0 ended with a traceback."""
    config = {**DS_CONFIG, "zero_optimization": {"stage": 1}, "ds_compress": BLOCK}
    first, second = run_ranks(2, train_without_scripts, prepare(tmp_path, steps=1, ds_config=config))
    assert first.endswith(": step1 cannot be written: OSError: [Errno 28] No space left on device")
    assert second == f"{first} [rank 0]"


def resume_from(folder, contents):
    """What a rank says to each content of `latest` on the machine of rank 1."""
    path = machine(folder)
    path.mkdir()
    run, said = RunFolder(path, 1), []
    for content in contents:
        (path / "latest").write_bytes(content if distributed.get_rank() else b"step4")
        said.append(refusal(run.find_last_step))
    return said


def test_a_latest_that_names_no_checkpoint_is_refused(tmp_path):
    """The run began again from the first step, and overwrote its checkpoints."""
    contents = [b"", b"\xff\xfe", b"step", b"step4\0", b"../step4"]
    for first, second in zip(*run_ranks(2, resume_from, tmp_path, contents), strict=True):
        assert re.match(
            rf"{tmp_path}/machine1/latest: b'.*' is not allowed: should name a checkpoint", second
        )
        assert first == f"{second} [rank 1]"


def saved(path):
    """Whether any file of this rank was still to be written when `latest` was there; rank 1 is slow."""
    run = FinetuneRun(read_settings(path))
    engine, early = run.engine.checkpoint_engine, []

    def pause(*args, **options):
        time.sleep(0.3 * distributed.get_rank())
        early.append((run.folder.path / "latest").exists())

    engine.save = wrapped(engine.save, before=pause)
    run.resume()
    run.train()
    return early


@pytest.mark.parametrize(("block", "zero"), [(None, 0), (BLOCK, 1)], ids=["uncompressed", "zero-1"])
@pytest.mark.extended
def test_the_last_file_of_the_slowest_rank_is_written_before_it(tmp_path, block, zero):
    config = {**DS_CONFIG, "zero_optimization": {"stage": zero}} | ({"ds_compress": block} if block else {})
    for early in run_ranks(2, saved, prepare(tmp_path, steps=1, ds_config=config)):
        assert early and not any(early)
    assert (tmp_path / "out" / "latest").read_text() == "step1"


def weights_of_each(path):
    """How often this rank looked for others, how many bytes it got by broadcast, and what it has then."""
    looks, sizes = [], []
    files, exists = Path.exists, lambda file: looks.append(file) if file.name.startswith(".rank-") else None
    Path.exists = wrapped(files, before=exists)
    run = RunFolder(path, 1)
    Path.exists = files
    rank, step = distributed.get_rank(), path / "step1"
    step.mkdir(exist_ok=True)
    if not run.is_shared:
        collective.dist.broadcast = wrapped(
            collective.dist.broadcast, before=lambda buffer, source: sizes.append(buffer.nbytes)
        )
        (step / f"layer_{rank:02}-model_states.pt").write_bytes(bytes([rank]) * 100_000)
        run.collect_weights(1)
    return len(looks), sum(sizes), [file.read_bytes() for file in sorted(step.iterdir())]


def test_weights_go_to_the_first_machine_alone(tmp_path):
    """Every machine got those of all others: with 64 of them, 63 times as many bytes as one receives."""
    first, *others = run_ranks(4, lambda: weights_of_each(machine(tmp_path)))
    assert first[2] == [bytes([rank]) * 100_000 for rank in range(4)]
    for rank, (_, broadcast, files) in enumerate(others, 1):
        assert broadcast < 1000 and files == [bytes([rank]) * 100_000]


def test_ranks_that_share_a_folder_do_not_look_for_each_other(tmp_path):
    """Each looked for all: 262,144 looks at a network disk with 512 ranks."""
    assert [looks for looks, *_ in run_ranks(4, weights_of_each, tmp_path)] == [1] * 4
