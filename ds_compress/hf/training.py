"""One rank of a fine-tuning run: data, model and engine, training with checkpoints, evaluation."""

import contextlib
import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.monitor.config import WandbConfig
from deepspeed.monitor.wandb import WandbMonitor
from transformers import AutoTokenizer, PretrainedConfig, get_scheduler

from ds_compress.engine.deepspeed import file_writers, load_own_file_only, weights_files
from ds_compress.errors import CompressionError, differences, failures_at, in_one_line, shown
from ds_compress.hf.collective import gather_digests, gather_integers, raised_on_all_ranks
from ds_compress.hf.data import IDS, Sequences
from ds_compress.hf.input_checks import check_launch, check_length, check_tokens, zero_stage
from ds_compress.hf.run_folder import BEST, LATEST, RunFolder, checkpoint_name
from ds_compress.hf.settings import DTYPES, NAME, Settings, read_settings
from ds_compress.hf.transformers_pipeline import load_config, pipeline_module
from ds_compress.monitor.monitor import record_results, record_settings
from ds_compress.monitor.progress import Progress
from ds_compress.sites.store import run_in_thread

STAGES = "stage_layers"
"""Key of a checkpoint: the number of layers of each stage."""
ALIVE_S = 5.0
"""Seconds after which a rank that loads data tells those that wait for it."""


