"""The pictures of the report: which stand in which table, what is written under each, and how they are stored.

Of the ladder of encodings the first that fits the page's budget is taken, and the page says which it was.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from gradveil.auditing.audit import Audit, ImageScore, Row
from gradveil.core.errors import BadFileError
from gradveil.core.reading import check_plain
from gradveil.domains.pictures import (
    ENCODINGS,
    LARGEST_SIDE,
    Encoding,
    Pixels,
    as_pixels,
    data_address,
    is_picture_shape,
    shown_size,
)
from gradveil.metrics.table import METRICS
from gradveil.report import words

MOST_COLUMNS = 24
MOST_LEAKING = 8
FEW, FEW_SIDE = 6, 128
MANY_SIDE = 96
BUDGET = 11_500_000
"""Characters of base64 on one page; text and curves of the largest report fit beside it in 15 MB."""


Pictures = tuple[str, tuple[int, ...]]
"""A file, and which of its pictures."""
_Key = TypeVar("_Key")


@dataclass(frozen=True)
class GalleryCell:
    """One picture. ``identified`` is None where nobody judged it, as for the truth."""

    alt: str
    scores: tuple[str, ...] = ()
    identified: bool | None = None
    source: str = ""
    """The picture itself; empty where the page held it before."""
    name: str = ""
    """What the page calls it, where it shows it more than once."""


@dataclass(frozen=True)
class Strip:
    """One row of pictures: the truth, or what one attack drew against one defense."""

    name: str
    detail: str
    kind: str
    file: str
    picked: tuple[int, ...]
    """Where its pictures stand in the file."""
    cells: tuple[GalleryCell, ...]

    @property
    def pictures(self) -> Pictures:
        return self.file, self.picked


@dataclass(frozen=True)
class GalleryTable:
    """Truth first, then attacks, then what the search draws without the update; a column has a title and a detail."""

    title: str
    columns: tuple[tuple[str, str], ...]
    strips: tuple[Strip, ...]


@dataclass(frozen=True)
class Gallery:
    """All picture tables, and how the pictures are shown."""

    tables: tuple[GalleryTable, ...]
    shown: int
    """How many images; some rows may be of fewer."""
    left_out: int
    loss: str
    width: int
    height: int
    pixelated: bool


def build(audit: Audit, folder: Path) -> Gallery:
    """Lay out the tables, then encode every picture file once, within the page's budget."""
    tables = _by_stage(audit, folder) if audit.trainings else _by_defense(audit, folder)
    strips = {strip.pictures: strip for table in tables for strip in table.strips}

    def read(pictures: Pictures) -> Pixels:
        file, picked = pictures
        kind = "truth" if strips[pictures].kind == "truth" else "reconstruction"
        return read_pictures(_inside(folder, file), kind, picked=picked)

    high, wide = read(next(iter(strips))).shape[1:3]
    encoded, encoding = encode_all(strips, read, side=max(high, wide))
    # A picture that the page shows more than once is in it once, under a name.
    times = Counter(source for table in tables for strip in table.strips for source in encoded[strip.pictures])
    repeated = (source for source, count in times.items() if count > 1)
    names = {source: f"picture-{number}" for number, source in enumerate(repeated, start=1)}
    held: set[str] = set()

    def filled(cell: GalleryCell, source: str) -> GalleryCell:
        again = source in held
        held.update({source} & names.keys())
        return replace(cell, source="" if again else source, name=names.get(source, ""))

    for place, table in enumerate(tables):
        pairs = [(strip, tuple(map(filled, strip.cells, encoded[strip.pictures]))) for strip in table.strips]
        tables[place] = replace(table, strips=tuple(replace(strip, cells=cells) for strip, cells in pairs))
    shown = max(len(sources) for sources in encoded.values())
    width, height = shown_size(wide, high, near=FEW_SIDE if shown <= FEW else MANY_SIDE)
    return Gallery(
        tables=tuple(tables),
        shown=shown,
        left_out=max(len(row.per_image) for row in audit.rows if not row.is_prior) - shown,
        loss=encoding.words(),
        width=width,
        height=height,
        pixelated=max(wide, high) <= LARGEST_SIDE // 2,
    )


