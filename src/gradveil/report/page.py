"""Puts a saved audit on one page and writes it beside the audit; likewise the curves of trainings."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import jinja2
import yaml
from markupsafe import Markup

from gradveil.auditing.audit import Audit, read_audit
from gradveil.core.atomic import remove_partial, write_atomically
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.locks import claimed
from gradveil.metrics.table import METRICS, styled
from gradveil.report import answers, gallery, svg, words
from gradveil.report.sections import TrainingCurves, over_training, tradeoff


def render(folder: Path) -> Path:
    """Write ``folder/report.html`` from the audit saved in ``folder``, and return its path.

    The page is complete in itself: it fetches nothing, and a content security policy in it forbids that anything does.
    """
    audit = read_audit(folder)
    if not audit.rows:
        raise BadFileError(f"{folder / 'audit.json'} holds no rows yet; finish the audit with --resume")
    try:
        html = _templates().get_template("report.html").render(_content(audit, folder))
    except RecursionError:  # JSON may nest deeper than it can be written as YAML
        raise BadFileError(f"{folder / 'audit.json'} is nested too deeply; the file is damaged") from None
    with claimed(folder):
        remove_partial(folder, "report.html")
        write_atomically(folder / "report.html", html.encode(errors="replace"))
    return folder / "report.html"


def render_trainings(folders: Sequence[Path], page: Path) -> Path:
    """Write one page with the curves of these trainings, and return its path. Nothing in it is fetched."""
    if not folders:
        raise GradveilError("nothing to compare: name folders, as in gradveil train --compare DIR DIR --out page.html")
    if page.is_dir():
        raise GradveilError(f"{page} is a folder; name the page to write, as in --out page.html")
    shown = [TrainingCurves(folder) for folder in folders]
    shared = {name: value for name, value in shown[0].case.items() if all(one.case.get(name) == value for one in shown)}
    return write_page(
        "trainings.html",
        page,
        trainings=shown,
        shared=shared,
        differing=sorted({name for one in shown for name in one.case} - shared.keys()),
        styles=svg.STYLES,
        charts=[
            ("Accuracy by round", svg.chart([one.accuracy for one in shown], "accuracy", "rounds", share=True)),
            ("Accuracy by time", svg.chart([one.over_time for one in shown], "accuracy", "seconds", share=True)),
            ("Loss by round", svg.chart([one.loss for one in shown], "loss", "rounds")),
        ],
    )  # fmt: skip


def write_page(template: str, page: Path, **content: object) -> Path:
    """Write a page without scripts from a template, and return its path."""
    html = _templates().get_template(template).render(**_inlined("style", "report.css", "charts.css"), **content)
    write_atomically(page, html.encode(errors="replace"))
    return page


def _templates() -> jinja2.Environment:
    """Templates that escape whatever the JSON brings, and fail on a name that does not exist."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gradveil.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "styled": styled,
        "span": words.span,
        "breakable": _breakable,
        "defense_name": words.defense_name,
        "attack_name": words.attack_name,
        "short_attack": words.short_attack,
        "threat_name": words.threat_name,
        "points": words.points,
        "kind_of": words.kind_of,
        "short_commit": lambda text: re.sub(r"\b([0-9a-f]{10})[0-9a-f]{30}\b", r"\1", text),
        "ceiling": answers.ceiling,
    }
    return environment


def _content(audit: Audit, folder: Path) -> dict[str, object]:
    """Everything the template shows, in the order of the page."""
    rows, verdicts = audit.rows, audit.verdicts
    flags = words.flags(rows)
    graded = any(verdict.grade for verdict in verdicts)
    costed = any(verdict.cost for verdict in verdicts)
    about = [one.model_dump() for one in audit.trainings] or [audit.case]
    curves = [(row, svg.objective_curve(row.trace, words.row_name(row))) for row in rows if not row.is_prior]
    kinds = {(row.defense, row.attack): words.kind_of(row) for row in rows}
    return {
        **_inlined("style", "report.css", "charts.css"),
        **_inlined("script", "report.js"),
        "audit": audit,
        "model": ", ".join(dict.fromkeys(words.value_of(one, "model") for one in about)),
        "data": ", ".join(dict.fromkeys(words.value_of(one, "data") for one in about)),
        "headline": words.headline(verdicts, people=audit.labels_are_people),
        "cards": [
            (
                one,
                [(found, svg.share_bar(found)) for found in answers.answers(one, people=audit.labels_are_people)],
                kinds.get((one.defense, one.attack or ""), ""),
            )
            for one in verdicts
        ],
        "advice": answers.recommendations(audit),
        "privacy_grades": words.grades(audit.grades.get("privacy", {}), "%") if graded else "",
        "utility_grades": words.grades(audit.grades.get("utility", {}), "") if costed else "",
        "threats": list(dict.fromkeys((row.threat, row.adversary) for row in rows)),
        "assumptions": words.assumptions(rows),
        "setting": words.setting(
            audit.case, audit.trainings, [one.gallery for one in verdicts if one.gallery is not None]
        ),
        "counter_moves": words.counter_moves(rows),
        "over_training": over_training(rows),
        "styles": svg.STYLES,
        "gallery": gallery.build(audit, folder),
        "tradeoff": tradeoff(verdicts),
        # Ranks are a column only where an attack ranked candidates.
        "metrics": [
            metric
            for metric in METRICS.values()
            if metric.meaning and (metric.name != "ranked_first" or any(row.ranked_first is not None for row in rows))
        ],
        "missing": words.missing(rows),
        "logged": words.logged(rows),
        "flags": flags,
        "explained": audit.flags,
        "flag_numbers": {flag: number for number, (flag, _) in enumerate(flags, start=1)},
        "curves": [(row, curve) for row, curve in curves if curve is not None],
        "origin": words.origin(audit.provenance),
        "repeat": words.repeat(audit),
        "case_yaml": yaml.safe_dump(audit.case, sort_keys=False, allow_unicode=True),
    }


def _breakable(spec: str) -> Markup:
    """A spec that may break after its punctuation, and so need not anywhere else."""
    pieces = re.findall(r"[^:,+]*[:,+]?", spec)
    return Markup("<wbr>").join(piece for piece in pieces if piece)


def _inlined(name: str, *files: str) -> dict[str, str]:
    """A style sheet or script under its name, and the hash by which a content security policy names it."""
    folder = Path(__file__).with_name("templates")
    text = "".join((folder / file).read_text(encoding="utf-8") for file in files)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
    return {name: Markup(text), f"{name}_hash": f"sha256-{digest}"}
