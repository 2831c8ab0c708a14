"""What `codecs.contract` puts a codec through: tensors of all kinds, sent over a boundary and looked at."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from ds_compress.codec import Codec, Context, Layout, TensorSpec, build
from ds_compress.codecs.mixins import Follows, Observes, SecondPacket
from ds_compress.errors import CompressionError, in_one_line

ALIGNMENT = 16
"""Of the tensors in a packet, in bytes."""

GARBAGE = 0xAB
"""What the memory of a packet is filled with when it has been read."""


class Trial:
    """A setting of a codec and the two codecs of a boundary that follow from it."""

    def __init__(self, setting: object, backward: object, device: torch.device):
        """`backward`: what goes back, None for the same."""
        self.device = device
        self._choices = setting, backward
        self._codec = build(setting)
        partner = self._codec.forward_partner() if isinstance(self._codec, Follows) else None
        forward = partner or self._codec
        back = self._codec if partner or backward is None else build(backward)
        self.codecs = forward, back.paired(forward) if isinstance(back, Follows) else back

    def rebuilt(self) -> "Trial":
        """The same with codecs of its own."""
        return Trial(*self._choices, self.device)

    def fail(self, what: str, spec: TensorSpec | None = None) -> NoReturn:
        where = f", at {spec}" if spec else ""
        raise AssertionError(f"codec {self._codec}: {what}{where}")

    def expect(self, held: object, what: str, spec: TensorSpec) -> None:
        """Fail unless `held`."""
        if not held:
            self.fail(what, spec)

    def refusal(self, spec: TensorSpec) -> str:
        """Why one of the codecs declares to refuse `spec`, "" where none does."""
        return self.codecs[0].refuses(spec) or self.codecs[1].refuses(spec)

    def specs(self, shapes: Iterable[tuple[int, ...]], dtypes: Iterable[torch.dtype]) -> Iterator[TensorSpec]:
        """Those that are not refused."""
        dtypes = tuple(dtypes)
        for shape in shapes:
            found = [TensorSpec(shape, dtype, self.device) for dtype in dtypes]
            yield from (spec for spec in found if not self.refusal(spec))

    def exchange(self, activation: Tensor, gradient: Tensor, **place: Any) -> tuple[Tensor, Tensor]:
        """What arrives of both over a new boundary; `place`: fields of the contexts."""
        return Run(self).exchange(activation, gradient, **place)


class Run:
    """The two sides of a boundary, with their memories; what passes between them is bytes."""

    def __init__(self, trial: Trial):
        self._trial = trial
        self._memories: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        self.packets: list[Tensor] = []

    def exchange(self, activation: Tensor, gradient: Tensor, **place: Any) -> tuple[Tensor, Tensor]:
        """Send `activation` forward and `gradient` of the same micro-batch back; what arrives.

        Warm-up messages of the same shapes have crossed before.
        """
        forward, backward = self._trial.codecs
        for memory in self._memories:
            for codec, x, direction in ((forward, activation, "forward"), (backward, gradient, "backward")):
                if isinstance(codec, Observes):
                    warmup = normal(TensorSpec.of(x), seed=5)
                    codec.observe(warmup, Context(**{**place, "direction": direction}, memory=memory))
        stashes: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        left, right = zip(stashes, self._memories)
        return (
            self._send(forward, activation, left, right, {**place, "direction": "forward"}),
            self._send(backward, gradient, right, left, {**place, "direction": "backward"}),
        )

    def _send(self, codec: Codec, x: Tensor, source: Any, target: Any, place: dict[str, Any]) -> Tensor:
        spec, before = TensorSpec.of(x), x.clone()
        sender = Context(**place, stash=source[0], memory=source[1])
        receiver = Context(**place, stash=target[0], memory=target[1])
        with_sender = Context(**place, stash=dict(target[0]), memory=dict(target[1]))
        held = [(value, value.clone()) for memory in self._memories for value in memory.values()]

        parts = self._called("encode", spec, codec.encode, x, sender)
        self._check_layout(codec, parts, spec)
        self._expect(same(x, before), "encode modifies its input", spec)
        packet, views = _packed(parts, x.device)
        self.packets.append(packet.clone())

        arrived = self._called("decode", spec, codec.decode, views, spec, receiver)
        came = TensorSpec.of(arrived)
        self._expect(came == spec, f"decode returns {came} on {came.device}", spec)
        self._expect(torch.equal(packet, self.packets[-1]), "decode modifies its parts", spec)
        again = self._called("decode", spec, codec.decode, views, spec, with_sender)
        self._expect(same(arrived, again), "decodes the same parts to something else the second time", spec)
        for kept in _tensors([receiver.stash, receiver.memory]):
            self._expect(
                not _shares(kept, packet), "keeps a view of the packet, whose memory is used again", spec
            )
        for old, copy in held:
            self._expect(same(old, copy), "modifies an entry of ctx.memory instead of replacing it", spec)
        for entry in (value for memory in self._memories for value in memory.values()):
            self._expect(entry.is_contiguous(), "leaves an entry in ctx.memory that is not contiguous", spec)

        arrived = arrived.clone()
        packet.fill_(GARBAGE)
        return arrived

    def _check_layout(self, codec: Codec, parts: tuple[Tensor, ...], spec: TensorSpec) -> None:
        layout: Layout = self._called("layout", spec, codec.layout, spec)
        if isinstance(codec, SecondPacket):
            layout += self._called("rest", spec, codec.rest, parts[: len(layout)], spec)
        made = tuple((tuple(part.shape), part.dtype) for part in parts)
        self._expect(made == tuple(layout), f"encode makes {made}, layout says {tuple(layout)}", spec)
        at_home = all(part.device == spec.device for part in parts)
        self._expect(at_home, f"encode makes parts that are not on {spec.device}", spec)

    def _called(self, name: str, spec: TensorSpec, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except CompressionError as error:
            self._trial.fail(f"refuses, in {name}, what it does not declare to refuse ({error})", spec)
        except Exception as error:
            self._trial.fail(f"{name} raised {in_one_line(error)}", spec)

    def _expect(self, held: object, what: str, spec: TensorSpec) -> None:
        self._trial.expect(held, what, spec)


def normal(spec: TensorSpec, seed: int = 0) -> Tensor:
    """Standard normal values, the same on every device."""
    return _randn(spec.shape, seed).to(spec.device, spec.dtype)


def kinds(spec: TensorSpec, seed: int = 0) -> dict[str, Tensor]:
    """Messages by what they are made of; `spec` has elements."""
    x, y = _randn((2, *spec.shape), seed)
    outlier, alone = x.clone(), torch.zeros_like(x)
    outlier.view(-1)[spec.numel // 2] = 1000.0
    alone.view(-1)[spec.numel // 3] = -2.0
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
        "one value and zeros": alone,
        "tiny values": x * 2.0 ** -(far - 2),
        "huge values": x * 2.0**far,
    }
    return {name: x.to(spec.device, spec.dtype) for name, x in made.items()}


def _randn(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def same(a: Tensor, b: Tensor) -> bool:
    """Whether shapes and values are equal, nan being equal to nan."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def relative_error(x: Tensor, y: Tensor) -> float:
    """||x - y|| / ||x||; 0 where both are 0."""
    norm, error = x.double().norm(), (x.double() - y.double()).norm()
    return (error / norm).item() if error else 0.0


def _packed(parts: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A packet of `parts`, and the views of it that the receiver decodes."""
    sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
    packet = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    views = tuple(
        place[: part.nbytes].view(part.dtype).view(part.shape).copy_(part)
        for place, part in zip(packet.split(sizes), parts)
    )
    return packet, views


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those in `value`: in containers, and in what objects hold."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))


def _shares(tensor: Tensor, packet: Tensor) -> bool:
    start = packet.data_ptr()
    return tensor.numel() > 0 and start <= tensor.data_ptr() < start + packet.numel()
