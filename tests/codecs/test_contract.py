"""Every promise of the contract is broken by some codec here, and `check_codec` says which."""

import itertools
import types

import pytest
import torch

from ds_compress import Codec, CompressionError, check_codec, register
from tests.support.codecs import own_codecs
from tests.support.refusals import refusal


class Honest(Codec):
    """A cast to bf16, which keeps all promises."""

    def layout(self, spec):
        return ((spec.shape, torch.bfloat16),)

    def encode(self, x, ctx):
        return (x.to(torch.bfloat16),)

    def decode(self, parts, spec, ctx):
        return parts[0].to(spec.dtype)

    def error_bound(self, spec):
        return 2.0**-8


def variant(base=Honest, **methods):
    """A codec that does so much otherwise."""
    return type("Broken", (base,), methods)


def sends(function, **methods):
    """A codec that sends what `function` makes of a message."""
    return variant(encode=lambda self, x, ctx: (function(x).to(torch.bfloat16),), **methods)


def arrives(function, **methods):
    """A codec by which `function` of what was sent arrives."""
    return variant(decode=lambda self, parts, spec, ctx: function(parts[0]).to(spec.dtype), **methods)


def remembers(change):
    """A codec that changes its memory so with every message."""

    def encode(self, x, ctx):
        change(ctx.memory, torch.ones(2, 3, device=x.device))
        return Honest.encode(self, x, ctx)

    return variant(encode=encode)


NUMBERS = itertools.count(1)
Zeros = sends(lambda x: 0 * x, error_bound=lambda self, spec: 0.9)  # nan stays
AdmittedZeros = variant(Zeros, error_bound=lambda self, spec: 1.0)
SilentZeros = sends(torch.zeros_like, error_bound=lambda self, spec: 0.9)
UnbiasedZeros = variant(AdmittedZeros, unbiased=True)
Undeclared = variant(error_bound=lambda self, spec: Codec.error_bound(self, spec))
DeclaredOneShape = variant(refuses=lambda self, spec: "" if spec.shape == (3, 5) else "only [3, 5]")
Crashing = sends(lambda x: x.view(-1).view(x.shape))
Random = sends(lambda x: x * (1 + torch.rand_like(x) / 1000))
Counting = sends(lambda x: x * (1 + next(NUMBERS) / 1000))
# a third is exact in the default dtype only
Ambient = sends(lambda x: x.double() * (1 + 1e6 * (torch.tensor(1 / 3, device=x.device).double() - 1 / 3)))
InPlace = sends(lambda x: x.mul_(1.001))
Flattening = sends(lambda x: x.as_strided(x.shape, torch.empty(x.shape, device="cpu").stride()))
HidesNan = sends(torch.nan_to_num)
HidesTheLastNan = sends(
    lambda x: torch.cat([x.flatten()[:2], x.flatten()[2:-1], x.flatten()[2:][-1:].nan_to_num()]).view(x.shape)
)
DataDependent = sends(lambda x: x[x != 0])
DecodesInPlace = arrives(lambda sent: sent.mul_(1.25))
Shifted = arrives(lambda sent: sent.float() + 1)
Absolute = arrives(lambda sent: torch.where(sent.float().abs() < 1e-10, 0.0, sent.float()))
Moody = arrives(lambda sent: sent * (1 + next(NUMBERS) % 2))
SpillsIntoRows = arrives(lambda sent: sent.float() + sent.float().sum() / 2**20)
LosesRows = arrives(
    lambda sent: sent * (sent.abs() > sent.abs().sum() / 2**60), keeps_rows=lambda self, spec: True
)
FillsZeros = arrives(
    lambda sent: torch.where(sent == 0, sent.abs().sum(-1, keepdim=True) / 2**20, sent), keeps_zeros=True
)
Halves = variant(decode=lambda self, parts, spec, ctx: parts[0].to(spec.dtype) * (1 if ctx.training else 0.5))
AlwaysFloat = variant(decode=lambda self, parts, spec, ctx: parts[0].float())
OneMore = variant(layout=lambda self, spec: (*Honest.layout(self, spec), ((), torch.float32)))
Remembering = remembers(lambda memory, ones: memory.update(total=memory.get("total", ones) + 0))
WritesMemory = remembers(lambda memory, ones: memory.setdefault("total", ones).add_(1))
DeletesMemory = remembers(lambda memory, ones: memory.clear() if memory else memory.update(total=ones))
StridedMemory = remembers(lambda memory, ones: memory.update(total=ones.t()))


class OneShape(Honest):
    def encode(self, x, ctx):
        if x.shape != (2, 4, 256):
            raise CompressionError("only [2, 4, 256]")
        return super().encode(x, ctx)


class Entries(dict):
    """A container that is a leaf to torch's own walk."""


class KeepsViewInside(Honest):
    def decode(self, parts, spec, ctx):
        ctx.stash["sent"] = [Entries(half=types.SimpleNamespace(half=parts[0].flatten()[:1]))]
        return parts[0].to(spec.dtype)


class Stateful(Honest):
    """The scale stays in the codec, of which each rank has one."""

    def encode(self, x, ctx):
        self.scale = x.abs().amax() if x.numel() else 1.0
        return super().encode(x, ctx)

    def decode(self, parts, spec, ctx):
        return super().decode(parts, spec, ctx) * (self.scale / self.scale)


class ForgetsOut(Honest):
    """Writes all but the first value to the packet, which holds those of an earlier message."""

    def encode(self, x, ctx, out=None):
        if not out:
            return super().encode(x, ctx)
        out[0].view(-1)[1:] = x.reshape(-1)[1:]
        return out


