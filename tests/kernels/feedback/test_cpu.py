"""Passes of feedbacks, and messages that follow a state, in C++ on every processor: the bits of torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.kernels.backends import cpu, reference
from ds_compress.kernels.feedback.reference import GROUP
from ds_compress.kernels.numerics import LARGEST_STATE
from ds_compress.kernels.quantize.grid import Grid
from tests.support.codecs import any_grid, assert_same_bits
from tests.support.kernels import EACH_TARGET, GROUPS, alike, compiled_for, flat, passes, stored
from tests.support.messages import values


@EACH_TARGET
@settings(max_examples=200, deadline=None, database=None)
@given(
    **GROUPS,
    size=st.sampled_from([8, 24, 32, 64, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    n=st.integers(1, 60),
    scale=st.sampled_from([1.0, 3.0, 1024.0, 2.0**-126]),
    shares=st.sampled_from([(0.0, 1.0), (0.0, 0.7), (0.8, 0.2)]),
    store=st.sampled_from(["fp32", "bf16", "int8"]),
)
def test_equal_to_torch(target, bits, size, dtype, hadamard, n, special, scale, shares, store, seed):
    """Sums beyond the range included, and the largest states."""
    grid = any_grid(bits, hadamard, size, seed)
    x = values(n, size, dtype, seed, special)
    state = values(n, size, torch.float32, seed + 1).clamp(-LARGEST_STATE, LARGEST_STATE)
    state[0, 0], x[0, 0] = LARGEST_STATE, torch.finfo(dtype).max

    def kept():
        return stored(state, store)

    with compiled_for(target):
        _, new = alike(lambda backend: backend.quantize_with_residual(x, kept(), scale, *shares, grid, size))
        assert_kept(kept(), new, x)
        if store != "int8":
            parts, new = alike(lambda backend: backend.quantize_change(x, *kept(), scale, grid, size))
            assert_kept(kept(), (new,), x)
            _, again = alike(lambda backend: backend.dequantize_change(parts, *kept(), scale, grid, dtype))
            assert_same_bits([again], [new])


def assert_kept(old, new, x):
    """A next state is finite; groups of `x` that are not finite have that of before."""
    assert all(entry.isfinite().all() for entry in new)
    spoilt = ~x.isfinite().all(1)
    assert torch.equal(new[0][spoilt], old[0][spoilt])
    if len(new) == 2:
        its_codes = spoilt[:, None].expand(x.shape).flatten().nonzero().flatten() // GROUP
        assert torch.equal(new[1][its_codes], old[1][its_codes])


@pytest.mark.parametrize(
    "size, store", [(24, "fp32"), (128, "fp32"), (32, "int8"), (128, "int8"), (256, "int8")]
)
def test_groups_that_are_finite_do_not_notice_another(size, store):
    """A message in which one group had overflowed was once sent without any residual."""
    grid, n = Grid(4), 40
    together = max(size, GROUP) if store == "int8" else size  # values with one scale
    x, state = (torch.randn(n, size, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    spoilt = x.clone()
    spoilt[13, 5], spoilt[39, 7] = torch.inf, torch.nan
    others = spoilt.isfinite().view(-1, together).all(1).repeat_interleave(together)

    def sent(message):
        parts = flat(cpu.quantize_with_residual(message, stored(state, store), 2.0, 0.5, 0.5, grid, size))
        return [part.flatten()[others[:: x.numel() // part.numel()]] for part in parts]

    assert_same_bits(sent(spoilt), sent(x))


@pytest.mark.parametrize("step", [-3e38, 3e38, torch.inf, torch.nan])
def test_a_damaged_step_leaves_the_state_alone(step):
    """A negative one once made a state infinite for good."""
    grid, state = Grid(4), torch.ones(8, 128)
    parts = [part.clone() for part in reference.quantize(torch.randn(8, 128), grid)]
    parts[1][3] = step
    _, new = alike(lambda backend: backend.dequantize_change(parts, state.clone(), 0.5, grid, torch.float32))
    assert torch.equal(new[3], state[3]) and new.isfinite().all()


@EACH_TARGET
@settings(max_examples=150, deadline=None, database=None)
@given(
    n=st.integers(1, 700),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    factor=st.sampled_from([1.0, 3.0, 65536.0]),
    share=st.sampled_from([0.0, 0.3, 0.8]),
    special=GROUPS["special"],
    seed=GROUPS["seed"],
)
def test_passes_equal_torch(target, n, dtype, factor, share, special, seed):
    x = values(17, n, dtype, seed, special)
    state = values(17, n, torch.float32, seed + 1).clamp(-1e30, 1e30)
    state[0, 0], x[0, 0] = torch.finfo(torch.float32).max / 2, -torch.finfo(dtype).max  # beyond the range
    with compiled_for(target):
        for name, arguments in passes(x, state, factor, share).items():
            alike(lambda backend: getattr(backend, name)(*arguments))
