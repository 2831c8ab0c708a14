"""One test for each kind of pipeline: `none` equals stock, lossy codecs train, `simulate` gives the same."""

import pytest

from tests.support.pipeline_kinds import KINDS, problems


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.extended(keep=1)
def test_kind(name):
    if not KINDS[name].possible():
        pytest.skip("DeepSpeed itself cannot do this here")
    found, _ = problems(KINDS[name])
    assert not found
