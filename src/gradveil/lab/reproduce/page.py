"""The page of a reproduction: ours beside the paper's, what differs and why, and what was not run and why."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from gradveil.core.types import Json
from gradveil.lab.audits import attacked_row, figure_of
from gradveil.lab.reproduce.plan import LineResults, Planned, ReproductionPlan, outcome
from gradveil.lab.reproduce.tables import Column, Line, Scale, Table, Word
from gradveil.lab.sweeps import ResultFolder

Values = dict[Line, tuple[float | None, ...]]
"""By line, our figure for each column; None where there is none."""

FARTHEST = 3
"""How many lines are named as farthest from the paper."""
HELD = (
    Column("identified", "identified"),
    Column("labels right", "label_accuracy"),
    Column("fallback rate", "fallback_rate"),
    Column("cosine with the gradient", "cosine"),
    Column("PSNR", "psnr"),
)
"""What the rows of audits and trainings hold beside the columns of a table."""
_HOLE = "–"
_SHADES = "█▓▒░ "
_LABELS: Mapping[Scale, str] = {"small": "ours", "paper": "text", "release": "release"}
_SETTINGS: Mapping[Scale, str] = {
    "small": "Small scale: what two CPU cores do in minutes, with smaller models and short searches. Figures say how "
    "far this is from the paper, not how good either is.",
    "paper": "Settings of the text: the paper's models and defenses as it describes them, with searches cut to minutes "
    "of one GPU.",
    "release": "Settings of the release: what the authors' public code does where that differs from the text.",
}


@dataclass(frozen=True)
class _Measured:
    """One table at one of the settings: what was run, and our figures."""

    label: str
    lines: tuple[Planned, ...]
    done: dict[Line, LineResults]
    values: Values


def page(plan: ReproductionPlan, out: Path, *, how: str = "") -> str:
    """The page in Markdown, from what is done in a folder. ``how``: the command, where it was another than ours.

    At the scales paper and release it is the same page, with both.
    """
    about, folder, plans = plan.reproduction, ResultFolder(out), plan.settings()
    both = len(plans) > 1
    parts = [f"# {about.name}: {about.where}", f"{about.about} {about.citation}, {about.where}."]
    parts += [_bullets(_SETTINGS[one.scale] for one in plans) if both else _SETTINGS[plans[0].scale]]
    parts.append("\n".join(f"    {how or command(one)}" for one in (plans[:1] if how else plans)))
    not_run, environments = [], set()
    for place, table in enumerate(about.tables):
        found = []
        for one in plans:
            lines = one.lines[place]
            done = {planned.line: outcome(planned, table.title, folder) for planned in lines}
            values = values_of(table, {line: results for line, (results, _) in done.items() if results})
            found.append(_Measured(_LABELS[one.scale] if both else "ours", lines, done, values))
            not_run.append((f", at the settings of the {found[-1].label}" if both else "", done))
            environments |= {
                json.dumps(result["environment"], sort_keys=True)
                for results, _ in done.values()
                for result in results
                if "environment" in result
            }
        parts += [f"## {table.title}", *_tables(table, found, plan.data), *_agreement(table, found, plan.data)]
        parts += [*_held(table, found), *_cases(table, plans, place)]
        parts += [surface for measured in found for surface in _surfaces(measured.done)]
    replaced = [
        f"{word.instead} stands in for {text}: other pictures under the same words."
        for text, word in _stand_ins(plan).items()
    ]
    parts += ["## What differs, and why", _bullets([*replaced, *about.differs])]
    parts += ["## What was not run, and why", _bullets(_not_run(plan, not_run))]
    parts += ["## Versions", _versions(environments, plans, folder)]
    return "\n\n".join(parts) + "\n"


def command(plan: ReproductionPlan) -> str:
    """The command that repeats it."""
    given = {"data": plan.data, "generator": plan.generators}
    brought = "".join(f" --{kind} '{word}={spec}'" for kind, by in given.items() for word, spec in by.items())
    which = "--scale small" if plan.scale == "small" else f"--settings {plan.scale}"
    return f"gradveil reproduce {plan.reproduction.name} {which} --device {plan.device}{brought}"


def _tables(table: Table, found: Sequence[_Measured], data: Mapping[str, str]) -> Iterator[str]:
    """Paper and ours side by side in each cell; lines with data that stand in follow in a table of their own."""
    labels = " / ".join(measured.label for measured in found)
    run = {line for measured in found for line in measured.values}
    for other in (False, True):
        lines = [
            line
            for line in table.figures
            if _on_other_data(table, line, data) == other and (_is_in_paper(table, line) or line in run)
        ]
        if not lines:
            continue
        if other:
            yield "Other data than the paper's: there is nothing to compare. In brackets: the paper, on its own data."
        titles = []
        for column in table.columns:
            shown = f"{labels} [paper]" if other else f"paper / {labels}"
            titles.append(f"{column.title}: {shown if column.in_paper else labels}")
        rows = [[*table.headings, *titles], ["---"] * len(table.headings) + ["---:"] * len(table.columns)]
        for line in lines:
            cells = []
            for part, text in zip(table.words, line, strict=True):
                instead = part[text].instead if text not in data else ""
                cells.append(f"{text} (here {instead})" if instead else text)
            theirs = iter(table.figures[line])
            for place, column in enumerate(table.columns):
                each = [measured.values.get(line, (None,) * len(table.columns))[place] for measured in found]
                cell = " / ".join(_shown(value, column.digits) for value in each)
                if column.in_paper:
                    figure = next(theirs)
                    paper = _HOLE if figure is None else f"{figure:g}"
                    cell = f"{cell} [{paper}]" if other else f"{paper} / {cell}"
                cells.append(cell)
            rows.append(cells)
        yield _markdown(rows)
    units = [f"{column.title}: {column.unit}" for column in table.columns if column.unit]
    if units:
        yield f"Units. {'; '.join(units)}."


def _agreement(table: Table, found: Sequence[_Measured], data: Mapping[str, str]) -> Iterator[str]:
    """How far ours are from the paper's on the paper's data, and which of two settings is nearer to them."""
    lines = [line for line in table.figures if not _on_other_data(table, line, data) and _is_in_paper(table, line)]
    run = [measured for measured in found if any(line in measured.values for line in lines)]
    lines = [line for line in lines if all(line in measured.values for measured in run)]
    columns = [column for column in table.columns if column.in_paper]
    if not run or not lines:
        return
    rows = [["distance from the paper (mean)", "lines", *(column.title for column in columns)]]
    rows.append(["---"] + ["---:"] * (len(columns) + 1))
    distances: dict[str, list[float | None]] = {}
    for measured in run:
        pairs = [_pairs(table, lines, measured.values, column) for column in columns]
        distances[measured.label] = [fmean(abs(a - b) for a, b in some.values()) if some else None for some in pairs]
        shown = [_shown(far, column.digits) for far, column in zip(distances[measured.label], columns, strict=True)]
        rows.append([measured.label, str(len(lines)), *shown])
        kept = [_order_kept(some) for some in pairs]
        if any(kept):
            rows.append([f"{measured.label}: pairs in the paper's order", "", *(one or _HOLE for one in kept)])
    yield _markdown(rows)
    if len(run) > 1:
        (text, of_text), (release, of_release) = distances.items()
        nearer: dict[str, list[str]] = {text: [], release: []}
        for column, a, b in zip(columns, of_text, of_release, strict=True):
            if a is not None and b is not None and a != b:
                nearer[text if a < b else release].append(column.title)
        named = [f"with the {label} in {', '.join(titles)}" for label, titles in nearer.items() if titles]
        yield f"The paper's figures agree better {' and '.join(named)}."
    for measured in run:
        text = _farthest(table, measured, lines)
        if text:
            yield f"Farthest from the paper ({measured.label}): {text}."


def _pairs(table: Table, lines: Iterable[Line], values: Values, column: Column) -> dict[Line, tuple[float, float]]:
    """By line, our figure in a column and the paper's, where there are both."""
    place = table.columns.index(column)
    theirs = sum(other.in_paper for other in table.columns[:place])
    found = {line: (values[line][place], table.figures[line][theirs]) for line in lines}
    return {line: (ours, paper) for line, (ours, paper) in found.items() if ours is not None and paper is not None}


