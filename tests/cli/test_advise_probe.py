"""ds-compress advise --probe: layers of one's own, and every way in which they can be wrong, in one line."""

import json
import textwrap

import pytest
import torch
from deepspeed.pipe import PipelineModule

from tests.support.pipeline import assert_errors_match, boundary_tensors
from tests.support.ranks import run_ranks

SCRIPT = """
    import torch
    from torch import nn
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    class Pair(nn.Module):
        '''A hidden state, and beside it a mask and a table that nothing has learned.'''

        def __init__(self, last=False):
            super().__init__()
            self.up, self.last = nn.Linear(32, 32), last

        def forward(self, inputs):
            if torch.is_tensor(inputs):
                table = torch.linspace(0, 1, inputs.shape[1]).repeat(len(inputs), 32, 1).transpose(1, 2)
                inputs = inputs, inputs[..., 0] > 0, (table * 1e6).requires_grad_()
            x, mask, table = inputs
            x = x + torch.tanh(self.up(x)) * mask.unsqueeze(-1) + 1e-6 * table
            return x if self.last else (x, mask, table)

    def batch():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(4, 64, 32, generator=generator)
        return x, torch.sin(3 * x)

    def specs():
        torch.manual_seed(0)
        layers = [TiedLayerSpec("tied", nn.Linear, 32, 32), torch.tanh, LayerSpec(nn.Linear, 32, 32),
                  LayerSpec(nn.Linear, 32, 32), TiedLayerSpec("tied", nn.Linear, 32, 32)]
        return layers, nn.functional.mse_loss, batch()

    def sequential():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        return layers, nn.functional.mse_loss, batch()

    def tuples():
        return [Pair(), Pair(), Pair(last=True)], nn.functional.mse_loss, batch()
"""


@pytest.fixture
def script(tmp_path):
    def write(text, name="probe.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return tmp_path / name

    return write


def model():
    torch.manual_seed(0)
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    return [linear(32, 32), tanh(), linear(32, 32), tanh(), linear(32, 32)]


def inputs():
    return torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(0))


def loss(output):
    return torch.nn.functional.mse_loss(output, torch.sin(3 * inputs()))


def deepspeeds_parts():
    return PipelineModule(model(), num_stages=3, partition_method="parameters").parts


def test_layers_of_ones_own(advise, script):
    """Cut where DeepSpeed would cut them."""
    found = json.loads(advise("--stages", 3, "--probe", f"{script(SCRIPT)}:sequential", "--json"))
    cuts = run_ranks(3, deepspeeds_parts)[0][1:-1]
    assert_errors_match(found["measured"], boundary_tensors(model(), cuts, inputs(), loss))
    assert found["best"] and [own["stage"] for own in found["measured"]["stages"]] == [0, 1, 2]


def test_specs_tied_layers_and_functions(advise, script):
    """A tied layer is one module, with one weight, on the first stage and on the last."""
    found = json.loads(advise("--stages", 2, "--probe", f"{script(SCRIPT)}:specs", "--json"))
    torch.manual_seed(0)
    first, second, third = (torch.nn.Linear(32, 32) for _ in range(3))
    assert_errors_match(
        found["measured"], boundary_tensors([first, torch.tanh, second, third, first], [3], inputs(), loss)
    )


def test_a_mask_and_a_table_beside_the_hidden_state_cross_as_they_are(advise, script):
    """The table, a million times as large, would hide every error; no gradient of it is lost either."""
    found = json.loads(advise("--stages", 2, "--probe", f"{script(SCRIPT)}:tuples", "--json"))
    forward = next(own for own in found["measured"]["messages"] if own["direction"] == "forward")
    assert [own["dtype"] for own in forward["tensors"]] == ["float32", "bool", "float32"]
    own = forward["settings"]["quant4"]
    assert own["bytes"] > 4 * 4 * 64 * 32 and own["error"] > 0.05


def test_another_dtype(advise, script):
    found = json.loads(
        advise("--stages", 2, "--probe", f"{script(SCRIPT)}:sequential", "--dtype", "bf16", "--json")
    )
    assert {t["dtype"] for own in found["measured"]["messages"] for t in own["tensors"]} == {"bfloat16"}


