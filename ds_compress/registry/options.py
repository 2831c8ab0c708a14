"""Options models and how they are checked.

pydantic's errors become one line: JSON path, what came, what is allowed, the nearest name.
"""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ds_compress.errors import CompressionError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)


class Options(BaseModel):
    """Base of every options model: unknown keys and values of the wrong type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


def validate(model: type[Model], value: object, path: str) -> Model:
    """`value` as an instance of `model`.

    Raises:
        CompressionError: the first thing wrong with `value`, at its JSON path below `path`.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise CompressionError(_one_line(model, error, path)) from None


def _one_line(model: type[BaseModel], error: ValidationError, path: str) -> str:
    problems = error.errors(include_url=False)
    first = problems[0]
    loc = [part for part in first["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    where = ".".join([path, *map(str, loc)])
    rest = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{where}: {_reason(model, first, loc)}{rest}"


def _reason(model: type[BaseModel], problem: dict[str, Any], loc: list[Any]) -> str:
    came = problem["input"]
    if problem["type"] == "extra_forbidden":
        known = _fields_at(model, loc[:-1])
        return f"unknown key{did_you_mean(loc[-1], known)}; allowed: {', '.join(known) or 'none'}"
    if problem["type"] == "missing":
        return "missing"
    if problem["type"] == "literal_error":
        allowed = problem["ctx"]["expected"].replace(" or ", ", ")
        names = [word.strip("'") for word in allowed.split(", ")]
        return f"{came!r} is not allowed{did_you_mean(came, names)}; allowed: {allowed}"
    if problem["type"] in ("model_type", "dict_type"):
        return f"{came!r} is not allowed: should be an object"
    if problem["type"] == "value_error":  # raised by a validator of ours, in our own words
        return f"{came!r}: {problem['ctx']['error']}"
    return f"{came!r} is not allowed: {problem['msg'].replace('Input should', 'should')}"


def _fields_at(model: type[BaseModel], loc: list[Any]) -> list[str]:
    """Names of the fields of the model found at `loc` below `model`."""
    for part in loc:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if nested:
            model = nested[0]
    return list(model.model_fields)
