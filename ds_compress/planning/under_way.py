"""How many micro-batches a schedule of some depth has under way; needs nothing of DeepSpeed's."""


def under_way(depth: int, micro_batches: int, stages: int, stage: int) -> int:
    """Micro-batches that a stage holds the activations of, at most."""
    return min(depth * (stages - 1 - stage) + 1, micro_batches)
