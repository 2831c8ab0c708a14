"""`"recipe": "auto"` on all kinds of pipeline: one choice on all ranks, or the reason for none."""

import contextlib
import io
import math

import pytest

import ds_compress  # noqa: F401  (hooks the engine)
from ds_compress.engine.session import Session
from ds_compress.runtime import stage_profile
from ds_compress.transport.probe import LinkMeasurement
from tests.support.pipeline_kinds import KINDS, train
from tests.support.ranks import run_ranks

FAR = LinkMeasurement(incoming=1e5, latency=0.01)
FAST = ("positions", "mask", "dynamic", "bf16", "own-map")
MARKS = pytest.mark.slow, pytest.mark.extended


def trained(kind):
    """Stock, then with each quality; what was adopted, and what was printed."""
    stage_profile.probe = lambda sender, receiver, first: FAR
    adopted, printed, adopt = [], io.StringIO(), Session.reconfigure
    Session.reconfigure = lambda self, own: (adopted.append(own), adopt(self, own))[1]
    with contextlib.redirect_stdout(printed):
        found = {"stock": train(kind, None)} if kind.stock else {}
        for quality in ("lossless", "aggressive"):
            found[quality] = train(kind, {"recipe": "auto", "quality": quality})
    return found, adopted, printed.getvalue()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "dynamic" else MARKS[name in FAST]) for name in KINDS],
)
def test_kinds(name):
    kind = KINDS[name]
    if not kind.possible():
        pytest.skip("not in this release of DeepSpeed")
    (found, adopted, printed), *others = run_ranks(kind.world_size, trained, kind)
    assert all(other[1] == adopted for other in others)
    assert all(math.isfinite(loss) for run in found.values() for loss in run["losses"] + run["evaluated"])
    if "stock" in found:
        assert found["lossless"]["losses"] == found["stock"]["losses"]
        assert found["lossless"]["evaluated"] == found["stock"]["evaluated"]
    if name == "dualpipev":
        assert not adopted and "messages stay uncompressed" in printed
        return
    lossless, aggressive = adopted
    codecs = [own[direction]["codec"] for own in lossless.values() for direction in own if own[direction]]
    assert set(codecs) <= {"none", "lossless"}
    assert any(own["forward"]["codec"] not in codecs for own in aggressive.values())
    if kind.simulated is not None and not kind.module.get("dynamic_shape"):
        assert found["aggressive"]["wire"] < found["lossless"]["wire"]
