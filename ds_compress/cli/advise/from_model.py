"""Evaluate candidates on the messages of a model that is profiled in this process.

Profile and evaluation are those of `"recipe": "auto"` (runtime/profile_model.py, planning/evaluate.py).
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.utils._pytree import tree_map

from ds_compress.cli.arguments import DTYPES
from ds_compress.cli.console import importing_deepspeed
from ds_compress.config import DIRECTIONS, Config
from ds_compress.errors import CompressionError, did_you_mean, errors_at, in_one_line, shown
from ds_compress.message.channel import Boundary
from ds_compress.message.clock import clock_for
from ds_compress.planning.choice import Candidate, EvaluatedMessage, Evaluation, all_candidates
from ds_compress.planning.evaluate import ByMicroBatch, evaluate, to_evaluation
from ds_compress.planning.step_time import Workload
from ds_compress.registry.plugins import module_at

if TYPE_CHECKING:
    from ds_compress.runtime.profile_model import Batch, Stages

OVERRIDES = ("forward_ms", "backward_ms", "activation_mb", "codec_gbps")
"""Options that replace what is measured."""


class ModelEvaluator:
    """Evaluates candidates at every boundary of a model that is profiled in this process."""

    raw_bytes: tuple[list[int], list[int]]
    activation_bytes: list[float]
    workload: Workload
    message: str

    def __init__(self, args: argparse.Namespace, workload: Workload | None):
        """
        Raises:
            CompressionError: options contradict that, or one is missing.
        """
        self._args, self._given = args, workload
        if args.probe and args.shape:
            raise CompressionError("--shape: is not allowed with --probe, whose function gives a micro-batch")
        if args.model and len(args.shape or ()) not in (2, 3):
            raise CompressionError(
                "--shape: with --model it should be sequences of a micro-batch, and tokens of each: 4,1024"
            )
        self._clock, self._boundaries = clock_for(args.device), range(args.stages - 1)
        self._evaluations: list[list[Evaluation]] = [[] for _ in self._boundaries]

    def prepare(self) -> None:
        """Profile the model.

        Raises:
            CompressionError: it fails.
        """
        args = self._args
        with (
            importing_deepspeed(),
            errors_at(f"--model {args.model}" if args.model else f"--probe {args.probe}"),
        ):
            from ds_compress.runtime.profile_model import profile_model

            found = self._of_checkpoint() if args.model else self._of_script()
            profile = self._profile = profile_model(*found, args.device)
        given = [f"--{name.replace('_', '-')}" for name in OVERRIDES if getattr(args, name) is not None]
        if given:
            print(f"{', '.join(given)}: taken as given, not as measured", file=sys.stderr)
        messages = profile.of_one_micro_batch
        forward, backward = (
            [sum(t.nbytes for t in messages[b, direction]) for b in self._boundaries]
            for direction in DIRECTIONS
        )
        self.raw_bytes = forward, backward
        self.activation_bytes = [
            float(input_bytes) if math.isnan(own) else own  # as with activation checkpointing
            for own, input_bytes in zip(profile.activation_bytes, [forward[0], *forward])
        ]
        self.workload = self._given or Workload(
            profile.forward, profile.backward, args.micro_batches, args.step_ms / 1e3
        )
        sent = (messages[b, "forward"] for b in self._boundaries)
        described = (", ".join(f"{list(t.shape)} {str(t.dtype).split('.')[1]}" for t in own) for own in sent)
        self.message = "; ".join(dict.fromkeys(described))

    def _of_checkpoint(self) -> "tuple[Stages, Any, Iterator[Batch]]":
        from ds_compress.runtime.profile_model import Stages

        try:
            from ds_compress.hf.pretrained import PretrainedModel
        except ImportError as error:
            raise CompressionError(f'{error}; pip install "ds_compress[hf]"') from None
        args, model = self._args, PretrainedModel(self._args.model)
        sequences, length, *width = args.shape
        if width and width != [model.width]:
            raise CompressionError(
                f"--shape: {width[0]} is not allowed in last place: the model has hidden states of "
                f"{model.width}; leave it out"
            )
        layers, bounds = model.layers(args.stages, DTYPES.get(args.dtype))
        stages = Stages(layers, bounds, args.device)
        return stages, model.loss_fn, model.batches(sequences, length)

    def _of_script(self) -> "tuple[Stages, Any, Iterator[Batch]]":
        from ds_compress.runtime.profile_model import Stages

        args, dtype = self._args, DTYPES.get(self._args.dtype)
        layers, loss_fn, (inputs, labels) = read_script(args.probe)
        if dtype is not None:
            inputs = tree_map(
                lambda x: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x, inputs
            )
        return Stages(layers, args.stages, args.device, dtype), loss_fn, itertools.repeat((inputs, labels))

    def measured(self) -> dict[str, Any]:
        """Return what was measured, for JSON."""
        profile = self._profile
        stages = [
            {
                "stage": stage,
                "forward_ms": 1e3 * forward,
                "backward_ms": 1e3 * backward,
                "activation_mb": None if math.isnan(nbytes) else nbytes / 1e6,
            }
            for stage, (forward, backward, nbytes) in enumerate(
                zip(profile.forward, profile.backward, profile.activation_bytes)
            )
        ]
        messages = [
            {
                "boundary": number,
                "direction": direction,
                "tensors": [{"shape": list(t.shape), "dtype": str(t.dtype).split(".")[1]} for t in tensors],
                "bytes": sum(t.nbytes for t in tensors),
                "settings": self._settings(number, direction),
            }
            for (number, direction), tensors in sorted(profile.of_one_micro_batch.items())
        ]
        device, threads = str(self._args.device), torch.get_num_threads()
        return {"device": device, "threads": threads, "stages": stages, "messages": messages}

    def of_candidates(self) -> list[list[Evaluation]]:
        """Evaluate every candidate; by boundary."""
        console, config = Console(stderr=True), Config({})
        found: list[list[Evaluation]] = [[] for _ in self._boundaries]
        pairs = list(itertools.product(self._boundaries, all_candidates()))
        for number, candidate in track(pairs, "measuring", console=console, disable=not console.is_terminal):
            found[number].append(self._evaluate(number, config, candidate))
        return found

    def of_file(self, name: str, config: Config) -> tuple[list[EvaluatedMessage], list[EvaluatedMessage]]:
        """Evaluate `config` as it is after its warm-up; return the messages forward and backward by boundary.

        Raises:
            CompressionError: a few messages are not enough to evaluate it.
        """
        config.check_boundaries(len(self._boundaries))
        found = []
        for number in self._boundaries:
            block = {
                direction: {key: value for key, (value, _) in config.find_choice(number, direction).items()}
                for direction in DIRECTIONS
            }
            found.append(self._evaluate(number, config, Candidate(name, block, is_separable=False)))
        if not all(math.isfinite(own.forward.error + own.backward.error) for own in found):
            raise CompressionError(
                "cannot be measured on a few messages: it learns from its warm-up, needs sample ids, or does "
                "not take messages of this kind"
            )
        return [own.forward for own in found], [own.backward for own in found]

    def _settings(self, boundary: int, direction: str) -> dict[str, dict[str, float]]:
        """Return what was measured of each usable candidate, by name."""
        messages = ((own.candidate.name, getattr(own, direction)) for own in self._evaluations[boundary])
        return {
            name: {
                "bytes": message.cost.nbytes,
                "encode_ms": 1e3 * message.cost.encode,
                "decode_ms": 1e3 * message.cost.decode,
                "error": message.error,
                "gradient_error": message.gradient_error,
            }
            for name, message in messages
            if math.isfinite(message.error)
        }

    def _evaluate(self, number: int, config: Config, candidate: Candidate) -> Evaluation:
        boundary = Boundary(number, config)
        boundary.dependence = self._profile.dependence[number]
        boundary.begin_step(self._profile.loss_scale)
        pair = [self._profile.messages[number, direction] for direction in DIRECTIONS]
        own = to_evaluation(candidate, evaluate(boundary, candidate, pair, self._clock))
        self._evaluations[number].append(own)
        gbps = self._args.codec_gbps
        return own if gbps is None else Evaluation(candidate, *_at_speed(own, pair, gbps))


def _at_speed(own: Evaluation, pair: Sequence[ByMicroBatch], gbps: float) -> Iterator[EvaluatedMessage]:
    """Replace measured times by those of codecs with `gbps`; codec `none` takes no time."""
    for direction, messages in zip(DIRECTIONS, pair):
        message: EvaluatedMessage = getattr(own, direction)
        codec = own.candidate.block[direction]["codec"]
        is_none = codec == "none" or (isinstance(codec, dict) and codec["name"] == "none")
        tensors = next(iter(messages.values()))
        seconds = 0.0 if is_none else sum(tensor.nbytes for tensor in tensors) / (gbps * 1e9)
        yield replace(message, cost=replace(message.cost, encode=seconds, decode=seconds))


WANTED = "(layers, loss_fn, (inputs, labels))"


class Script(NamedTuple):
    """What the function of `--probe FILE.py:FUNCTION` returns."""

    layers: Sequence[Any]
    """What `PipelineModule` takes: a list of LayerSpecs, modules and functions, or an nn.Sequential."""
    loss_fn: Callable[..., Any] | None
    """Of what the last layer gives and of labels; None: that is the loss."""
    batch: tuple[Any, Any]
    """Inputs and labels of one micro-batch: tensors, or tuples of them."""


def read_script(place: str) -> Script:
    """Import the file and call the function.

    Raises:
        CompressionError: there is none, it fails, or returns something else; one line.
    """
    file, _, name = place.rpartition(":")
    if not file.endswith(".py") or not name:
        raise CompressionError(f"{shown(place)} is not allowed: should be FILE.py:FUNCTION")
    path = Path(file).resolve()
    if not path.is_file():
        raise CompressionError(f"there is no file {file}")
    sys.path.insert(0, str(path.parent))  # as Python does for a script that it runs
    module = _guarded(lambda: module_at(path))
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise CompressionError(f"{file} has no function {name!r}{did_you_mean(name, known)}")
    return _checked(_guarded(function))


def _guarded(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise CompressionError(in_one_line(error)) from error


def _checked(found: Any) -> Script:
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        raise CompressionError(f"returned {_kind(found)}; should be {WANTED}")
    layers, loss_fn, batch = found
    if not isinstance(layers, (list, tuple, nn.Sequential, nn.ModuleList)) or not len(layers):
        raise CompressionError(
            f"layers of {WANTED} are {_kind(layers)}; should be a list of them, as PipelineModule takes it, "
            "or an nn.Sequential"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise CompressionError(f"loss_fn of {WANTED} is {_kind(loss_fn)}; should be a function, or None")
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise CompressionError(f"the micro-batch of {WANTED} is {_kind(batch)}; should be (inputs, labels)")
    return Script(list(layers), loss_fn, (batch[0], batch[1]))


def _kind(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return "None" if value is None else f"{type(value).__name__}{size}"
