"""The grounds of a choice where a model is here: it is rehearsed in this process (runtime/profile_model.py),
and settings are tried on what crosses between its stages (trials.py)."""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from ds_compress.cli.advise import files, script
from ds_compress.cli.advise.grounds import Grounds, given_workload, rooms, stock
from ds_compress.cli.advise.trials import Trials
from ds_compress.cli.arguments import DTYPES
from ds_compress.cli.console import importing_deepspeed
from ds_compress.config import DIRECTIONS
from ds_compress.config.quality import Limits
from ds_compress.errors import CompressionError, errors_at
from ds_compress.planning import choice
from ds_compress.planning.choice import Candidate
from ds_compress.planning.step_time import Network, Workload

if TYPE_CHECKING:
    from ds_compress.runtime.local_stages import Stages
    from ds_compress.runtime.profile_model import Batch, Rehearsed

INSTEAD = ("forward_ms", "backward_ms", "held_mb", "codec_gbps")
"""Options that stand in the place of what is measured."""


class Rehearsal:
    """Of the model that `--model` or `--probe` names."""

    def __init__(self, args: argparse.Namespace):
        """
        Raises:
            CompressionError: other options contradict that, or one is missing.
        """
        self._args = args
        self._name = f"--model {args.model}" if args.model else f"--probe {args.probe}"
        self._workload = given_workload(args)
        if args.probe and args.shape:
            raise CompressionError("--shape: is not allowed with --probe, whose function gives a micro-batch")
        if args.model and len(args.shape or ()) not in (2, 3):
            raise CompressionError(
                "--shape: with --model it should be sequences of a micro-batch, and tokens of each: 4,1024"
            )
        self._files = files.read(args.recipe or ())

    def grounds(self, network: Network, limits: Limits) -> Grounds:
        """`limits`: of the errors within which settings are mixed."""
        with importing_deepspeed(), errors_at(self._name):
            found = self._rehearsed()
        instead = [f"--{name.replace('_', '-')}" for name in INSTEAD if getattr(self._args, name) is not None]
        if instead:
            print(f"{', '.join(instead)}: taken as given, not as measured", file=sys.stderr)
        sizes = {place: sum(t.nbytes for t in tensors) for place, tensors in found.of_one_micro_batch.items()}
        boundaries = range(self._args.stages - 1)
        forward, backward = ([sizes[b, direction] for b in boundaries] for direction in DIRECTIONS)
        held = [
            float(before) if math.isnan(own) else own  # what came in, as with activation checkpointing
            for own, before in zip(found.held, [forward[0], *forward])
        ]
        trials = Trials(found, self._args.device, self._args.codec_gbps)
        room = partial(rooms, self._args, held)
        if self._files:
            made = [*files.candidates(self._files, trials.of_file, room)]
        else:
            link = {"eager": True, "depth": self._args.depth, "rooms": room()}
            made = choice.candidates(trials.of_offers(), [network] * len(boundaries), limits, **link)
        workload = self._workload or Workload(
            found.forward, found.backward, self._args.micro_batches, self._args.step_ms / 1e3
        )
        return Grounds(
            workload,
            [stock(forward, backward), *filter(_is_known, made)],
            "; ".join(dict.fromkeys(", ".join(_words(t)) for t in _forward(found))),
            self._measured(found, trials),
        )

    def _rehearsed(self) -> "Rehearsed":
        from ds_compress.runtime.profile_model import rehearse

        stages, loss_fn, batches = self._of_checkpoint() if self._args.model else self._of_script()
        return rehearse(stages, loss_fn, batches, self._args.device)

    def _of_checkpoint(self) -> "tuple[Stages, Any, Iterator[Batch]]":
        from ds_compress.runtime.local_stages import Stages

        try:
            from ds_compress.hf.rehearsed import Checkpoint
        except ImportError as error:
            raise CompressionError(f'{error}; pip install "ds_compress[hf]"') from None
        args, checkpoint = self._args, Checkpoint(self._args.model)
        sequences, length, *width = args.shape
        if width and width != [checkpoint.width]:
            raise CompressionError(
                f"--shape: {width[0]} is not allowed in last place: the model has hidden states of "
                f"{checkpoint.width}; leave it out"
            )
        layers, bounds = checkpoint.layers(args.stages, DTYPES.get(args.dtype))
        stages = Stages(layers, bounds, args.device)
        return stages, checkpoint.loss_fn, checkpoint.batches(sequences, length)

    def _of_script(self) -> "tuple[Stages, Any, Iterator[Batch]]":
        from ds_compress.runtime.local_stages import Stages

        args, dtype = self._args, DTYPES.get(self._args.dtype)
        layers, loss_fn, (inputs, labels) = script.read(args.probe)
        if dtype is not None:
            inputs = tree_map(
                lambda x: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x, inputs
            )
        return Stages(layers, args.stages, args.device, dtype), loss_fn, itertools.repeat((inputs, labels))

    def _measured(self, found: "Rehearsed", trials: Trials) -> dict[str, Any]:
        stages = [
            {
                "stage": stage,
                "forward_ms": 1e3 * forward,
                "backward_ms": 1e3 * backward,
                "held_mb": None if math.isnan(held) else held / 1e6,
            }
            for stage, (forward, backward, held) in enumerate(zip(found.forward, found.backward, found.held))
        ]
        messages = [
            {
                "boundary": number,
                "direction": direction,
                "tensors": [{"shape": list(t.shape), "dtype": str(t.dtype).split(".")[1]} for t in tensors],
                "bytes": sum(t.nbytes for t in tensors),
                "settings": trials.measured(number, direction),
            }
            for (number, direction), tensors in sorted(found.of_one_micro_batch.items())
        ]
        device, threads = str(self._args.device), torch.get_num_threads()
        return {"device": device, "threads": threads, "stages": stages, "messages": messages}


def _is_known(candidate: Candidate) -> bool:
    """Whether it could be tried at every boundary."""
    return math.isfinite(max(candidate.errors))


def _forward(found: "Rehearsed") -> list[list[torch.Tensor]]:
    return [
        tensors
        for (_, direction), tensors in sorted(found.of_one_micro_batch.items())
        if direction == "forward"
    ]


def _words(tensors: list[torch.Tensor]) -> list[str]:
    return [f"{list(t.shape)} {str(t.dtype).split('.')[1]}" for t in tensors]
