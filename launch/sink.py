"""How long the attention sink of SmolLM2 stays while it is fine-tuned with few bits in its gradients.

    python launch/sink.py --data FOLDER [--steps 100] [--seed 1] [--draws 1234] [--without] [--long]

LoRA as in preset `real` of launch/reproduce.py, compressed as by `balanced` after three steps; with `--long`
as in the task of 1,000 steps of preset `long`, whose learning rate falls more slowly. Each line has
a step, its loss, the least length that the first token of a sample has behind the second stage, the median
length of the others there, and the largest norm of a stage's gradients. `--without` leaves out the components
of gradients along activations; with another `--draws` their noise is another.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ds_compress.codecs import entropy
from ds_compress.simulate import simulate
from ds_compress.simulate.boundary import SimulatedBoundary
from launch.reproduce import training
from launch.reproduce.run import task_of
from launch.reproduce.settings import SETTINGS
from launch.reproduce.task import STAGES


def main() -> None:
    """Train, and print the lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="has smollm2/ and wikitext2/")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of batches and adapters")
    parser.add_argument("--draws", type=int, default=1234, help='"seed" of the ds_compress block')
    parser.add_argument("--without", action="store_true", help="without components along activations")
    parser.add_argument("--long", action="store_true", help="of 1,000 steps")
    args = parser.parse_args()
    if args.without:
        entropy.ALONG = 0.0
    balanced = SETTINGS["smollm2-lora"]["entropy4-rank8/dither1.5"]
    config = {"ds_compress": {**balanced, "warmup_steps": 3, "seed": args.draws}}
    of = ("long", "smollm2-lora-1000") if args.long else ("real", "smollm2-lora")
    task = task_of(*of, args.data, args.data)
    stages = nn.Sequential(*task.stages(args.seed))
    model = simulate(stages, config, range(1, STAGES), task.steps_per_epoch)
    lengths = torch.zeros(0, 0)  # of tokens, [samples, tokens]

    def measure(boundary: SimulatedBoundary, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal lengths
        lengths = inputs[0].detach().norm(dim=-1)

    boundaries = [layer for layer in model if isinstance(layer, SimulatedBoundary)]
    boundaries[1].register_forward_pre_hook(measure)
    step, number = training.step, 0

    def measured_step(*given: object) -> float:
        nonlocal number
        loss, number = step(*given), number + 1  # type: ignore[arg-type]
        gradients = [[p.grad.norm() for p in stage.parameters() if p.grad is not None] for stage in model]
        norm = max(float(torch.stack(own).norm()) for own in gradients if own)
        first, others = lengths[:, 0].min(), lengths[:, 1:].median()
        print(f"{number:4} {loss:.4f} {first:9.0f} {others:7.0f} {norm:7.2f}", flush=True)
        return loss

    training.step = measured_step  # type: ignore[assignment]
    training.train([model], config, task, args.seed, torch.device("cpu"), most=args.steps)


if __name__ == "__main__":
    main()