def _inside(folder: Path, name: str) -> Path:
    """A file of the folder. A name that leads out of it is refused: the JSON may come from a stranger."""
    try:
        path = (folder / name).resolve()
        inside = path.is_relative_to(folder.resolve())
    except (ValueError, OSError, RuntimeError):  # characters that no file name has, a loop of links
        inside = False
    if not inside:
        raise BadFileError(f"{folder / 'audit.json'} names {name!r}, which is no file in the audit folder")
    return path


def _by_defense(audit: Audit, folder: Path) -> list[GalleryTable]:
    """The tables of an audit whose rows are all of the same images, each with chance last.

    First every defense under its worst attack, and where that chooses among candidates, under the worst that does not.
    Where there are several attacks, then all of them for each defense, and at the end what each search draws without
    the update.
    """
    first, where = audit.rows[0], folder / "audit.json"
    if not first.per_image:
        raise BadFileError(f"{where}: row 1 lists no images; the file is damaged")
    for number, row in enumerate(audit.rows, start=1):
        if [image.index for image in row.per_image] != [image.index for image in first.per_image]:
            raise BadFileError(f"{where}: row {number} is about other images than row 1")
    if first.files.truth is None:
        raise BadFileError(f"{where}: row 1 names no truth; the file is damaged")
    columns = first.per_image[:MOST_COLUMNS]
    named = [words.label_name(image.label, audit.class_names) for image in columns]
    heads = tuple((f"Image {image.index}", name) for image, name in zip(columns, named, strict=True))
    private = tuple(GalleryCell(f"Private {head.lower()}, {name}") for head, name in heads)
    truth = Strip("Truth", "the private images", "truth", first.files.truth, tuple(range(len(columns))), private)

    def table(
        title: str, rows: Sequence[Row], *, by_attack: bool = False, chance_of: Sequence[Row] = ()
    ) -> GalleryTable:
        """About one defense where ``by_attack``, so the attack is what tells rows apart."""
        names = {row.attack for row in chance_of}
        priors = [row for row in audit.rows if row.is_prior and row.prior_of in names]
        return GalleryTable(title, heads, (truth, *(_against(row, by_attack=by_attack) for row in [*rows, *priors])))

    attacks: dict[str, list[Row]] = {}
    for row in audit.rows:
        if not row.is_prior:
            attacks.setdefault(row.defense, []).append(row)
    by = {verdict.defense: (verdict.attack, verdict.round) for verdict in audit.verdicts}
    worst = {
        defense: next((row for row in rows if (row.attack, row.round) == by.get(defense)), rows[0])
        for defense, rows in attacks.items()
    }
    worsts, every = list(worst.values()), [row for rows in attacks.values() for row in rows]
    tables = [*_leaking_most(audit, every), table("Every defense under its worst attack", worsts, chance_of=worsts)]
    if len(every) == len(worsts):
        return tables
    rebuilding = {one.defense: (one.rebuilt_apart or one).attack for one in audit.verdicts}
    rebuilt = [row for row in every if row.attack == rebuilding.get(row.defense) and row.candidates is None]
    if rebuilt and any(verdict.rebuilt_apart for verdict in audit.verdicts):
        title = "Every defense under the worst attack without candidates"
        tables.append(table(title, rebuilt, chance_of=rebuilt))
    for defense, rows in attacks.items():
        title = f"{words.defense_name(defense)}: every attack"
        tables.append(table(title, rows, by_attack=True, chance_of=[worst[defense]]))
    alone = table("Every search without the update", [], by_attack=True, chance_of=every)
    return [*tables, alone] if len(alone.strips) > 1 else tables