WRONG = """
    import sys
    import torch
    from torch import nn

    loss = nn.functional.mse_loss
    linear, x = nn.Linear(8, 8), torch.randn(2, 8)
    two = [linear, linear]
    number = 3

    def nothing(): pass
    def pair(): return two, loss
    def a_model(): return linear, loss, (x, x)
    def no_layers(): return [], loss, (x, x)
    def no_loss(): return two, "mse", (x, x)
    def no_batch(): return two, loss, x
    def a_class(): return [nn.Linear, linear], loss, (x, x)
    def fails(): raise KeyError("depth\\nof the model")
    def ends(): sys.exit(3)
    def narrow(): return [linear, nn.Linear(4, 4)], loss, (x, x)
    def no_scalar(): return two, lambda y, labels: y, (x, x)
    def no_float(): return two, None, (x, x)
    def a_dict(): return [lambda y: {"x": linear(y)}, linear], loss, (x, x)
    def frozen(): return [nn.Linear(8, 8).requires_grad_(False), linear], loss, (x, x)
    def unused(): return [lambda y: (linear(y), linear(y)), lambda y: linear(y[0])], loss, (x, x)
    def zero(): return [linear, linear], lambda y, labels: 0 * y.sum(), (x, x)
    def not_finite(): return [linear, linear], lambda y, labels: y.sum() / 0, (x, x)
    def one_layer(): return [linear], loss, (x, x)
"""


@pytest.mark.parametrize("function, message", [
    ("nothing", "returned None; should be (layers, loss_fn, (inputs, labels))"),
    ("pair", "returned tuple of 2; should be (layers, loss_fn, (inputs, labels))"),
    ("a_model", "layers of (layers, loss_fn, (inputs, labels)) are Linear; should be a list of them"),
    ("no_layers", "layers of (layers, loss_fn, (inputs, labels)) are list of 0; should be a list of them"),
    ("no_loss", "loss_fn of (layers, loss_fn, (inputs, labels)) is str; should be a function, or None"),
    ("no_batch", "the micro-batch of (layers, loss_fn, (inputs, labels)) is Tensor; should be ("),
    ("a_class", "layer 0 is the class Linear; should be a LayerSpec, a module, or a function"),
    ("fails", "KeyError: 'depth"),
    ("ends", "SystemExit: 3"),
    ("narrow", "stage 1: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ("no_scalar", "the loss is a tensor [2, 8]; should be a tensor of one element"),
    ("no_float", "the loss is a tensor [2, 8]; should be a tensor of one element"),
    ("a_dict", "stage 0 gives dict; should be a tensor or a tuple of tensors"),
    ("frozen", "stage 0: RuntimeError: element 0 of tensors does not require grad"),
    ("unused", "boundary 0: the loss does not depend on every float tensor of its message"),
    ("zero", "activations or gradients between its stages are zero, or not finite"),
    ("not_finite", "activations or gradients between its stages are zero, or not finite"),
    ("one_layer", "stages: 2 is not allowed: equal numbers of parameters leave a stage without any"),
    ("nothin", "FILE has no function 'nothin' (did you mean 'nothing'?)"),
    ("number", "FILE has no function 'number'"),
])  # fmt: skip
def test_what_is_wrong_with_a_function(advise, script, function, message):
    file = script(WRONG)
    error = advise("--stages", 2, "--probe", f"{file}:{function}", code=2)
    assert error.count("\n") == 1
    assert error.replace(str(file), "FILE").startswith(f"--probe FILE:{function}: {message}")


@pytest.mark.parametrize("text, message", [
    ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ("def f(:", "SyntaxError: "),
    ("raise SystemExit('no data')", "SystemExit: no data"),
])  # fmt: skip
def test_what_is_wrong_with_a_file(advise, script, text, message):
    file = script(text)
    error = advise("--stages", 2, "--probe", f"{file}:f", code=2)
    assert error.startswith(f"--probe {file}:f: {message}") and error.count("\n") == 1


@pytest.mark.parametrize("arguments, message", [
    (("--probe", "no_such.py:f"), "--probe no_such.py:f: there is no file no_such.py"),
    (("--probe", "probe.py"), "--probe probe.py: 'probe.py' is not allowed: should be FILE.py:FUNCTION"),
    (("--probe", "probe:f"), "--probe probe:f: 'probe:f' is not allowed: should be FILE.py:FUNCTION"),
    (("--probe", "x.py:f", "--shape", "4,4"), "--shape: is not allowed with --probe, whose function gives"),
    (("--shape", "4,64"), "--forward-ms: missing; give it, or --model or --probe to have it measured"),
    (("--forward-ms", "4"), "--shape: missing; give it, or --model or --probe to have it measured"),
])  # fmt: skip
def test_what_is_wrong_with_options(advise, arguments, message):
    error = advise("--stages", 2, *arguments, code=2)
    assert error.startswith(message) and error.count("\n") == 1


def test_what_a_script_prints_is_kept_out_of_the_json(advise, script):
    printing = (
        SCRIPT
        + """
    def noisy():
        print("building")
        return sequential()
    """
    )
    assert json.loads(advise("--stages", 2, "--probe", f"{script(printing)}:noisy", "--json"))["best"]
