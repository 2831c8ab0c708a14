"""What C++ gets is what its declaration says: every argument of every function, wrong in every way."""

import re
from importlib import import_module

import pytest
import torch

from ds_compress.kernels import library, native
from ds_compress.kernels.backends import ALGORITHMS, cpu
from ds_compress.kernels.native.function import FLAG, Buffer, Function
from ds_compress.kernels.quantize.grid import Grid
from ds_compress.kernels.topk.selection import Selection

FUNCTIONS = {
    function.name: function
    for module in (import_module(f"ds_compress.kernels.{algorithm}.cpu") for algorithm in ALGORITHMS)
    for function in vars(module).values()
    if isinstance(function, Function)
}


def sound(function):
    """Arguments that the function takes."""
    given = {name: 1.0 for name, kind in function.arguments.items() if kind is float}
    for name, kind in function.arguments.items():
        if isinstance(kind, range):
            given[name] = 0 if kind == FLAG else 264 if 264 in kind else kind[-1]
    for name, kind in function.arguments.items():
        if isinstance(kind, Buffer):
            numel = torch.tensor([given.get(dim, dim) for dim in kind.dims]).prod().item()
            dtype = kind.dtypes[given[kind.dtype_from] if kind.dtype_from else 0]
            given[name] = torch.zeros(-(-numel // kind.per), dtype=dtype)
    return given


def wrong(kind, value):
    """Yield arguments that must be refused where `value` is allowed, each with the error that it raises."""
    if isinstance(kind, range):
        yield kind.stop, ValueError
        yield kind.start - 1, ValueError
        yield 1.0, TypeError
    elif isinstance(kind, Buffer):
        other = torch.float64 if value.dtype != torch.float64 else torch.float32
        for bad in (value.to(other), value.to("meta"), value.tolist(), None):
            yield bad, TypeError
        yield torch.stack([value, value], dim=1)[:, 0], ValueError
        yield value[1:].clone(), ValueError
    else:
        yield "1", TypeError


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_not_as_declared_never_reaches_c(name, monkeypatch):
    """Buffers of another dtype, device or size were written past their end; a call whose integers had been
    seen before could have let them through."""
    entered = []
    monkeypatch.setattr(library, "load", lambda: entered.append(True) or {}["entered"])
    function = FUNCTIONS[name]
    good = sound(function)
    integers = {key: good[key] for key, kind in function.arguments.items() if isinstance(kind, range)}
    call = function.bind(**integers)
    others = {key: good[key] for key in function.arguments if key not in integers}
    for argument, kind in function.arguments.items():
        for value, error in wrong(kind, good[argument]):
            with pytest.raises(error, match=f"{function.source}.{name}: {argument}: .* came"):
                if argument in integers:
                    function.bind(**{**integers, argument: value})
                else:
                    call(*{**others, argument: value}.values())
    with pytest.raises(TypeError, match=f"{name}: {len(others) - 1} arguments came"):
        call(*[*others.values()][1:])
    assert not entered
    for enter in (lambda: call(*others.values()), lambda: function.bind(**good)()):
        with pytest.raises(KeyError, match="entered"):
            enter()


def test_a_call_needs_to_know_what_sizes_follow_from_and_all_that_is_not_optional():
    function = FUNCTIONS["dequantize_groups"]
    with pytest.raises(TypeError, match="dequantize_groups: .* came, expected at least .*'size'"):
        function.bind(n=3)
    with pytest.raises(TypeError, match="dequantize_groups: .*'depth'.* came"):
        function.bind(**sound(function), depth=3)
    given = {**sound(function), "diagonal": None}  # groups are rotated only where their size is a power of 2
    function.bind(**given)()
    with pytest.raises(TypeError, match="packed: NoneType came, expected a tensor"):
        function.bind(**{**given, "packed": None})


WORDS = {"int64_t": "q", "double": "d"}
MEMBER = re.compile(r"^    (?:const )?(\w+) ?([^(){};\n]*);", re.MULTILINE)
"""A line that declares members of a struct."""


def members(struct, text):
    """The types of the members of a C++ struct: q, d, or of what a pointer leads to."""
    (body,) = re.findall(rf"^struct {struct} {{\n(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    found = []
    for kind, names in MEMBER.findall(body):
        for name in names.split(","):
            if kind not in WORDS and "*" not in name:
                found += members(kind, text)
            else:
                found.append(kind if "*" in name else WORDS[kind])
    return found


def is_declared(kind, member):
    """Whether C's type of a member is that of an argument."""
    if not isinstance(kind, Buffer):
        return member == ("d" if kind is float else "q")
    size = {"void": 0, "float": 4}.get(member) or int(re.sub(r"\D", "", member) or 0) // 8
    return size == 0 or all(dtype.itemsize == size for dtype in kind.dtypes)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_declaration_is_that_of_the_source(name):
    """A struct with another member would read and write anywhere."""
    text = "\n".join(path.read_text() for path in library.sources())
    (struct,) = re.findall(rf"^int64_t {name}\(const (\w+)&", text, re.MULTILINE)
    kinds, found = [*FUNCTIONS[name].arguments.values()], members(struct, text)
    assert len(kinds) == len(found) and all(map(is_declared, kinds, found)), found


def test_wrappers_refuse_what_would_be_written_past_a_buffer(monkeypatch):
    values, grid = torch.zeros(16, 24), Grid(4)
    with_codes = values, (values.to(torch.int8), torch.zeros(2)), 1.0, 0.0, 1.0, grid, 32
    parts = torch.zeros(16, 12, dtype=torch.uint8), *torch.zeros(2, 7).bfloat16()
    for line, function, *arguments in (
        ("a rotation of 24 values came", cpu.quantize, values, Grid(4, hadamard=True)),
        ("size: 20 came", cpu.quantize, torch.zeros(20, 20), grid),
        ("384 values came, expected a multiple of 40", cpu.quantize, values, grid, None, None, 40),
        ("state: 24 entries came, expected 384", cpu.quantize_change, values, values[:1], 1.0, grid, 24),
        ("scales: 2 entries came, expected 3", cpu.quantize_with_residual, *with_codes),
        ("steps: 7 entries came, expected 16", cpu.dequantize, parts, grid),
    ):
        with pytest.raises(ValueError, match=line):
            function(*arguments)
    monkeypatch.setattr(native, "LONG", 0)
    for index in (-1, 20):
        with pytest.raises(RuntimeError, match=f"index {index} is out of bounds"):
            Selection.at(torch.tensor([3, index, 5]), 20).bits
