"""`check_codec`: test a codec, built in or your own, against the promises of its contract.

    from ds_compress import check_codec

    check_codec("mine")                               its defaults, if it has any, and all its `examples`
    check_codec({"name": "mine", "bits": 4})          one setting

Each check sends tensors forward across a boundary of its own, and others backward, as bytes. A broken promise
is an AssertionError of one line. Only torch is used.
"""

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from ds_compress.codec import CODECS, Codec, Context, Layout, TensorSpec, build
from ds_compress.codecs.message_error import measure_error
from ds_compress.codecs.mixins import FollowsForward, VariableSizePayload
from ds_compress.codecs.shapes import matrix_shape
from ds_compress.errors import CompressionError, in_one_line
from ds_compress.kernels.memory import fill

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((), (0,), (1,), (3, 5), (2, 0, 4), (2, 7, 13), (4, 128), (2, 3, 256))
ORDINARY = ((2, 4, 256), (8, 33, 65))
LONG = (2, 160, 257)  # where other kernels may take over
MEAN_OF = 64  # messages, where a codec says that their mean is unbiased

ALIGNMENT = 16
"""Alignment of the tensors in a packet, in bytes."""

GARBAGE = 0xAB
"""What the memory of a packet is filled with when it has been read."""


def check_codec(choice: object, backward: object = None, device: torch.device | str = "cpu") -> None:
    """Hold a codec to its contract.

    Args:
        choice: its name, for its defaults and all its `examples`; or an object of name and options, as in
            ds_config.
        backward: what goes back at the same boundary, if not the same.
        device: where the tensors are.

    Raises:
        AssertionError: a promise is broken; says which one, by what setting, for what tensor.
        CompressionError: `choice` is no codec.
    """
    for setting in settings_of(choice):
        for check in CHECKS:
            check(CodecPair(setting, backward, torch.device(device)))


def settings_of(choice: object) -> list[Any]:
    """Return the settings to check: `choice` itself, or for a codec's name its defaults and examples."""
    if not isinstance(choice, str):
        return [choice]
    cls = CODECS.find(choice, "codec")
    has_defaults = not any(field.is_required() for field in cls.Options.model_fields.values())
    found: list[dict[str, Any]] = [{}] if has_defaults else []
    found += [options for options in cls.examples if options not in found]
    return [{"name": choice, **options} for options in found]


class CodecPair:
    """A setting of a codec and the two codecs of a boundary that follow from it."""

    def __init__(self, setting: object, backward: object, device: torch.device):
        """
        Args:
            backward: codec of gradients; None: the same codec.
        """
        self.device = device
        self._choices = setting, backward
        self._codec, self.codecs = _built(setting, backward)
        _, self.neighbours = _built(setting, backward)
        """The codecs of the other side, which is another process in training."""

    def rebuilt(self) -> "CodecPair":
        """Return the same with codecs of its own."""
        return CodecPair(*self._choices, self.device)

    def fail(self, what: str, spec: TensorSpec | None = None) -> NoReturn:
        where = f", at {spec}" if spec else ""
        raise AssertionError(f"codec {self._codec}: {what}{where}")

    def expect(self, condition: object, what: str, spec: TensorSpec) -> None:
        """Fail with `what`, unless `condition` is true."""
        if not condition:
            self.fail(what, spec)

    def refusal(self, spec: TensorSpec) -> str:
        """Return why one of the codecs declares to refuse `spec`, "" where none does."""
        return self.codecs[0].refuses(spec) or self.codecs[1].refuses(spec)

    def specs(self, shapes: Iterable[tuple[int, ...]], dtypes: Iterable[torch.dtype]) -> Iterator[TensorSpec]:
        """Yield the specs that are not refused."""
        dtypes = tuple(dtypes)
        for shape in shapes:
            found = [TensorSpec(shape, dtype, self.device) for dtype in dtypes]
            yield from (spec for spec in found if not self.refusal(spec))

    def exchange(self, activation: Tensor, gradient: Tensor, **place: Any) -> tuple[Tensor, Tensor]:
        """Send both tensors over a new boundary and return what arrives; `place`: fields of the contexts."""
        return BoundarySides(self).exchange(activation, gradient, **place)


