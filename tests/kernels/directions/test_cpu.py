"""Products with directions in C++ beside those of PyTorch: equal up to the rounding of sums."""

import itertools

import pytest
import torch

from ds_compress.kernels.backends import cpu, reference
from ds_compress.kernels.directions.factors import from_int8

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def message(rows, width, rank, dtype):
    """Rows of any length up to a sink's, their dual and basis."""
    generator = torch.Generator().manual_seed(rows * width + rank)
    basis = torch.randn(rank, width, generator=generator) / width**0.5
    m = torch.randn(rows, width, generator=generator) + 3 * torch.randn(rows, 1, generator=generator)
    m[rows // 2] *= 200
    return m.to(dtype), basis / basis.square().sum(1, keepdim=True), basis


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 3, 4, 8, 13, 64])
def test_both_subtract_and_add_the_same(rank, dtype):
    for rows, width in itertools.product((1, 2, 5, 131), (7, 64, 100, 257)):
        m, *directions = message(rows, width, rank, dtype)
        (rest, codes, exponents), (expected, theirs, units) = (
            backend.subtract_product(m, *directions) for backend in (cpu, reference)
        )
        assert torch.equal(exponents, units)
        assert (codes.int() - theirs.int()).abs().max() <= 1  # sums that lie between two codes
        assert rest.dtype == expected.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        taken = from_int8(codes, exponents) @ directions[1]
        largest = torch.cat([m.float(), taken], 1).abs().amax(1, keepdim=True)
        tolerance = largest * (2**-7 if dtype == torch.bfloat16 else 1e-5)
        assert ((rest.float() - (m.float() - taken)).abs() <= tolerance).all()
        back = cpu.add_product(rest.clone(), codes, exponents, directions[1])
        assert ((back.float() - m.float()).abs() <= 2 * tolerance).all()
        again = reference.add_product(rest.clone(), codes, exponents, directions[1])
        assert ((again.float() - back.float()).abs() <= tolerance).all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3e38])
def test_a_row_beyond_the_range_of_products_is_left_as_it_is(value):
    m, *directions = message(6, 100, 8, torch.float32)
    m[3, 70] = value
    rest, codes, exponents = cpu.subtract_product(m, *directions)
    assert not codes[3].any() and torch.equal(exponents, reference.subtract_product(m, *directions)[2])
    assert torch.equal(rest[3].nan_to_num(), m[3].nan_to_num())


def test_rows_of_zeros_have_none():
    m, *directions = message(5, 64, 8, torch.bfloat16)
    m[1:3] = 0
    rest, codes, _ = cpu.subtract_product(m, *directions)
    assert not rest[1:3].any() and not codes[1:3].any() and codes[3:].any()


def test_any_bytes_can_be_added():
    """A damaged packet: C++ takes each exponent, and no memory but its own."""
    exponents = torch.arange(-128, 128).to(torch.int8)
    codes = torch.full((256, 3), -128, dtype=torch.int8)
    for backend in (cpu, reference):
        added = backend.add_product(torch.zeros(256, 40), codes, exponents, torch.ones(3, 40))
        assert torch.equal(added[128], torch.full((40,), -384.0)) and added[255].isinf().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_project_rows_alike(dtype):
    """Onto rows of any length, whose squares leave the range of fp32, too."""
    for rows, width in itertools.product((1, 2, 5, 131), (7, 64, 100, 257)):
        generator = torch.Generator().manual_seed(rows * width)
        m, onto = torch.randn(2, rows, width, generator=generator)
        powers = torch.randint(-10, 10, (rows, 1), generator=generator)
        onto *= 2.0 ** (powers if dtype == torch.float16 else 12 * powers)
        m, onto = m.to(dtype), onto.to(dtype)
        lengths = cpu.project(m, onto)
        units = torch.nn.functional.normalize(onto.double(), eps=0)
        assert (lengths - (m.double() * units).sum(1)).abs().max() < 1e-4
        assert (lengths - reference.project(m, onto)).abs().max() < 1e-4
        wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        wanted = torch.randn(rows, generator=generator)
        found = [backend.set_projection(m.to(wide), onto, wanted) for backend in (cpu, reference)]
        tolerance = 2**-6 if dtype == torch.bfloat16 else 1e-5
        for changed in found:
            assert changed.dtype == wide
            assert (reference.project(changed, onto) - wanted).abs().max() < 8 * tolerance
            across = changed.double() - m.double()
            across -= (across * units).sum(1, keepdim=True) * units
            assert across.abs().max() < tolerance, "only the part along the row changes"
        assert (found[0].float() - found[1].float()).abs().max() < tolerance


def test_onto_what_has_no_direction_nothing_is_projected():
    """Rows of zeros, and those that are not finite: the part along them is 0, and stays as it is."""
    m, onto = torch.randn(5, 100), torch.randn(5, 100)
    onto[1], onto[2, 70], onto[3, 3] = 0, torch.inf, torch.nan
    for backend in (cpu, reference):
        lengths = backend.project(m, onto)
        assert torch.equal(lengths == 0, torch.tensor([False, True, True, True, False]))
        changed = backend.set_projection(m.clone(), onto, lengths)
        assert torch.equal(changed[1:4], m[1:4])
        bad = m.index_fill(0, torch.tensor([1]), torch.nan)
        assert backend.project(bad, onto)[1].isnan()


def test_a_length_that_is_not_finite_changes_nothing():
    m, onto = torch.randn(2, 4, 100)
    lengths = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    for backend in (cpu, reference):
        changed = backend.set_projection(m.clone(), onto, lengths)
        assert torch.equal(changed[:3], m[:3]) and not torch.equal(changed[3], m[3])
