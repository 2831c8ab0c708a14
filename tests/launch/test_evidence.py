"""The page of evidence from given rows: what is judged, what carries a claim, what is drawn."""

import itertools
import json

import pytest

from ds_compress.config import DIRECTIONS, KEY, Config, recipes
from ds_compress.config.recipes import EVIDENCE
from launch.reproduce.command import ROOT, main
from launch.reproduce.grid import read_rows
from launch.reproduce.orderings import check_claims
from launch.reproduce.page import write_page
from launch.reproduce.run import Run
from launch.reproduce.tables import front, grouped

RAW = 32_000
PAPER = {
    # on, off, bits: as arXiv 2401.07788 says it is
    "none": (90.0, 90.0, 32),
    "minmax4/8": (89.8, 88.0, 6),
    "minmax8/4": (89.0, 89.0, 6),
    "minmax2/8": (88.0, 60.0, 5),
    "minmax8/2": (70.0, 70.0, 5),
    "minmax4/4": (88.9, 88.0, 4),
    "topk20": (89.7, 70.0, 8),
    "topk10": (88.5, 40.0, 5),
    "topk5": (84.0, 20.0, 3),
    "topk10-reuse": (88.4, 40.0, 4),
    "topk10-ef": (87.0, 86.5, 5),
    "topk10-ef21": (88.0, 87.5, 5),
    "topk10-efmixed": (87.5, 87.0, 5),
    "topk30-aqsgd": (60.0, 89.0, 12),
    "topk20-aqsgd": (60.0, 86.0, 9),
    "topk10-aqsgd": (50.0, 84.0, 6),
}


def rows(values, task="vision", seeds=(0, 1, 2)):
    """Rows of a quality each; seeds lie 0.2 apart."""
    metric = "accuracy" if task == "vision" else "perplexity"
    return [
        {
            **Run("smoke", task, name, seed).identity,
            "raw_bytes": RAW,
            "wire_bytes": RAW * bits // 32,
            "bits_forward": bits,
            "bits_backward": bits,
            f"{metric}_on": None if on is None else on + 0.2 * (seed - 1),
            f"{metric}_off": None if off is None else off + 0.2 * (seed - 1),
            "error_forward": 0.1,
            "error_backward": None,
            "processor": "abacus",
            "versions": {"torch": "9"},
        }
        for (name, (on, off, bits)), seed in itertools.product(values.items(), seeds)
    ]


def verdicts(values, task="vision"):
    settings = grouped(rows(values, task), "smoke")
    return {verdict.number: verdict for verdict in check_claims(settings) if verdict.task == task}


def test_the_papers_own_results_hold():
    found = verdicts(PAPER)
    assert {number: verdict.word for number, verdict in found.items()} == dict.fromkeys(range(1, 8), "held")
    assert "`minmax8/4` 1.00 on, 1.00 off" in found[1].numbers


@pytest.mark.parametrize(
    "number, changed",
    [
        (1, {"minmax8/2": (89.0, 89.0, 5)}),
        (2, {"minmax4/8": (89.8, 89.8, 6), "minmax2/8": (88.0, 88.0, 5), "minmax4/4": (88.9, 88.9, 4)}),
        (3, {"topk5": (88.5, 20.0, 3)}),
        (3, {"topk10": (87.7, 20.0, 5)}),
        (4, {"topk10-reuse": (88.4, 87.0, 4)}),
        (5, {"topk10-ef": (89.5, 89.0, 5)}),
        (6, {"topk10-ef21": (88.0, 50.0, 5)}),
        (7, {"topk10-aqsgd": (50.0, 90.0, 6)}),
    ],
    ids=str,
)
def test_each_ordering_can_fail(number, changed):
    found = verdicts(PAPER | changed)
    assert [n for n, verdict in found.items() if not verdict.held] == [number]


