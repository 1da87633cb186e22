"""Code from outside: who may load it, what it is called then, and what becomes of a package that is broken."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from gradveil.attacks import ATTACKS, Attack
from gradveil.core import plugins
from gradveil.core.errors import GradveilError, PluginWarning
from gradveil.core.registry import Registry, split_spec
from gradveil.defenses import DEFENSES, Defense, Noise

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from gradveil.defenses import DEFENSES, Defense

@dataclass(frozen=True, kw_only=True)
class Halved(Defense):
    reshapes: ClassVar[bool] = False
    by: float = 2.0

@DEFENSES.register("halved-by-name")
class Named(Defense):
    def __init__(self, *, by: float = 2.0) -> None:
        self.by = by

class Positional(Defense):
    def __init__(self, size: float) -> None:
        self.size = size

def function() -> Defense:
    return Defense()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that can be imported and is not yet, with an own name in each test."""
    name = f"outside_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE.replace("halved-by-name", f"named-{name}"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_LOADED", {})
    monkeypatch.setattr(plugins, "_FOUND", {})
    yield name
    sys.modules.pop(name, None)
    DEFENSES._factories.pop(f"named-{name}", None)


def test_a_path_is_a_name_once_a_person_has_loaded_it(module: str) -> None:
    spec = f"{module}:Halved:by=3"
    with pytest.raises(GradveilError, match=f"is code that is not loaded: if you trust it, add --load {module}"):
        DEFENSES.canonical(spec)
    assert module not in sys.modules
    assert f"{module}:Halved" not in DEFENSES
    DEFENSES.admit(f"noise + {spec}")
    assert DEFENSES.canonical(spec) == f"{module}:Halved:by=3.0"
    built = DEFENSES.build(f"noise+{spec}")
    assert built.spec == f"noise+{module}:Halved:by=3.0"
    assert [plugin.module for plugin in plugins.loaded()] == [module]


def test_what_has_a_name_goes_by_it(module: str) -> None:
    DEFENSES.admit(f"{module}:Named")
    assert DEFENSES.canonical(f"{module}:Named:by=3") == f"named-{module}:by=3.0"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{}:function", "is no defense: name a class that inherits from Defense"),
        ("{}:Missing", "has no 'Missing'"),
        ("os:remove", "is no defense"),
        ("os:path.join", "is no defense"),
        ("gradveil.attacks:DLG", "is no defense"),
        ("gradveil.defenses:Defense", "is a part of Gradveil and no defense by itself"),
        ("gradveil.defenses:Chain", "is a part of Gradveil and no defense by itself"),
        ("{}:Positional", r"cannot be built: missing a required argument: 'size'; options are keyword-only"),
        ("{}:Halved:to=1", "its options: by=2.0"),
        ("noise:sigma", "cannot read 'sigma' in 'noise:sigma'"),
    ],
)
def test_only_a_class_of_its_kind_is_built(module: str, path: str, words: str) -> None:
    plugins.load(module)
    with pytest.raises(GradveilError, match=words):
        DEFENSES.build(path.format(module))


def test_an_attack_without_its_method_is_one_line() -> None:
    with pytest.raises(GradveilError, match=f"{__name__}:Unfinished is no attack yet: it lacks run"):
        ATTACKS.build(f"{__name__}:Unfinished")
    assert DEFENSES.canonical("gradveil.defenses:Noise:sigma=1") == "noise:sigma=1.0"


class Unfinished(Attack):
    """Does nothing yet."""


def test_a_module_that_is_not_there_is_one_line() -> None:
    with pytest.raises(GradveilError, match=r"cannot import 'no_such_package'.*PYTHONPATH"):
        ATTACKS.admit("no_such_package:Attack")
    with pytest.raises(GradveilError, match=r"no attack is called 'mine'.*--load FILE.py"):
        ATTACKS.build("mine")


def test_a_file_is_run_once_and_its_classes_have_paths(module: str, tmp_path: Path) -> None:
    sys.path.remove(str(tmp_path))
    plugins.load(str(tmp_path / f"{module}.py"))
    plugins.load(str(tmp_path / ".." / tmp_path.name / f"{module}.py"))
    assert DEFENSES.build(f"{module}:Halved:by=4").spec == f"{module}:Halved:by=4.0"
    (plugin,) = plugins.loaded()
    assert plugin.source == (tmp_path / f"{module}.py").read_text()


