"""Fitting a basis: what it keeps of the rows, how it moves with the last bits of a moment, and its cost."""

import pytest
import torch

from ds_compress.codecs import eigenbasis
from ds_compress.codecs.eigenbasis import eigenvectors
from tests.support.messages import low_rank_matrix, with_spectrum

H = 48


def start(size):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, size, generator=generator, dtype=torch.float64)


def rows_of_kind(kind):
    generator = torch.Generator().manual_seed(0)
    return {
        "spread": with_spectrum(0.9, 500, H),
        "equal": torch.linalg.qr(torch.randn(500, H, generator=generator)).Q,
        "too few": low_rank_matrix(5, 500, H),
        "constant": torch.full((500, H), 0.3),
        "outliers": with_spectrum(0.9, 500, H) * torch.where(torch.arange(H) < 3, 1000.0, 1.0),
        "zeros": torch.zeros(500, H),
    }[kind].double()


def subspace_iteration(moment):
    """The definition: 16 steps, with the signs of Gram-Schmidt."""
    size = moment.diagonal().sum()
    moment = moment / size + 1e-10 * torch.eye(H) if size > 0 else torch.eye(H, dtype=torch.float64)
    basis = start(H)
    for _ in range(16):
        basis, r = torch.linalg.qr(moment @ basis)
        basis = basis * r.diagonal().sign()
    return basis


def use_blocks(monkeypatch, block):
    monkeypatch.setattr(eigenbasis, "EXACT", block)
    monkeypatch.setattr(eigenbasis, "BLOCK", block)


KINDS = ["spread", "equal", "too few", "constant", "outliers", "zeros"]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_subspace_iteration(kind):
    rows = rows_of_kind(kind)
    moment = rows.T @ rows
    basis = eigenvectors(moment, start)
    torch.testing.assert_close(basis, subspace_iteration(moment), rtol=0, atol=1e-4)


@pytest.mark.parametrize("block", [1024, 16, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_survives_another_order_of_summation(kind, block, monkeypatch):
    """Moments that differ in the last bits, as between processors, change the basis by rounding only."""
    use_blocks(monkeypatch, block)
    rows = rows_of_kind(kind)
    moment = rows.T @ rows
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(moment.shape, generator=generator, dtype=torch.float64) * moment.abs() * 1e-15
    basis = eigenvectors(moment, start)
    moved = eigenvectors(moment + noise + noise.T, start)
    torch.testing.assert_close(basis, moved, rtol=0, atol=1e-4)
    torch.testing.assert_close(basis.T @ basis, torch.eye(H, dtype=torch.float64))


def bits(moment, basis):
    """Bits per value for a message of normal values, at any fine step: up to a constant."""
    share = (basis * (moment @ basis)).sum(0) / moment.diagonal().sum()
    return share.clamp(min=1e-12).log2().mean().item() / 2


def test_two_rounds_of_blocks_save_most_of_what_the_eigenvectors_save(monkeypatch):
    """Of random eigenvectors, which no block of columns holds."""
    rows = with_spectrum(0.95, 1000, H).double()
    moment = rows.T @ rows
    none, exact = (bits(moment, basis) for basis in (torch.eye(H).double(), eigenvectors(moment, start)))
    saved = []
    for block in (24, 16, 12):
        use_blocks(monkeypatch, block)
        saved.append((none - bits(moment, eigenvectors(moment, start))) / (none - exact))
    assert saved == sorted(saved, reverse=True) and saved[0] > 0.7 and saved[-1] > 0.35


@pytest.mark.parametrize("block", [1024, 24])
def test_one_decomposition_of_each_kind(block, monkeypatch):
    """16 QR decompositions of all columns stalled the first compressed message: 19 s at 2,048 columns."""
    use_blocks(monkeypatch, block)
    rows, widths = rows_of_kind("spread"), {"qr": [], "eigh": []}

    def count(name):
        real = getattr(torch.linalg, name)

        def counted(matrix):
            widths[name].append(matrix.shape[1])
            return real(matrix)

        monkeypatch.setattr(torch.linalg, name, counted)

    count("qr")
    count("eigh")
    eigenvectors(rows.T @ rows, start)
    blocks = [H] if block >= H else [24, 24, 24, 24]
    assert widths == {"qr": blocks, "eigh": blocks}
