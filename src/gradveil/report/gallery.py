"""The pictures of the report: which stand in which table, and what is written under each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from gradveil.core.errors import BadFileError
from gradveil.report import pictures, words
from gradveil.report.measures import STYLES, styled
from gradveil.report.records import Audit, ImageScore, Row

MOST_COLUMNS = 24
FEW, FEW_SIDE = 6, 128
MANY_SIDE = 96
LARGEST_SIDE = 128


@dataclass(frozen=True)
class Cell:
    """One picture. ``identified`` is None for the truth, which is not judged."""

    source: str
    """The picture itself; empty where the page held it before."""
    alt: str
    scores: tuple[str, ...] = ()
    identified: bool | None = None
    name: str = ""
    """What the page calls it, where it shows it more than once."""


@dataclass(frozen=True)
class Strip:
    """One row of pictures: the truth, or what one attack drew against one defense."""

    name: str
    detail: str
    kind: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """Truth first, then attacks, then what the search draws without the update; a column has a title and a detail."""

    title: str
    columns: tuple[tuple[str, str], ...]
    strips: tuple[Strip, ...]


@dataclass(frozen=True)
class Gallery:
    """All picture tables, and how the pictures are shown."""

    tables: tuple[Table, ...]
    shown: int
    """How many images; some rows may be of fewer."""
    left_out: int
    loss: str
    width: int
    height: int
    pixelated: bool


class Planned(NamedTuple):
    """A table before its pictures. ``by_attack``: it is about one defense, so the attack is what tells rows apart."""

    title: str
    rows: list[Row]
    by_attack: bool = False


def build(audit: Audit) -> Gallery:
    """Lay out the tables, then encode every picture file once, within the page's budget."""
    _check_same_images(audit)
    plan = layout(audit)
    truth, listed = audit.rows[0].truth, audit.rows[0].per_image
    if truth is None:
        raise BadFileError(f"{audit.folder / 'audit.json'}: row 1 names no truth; the file is damaged")
    columns = listed[:MOST_COLUMNS]
    heads = tuple((f"Image {i.index}", "" if i.label is None else f"label {i.label}") for i in columns)
    order = {row.reconstruction: [image.picture for image in row.per_image[:MOST_COLUMNS]] for row in audit.rows}

    def read_one(name: str) -> pictures.Pixels:
        if name == truth:
            return pictures.read(audit.path(name), "truth", picked=range(len(columns)))
        return pictures.read(audit.path(name), "reconstruction", picked=order[name])

    high, wide = read_one(truth).shape[1:3]
    names = [truth, *dict.fromkeys(row.reconstruction for table in plan for row in table.rows)]
    encoded, rung = pictures.encode_all(names, read_one, side=max(high, wide))
    first = _truth_strip(columns, encoded[truth])
    tables = tuple(
        Table(title, heads, (first, *(_strip(row, encoded[row.reconstruction], by_attack=by_attack) for row in rows)))
        for title, rows, by_attack in plan
    )
    return hung(tables, rung, (wide, high), shown=len(columns), left_out=len(listed) - len(columns))


def hung(
    tables: tuple[Table, ...], rung: pictures.Rung, size: tuple[int, int], *, shown: int, left_out: int
) -> Gallery:
    """These tables with pictures as large as their number allows."""
    width, height = shown_size(*size, near=FEW_SIDE if shown <= FEW else MANY_SIDE)
    pixelated = max(size) <= LARGEST_SIDE // 2
    once = _each_held_once(tables)
    return Gallery(once, shown, left_out, loss=rung.words(), width=width, height=height, pixelated=pixelated)


def _each_held_once(tables: tuple[Table, ...]) -> tuple[Table, ...]:
    """The same tables, where a picture that was shown before is only named."""
    times = Counter(cell.source for table in tables for strip in table.strips for cell in strip.cells)
    repeated = (source for source, count in times.items() if count > 1)
    names = {source: f"picture-{number}" for number, source in enumerate(repeated, start=1)}
    held: set[str] = set()

    def named(cell: Cell) -> Cell:
        if cell.source not in names:
            return cell
        source = "" if cell.source in held else cell.source
        held.add(cell.source)
        return replace(cell, source=source, name=names[cell.source])

    def once(strip: Strip) -> Strip:
        return replace(strip, cells=tuple(map(named, strip.cells)))

    return tuple(replace(table, strips=tuple(map(once, table.strips))) for table in tables)


