"""The page of a reproduction: ours beside the paper's, what differs and why, and what was not run and why."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from gradveil.core.types import Json
from gradveil.lab.audits import attacked_row, figure_of
from gradveil.lab.reproduce.plan import LineResults, Planned, ReproductionPlan, outcome
from gradveil.lab.reproduce.tables import Column, Line, Table, Word
from gradveil.lab.sweeps import ResultFolder

Values = dict[Line, tuple[float | None, ...]]
"""By line, our figure for each column; None where there is none."""

FARTHEST = 3
"""So many lines are named as farthest from the paper."""
_HOLE = "–"
_SHADES = "█▓▒░ "
_SETTINGS = {
    "small": "Small scale: what two CPU cores do in minutes, with smaller models and short searches. Ratios say how "
    "far this is from the paper, not how good either is.",
    "paper": "Paper scale: the paper's models and defenses, with searches cut to minutes of one GPU.",
}


def page(plan: ReproductionPlan, out: Path, *, how: str = "") -> str:
    """The page in Markdown, from what is done in a folder. ``how``: the command, where it was another than ours."""
    about, folder = plan.reproduction, ResultFolder(out)
    found = [
        {planned.line: outcome(planned, table.title, folder) for planned in lines} for table, lines in plan.pairs()
    ]
    environments = {
        json.dumps(result["environment"], sort_keys=True)
        for table in found
        for results, _ in table.values()
        for result in results
        if "environment" in result
    }
    parts = [f"# {about.name}: {about.where}", f"{about.about} {about.citation}, {about.where}."]
    parts += [_SETTINGS[plan.scale], f"    {how or command(plan)}"]
    for (table, lines), done in zip(plan.pairs(), found, strict=True):
        values = values_of(table, {line: results for line, (results, _) in done.items() if results})
        parts += [f"## {table.title}", _table(table, values, plan.data), *_cases(table, lines, plan)]
        parts += [text for text in [_farthest(table, values)] if text]
        parts += _surfaces(done)
    replaced = [
        f"{word.instead} stands in for {text}: other pictures under the same words."
        for text, word in _stand_ins(plan).items()
    ]
    parts += ["## What differs, and why", _bullets([*replaced, *about.differs])]
    parts += ["## What was not run, and why", _bullets(_not_run(plan, found))]
    parts += ["## Versions", _versions(environments, plan, folder)]
    return "\n\n".join(parts) + "\n"


def command(plan: ReproductionPlan) -> str:
    """The command that repeats it."""
    given = {"data": plan.data, "generator": plan.generators}
    brought = "".join(f" --{kind} '{word}={spec}'" for kind, by in given.items() for word, spec in by.items())
    return f"gradveil reproduce {plan.reproduction.name} --scale {plan.scale} --device {plan.device}{brought}"


def _table(table: Table, values: Values, data: Mapping[str, str]) -> str:
    """One row for each line; a cell is ours / the paper's = ratio."""
    titles = [f"{one.title}: ours / paper = ratio" if one.in_paper else f"{one.title} (ours)" for one in table.columns]
    rows = [[*table.headings, *titles], ["---"] * len(table.headings) + ["---:"] * len(table.columns)]
    for line in table.figures:
        cells = []
        for part, text in zip(table.words, line, strict=True):
            instead = part[text].instead if line in values and text not in data else ""
            cells.append(f"{text} (here {instead})" if instead else text)
        for column, ours, paper in _paired(table, line, values):
            cell = _shown(ours, column.digits)
            if column.in_paper:
                ratio = "" if ours is None or not paper else f" = {_ratio(ours / paper)}"
                cell += f" / {_HOLE if paper is None else f'{paper:g}'}{ratio}"
            cells.append(cell)
        rows.append(cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _paired(table: Table, line: Line, values: Values) -> Iterator[tuple[Column, float | None, float | None]]:
    """By column, our figure and the paper's."""
    theirs = iter(table.figures[line])
    for column, ours in zip(table.columns, values.get(line, (None,) * len(table.columns)), strict=True):
        yield column, ours, next(theirs) if column.in_paper else None


def _shown(value: float | None, digits: int) -> str:
    """Our figure with the digits of its column, or two that count where those would all be zero."""
    if value is None:
        return _HOLE
    return f"{value:.2g}" if 0 < abs(value) < 10.0**-digits else f"{value:.{digits}f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if 0.01 <= abs(value) < 1000 else f"{value:.1e}"


def _farthest(table: Table, values: Values) -> str:
    """The lines whose ratio to the paper is farthest from one."""
    apart = []
    for line in values:
        for column, ours, paper in _paired(table, line, values):
            if ours is not None and paper is not None and ours > 0 and paper > 0:
                text = f"{', '.join(line)} ({column.title}, {_ratio(ours / paper)} times)"
                apart.append((abs(math.log(ours / paper)), text))
    named = [text for _, text in sorted(apart, reverse=True)[:FARTHEST]]
    return f"Farthest from the paper: {'; '.join(named)}." if named else ""


def _surfaces(done: Mapping[Line, LineResults]) -> Iterator[str]:
    """Surfaces as blocks, the darker the lower; the private picture is in the middle."""

    def shade(value: float) -> str:
        """By the logarithm, for objectives rise steeply."""
        place = math.log1p(99 * (value - low) / (high - low)) / math.log(100) if high > low else 0.0
        return 2 * _SHADES[min(int(place * len(_SHADES)), len(_SHADES) - 1)]

    for line, (results, _) in done.items():
        surface = results[0].get("surface") if results else None
        if surface:
            low, high = (find(map(find, surface)) for find in (min, max))
            rows = ["".join(map(shade, row)) for row in surface]
            head = f"<details><summary>{', '.join(line)}: from {low:.2g} (dark) to {high:.2g}</summary>"
            yield "\n".join([head, "", "```text", *rows, "```", "", "</details>"])


def _cases(table: Table, lines: Sequence[Planned], plan: ReproductionPlan) -> Iterator[str]:
    """What the words stood for, in a list that folds away."""
    run = [planned for planned in lines if planned.run]
    if not run:
        return
    shown: dict[str, Json] = {"all lines": table.base.at(plan.scale) or {}}
    for place, part in enumerate(table.words):
        for text in dict.fromkeys(planned.line[place] for planned in run):
            brought = {"data": plan.data[text]} if text in plan.data else {}
            shown[text] = {**(part[text].at(plan.scale) or {}), **brought}
    seeds = "" if len(run[0].fields) == 1 else f"; seeds 0 to {len(run[0].fields) - 1}"
    summary = f"<details><summary>What the words stand for (one {table.kind} for each line{seeds})</summary>"
    listed = []
    for text, fields in shown.items():
        if fields:
            listed.append(f"- {text}: `{' '.join(f'{name}={value}' for name, value in fields.items())}`")
    yield "\n".join([summary, "", *listed, "", "</details>"])


def _stand_ins(plan: ReproductionPlan) -> dict[str, Word]:
    """By name, the words for which other data stand in."""
    return {
        text: part[text]
        for table, lines in plan.pairs()
        for planned in lines
        for part, text in zip(table.words, planned.line, strict=True)
        if planned.run and part[text].instead and text not in plan.data
    }


def _not_run(plan: ReproductionPlan, found: list[dict[Line, LineResults]]) -> list[str]:
    """The reasons, each with the lines that it holds for."""
    held: dict[str, list[str]] = {}
    for table in found:
        for line, (_, why) in table.items():
            if why:
                held.setdefault(why, []).append(", ".join(line))
    lines = []
    for why, names in held.items():
        more = f" and {len(names) - FARTHEST} more" if len(names) > FARTHEST else ""
        lines.append(f"{'; '.join(names[:FARTHEST])}{more}: {why}.")
    away = [
        f"On {text} itself, which is not at hand (`--data '{text}={word.asks}'`): {word.instead} stands in for it."
        for text, word in _stand_ins(plan).items()
    ]
    return [*away, *lines, *plan.reproduction.not_run] or ["Everything in the table was run."]


def _versions(environments: Iterable[str], plan: ReproductionPlan, folder: ResultFolder) -> str:
    named = []
    for text in sorted(environments):
        one = json.loads(text)
        named.append(
            f"Gradveil {one['gradveil']}, torch {one['torch']}, Python {one['python']}, {one['device']}, "
            f"{one['threads']} thread{'s' if one['threads'] != 1 else ''}"
        )
    seeds = max(table.seeds[plan.scale] for table in plan.reproduction.tables)
    entries = plan.study.entries if plan.study else ()
    took = sum(folder.seconds(entry.digest) or 0.0 for entry in entries)
    spent = f" All cases together took {took:.0f} s of their processes." if took else ""
    return (
        f"{'; '.join(named) or 'Nothing is done yet'}. Seed{'s 0 to ' + str(seeds - 1) if seeds > 1 else ' 0'}.{spent}"
    )


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def values_of(table: Table, results: dict[Line, list[Json]]) -> Values:
    """By line, one figure for each column of the table, read off the results of its cases."""
    plain = {line: tuple(_value(table, column, found) for column in table.columns) for line, found in results.items()}
    values = {}
    for line, ours in plain.items():
        undefended = (*line[:-1], next(iter(table.words[-1])))  # the first word under the last heading
        whole = plain.get(undefended, (None,) * len(table.columns))
        values[line] = tuple(
            value if column.over != "kept" else 100 * value / part if value is not None and part else None
            for column, value, part in zip(table.columns, ours, whole, strict=True)
        )
    return values


def _value(table: Table, column: Column, results: list[Json]) -> float | None:
    """The mean of the results, one for each seed, or their spread; None if one of them has no value."""
    each = [_of_result(table, column, result) for result in results]
    known = [value for value in each if value is not None]
    if not known or len(known) < len(each):
        return None
    if column.over == "spread of seeds":
        return stdev(known) if len(known) > 1 else None
    return fmean(known)


def _of_result(table: Table, column: Column, result: Json) -> float | None:
    if table.kind == "measure":
        return _number(result.get(column.metric))
    if table.kind == "training":  # the last evaluation, an accuracy in percent; of what every round has, the mean
        found = [_number(row.get(column.metric)) for row in result["rows"]]
        known = [value for value in found if value is not None]
        if not known or column.metric not in ("accuracy", "loss"):
            return fmean(known) if known else None
        return 100 * known[-1] if column.metric == "accuracy" else known[-1]
    row = attacked_row(result["rows"])
    if column.metric not in row["per_image"][0]:
        return _number(figure_of(row, column.metric))
    size = result["case"].get("batch_size", 1)
    counted = row["per_image"][::size] if table.first_of_batch else row["per_image"]
    values = [_number(one.get(column.metric)) for one in counted]
    known = [value for value in values if value is not None]
    if not known:
        return None
    if column.over == "spread of images":
        return stdev(known) if len(known) > 1 else None
    if column.over == "best":  # the largest value of each batch that has any
        size = 1 if table.first_of_batch else size
        batches = [values[start : start + size] for start in range(0, len(values), size)]
        return fmean(max(some) for batch in batches if (some := [value for value in batch if value is not None]))
    return fmean(known)


def _number(value: object) -> float | None:
    number = isinstance(value, int | float) and -1e300 < value < 1e300  # JSON has whole numbers of any length
    return float(value) if number else None  # type: ignore[arg-type]
