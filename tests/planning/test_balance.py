"""Which layers stages should get, by the times that they took."""

import itertools

import pytest

from ds_compress.planning.balance import UNEVEN, balance_layers, is_uneven


@pytest.mark.parametrize(
    "seconds, layers, expected",
    [
        ((5.0, 5.0, 5.0, 5.0), (5, 5, 5, 5), [5, 5, 5, 5]),
        ((10.0, 5.0), (10, 10), [7, 13]),  # one device half as fast
        ((1.0, 2.0, 4.0), (4, 4, 4), [8, 3, 1]),
        ((100.0, 1.0), (2, 2), [1, 3]),  # a stage keeps one layer
        ((6.0, 4.0), (1, 1), [1, 1]),
        ((7.0,), (3,), [3]),
    ],
)
def test_layers_that_make_the_slowest_stage_the_fastest(seconds, layers, expected):
    found = balance_layers(seconds, layers)
    assert found == expected and sum(found) == sum(layers)

    def slowest(counts):
        return max(count * s / n for count, s, n in zip(counts, seconds, layers))

    every = itertools.product(range(1, sum(layers) + 1), repeat=len(layers))
    assert slowest(found) == min(slowest(counts) for counts in every if sum(counts) == sum(layers))


def test_a_head_that_stays_moves_no_more_layers_than_it_should():
    """A stage with a head as long as two of its four layers: 3 layers, then again 3; 2 would be too few."""
    layers = [4, 4]
    for _ in range(2):
        layers = balance_layers([layers[0] * 1.0, layers[1] * 1.0 + 2], layers)
        assert layers == [5, 3]


def test_stages_are_uneven_beyond_a_share():
    assert is_uneven((1.0, 1.01 + UNEVEN)) and not is_uneven((1.0, 0.99 + UNEVEN, 1.1))
