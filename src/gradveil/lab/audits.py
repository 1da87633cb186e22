"""What sweeps and reproductions read off an audit and its rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gradveil.auditing import MEANS, Case
from gradveil.auditing.audit import Audit
from gradveil.auditing.run import assemble
from gradveil.auditing.store import Store
from gradveil.auditing.verdict import Ceilings
from gradveil.core.atomic import make_folder, write_atomically
from gradveil.core.errors import GradveilError
from gradveil.core.types import Json

_NOT_IN_RESULTS = frozenset({"seconds", "files", "trace", "assumptions"})
"""What differs from run to run, or is long and stands in audit.json anyway."""


def result_of(done: Json) -> Json:
    """What of an audit or a training, as their files hold it, is worth comparing: equal runs have equal results."""
    rows = [{key: value for key, value in row.items() if key not in _NOT_IN_RESULTS} for row in done["rows"]]
    return {"rows": rows, **({"verdicts": done["verdicts"]} if "verdicts" in done else {})}


def split_audit(case: Case, whole: Audit, source: Path, target: Path) -> Audit:
    """The audit of one case, taken out of the audit of several, as it would be by itself; its folder is written."""
    left_out = {defense: why for defense, why in whole.left_out.items() if defense in case.defenses}
    defenses = tuple(defense for defense in case.defenses if defense not in left_out)
    if not defenses:
        raise GradveilError(f"no defense of the case can work on {case.model}: {next(iter(left_out.values()))}")
    attacks = tuple(dict.fromkeys(row.attack for row in whole.rows if not row.is_prior))  # in the order of the case
    chosen = case.model_copy(update={"attacks": attacks, "defenses": defenses})
    everything, own = Store(source), Store(target)
    _link(everything.truth, own.truth)
    found = {(row.attack, row.defense): row for row in whole.rows if not row.is_prior}
    rows = [found[attack, defense] for attack in chosen.attacks for defense in defenses]
    for row in (row for row in whole.rows if row.is_prior):
        # The first defense of all stands in it, where this case would have its own first.
        files = row.files.model_copy(update={"observation": found[row.prior_of or "", defenses[0]].files.observation})
        rows.append(row.model_copy(update={"defense": defenses[0], "files": files}))
    for row in rows:
        _link(everything.reconstruction(row.digest), own.reconstruction(row.digest))
        name = Path(row.files.observation or "")
        for path in [source / name, *source.glob(f"{name.parent}/{name.stem}-[0-9]*{name.suffix}")]:
            _link(path, target / path.relative_to(source))
        own.save_row(row.digest, row)
    proved = {
        one.defense: Ceilings(one.ceiling, one.ceiling_of_run, one.certificate)
        for one in whole.verdicts
        if one.ceiling is not None
    }
    people = whole.labels_are_people
    audit = assemble(chosen, rows, complete=True, left_out=left_out, ceilings=proved, people=people)
    kept = {name: getattr(whole, name) for name in ("provenance", "class_names", "veil_unfit")}
    audit = audit.model_copy(update=kept)
    own.save_audit(audit)
    return audit


def _link(source: Path, target: Path) -> None:
    """The same file in a second place, without a copy where the disk can do that."""
    make_folder(target.parent)
    if target.exists():
        return
    try:
        os.link(source, target)
    except OSError:
        write_atomically(target, source.read_bytes())


def rows_scored_again(folder: Path) -> list[Json] | None:
    """The rows of the audit in a folder, which ``gradveil score`` may have changed; None where there is no audit."""
    store = Store(folder)
    return store.read_audit().as_json()["rows"] if store.audit.exists() else None


def attacked_row(rows: Sequence[Json]) -> Json:
    """The first row of a result that is of an attack on an update, and not of the prior alone."""
    return next(row for row in rows if row["prior_of"] is None)


def figure_of(row: Json, name: str) -> object:
    """A metric in a row of a result, or what the defense logged under this name."""
    return row.get(name, row.get("log", {}).get(name))


def means_by_round(audit: Audit) -> dict[int, dict[str, float | None]]:
    """By round of a training, the means of the attack on what was sent in it."""
    return {row.round: {name: getattr(row, name) for name in MEANS} for row in audit.rows if row.round is not None}