def test_orderings_of_the_language_task():
    values = {"none": (10.0, 10.0, 32), "topk50-reuse": (10.1, 10.1, 16), "topk30-reuse": (10.4, 10.4, 10)}
    values |= {"topk20-reuse": (11.0, 11.0, 8), "topk20": (None, None, 8)}
    assert verdicts(values, "language")[8].word == "held", "one that diverged costs more than any"
    assert verdicts(values | {"topk20": (11.0, 11.0, 8)}, "language")[8].word == "not held"
    missing = verdicts(values, "language")[1]
    assert missing.word == "no rows yet" and "no rows of ('language', 'minmax8/4')" in missing.numbers


def test_the_front_is_what_nothing_beats():
    settings = grouped(rows(PAPER), "smoke").values()
    names = [each.name for each in front(settings, lambda each: each.metric("on").mean)]
    assert names == ["topk5", "minmax4/4", "minmax4/8", "none"]


def test_page(tmp_path):
    made = rows(PAPER) + rows({"none": (10.0, 10.0, 32)}, "language", seeds=(0,))
    made += rows({"topk10": (None, None, 4)}, "language", seeds=(0,))
    made[-2] |= {"generated_perplexity_on": 3.0, "generated_perplexity_off": 4.0}
    (tmp_path / "smoke.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    page = tmp_path / "docs" / "evidence.md"
    main(["--results", str(tmp_path), "--only", "vision/none", "--preset", "smoke", "--page", str(page)])
    text = page.read_text()
    assert f"- {len(made)} rows on abacus; torch 9" in text
    assert "| `topk10-ef` | 3 | 5.00 | 5.00 | 6.4 | 87.00 ± 0.20 | 86.50 ± 0.20 | 0.100 |  |" in text
    assert "| `topk10` | 1 | 4.00 | 4.00 | 8.0 | diverged | diverged |" in text
    assert "| `none` | 1 | 32.00 | 32.00 | 1.0 | 9.80 | 9.80 | 0.100 |  | 3.00 | 4.00 |" in text
    assert "| `minmax4/8` | 5.3 | 0.20 | within the spread |" in text
    assert "| 4 forward |  | 88.90 ± 0.20 |  | 89.80 ± 0.20 |" in text
    for task in ("vision", "language"):
        assert (page.parent / "images" / f"evidence_smoke_{task}.png").stat().st_size > 10_000


def test_a_page_of_few_settings_has_no_list_of_orderings_without_rows(tmp_path):
    values = {"none": (10.0, 10.0, 32), "group4/4": (10.1, 10.1, 4)}
    (tmp_path / "smoke.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(values, "language")))
    write_page(tmp_path, tmp_path / "evidence.md")
    text = (tmp_path / "evidence.md").read_text()
    assert "| `group4/4` | 3 |" in text and "ordering" not in text


def test_no_rows_no_page(tmp_path):
    with pytest.raises(SystemExit, match=r"no rows in .*; run a grid first"):
        write_page(tmp_path, tmp_path / "evidence.md")


def test_what_recipes_cost_is_what_the_rows_say():
    """`ds-compress list --recipes` and the README repeat them."""
    rows = read_rows(ROOT / "results" / "cpu.jsonl")
    readme = (ROOT / "README.md").read_text()
    for name, evidence in EVIDENCE.items():
        both = [
            [row for row in rows if (row["task"], row["setting"]) == (task, evidence.row)]
            for task in ("vision", "language")
        ]
        assert min(map(len, both)) == evidence.seeds >= 3
        for own, metric, message, digits in zip(both, ("accuracy", "perplexity"), evidence[2:], (1, 3)):
            means = [sum(row[f"{metric}_{way}"] for row in own) / len(own) for way in ("on", "off")]
            assert [round(mean, digits) for mean in means] == [*message], name
            text = " / ".join(f"{value:.{digits}f}" for value in message)
            assert f"| {text if name != 'none' else text.split(' / ')[0]} |" in readme
        ours, theirs = (
            Config(block).codecs(None) for block in (recipes.recipe(name, KEY), both[0][0]["block"])
        )
        for direction in DIRECTIONS:
            pairs = zip(
                getattr(ours, direction).settings.items(), getattr(theirs, direction).settings.items()
            )
            # an option that is not given is what follows from the others
            assert all(own == other for own, other in pairs if None not in (own[1], other[1])), name
