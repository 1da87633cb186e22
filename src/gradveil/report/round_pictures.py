"""The pictures of an audit of saved exchanges: for each training its stages one below the other."""

from __future__ import annotations

from gradveil.core.errors import BadFileError
from gradveil.report import pictures
from gradveil.report.gallery import MOST_COLUMNS, Cell, Gallery, Strip, Table, hung, scored_cell
from gradveil.report.records import Audit, Row


def build(audit: Audit) -> Gallery:
    """Encode every picture file once, within the page's budget, and lay out a table for each training."""
    rows = [row for row in audit.rows if not row.is_prior]
    if not rows or not all(row.per_image for row in audit.rows):
        raise BadFileError(f"{audit.folder / 'audit.json'}: a row lists no images; the file is damaged")
    wanted = {row.reconstruction: [image.picture for image in row.per_image[:MOST_COLUMNS]] for row in rows}
    truths = {row.truth: len(row.per_image[:MOST_COLUMNS]) for row in rows if row.truth is not None}

    def read_one(name: str) -> pictures.Pixels:
        if name in truths:
            return pictures.read(audit.path(name), "truth", picked=range(truths[name]))
        return pictures.read(audit.path(name), "reconstruction", picked=wanted[name])

    high, wide = read_one(rows[0].reconstruction).shape[1:3]
    strips = {training: _planned(rows, training) for training in dict.fromkeys(row.training for row in rows)}
    names = dict.fromkeys(name for planned in strips.values() for _, name in planned)
    encoded, rung = pictures.encode_all(names, read_one, side=max(high, wide))
    shown = max(len(sources) for sources in encoded.values())
    heads = tuple((str(place), "") for place in range(1, shown + 1))
    tables = tuple(
        Table(f"{training}: stage by stage", heads, tuple(_strip(row, name, encoded[name]) for row, name in planned))
        for training, planned in strips.items()
    )
    most = max(len(row.per_image) for row in rows)
    return hung(tables, rung, (wide, high), shown=shown, left_out=most - shown)


def _planned(rows: list[Row], training: str | None) -> list[tuple[Row, str]]:
    """The strips of a training as (row, file): for each stage its truth, unless it stands above, and its attacks."""
    stages: dict[tuple[str | None, bool], list[Row]] = {}
    for row in rows:
        if row.training == training:
            stages.setdefault((row.stage, row.truth is None), []).append(row)
    planned, above = [], None
    for members in stages.values():
        first = members[0]
        same = [(image.client, image.index) for image in first.per_image]
        if first.truth is not None and same != above:
            planned.append((first, first.truth))
            above = same
        planned += [(row, row.reconstruction) for row in members]
    return planned


def _strip(row: Row, name: str, sources: list[str]) -> Strip:
    pairs = list(zip(sources, row.per_image, strict=False))
    when = row.stage or ""
    if name == row.truth:
        cells = (
            Cell(
                source,
                f"Private image {image.index} of {when}, client {image.client}",
                _facts(image.client, image.label),
            )
            for source, image in pairs
        )
        return Strip("Truth", when, "truth", tuple(cells))
    who = f"{row.attack} in {when}:"
    if row.truth is None:
        unknown = (Cell(source, f"{who} picture {place}") for place, (source, _) in enumerate(pairs, start=1))
        return Strip(row.attack, f"{when}, no truth", "attack", tuple(unknown))
    cells = (scored_cell(row, image, source, who) for source, image in pairs)
    return Strip(row.attack, when, "attack", tuple(cells))


def _facts(client: int | None, label: int | None) -> tuple[str, ...]:
    return (*([] if client is None else [f"client {client}"]), *([] if label is None else [f"label {label}"]))
