"""Sample ids: the same sample has the same id wherever it stands, others have others."""

import pytest
import torch

from ds_compress.codec import TensorSpec
from ds_compress.errors import CompressionError
from ds_compress.feedback.aqsgd.sample_ids import SampleIds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_hashes_follow_the_sample(dtype):
    samples = (
        torch.arange(64).view(16, 4).to(dtype) if dtype != torch.bool else torch.eye(16, dtype=torch.bool)
    )
    whole = SampleIds().of((samples, None))
    assert whole.dtype == torch.int64 and len(set(whole.tolist())) == 16
    order = torch.randperm(16)
    assert torch.equal(SampleIds().of((samples[order], None)), whole[order])
    assert torch.equal(torch.cat([SampleIds().of((part, None)) for part in samples.split(5)]), whole)


def test_hashes_see_every_input():
    tokens, positions, shared = torch.ones(3, 4, dtype=torch.int64), torch.zeros(3, 4), torch.zeros(1, 4)
    before = SampleIds().of(((tokens, positions, shared), None))
    positions[1, 2] = 1
    after = SampleIds().of(((tokens, positions, shared), None))
    assert (before == after).tolist() == [True, False, True]


def test_columns_and_batches():
    batch = (torch.zeros(3, 2), torch.zeros(3), torch.tensor([8, 9, 2], dtype=torch.int32))
    assert SampleIds(column=2).of(batch).tolist() == [8, 9, 2]
    together = SampleIds(column=2, per_batch=True)
    assert together.of(batch).shape == (1,)
    assert together.of(batch) != together.of((*batch[:2], batch[2].flip(0)))
    for bad in (0, 1, 3):
        with pytest.raises(CompressionError, match=f"aqsgd.ids.column: {bad} of the data"):
            SampleIds(column=bad).of(batch)


def test_counts():
    specs = [TensorSpec((7,), torch.int64), TensorSpec((5, 3, 2), torch.float32)]
    assert SampleIds().count(specs) == 5 and SampleIds(dim=1).count(specs) == 3
    assert SampleIds(per_batch=True).count(specs) == 1
    with pytest.raises(CompressionError, match="has no dimension 3"):
        SampleIds(dim=3).count(specs)
