"""Test the eight orderings of arXiv 2401.07788 (abstracts and journal version) on the rows.

What a setting costs is its distance from the mean of the uncompressed runs: points of accuracy, or percent of
perplexity. Two costs differ when they are further apart than the uncompressed runs are among each other; a
cost is serious beyond `SERIOUS`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from launch.reproduce.tables import LARGEST, METRICS, Setting

SERIOUS = 2.0  # points of accuracy, or percent of perplexity
Settings = dict[tuple[str, str], Setting]


class Verdict(NamedTuple):
    """Whether a claim held for a task; `held` is None if rows are missing."""

    number: int
    claim: str
    task: str
    held: bool | None
    numbers: str

    @property
    def word(self) -> str:
        return {True: "held", False: "not held", None: "no rows yet"}[self.held]


class Costs:
    """The loss that each setting of one task costs."""

    def __init__(self, settings: Settings, task: str):
        self._settings, self._task = settings, task
        none = settings[task, "none"]
        self.baseline = none.metric("on").mean
        values = [row[f"{METRICS[task]}_on"] for row in none.rows]
        width = max(values) - min(values)
        self.spread = width if METRICS[task] == "accuracy" else 100 * width / self.baseline

    def of(self, name: str, evaluated: str) -> float:
        """Return the cost of a setting, mean over seeds; infinite if a run diverged.

        Raises:
            KeyError: it has no rows.
        """
        measured = self._settings[self._task, name].metric(evaluated)
        if measured.failed:
            return math.inf
        if METRICS[self._task] == "accuracy":
            return self.baseline - measured.mean
        return 100 * (measured.mean / self.baseline - 1)

    def text(self, name: str) -> str:
        on, off = (self.of(name, way) for way in ("on", "off"))
        return f"`{name}` {_limited(on)} on, {_limited(off)} off"

    def texts(self, *names: str) -> str:
        return "; ".join(map(self.text, names))


Judgement = tuple[bool, str]


def gradients_tolerate_less(costs: Costs) -> Judgement:
    pairs = (("minmax8/4", "minmax4/8"), ("minmax8/2", "minmax2/8"))
    held = all(costs.of(few_back, "on") > costs.of(few_on, "on") for few_back, few_on in pairs)
    return held, costs.texts(*(name for pair in pairs for name in pair))


def off_can_be_worse_than_on(costs: Costs) -> Judgement:
    names = ("minmax4/8", "minmax2/8", "minmax4/4")
    held = any(costs.of(name, "off") > costs.of(name, "on") + costs.spread for name in names)
    return held, costs.texts(*names)


def ten_percent_is_the_strongest(costs: Costs) -> Judgement:
    held = costs.of("topk10", "on") <= SERIOUS < costs.of("topk5", "on")
    return held, costs.texts("topk20", "topk10", "topk5")


def topk_has_to_stay_on(costs: Costs) -> Judgement:
    names = ("topk10", "topk10-reuse")
    held = all(costs.of(name, "off") > costs.of(name, "on") + max(SERIOUS, costs.spread) for name in names)
    return held, costs.texts(*names)


FEEDBACKS = ("topk10-ef", "topk10-ef21", "topk10-efmixed")


def feedback_does_not_help(costs: Costs) -> Judgement:
    plain = min(costs.of("topk10", evaluated) for evaluated in ("on", "off"))
    best = (min(costs.of(name, evaluated) for evaluated in ("on", "off")) for name in FEEDBACKS)
    return all(cost >= plain - costs.spread for cost in best), costs.texts("topk10", *FEEDBACKS)


def feedback_closes_the_gap(costs: Costs) -> Judgement:
    def gap(name: str) -> float:
        on, off = costs.of(name, "on"), costs.of(name, "off")
        return math.inf if math.isinf(on) or math.isinf(off) else abs(on - off)

    held = all(gap(name) < gap("topk10") / 2 for name in FEEDBACKS[:2])
    return held, costs.texts("topk10", *FEEDBACKS)


def aqsgd_needs_thirty_percent(costs: Costs) -> Judgement:
    names = ("topk30-aqsgd", "topk20-aqsgd", "topk10-aqsgd")
    best = [min(costs.of(name, "on"), costs.of(name, "off")) for name in names]
    return best[0] <= SERIOUS < min(best[1:]), costs.texts(*names)


def reuse_is_needed_and_twenty_percent_costs(costs: Costs) -> Judgement:
    reuse, alone = costs.of("topk20-reuse", "on"), costs.of("topk20", "on")
    rises = costs.of("topk50-reuse", "on") < reuse and reuse > costs.spread
    return rises and alone > reuse + SERIOUS, costs.texts(
        "topk50-reuse", "topk30-reuse", "topk20-reuse", "topk20"
    )


CLAIMS: list[tuple[str, Callable[[Costs], Judgement], tuple[str, ...]]] = [
    ("Gradients tolerate less compression than activations", gradients_tolerate_less, ("vision", "language")),
    (
        "Quantized in training, a model can be worse with compression off",
        off_can_be_worse_than_on,
        ("vision", "language"),
    ),
    ("TopK 10 % is the strongest that does not hurt seriously", ten_percent_is_the_strongest, ("vision",)),
    ("Trained with TopK, a model works only with TopK on", topk_has_to_stay_on, ("vision", "language")),
    (
        "Error feedback does not improve on plain compression",
        feedback_does_not_help,
        ("vision", "language"),
    ),
    (
        "With error feedback, on and off come out alike",
        feedback_closes_the_gap,
        ("vision", "language"),
    ),
    ("AQ-SGD with less than TopK 30 % costs seriously", aqsgd_needs_thirty_percent, ("vision", "language")),
    (
        "On a GPT-2 the loss rises from TopK 20 %, and independent indices are far worse than reused ones",
        reuse_is_needed_and_twenty_percent_costs,
        ("language",),
    ),
]


def check_claims(settings: Settings) -> list[Verdict]:
    """Test every claim for each of its tasks."""
    verdicts = []
    for number, (claim, judge, tasks) in enumerate(CLAIMS, 1):
        for task in tasks:
            try:
                held, numbers = judge(Costs(settings, task))
            except KeyError as absent:
                held, numbers = None, f"no rows of {absent.args[0]}"
            verdicts.append(Verdict(number, claim, task, held, numbers))
    return verdicts


def _limited(cost: float) -> str:
    return f"> {LARGEST}" if LARGEST < cost < math.inf else f"{cost:.2f}"
