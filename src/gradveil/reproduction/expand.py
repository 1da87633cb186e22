"""From a table to what is run for each of its lines, or why it is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gradveil.core.errors import GradveilError
from gradveil.core.registry import split_spec
from gradveil.reproduction.table import SCALES, Fields, Line, Reproduction, Scale, Table, Word
from gradveil.studies import Entry, Study, make_study

GENERATIVE = ("ggl", "gias", "gifd")
"""Attacks that search a generator."""


@dataclass(frozen=True)
class Planned:
    """One line of a table: its cases, one for each seed, or why there are none."""

    line: Line
    fields: tuple[dict[str, Any], ...]
    entries: tuple[Entry, ...]
    """Empty also where the line is measured by a function."""
    why: str

    @property
    def run(self) -> bool:
        return not self.why


@dataclass(frozen=True)
class Plan:
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
        entries = {entry.digest: entry for planned in self._all() for entry in planned.entries}
        return Study(self.reproduction.name, tuple(entries.values())) if entries else None

    @property
    def cases(self) -> int:
        """How many things are run."""
        measured = sum(len(planned.fields) for planned in self._all() if not planned.entries)
        return measured + (len(self.study.entries) if self.study else 0)

    def pairs(self) -> Iterator[tuple[Table, tuple[Planned, ...]]]:
        return zip(self.reproduction.tables, self.lines, strict=True)

    def missing(self) -> dict[str, str]:
        """By word, how to name data that lines wait for."""
        words = [word for planned in self._all() if not planned.run for word in planned.line]
        known = {
            name: word for table in self.reproduction.tables for part in table.words for name, word in part.items()
        }
        return {name: known[name].asks for name in words if known[name].asks and name not in self.data}

    def _all(self) -> list[Planned]:
        return [planned for lines in self.lines for planned in lines]


def plan(
    reproduction: Reproduction,
    scale: Scale,
    *,
    device: str = "cpu",
    data: Mapping[str, str] | None = None,
    generators: Mapping[str, str] | None = None,
) -> Plan:
    """What a scale of a reproduction runs, with the data and generators that the user brings for some of its words."""
    if scale not in SCALES:
        raise GradveilError(f"the scale is one of {', '.join(SCALES)}, not {scale!r}")
    made = Plan(reproduction, scale, device, dict(data or {}), dict(generators or {}), ())
    _check_brought(reproduction, {**made.data, **made.generators})
    lines = tuple(tuple(_planned(made, table, line) for line in table.figures) for table in reproduction.tables)
    return replace(made, lines=lines)


def _check_brought(reproduction: Reproduction, brought: Mapping[str, str]) -> None:
    parts = [part for table in reproduction.tables for part in table.words]
    known = {name for part in parts for name, word in part.items() if word.asks or "data" in (word.paper or {})}
    for name in brought:
        if name not in known:
            named = ", ".join(sorted(known)) or "none"
            raise GradveilError(f"{reproduction.name} has no data {name!r} to bring; it has: {named}")


def _planned(plan: Plan, table: Table, line: Line) -> Planned:
    why = next((why for words, why in table.skipped.items() if set(words) <= set(line)), "")
    fields: dict[str, Any] = {**(table.base.at(plan.scale) or {}), "device": plan.device}
    for part, text in zip(table.words, line, strict=True):
        word = part[text]
        chosen = _chosen(word, plan.scale, plan.data.get(text))
        why = why or ("" if chosen is not None else _reason(text, word, plan.scale))
        fields |= chosen or {}
    if table.base.at(plan.scale) is None:
        why = why or table.base.why
    if why:
        return Planned(line, (), (), why)
    generator = next((plan.generators[text] for text in line if text in plan.generators), None)
    if generator is not None and split_spec(fields.get("attacks", ""))[0] in GENERATIVE:
        fields["attacks"] += f",generator={generator}"
    each = tuple(fields | {"seed": seed} for seed in range(table.seeds[plan.scale]))
    if table.kind == "measure":
        return Planned(line, each, (), "")
    made = [make_study(plan.reproduction.name, {"kind": table.kind, "base": one}).entries[0] for one in each]
    return Planned(line, each, tuple(replace(entry, title=_title(line, entry)) for entry in made), "")


def _chosen(word: Word, scale: Scale, spec: str | None) -> Fields | None:
    """The fields of a word, with the user's data in place of its own."""
    fields = word.at(scale)
    if spec is None:
        return fields
    return {**(fields if fields is not None else word.paper or {}), "data": spec}


def _reason(text: str, word: Word, scale: Scale) -> str:
    if word.asks:
        return f"{text} is not at hand; bring it with `--data '{text}={word.asks}'`"
    return word.why or f"only at the scale {'paper' if scale == 'small' else 'small'}"


def _title(line: Line, entry: Entry) -> str:
    seed = f", seed {entry.case.seed}" if entry.case.seed else ""
    return ", ".join(line) + seed
