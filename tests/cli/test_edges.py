"""What a person does by mistake, or thinks better of: one line, and the exit code that belongs to it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import NoReturn

import click
import pytest
import torch
import typer

from exchanges import observed, private_batches
from gradveil.attacks import ATTACKS
from gradveil.auditing import Case
from gradveil.core.errors import PluginWarning
from gradveil.core.locks import LOCK, claimed, holder
from gradveil.defenses import DEFENSES
from gradveil.federated import Training
from gradveil.threat import save_observations

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer loads names that click is about to drop
    from gradveil.cli import attack, audit, listing, main
    from gradveil.lab.bench import BENCHES
    from gradveil.lab.commands import leaderboard

Command = Callable[..., tuple[int, str, str]]
"""Exit code, standard output and standard error of a command line."""


@pytest.fixture
def gradveil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gradveil", *arguments])
        with pytest.raises(SystemExit) as left:
            main.run()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return call


@pytest.fixture
def seen(tmp_path: Path) -> str:
    save_observations(tmp_path / "seen.safetensors", observed(private_batches(1)))
    return "seen.safetensors"


def interrupted(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


def test_an_attack_that_could_not_be_saved_is_not_begun(
    seen: str, tmp_path: Path, gradveil: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").touch()
    monkeypatch.setattr(attack, "Terminal", lambda: pytest.fail("the search began"))
    code, _, said = gradveil("attack", seen, "--out", "taken/x")
    assert (code, said) == (2, "gradveil: cannot make the folder taken/x: Not a directory\n")


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A folder that another thread holds, as another process would."""
    ready, done = Event(), Event()

    def hold() -> None:
        with claimed(tmp_path / "held"):
            ready.set()
            done.wait()

    other = Thread(target=hold)
    other.start()
    assert ready.wait(10)
    yield tmp_path / "held"
    done.set()
    other.join()


@pytest.mark.integration
@pytest.mark.parametrize(
    "arguments",
    ["audit --out held", "audit --out held --resume", "score held", "train --data mnist-samples --out held"],
)
def test_a_folder_that_another_process_writes_into_is_one_line(arguments: str, held: Path, gradveil: Command) -> None:
    before = holder(held)
    code, out, said = gradveil(*arguments.split())
    assert (code, out) == (2, "")
    assert re.fullmatch(r"gradveil: held is in use already \(process \d+ on .+\): wait for it, or choose .+\n", said)
    assert holder(held) == before
    assert [path.name for path in held.iterdir()] == [LOCK]


def test_a_picture_below_a_file_is_one_line(tmp_path: Path, gradveil: Command) -> None:
    (tmp_path / "taken").touch()
    code, _, said = gradveil("generator", "show", "mnist", "--out", "taken/x.png")
    assert (code, said) == (2, "gradveil: cannot write taken/x.png: File exists\n")


def test_a_leaderboard_in_the_place_of_a_file_is_one_line(tmp_path: Path, gradveil: Command) -> None:
    (tmp_path / "taken").touch()
    code, _, said = gradveil("leaderboard", "--out", "taken")
    assert (code, said) == (2, "gradveil: cannot use the folder taken: File exists\n")


@pytest.mark.parametrize(
    "arguments",
    [
        "throughput --problems 0", "throughput --steps 0", "throughput --size 0", "overhead --batch-size 0",
        "overhead --repeats 0", "generation --images 0", "generation --rounds 0", "rounds --clients 0",
        "rounds --examples 0", "sweep --cases 0", "sweep --repeats 0",
    ],
)  # fmt: skip
def test_a_benchmark_of_nothing_is_refused(arguments: str, gradveil: Command) -> None:
    code, _, said = gradveil("bench", *arguments.split())
    assert code == 2
    assert said.endswith("0 is not in the range x>=1.\n")


