"""From a table to what is run for each of its lines, or why it is not; running it, and what is there of each line.

Audits and trainings are run as a sweep, measurements one by one. What is done is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from gradveil.core.atomic import remove_partial, write_json
from gradveil.core.environment import environment, is_environment
from gradveil.core.errors import GradveilError
from gradveil.core.locks import claimed
from gradveil.core.registry import split_spec
from gradveil.core.types import Json
from gradveil.lab.audits import rows_scored_again
from gradveil.lab.reproduce.tables import SCALES, SETTINGS, Line, Reproduction, Scale, Table
from gradveil.lab.sweeps import MEASURED, ResultFolder, Start, Status, Study, StudyEntry, make_study, run_study

GENERATIVE = ("ggl", "gias", "gifd")
"""Attacks that search a generator."""
LineResults = tuple[list[Json], str]
"""The results of a line, one for each seed, or none and why."""
PAPERS = "C"
"""The threat model of the papers: the attacker knows the recipe and the defense, and holds no candidates."""


@dataclass(frozen=True)
class Planned:
    """One line of a table: its cases, one for each seed, or why there are none."""

    line: Line
    fields: tuple[Json, ...]
    entries: tuple[StudyEntry, ...]
    """Empty also where the line is measured by a function."""
    why: str

    @property
    def run(self) -> bool:
        return not self.why


@dataclass(frozen=True)
class ReproductionPlan:
    """All lines of a reproduction at one scale."""

    reproduction: Reproduction
    scale: Scale
    device: str
    data: Mapping[str, str]
    """By word, the data that the user brought."""
    generators: Mapping[str, str]
    """By word, the generator that attacks on these data search."""
    lines: tuple[tuple[Planned, ...], ...]
    """By table."""

    @cached_property
    def study(self) -> Study | None:
        """The cases of all lines, each once, as a sweep takes them; None if there is none."""
        entries = {entry.digest: entry for lines in self.lines for planned in lines for entry in planned.entries}
        return Study(self.reproduction.name, tuple(entries.values())) if entries else None

    @property
    def cases(self) -> int:
        """How many things are run."""
        measured = sum(len(planned.fields) for lines in self.lines for planned in lines if not planned.entries)
        return measured + (len(self.study.entries) if self.study else 0)

    @property
    def folder(self) -> str:
        """The name of the folder of its results: those of the text and of the release lie side by side."""
        return f"{self.reproduction.name}-{'small' if self.scale == 'small' else 'paper'}"

    def settings(self) -> list[ReproductionPlan]:
        """The plans of one page: this one, or the text's and the release's, where the release is known to differ."""
        if self.scale == "small":
            return [self]
        text, release = (
            plan(self.reproduction, scale, device=self.device, data=self.data, generators=self.generators)
            for scale in SETTINGS
        )
        fields = [[[planned.fields for planned in lines] for lines in one.lines] for one in (text, release)]
        return [text] if fields[0] == fields[1] else [text, release]

    def pairs(self) -> Iterator[tuple[Table, tuple[Planned, ...]]]:
        return zip(self.reproduction.tables, self.lines, strict=True)

    def missing(self) -> dict[str, str]:
        """By word, how to name data that lines wait for."""
        asks = {
            name: word.asks for table in self.reproduction.tables for part in table.words for name, word in part.items()
        }
        words = [word for lines in self.lines for planned in lines if not planned.run for word in planned.line]
        return {name: asks[name] for name in words if asks[name] and name not in self.data}


def plan(
    reproduction: Reproduction,
    scale: Scale,
    *,
    device: str = "cpu",
    data: Mapping[str, str] | None = None,
    generators: Mapping[str, str] | None = None,
) -> ReproductionPlan:
    """What a scale of a reproduction runs, with the data and generators that the user brings for some of its words."""
    if scale not in SCALES:
        raise GradveilError(f"the scale is one of {', '.join(SCALES)}, not {scale!r}")
    made = ReproductionPlan(reproduction, scale, device, dict(data or {}), dict(generators or {}), ())
    parts = [part for table in reproduction.tables for part in table.words]
    known = {name for part in parts for name, word in part.items() if word.asks or "data" in (word.paper or {})}
    for name in (*made.data, *made.generators):
        if name not in known:
            named = ", ".join(sorted(known)) or "none"
            raise GradveilError(f"{reproduction.name} has no data {name!r} to bring; it has: {named}")
    lines = tuple(tuple(_planned(made, table, line) for line in table.figures) for table in reproduction.tables)
    return replace(made, lines=lines)


def _planned(plan: ReproductionPlan, table: Table, line: Line) -> Planned:
    """One line: the fields of the table, and over them those of its words."""
    why = next((why for words, why in table.skipped.items() if set(words) <= set(line)), "")
    base = table.base.at(plan.scale)
    fields: Json = {**(base or {}), "device": plan.device}
    if table.kind == "audit":
        fields = {"threat": PAPERS} | fields
    for part, text in zip(table.words, line, strict=True):
        word = part[text]
        chosen = word.at(plan.scale)
        if text in plan.data:
            chosen = {**(chosen if chosen is not None else word.paper or {}), "data": plan.data[text]}
        if chosen is None and not why:
            others = [scale for scale in SCALES if word.at(scale) is not None]
            why = word.why or f"only at the scale {' and '.join(others)}"
            if word.asks:
                why = f"{text} is not at hand; bring it with `--data '{text}={word.asks}'`"
        fields |= chosen or {}
    if base is None:
        why = why or table.base.why
    if why:
        return Planned(line, (), (), why)
    generator = next((plan.generators[text] for text in line if text in plan.generators), None)
    if generator is not None and split_spec(fields.get("attacks", ""))[0] in GENERATIVE:
        fields["attacks"] += f",generator={generator}"
    each = tuple(fields | {"seed": seed} for seed in range(table.seeds.get(plan.scale, table.seeds["paper"])))
    if table.kind == "measure":
        return Planned(line, each, (), "")
    entries = []
    for one in each:
        entry = make_study(plan.reproduction.name, {"kind": table.kind, "base": one}).entries[0]
        seed = f", seed {entry.case.seed}" if entry.case.seed else ""
        entries.append(replace(entry, title=", ".join(line) + seed))
    return Planned(line, each, tuple(entries), "")


def run_plan(
    plan: ReproductionPlan,
    out: Path,
    *,
    workers: int = 1,
    start: Start = "spawn",
    report: Callable[[Status], None] = lambda _status: None,
) -> None:
    """Run what is not done yet. What failed before is tried again, because a page with holes helps nobody."""
    if plan.study is not None:
        run_study(plan.study, out, workers=workers, start=start, retry=True, report=report)
    done = ResultFolder(out)
    with claimed(out):
        remove_partial(out, f"{MEASURED}/*.json")
        for table, lines in plan.pairs():
            for fields in (one for planned in lines if table.measure is not None for one in planned.fields):
                path = measured_file(out, table.title, fields)
                before = _measured(done, path)
                if table.measure is None or (before is not None and "failed" not in before["figures"]):
                    continue
                try:
                    figures = dict(table.measure(fields))
                except GradveilError as error:
                    figures = {"failed": str(error)}
                where = environment(fields["device"])
                write_json(path, {"fields": fields, "figures": figures, "environment": where})


def measured_file(out: Path, title: str, fields: Json) -> Path:
    digest = hashlib.sha256(json.dumps([title, fields], sort_keys=True).encode()).hexdigest()[:16]
    return out / MEASURED / f"{digest}.json"


def _measured(folder: ResultFolder, path: Path) -> Json | None:
    """What a file of a measurement holds; None where there is none, or it is damaged."""
    found = folder.measured(path.stem)
    if not isinstance(found, dict) or not isinstance(found.get("figures"), dict):
        return None
    return found if is_environment(found.get("environment")) else None


def outcome(planned: Planned, table_title: str, folder: ResultFolder) -> LineResults:
    """What is there of a line."""
    if not planned.run:
        return [], planned.why
    found: list[Json] = []
    for fields in planned.fields if not planned.entries else ():
        file = _measured(folder, measured_file(folder.folder, table_title, fields))
        if file is None:
            return [], "not run yet"
        found.append({**file["figures"], "environment": file["environment"]})
    failed = next((one["failed"] for one in found if "failed" in one), "")
    if failed:
        return [], f"failed: {failed}"
    for entry in planned.entries:
        result = folder.result(entry.digest)
        if result is None:
            failure = folder.failure(entry.digest)
            return [], f"failed: {failure['reason']}" if failure else "not run yet"
        if not _is_readable(result):
            return [], f"its result.json is damaged: delete {folder.case(entry.digest)} and run it again"
        rows = rows_scored_again(folder.case(entry.digest))
        found.append(result if rows is None else {**result, "rows": rows})
    return found, ""


def _is_readable(result: Json) -> bool:
    """Whether a result, which may be copied from elsewhere, has what figures and pages are read off."""
    rows, case = result.get("rows"), result.get("case")
    if not is_environment(result.get("environment")) or not isinstance(case, dict) or not isinstance(rows, list):
        return False
    if not rows or not all(isinstance(row, dict) for row in rows):
        return False
    attacked = [row.get("per_image") for row in rows if row.get("prior_of") is None]
    if result.get("kind") == "training" or "per_image" not in rows[0]:
        return result.get("kind") == "training"
    size = case.get("batch_size", 1)
    pictures = all(isinstance(each, list) and each and all(isinstance(one, dict) for one in each) for each in attacked)
    return bool(attacked) and pictures and type(size) is int and size >= 1
