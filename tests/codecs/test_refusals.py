"""Options that a codec refuses: one line with their path, what came and what is allowed."""

import pytest

import ds_compress.codecs  # noqa: F401 - registers
from ds_compress.codec import build
from ds_compress.errors import CompressionError

SIZES = "allowed: 8, 16, ..., 1048576, 'tensor'"
POWER = "needs a group_size that is a power of two, not"
GAUSSIAN = {"grid": "gaussian"}
REFUSED = {
    "quantize": [
        ({"bits": 9}, "codec.bits: 9 is not allowed: should be less than or equal to 8"),
        ({"group_size": 12}, f"codec.group_size: 12 is not allowed; {SIZES}"),
        ({"group_size": "row"}, f"codec.group_size: 'row' is not allowed; {SIZES}"),
        ({"scheme": "max"}, "codec.scheme: 'max' is not allowed; allowed: 'asymmetric', 'symmetric'"),
        ({"hadamard": True, "group_size": 24}, f"codec.hadamard: True {POWER} 24"),
        ({"hadamard": True, "group_size": "tensor"}, f"codec.hadamard: True {POWER} 'tensor'"),
        ({"mixed": {}}, 'codec.mixed: unknown key (removed: 4 bits with "hadamard": true lose less in'),
        ({**GAUSSIAN, "bits": 5}, "codec.grid: 'gaussian' needs 1 to 4 bits, not 5"),
        ({**GAUSSIAN, "group_size": 24}, f"codec.grid: 'gaussian' {POWER} 24"),
        ({**GAUSSIAN, "group_size": "tensor"}, f"codec.grid: 'gaussian' {POWER}"),
        ({**GAUSSIAN, "scheme": "asymmetric"}, "codec.scheme: 'asymmetric' goes with grid 'uniform'"),
        ({**GAUSSIAN, "rounding": "stochastic"}, "codec.rounding: 'stochastic' goes with grid 'uniform'"),
        ({**GAUSSIAN, "rounding": "dither"}, "codec.rounding: 'dither' goes with grid 'uniform'"),
        ({"group_size": "channel"}, "codec.group_size: 'channel' was removed; allowed: 'tensor', a multiple"),
        ({"axis": 1}, "codec.axis: unknown key (removed: groups are runs of the values as they lie in"),
        ({"rotate": "learned"}, "codec.rotate: unknown key (removed: codec 'entropy' has it, and loses less"),
    ],
    "entropy": [
        ({"bits": 0.05}, "codec.bits: 0.05 is not allowed: should be greater than or equal to 0.1"),
        ({"bits": 6.5}, "codec.bits: 6.5 is not allowed: should be less than or equal to 6"),
        ({"bits": "2"}, "codec.bits: '2' is not allowed: should be a valid number"),
        ({"refresh_steps": 100}, "codec.refresh_steps: 100 is not allowed without a basis; allowed: 0, or"),
        ({"contexts": "rows", "rotate": "learned"}, "codec.contexts: 'rows' is not allowed where"),
    ],
    "topk": [
        ({"density": 0}, "codec.density: 0 is not allowed"),
        ({"density": 1.5}, "codec.density: 1.5 is not allowed"),
        ({"values": "bf61"}, "did you mean 'bf16'"),
        ({"values": "topk"}, "'topk' cannot carry the kept values"),
        ({"values": {"name": "entropy", "rotate": "learned"}}, "'entropy' cannot carry the kept values"),
        ({"indices": "int23"}, "did you mean 'int32'"),
        ({"select": "exact"}, "select: unknown key (removed: entries are always selected exactly; leave it"),
    ],
}


@pytest.mark.parametrize(
    "name, options, reason", [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_refusals(name, options, reason):
    with pytest.raises(CompressionError) as error:
        build({"name": name, **options})
    assert reason in str(error.value) and "\n" not in str(error.value)