class FinetuneRun:
    """Hold one rank's part of a run."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.is_first = dist.get_rank() == 0
        with raised_on_all_ranks():
            replicas = check_launch(settings, dist.get_world_size())
        self.folder = RunFolder(Path(settings.out), replicas)
        _check_same_settings(settings)
        with raised_on_all_ranks():
            config = load_config(Path(settings.model))
            check_length(config, settings.lengths[-1])
        self.tokenizer, self.data = self._load_data(config)
        module = pipeline_module(
            settings.model,
            settings.stages,
            settings.lora.to_peft(settings.model) if settings.lora else None,
            dtype=DTYPES[settings.dtype],
            quantize=settings.quantize,
            positions=settings.sends_positions,
            activation_checkpoint_interval=settings.activation_checkpoint_interval,
            seed=settings.seed,
        )
        if wandb := settings.ds_config.get("wandb"):
            # DeepSpeed takes a run that there is; if its own does not begin, other ranks wait for this one
            with raised_on_all_ranks(), failures_at(f"{NAME}.ds_config.wandb"):
                if (asked := WandbConfig(**wandb)).enabled:  # else it need not be installed
                    WandbMonitor(asked)
        with failures_at(f"{NAME}.ds_config"):
            self.engine, *_ = deepspeed.initialize(
                model=module,
                config=complete_ds_config(settings, DTYPES[settings.dtype] or getattr(config, "dtype", None)),
                model_parameters=[p for p in module.parameters() if p.requires_grad],
            )
        self._session = getattr(self.engine, "ds_compress", None)  # what compresses; None: the key is absent
        grid = self.engine.grid
        self.replica = grid.get_data_parallel_id(), grid.data_parallel_size
        self.micro_batch = self.engine.train_micro_batch_size_per_gpu()
        visits = settings.epochs * len(self.data)
        self.steps = settings.steps or math.ceil(visits / self.engine.train_batch_size())
        if settings.lr_schedule:
            self.engine.lr_scheduler = get_scheduler(
                settings.lr_schedule.name,
                self.engine.basic_optimizer,
                num_warmup_steps=settings.lr_schedule.count_warmup_steps(self.steps),
                num_training_steps=self.steps,
            )
        self._length = settings.lengths[-1]
        """Length of the sequences in the latest batch."""
        self.evaluations: dict[int, float] = {}
        """Perplexities by step, of `eval_every`."""
        self._record_in_wandb(record_settings, "train", settings.model_dump(mode="json"))

    def _load_data(self, config: PretrainedConfig) -> tuple[Any, Sequences]:
        """Load the tokenizer and the sequences, which are equal on all ranks."""
        name = self.settings.tokenizer or self.settings.model
        with raised_on_all_ranks(), failures_at(f"{NAME}.tokenizer: {name}"):
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        data: Sequences = _call_in_turn(lambda: Sequences(self.settings, tokenizer))
        what = f"{NAME}.data: the text, or what the tokenizer makes of it,"
        for rows in data.sources:
            _check_same(what, rows.bounds)
            _check_same(what, rows.tokens)
            check_tokens(config, rows.tokens[:, IDS], name)
        return tokenizer, data

    def run(self) -> None:
        """Resume if there is a checkpoint, train, and evaluate before and after."""
        if not self.folder.is_shared:
            self._say(
                f"{NAME}.out: the machines do not share {self.folder.path}: each keeps the checkpoints of "
                "its stages, and rank 0's gets the weights of all at the end"
            )
        self.resume()
        with self.folder.write(NAME):  # not before: `merge` needs those of the checkpoints that are there
            if self.folder.is_owner:
                (self.folder.path / NAME).write_text(self.settings.model_dump_json(indent=2) + "\n")
        before = self.perplexity()
        when = f"of step {done}" if (done := self.engine.global_steps) else "before"
        self._say(f"perplexity {when}: {self._format(before)}")
        self.train()
        after = self.perplexity()
        self._say(f"perplexity after: {self._format(after)}")
        results = {"perplexity_before": before, "perplexity_after": after}
        if session := self._session:
            results["report"] = session.monitor.summary()
        self._record_in_wandb(record_results, results)
        if not self.folder.is_shared:
            for step in sorted({self.engine.global_steps, self._best_step or self.engine.global_steps}):
                self.folder.collect_weights(step)

    def resume(self) -> None:
        """Load the last complete checkpoint, if there is one.

        The optimizer's options, such as the learning rate, become those of train.json, which may have
        changed. A "scheduler" in `ds_config` is restored from the checkpoint instead.
        """
        engine, settings, root = self.engine, self.settings, str(self.folder.path)
        step = self.folder.find_last_step(weights_files(engine))
        if step is None:
            return
        changed = self._list_changes(checkpoint_name(step))
        options = [dict(group) for group in engine.basic_optimizer.param_groups]
        load_own_file_only(engine)
        with (
            failures_at(f"{NAME}.out: {checkpoint_name(step)} cannot be loaded{changed}"),
            self._files_checked(checkpoint_name(step)),
        ):
            _, state = engine.load_checkpoint(
                root, checkpoint_name(step), load_lr_scheduler_states=settings.lr_schedule is None
            )
        if "scheduler" not in settings.ds_config:
            for group, own in zip(engine.basic_optimizer.param_groups, options):
                group.update({**own, "params": group["params"]})
        if settings.lr_schedule:
            self._advance_schedule(engine.global_steps - engine.skipped_steps)
        self.evaluations = state.get("evaluations", {})
        if self._best_step == step:  # the run may have been stopped before it wrote the name
            self.folder.name_complete(step, BEST)
        self._say(f"goes on from step {engine.global_steps}{changed}")

    @contextmanager
    def _files_checked(self, checkpoint: str) -> Iterator[None]:
        """Have the error of a checkpoint's file that cannot be read name the file, and refuse a file of other
        stages: every rank reads one before anything is loaded.

        Some optimizers of DeepSpeed fail on one rank then, where the number of its weights falls, and the
        others wait for it.

        Args:
            checkpoint: name of its folder, for errors.
        """
        layers = self.engine.module.stage_layers
        reader = self.engine.checkpoint_engine
        own = reader.load

        def load(path: Any, *args: Any, **options: Any) -> Any:
            if not Path(path).exists():  # of another ZeRO stage; the error names it
                return own(path, *args, **options)
            advice = f"copy it again, or name an earlier checkpoint in {self.folder.path / LATEST}"
            with failures_at(f"{NAME}.out: {path} cannot be read: {advice}"):
                state = own(path, *args, **options)
            saved = state.get(STAGES, layers) if isinstance(state, dict) else layers
            if saved != layers:
                raise CompressionError(
                    f"{NAME}.stages: {shown(self.settings.stages)} is not allowed: {checkpoint} in "
                    f"{self.folder.path} is of stages with {saved} layers; use {saved}, or "
                    "choose a new folder"
                )
            return state

        reader.load = load
        try:
            yield
        finally:
            reader.load = own

    def _advance_schedule(self, done: int) -> None:
        """Have `lr_schedule` go on after `done` steps: like the data, the rate follows from their number."""
        schedule, groups = self.engine.lr_scheduler, self.engine.basic_optimizer.param_groups
        schedule.last_epoch = done
        for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas):
            group["lr"] = base * factor(done)

    def _list_changes(self, checkpoint: str) -> str:
        """Name what differs from the settings of the last start, as a part of a line; empty if nothing does.

        Args:
            checkpoint: name of its folder, for errors.

        Raises:
            CompressionError: on every rank, if the optimizer is of another kind: with the state of one,
                others fail in their first step.
        """
        before = now = self.settings.model_dump(mode="json")
        with contextlib.suppress(CompressionError):  # of a start that was killed as it wrote them
            before = read_settings(self.folder.path / NAME).model_dump(mode="json")
        changed = sorted(path.removeprefix(".") for path, *_ in differences(before, now, ""))
        with raised_on_all_ranks():
            saved, asked = (_optimizer_kind(each["ds_config"]["optimizer"]) for each in (before, now))
            for key in asked:
                if str(saved[key]).lower() != str(asked[key]).lower():  # DeepSpeed takes "adam" for "Adam"
                    raise CompressionError(
                        f"{NAME}.ds_config.optimizer.{key}: {shown(asked[key])} is not allowed: {checkpoint} "
                        f"in {self.folder.path} has the state of {shown(saved[key])}; use that, or choose a "
                        "new folder"
                    )
        return f" (changed since its last start: {', '.join(changed)})" if changed else ""

    def train(self) -> None:
        """Train up to the last step, or until `early_stop`; save when it is due, and at the end."""
        engine, settings = self.engine, self.settings
        done = engine.global_steps
        micro_batches = engine.gradient_accumulation_steps()
        batches = self.data.steps(self.micro_batch, *self.replica, micro_batches, start=done)
        progress = Progress("training", self.steps, done, shown=self.is_first)
        before = self._count_bytes()
        for step, batch in zip(range(done, self.steps), batches):
            if self._has_stopped:
                break
            # The dropout of a step follows from its number, so a resumed run needs no generator's state
            torch.manual_seed(settings.seed * 1_000_003 + step)
            started = time.monotonic()
            self._expect_length(batch[0][1].shape[1])
            loss = engine.train_batch(iter(batch)).item()
            speed = engine.train_batch_size() * self._length / (time.monotonic() - started)
            values = {"loss": f"{loss:.4f}", "tokens/s": f"{speed:.0f}"}
            raw, wire = (now - then for now, then in zip(self._count_bytes(), before))
            values |= {"ratio": f"{raw / wire:.2f}x"} if wire else {}
            progress.update(step + 1, values)
            self._record(step + 1, loss)
            is_best = self._is_due(step, settings.eval_every) and self._evaluate(progress)
            is_last = step + 1 == self.steps or self._has_stopped
            if is_best or is_last or self._is_due(step, settings.save_every):
                self._save()
            if is_best:
                self.folder.name_complete(step + 1, BEST)
        progress.close()
        if self._has_stopped:
            self._say(f"stopped after step {engine.global_steps}; the best was step {self._best_step}")

    def _expect_length(self, length: int) -> None:
        """Have stages announce the shapes of messages again if the next batch has another length."""
        if length != self._length:
            self.engine.reset_activation_shape()
        self._length = length

    @staticmethod
    def _is_due(step: int, every: int) -> bool:
        return every > 0 and (step + 1) % every == 0

    @property
    def _best_step(self) -> int | None:
        """The step with the lowest perplexity, which nan is not; None if none was evaluated."""
        found = self.evaluations
        return min(found, key=lambda step: (math.isnan(found[step]), found[step]), default=None)

    @property
    def _has_stopped(self) -> bool:
        """Whether `early_stop` evaluations have come after the best one."""
        most = self.settings.early_stop
        if most is None or (best := self._best_step) is None:
            return False
        return sum(step > best for step in self.evaluations) >= most

    def _evaluate(self, progress: Progress) -> bool:
        """Evaluate, and return whether the perplexity is the lowest so far."""
        step = self.engine.global_steps
        self.evaluations[step] = self.perplexity()
        progress.say(f"perplexity after step {step}: {self._format(self.evaluations[step])}")
        return self._best_step == step

    def _count_bytes(self) -> tuple[int, int]:
        """Return the bytes that this stage has sent, before and after compression; zeros without it."""
        sent = [channel.sent for channel in self._session.stage.sending] if self._session else []
        return sum(each.raw_bytes for each in sent), sum(each.wire_bytes for each in sent)

    def _record(self, step: int, loss: float) -> None:
        """Append a line to losses.jsonl, whole or not at all.

        One that cannot be written does not stop training: whether there is space for a checkpoint shows when
        it is due, on all ranks.
        """
        if not self.is_first:
            return
        file, line = self.folder.path / "losses.jsonl", json.dumps({"step": step, "loss": loss}) + "\n"
        try:
            with file.open("ab", buffering=0) as lines:
                end = lines.tell()
                if lines.write(line.encode()) < len(line):
                    lines.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._say(f"{NAME}.out: {file}: step {step} cannot be written: {error.strerror}")

    def _save(self) -> None:
        """Save a checkpoint, and name it once every rank has written its part.

        DeepSpeed's own `save_latest` names it once rank 0 has, so a run killed then could not be resumed.
        """
        step = self.engine.global_steps
        with self._write_to_the_end(checkpoint_name(step)):
            self.engine.save_checkpoint(
                str(self.folder.path),
                checkpoint_name(step),
                client_state={"evaluations": self.evaluations, STAGES: self.engine.module.stage_layers},
                save_latest=False,
                exclude_frozen_parameters=self.settings.lora is not None,
            )
        self.folder.name_complete(step)

    @contextmanager
    def _write_to_the_end(self, name: str) -> Iterator[None]:
        """Take part in saving the checkpoint `name`, in which others wait, even if this rank cannot write.

        Raises:
            CompressionError: on every rank, if one of them could not write a file.
        """
        failures: list[Exception] = []

        def attempt(write: Callable[..., None], *args: Any, **options: Any) -> None:
            try:
                write(*args, **options)
            except (OSError, RuntimeError) as error:  # torch raises either
                failures.append(error)

        own = [(owner, method, getattr(owner, method)) for owner, method in file_writers(self.engine)]
        for owner, method, write in own:
            setattr(owner, method, partial(attempt, write))
        try:
            yield
        finally:
            for owner, method, write in own:
                setattr(owner, method, write)
        with self.folder.write(name):
            for failure in failures:
                raise failure

    def perplexity(self) -> float:
        """Return exp of the mean loss of the held-out sequences, on every rank."""
        batches = self.data.held_out(self.micro_batch, *self.replica)
        self._expect_length(self.settings.lengths[-1])
        loss = self.engine.eval_batch(iter(batches), num_micro_batches=len(batches))
        return _perplexity_of(float(loss))

    def _format(self, perplexity: float) -> str:
        """Format the perplexity of the last evaluation; if "eval" is "both", with and without compression."""
        losses = (self._session and self._session.eval_losses) or {}
        both = ", ".join(f"{_perplexity_of(losses[mode]):.4f} {mode}" for mode in sorted(losses))
        return f"{perplexity:.4f} ({both})" if both else f"{perplexity:.4f}"

    def _record_in_wandb(self, record: Callable[..., None], *values: Any) -> None:
        """Call `record`; an error of W&B must not stop a run."""
        try:
            record(*values)
        except Exception as error:
            self._say(f"W&B: {record.__name__} failed: {in_one_line(error)}")

    def _say(self, line: str) -> None:
        if self.is_first:
            print(line, file=sys.stderr, flush=True)


def complete_ds_config(settings: Settings, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the DeepSpeed config, with an optimizer that has fp32 copies of 16-bit weights.

    A run that W&B shows also writes CSV files, which its report is made of, unless the config sets them.

    Without fp32 copies a step is lost wherever it is less than half the distance between two bf16 numbers:
    2e-4 near 1, for example. Adapters are fp32 and need none. What the user's config says of bf16 or ZeRO
    stays. Where it enables bf16, ZeRO stage 1 is added, too: without ZeRO, DeepSpeed saves the optimizer of
    bf16 in a form that it cannot load.

    Args:
        settings: of the run.
        dtype: of the model's weights; None: fp32.

    Raises:
        CompressionError: all parameters are to be trained in fp16 without DeepSpeed's loss scaling.
    """
    config = settings.ds_config
    wandb, fp16, bf16 = (
        isinstance(own := config.get(key), dict) and own.get("enabled") for key in ("wandb", "fp16", "bf16")
    )
    if wandb:
        config = {"csv_monitor": {"enabled": True, "output_path": settings.out, "job_name": "csv"}} | config
    if fp16:  # without ZeRO, DeepSpeed does not scale the loss
        return {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True} | config
    if not bf16 and (settings.lora or dtype not in (torch.bfloat16, torch.float16)):
        return config
    if dtype == torch.float16 and not settings.lora:
        raise CompressionError(
            f'{NAME}.dtype: "fp16" needs "fp16": {{"enabled": true}} in ds_config to train all '
            'parameters; or choose "bf16", "fp32" or "lora"'
        )
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}} | config
    if zero_stage(config) == 1:  # without ZeRO, DeepSpeed can only add up micro-batches in bf16
        defaults = {"data_types": {"grad_accum_dtype": "fp32"}, "zero_allow_untested_optimizer": True}
        config = defaults | config
    return config


