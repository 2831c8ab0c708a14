"""What parameters have touched is told from what follows from the data alone."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_compress.message.dependence import DependencyTracker
from ds_compress.simulate import simulate


def layer():
    module = nn.Linear(4, 4)
    return module, DependencyTracker(module), torch.ones(2, 4)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("reentrant", [True, False, None])
def test_in_any_mode(grad, frozen, reentrant):
    module, tracking, x = layer()
    module.requires_grad_(not frozen)

    def both(x, mask):
        return module(x), mask

    x.requires_grad_(grad)
    with torch.set_grad_enabled(grad), tracking:
        mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
        if reentrant is None:
            hidden, passed = both(x, mask)
        else:
            hidden, passed = checkpoint(both, x, mask, use_reentrant=reentrant)
    assert tracking.depends_on_parameters(hidden)
    assert not tracking.depends_on_parameters(mask) and not tracking.depends_on_parameters(passed)


CARRY = [
    ("a view", lambda y: y[0].view(2, 2)),
    ("detached", lambda y: y.detach()),
    ("half", lambda y: y.half()),
    ("with the data", lambda y: torch.ones(2, 4) + y),
    ("written to", lambda y: torch.zeros(2, 4).copy_(y)),
    ("like it, and written to", lambda y: torch.empty_like(y).copy_(y)),
]
CARRY_NOTHING = [
    ("of its size", lambda y: torch.zeros_like(y)),
    ("of its kind", lambda y: y.new_full((3,), 2.0)),
    ("a mask of it", lambda y: (y > 0).float()),
    ("places in it", lambda y: y.argmax(1)),
    ("the data", lambda y: torch.arange(4.0) * 2),
]


@pytest.mark.parametrize("name, made_of", CARRY + CARRY_NOTHING)
def test_what_carries(name, made_of):
    module, tracking, x = layer()
    with tracking:
        made = made_of(module(x))
    assert tracking.depends_on_parameters(made) == ((name, made_of) in CARRY), name


def test_a_tensor_that_is_written_to_through_a_view():
    module, tracking, x = layer()
    with tracking:
        base = torch.zeros(3, 4)
        base[1:, :2] = module(x)[:, :2]
        later = base * 2
    assert tracking.depends_on_parameters(base) and tracking.depends_on_parameters(later)


def test_received_tensors_carry_what_the_sender_says():
    _, tracking, _ = layer()
    hidden, ids, mask = torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2)
    tracking.mark_received([hidden, ids, mask], (True, False))
    with tracking:
        hidden, mask = hidden.clone(), mask.clone()
    assert tracking.dependence([hidden, ids, mask], None) == (True, False)
    assert tracking.dependence([hidden, mask], (False, True)) == (False, True)  # known before


class Biased(nn.Module):
    """Makes a learned bias of attention, with a mask in it."""

    def __init__(self, dtype, lowest):
        super().__init__()
        self.bias, self.lowest = nn.Parameter(torch.randn(2, 32, 32).to(dtype)), lowest

    def forward(self, x):
        return self.bias.masked_fill(torch.ones(32, 32).triu(1).bool(), self.lowest)


LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@pytest.mark.parametrize("codec", ["quantize", "entropy", "topk"])
@pytest.mark.parametrize(
    "dtype, lowest", [*LOWEST.items(), (torch.float32, -1e9), (torch.float32, -torch.inf)], ids=str
)
def test_a_learned_bias_arrives_where_it_holds_a_mask(dtype, lowest, codec):
    """Values that were not masked arrived finite, but wrong by up to 1e33."""
    model = nn.Sequential(Biased(dtype, lowest), nn.Identity())
    sent = model(torch.ones(1))
    config = {"forward": {"codec": codec}, "backward": {"codec": codec}, "min_numel": 0}
    assert torch.equal(simulate(model, {"ds_compress": config}, [1])(torch.ones(1)), sent)


def test_a_compiled_layer():
    module = torch.compile(nn.Linear(4, 4), backend="eager")
    tracking = DependencyTracker(module)
    with tracking:
        assert tracking.depends_on_parameters(module(torch.ones(2, 4)))


def test_nothing_is_followed_while_paused():
    module, tracking, x = layer()
    with tracking, tracking.paused():
        assert not tracking.depends_on_parameters(module(x))
