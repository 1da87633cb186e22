"""Names to factories. Registration stands beside the implementation; a spec such as ``noise:sigma=0.1`` builds one.

>>> fruits: Registry[str] = Registry("fruit")
>>> @fruits.register("apple")
... def apple(*, colour: str = "red", count: int = 1) -> str:
...     '''A round fruit.'''
...     return " ".join([colour] * count) + " apple"
>>> fruits.build("apple:count=2")
'red red apple'
>>> fruits.canonical("apple: count=2,colour=red")
'apple:colour=red,count=2'
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, TypeVar

from gradveil.core.errors import GradveilError, UnknownNameError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[T]):
    """Factories by name. Keyword-only arguments of a factory are its options; positional ones come from the caller."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._factories: dict[str, Callable[..., T]] = {}

    def register(self, name: str) -> Callable[[F], F]:
        def keep(factory: F) -> F:
            if name in self._factories:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._factories[name] = factory
            return factory

        return keep

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._factories))

    def __contains__(self, name: object) -> bool:
        return name in self._factories

    def get(self, name: str) -> Callable[..., T]:
        if name not in self._factories:
            near = difflib.get_close_matches(name, self._factories, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(self)}"
            raise UnknownNameError(f"no {self.kind} is called {name!r}; {hint}")
        return self._factories[name]

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """The options of one entry: keyword-only parameters of its factory."""
        parameters = inspect.signature(self.get(name)).parameters
        return {key: p for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY}

    def summary(self, name: str) -> str:
        """The first line of the factory's docstring."""
        return (inspect.getdoc(self.get(name)) or "").partition("\n")[0]

    def parse(self, spec: str) -> tuple[str, dict[str, Any]]:
        """A spec as its name and checked options."""
        name, raw = split_spec(spec)
        factory, known = self.get(name), self.options(name)
        fields = dataclasses.is_dataclass(factory)  # theirs are resolved where each was declared
        hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) and not fields else factory)
        options = {}
        for key, text in raw.items():
            if key not in known:
                listed = ", ".join(f"{k}={_show(p.default)}" for k, p in known.items()) or "none"
                raise GradveilError(f"{self.kind} {name!r} has no option {key!r}; its options: {listed}")
            options[key] = value = _convert(text, hints.get(key, str), f"{self.kind} {name}: option {key}")
            if isinstance(value, float) and not math.isfinite(value):  # a search with it finds nothing, and looks safe
                raise GradveilError(f"{self.kind} {name}: {key}={text} is not a finite number")
        missing = [k for k, p in known.items() if p.default is p.empty and k not in options]
        if missing:
            raise GradveilError(f"{self.kind} {name!r} needs {missing[0]}=...: write {name}:{missing[0]}=VALUE")
        return name, options

    def build(self, spec: str, *context: Any) -> T:
        name, options = self.parse(spec)
        return self.get(name)(*context, **options)

    def canonical(self, spec: str) -> str:
        """The one spelling of a spec that digests and rows use: options sorted, values in Python's short form."""
        name, options = self.parse(spec)
        shown = ",".join(f"{key}={_show(options[key])}" for key in sorted(options))
        return f"{name}:{shown}" if shown else name


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """``name:key=value,key=value`` as name and raw options."""
    name, _, rest = spec.strip().partition(":")
    raw: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise GradveilError(f"cannot read {part!r} in {spec!r}; write NAME:OPTION=VALUE,OPTION=VALUE")
        if key.strip() in raw:
            raise GradveilError(f"option {key.strip()!r} stands twice in {spec!r}")
        raw[key.strip()] = value.strip()
    return name.strip(), raw


def _show(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "(required)"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _convert(text: str, hint: Any, what: str) -> Any:
    """Text as the annotated type: bool, int, float, str, a Literal, or an optional or union of those."""
    if typing.get_origin(hint) is Literal:
        choices = {str(choice): choice for choice in typing.get_args(hint)}
        if text not in choices:
            raise GradveilError(f"{what} is one of {', '.join(choices)}, not {text!r}")
        return choices[text]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _convert_union(text, typing.get_args(hint), what)
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise GradveilError(f"{what} is true or false, not {text!r}")
        return text.lower() == "true"
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            kind = "a whole number" if hint is int else "a number"
            raise GradveilError(f"{what} is {kind}, not {text!r}") from None
    return text


def _convert_union(text: str, members: tuple[Any, ...], what: str) -> Any:
    if type(None) in members and text.lower() == "none":
        return None
    complaint = GradveilError(f"{what} cannot be {text!r}")
    for member in (m for m in members if m is not type(None)):
        try:
            return _convert(text, member, what)
        except GradveilError as error:
            complaint = error
    raise complaint
