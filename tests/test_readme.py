"""Every example in README.md and docs/ runs and prints what its page says, and the tables there match the code.

A page is a story: its examples run in their order, in one folder. A ``bash`` block is a script; in a ``console`` block,
lines after ``$`` are commands and the rest is their output; a ``text`` block right after a ``python`` block is what
that prints. A block whose first line is a comment with nothing but a file name is that file.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from gradveil.assets import CATALOGUE
from gradveil.attacks import ATTACKS, BUDGETS
from gradveil.auditing import Case, make_case, read_case
from gradveil.auditing.flags import FLAGS, OF_VERDICTS
from gradveil.auditing.suites import MEMBERS
from gradveil.auditing.verdict import GRADES
from gradveil.core.registry import Registry
from gradveil.defenses import DEFENSES
from gradveil.metrics import METRICS
from gradveil.threat import THREATS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *DOCS.rglob("*.md")])

SKIPPED = ("make ", ". .venv/bin/activate", "gradveil bench ")
"""Commands that are not run here: they install what is installed, or measure this machine."""

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w-]+\.(?:py|yaml))\n")
NUMBER = re.compile(r"\d+(?:\.\d+)?")


class Block(NamedTuple):
    """One fenced example; ``output`` is what it prints, where the page says so."""

    kind: str
    content: str
    output: str | None


def blocks(page: str) -> list[Block]:
    found: list[Block] = []
    ends = -1
    for match in BLOCK.finditer((ROOT / page).read_text()):
        kind, content = match.groups()
        if kind == "text" and match.start() == ends + 1:
            found[-1] = found[-1]._replace(output=content)
        else:
            found.append(Block(kind, content, None))
        ends = match.end()
    return found


def runnable(page: str) -> bool:
    return any(block.kind in ("python", "bash", "console") for block in blocks(page))


def shape(text: str) -> list[str]:
    """What is said, whatever the numbers and the spaces that align them."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.strip().splitlines()]


def run_python(source: str, namespace: dict[str, Any]) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(source, "<example>", "exec"), namespace)
    return printed.getvalue()


def run_script(script: str, folder: Path) -> str:
    kept = "".join(line for line in script.splitlines(keepends=True) if not line.startswith(SKIPPED))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", kept],
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{kept}\n{done.stderr}"
    return done.stdout


def run_console(content: str, folder: Path) -> None:
    commands = "".join(line.removeprefix("$ ") for line in content.splitlines(keepends=True) if line.startswith("$ "))
    said = "".join(line for line in content.splitlines(keepends=True) if not line.startswith("$ "))
    assert shape(run_script(commands, folder)) == shape(said)


@pytest.mark.integration
@pytest.mark.network
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)])
def test_the_examples_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "example"}
    for block in blocks(page):
        if name := FILE_NAME.match(block.content):
            (tmp_path / name[1]).write_text(block.content)
        elif block.kind == "python":
            printed = run_python(block.content, namespace)
            if block.output is not None:
                assert shape(printed) == shape(block.output)
                numbers = [[float(n) for n in NUMBER.findall(text)] for text in (printed, block.output)]
                assert numbers[0] == pytest.approx(numbers[1], rel=0.05)
        elif block.kind == "bash":
            run_script(block.content, tmp_path)
        elif block.kind == "console":
            run_console(block.content, tmp_path)


