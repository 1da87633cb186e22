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
import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Literal, TypeVar

from gradveil.core.errors import SpecError, UnknownNameError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[T]):
    """Factories by name. Keyword-only arguments of a factory are its options; positional ones come from the caller."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._factories: dict[str, Callable[..., T] | str] = {}

    def register(self, name: str) -> Callable[[F], F]:
        def keep(factory: F) -> F:
            self._add(name, factory)
            return factory

        return keep

    def register_path(self, name: str, path: str) -> None:
        """Register the factory at ``package.module:name``, which is imported when it is first needed."""
        self._add(name, path)

    def _add(self, name: str, factory: Callable[..., T] | str) -> None:
        if name in self._factories:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._factories[name] = factory

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._factories))

    def __contains__(self, name: object) -> bool:
        return name in self._factories

    def get(self, name: str) -> Callable[..., T]:
        factory = find(self.kind, name, self._factories)
        if isinstance(factory, str):
            module, _, attribute = factory.partition(":")
            self._factories[name] = factory = getattr(importlib.import_module(module), attribute)
        return factory

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """The options of one entry: keyword-only parameters of its factory, with the types that they are read as."""
        return options_of(self.get(name))

    def summary(self, name: str) -> str:
        """The first line of the factory's docstring."""
        return (inspect.getdoc(self.get(name)) or "").partition("\n")[0]

    def parse(self, spec: str) -> tuple[str, dict[str, Any]]:
        """A spec as its name and checked options."""
        name, raw = split_spec(spec)
        return name, parse_options(self.kind, name, self.options(name), raw)

    def build(self, spec: str, *context: Any) -> T:
        name, options = self.parse(spec)
        return self.get(name)(*context, **options)

    def canonical(self, spec: str) -> str:
        """The one spelling of a spec that digests and rows use: options sorted, values in Python's short form."""
        return join_spec(*self.parse(spec))


def find(kind: str, name: str, table: Mapping[str, T]) -> T:
    """The entry of a table.

    Raises:
        UnknownNameError: if there is none of that name; the line suggests names that are like it.
    """
    if name not in table:
        near = difflib.get_close_matches(name, table, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(sorted(table))}"
        raise UnknownNameError(f"no {kind} is called {name!r}; {hint}")
    return table[name]


def options_of(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a function or class; their annotations are types, not text."""
    fields = dataclasses.is_dataclass(factory)  # theirs are resolved where each was declared
    hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) and not fields else factory)
    parameters = inspect.signature(factory).parameters.values()
    return {p.name: p.replace(annotation=hints.get(p.name, str)) for p in parameters if p.kind is p.KEYWORD_ONLY}


def parse_options(
    kind: str, name: str, known: Mapping[str, inspect.Parameter], raw: Mapping[str, str]
) -> dict[str, Any]:
    """The raw options of a spec as values of the annotated types.

    Raises:
        SpecError: if one is not known, is missing, or cannot be read as its type.
    """
    options = {}
    for key, text in raw.items():
        if key not in known:
            listed = ", ".join(f"{k}={_show(p.default)}" for k, p in known.items()) or "none"
            raise SpecError(f"{kind} {name!r} has no option {key!r}; its options: {listed}")
        options[key] = value = _convert(text, known[key].annotation, f"{kind} {name}: option {key}")
        if isinstance(value, float) and not math.isfinite(value):  # a search with it finds nothing, and looks safe
            raise SpecError(f"{kind} {name}: {key}={text} is not a finite number")
    for key, p in known.items():
        if p.default is p.empty and key not in options:
            raise SpecError(f"{kind} {name!r} needs {key}=...: write {name}:{key}=VALUE")
    return options


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """``name:key=value,key=value`` as name and raw options."""
    name, _, rest = spec.strip().partition(":")
    raw: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise SpecError(f"cannot read {part!r} in {spec!r}; write NAME:OPTION=VALUE,OPTION=VALUE")
        if key.strip() in raw:
            raise SpecError(f"option {key.strip()!r} stands twice in {spec!r}")
        raw[key.strip()] = value.strip()
    return name.strip(), raw


def join_spec(name: str, options: Mapping[str, Any]) -> str:
    """A name and options as a spec, in its one spelling."""
    shown = ",".join(f"{key}={_show(options[key])}" for key in sorted(options))
    return f"{name}:{shown}" if shown else name


def describe_object(thing: object) -> str:
    """An object that no registry built, in the spelling of a spec: its class and its public, plain attributes."""
    public = {name: value for name, value in vars(thing).items() if not name.startswith("_")}
    plain = {name: value for name, value in public.items() if isinstance(value, bool | int | float | str | None)}
    return join_spec(type(thing).__name__, plain)[:200]


def _show(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "(required)"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _convert(text: str, hint: Any, what: str) -> Any:
    """Text as the annotated type: bool, int, float, str, a Literal, or an optional or union of those."""
    if typing.get_origin(hint) is Literal:
        choices = {str(choice): choice for choice in typing.get_args(hint)}
        if text not in choices:
            raise SpecError(f"{what} is one of {', '.join(choices)}, not {text!r}")
        return choices[text]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        members = typing.get_args(hint)
        if type(None) in members and text.lower() == "none":
            return None
        complaint = SpecError(f"{what} cannot be {text!r}")
        for member in (m for m in members if m is not type(None)):
            try:
                return _convert(text, member, what)
            except SpecError as error:
                complaint = error
        raise complaint
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise SpecError(f"{what} is true or false, not {text!r}")
        return text.lower() == "true"
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            kind = "a whole number" if hint is int else "a number"
            raise SpecError(f"{what} is {kind}, not {text!r}") from None
    return text