def test_another_process_loads_the_same_without_the_file(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins.load(str(tmp_path / f"{module}.py"))
    (plugin,) = plugins.loaded()
    (tmp_path / f"{module}.py").unlink()
    del sys.modules[module], DEFENSES._factories[f"named-{module}"]
    monkeypatch.setattr(plugins, "_LOADED", {})
    plugin.load()
    assert f"{module}:Halved" in DEFENSES


def test_a_file_takes_no_place_of_another_module(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("x = 1\n")
    with pytest.raises(GradveilError, match=r"there is a module 'json' already, rename the file"):
        plugins.load(str(tmp_path / "json.py"))
    for what in ("nowhere.py", str(tmp_path), "no-module"):
        with pytest.raises(GradveilError, match=r"is not a Python file: --load takes FILE.py or package.module"):
            plugins.load(what)


def test_a_file_that_exits_does_not_end_the_process(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(GradveilError, match=r"leaving.py, line 2: SystemExit: 0"):
        plugins.load(str(tmp_path / "leaving.py"))
    assert "leaving" not in sys.modules


def test_a_module_that_exits_does_not_end_the_process(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(GradveilError, match=r"cannot import .* \(SystemExit: 0\)"):
        plugins.load(module)


@pytest.mark.parametrize("model", ["os:remove:path=x", "evil.nets:small", "imprint > evil.nets:small"])
def test_fields_of_a_file_name_no_model_that_nobody_loaded(model: str) -> None:
    for fields in ({"model": model}, {"base": {"model": "lenet"}, "grids": [{"model": ["mlp", model]}]}):
        with pytest.raises(GradveilError, match="is code that is not loaded"):
            plugins.refuse_unloaded_models(fields)
    plugins.refuse_unloaded_models({"model": "imprint:bins=4 > lenet:init=wide", "title": "a: b"})


@pytest.mark.parametrize("name", ["os.system", "system", "partial", "net.__class__", "__builtins__", "absent"])
def test_what_a_loaded_file_imports_is_no_model_of_it(name: str, module: str, tmp_path: Path) -> None:
    source = "import os\nfrom functools import partial\nfrom os import system\ndef net(): ...\nbound = partial(net)\n"
    (tmp_path / f"{module}.py").write_text(source)
    plugins.load(str(tmp_path / f"{module}.py"))
    plugins.refuse_unloaded_models({"model": [f"{module}:net", f"{module}:bound"]})
    with pytest.raises(GradveilError, match="is not defined in"):
        plugins.refuse_unloaded_models({"model": f"{module}:{name}:command=true"})


def test_a_file_takes_no_place_of_a_module_that_is_not_imported_yet(module: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"{module}.py").write_text("")
    with pytest.raises(GradveilError, match=f"there is a module '{module}' already, rename the file"):
        plugins.load(str(tmp_path / "elsewhere" / f"{module}.py"))


def test_a_module_that_a_file_names_is_not_loaded_by_that() -> None:
    with pytest.raises(GradveilError, match="is no defense"):
        DEFENSES.build("os:remove")
    with pytest.raises(GradveilError, match="is code that is not loaded"):
        plugins.refuse_unloaded_models({"model": "os:remove:path=x"})


def test_fields_of_a_file_may_name_a_model_that_somebody_loaded(module: str) -> None:
    plugins.load(module)
    plugins.refuse_unloaded_models({"model": f"imprint > {module}:function"})


def test_import_paths_and_names_are_told_apart() -> None:
    assert split_spec("a.b:C") == ("a.b:C", {})
    assert split_spec("b : C.D : k = 1") == ("b:C.D", {"k": "1"})
    assert split_spec("file:path=C:x") == ("file", {"path": "C:x"})
    assert split_spec("noise:") == ("noise", {})


class Point(EntryPoint):
    """An entry point of a package that is not there."""

    @property
    def dist(self) -> None:  # type: ignore[override]
        return None


def test_installed_packages_add_names_and_replace_none(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    offered = {"quiet": f"{module}:Halved", "noise": f"{module}:Halved", "empty": module, "broken": "not_here:Class"}
    points = [Point(name, value, "tests.defenses") for name, value in offered.items()]
    monkeypatch.setattr("gradveil.core.registry.entry_points", lambda group: points if group == "tests" else [])
    registry: Registry[Defense] = Registry("defense", base=Defense, group="tests")
    registry.register("noise")(Noise)
    assert registry.get("noise") is Noise
    with pytest.warns(PluginWarning) as told:
        assert "quiet" in registry
    assert [str(one.message) for one in told] == [
        "defense 'noise' of a package is left out: it is the name of another",
        "defense 'empty' of a package is left out: it names no class",
    ]
    assert module not in sys.modules
    assert registry.build("quiet:by=3") is not None
    assert registry.get("noise") is Noise
    with pytest.raises(GradveilError, match="cannot import 'not_here'"):
        registry.build("broken")


def test_an_entry_point_and_a_registration_of_one_class_are_one(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [Point(f"named-{module}", f"{module}:Named", "gradveil.defenses")]
    monkeypatch.setattr("gradveil.core.registry.entry_points", lambda **_: points)
    monkeypatch.setattr(DEFENSES, "_group", "gradveil.defenses")
    assert DEFENSES.build(f"named-{module}:by=3").spec == f"named-{module}:by=3.0"
