"""Code from outside: files and modules that a person loads, and classes that specs name by import path.

Nothing is imported because a file names it: a case from a stranger must not run code. A person loads code with
``--load``, by naming it in an option, or by an import in Python. A spec such as ``package.module:Class`` then finds it,
wherever the spec comes from. Workers load what this process has loaded.
"""

from __future__ import annotations

import importlib
import operator
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from gradveil.core.errors import GradveilError, in_one_line
from gradveil.core.seeding import isolated


@dataclass(frozen=True)
class Plugin:
    """A module that somebody loaded, as another process needs it: by name or, of a file, with what it holds."""

    module: str
    path: str = ""
    source: str = ""

    def load(self) -> None:
        """Load it in this process, unless that was done before.

        Raises:
            GradveilError: one line, with the place in the file where there is one.
        """
        if self.module in _LOADED:
            return
        if self.source:
            self._run()
        else:
            import_module(self.module)
        _LOADED[self.module] = self

    def _hides_another(self) -> bool:
        """Whether an import of this name would find another file: whoever comes to need that would get this one."""
        try:
            there = find_spec(self.module)
        except (ImportError, ValueError):  # of a name with dots in it
            return False
        if there is None or there.origin is None:  # a folder, say
            return False
        return Path(there.origin).resolve() != Path(self.path).resolve()

    def _run(self) -> None:
        if self.module in sys.modules or self._hides_another():
            raise GradveilError(f"cannot load {self.path}: there is a module {self.module!r} already, rename the file")
        own = ModuleType(self.module)
        own.__file__ = self.path
        sys.modules[self.module] = own  # first: a dataclass looks for the names of its module there
        try:
            with isolated(0, "import", self.module):
                exec(compile(self.source, self.path, "exec", dont_inherit=True), vars(own))
        except BaseException as error:
            del sys.modules[self.module]
            if not isinstance(error, Exception | SystemExit):
                raise
            message = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
            lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == self.path]
            line = lines[-1] if lines else None  # of the file, that the error came from or through
            if isinstance(error, SyntaxError) and error.filename == self.path:
                line = error.lineno
            place = f"{self.path}, line {line}: {type(error).__name__}"
            raise GradveilError(f"{place}: {message}".removesuffix(": ")) from error


_LOADED: dict[str, Plugin] = {}
"""By a person's own word."""
_FOUND: dict[str, Plugin] = {}
"""Imported by other code, and named by a spec. Workers need them, but nobody has said that all in them may be run."""


def load(what: str) -> None:
    """Run a person's own FILE.py, or import a package.module, so that what it registers has a name here."""
    path = Path(what)
    if path.suffix != ".py" and not path.is_file() and all(part.isidentifier() for part in what.split(".")):
        Plugin(what).load()
        return
    before = _LOADED.get(path.stem)
    if before is not None and before.path and Path(before.path).resolve() == path.resolve():
        return
    try:
        source = path.read_text()
    except (OSError, UnicodeDecodeError, ValueError):
        raise GradveilError(f"{what} is not a Python file: --load takes FILE.py or package.module") from None
    if before is not None:
        raise GradveilError(f"cannot load {what}: {path.stem!r} was loaded from {before.path or 'a package'} already")
    Plugin(path.stem, str(path), source or "\n").load()


def loaded() -> tuple[Plugin, ...]:
    """What was loaded, in its order: for processes that go on with the work of this one."""
    return tuple({**_LOADED, **{name: one for name, one in _FOUND.items() if name not in _LOADED}}.values())


def import_module(name: str) -> ModuleType:
    """A module that a person named."""
    try:
        # A module may draw numbers while it is imported, which happens once: no later draw may depend on that.
        with isolated(0, "import", name):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        where = "is it installed, or its folder on PYTHONPATH?"
        raise GradveilError(f"cannot import {name!r} ({in_one_line(error)}); {where}") from error


def import_object(path: str) -> Any:
    """What ``package.module:name`` stands for. It imports: only for what a person named, never for words of a file."""
    module, _, name = path.partition(":")
    try:
        return operator.attrgetter(name)(import_module(module))
    except AttributeError as error:
        raise GradveilError(f"module {module} has no {name!r}") from error


def loaded_object(kind: str, path: str) -> Any:
    """What ``package.module:name`` stands for in a module that was loaded before; nothing is imported."""
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    if found is None:
        raise GradveilError(
            f"{kind} {path!r} is code that is not loaded: if you trust it, add --load {module}, or the file it is in"
        )
    for part in name.split("."):
        if part not in getattr(found, "__dict__", {}):
            raise GradveilError(f"module {module} has no {name!r}")
        found = vars(found)[part]
    _FOUND.setdefault(module, Plugin(module))
    return found


def refuse_unloaded_models(given: Any) -> None:
    """Raise if fields of a file name a model by the import path of code that nobody loaded.

    A model may be made by any function, and ``os:remove`` is one: that its module is imported is not enough. So is
    ``mine:os.remove`` where a person loaded mine.py, which imports os: only what that package defines is of it.
    """
    for spec in _models_in(given):
        path = spec.rpartition(">")[2].strip()
        module, _, rest = path.partition(":")
        factory = rest.partition(":")[0]
        if "." in module or factory.replace(".", "_").isidentifier():
            if module not in _LOADED:
                hint = f"add --load {module}, or --model {path}"
                raise GradveilError(f"model {path!r} is code that is not loaded: if you trust it, {hint}")
            if not _defines(module, factory):
                raise GradveilError(f"model {path!r} is not defined in {module}: if you trust it, add --model {path}")


def _defines(module: str, name: str) -> bool:
    """Whether a name in a loaded module stands for code of its package, and not for something that it imports."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = None if part.startswith("__") else getattr(found, part, None)
    while isinstance(found, partial):
        found = found.func
    home = getattr(found, "__module__", None)
    return isinstance(home, str) and home.partition(".")[0] == module.partition(".")[0]


def _models_in(given: Any, field: str = "") -> Iterator[str]:
    if isinstance(given, dict):
        for name, value in given.items():
            yield from _models_in(value, str(name))
    elif isinstance(given, list):
        for value in given:
            yield from _models_in(value, field)
    elif field == "model" and isinstance(given, str):
        yield given