def _order_kept(pairs: Mapping[Line, tuple[float, float]]) -> str:
    """How many pairs of lines that differ in their last word alone stand in the paper's order; empty if none do."""
    kept = [
        (ours > other) == (paper > theirs)
        for (line, (ours, paper)), (second, (other, theirs)) in itertools.combinations(pairs.items(), 2)
        if line[:-1] == second[:-1] and paper != theirs
    ]
    return f"{sum(kept)} of {len(kept)}" if kept else ""


def _farthest(table: Table, measured: _Measured, lines: Iterable[Line]) -> str:
    """The lines whose ratio to the paper is farthest from one."""
    apart = []
    for column in table.columns:
        if column.in_paper:
            for line, (ours, paper) in _pairs(table, lines, measured.values, column).items():
                if ours > 0 and paper > 0:
                    text = f"{', '.join(line)} ({column.title}, {_ratio(ours / paper)} times)"
                    apart.append((abs(math.log(ours / paper)), text))
    return "; ".join(text for _, text in sorted(apart, reverse=True)[:FARTHEST])


def _held(table: Table, found: Sequence[_Measured]) -> Iterator[str]:
    """What else the rows hold, folded away: labels, fallbacks, and what the attack's prior alone reaches."""
    if table.kind == "measure":
        return
    titles = [column.title for column in HELD[:-1]] + [f"prior alone: {HELD[-1].title}", "prior alone: identified"]
    rows = []
    for measured in found:
        results = {line: results for line, (results, _) in measured.done.items() if results}
        own = values_of(replace(table, columns=HELD), results)
        prior = values_of(replace(table, columns=HELD), {line: _of_prior(some) for line, some in results.items()})
        for line in results:
            each = [*own[line][:-1], *(prior[line][-1:] + prior[line][:1])]
            rows.append(([*line, measured.label], each))
    known = [place for place in range(len(titles)) if any(each[place] is not None for _, each in rows)]
    if known:
        head = [*table.headings, "settings", *(titles[place] for place in known)]
        body = [[*words, *(_shown(each[place], 2) for place in known)] for words, each in rows]
        text = _markdown([head, ["---"] * (len(table.headings) + 1) + ["---:"] * len(known), *body])
        yield f"<details><summary>What else the rows hold</summary>\n\n{text}\n\n</details>"