def _optimizer_kind(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return what decides which state an optimizer keeps, by key."""
    params = optimizer.get("params") or {}
    switches = {f"params.{name}": bool(params.get(name)) for name in ("torch_adam", "amsgrad", "centered")}
    return {"type": optimizer["type"], **switches}


def _perplexity_of(loss: float) -> float:
    return math.exp(min(loss, 80.0))


def _check_same_settings(settings: Settings) -> None:
    """Refuse settings that differ between ranks; paths may, and "ds_compress" is compared by the engine."""
    values = settings.model_dump(mode="json", exclude={"model": True, "tokenizer": True, "out": True})
    values["data"] |= {"train": "", "eval": ""}
    values["ds_config"].pop("ds_compress", None)
    for monitor in ("csv_monitor", "tensorboard"):
        if isinstance(own := values["ds_config"].get(monitor), dict):
            own.pop("output_path", None)
    for key, value in values.items():
        _check_same(f"{NAME}.{key}", json.dumps(value).encode())


def _check_same(what: str, data: Any) -> None:
    """Refuse, on every rank, bytes or an array that are not equal on all ranks."""
    digests = gather_digests(data)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise CompressionError(f"{what} differs between ranks 0 and {other}; should be equal on all machines")


def _call_in_turn(load: Callable[[], Any]) -> Any:
    """Call `load` on the first process of each machine, then on the others, which find its cached files.

    It may take longer than a collective waits for others, so it runs beside short ones.
    """
    is_first = int(os.environ["LOCAL_RANK"]) == 0
    loaded = None
    for turn in (True, False):
        loading = run_in_thread(load, "ds_compress_data") if is_first is turn else None
        while not all(gather_integers(loading is None or loading.done())):
            if loading:
                wait([loading], ALIVE_S)
        with raised_on_all_ranks():
            loaded = loading.result() if loading else loaded
    return loaded