def _leaking_most(audit: Audit, rows: Sequence[Row]) -> list[GalleryTable]:
    """The examples that most attacks picked out, whatever the defense; none where no example differs from another."""
    leaks = []
    for place, image in enumerate(rows[0].per_image):
        own = [row.per_image[place] for row in rows]
        judged = [one.identified for one in own if one.identified is not None]
        read = [one.label_correct for one in own if one.label_correct is not None]
        best = max((one.psnr or 0.0 for row, one in zip(rows, own, strict=True) if row.candidates is None), default=0.0)
        leaks.append((sum(judged), best, place, image, len(judged), (sum(read), len(read))))
    counts = {count for count, *_ in leaks}
    if max(counts) == 0 or len(leaks) < 2:
        return []
    leaks.sort(key=lambda one: (-one[0], -one[1], one[2]))
    heads, cells = [], []
    for count, best, _, image, judged_by, (right, reads) in leaks[:MOST_LEAKING]:
        name = words.label_name(image.label, audit.class_names)
        heads.append((f"Image {image.index}", name))
        scores = [f"by {count} of {judged_by} attacks", f"rebuilt to {best:.1f} dB" if best else "not rebuilt"]
        scores += [f"label read by {right} of {reads}"] if reads else []
        cells.append(GalleryCell(f"Private image {image.index}, {name}, which leaks much", tuple(scores)))
    picked = tuple(place for _, _, place, *_ in leaks[:MOST_LEAKING])
    file = rows[0].files.truth or ""
    strip = Strip("Picked out", "over all attacks and defenses", "truth", file, picked, tuple(cells))
    return [GalleryTable("The examples that leak most", tuple(heads), (strip,))]


def _against(row: Row, *, by_attack: bool) -> Strip:
    chosen = words.choice(row) + ("" if row.stage is None else f", {row.stage}")
    if row.is_prior:
        name, detail = "Chance", f"{words.attack_name(row)}{chosen}"
        who = f"{'Chosen' if chosen else 'Drawn'} without the update for"
    else:
        who = f"{row.attack} against {words.in_sentence(row.defense)}{chosen}:"
        name, detail = words.defense_name(row.defense), f"under {row.attack}{chosen}"
        if by_attack:
            name, detail = row.attack, f"against {words.in_sentence(row.defense)}{chosen}"
    return _drawn(row, name, detail, who)


def _by_stage(audit: Audit, folder: Path) -> list[GalleryTable]:
    """The tables of an audit of saved exchanges: for each training its stages one below the other.

    A stage has its truth, unless it stands above, and its attacks.
    """
    rows = [row for row in audit.rows if not row.is_prior]
    if not rows or not all(row.per_image for row in audit.rows):
        raise BadFileError(f"{folder / 'audit.json'}: a row lists no images; the file is damaged")
    stages: dict[str | None, dict[tuple[str | None, bool], list[Row]]] = {}
    for row in rows:
        stages.setdefault(row.training, {}).setdefault((row.stage, row.files.truth is None), []).append(row)
    shown = max(len(row.per_image[:MOST_COLUMNS]) for row in rows)
    heads = tuple((str(place), "") for place in range(1, shown + 1))
    tables = []
    for training, groups in stages.items():
        strips, above = [], None
        for (stage, _), members in groups.items():
            first, when = members[0], stage or ""
            same = [(image.client, image.index) for image in first.per_image]
            if first.files.truth is not None and same != above:
                strips.append(_truth_of(first, first.files.truth, when, audit.class_names))
                above = same
            for row in members:
                untold = "" if row.files.truth else ", no truth"
                strips.append(_drawn(row, row.attack, f"{when}{untold}", f"{row.attack} in {when}:"))
        tables.append(GalleryTable(f"{training}: stage by stage", heads, tuple(strips)))
    return tables


def _truth_of(row: Row, file: str, when: str, names: Mapping[int, str]) -> Strip:
    def cell(image: ImageScore) -> GalleryCell:
        said = [] if image.client is None else [f"client {image.client}"]
        said += [] if image.label is None else [words.label_name(image.label, names)]
        return GalleryCell(f"Private image {image.index} of {when}, client {image.client}", tuple(said))

    images = row.per_image[:MOST_COLUMNS]
    return Strip("Truth", when, "truth", file, tuple(range(len(images))), tuple(map(cell, images)))


