"""A published table as plain data: its words, its figures, and the case that each of its lines stands for.

A line of a table is named by one word under each heading, such as ("CIFAR-10", "IG", "Noise"). Every word brings fields
of a case, at each scale; those of a line together, over the fields of the table, are the case that measures it.

There are two truths about a paper: its text (the scale ``paper``) and the code that its authors released (``release``).
The third scale, ``small``, is a quick run and neither of them.

The tables are in ``papers/PAPER.yaml``, which has the citation and, by name, the reproductions. There, the fields of a
word or of ``base`` are those of all scales, unless they stand below ``small``, ``paper`` or ``both``. Fields below
``release`` are put over those of ``paper``: write there only what the authors' code does otherwise, as in
``{both: {defenses: noise:sigma=0.1}, release: {defenses: noise:sigma=0.01}}``. A word with ``like: WORD`` is another
reading of that word: it gets a line, with the same numbers of the paper, after each line of the other. ``times`` and
``plus`` of a column bring our figure into the paper's unit (``unit`` says how). A row of ``figures`` has the words of a
line and then the numbers of the paper; without ``figures`` every combination of words is a line, and the paper has no
numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from gradveil.core.registry import find
from gradveil.core.types import Json
from gradveil.lab.reproduce.landscape import inversion, landscape
from gradveil.lab.reproduce.measures import censor_fallbacks, concealed_sample, leakage_in_round, step_overhead

Scale = Literal["small", "paper", "release"]
SCALES: tuple[Scale, ...] = get_args(Scale)
SETTINGS: tuple[Scale, ...] = ("paper", "release")
"""What the text says, and what the authors' code does."""
Kind = Literal["audit", "training", "measure"]
Line = tuple[str, ...]
Figures = Mapping[Line, tuple[float | None, ...]]
"""What a paper has, by line and in the order of its columns; None where it has nothing."""
Measure = Callable[[Json], Mapping[str, object]]
"""What is neither an audit nor a training: from fields to figures by name, and maybe a ``surface`` of them."""
MEASURES: Mapping[str, Measure] = {
    one.__name__: one
    for one in (censor_fallbacks, concealed_sample, inversion, landscape, leakage_in_round, step_overhead)
}
PAPERS = ("censor", "outpost", "dcs2", "ggl")


@dataclass(frozen=True)
class Word:
    """What a word of a table stands for at each scale. Without fields, its lines are not run there, for the reason."""

    small: Json | None
    paper: Json | None
    why: str = ""
    asks: str = ""
    """For data that the user has to bring: how to name them, such as ``imagenet:path=FOLDER``."""
    instead: str = ""
    """The data that stand in for these until the user brings them."""
    release: Json | None = None
    """What the authors' code does otherwise than ``paper``."""
    like: str = ""
    """The word of the paper of which this is another reading."""

    def at(self, scale: Scale) -> Json | None:
        if scale == "small":
            return self.small
        return self.paper if scale == "paper" or self.release is None else {**(self.paper or {}), **self.release}


@dataclass(frozen=True)
class Column:
    """One figure of a line: what the paper calls it, and where it is found among ours."""

    title: str
    metric: str
    over: Literal["mean", "best", "spread of images", "spread of seeds", "kept"] = "mean"
    """``best``: the highest of each batch; ``kept``: in percent of what it is without a defense, the first word under
    the last heading."""
    digits: int = 2
    in_paper: bool = True
    """Whether the paper has such a column; the others are ours alone."""
    times: float = 1.0
    plus: float = 0.0
    """Ours in the paper's unit is ours times the one plus the other."""
    unit: str = ""
    """What that unit is, and how ours was converted."""


@dataclass(frozen=True)
class Table:
    """One table, or the part of one that is measured in one way."""

    title: str
    headings: tuple[str, ...]
    words: tuple[Mapping[str, Word], ...]
    """By heading, what its words stand for."""
    columns: tuple[Column, ...]
    figures: Figures
    base: Word
    kind: Kind = "audit"
    measure: Measure | None = None
    seeds: Mapping[Scale, int] = field(default_factory=lambda: {"small": 1, "paper": 1})
    """How many seeds each line is measured with, from 0 on; at the scale release as many as at paper."""
    first_of_batch: bool = False
    """Whether only the first example of each batch counts: the sensitive one."""
    skipped: Mapping[Line, str] = field(default_factory=dict)
    """By some words: why lines with all of these are not run at any scale."""


@dataclass(frozen=True)
class Reproduction:
    """One table or figure of a paper, as it can be run here."""

    name: str
    paper: str
    """The key of the paper."""
    citation: str
    where: str
    """Such as ``Table I``."""
    about: str
    tables: tuple[Table, ...]
    minutes: Mapping[Scale, str]
    """What it takes: small on two cores, paper on one H200."""
    differs: tuple[str, ...]
    """What differs from the paper's setting, and what is known of the reasons for other figures."""
    not_run: tuple[str, ...] = ()
    """What of the table or figure has no line here at all, and why."""


@cache
def reproductions() -> dict[str, Reproduction]:
    """All reproductions by name."""
    found: dict[str, Reproduction] = {}
    for paper in PAPERS:
        text = (Path(__file__).parent / "papers" / f"{paper}.yaml").read_text()
        file = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for name, fields in file["reproductions"].items():
            fields |= {part: tuple(fields.get(part, ())) for part in ("differs", "not_run")}
            fields["tables"] = tuple(_table(**one) for one in fields["tables"])
            found[name] = Reproduction(name=name, paper=paper, citation=file["citation"], **fields)
    return found


def reproduction(name: str) -> Reproduction:
    """The reproduction of a name; an error names those that are like it."""
    return find("reproduction", name, reproductions())


def _table(
    *,
    words: dict[str, Json],
    columns: list[Json],
    base: Json | None = None,
    figures: list[list[Any]] | None = None,
    measure: str | None = None,
    skipped: list[Json] | None = None,
    **others: Any,
) -> Table:
    """A table as its file has it."""
    parts = tuple({text: _word(fields) for text, fields in part.items()} for part in words.values())
    rows: list[Any] = list(itertools.product(*words.values())) if figures is None else figures
    all_figures: dict[Line, tuple[float | None, ...]] = {}
    for row in rows:
        readings = [
            [text, *(other for other, word in part.items() if word.like == text)]
            for part, text in zip(parts, row[: len(parts)], strict=True)
        ]
        for line in itertools.product(*readings):
            all_figures[line] = tuple(row[len(parts) :])
    return Table(
        headings=tuple(words),
        words=parts,
        columns=tuple(Column(**column) for column in columns),
        base=_word(base or {}),
        figures=all_figures,
        measure=None if measure is None else MEASURES[measure],
        skipped={tuple(rule["words"]): rule["why"] for rule in skipped or []},
        **others,
    )


def _word(fields: Json) -> Word:
    """Fields of all scales, or the parts of a word."""
    if not fields.keys() & {"small", "paper", "both", "release", "like", "why", "asks"}:
        return Word(fields, fields)
    parts = dict(fields)
    both = parts.pop("both", None)
    return Word(parts.pop("small", both), parts.pop("paper", both), **parts)