@pytest.mark.parametrize(
    "command", ["bench throughput", "bench overhead", "bench generation", "bench rounds", "leaderboard none"]
)
def test_a_device_that_is_not_there_is_one_line(
    command: str, gradveil: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, said = gradveil(*command.split(), "--device", "gpu")
    assert (code, said) == (2, "gradveil: device is cpu or cuda, not 'gpu'\n")
    code, _, said = gradveil(*command.split(), "--device", "cuda")
    assert (code, said) == (2, "gradveil: there is no CUDA device here: leave --device out, or say cpu\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("x = 1\ndef broken(:\n", "own.py, line 2: SyntaxError: invalid syntax"),
        ("def f():\n    raise ValueError('one\\ntwo')\n\nf()\n", "own.py, line 2: ValueError: one two"),
        ("\nimport json\njson.loads('{')\n", "own.py, line 3: JSONDecodeError: "),
        ("assert False\n", "own.py, line 1: AssertionError\n"),
        ("import other\n", "own.py, line 1: SyntaxError: invalid syntax"),
    ],
)
def test_a_file_to_load_that_fails_is_one_line(
    content: str, words: str, tmp_path: Path, gradveil: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(content)
    (tmp_path / "other.py").write_text("\n\ndef broken(:")
    monkeypatch.syspath_prepend(tmp_path)
    code, _, said = gradveil("leaderboard", "--load", "own.py")
    assert code == 2
    assert said.startswith(f"gradveil: {words}")
    assert said.count("\n") == 1


def test_a_setting_that_is_not_there_is_refused_without_a_defense_too(
    gradveil: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaderboard, "render_leaderboard", lambda _: pytest.fail("the page was written"))
    code, _, said = gradveil("leaderboard", "--setting", "nosuch")
    assert code == 2
    assert said.startswith("gradveil: no setting is called 'nosuch'")


def test_an_interrupted_command_says_so(seen: str, gradveil: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack, "load_observations", interrupted)
    import_module("gradveil.lab.commands.bench")  # makes its commands of the benchmarks as they are
    monkeypatch.setitem(BENCHES, "rounds", interrupted)
    for arguments in (["attack", seen], ["bench", "rounds"]):
        assert gradveil(*arguments) == (130, "", "gradveil: interrupted\n")


def test_a_command_that_says_how_to_go_on_is_not_added_to(gradveil: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "run_case", interrupted)
    code, _, said = gradveil("audit", "--out", "a")
    assert code == 130
    assert said.startswith("interrupted; finished rows are kept")
    assert said.count("interrupted") == 1


def test_an_interrupt_while_commands_are_loaded_is_one_line() -> None:
    script = """
import sys
class Impatient:
    def find_spec(self, name, path=None, target=None):
        if name == "gradveil.cli.train":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Impatient())
sys.argv = ['gradveil', 'train']
from gradveil.cli.main import run
run()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "gradveil: interrupted\n")


def helps(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    yield name, command.get_help(click.Context(command, info_name=name))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            if one := command.get_command(context, below):
                yield from helps(one, f"{name} {below}")


def test_the_table_of_commands_says_what_they_do() -> None:
    group = typer.main.get_command(main.app)
    assert isinstance(group, click.Group)
    for name, (_, text) in main.COMMANDS.items():
        command = group.get_command(click.Context(group), name)
        assert command is not None
        assert str(command.help).partition("\n")[0] == text


def test_every_field_of_a_case_has_an_option_with_its_description_and_default() -> None:
    found = dict(helps(typer.main.get_command(main.app), "gradveil"))
    for command, model, by_hand in (("audit", Case, {"recipe", "unfit"}), ("train", Training, set())):
        text = " ".join(found[f"gradveil {command}"].split())
        for name, field in model.model_fields.items():
            option = {"attacks": "attack", "defenses": "defense", "in_rounds": "in-round"}.get(name, name).replace(
                "_", "-"
            )
            assert name in by_hand or f" --{option} " in text
            assert name in by_hand or " ".join(str(field.description).split()) in text
    assert "[default: none, noise:sigma=0.1]" in " ".join(found["gradveil audit"].split())


def test_the_lines_of_list_are_those_of_the_registries() -> None:
    assert json.loads(listing.NAMES.read_text()) == listing.registered(), "run python -m gradveil.cli.listing"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with two defenses, one of them broken and one under a name of ours."""
    (tmp_path / "mine-1.5.dist-info").mkdir()
    (tmp_path / "mine-1.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.5\n")
    (tmp_path / "mine-1.5.dist-info" / "entry_points.txt").write_text(
        "[gradveil.defenses]\nquiet = mine_quiet:Quiet\nnoise = mine_quiet:Quiet\n"
        "[gradveil.attacks]\nloud = mine_loud:Loud\n"
    )
    (tmp_path / "mine_quiet.py").write_text("from gradveil.defenses import Defense\nclass Quiet(Defense): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(DEFENSES, "_group", "gradveil.defenses")
    monkeypatch.setattr(ATTACKS, "_group", "gradveil.attacks")
    yield
    for name, registry in {"quiet": DEFENSES, "loud": ATTACKS}.items():
        registry._factories.pop(name, None)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("installed")
def test_an_installed_package_is_listed_and_a_broken_one_is_one_line(gradveil: Command) -> None:
    code, out, _ = gradveil("list", "defenses")
    assert code == 0
    assert re.search(r"^quiet +from mine 1\.5 *$", out, flags=re.MULTILINE)
    assert len(re.findall(r"^noise ", out, flags=re.MULTILINE)) == 1
    with pytest.warns(PluginWarning, match="defense 'noise' of mine is left out: it is the name of another"):
        code, _, said = gradveil("train", "--defense", "quiet", "--clients", "2", "--per-round", "3")
    assert (code, said) == (2, "gradveil: 3 clients per round are more than the 2 there are\n")
    code, _, said = gradveil("audit", "--attack", "loud")
    assert code == 2
    assert said.startswith("gradveil: cannot import 'mine_loud' (ModuleNotFoundError")
    assert said.count("\n") == 1


def test_a_warning_about_a_package_is_one_line() -> None:
    script = """
import sys, warnings
from gradveil.cli import main
from gradveil.core.errors import PluginWarning
main.app = lambda **_: (warnings.warn("one is left out", PluginWarning), sys.exit(0))
main.run()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "gradveil: one is left out\n")


@pytest.mark.parametrize("command", sorted(main.LOADING))
def test_every_command_that_names_somebodys_own_can_load_it(command: str) -> None:
    group = typer.main.get_command(main.app)
    found = dict(helps(group, "gradveil"))
    below = {name: text for name, text in found.items() if f"{name} ".startswith(f"gradveil {command} ")}
    assert below
    assert all("--load FILE.py" in text for text in below.values() if "[OPTIONS] COMMAND" not in text)


def test_a_case_file_runs_no_code(tmp_path: Path, gradveil: Command) -> None:
    (tmp_path / "victim").touch()
    for field, spec in {
        "model": "os:remove:path=victim", "defenses": ["os:remove"], "attacks": ["antigravity:fly"],
    }.items():  # fmt: skip
        (tmp_path / "case.yaml").write_text(json.dumps({field: spec}))
        code, _, said = gradveil("audit", "case.yaml", "--out", "a")
        assert code == 2
        assert said.count("\n") == 1
        assert re.search("is code that is not loaded: if you trust it, add --load|is no defense", said)
    assert (tmp_path / "victim").exists()
    assert "antigravity" not in sys.modules


def test_help_version_and_list_need_no_torch() -> None:
    script = """
import sys
from gradveil.cli.main import app
for words in (["--help"], ["--version"], ["list", "attacks"]):
    app(words, standalone_mode=False)
assert not {"torch", "numpy"} & sys.modules.keys(), "help loads what takes seconds"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "audit" in done.stdout
    assert "gradveil 0" in done.stdout


def test_no_help_shows_what_escapes_its_brackets() -> None:
    found = dict(helps(typer.main.get_command(main.app), "gradveil"))
    assert len(found) > 15
    assert not [name for name, text in found.items() if "\\" in text]
    assert "[default: ig]" in found["gradveil attack"]
