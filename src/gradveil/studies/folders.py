"""A folder for each case: the one that it was run in or, out of that of cases run together, its part."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gradveil.attacks import ATTACKS
from gradveil.auditing import Case
from gradveil.auditing.run import assemble
from gradveil.auditing.store import Store
from gradveil.core.atomic import make_folder, write_atomically
from gradveil.core.errors import GradveilError
from gradveil.studies.ledger import LOG


def tidy(folder: Path) -> None:
    """Leave in a folder what was run there, without the log and what a killed process had begun to write."""
    for path in [folder / LOG, *folder.rglob(".*")]:
        path.unlink(missing_ok=True)


def part(case: Case, whole: dict[str, Any], source: Path, target: Path) -> dict[str, Any]:
    """The audit of one case, taken out of the audit of all, as it would be by itself."""
    left_out = {defense: why for defense, why in whole["left_out"].items() if defense in case.defenses}
    defenses = tuple(defense for defense in case.defenses if defense not in left_out)
    if not defenses:
        raise GradveilError(f"no defense of the case can work on {case.model}: {next(iter(left_out.values()))}")
    chosen = case.model_copy(update={"attacks": tuple(whole["case"]["attacks"]), "defenses": defenses})
    everything, own = Store(source), Store(target)
    _linked(everything.truth, own.truth)
    rows = []
    for cell in chosen.cells():
        row = everything.row(cell.digest())
        assert row is not None, "the audit of all is complete"
        crafted_by = cell.attack if ATTACKS.build(cell.attack, case.effort()).crafts else None
        if cell.prior_only:  # the first defense of all stands in it, where this case would have its own first
            observation = own.relative(own.observation(cell.defense, crafted_by))
            files = row.files.model_copy(update={"observation": observation})
            row = row.model_copy(update={"defense": cell.defense, "files": files})
        _linked(everything.reconstruction(cell.digest()), own.reconstruction(cell.digest()))
        _link_observations(everything, own, cell.defense, crafted_by)
        own.save_row(cell.digest(), row)
        rows.append(row)
    audit = assemble(chosen, rows, complete=True, left_out=left_out)
    own.save_audit(audit)
    return audit.as_json()


def _link_observations(everything: Store, own: Store, defense: str, crafted_by: str | None) -> None:
    number = 0
    while (path := everything.observation(defense, crafted_by, number)).exists():
        _linked(path, own.observation(defense, crafted_by, number))
        number += 1


def _linked(source: Path, target: Path) -> None:
    """The same file in a second place, without a copy where the disk can do that."""
    make_folder(target.parent)
    if target.exists():
        return
    try:
        os.link(source, target)
    except OSError:
        write_atomically(target, source.read_bytes())
