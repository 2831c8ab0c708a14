"""python -m tests.support.kinds        prints the table of docs/pipelines.md"""

from tests.support.kinds.catalogue import KINDS
from tests.support.kinds.checks import LOSSY, problems
from tests.support.kinds.kind import Kind


def row(kind: Kind) -> list[str]:
    """The cells of a kind in the table."""
    found, runs = problems(kind)
    if found:
        return [kind.title, str(kind.world_size), "; ".join(found), "", "", ""]
    results = []
    for name in LOSSY:
        run = runs[name]
        before, *_, after = run["evaluated"]
        results.append(f"{before:.3f} -> {after:.3f}, {run['raw'] / run['wire']:.1f}x")
    stock = "bit-equal" if kind.stock else "stock is wrong"
    simulated = "-" if kind.simulated is None else f"to {kind.simulated:g}" if kind.simulated else "bit-equal"
    return [kind.title, str(kind.world_size), stock, *results, simulated]


def main() -> None:
    """Print one row for each kind."""
    print(
        "| pipeline | ranks | `none` = stock | TopK 20 %, indices reused | quantize, 4 bits | = `simulate` |"
    )
    print("|---|---|---|---|---|---|")
    for kind in KINDS.values():
        print(f"| {' | '.join(row(kind))} |", flush=True)


if __name__ == "__main__":
    main()