def test_examples_are_found_and_can_fail(tmp_path: Path) -> None:
    assert {block.kind for block in blocks("README.md")} == {"bash", "console", "python"}
    assert len([page for page in PAGES if runnable(page)]) >= 6
    with pytest.raises(AssertionError):
        run_console("$ echo three 3\ntwo 2\n", tmp_path)
    with pytest.raises(AssertionError):
        run_script("echo done\nfalse", tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = BLOCK.sub("", (ROOT / page).read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        link = "".join(target)
        assert link.startswith("https://") or (ROOT / page).parent.joinpath(link.partition("#")[0]).exists(), link


def table(page: str, title: str) -> list[list[str]]:
    """The cells of the table whose heading begins with ``title``, without backquotes."""
    lines = (ROOT / page).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {title} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


def test_the_catalogue_of_assets_is_the_real_one() -> None:
    real = [[a.name, a.size, f"{a.source.client} {a.source.name} {a.source.version}", a.licence]
            for a in CATALOGUE.values()]  # fmt: skip
    assert [[name, size, source, licence] for name, _, size, source, licence in table("docs/assets.md", "name")] == real


def test_the_threat_models_are_the_real_ones() -> None:
    known: dict[str, set[str]] = {}
    for name, title, _, words in table("docs/threat-models.md", "name"):
        assert title == THREATS[name].title
        parts = [part.strip() for part in words.split(",")]
        inherited = set().union(*(known[part[-1]] for part in parts if part.startswith("those of ")))
        known[name] = inherited | {part for part in parts if not part.startswith("those of ")} - {"nothing"}
    assert known == {name: {str(item) for item in threat.knows} for name, threat in THREATS.items()}


def test_the_metrics_are_the_real_ones() -> None:
    written = {name: direction for name, direction, _ in table("docs/metrics.md", "metric")}
    assert written == {metric.name: metric.direction for metric in METRICS.values()}


def test_the_flags_are_the_real_ones() -> None:
    names = re.findall(r"^## `(.+)`$", (DOCS / "flags.md").read_text(), flags=re.MULTILINE)
    assert [name for name in names if name not in OF_VERDICTS] == [flag.name for flag in FLAGS]
    assert set(OF_VERDICTS) <= set(names)


def test_the_suites_are_the_real_ones() -> None:
    written = {attack: row[1] for row in table("docs/suites.md", "attack") for attack in re.split(r", (?=g)", row[0])}
    first = {member.attack: member.since for member in reversed(MEMBERS) if "match=" not in member.attack}
    assert written == first


def test_the_grades_are_the_real_ones() -> None:
    rows = {row[0]: row[1] for row in table("docs/verdict.md", "grade")}
    privacy = {letter: float(NUMBER.findall(text)[0]) / 100 for letter, text in rows.items() if letter != "F"}
    text = next(row[1] for row in table("docs/verdict.md", "field of cost") if row[0] == "grade")
    utility = {letter: float(points) / 100 for letter, points in re.findall(r"([A-D]) up to (\d+)", text)}
    assert {"privacy": privacy, "utility": utility} == GRADES


def test_the_attacks_are_the_real_ones() -> None:
    assert {re.sub(r"\[(.+)\].*", r"\1", row[0]) for row in table("docs/attacks/README.md", "name")} == set(ATTACKS)
    effort = {name: [str(budget.restarts), str(budget.iterations)] for name, budget in BUDGETS.items()}
    assert {row[0]: row[1:] for row in table("docs/attacks/ig.md", "budget")} == effort


def test_the_defenses_are_the_real_ones() -> None:
    assert {re.sub(r"\[(.+)\].*", r"\1", row[0]) for row in table("docs/defenses/README.md", "name")} == set(DEFENSES)


@pytest.mark.parametrize(
    "name", ["fingerprint", "fishing", "ggl", "gias", "gifd", "identify", "ig", "imprint", "informed", "trap"]
)
def test_options_of_attacks_are_the_real_ones(name: str) -> None:
    assert options(f"docs/attacks/{name}.md") == defaults(ATTACKS, name)


@pytest.mark.parametrize("name", sorted(set(DEFENSES) - {"none", "dcs2plus"}))
def test_options_of_defenses_are_the_real_ones(name: str) -> None:
    assert options(f"docs/defenses/{name}.md") == defaults(DEFENSES, name)


def test_the_options_of_dcs2plus_are_those_of_dcs2_and_its_own() -> None:
    page = "docs/defenses/dcs2.md"
    assert options(page) | options(page, "dcs2plus option") == defaults(DEFENSES, "dcs2plus")


def options(page: str, title: str = "option") -> dict[str, str]:
    """Names and defaults as a page has them."""
    return {row[0]: row[1].replace("by budget", "none") for row in table(page, title)}


def defaults(registry: Registry[Any], name: str) -> dict[str, str]:
    return {key: str(p.default).lower() for key, p in registry.options(name).items()}


def test_the_default_case_is_the_default() -> None:
    fields = read_case(ROOT / "cases" / "default.yaml")
    assert make_case(fields) == Case()
    assert set(Case.model_fields) - set(fields) == {"device"}, "every other field is there to be read"


def test_the_picture_is_small_and_legible() -> None:
    path = DOCS / "images" / "report.png"
    assert path.stat().st_size < 400_000
    with Image.open(path) as picture:
        assert picture.width >= 1000
