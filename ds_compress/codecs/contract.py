"""The promises of a codec as checks, for the codecs here and for anyone's own.

    from ds_compress import check_codec

    check_codec("mine")                               its defaults, if it has any, and all its `examples`
    check_codec({"name": "mine", "bits": 4})          one setting

Each check sends tensors forward over a boundary of its own, and others back, as bytes. What breaks a promise
is an AssertionError of one line. Only torch is used.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ds_compress.codec import CODECS, TensorSpec
from ds_compress.codecs.contract_trial import Run, Trial, kinds, normal, relative_error, same

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((), (0,), (1,), (3, 5), (2, 0, 4), (2, 7, 13), (4, 128), (2, 3, 256))
ORDINARY = ((2, 4, 256), (8, 33, 65))
LONG = (2, 160, 257)  # where other kernels may take over
MEAN_OF = 64  # messages, where a codec says that their mean is unbiased


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
            check(Trial(setting, backward, torch.device(device)))


def settings_of(choice: object) -> list[Any]:
    """What is checked for `choice`: the settings that a name stands for."""
    if not isinstance(choice, str):
        return [choice]
    cls = CODECS.find(choice, "codec")
    has_defaults = not any(field.is_required() for field in cls.Options.model_fields.values())
    found: list[dict[str, Any]] = [{}] if has_defaults else []
    found += [options for options in cls.examples if options not in found]
    return [{"name": choice, **options} for options in found]


def check_shapes_and_dtypes(trial: Trial) -> None:
    """Every tensor that the codec does not declare to refuse arrives, finite, in its shape and dtype."""
    for shape in ORDINARY:
        if not any(trial.specs([shape], DTYPES[:3])):
            why = trial.refusal(TensorSpec(shape, DTYPES[0], trial.device))
            trial.fail(f"refuses {list(shape)} in fp32, bf16 and fp16: {why}")
    for spec in trial.specs(SHAPES + ORDINARY, DTYPES):
        for arrived in trial.exchange(normal(spec), normal(spec, seed=1)):
            trial.expect(arrived.isfinite().all(), "decodes finite values to inf or nan", spec)


def check_determinism(trial: Trial) -> None:
    """Equal contexts give equal bytes, whatever was sent before and whatever else is random or default."""
    for spec in trial.specs(((3, 5), (2, 3, 256), LONG), DTYPES[:3]):
        x, g = normal(spec), normal(spec, seed=1)
        used = trial.rebuilt()
        used.exchange(g, x, step=3)
        runs = Run(trial.rebuilt()), Run(used)
        surroundings: tuple[AbstractContextManager[None], ...] = nullcontext(), _otherwise()
        for run, surrounding in zip(runs, surroundings):
            with surrounding:
                for step in range(2):
                    run.exchange(x, g, step=step, seed=7)
        equal = all(torch.equal(a, b) for a, b in zip(runs[0].packets, runs[1].packets, strict=True))
        trial.expect(equal, "sends other bytes for an equal message and context", spec)


@contextmanager
def _otherwise() -> Iterator[None]:
    """Another default dtype and device, and global generators in another state."""
    dtype, state = torch.get_default_dtype(), torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_rng_state(state)


def check_memory_order(trial: Trial) -> None:
    """A tensor that is not contiguous arrives as its contiguous copy does."""
    for dtype in DTYPES:
        wide = normal(TensorSpec((6, 4, 256), dtype, trial.device))
        strided = (
            wide.transpose(0, 1),
            wide[:, :, ::2],
            wide[1::3].permute(2, 1, 0),
            wide[:, :1].expand(-1, 4, -1),
        )
        for x in strided:
            if not trial.refusal(TensorSpec.of(x)):
                pairs = zip(trial.exchange(x, x), trial.exchange(x.contiguous(), x.contiguous()))
                equal = all(same(a, b) for a, b in pairs)
                trial.expect(equal, f"depends on the memory order (strides {x.stride()})", TensorSpec.of(x))


def check_zeros(trial: Trial) -> None:
    """Zeros arrive as zeros."""
    for spec in trial.specs(SHAPES, DTYPES):
        zeros = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
        for arrived in trial.exchange(zeros, zeros):
            trial.expect(same(arrived, zeros), "makes something of zeros", spec)


def check_non_finite(trial: Trial) -> None:
    """inf or nan anywhere in a tensor makes what arrives not finite, so that loss scaling sees it."""
    for spec in (*trial.specs(((1,), (3, 5), (2, 3, 256)), DTYPES), *trial.specs([LONG], DTYPES[:2])):
        ordinary = normal(spec)
        for value in (math.inf, -math.inf, math.nan):
            bad = ordinary.clone()
            bad.view(-1)[spec.numel // 2] = value
            there, _ = trial.exchange(bad, ordinary)
            _, back = trial.exchange(ordinary, bad)
            seen = not there.isfinite().all() and not back.isfinite().all()
            trial.expect(seen, f"hides {value}: all that it decodes is finite", spec)


def check_scale(trial: Trial) -> None:
    """C(s x) = s C(x) from 1e-30 to 1e30, with powers of two for s, which cost no precision themselves."""
    for spec in trial.specs(ORDINARY[:1], DTYPES):
        half = spec.dtype == torch.float16
        powers, spacing = ((-3, 3), 2.0**-24) if half else ((-98, -40, -3, 3, 40, 98), 0)
        x, g = normal(spec), normal(spec, seed=1)
        plain = trial.exchange(x, g)
        for power in powers:
            scaled = trial.exchange(x * 2.0**power, g * 2.0**power)
            for arrived, once in zip(scaled, plain):
                expected = once.double() * 2.0**power
                tolerance = 1e-6 * expected.abs().max() + spacing
                near = (arrived.double() - expected).abs().max() <= tolerance
                trial.expect(near, f"does not scale: C(2^{power} x) is not 2^{power} C(x)", spec)


def check_error_bound(trial: Trial) -> None:
    """No message of any kind loses more than the codec declares."""
    for spec in trial.specs(((3, 5), (2, 7, 130)), DTYPES):
        gradients = kinds(spec, seed=1)
        for name, x in kinds(spec).items():
            sent = x, gradients[name]
            for codec, x, arrived in zip(trial.codecs, sent, trial.exchange(*sent)):
                bound = codec.error_bound(spec)
                trial.expect(bound < math.inf, "declares no error_bound", spec)
                _hold(trial, x, arrived, bound, f"of {name}, its error_bound is")


def check_gaussian_error(trial: Trial) -> None:
    """Normal values lose no more than declared, and less than if zeros were sent."""
    for spec in trial.specs(((4, 128), *ORDINARY, LONG), DTYPES[:3]):
        sent = normal(spec, seed=2), normal(spec, seed=3)
        for codec, x, arrived in zip(trial.codecs, sent, trial.exchange(*sent)):
            bound = codec.gaussian_error_bound(spec)
            useful = bound < 1 or codec.unbiased
            trial.expect(useful, f"may lose {bound:.3g} of normal values; sending zeros loses 1", spec)
            _hold(trial, x, arrived, bound, "of normal values, its gaussian_error_bound is")


def check_unbiased(trial: Trial) -> None:
    """Where a codec says so, the mean of many messages approaches what was sent."""
    if not any(codec.unbiased for codec in trial.codecs):
        return
    for spec in trial.specs(ORDINARY[:1], DTYPES[:1]):
        sent = normal(spec), normal(spec, seed=1)
        messages = [trial.exchange(*sent, step=step) for step in range(MEAN_OF)]
        for codec, x, arrived in zip(trial.codecs, sent, zip(*messages)):
            bound = 1.5 * codec.gaussian_error_bound(spec) / math.sqrt(MEAN_OF) + 0.05
            error = relative_error(x, torch.stack(arrived).double().mean(0))
            what = f"says it is unbiased; the mean of {MEAN_OF} messages is {error:.3g} off, not {bound:.3g}"
            trial.expect(error <= bound or not codec.unbiased, what, spec)


def _hold(trial: Trial, x: Tensor, arrived: Tensor, bound: float, what: str) -> None:
    """Hold the error of `arrived` to `bound`, which is exact at 0 and before rounding elsewhere."""
    error = relative_error(x, arrived)
    rounding = max(torch.finfo(x.dtype).eps, 2.0**-22) if bound else 0.0
    held = error <= bound * (1 + 1e-4) + rounding
    trial.expect(held, f"loses {error:.4g} {what} {bound:.4g}", TensorSpec.of(x))


CHECKS: tuple[Callable[[Trial], None], ...] = (
    check_shapes_and_dtypes,
    check_determinism,
    check_memory_order,
    check_zeros,
    check_non_finite,
    check_scale,
    check_error_bound,
    check_gaussian_error,
    check_unbiased,
)
