"""What recipes cost: rows of `make reproduce PRESET=cpu` (docs/evidence-tables.md), means over seeds."""

from typing import NamedTuple


class Evidence(NamedTuple):
    """Of a small ResNet (CIFAR-10, accuracy in %) and of a small GPT that is fine-tuned (WikiText-2,
    perplexity), each evaluated with compression and without."""

    row: str  # its name in docs/evidence-tables.md
    seeds: int  # the fewer of the two tasks
    accuracy: tuple[float, float]
    perplexity: tuple[float, float]

    def __str__(self) -> str:
        on, off = self.accuracy
        with_it, without = self.perplexity
        return f"ResNet {on:.1f} / {off:.1f} %, GPT {with_it:.3f} / {without:.3f} ({self.seeds} seeds)"


EVIDENCE = {
    "none": Evidence("none", 5, (53.7, 53.7), (5.445, 5.445)),
    **dict.fromkeys(("safe", "quant4"), Evidence("group4/4-hadamard", 3, (53.2, 53.2), (5.496, 5.432))),
    **dict.fromkeys(("balanced", "quant3"), Evidence("group3/3-hadamard", 3, (52.8, 53.0), (5.661, 5.451))),
    "aggressive": Evidence("entropy2.5/2.5", 3, (53.3, 53.4), (5.956, 5.605)),
}
"""By name of a recipe; those with rows of three seeds and more."""
