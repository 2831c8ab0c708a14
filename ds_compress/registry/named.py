"""Registries: classes found by name (codecs, feedbacks, policies), each with an options model."""

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar, cast

from ds_compress.errors import CompressionError, shown
from ds_compress.registry.options import Options, instead, validate


class Named:
    """Base of the classes in a registry: a name and an options model."""

    Options: ClassVar[Any] = Options  # a subclass of it
    name: str

    @classmethod
    def summary(cls) -> str:
        """Return the first paragraph of the class's docstring in one line; empty if there is none, as
        under `python -OO`."""
        return " ".join((cls.__doc__ or "").split("\n\n")[0].split())

    def __init__(self, options: Any = None):
        self.options: Any = options if options is not None else self.Options()

    def __str__(self) -> str:
        """Format the name and the options that were set, for logs."""
        given = ", ".join(
            f"{key}={getattr(self.options, key)}" for key in sorted(self.options.model_fields_set)
        )
        return f"{self.name}({given})" if given else self.name

    @property
    def settings(self) -> dict[str, Any]:
        """Name and every option with its value, as JSON types."""
        return {"name": self.name, **self.options.model_dump(mode="json")}


Kind = TypeVar("Kind", bound=Named)
Member = TypeVar("Member", bound=Named)


class Registry(Generic[Kind]):
    """Maps names to classes of one `kind`, all of which derive from `base`."""

    def __init__(self, kind: str, base: type[Named]):
        self.kind = kind
        self._base = base
        self._classes: dict[str, type[Kind]] = {}

    def register(self, name: str) -> Callable[[type[Member]], type[Member]]:
        """Return a class decorator that registers a class as `name`.

        Raises:
            CompressionError: the name is taken or empty, or the class is not of this kind.
        """

        def add(cls: type[Member]) -> type[Member]:
            mistake = self._mistake(name, cls)
            if mistake:
                raise CompressionError(f"{self.kind} {shown(name)}: {mistake}")
            cls.name = name
            self._classes[name] = cast(type[Kind], cls)
            return cls

        return add

    def _mistake(self, name: object, cls: type[Named]) -> str:
        """Return why `cls` cannot be registered as `name`, or an empty string."""
        if not isinstance(name, str) or not name:
            return "a name is a string with something in it"
        if not isinstance(cls, type) or not issubclass(cls, self._base):
            return f"{shown(cls)} does not derive from {self._base.__name__}"
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        if missing:
            return f"{cls.__qualname__} does not define {', '.join(missing)}"
        if not issubclass(cls.Options, Options):
            return f"{cls.__qualname__}.Options does not derive from CodecOptions, so unknown keys would pass"
        if "name" in cls.Options.model_fields:
            return f'{cls.__qualname__}.Options has an option "name", which is the key of the name'
        if name in self._classes:
            return f"already registered by {self._classes[name].__qualname__}"
        return ""

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        return sorted(self._classes)

    def find(self, name: object, path: str) -> type[Kind]:
        """Return the class registered as `name`.

        Args:
            path: JSON path of the name, for errors.

        Raises:
            CompressionError: no such name.
        """
        if not isinstance(name, str) or name not in self._classes:
            near = instead(name, self.names())
            own = "" if near else "; one of your own is known once its module is imported (--import)"
            known = f"known: {', '.join(self.names())}{own}"
            raise CompressionError(f"{path}: {shown(name)} is not registered{near}; {known}")
        return self._classes[name]

    def build(self, choice: object, path: str) -> Kind:
        """Build an instance from a JSON value.

        Args:
            choice: a name, or a dict with `"name"` and options.
            path: JSON path of `choice`, for errors.

        Raises:
            CompressionError: unknown name, unknown option or a value that is not allowed.
        """
        if isinstance(choice, str):
            cls = self.find(choice, path)
            return cls(validate(cls.Options, {}, path))
        known = ", ".join(self.names())
        if not isinstance(choice, dict):
            raise CompressionError(
                f"{path}: {shown(choice)} is neither a name nor an object with a name; known: {known}"
            )
        if "name" not in choice:
            raise CompressionError(f"{path}.name: missing; known: {known}")
        cls = self.find(choice["name"], f"{path}.name")
        options = {key: value for key, value in choice.items() if key != "name"}
        return cls(validate(cls.Options, options, path))