def _drawn(row: Row, name: str, detail: str, who: str) -> Strip:
    """What an attack drew; without a truth there is nothing to say of it but its place."""
    shown = [METRICS["psnr"], METRICS["ssim" if row.identified_by == "ssim" else "lpips"]]
    images, cells = row.per_image[:MOST_COLUMNS], []
    for place, image in enumerate(images, start=1):
        if row.files.truth is None:
            cells.append(GalleryCell(f"{who} picture {place}"))
        else:
            scores = tuple(f"{metric.title} {metric.format(getattr(image, metric.name))}" for metric in shown)
            cells.append(GalleryCell(f"{who} image {image.index}", scores, image.identified))
    kind = "prior" if row.is_prior else "attack"
    return Strip(name, detail, kind, row.files.reconstruction, tuple(image.picture for image in images), tuple(cells))


def encode_all(
    files: Iterable[_Key], read: Callable[[_Key], Pixels], *, side: int, budget: int = BUDGET
) -> tuple[dict[_Key, list[str]], Encoding]:
    """Each file's pictures as data addresses, and how they are encoded.

    The page holds equal pictures once, so they weigh once. An encoding is left as soon as it is over the budget, so the
    cost of trying is bounded; the last one is taken as it comes. ``side`` is that of the pictures.
    """
    wanted = list(files)
    fitted = list(dict.fromkeys(encoding.fitted(side) for encoding in ENCODINGS))
    for encoding in fitted:
        left = math.inf if encoding is fitted[-1] else budget
        encoded: dict[_Key, list[str]] = {}
        held: set[str] = set()
        for file in wanted:
            encoded[file] = [data_address(encoding.png(pixels)) for pixels in read(file)]
            left -= sum(map(len, set(encoded[file]) - held))
            held.update(encoded[file])
            if left < 0:
                break
        else:
            break
    return encoded, encoding


def read_pictures(path: Path, kind: str, *, picked: Sequence[int]) -> Pixels:
    """Pictures of a safetensors file with ``inputs`` [n, C, H, W] in [0, 1], by position, as [len(picked), H, W, C].

    The file's header says what it is: "truth" or "reconstruction". That, and kind and shape of the tensor, are checked
    before any pixel is read.
    """
    try:
        check_plain(path)  # a pipe would be waited for
        with safe_open(path, framework="numpy") as file:
            try:
                found = json.loads((file.metadata() or {})["gradveil"])["kind"]
            except (KeyError, TypeError, ValueError, RecursionError):
                raise BadFileError(
                    f"{path} was not written by Gradveil: its header does not say what it holds"
                ) from None
            if found != kind:
                raise BadFileError(f"{path} holds {str(found)[:40]!r}, not {kind!r}: was it renamed?")
            if "inputs" not in file.keys():  # noqa: SIM118 (not a mapping)
                raise BadFileError(f"{path} holds no pictures; the file is damaged")
            inputs = file.get_slice("inputs")
            dtype, shape = inputs.get_dtype(), tuple(inputs.get_shape())
            if dtype != "F32" or not is_picture_shape(shape):
                raise BadFileError(f"{path}: pictures should be float32 [n, 1 or 3, H, W], not {dtype} {list(shape)}")
            if not all(0 <= at < shape[0] for at in picked):
                raise BadFileError(
                    f"{path} holds {shape[0]} pictures, not all that the audit lists; the folder is not complete"
                )
            values = np.concatenate([inputs[at : at + 1] for at in picked])
    except FileNotFoundError:
        raise BadFileError(f"{path} is missing; the audit folder is not complete, run the audit again") from None
    except OSError as error:
        raise BadFileError(f"cannot read {path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise BadFileError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if not np.isfinite(values).all():
        raise BadFileError(f"{path} holds values that are not finite; pictures are in [0, 1]")
    return as_pixels(values)