def _of_prior(results: list[Json]) -> list[Json]:
    """The same results, read as if the attack on the prior alone were the attack on the update."""
    found = []
    for result in results:
        rows = [{**row, "prior_of": None} for row in result["rows"] if row.get("prior_of") is not None]
        found += [{**result, "rows": rows}] if rows else []
    return found


def _on_other_data(table: Table, line: Line, data: Mapping[str, str]) -> bool:
    return any(part[text].instead and text not in data for part, text in zip(table.words, line, strict=True))


def _is_in_paper(table: Table, line: Line) -> bool:
    """Whether the paper has a figure of a line, which then is not just another reading of one that it has."""
    known = any(figure is not None for figure in table.figures[line])
    return known and not any(part[text].like for part, text in zip(table.words, line, strict=True))


def _markdown(rows: Iterable[Iterable[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown(value: float | None, digits: int) -> str:
    """Our figure with the digits of its column, or two that count where those would all be zero."""
    if value is None:
        return _HOLE
    return f"{value:.2g}" if 0 < abs(value) < 10.0**-digits else f"{value:.{digits}f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if 0.01 <= abs(value) < 1000 else f"{value:.1e}"


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


def _cases(table: Table, plans: Sequence[ReproductionPlan], place: int) -> Iterator[str]:
    """What the words stood for, in a list that folds away."""
    for plan in plans:
        run = [planned for planned in plan.lines[place] if planned.run]
        if not run:
            continue
        shown: dict[str, Json] = {"all lines": table.base.at(plan.scale) or {}}
        for number, part in enumerate(table.words):
            for text in dict.fromkeys(planned.line[number] for planned in run):
                brought = {"data": plan.data[text]} if text in plan.data else {}
                shown[text] = {**(part[text].at(plan.scale) or {}), **brought}
        seeds = "" if len(run[0].fields) == 1 else f"; seeds 0 to {len(run[0].fields) - 1}"
        which = f" at the settings of the {_LABELS[plan.scale]}" if len(plans) > 1 else ""
        summary = f"<details><summary>What the words stand for{which} (one {table.kind} for each line{seeds})</summary>"
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


def _not_run(plan: ReproductionPlan, found: Iterable[tuple[str, dict[Line, LineResults]]]) -> list[str]:
    """The reasons, each with the lines that it holds for."""
    held: dict[str, list[str]] = {}
    for which, table in found:
        for line, (_, why) in table.items():
            if why:
                held.setdefault(why + (which if why == "not run yet" else ""), []).append(", ".join(line))
    held = {why: list(dict.fromkeys(names)) for why, names in held.items()}
    lines = []
    for why, names in held.items():
        more = f" and {len(names) - FARTHEST} more" if len(names) > FARTHEST else ""
        lines.append(f"{'; '.join(names[:FARTHEST])}{more}: {why}.")
    away = [
        f"On {text} itself, which is not at hand (`--data '{text}={word.asks}'`): {word.instead} stands in for it."
        for text, word in _stand_ins(plan).items()
    ]
    return [*away, *lines, *plan.reproduction.not_run] or ["Everything in the table was run."]


def _versions(environments: Iterable[str], plans: Sequence[ReproductionPlan], folder: ResultFolder) -> str:
    named = []
    for text in sorted(environments):
        one = json.loads(text)
        named.append(
            f"Gradveil {one['gradveil']}, torch {one['torch']}, Python {one['python']}, {one['device']}, "
            f"{one['threads']} thread{'s' if one['threads'] != 1 else ''}"
        )
    scale: Scale = "small" if plans[0].scale == "small" else "paper"
    seeds = max(table.seeds[scale] for table in plans[0].reproduction.tables)
    digests = {entry.digest for plan in plans if plan.study for entry in plan.study.entries}
    took = sum(folder.seconds(digest) or 0.0 for digest in digests)
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
        return column.times * stdev(known) if len(known) > 1 else None
    plus = 0.0 if column.over.startswith("spread") else column.plus
    return column.times * fmean(known) + plus


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
