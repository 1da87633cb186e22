"""Reads a saved audit folder and checks what it finds: the JSON may come from a stranger."""

from __future__ import annotations

import json
from pathlib import Path

from gradveil.core.errors import BadFileError
from gradveil.core.reading import read_text
from gradveil.report.fields import Fields, number_or_none
from gradveil.report.measures import MEASURES
from gradveil.report.records import Audit, Cost, ImageScore, Meaning, Rebuilt, Row, Trace, Verdict

VERSION = 1
LARGEST_JSON = 256 * 2**20


def load(folder: Path) -> Audit:
    """Read ``folder/audit.json``."""
    if not folder.is_dir():
        raise BadFileError(f"{folder} is not a folder; give the folder that an audit was saved in")
    path = folder / "audit.json"
    top = Fields(read_json(path, "an audit"), str(path))
    version = top.raw.get("version")
    if version != VERSION:
        raise BadFileError(
            f"{path} is of version {version!r}, this gradveil reads version {VERSION}; "
            "render it with the gradveil that wrote it"
        )
    rows = tuple(_row(fields) for fields in top.objects("rows", "row"))
    if not rows:
        raise BadFileError(f"{path} holds no rows yet; finish the audit with --resume")
    left_out = top.object("left_out")
    return Audit(
        folder=folder,
        complete=top.raw.get("complete") is not False,
        case=top.object("case"),
        environment=top.object("environment"),
        rows=rows,
        verdicts=tuple(_verdict(fields) for fields in top.objects("verdicts", "verdict")),
        trainings=tuple(top.objects("trainings", "training")),
        flags=_meanings(top.object("flags")),
        grades={kind: _bounds(top.object("grades").object(kind)) for kind in ("privacy", "utility")},
        left_out={defense: left_out.text(defense) for defense in left_out.raw},
    )


def read_json(path: Path, what: str) -> object:
    """The JSON of a file that should hold ``what``."""
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON:
            raise BadFileError(f"{path} is too large for {what} ({size / 2**20:.0f} MiB)")
        return json.loads(read_text(path, most=LARGEST_JSON))
    except FileNotFoundError:
        raise BadFileError(f"there is no {path}; give the folder that {what} was saved in") from None
    except OSError as error:
        raise BadFileError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested without end
        raise BadFileError(f"{path} is not valid JSON; the file is damaged or was cut short") from None


def _row(fields: Fields) -> Row:
    files = fields.object("files")
    return Row(
        defense=fields.text("defense"),
        attack=fields.text("attack"),
        prior_of=fields.optional_text("prior_of"),
        threat=fields.optional_text("threat") or "",
        assumptions=tuple(dict.fromkeys(fields.texts("assumptions"))),
        scores={measure.key: fields.number(measure.key) for measure in MEASURES},
        interval=fields.interval("identified_interval"),
        identified_by=fields.optional_text("identified_by"),
        not_available={key: str(reason) for key, reason in fields.object("not_available").raw.items()},
        per_image=tuple(_image(f, at) for at, f in enumerate(fields.objects("per_image", "image"))),
        objective=fields.number("objective"),
        seconds=fields.number("seconds"),
        flags=tuple(dict.fromkeys(fields.texts("flags"))),
        log=dict(fields.object("log").raw),
        trace=_trace(fields.object("trace")),
        reconstruction=files.text("reconstruction"),
        truth=files.optional_text("truth"),
        candidates=_whole(fields, "candidates"),
        counter_moves=_counter_moves(fields),
        training=fields.optional_text("training"),
        stage=fields.optional_text("stage"),
        round_number=_whole(fields, "round"),
        model_accuracy=fields.number("model_accuracy"),
    )


def _counter_moves(fields: Fields) -> dict[str, str | None] | None:
    if fields.raw.get("counter_moves") is None:
        return None
    moves = fields.object("counter_moves")
    return {link: moves.optional_text(link) for link in moves.raw}


def _image(fields: Fields, at: int) -> ImageScore:
    picture = _whole(fields, "picture")
    return ImageScore(
        index=_whole(fields, "index"),
        picture=at if picture is None else picture,
        label=_whole(fields, "label"),
        scores={key: fields.number(key) for key in ("psnr", "ssim", "lpips")},
        identified=None if fields.raw.get("identified", False) is None else fields.flag("identified"),
        client=_whole(fields, "client"),
    )


def _trace(fields: Fields) -> Trace:
    """The trace, cut to the shortest of its parts: an attack that stopped early has fewer values than steps."""
    steps = tuple(number_or_none(s) for s in fields.items("steps"))
    known = tuple(s for s in steps if s is not None)
    if len(known) < len(steps):
        raise BadFileError(f"{fields.where}: 'steps' should be a list of numbers; the file is damaged")
    lines = tuple(
        tuple(number_or_none(v) for v in line[: len(known)])
        for line in fields.items("objective")
        if isinstance(line, list)
    )
    return Trace(known, lines)


def _chance(fields: Fields, at_random: float) -> float | None:
    alone = fields.number("prior_only_identified")
    return alone if alone is None else max(alone, at_random)


def _verdict(fields: Fields) -> Verdict:
    gallery = _whole(fields, "gallery")
    at_random = fields.number("chance") or (1 / gallery if gallery else 0.0)
    return Verdict(
        defense=fields.text("defense"),
        attack=fields.optional_text("attack"),
        threat=fields.optional_text("threat"),
        identified=fields.number("identified"),
        interval=fields.interval("identified_interval"),
        chance=_chance(fields, at_random),
        gallery=gallery,
        images=_whole(fields, "images"),
        sentence=fields.optional_text("sentence") or "",
        grade=fields.optional_text("grade"),
        flags=tuple(dict.fromkeys(fields.texts("flags"))),
        cost=None if fields.raw.get("cost") is None else _cost(fields.object("cost")),
        candidates=_whole(fields, "candidates"),
        ranked_first=fields.number("ranked_first"),
        rebuilt=None if fields.raw.get("rebuilt") is None else _rebuilt(fields.object("rebuilt"), at_random),
    )


def _rebuilt(fields: Fields, at_random: float) -> Rebuilt:
    return Rebuilt(
        attack=fields.text("attack"),
        identified=fields.number("identified"),
        interval=fields.interval("identified_interval"),
        chance=_chance(fields, at_random),
    )


def _cost(fields: Fields) -> Cost:
    return Cost(
        grade=fields.text("grade"),
        accuracy=fields.number("accuracy"),
        accuracy_lost=fields.number("accuracy_lost"),
        time_added=fields.number("time_added"),
        sentence=fields.optional_text("sentence") or "",
    )


def _meanings(fields: Fields) -> dict[str, Meaning]:
    each = {name: fields.object(name) for name in fields.raw}
    return {name: Meaning(one.text("raised_if"), one.text("because")) for name, one in each.items()}


def _bounds(fields: Fields) -> dict[str, float]:
    return {letter: bound for letter in fields.raw if (bound := fields.number(letter)) is not None}


def _whole(fields: Fields, key: str) -> int | None:
    value = fields.number(key)
    return None if value is None else round(value)
