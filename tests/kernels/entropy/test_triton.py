"""The Triton kernels of entropy coding against the reference; see quantize/test_triton.py."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_compress.kernels.backends import reference
from ds_compress.kernels.entropy.format import CodeLayout, frame_of
from tests.support.codecs import assert_same_bits
from tests.support.triton import EXAMPLES, SPECIAL, fused, launched, need_device

need_device()


@given(
    n=st.integers(1, 600),
    bits=st.floats(0.1, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spread=st.integers(0, 6),
    seed=st.integers(0, 99),
    special=st.sampled_from((None, None, *SPECIAL)),
    dither=st.none() | st.integers(0, 2**64 - 1),
)
@settings(max_examples=EXAMPLES // 2, deadline=None)
@patch("ds_compress.kernels.entropy.format._TABLE", 24)
@patch("ds_compress.kernels.entropy.format.SAMPLED_NUMEL", 300)
def test_equals_the_reference(n, bits, dtype, spread, seed, special, dither):
    generator = torch.Generator().manual_seed(seed)
    x, power = (torch.randn(n, generator=generator) for _ in range(2))
    x = (x * torch.exp2(spread * power)).to(dtype)
    if special is not None:
        x[seed % n] = special
    frame = CodeLayout(n, frame_of(n, bits).words, dither is not None)
    code, _ = reference.encode_entropy(x, frame, dither)
    assert torch.equal(launched(fused.encode_entropy, x, frame, dither)[0], code)
    for words in (code, code ^ (torch.arange(frame.words) == seed % frame.words).short()):
        ours = launched(fused.decode_entropy, words, frame, torch.float32, dither)
        assert_same_bits(ours, reference.decode_entropy(words, frame, torch.float32, dither))


@pytest.mark.parametrize("n, bits", [(3000, 6), (8200, 6)])
def test_several_lanes_and_blocks(n, bits):
    """The second has blocks of its own where a block is made smaller."""
    with pytest.MonkeyPatch.context() as smaller:
        smaller.setattr("ds_compress.kernels.entropy.format._BLOCK", 1000)
        smaller.setattr("ds_compress.kernels.entropy.format._SHARE", 32)
        frame_of.cache_clear()
        x = torch.randn(n, generator=torch.Generator().manual_seed(n))
        frame = frame_of(n, bits)
        assert frame.lanes == 32 and frame.blocks == frame.words // 1000
        code, _ = reference.encode_entropy(x, frame)
        assert torch.equal(launched(fused.encode_entropy, x, frame)[0], code)
        ours = launched(fused.decode_entropy, code, frame, torch.bfloat16)
        assert ours[1].item() and ours[0].isfinite().all()
        assert torch.equal(ours[0].float(), reference.decode_entropy(code, frame, torch.bfloat16)[0].float())
    frame_of.cache_clear()