def layout(audit: Audit) -> list[Planned]:
    """The tables, each with chance last.

    First every defense under its worst attack, and where that chooses among candidates, under the worst that does not.
    Where there are several attacks, then all of them for each defense, and at the end what each search draws without
    the update.
    """
    attacks: dict[str, list[Row]] = {}
    for row in audit.rows:
        if not row.is_prior:
            attacks.setdefault(row.defense, []).append(row)
    named = {verdict.defense: verdict.attack for verdict in audit.verdicts}
    worst = {defense: _named_or_first(rows, named.get(defense)) for defense, rows in attacks.items()}
    plan = [Planned("Every defense under its worst attack", [*worst.values(), *_priors(audit, list(worst.values()))])]
    if all(len(rows) == 1 for rows in attacks.values()):
        return plan
    if rebuilt := _rebuilt(audit, attacks):
        title = "Every defense under the worst attack without candidates"
        plan.append(Planned(title, [*rebuilt, *_priors(audit, rebuilt)]))
    for defense, rows in attacks.items():
        title = f"{words.defense_name(defense)}: every attack"
        plan.append(Planned(title, [*rows, *_priors(audit, [worst[defense]])], by_attack=True))
    priors = _priors(audit, [row for rows in attacks.values() for row in rows])
    return [*plan, Planned("Every search without the update", priors, by_attack=True)] if priors else plan


def _rebuilt(audit: Audit, attacks: dict[str, list[Row]]) -> list[Row]:
    """Each defense under the worst attack that rebuilds; none where no verdict is a choice among candidates."""
    if not any(verdict.rebuilt for verdict in audit.verdicts):
        return []
    named = {one.defense: one.rebuilt.attack if one.rebuilt else one.attack for one in audit.verdicts}
    return [
        row
        for defense, rows in attacks.items()
        for row in rows
        if row.attack == named.get(defense) and row.candidates is None
    ]


def _named_or_first(rows: list[Row], attack: str | None) -> Row:
    return next((row for row in rows if row.attack == attack), rows[0])


def _priors(audit: Audit, attacks: list[Row]) -> list[Row]:
    """The prior-only rows of these attacks, each once."""
    names = {attack.attack for attack in attacks}
    return [row for row in audit.rows if row.is_prior and row.prior_of in names]


def shown_size(width: int, height: int, *, near: int) -> tuple[int, int]:
    """How large a picture is shown, in page pixels: a whole multiple of its own size where it is small.

    >>> shown_size(32, 32, near=96), shown_size(28, 28, near=96), shown_size(224, 112, near=96)
    ((96, 96), (84, 84), (128, 64))
    """
    longest = max(width, height)
    scale = min(max(1, round(near / longest)), LARGEST_SIDE / longest)
    return max(1, round(width * scale)), max(1, round(height * scale))


def _check_same_images(audit: Audit) -> None:
    indices = [image.index for image in audit.rows[0].per_image]
    if not indices:
        raise BadFileError(f"{audit.folder / 'audit.json'}: row 1 lists no images; the file is damaged")
    for number, row in enumerate(audit.rows, start=1):
        if [image.index for image in row.per_image] != indices:
            raise BadFileError(f"{audit.folder / 'audit.json'}: row {number} is about other images than row 1")


def _truth_strip(columns: tuple[ImageScore, ...], sources: list[str]) -> Strip:
    cells = tuple(
        Cell(source, f"Private image {image.index}, label {image.label}")
        for source, image in zip(sources, columns, strict=True)
    )
    return Strip("Truth", "the private images", "truth", cells)


def _strip(row: Row, sources: list[str], *, by_attack: bool) -> Strip:
    images, chosen = row.per_image[: len(sources)], words.choice(row)
    if row.is_prior:
        drawn = "Chosen" if chosen else "Drawn"
        name, detail, who = "Chance", f"{words.attack_name(row)}{chosen}", f"{drawn} without the update for"
    else:
        name, detail = words.defense_name(row.defense), f"under {row.attack}{chosen}"
        if by_attack:
            name, detail = row.attack, f"against {words.in_sentence(row.defense)}{chosen}"
        who = f"{row.attack} against {words.in_sentence(row.defense)}{chosen}:"
    cells = tuple(scored_cell(row, image, source, who) for source, image in zip(sources, images, strict=True))
    return Strip(name, detail, "prior" if row.is_prior else "attack", cells)


def scored_cell(row: Row, image: ImageScore, source: str, who: str) -> Cell:
    look = "ssim" if row.identified_by == "ssim" else "lpips"
    scores = tuple(f"{key.upper()} {styled(image.scores[key], STYLES[key])}" for key in ("psnr", look))
    return Cell(source, f"{who} image {image.index}", scores, image.identified)
