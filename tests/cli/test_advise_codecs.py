"""What `ds-compress advise` takes codecs to cost where it cannot measure them."""

import pytest
import torch

from ds_compress.cli.advise import from_args
from ds_compress.codec import TensorSpec, build


@pytest.mark.parametrize(
    "choice",
    [
        {"name": "entropy", "rotate": "learned"},
        {"name": "entropy", "rotate": "learned", "refresh_steps": 16},
    ],
    ids=str,
)
def test_rows_too_wide_to_be_fitted_cost_what_their_width_does(choice, monkeypatch):
    """A product with a basis of 4096 rows is four times one of 1024 for each value, the rest the same.

    Bases that need no warm-up, those of the classes of quality, were fitted whole: 5 s each.
    """
    asked = []

    def measured(codec, spec, device):
        asked.append(spec.shape)
        return 0.5 + spec.shape[-1] / 1024, 0.25

    monkeypatch.setattr(from_args, "_measure", measured)
    monkeypatch.setattr(from_args, "_speeds", {})
    spec = TensorSpec((2, 8, 4096), torch.bfloat16)
    assert from_args.codec_seconds(build(choice), spec, "cpu") == (4.5, 0.25)
    assert asked == [(64, 1024), (128, 512)]
    assert from_args.codec_seconds(build("entropy"), spec, "cpu") == (4.5, 0.25)
    assert asked[2:] == [(2, 8, 4096)]