class OneBuffer(Honest):
    """Decodes every message to the same memory, while the program still holds those before."""

    buffers = {}

    def decode(self, parts, spec, ctx):
        return self.buffers.setdefault(spec, torch.empty(spec.shape, dtype=spec.dtype)).copy_(parts[0])


class Attributes(Honest):
    """What it needs travels beside the bytes, which only works in one process."""

    def encode(self, x, ctx):
        part = x.to(torch.bfloat16)
        part.dtype_sent = x.dtype
        return (part,)

    def decode(self, parts, spec, ctx):
        return parts[0].to(parts[0].dtype_sent)


BROKEN = {
    Zeros: "loses 1 of normal values, its error_bound is 0.9, at float32 [3, 5]",
    AdmittedZeros: "may lose 1 of normal values; sending zeros loses 1, at float32 [4, 128]",
    SilentZeros: "hides inf: all that it decodes is finite, at float32 [1]",
    UnbiasedZeros: "says it is unbiased; the mean of 64 messages is 1 off, not 0.237, at float32 [2, 4, 256]",
    Undeclared: "declares no error_bound, at float32 [3, 5]",
    OneShape: "refuses, in encode, what it does not declare to refuse (only [2, 4, 256]), at float32 []",
    DeclaredOneShape: "refuses [2, 4, 256] in fp32, bf16 and fp16: only [3, 5]",
    Crashing: "encode raised RuntimeError: view size is not compatible",
    Random: "uses torch's own generator, which training draws from; see ctx.generator, at float32 []",
    Counting: "sends other bytes for an equal message and context, at float32 [3, 5]",
    Ambient: "sends other bytes for an equal message and context, at float32 [3, 5]",
    InPlace: "encode modifies its input, at float32 []",
    DecodesInPlace: "decode modifies its parts, at float32 []",
    Flattening: "depends on the memory order (strides (256, 1024, 1)), at float32 [4, 6, 256]",
    HidesNan: "hides nan: all that it decodes is finite, at float32 [1]",
    Absolute: "does not scale: C(2^-98 x) is not 2^-98 C(x), at float32 [2, 4, 256]",
    Shifted: "makes something of zeros, at float32 []",
    SpillsIntoRows: "makes something of a row of zeros, at float32 [2, 4, 256]",
    FillsZeros: "says it keeps zeros, and makes something of one, at float32 [2, 4, 256]",
    LosesRows: "makes zeros of a row that is not zero, at float32 [2, 4, 256]",
    AlwaysFloat: "decode returns float32 [] on cpu, at bfloat16 []",
    Moody: "decodes the same parts to something else the second time, at float32 []",
    OneMore: "layout says (((), torch.bfloat16), ((), torch.float32)), at float32 []",
    DataDependent: "encode makes (((1,), torch.bfloat16),), layout says (((), torch.bfloat16),), at float",
    KeepsViewInside: "keeps a view of the packet, whose memory is used again, at float32 []",
    WritesMemory: "modifies an entry of ctx.memory instead of replacing it, at float32 [3, 5]",
    DeletesMemory: "deletes an entry of ctx.memory instead of replacing it, at float32 [3, 5]",
    StridedMemory: "leaves an entry in ctx.memory that is not contiguous, at float32 []",
    Stateful: "decode raised AttributeError: 'Stateful' object has no attribute 'scale', at float32 []",
    ForgetsOut: "encode writes something else to `out` than it returns without it, at float32 []",
    OneBuffer: "decodes to the memory of an earlier message, which belongs to the caller, at float32 [",
    HidesTheLastNan: "hides nan: all that it decodes is finite, at float32 [3, 5]",
    Halves: "loses 0.5001 of normal values, its gaussian_error_bound is 0.003906, at float32 [4, 128]",
    Attributes: "decode raised AttributeError: 'Tensor' object has no attribute 'dtype_sent', at float32 []",
}


@pytest.fixture(autouse=True)
def forgotten():
    with own_codecs():
        yield


@pytest.mark.parametrize("broken, line", BROKEN.items(), ids=BROKEN.values())
def test_a_broken_promise_is_named(broken, line):
    register("broken")(broken)
    with pytest.raises(AssertionError) as caught:
        check_codec("broken")
    assert str(caught.value).startswith("codec broken: ") and "\n" not in str(caught.value)
    assert line in str(caught.value)


@pytest.mark.parametrize("honest", [Honest, Remembering], ids=lambda cls: cls.__name__)
@pytest.mark.extended(keep=1)
def test_kept_promises_pass(honest):
    register("honest")(honest)
    check_codec("honest")
    check_codec("honest", backward={"name": "topk", "density": 0.5})


def test_declared_refusals_pass():
    class NoHalf(Honest):
        def refuses(self, spec):
            return "fp16 is too narrow" if spec.dtype == torch.float16 else ""

        def encode(self, x, ctx):
            assert x.dtype != torch.float16
            return super().encode(x, ctx)

    register("no_half")(NoHalf)
    check_codec("no_half")


def test_all_examples_are_checked():
    class Worse(Honest):
        examples = ({}, {"bits": 1})

        class Options(Codec.Options):
            bits: int = 16

        def decode(self, parts, spec, ctx):
            return super().decode(parts, spec, ctx) * (self.options.bits / 16)

    register("worse")(Worse)
    check_codec({"name": "worse"})
    with pytest.raises(AssertionError, match=r"^codec worse\(bits=1\): loses 0.9376 of"):
        check_codec("worse")


def test_what_is_no_codec_is_refused():
    assert "codec: 'tobk' is not registered (did you mean 'topk'" in refusal(check_codec, "tobk")