def _built(setting: object, backward: object) -> tuple[Codec, tuple[Codec, Codec]]:
    """Return the codec of `setting`, and the two of a boundary that follow from it."""
    codec = build(setting)
    partner = codec.forward_partner() if isinstance(codec, FollowsForward) else None
    forward = partner or codec
    back = codec if partner or backward is None else build(backward)
    return codec, (forward, back.paired_with(forward) if isinstance(back, FollowsForward) else back)


class BoundarySides:
    """The two sides of a boundary, with their memories; what passes between them is bytes."""

    def __init__(self, pair: CodecPair):
        self._pair = pair
        self._memories: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        self.packets: list[Tensor] = []
        self._arrived: list[Tensor] = []

    def exchange(self, activation: Tensor, gradient: Tensor, **place: Any) -> tuple[Tensor, Tensor]:
        """Send `activation` forward and `gradient` of the same micro-batch back; what arrives."""
        stashes: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        left, right = zip((self._pair.codecs, self._pair.neighbours), stashes, self._memories)
        arrived = self._send(activation, left, right, {**place, "direction": "forward"})
        for stash, own in zip(stashes, (activation, arrived)):
            stash["activation"] = own
        return arrived, self._send(gradient, right, left, {**place, "direction": "backward"})

    def _send(self, x: Tensor, source: Any, target: Any, place: dict[str, Any]) -> Tensor:
        codec, receiving = (side[0][place["direction"] == "backward"] for side in (source, target))
        spec, before = TensorSpec.of(x), x.clone()
        expect = functools.partial(self._pair.expect, spec=spec)
        sender = Context(**place, stash=source[1], memory=source[2])
        receiver = Context(**place, stash=target[1], memory=target[2])
        with_sender = Context(**place, stash=dict(target[1]), memory=dict(target[2]))
        with_out = Context(**place, stash=dict(source[1]), memory=dict(source[2]))
        generator = torch.get_rng_state()
        values = [(value, value.clone()) for memory in self._memories for value in memory.values()]
        keys = [set(memory) for memory in self._memories]

        parts = self._called("encode", spec, codec.encode, x, sender)
        self._check_layout(receiving, parts, spec)
        expect(equal_values(x, before), "encode modifies its input")
        if codec.supports_out:
            packet, out = _packed(parts[: len(codec.layout(spec))], x.device)
            packet.fill_(GARBAGE)
            made = self._called("encode", spec, codec.encode_into, x, with_out, out)
            fill(out, made[: len(out)])
            written = all(map(equal_values, parts, out + made[len(out) :]))
            expect(written, "encode writes something else to `out` than it returns without it")
        packet, views = _packed(parts, x.device)
        self.packets.append(packet.clone())

        arrived = self._called("decode", spec, receiving.decode, views, spec, receiver)
        result = TensorSpec.of(arrived)
        expect(result == spec, f"decode returns {result} on {result.device}")
        own = not any(_shares(arrived, earlier) for earlier in self._arrived)
        expect(own, "decodes to the memory of an earlier message, which belongs to the caller")
        self._arrived.append(arrived)
        expect(torch.equal(packet, self.packets[-1]), "decode modifies its parts")
        again = self._called("decode", spec, codec.decode, views, spec, with_sender)
        expect(equal_values(arrived, again), "decodes the same parts to something else the second time")
        same = torch.equal(torch.get_rng_state(), generator)
        expect(same, "uses torch's own generator, which training draws from; see ctx.generator")
        for kept in _tensors([receiver.stash, receiver.memory]):
            expect(not _shares(kept, packet), "keeps a view of the packet, whose memory is used again")
        for old, copy in values:
            expect(equal_values(old, copy), "modifies an entry of ctx.memory instead of replacing it")
        stay = all(before <= memory.keys() for before, memory in zip(keys, self._memories))
        expect(stay, "deletes an entry of ctx.memory instead of replacing it")
        for entry in (value for memory in self._memories for value in memory.values()):
            expect(entry.is_contiguous(), "leaves an entry in ctx.memory that is not contiguous")

        arrived = arrived.clone()
        packet.fill_(GARBAGE)
        return arrived

    def _check_layout(self, codec: Codec, parts: tuple[Tensor, ...], spec: TensorSpec) -> None:
        layout: Layout = self._called("layout", spec, codec.layout, spec)
        if isinstance(codec, VariableSizePayload):
            layout += self._called("extra_payload", spec, codec.extra_payload, parts[: len(layout)], spec)
        made = tuple((tuple(part.shape), part.dtype) for part in parts)
        self._pair.expect(made == tuple(layout), f"encode makes {made}, layout says {tuple(layout)}", spec)
        is_at_home = all(part.device == spec.device for part in parts)
        self._pair.expect(is_at_home, f"encode makes parts that are not on {spec.device}", spec)

    def _called(self, name: str, spec: TensorSpec, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except CompressionError as error:
            self._pair.fail(f"refuses, in {name}, what it does not declare to refuse ({error})", spec)
        except Exception as error:
            self._pair.fail(f"{name} raised {in_one_line(error)}", spec)


def normal(spec: TensorSpec, seed: int = 0) -> Tensor:
    """Return standard normal values, the same on every device."""
    return _randn(spec.shape, seed).to(spec.device, spec.dtype)


def message_kinds(spec: TensorSpec, seed: int = 0) -> dict[str, Tensor]:
    """Return messages by what they are made of; `spec` has elements."""
    x, y = _randn((2, *spec.shape), seed)
    outlier, alone, sink = x.clone(), torch.zeros_like(x), x.clone()
    outlier.view(-1)[spec.numel // 2] = 1000.0
    alone.view(-1)[spec.numel // 3] = -2.0
    sink.view(matrix_shape(spec.shape))[0] *= 150
    half = spec.dtype == torch.float16
    far, small, large = (10, 6e-5, 6.5e4) if half else (98, 1e-30, 1e30)
    made = {
        "normal values": x,
        "heavy tails": (x / y.abs()).clamp(-1e4, 1e4),
        "values after a ReLU": x.relu(),
        "a constant": torch.full_like(x, -0.3),
        "a small constant": torch.full_like(x, small),
        "a large constant": torch.full_like(x, large),
        "values far from 0": x + 100,
        "one outlier": outlier,
        "one row 150 times as large": sink,
        "one value and zeros": alone,
        "tiny values": x * 2.0 ** -(far - 2),
        "huge values": x * 2.0**far,
    }
    return {name: x.to(spec.device, spec.dtype) for name, x in made.items()}


def _randn(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def equal_values(a: Tensor, b: Tensor) -> bool:
    """Return whether shapes and values are equal, nan being equal to nan."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def relative_error(x: Tensor, y: Tensor) -> float:
    """Return ||x - y|| / ||x||; 0 where both are 0, nan where one is not finite."""
    return measure_error([x.double()], [y.double()]).relative_error


def _packed(parts: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a packet of `parts`, and the views of it that the receiver decodes."""
    sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
    packet = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    views = tuple(
        place[: part.nbytes].view(part.dtype).view(part.shape).copy_(part)
        for place, part in zip(packet.split(sizes), parts)
    )
    return packet, views


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`: in containers, and in what objects hold."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors([*value.values()])
    elif isinstance(value, (list, tuple, deque)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))


def _shares(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors with elements lie in one memory."""
    return 0 != a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def check_shapes_and_dtypes(pair: CodecPair) -> None:
    """Check that every tensor that the codec does not declare to refuse arrives, finite, in its shape and
    dtype."""
    for shape in ORDINARY:
        if not any(pair.specs([shape], DTYPES[:3])):
            why = pair.refusal(TensorSpec(shape, DTYPES[0], pair.device))
            pair.fail(f"refuses {list(shape)} in fp32, bf16 and fp16: {why}")
    for spec in pair.specs(SHAPES + ORDINARY, DTYPES):
        for arrived in pair.exchange(normal(spec), normal(spec, seed=1)):
            pair.expect(arrived.isfinite().all(), "decodes finite values to inf or nan", spec)


def check_determinism(pair: CodecPair) -> None:
    """Check that equal contexts give equal bytes, whatever was sent before and whatever else is random or
    default."""
    for spec in pair.specs(((3, 5), (2, 3, 256), LONG), DTYPES[:3]):
        x, g = normal(spec), normal(spec, seed=1)
        used = pair.rebuilt()
        used.exchange(g, x, step=3)
        runs = BoundarySides(pair.rebuilt()), BoundarySides(used)
        surroundings: tuple[AbstractContextManager[None], ...] = nullcontext(), _changed_global_state()
        for run, surrounding in zip(runs, surroundings):
            with surrounding:
                for step in range(2):
                    run.exchange(x, g, step=step, seed=7)
        equal = all(torch.equal(a, b) for a, b in zip(runs[0].packets, runs[1].packets, strict=True))
        pair.expect(equal, "sends other bytes for an equal message and context", spec)


@contextmanager
def _changed_global_state() -> Iterator[None]:
    """Set another default dtype and device, and global generators in another state."""
    dtype, state = torch.get_default_dtype(), torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_rng_state(state)


def check_memory_order(pair: CodecPair) -> None:
    """Check that a tensor that is not contiguous arrives as its contiguous copy does."""
    for dtype in DTYPES:
        wide = normal(TensorSpec((6, 4, 256), dtype, pair.device))
        strided = (
            wide.transpose(0, 1),
            wide[:, :, ::2],
            wide[1::3].permute(2, 1, 0),
            wide[:, :1].expand(-1, 4, -1),
            wide.view(1, -1).T,  # contiguous, with other strides than its contiguous copy
        )
        for x in strided:
            if not pair.refusal(TensorSpec.of(x)):
                pairs = zip(pair.exchange(x, x), pair.exchange(x.contiguous(), x.contiguous()))
                equal = all(equal_values(a, b) for a, b in pairs)
                pair.expect(equal, f"depends on the memory order (strides {x.stride()})", TensorSpec.of(x))


def check_zeros(pair: CodecPair) -> None:
    """Check that zeros arrive as zeros."""
    for spec in pair.specs(SHAPES, DTYPES):
        zeros = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
        for arrived in pair.exchange(zeros, zeros):
            pair.expect(equal_values(arrived, zeros), "makes something of zeros", spec)


def check_zero_rows(pair: CodecPair) -> None:
    """Check that a row of zeros among others arrives as zeros: optimizers make full steps of any noise."""
    for spec in pair.specs((*ORDINARY, LONG, (64, 1024)), DTYPES[:3]):
        sent = normal(spec), normal(spec, seed=1)
        for x in sent:
            rows = x.view(matrix_shape(spec.shape))
            rows[1::3] = 0
            rows[0] *= 3
        for x, arrived in zip(sent, pair.exchange(*sent)):
            zero = x.view(matrix_shape(spec.shape)).any(1).logical_not()
            made = arrived.reshape(matrix_shape(spec.shape))[zero]
            pair.expect(not made.any(), "makes something of a row of zeros", spec)


def check_kept_zeros(pair: CodecPair) -> None:
    """Check that each 0 arrives as 0, for codecs that say so: between replicas nothing else says it for
    them."""
    for spec in pair.specs((*ORDINARY, (1000,)), DTYPES[:3]):
        sent = normal(spec).relu(), normal(spec, seed=1).relu()
        for codec, x, arrived in zip(pair.codecs, sent, pair.exchange(*sent)):
            keeps = not arrived[x == 0].any() or not codec.keeps_zeros
            pair.expect(keeps, "says it keeps zeros, and makes something of one", spec)


def check_small_rows(pair: CodecPair) -> None:
    """Check that no row that is not zero arrives as zeros, for codecs that say so."""
    for spec in pair.specs(ORDINARY[:1], DTYPES[:2]):
        sent = normal(spec), normal(spec, seed=1)
        for x in sent:
            rows = x.view(matrix_shape(spec.shape))
            sizes = torch.logspace(0, -30, len(rows), dtype=torch.float32, device=pair.device)
            rows *= sizes[:, None].to(spec.dtype)
            rows[::2, 3] *= 1e4
        for codec, arrived in zip(pair.codecs, pair.exchange(*sent)):
            keeps = arrived.reshape(matrix_shape(spec.shape)).any(1).all() or not codec.keeps_rows(spec)
            pair.expect(keeps, "makes zeros of a row that is not zero", spec)


def check_non_finite(pair: CodecPair) -> None:
    """Check that inf or nan in a tensor makes what arrives not finite, so that loss scaling sees it."""
    for spec in (*pair.specs(((1,), (3, 5), (2, 3, 256)), DTYPES), *pair.specs([LONG], DTYPES[:2])):
        ordinary = normal(spec)
        places = sorted({spec.numel // 2, spec.numel - 1})  # the last one may be of a part of a group
        for value, place in itertools.product((math.inf, -math.inf, math.nan), places):
            bad = ordinary.clone()
            bad.view(-1)[place] = value
            there, _ = pair.exchange(bad, ordinary)
            _, back = pair.exchange(ordinary, bad)
            seen = not there.isfinite().all() and not back.isfinite().all()
            pair.expect(seen, f"hides {value}: all that it decodes is finite", spec)


def check_scale(pair: CodecPair) -> None:
    """Check that C(s x) = s C(x) from 1e-30 to 1e30, with powers of two for s, which cost no precision
    themselves."""
    for spec in pair.specs(ORDINARY[:1], DTYPES):
        half = spec.dtype == torch.float16
        powers, spacing = ((-3, 3), 2.0**-24) if half else ((-98, -40, -3, 3, 40, 98), 0)
        x, g = normal(spec), normal(spec, seed=1)
        plain = pair.exchange(x, g)
        for power in powers:
            scaled = pair.exchange(x * 2.0**power, g * 2.0**power)
            for arrived, once in zip(scaled, plain):
                expected = once.double() * 2.0**power
                tolerance = 1e-6 * expected.abs().max() + spacing
                near = (arrived.double() - expected).abs().max() <= tolerance
                pair.expect(near, f"does not scale: C(2^{power} x) is not 2^{power} C(x)", spec)


def check_error_bound(pair: CodecPair) -> None:
    """Check that no message of any kind loses more than the codec declares."""
    for spec in pair.specs(((3, 5), (2, 7, 130)), DTYPES):
        gradients = message_kinds(spec, seed=1)
        for name, x in message_kinds(spec).items():
            sent = x, gradients[name]
            for codec, x, arrived in zip(pair.codecs, sent, pair.exchange(*sent)):
                bound = codec.error_bound(spec)
                pair.expect(bound < math.inf, "declares no error_bound", spec)
                _hold(pair, x, arrived, bound, f"of {name}, its error_bound is")


def check_gaussian_error(pair: CodecPair) -> None:
    """Check that normal values lose no more than declared, and less than if zeros were sent."""
    specs = pair.specs(((4, 128), *ORDINARY, LONG), DTYPES[:3])
    places: tuple[dict[str, Any], ...] = {}, {"training": False, "step": 7, "micro_batch": 3}
    for spec, place in itertools.product(specs, places):
        sent = normal(spec, seed=2), normal(spec, seed=3)
        for codec, x, arrived in zip(pair.codecs, sent, pair.exchange(*sent, **place)):
            bound = codec.gaussian_error_bound(spec)
            useful = bound < 1 or codec.unbiased
            pair.expect(useful, f"may lose {bound:.3g} of normal values; sending zeros loses 1", spec)
            _hold(pair, x, arrived, bound, "of normal values, its gaussian_error_bound is")


def check_unbiased(pair: CodecPair) -> None:
    """Check that the mean of many messages approaches the input, for codecs declared unbiased."""
    if not any(codec.unbiased for codec in pair.codecs):
        return
    for spec in pair.specs(ORDINARY[:1], DTYPES[:1]):
        sent = normal(spec), normal(spec, seed=1)
        messages = [pair.exchange(*sent, step=step) for step in range(MEAN_OF)]
        for codec, x, arrived in zip(pair.codecs, sent, zip(*messages)):
            bound = 1.5 * codec.gaussian_error_bound(spec) / math.sqrt(MEAN_OF) + 0.05
            error = relative_error(x, torch.stack(arrived).double().mean(0))
            what = f"says it is unbiased; the mean of {MEAN_OF} messages is {error:.3g} off, not {bound:.3g}"
            pair.expect(error <= bound or not codec.unbiased, what, spec)


def _hold(pair: CodecPair, x: Tensor, arrived: Tensor, bound: float, what: str) -> None:
    """Hold the error of `arrived` to `bound`, which is exact at 0 and before rounding elsewhere."""
    error = relative_error(x, arrived)
    rounding = max(torch.finfo(x.dtype).eps, 2.0**-22) if bound else 0.0
    is_within = error <= bound * (1 + 1e-4) + rounding
    pair.expect(is_within, f"loses {error:.4g} {what} {bound:.4g}", TensorSpec.of(x))


CHECKS: tuple[Callable[[CodecPair], None], ...] = (
    check_shapes_and_dtypes,
    check_determinism,
    check_memory_order,
    check_zeros,
    check_zero_rows,
    check_kept_zeros,
    check_small_rows,
    check_non_finite,
    check_scale,
    check_error_bound,
    check_gaussian_error,
    check_unbiased,
)
