"""Things found by name (codecs and feedbacks), each with its own options model."""

import ast
import inspect
import textwrap
from typing import Any, ClassVar, Generic, TypeVar

from ds_compress.errors import CompressionError, did_you_mean, shown
from ds_compress.registry.options import Options, validate


class Named:
    """What a registry holds: a class with a name and an options model."""

    Options: ClassVar[Any] = Options  # a subclass of it
    name: str

    @classmethod
    def summary(cls) -> str:
        """First paragraph of the class's docstring, in one line; empty if there is none."""
        return " ".join(_docstring(cls).split("\n\n")[0].split())

    def __init__(self, options: Any = None):
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


def _docstring(cls: type) -> str:
    """Read from the source where `python -OO` has thrown it away, as pydantic reads those of options."""
    if cls.__doc__:
        return inspect.cleandoc(cls.__doc__)
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):  # typed in by hand, or its file is gone
        return ""
    return (ast.get_docstring(definition) if isinstance(definition, ast.ClassDef) else None) or ""


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
                f"{path}: {shown(name)} is not registered{did_you_mean(name, self.names())}; known: "
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
                f"{path}: {shown(choice)} is neither a name nor an object with a name; known: {self._known()}"
            )
        if "name" not in choice:
            raise CompressionError(f"{path}.name: missing; known: {self._known()}")
        cls = self.find(choice["name"], f"{path}.name")
        return cls(
            validate(cls.Options, {key: value for key, value in choice.items() if key != "name"}, path)
        )

    def _known(self) -> str:
        return ", ".join(self.names())
