"""Codec topk with a fitted threshold: about the largest entries, exactly as many as the packet holds."""

import pytest
import torch

from ds_compress.codec import TensorSpec, build
from ds_compress.codecs.sidco import above_threshold, least_share, thresholds

LENGTH = 100_000
SAMPLES = {
    "laplace": torch.distributions.Laplace(0.0, 1.0),
    "normal": torch.distributions.Normal(0.0, 1.0),
    "student-t": torch.distributions.StudentT(3.0),
}


def drawn(name):
    torch.manual_seed(0)
    return SAMPLES[name].sample((2, LENGTH))


@pytest.mark.parametrize("density", [0.1, 0.01])
@pytest.mark.parametrize("name, share", [("laplace", 0.99), ("normal", 0.95), ("student-t", 0.88)])
def test_most_of_the_energy_is_kept(name, share, density):
    x, k = drawn(name), round(density * LENGTH)
    selection = above_threshold(x, k)
    kept = x.flatten()[selection.indices].view(2, k)
    assert (kept.norm(dim=1) >= share * x.abs().topk(k).values.norm(dim=1)).all()
    assert (selection.indices.diff() > 0).all(), "coders need ascending entries"
    assert ((selection.indices.view(2, k) // LENGTH) == torch.tensor([[0], [1]])).all(), "k of each row"


@pytest.mark.parametrize("density", [0.3, 0.1, 0.01])
def test_the_fit_finds_the_share_of_its_own_distribution(density):
    x = drawn("laplace").abs()
    found = (x > thresholds(x, density)).float().mean(1)
    assert found == pytest.approx([density] * 2, rel=0.05)


@pytest.mark.parametrize("x", [torch.zeros(1, 50), torch.ones(3, 7), torch.full((1, 9), 1e-45)], ids=str)
def test_rows_without_a_tail_fill_the_packet(x):
    for k in (1, x.shape[1] - 1, x.shape[1]):
        assert len(above_threshold(x, k).indices.unique()) == len(x) * k


def made_for_the_fit(name, k, d):
    """Rows whose large entries a threshold may miss: equal ones behind zeros, and one giant behind many."""
    x = torch.ones(1, d)
    if name == "zeros first":
        x[0, :k] = 0
    if name == "giant last":
        x[0, -1] = d / 4
    if name == "two levels":
        x[0, d // 2 :] = 40
    return x


@pytest.mark.parametrize("d", [40, 1000])
@pytest.mark.parametrize("density", [0.5, 0.25, 0.1, 0.01])
@pytest.mark.parametrize("name", ["zeros first", "giant last", "two levels"])
def test_a_selection_is_never_without_energy(name, density, d):
    """Where all entries but zeros were equal, none was above the threshold, and the zeros were sent. Error
    feedback then never sent the others, though the codec was called a contraction."""
    k = max(1, round(density * d))
    x = made_for_the_fit(name, k, d)
    kept = x.flatten()[above_threshold(x, k).indices]
    assert kept.square().sum() >= least_share(k, d) * x.square().sum() > 0


def test_its_packets_are_as_large_as_exact_ones_and_its_contraction_is_weaker():
    spec = TensorSpec((4, 4096), torch.float32)
    exact, fitted = (build({"name": "topk", "select": select}) for select in ("exact", "sidco"))
    assert exact.layout(spec) == fitted.layout(spec)
    assert exact.stability(spec).constant < fitted.stability(spec).constant <= 1
    assert fitted.stability(spec).kind == "contraction"
