"""A user's own model by import path, ``pkg.module:factory`` or ``pkg.module:factory:width=3``.

The factory becomes the one entry of a registry of its own, so that its options are read, checked and spelled exactly as
those of the models that ship.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import typing
from collections.abc import Callable
from typing import Any

from torch import nn

from gradveil.core.errors import GradveilError
from gradveil.core.registry import Registry, split_spec
from gradveil.core.seeding import isolated
from gradveil.core.types import Domain
from gradveil.models.fronts import split_front
from gradveil.models.registry import MODELS

_ANY_VALUE = int | float | bool | str


def is_import_path(spec: str) -> bool:
    """Whether a spec names a user's factory rather than a registered model, whatever front stands before it.

    >>> is_import_path("mypackage.nets:small:width=3"), is_import_path("lenet:init=wide")
    (True, False)
    """
    module, _, rest = split_front(spec)[1].partition(":")
    factory = rest.partition(":")[0]
    return "." in module or (module not in MODELS and factory.replace(".", "_").isidentifier())


def split_import_path(spec: str) -> tuple[str, str]:
    """``pkg.module:factory:options`` as the path ``pkg.module:factory`` and the options as text."""
    module, _, rest = spec.strip().partition(":")
    factory, _, options = rest.partition(":")
    if not module or not factory or "=" in factory:
        raise GradveilError(
            f"cannot read {spec!r} as a model; write pkg.module:factory or pkg.module:factory:OPTION=VALUE"
        )
    return f"{module}:{factory}", options


def registry_of(path: str, options: str) -> Registry[nn.Module]:
    """A registry whose only entry, called ``factory``, builds the user's model.

    The domain goes to the factory's first positional argument, unless that has a default of its own or is among the
    options: ``def net(domain, width=8)`` gets it, ``def net(width=8)`` and ``def net(*, width=8)`` do not.
    """
    target = _import(path)
    named, given = inspect.signature(target).parameters, split_spec(f"factory:{options}")[1]
    takes_domain = _takes_domain(list(named.values()), given)
    hints = _hints(target, list(named.values())[1 if takes_domain else 0 :], given)

    def factory(domain: Domain, **chosen: Any) -> nn.Module:
        try:
            built = target(domain, **chosen) if takes_domain else target(**chosen)
        except GradveilError:
            raise
        except Exception as error:
            raise GradveilError(f"model {path} could not be built: {in_one_line(error)}") from error
        if not isinstance(built, nn.Module):
            raise GradveilError(f"model {path} must give a torch.nn.Module, but gave {type(built).__name__}")
        return built

    factory.__annotations__ = hints
    factory.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_keyword_only(key, named.get(key), hint) for key, hint in hints.items()]
    )
    registry: Registry[nn.Module] = Registry("model")
    registry.register("factory")(factory)
    return registry


def in_one_line(error: Exception) -> str:
    """What a user's code raised, fit for the one line of an error."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _import(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        # A module may draw numbers while it is imported, which happens once: no later draw may depend on that.
        with isolated(0, "import", module):
            imported = importlib.import_module(module)
    except Exception as error:
        where = "is it installed, or its folder on PYTHONPATH?"
        raise GradveilError(f"cannot import {module!r} ({in_one_line(error)}); {where}") from error
    try:
        target = operator.attrgetter(name)(imported)
    except AttributeError as error:
        raise GradveilError(f"module {module} has no {name!r} to build a model with") from error
    if isinstance(target, nn.Module) or not callable(target):
        raise GradveilError(f"{path} is {type(target).__name__}, not a function or class that builds a model; name one")
    return typing.cast(Callable[..., Any], target)


def _takes_domain(parameters: list[inspect.Parameter], given: dict[str, str]) -> bool:
    if not parameters:
        return False
    first = parameters[0]
    if first.kind is first.VAR_POSITIONAL:
        return True
    positional = first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    return positional and first.default is first.empty and first.name not in given


def _hints(target: Callable[..., Any], parameters: list[inspect.Parameter], given: dict[str, str]) -> dict[str, Any]:
    """The type of each option: annotated, or that of its default, or whatever its text looks like."""
    try:
        annotated = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError):  # names only a type checker sees, or a callable without annotations
        annotated = {}
    hints = {}
    for p in parameters:
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD):
            plain = type(p.default) if isinstance(p.default, (bool, int, float, str)) else _ANY_VALUE
            hints[p.name] = annotated.get(p.name, plain)
        elif p.kind is p.VAR_KEYWORD:
            hints |= {key: _ANY_VALUE for key in given if key not in hints}
    return hints


def _keyword_only(name: str, known: inspect.Parameter | None, hint: Any) -> inspect.Parameter:
    default = known.default if known is not None else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
