"""Puts a saved audit on one page and writes it beside the audit."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import jinja2
import yaml
from markupsafe import Markup

from gradveil.core.atomic import remove_partial, write_atomically
from gradveil.core.errors import BadFileError
from gradveil.core.locks import claimed
from gradveil.report import gallery, measures, plots, round_pictures, rounds, words
from gradveil.report.charts import STYLES
from gradveil.report.counters import counter_moves
from gradveil.report.folder import load
from gradveil.report.records import Audit, Row
from gradveil.report.tradeoff import tradeoff


def render(folder: Path) -> Path:
    """Write ``folder/report.html`` from the audit saved in ``folder``, and return its path.

    The page is complete in itself: it fetches nothing, and a content security policy in it forbids that anything does.
    """
    audit = load(folder)
    try:
        html = templates().get_template("report.html").render(_content(audit))
    except RecursionError:  # JSON may nest deeper than it can be written as YAML
        raise BadFileError(f"{folder / 'audit.json'} is nested too deeply; the file is damaged") from None
    with claimed(folder):
        remove_partial(folder, "report.html")
        write_atomically(folder / "report.html", html.encode(errors="replace"))
    return folder / "report.html"


def templates() -> jinja2.Environment:
    """Templates that escape whatever the JSON brings, and fail on a name that does not exist."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gradveil.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "styled": measures.styled,
        "span": measures.span,
        "breakable": _breakable,
        "defense_name": words.defense_name,
        "attack_name": words.attack_name,
        "outcome": words.outcome,
        "short_attack": words.short_attack,
        "threat_name": words.threat_name,
        "points": words.points,
    }
    return environment


def _content(audit: Audit) -> dict[str, object]:
    """Everything the template shows, in the order of the page."""
    style, script = template_file("report.css") + template_file("charts.css"), template_file("report.js")
    flags = words.flags(audit.rows)
    return {
        "style": Markup(style),
        "script": Markup(script),
        "style_hash": policy_hash(style),
        "script_hash": policy_hash(script),
        "audit": audit,
        "model": _named(audit, "model"),
        "data": _named(audit, "data"),
        "headline": words.headline(audit.verdicts),
        "cards": [(verdict, words.above_chance(verdict), plots.share_bar(verdict)) for verdict in audit.verdicts],
        "ranked": any(verdict.ranked_first is not None for verdict in audit.verdicts),
        "rebuilt": any(verdict.rebuilt for verdict in audit.verdicts),
        "privacy_grades": words.grades(audit.grades["privacy"], "%") if _graded(audit) else "",
        "utility_grades": words.grades(audit.grades["utility"], "") if _costed(audit) else "",
        "threats": list(dict.fromkeys(row.threat for row in audit.rows)),
        "assumptions": words.assumptions(audit.rows),
        "setting": words.setting(
            audit.case, audit.trainings, [one.gallery for one in audit.verdicts if one.gallery is not None]
        ),
        "counter_moves": counter_moves(audit.rows),
        "over_training": rounds.over_training(audit.rows),
        "styles": STYLES,
        "gallery": round_pictures.build(audit) if audit.trainings else gallery.build(audit),
        "tradeoff": tradeoff(audit.verdicts),
        "measures": _shown(audit.rows),
        "missing": words.missing(audit.rows),
        "logged": words.logged(audit.rows),
        "flags": flags,
        "explained": audit.flags,
        "flag_numbers": {flag: number for number, (flag, _) in enumerate(flags, start=1)},
        "curves": _curves(audit.rows),
        "case_yaml": yaml.safe_dump(dict(audit.case.raw), sort_keys=False, allow_unicode=True),
    }


def _shown(rows: tuple[Row, ...]) -> list[measures.Measure]:
    """The columns of the results; ranks only where an attack ranked candidates."""
    return [
        m for m in measures.MEASURES if m.key != "ranked_first" or any(row.scores[m.key] is not None for row in rows)
    ]


def _graded(audit: Audit) -> bool:
    return any(verdict.grade for verdict in audit.verdicts)


def _costed(audit: Audit) -> bool:
    return any(verdict.cost for verdict in audit.verdicts)


def _named(audit: Audit, key: str) -> str:
    """What a case names or, where exchanges were saved elsewhere, what their trainings do."""
    return ", ".join(dict.fromkeys(words.value_of(one, key) for one in audit.trainings or (audit.case,)))


def _breakable(spec: str) -> Markup:
    """A spec that may break after its punctuation, and so need not anywhere else."""
    pieces = re.findall(r"[^:,+]*[:,+]?", spec)
    return Markup("<wbr>").join(piece for piece in pieces if piece)


def _curves(rows: tuple[Row, ...]) -> list[tuple[Row, Markup]]:
    drawn = ((row, plots.objective_curve(row.trace, words.row_name(row))) for row in rows if not row.is_prior)
    return [(row, curve) for row, curve in drawn if curve is not None]


def template_file(name: str) -> str:
    return Path(__file__).with_name("templates").joinpath(name).read_text(encoding="utf-8")


def policy_hash(text: str) -> str:
    """How a content security policy names the one style sheet or script that may be used."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
