"""Models of options, and their validation.

Errors of pydantic become one line: JSON path, the value that came, what is allowed, the most similar name.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_compress.errors import CompressionError, did_you_mean, shown, shown_key

Model = TypeVar("Model", bound=BaseModel)

Steps = Annotated[int, Field(ge=0, le=10**9)]
"""Number of training steps."""


REMOVED = {
    "relax": "use 'stop', and give the run milder settings",
    "policy": "of messages it stands beside 'forward'; between replicas 4 bits with 'ef' send less",
    "budget": "recipe 'auto' picks codecs within an error budget",
    "rotate": "a product with a basis takes longer than sending; give codec 'entropy' 0.4 bits more",
    "refresh_steps": "there is no basis to refresh; leave it out",
    "contexts": "one table serves; 0.2 bits more make up for it",
    "grid": "steps are equal; leave it out, or use codec 'entropy'",
    "scheme": "grids reach from the smallest to the largest value of a group; leave it out",
    "scale_dtype": "scales are bf16; leave it out, or use codec 'minmax', whose range is fp32",
    "group_size: tensor": "use 128, or codec 'minmax', which has one range for the tensor",
    "quant3": "use 'balanced', or 'quant4'",
    "prompt": "`ds-compress merge` writes a folder that transformers can generate text from",
    "acsgd": "docs/write-a-codec.md has it as an example: import its file, commands with --import",
    "subspace": "recipe 'aggressive' loses less in as many bytes",
}
"""Keys and values of release 0.3 that are gone, and what to use instead."""


BESIDE_WORDS = {
    "model_type": "an object",
    "int_type": "an integer",
    "list_type": "a list",
    "bool_type": "true or false",
}
"""What an option may be beside the words that it allows, by what pydantic says of another word."""


class Options(BaseModel):
    """Base of every options model; refuses unknown keys, wrong types, inf and nan."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def validate(model: type[Model], value: object, path: str) -> Model:
    """Validate `value` and return it as an instance of `model`.

    Validators of models raise a ValueError whose text continues the line after the value ("is not allowed;
    allowed: ..."), or a CompressionError that begins with the option's name, as `Registry.build` does.

    Raises:
        CompressionError: the first thing wrong with `value`, at its JSON path below `path`.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        line = _one_line(model, value, error, path)
    raise CompressionError(line)


def _one_line(model: type[BaseModel], value: object, error: ValidationError, path: str) -> str:
    # report a misspelt key before the missing key that it causes
    """Format the most specific problem of a ValidationError as one line."""
    found = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] == "missing")
    problems = [(_keys(value, problem), problem) for problem in found]
    first = problems[0][0]
    # a value of a union type has a problem for each member type: report the most deeply nested one and, for
    # a string, the one of the literal type; for a list of a wrong size, that
    same = [(keys, problem) for keys, problem in problems if keys[: len(first)] == first]
    keys, problem = max(
        same,
        key=lambda found: (
            len(found[0]),
            found[1]["type"] in ("too_short", "too_long")
            or (found[1]["type"] == "literal_error" and isinstance(found[1]["input"], str)),
        ),
    )
    others = len({keys for keys, _ in problems if keys[: len(first)] != first})
    rest = f" (problems in all: {others + 1})" if others else ""
    inner = problem.get("ctx", {}).get("error")
    if isinstance(inner, CompressionError):
        return f"{_extend_path(path, keys[:-1])}.{inner}{rest}"
    reason = _reason(model, problem, keys, [problem["type"] for _, problem in same])
    return f"{_extend_path(path, keys)}: {' '.join(reason.split())}{rest}"


def _keys(value: Any, problem: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the keys at which a problem is: its `loc` without what pydantic adds, such as type names."""
    keys: list[Any] = []
    for part in problem["loc"]:
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
        elif problem["type"] != "missing" or part != problem["loc"][-1]:
            continue
        keys.append(part)
    return tuple(keys)


def _extend_path(path: str, keys: tuple[Any, ...]) -> str:
    """Return a JSON path with more keys."""
    return ".".join([path, *map(shown_key, keys)])


def _reason(
    model: type[BaseModel], problem: Mapping[str, Any], keys: tuple[Any, ...], kinds: list[str]
) -> str:
    """Describe a problem: the value that came and what is allowed.

    Args:
        kinds: types of all problems of this value.
    """
    came = shown(problem["input"])
    if problem["type"] == "extra_forbidden":
        known = _fields_at(model, keys[:-1])
        homes = [key for key in known if keys[-1] in _fields_at(model, (*keys[:-1], key))]
        hint = f" (it belongs in {', '.join(map(repr, homes))})" if homes else instead(keys[-1], known)
        return f"unknown key{hint}; allowed: {', '.join(known) or 'none'}"
    if problem["type"] == "missing":
        return "missing"
    if problem["type"] == "literal_error":
        allowed = problem["ctx"]["expected"].replace(" or ", ", ")
        names = [word.strip("'") for word in allowed.split(", ")]
        also = "".join(f", or {name}" for kind, name in BESIDE_WORDS.items() if kind in kinds)
        return f"{came} is not allowed{instead(problem['input'], names)}; allowed: {allowed}{also}"
    if problem["type"] in ("model_type", "dict_type"):
        return f"{came} is not allowed: should be an object"
    if problem["type"] == "value_error":  # raised by a validator of this package
        return f"{came} {problem['ctx']['error']}"
    is_word = keys and isinstance(problem["input"], str)
    removed = instead(f"{keys[-1]}: {problem['input']}", []) if is_word else ""
    return f"{came} is not allowed{removed}: {problem['msg'].replace('Input should', 'should')}"


def instead(word: object, known: list[str]) -> str:
    """Return what to use for `word` if it was removed, else the most similar known name."""
    if isinstance(word, str) and word in REMOVED:
        return f" (removed: {REMOVED[word]})"
    return did_you_mean(word, known)


def _fields_at(model: type[BaseModel], keys: tuple[Any, ...]) -> list[str]:
    """Return the field names of the model found at `keys` below `model`."""
    for part in keys:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if nested:
            model = nested[0]
    return list(model.model_fields)
