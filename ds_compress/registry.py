"""Things found by name (codecs and feedbacks), each with its own options model, and how options are checked.

pydantic's errors become one line: JSON path, what came, what is allowed, the nearest name.
"""

from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ds_compress.errors import CompressionError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)


class Options(BaseModel):
    """Base of every options model: unknown keys and values of the wrong type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class Named:
    """What a registry holds: a class with a name and an options model."""

    Options: ClassVar[type[Options]] = Options
    name: ClassVar[str]

    @classmethod
    def summary(cls) -> str:
        """First line of the class's docstring."""
        return (cls.__doc__ or "").strip().splitlines()[0]

    def __init__(self, options: Options | None = None):
        self.options: Any = options if options is not None else self.Options()

    def __str__(self) -> str:
        """Name and the options that were given, for logs."""
        given = ", ".join(
            f"{key}={getattr(self.options, key)}" for key in sorted(self.options.model_fields_set)
        )
        return f"{self.name}({given})" if given else self.name

    @property
    def settings(self) -> dict[str, Any]:
        """Name and every option with its value, as JSON types."""
        return {"name": self.name, **self.options.model_dump(mode="json")}


Kind = TypeVar("Kind", bound=Named)


class Registry(Generic[Kind]):
    """Name to class, for one `kind` of thing."""

    def __init__(self, kind: str):
        self.kind = kind
        self._classes: dict[str, type[Kind]] = {}

    def register(self, name: str):
        """Class decorator that makes a class known as `name`; a second one of that name is refused."""

        def add(cls: type[Kind]) -> type[Kind]:
            if name in self._classes:
                taken = self._classes[name].__qualname__
                raise CompressionError(f"{self.kind} {name!r} is already registered by {taken}")
            cls.name = name
            self._classes[name] = cls
            return cls

        return add

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._classes)

    def find(self, name: object, path: str) -> type[Kind]:
        """The class registered as `name`; `path` is the JSON path that an error names."""
        if not isinstance(name, str) or name not in self._classes:
            raise CompressionError(
                f"{path}: {name!r} is not registered{did_you_mean(name, self.names())}; known: "
                f"{self._known()}"
            )
        return self._classes[name]

    def build(self, choice: object, path: str) -> Kind:
        """Build what a JSON value describes.

        Args:
            choice: a name, or a dict of `"name"` and options.
            path: JSON path of `choice`, for errors.

        Raises:
            CompressionError: unknown name, unknown option or a value that is not allowed.
        """
        if isinstance(choice, str):
            return self.find(choice, path)()
        if not isinstance(choice, dict):
            raise CompressionError(
                f"{path}: {choice!r} is neither a name nor an object with a name; known: {self._known()}"
            )
        if "name" not in choice:
            raise CompressionError(f"{path}.name: missing; known: {self._known()}")
        cls = self.find(choice["name"], f"{path}.name")
        return cls(
            validate(cls.Options, {key: value for key, value in choice.items() if key != "name"}, path)
        )

    def _known(self) -> str:
        return ", ".join(self.names())


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
