"""Fine-tune a Transformers checkpoint as a pipeline, with what train.json says (hf/settings.py):

    deepspeed --hostfile hosts --module ds_compress.hf.finetune train.json
    torchrun --nproc_per_node 2 -m ds_compress.hf.finetune train.json
    accelerate launch --use_deepspeed --num_processes 2 -m ds_compress.hf.finetune train.json

A run that is started again goes on from its last complete checkpoint, bit by bit.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from transformers import AutoTokenizer

from ds_compress.errors import CompressionError, in_one_line
from ds_compress.hf.data import IDS, Sequences
from ds_compress.hf.fits import check_length, check_tokens
from ds_compress.hf.model import config_of, pipeline_module
from ds_compress.hf.sample import continued
from ds_compress.hf.settings import NAME, Settings, read
from ds_compress.monitor.progress import Progress

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
LATEST = "latest"
"""File that names the last complete checkpoint, for DeepSpeed to load."""


class Run:
    """One process of a run."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.out = Path(settings.out)
        config = config_of(Path(settings.model))
        check_length(config, settings.sequence_length)
        tokenizer = settings.tokenizer or settings.model
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        except (OSError, ValueError) as error:
            raise CompressionError(f"{NAME}.tokenizer: {tokenizer}: {in_one_line(error)}") from None
        self.data = _one_by_one(lambda: Sequences(settings, self.tokenizer))
        for sequences in (self.data.train, self.data.eval):
            check_tokens(config, sequences[:, IDS], tokenizer)
        module = pipeline_module(
            settings.model,
            settings.stages,
            settings.lora.config(settings.model) if settings.lora else None,
            dtype=DTYPES[settings.dtype],
            positions=settings.data.packing == "isolated",
            activation_checkpoint_interval=settings.activation_checkpoint_interval,
            seed=settings.seed,
            rank=settings.subspace.rank if settings.subspace else None,
            samples=self._samples(),
        )
        self.engine, *_ = deepspeed.initialize(
            model=module,
            config=settings.ds_config,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
        )
        self.first = dist.get_rank() == 0
        grid = self.engine.grid
        self.replica = grid.get_data_parallel_id(), grid.data_parallel_size
        self.micro_batch = self.engine.train_micro_batch_size_per_gpu()
        visits = settings.epochs * len(self.data.train)
        self.steps = settings.steps or math.ceil(visits / self.engine.train_batch_size())

    def _samples(self) -> list[Any]:
        """Inputs that a basis is found from; few where a checkpoint is there, which has one."""
        if self.settings.subspace is None:
            return []
        count = 1 if Path(self.out, LATEST).exists() else self.settings.subspace.samples
        batches = self.data.batches(1, replica=0, replicas=1, start=0)
        return [inputs for inputs, _ in itertools.islice(batches, count)]

    def resume(self) -> None:
        """Go on from the last complete checkpoint, where there is one."""
        if Path(self.out, LATEST).exists():
            self.engine.load_checkpoint(str(self.out), load_module_strict=self.settings.lora is None)
            self.say(f"goes on from step {self.engine.global_steps}")

    def perplexity(self) -> float:
        """exp of the mean loss of the held-out sequences; the same on every rank."""
        batches = self.data.held_out(self.micro_batch, *self.replica)
        loss = self.engine.eval_batch(iter(batches), num_micro_batches=len(batches))
        return math.exp(min(float(loss), 80.0))

    def train(self) -> None:
        engine, settings = self.engine, self.settings
        done = engine.global_steps
        batches = self.data.batches(
            self.micro_batch, *self.replica, start=done * engine.gradient_accumulation_steps()
        )
        progress = Progress("training", self.steps, done, shown=self.first)
        before = self._sent()
        tokens = engine.train_batch_size() * settings.sequence_length
        for step in range(done, self.steps):
            # dropout of a step follows from its number: nothing of it has to be kept for resuming
            torch.manual_seed(settings.seed * 1_000_003 + step)
            started = time.monotonic()
            loss = engine.train_batch(batches).item()
            speed = tokens / (time.monotonic() - started)
            values = {"loss": f"{loss:.4f}", "tokens/s": f"{speed:.0f}"}
            raw, wire = (now - then for now, then in zip(self._sent(), before))
            values |= {"ratio": f"{raw / wire:.2f}x"} if wire else {}
            progress.update(step + 1, values)
            self._record(step + 1, loss)
            if step + 1 == self.steps or (settings.save_every and (step + 1) % settings.save_every == 0):
                self._save()
        progress.close()

    def _sent(self) -> tuple[int, int]:
        """Bytes that this stage has sent so far, before and after compression; zero without it."""
        stage = getattr(self.engine, "_compression", None)
        sent = [channel.sent for channel in stage.sending] if stage else []
        return sum(each.raw_bytes for each in sent), sum(each.wire_bytes for each in sent)

    def _record(self, step: int, loss: float) -> None:
        """A line for each step in losses.jsonl."""
        if self.first:
            with open(self.out / "losses.jsonl", "a") as file:
                print(json.dumps({"step": step, "loss": loss}), file=file)

    def _save(self) -> None:
        """DeepSpeed's own `save_latest` names a checkpoint once rank 0 has written its part, others maybe not
        yet; here all have, and who reads it meets the old name or the new one."""
        tag = f"step{self.engine.global_steps}"
        frozen = self.settings.lora is not None
        self.engine.save_checkpoint(str(self.out), tag, save_latest=False, exclude_frozen_parameters=frozen)
        if self.first:
            new = self.out / f"{LATEST}.new"
            new.write_text(tag)
            new.replace(self.out / LATEST)

    def say(self, line: str) -> None:
        if self.first:
            print(line, file=sys.stderr, flush=True)

    def run(self) -> None:
        if self.first:
            Path(self.out, NAME).write_text(self.settings.model_dump_json(indent=2) + "\n")
        self.resume()
        self.say(f"perplexity before: {self.perplexity():.4f}")
        self.train()
        self.say(f"perplexity after: {self.perplexity():.4f}")
        if self.settings.prompt is not None:
            shape = self.micro_batch, self.settings.sequence_length
            positions = self.settings.data.packing == "isolated"
            text = continued(self.engine, self.tokenizer, self.settings.prompt, shape, positions)
            self.say(f"sample: {text!r}")


def _one_by_one(make: Any) -> Any:
    """`make` on the first process of each machine, then on the others, which find what it has kept."""
    first = int(os.environ["LOCAL_RANK"]) == 0
    failure: CompressionError | None = None
    made = None
    for turn in (True, False):
        if first is turn:
            try:
                made = make()
            except CompressionError as error:
                failure = error
        failed = torch.tensor(
            int(failure is not None), dtype=torch.int64, device=get_accelerator().current_device_name()
        )
        dist.all_reduce(failed)
        if failed:
            raise failure or CompressionError("another rank could not read the data")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run this process's part; returns the exit code, 2 for input that is refused, in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m ds_compress.hf.finetune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", type=Path, help="train.json")
    parser.add_argument("--local_rank", type=int, help="set by the deepspeed launcher")
    args = parser.parse_args(argv)
    # A C++ extension for all-reduce in CPU inference, which no pipeline calls: training needs no compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        settings = read(args.settings)
        if "LOCAL_RANK" not in os.environ:
            raise CompressionError(
                "this process knows of no others: start it through deepspeed --module, torchrun -m, or "
                "accelerate launch --use_deepspeed -m"
            )
        Path(settings.out).mkdir(parents=True, exist_ok=True)
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
        deepspeed.init_distributed()
        Run(settings).run()
    except CompressionError as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    # Without an orderly end gloo's threads may abort a process that has already finished
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
