"""Whether a model computes in parts what it computes whole: found out on a small one of the same class.

Every model is checked so, at start-up, before a weight is read: a family that hands more than hidden states
from layer to layer, or computes with a module that a part lacks, is refused and never trained wrong.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ds_compress.errors import CompressionError, in_one_line
from ds_compress.hf.loss import causal_lm_loss
from ds_compress.hf.part import Part, places
from ds_compress.hf.skeleton import Anatomy, Skeleton, layer_list, limbs
from ds_compress.hf.small import small

TOLERANCE = 1e-5
"""Of the difference in norm, relative to the norm of the whole model's."""

LENGTHS = (13, 11)
"""Of the two documents that the check packs into a sequence."""


def check(config: PretrainedConfig, positions: bool) -> Anatomy:
    """How a model with this config comes apart, computed in parts as a whole: logits and gradients compared.

    Args:
        config: of the model; nothing of its size is built.
        positions: whether the parts are to be told where documents begin.

    Raises:
        CompressionError: it does not come apart, or computes something else then.
    """
    name = type(config).__name__
    for key in ("layerdrop", "output_router_logits"):
        if getattr(config, key, False):
            raise CompressionError(f'{name}: "{key}" is not supported in a pipeline: switch it off')
    if getattr(config, "quantization_config", None) is not None:
        raise CompressionError(f"{name}: quantized checkpoints are not supported")
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            return _checked(small(config), positions)
    except CompressionError as error:
        raise CompressionError(f"{name}: this model cannot be cut into stages: {error}") from None
    except Exception as error:  # whatever a model runs into that lacks most of itself
        raise CompressionError(
            f"{name}: this model cannot be cut into stages: its parts do not run alone: {in_one_line(error)}"
        ) from error


def _checked(config: PretrainedConfig, positions: bool) -> Anatomy:
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in whole.parameters():  # no bias or gain that hides a mistake
        parameter.data += 0.02 * torch.randn_like(parameter)
    anatomy = _anatomy(whole)
    skeleton = Skeleton(config, torch.float32, anatomy)
    parts = [Part(skeleton, place) for place in places(config.num_hidden_layers)]
    weights = dict(whole.state_dict(keep_vars=True))
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in whole.named_parameters()}
    copies |= {
        name: copies[_first_name(whole, p)]
        for name, p in weights.items()
        if name not in copies and isinstance(p, nn.Parameter)
    }
    for part in parts:
        for name, _ in list(part.model.named_parameters()):
            _assign(part.model, name, copies[name])
        part.eval()
    ids = torch.randint(config.vocab_size, (2, sum(LENGTHS)), dtype=torch.int64, device="cpu")
    where = (
        torch.cat([torch.arange(length, dtype=torch.int64, device="cpu") for length in LENGTHS]).repeat(2, 1)
        if positions
        else None
    )
    if where is not None:
        _isolated(whole, ids, where)
    expected = whole(ids, use_cache=False, **({} if where is None else {"position_ids": where})).logits
    x: Any = ids if where is None else (ids, where)
    for part in parts:
        x = part(x)
    _compare("logits", x, expected)
    causal_lm_loss(expected, ids).backward()
    causal_lm_loss(x, ids).backward()
    expected_gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    ours = {name: copies[name].grad for name in expected_gradients}
    lost = [name for name, gradient in ours.items() if gradient is None]
    if lost:
        raise CompressionError(f"{lost[0]} and {len(lost) - 1} more belong to no part")
    _compare("gradients", _joined(ours), _joined(expected_gradients))
    return anatomy


def _joined(tensors: Mapping[str, Tensor | None]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values() if tensor is not None])


def _isolated(model: PreTrainedModel, ids: Tensor, where: Tensor) -> None:
    """Refuse a model whose tokens attend to documents before their own."""
    other = torch.cat([(ids[:, : LENGTHS[0]] + 1) % model.config.vocab_size, ids[:, LENGTHS[0] :]], dim=1)
    with torch.no_grad():
        one, two = (
            model(x, position_ids=where, use_cache=False).logits[:, LENGTHS[0] :] for x in (ids, other)
        )
    if not torch.allclose(one, two, rtol=1e-4, atol=1e-5):
        raise CompressionError('it does not keep documents in one sequence apart; choose "packing": "joined"')


def _first_name(model: nn.Module, parameter: Tensor) -> str:
    return next(name for name, known in model.named_parameters() if known is parameter)


def _assign(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, parameter)


def _compare(what: str, ours: Tensor, expected: Tensor) -> None:
    difference = float(((ours - expected).norm() / expected.norm()).detach())
    if not difference <= TOLERANCE:
        raise CompressionError(
            f"its {what} in parts are not those of the whole: relative difference {difference:.2g}, "
            f"allowed {TOLERANCE:g}"
        )


def _anatomy(model: PreTrainedModel) -> Anatomy:
    """Which limbs run before the layers and which after them, in a forward pass of the whole model."""
    layers = layer_list(model)
    hanging, each = limbs(model, layers), list(model.get_submodule(layers).children())
    ran: list[str] = []
    returned: list[Any] = []

    def ended(module: nn.Module, args: Any, output: Any) -> None:
        ran.append("")
        returned.append(output)

    hooks = [
        module.register_forward_pre_hook(lambda module, args, path=path: ran.append(path))
        for path, module in {**hanging, layers: each[0]}.items()
    ]
    hooks.append(each[-1].register_forward_hook(ended))
    with torch.no_grad():
        model(
            torch.randint(model.config.vocab_size, (1, 8), dtype=torch.int64, device="cpu"), use_cache=False
        )
    for hook in hooks:
        hook.remove()
    if ran.count(layers) != 1 or ran.count("") != 1:
        raise CompressionError("its layers do not run once each")
    first, end = ran.index(layers), ran.index("")
    before, between, after = ran[:first], ran[first + 1 : end], ran[end + 1 :]
    embedding = next((path for path, module in hanging.items() if module is model.get_input_embeddings()), "")
    twice = [path for path in hanging if (path in before) + (path in between) + (path in after) > 1]
    if between or twice:
        raise CompressionError(f"{(between + twice)[0]} runs among its layers, not only before or after them")
    if not embedding:
        raise CompressionError("its embedding of tokens is inside another module, not beside the layers")
    if embedding not in before:
        raise CompressionError(f"its embedding {embedding} does not run before its layers")
    unique = tuple(dict.fromkeys(path for path in before if path != embedding))
    members = len(returned[0]) if isinstance(returned[0], tuple) else 0
    return Anatomy(layers, embedding, unique, tuple(dict.fromkeys(after)), members)
