"""Train a byte-level GPT as a DeepSpeed pipeline; compression is in the JSON alone.

    deepspeed --num_gpus 2 launch/train_lm.py --deepspeed_config ds_configs/none.json
    torchrun --nproc_per_node 4 launch/train_lm.py --stages 2 --deepspeed_config ds_configs/none.json

The text is the source of Python's standard library, or a file or folder given with --data. Losses and step
times go to whichever monitors the DeepSpeed config switches on.
"""

import argparse
import itertools
import math
import os
import sysconfig
import time
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import numpy as np
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn
from tqdm import tqdm

VOCABULARY = 256
DEFAULT_DATA_BYTES = 4 << 20
HELD_OUT = 0.1  # share of the text, at its end, that is never trained on
EVAL_MICRO_BATCHES = 16


class Embedding(nn.Module):
    """Token ids (batch, seq) int64 -> hidden states (batch, seq, hidden)."""

    def __init__(self, hidden: int, seq: int):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, hidden)
        self.position = nn.Embedding(seq, hidden)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position.weight[: ids.size(1)]


class Block(nn.Module):
    """A pre-norm transformer block with causal attention; hidden states in, hidden states out."""

    def __init__(self, hidden: int, heads: int, layers: int):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.project = nn.Linear(hidden, hidden)
        self.norm_mlp = nn.LayerNorm(hidden)
        self.expand = nn.Linear(hidden, 4 * hidden)
        self.contract = nn.Linear(4 * hidden, hidden)
        for linear in (self.qkv, self.project, self.expand, self.contract):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        # GPT-2: what writes to the residual stream starts smaller, so its variance does not grow with depth
        for linear in (self.project, self.contract):
            linear.weight.data /= math.sqrt(2 * layers)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.contract(F.gelu(self.expand(self.norm_mlp(x))))


class Head(nn.Module):
    """Hidden states (batch, seq, hidden) -> logits (batch, seq, 256)."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.logits = nn.Linear(hidden, VOCABULARY, bias=False)
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy per byte, in nats."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def build_layers(args: argparse.Namespace) -> list[LayerSpec]:
    return [
        LayerSpec(Embedding, args.hidden, args.seq),
        *(LayerSpec(Block, args.hidden, args.heads, args.layers) for _ in range(args.layers)),
        LayerSpec(Head, args.hidden),
    ]


def load_text(data: str | None) -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes held out, uint8, disjoint; the same for every process that sees the same
    files.

    Args:
        data: a file, or a folder whose files are joined in sorted order; None takes the first 4 MiB of the
            modules at the top level of Python's standard library.
    """
    if data is None:
        files, limit = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), DEFAULT_DATA_BYTES
    else:
        path = Path(data)
        files, limit = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()), None
    if not files:
        raise SystemExit(f"--data {data}: no file there; give a text file or a folder of text files")
    text = b"".join(file.read_bytes() for file in files)[:limit]
    cut = int(len(text) * (1 - HELD_OUT))
    tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
    return tokens[:cut], tokens[cut:]


def batches(tokens: Tensor, micro_batch: int, seq: int, seed: int, replica: int = 0, start: int = 0):
    """Yield (inputs, labels) for ever, each int64 [micro_batch, seq]: random windows, labels one byte later.

    Batch i follows from (seed, replica, i) alone: the first and the last stage draw the same one without
    talking, and a resumed run (`start` = batches already taken) goes on where it stopped.
    """
    if len(tokens) <= seq:
        raise SystemExit(f"--data: {len(tokens)} bytes in one split, but --seq {seq} needs more than {seq}")
    window = torch.arange(seq + 1)
    for index in itertools.count(start):
        starts = np.random.default_rng((seed, replica, index)).integers(len(tokens) - seq, size=micro_batch)
        picked = tokens[torch.from_numpy(starts)[:, None] + window].long()
        yield picked[:, :-1], picked[:, 1:]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stages", type=int, default=2, help="pipeline stages; the world size is a multiple of it"
    )
    parser.add_argument(
        "--steps", type=int, default=120, help="optimizer steps in all, those before --load included"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--eval-every", type=int, default=0, help="steps between held-out losses; 0: never")
    parser.add_argument(
        "--replica",
        type=int,
        default=0,
        help="number of this launch, if several train one model: draws other batches",
    )
    parser.add_argument("--data", help="text file or folder (default: Python's standard library)")
    parser.add_argument("--save", help="checkpoint folder to write")
    parser.add_argument("--load", help="checkpoint folder to resume from")
    parser.add_argument(
        "--save-every", type=int, default=0, help="steps between checkpoints; 0: only at the end"
    )
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    args = parse_args()
    # A C++ extension for all-reduce in CPU inference, which no pipeline calls: training needs no compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    train_tokens, held_out = load_text(args.data)
    # seed_layers: a layer's weights depend on its index, not on how the layers are cut into stages.
    # DeepSpeed's own seed_fn (0.19.8) fails with partition_method "type:...", which hands it a numpy integer
    model = PipelineModule(
        layers=build_layers(args),
        num_stages=args.stages,
        loss_fn=loss_fn,
        partition_method="type:Block",
        seed_layers=True,
        seed_fn=torch.manual_seed,
        base_seed=args.seed,
    )
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    if args.load:
        engine.load_checkpoint(args.load)

    replica = args.replica * engine.grid.get_data_parallel_world_size() + engine.grid.get_data_parallel_rank()
    sizes = engine.train_micro_batch_size_per_gpu(), args.seq, args.seed, replica
    data = batches(train_tokens, *sizes, start=engine.global_steps * engine.gradient_accumulation_steps())
    bar = tqdm(
        range(engine.global_steps, args.steps), unit="step", mininterval=1, disable=engine.global_rank != 0
    )
    losses = []
    for step in bar:
        started = time.perf_counter()
        losses.append(engine.train_batch(data).item())
        elapsed_ms = 1e3 * (time.perf_counter() - started)
        engine.monitor.write_events([("Train/Samples/step_ms", elapsed_ms, engine.global_samples)])
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        if args.eval_every and (step + 1) % args.eval_every == 0:
            evaluation = engine.eval_batch(batches(held_out, *sizes), num_micro_batches=EVAL_MICRO_BATCHES)
            if engine.global_rank == 0:
                bar.write(f"step {step + 1}: held-out loss {evaluation.item():.4f}")
        if args.save and args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            engine.save_checkpoint(args.save)
    if args.save:
        engine.save_checkpoint(args.save)
    if losses and engine.global_rank == 0:
        print(
            f"trained {len(losses)} steps: first loss {losses[0]:.4f}, final loss {losses[-1]:.4f}",
            flush=True,
        )
    # Without an orderly end gloo's threads may abort a process that has already finished
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
