"""Choose settings for `"recipe": "auto"` from measurements in the first steps of training.

Two steps at the end of the warm-up, or the second and the third where there is none, are measured as for
depth "auto"; in the last of them each end of a boundary copies the messages of the first micro-batches, and
evaluates all candidates on them (planning/candidate_errors.py). One collective gathers the results on all
ranks, and each makes the same choice (planning/choice.py): the recipe with the shortest predicted step whose
errors are within the error budget. It holds from the next step on; checkpoints contain it.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from ds_compress.codec import Codec, TensorSpec, bytes_of
from ds_compress.config import DIRECTIONS, KEY, Config
from ds_compress.config.recipes import LIMITS, Quality, with_changes
from ds_compress.message.clock import HostClock, clock_for
from ds_compress.message.observer import Observer, SeenMessage, observing
from ds_compress.message.part import Change, Engine, StageView, Step
from ds_compress.planning.balance import balance_layers, is_uneven
from ds_compress.planning.candidate_errors import REPEATS, UNKNOWN, Messages, evaluate, is_informative
from ds_compress.planning.choice import (
    BASELINE,
    Candidate,
    EvaluatedMessage,
    Evaluation,
    boundary_block,
    candidates_for,
    combine,
    pick_best,
    rank,
    uncompressed_recipe,
)
from ds_compress.planning.schedule import is_deepspeed_schedule
from ds_compress.planning.step_time import Workload
from ds_compress.runtime.depth import MEASURED, DepthController
from ds_compress.runtime.stage_profile import (
    ClusterProfile,
    Row,
    by_stage,
    describe_links,
    gather,
    profile_cluster,
)


class MessageCopies(Observer):
    """Copies the messages of the first micro-batches of a batch."""

    def __init__(self, found: Messages):
        self._found = found

    def after(self, message: SeenMessage) -> None:
        number, place = message.message_id.micro_batch, message.channel
        if number < REPEATS:
            copies = [tensor.detach().clone() for tensor in message.tensors]
            self._found.setdefault((place.boundary.number, place.direction), {})[number] = copies


def column_name(side: str, candidate: Candidate, direction: str, what: str) -> str:
    """Return a column of `evaluate_candidates`; `what`: bytes, encode, decode, error, gradient_error."""
    return f"{side}: {candidate.name}, {direction} {what}"


def evaluate_candidates(
    stage: StageView, candidates: Sequence[Candidate], messages: Messages, clock: HostClock, step: int
) -> Row:
    """Evaluate `candidates` at the boundaries before and after this stage.

    Return bytes, seconds and errors by `column`, with equal columns on every rank. An unknown error
    is infinite: there is no such boundary, its messages were not copied, or the setting cannot be used.

    Args:
        step: optimizer steps done, those of the warm-up included.
    """
    row: Row = {}
    for side, boundary in (("before", stage.before), ("after", stage.after)):
        pair = [messages.get((boundary.number, key), {}) for key in DIRECTIONS] if boundary else []
        for candidate in candidates:
            found = dict.fromkeys(DIRECTIONS, UNKNOWN)
            if boundary is not None and all(pair):
                found = stage.on_codec_stream(boundary, evaluate, boundary, candidate, pair, clock, step)
            for direction, own in found.items():
                for what, value in own._asdict().items():
                    row[column_name(side, candidate, direction, what)] = value
    return row


TRIES = 10
"""Most attempts to measure: gradients may overflow, or be zero."""

UNCOMPRESSED = "none"
"""The recipe that is used where no other is faster."""


class AutoController(DepthController):
    """Choose the settings of the boundaries once, and the depth of an engine."""

    def __init__(self, config: Config):
        super().__init__(config.block.link)
        self._config = config
        assert config.quality is not None
        self._quality = config.quality
        self._candidates = candidates_for(config.quality)
        self._messages: Messages = {}
        self._tries = 1

    def resume(self, step: Step, state: Mapping[str, Any], own: object) -> None:
        """Go on as for depth "auto"; where no choice was loaded, make it with all attempts again."""
        super().resume(step, state, own)
        self._messages, self._tries, self._config.gave_up = {}, 1, False

    def _measures(self, engine: Engine, pipe_schedule: Any) -> bool:
        if not self._config.is_open:
            return super()._measures(engine, pipe_schedule)
        if engine.num_stages == 1:
            self._give_up(engine, "a pipeline of one stage sends none")
            return False
        if is_deepspeed_schedule(pipe_schedule):
            return True
        self._give_up(engine, f"the time of a step of {type(pipe_schedule).__name__} cannot be predicted")
        return False

    def _give_up(self, engine: Engine, why: str) -> None:
        self._config.gave_up = True
        if engine.global_rank == 0:
            print(f"ds_compress: recipe auto: messages stay uncompressed: {why}", flush=True)

    def _last_measured(self, engine: Engine) -> int:
        usual = super()._last_measured(engine)
        if not self._config.is_open:
            return usual
        # A resumed run chooses when it would have anyway, but not by its first batch
        least = MEASURED[0] if self._tries == 1 else usual
        return max(least, max(usual, self._config.warmup_steps) - engine.global_steps)

    def _watching(self, engine: Engine, stage: StageView) -> AbstractContextManager[None]:
        copies = self._config.is_open and self._batches == self._last
        copier = MessageCopies(self._messages)
        return observing([(end, copier) for end in stage.ends if copies])

    def _choose(self, engine: Engine, stage: StageView, row: Row) -> Change | None:
        if not self._config.is_open:
            return super()._choose(engine, stage, row)
        clock = clock_for(engine.device)
        row |= evaluate_candidates(stage, self._candidates, self._messages, clock, engine.global_steps)
        row["informative"] = float(is_informative(self._messages))
        self._messages = {}
        rows = gather(row, engine.device)
        if not all(row["informative"] for row in rows) and self._tries < TRIES:
            self._tries += 1
            self.measure_again()
            return None
        if not all(row["forward"] and row["backward"] for row in rows):
            self._give_up(engine, "this program runs passes of a stage by functions that are not measured")
            return None
        found = profile_cluster(rows, engine.micro_batches, self.now, self._link.memory_gb, engine.device)
        found = replace(found, workload=_with_tied_codec(found.workload, rows, self._config.tied_codec))
        evaluations = [
            [_evaluation(candidate, before, after) for candidate in self._candidates]
            for before, after in pairwise(by_stage(rows))
        ]
        ranked = self._ranked(found, evaluations, engine.dynamic_shape)
        limits = LIMITS[self._quality]
        chosen = pick_best(ranked, limits) or next((r for r in ranked if r["recipe"] == UNCOMPRESSED), None)
        if chosen is None:
            self._give_up(engine, "no activation and its gradient were seen")
            return None
        self.set(stage, chosen["depth"])
        step = engine.global_steps
        block = reproducing(self._config, chosen, step, stage.connections)
        report = format_report(
            ranked, chosen, rows, self._quality, block, step, found.workload, engine.module
        )
        return Change(_everywhere(chosen["block"], len(found.networks)), lambda: print(report, flush=True))

    def _ranked(
        self, found: ClusterProfile, evaluations: list[list[Evaluation]], dynamic_shape: bool
    ) -> list[dict[str, Any]]:
        """Return rows of all recipes within the limits, the baseline first."""
        limits = LIMITS[self._quality]
        deepens = found.memory_budgets is not None and not dynamic_shape
        depth = self._link.depth if deepens or not self.auto else 1
        link = {"eager": True, "depth": depth, "budgets": found.memory_budgets or ()}
        forward, backward = ([cost.nbytes for cost in sent] for sent in (found.forward, found.backward))
        made = combine(evaluations, found.networks, limits, **link)
        allowed = [recipe for recipe in made if recipe.is_within(limits)]
        return rank(found.workload, found.networks, [uncompressed_recipe(forward, backward), *allowed])


def _with_tied_codec(workload: Workload, rows: Sequence[Row], codec: Codec | None) -> Workload:
    """Return the workload of steps after the choice: of fp32, tied gradients take the codec's share of bytes
    and of time. What the codec itself takes does not count.
    """
    exact = min((row["tied"] for row in rows if row["tied"]), default=0.0)  # others wait for the last one
    if codec is None or not exact:
        return workload
    spec = TensorSpec((2**20,), torch.float32)
    saved = 1 - bytes_of(codec.layout(spec)) / spec.nbytes
    return replace(workload, per_step=max(0.0, workload.per_step - saved * exact))


def _evaluation(candidate: Candidate, before: Sequence[Row], after: Sequence[Row]) -> Evaluation:
    """Return the evaluation of a boundary, from the rows of the stages before and after it: the worst."""

    def worst(direction: str, what: str) -> float:
        upstream = [row[column_name("after", candidate, direction, what)] for row in before]
        return max(upstream + [row[column_name("before", candidate, direction, what)] for row in after])

    messages = (EvaluatedMessage(*(worst(key, what) for what in UNKNOWN._fields)) for key in DIRECTIONS)
    return Evaluation(candidate, *messages)


def _everywhere(block: dict[str, Any], boundaries: int) -> dict[str, Any]:
    """Return the key `boundaries` of a block that gives each boundary the settings of `block`."""
    own = block.get("boundaries", {})
    return {str(n): boundary_block({**block, **own.get(str(n), {})}) for n in range(boundaries)}


REPORT_HEADER = "step, ms", "speed-up", "depth", "forward", "backward", "settings (errors measured)"
REPORT_COLUMNS = "{:>10}  {:>8}  {:>6}  {:>8}  {:>8}  {}"


def format_report(
    ranked: Sequence[dict[str, Any]],
    chosen: dict[str, Any],
    rows: Sequence[Row],
    quality: Quality,
    block: dict[str, Any],
    step: int,
    workload: Workload,
    module: Any,
) -> str:
    """Format the table of recipes, the times of the stages, and the chosen block.

    Args:
        ranked: rows of `choice.rank`.
        block: trains the same without profiling.
        module: the `PipelineModule` whose stages took the times in `workload`.
    """
    limits = LIMITS[quality]
    lines = [
        f"ds_compress: recipe auto, quality {quality} (token errors up to {limits.forward:g} "
        f"forward, errors up to {limits.backward:g} of accumulated gradients): {chosen['recipe']}, "
        f"link depth {chosen['depth']}, from step {step + 1} on; {describe_links(rows)}",
        REPORT_COLUMNS.format(*REPORT_HEADER),
    ]
    for row in ranked:
        numbers = f"{1e3 * row['step_s']:.1f}", f"{row['speedup']:.2f}", row["depth"]
        errors = f"{row['token_error']:.4f}", f"{row['gradient_error']:.4f}"
        mark = " <- chosen" if row is chosen else ""
        lines.append(REPORT_COLUMNS.format(*numbers, *errors, f"{row['recipe']}{mark}"))
    connections = block.get("link", {}).get("connections", 1)
    if connections != 1:
        lines.append(f"{BASELINE}'s step is predicted over {connections} connections, too; it has one")
    if chosen["speedup"] < 1.05:
        lines.append(f"no setting of quality {quality} makes a step 5 % faster than {BASELINE}'s own")
    lines += format_stages(workload, rows, module)
    lines.append(f'"{KEY}": {json.dumps(block)}')
    return "\n".join(lines)


def format_stages(workload: Workload, rows: Sequence[Row], module: Any) -> list[str]:
    """Format the times of the stages as options of advise; if they are uneven, also the layers to give them.

    Args:
        rows: of all ranks.
        module: its `parts`, and `stage_layers` if it counts other layers in its settings, are read.
    """
    forward, backward = (
        ",".join(f"{1e3 * s:.4g}" for s in own) for own in (workload.forward, workload.backward)
    )
    times = f"--forward-ms {forward} --backward-ms {backward} --step-ms {1e3 * workload.per_step:.4g}"
    lines = [f"stages, for ds-compress advise: {times}"]
    lower, upper = (
        [max(row[f"forward {end}"] for row in own) for own in by_stage(rows)] for end in ("lower", "upper")
    )
    if not is_uneven(lower, upper):
        return lines
    slow, fast = (workload.forward.index(pick(workload.forward)) for pick in (max, min))
    times = f"{workload.forward[slow] / workload.forward[fast]:.2f} times as long as stage {fast}"
    line = f"stages are uneven: a forward pass of stage {slow} takes {times}"
    given = getattr(module, "stage_layers", None)
    layers = given or [end - start for start, end in pairwise(getattr(module, "parts", ()))]
    if len(layers) == workload.stages and min(layers) > 0:
        seconds = [sum(both) for both in zip(workload.forward, workload.backward)]
        balanced = balance_layers(seconds, layers)
        bounds = f"cut its layers at {list(accumulate(balanced, initial=0))} (partition_method, docs/auto.md)"
        advice = f'to balance them: "stages": {balanced}' if given else f"to balance them, {bounds}"
        line += f"; {'no other cut is more even' if balanced == layers else advice}"
    return [*lines, line]


def reproducing(config: Config, chosen: dict[str, Any], step: int, connections: int) -> dict[str, Any]:
    """Return the block that trains the same without profiling: the user's, with what was chosen for recipe,
    depth and `connections`."""
    block = config.written
    if not block.get("warmup_epochs"):
        block["warmup_steps"] = max(step, block.get("warmup_steps", 0))
    block.get("link", {}).pop("memory_gb", None)  # it limits depth "auto" alone
    link = {"depth": chosen["depth"]}
    if config.block.link.connections == "auto":
        link["connections"] = connections
    return with_changes(block, {**chosen["block"], "link": link})
