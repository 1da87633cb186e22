"""Running a case: every cell becomes a saved row, and the rows become an audit.

Cells of one attack whose clients answered the same broadcast are attacked as one batch of problems.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradveil.attacks import ATTACKS, Attack, Reconstruction, save_reconstructions
from gradveil.auditing.audit import Audit, Files, Row
from gradveil.auditing.case import Case, Cell, ObservedCase
from gradveil.auditing.costs import costs
from gradveil.auditing.exchange import Broadcast, Exchange, Private, broadcast, choose_private, exchange
from gradveil.auditing.flags import explained, flagged
from gradveil.auditing.rows import make_row
from gradveil.auditing.scoring import Judge, ranked
from gradveil.auditing.store import Store
from gradveil.auditing.suites import SuiteSetting, suite
from gradveil.auditing.verdict import GRADES, verdicts
from gradveil.client import cross_entropy
from gradveil.core.environment import environment
from gradveil.core.errors import GradveilError
from gradveil.core.locks import alone
from gradveil.core.progress import SILENT, Progress
from gradveil.core.seeding import derive
from gradveil.core.tensor_files import read_tensors, write_tensors
from gradveil.core.types import Domain, Loss
from gradveil.data import ImageSet, load
from gradveil.defenses import DEFENSES
from gradveil.threat import Observation, broadcasts, save_observations, threat_model

TOGETHER = {"cpu": 128, "cuda": 1024}
"""At most so many problems in one batch: more gain little there, and an interrupted batch starts again."""


class Answered(NamedTuple):
    """A cell and what the clients of its defense answered."""

    cell: Cell
    exchange: Exchange


def run_case(case: Case, folder: Path, *, resume: bool = False, progress: Progress = SILENT) -> Audit:
    """Audit a case into a folder and return what ``audit.json`` holds. Rows already saved are not run again."""
    return run_on(case, load(case.data, progress=progress), folder, resume=resume, progress=progress)


@alone
def run_on(
    case: Case,
    data: ImageSet,
    folder: Path,
    *,
    own: nn.Module | None = None,
    loss: Loss = cross_entropy,
    resume: bool = False,
    progress: Progress = SILENT,
) -> Audit:
    """The same on a data set, a module and a loss that are at hand; what the case names then are but titles."""
    check_device(case.device)
    _check_threat(case)
    costs(case.training, case.defenses)
    sends = cache(lambda reshaped: broadcast(case, reshaped, data, own))
    case = case if case.attacks else _with_suite(case, sends(None), data.domain)
    store = Store(folder)
    store.open(resume=resume, case=case.as_json())
    case, left_out = _with_fitting(case, sends)
    private, cells = choose_private(data, case), case.cells()
    judge = Judge(private, data.domain, progress=progress)
    saved = {cell.digest(): store.row(cell.digest()) for cell in cells}
    rows = {digest: done for digest, done in saved.items() if done is not None}
    if rows:
        _check_kept(store, case, private, rows.values(), judge)
    _save_truth(store, private)

    @cache
    def observed(defense: str, crafted_by: str | None) -> Exchange:
        """The exchange of one defense, made when first asked for and saved as the adversary would have it."""
        attack = None if crafted_by is None else ATTACKS.build(crafted_by, case.effort())
        made = exchange(case, defense, private, data, sends(DEFENSES.reshaping(defense)), progress, attack, loss)
        alike: dict[tuple[int, ...], list[Observation]] = {}
        for one in made.observations:
            alike.setdefault(broadcasts(one), []).append(one)
        for number, seen in enumerate(alike.values()):
            save_observations(store.observation(defense, crafted_by, number), seen)
        return made

    with progress.task("audit", len(cells)) as task:
        task.advance(len(rows))
        for batch in _together(case, cells):
            missing = [cell for cell in batch if cell.digest() not in rows]
            answered = [Answered(cell, observed(cell.defense, _crafted_by(cell))) for cell in missing]
            for group in _of_one_kind(answered):
                first = group[0].cell
                task.note(first.title if len(group) == 1 else f"{first.attack} on {len(group)} defenses")
                with store.batch([one.cell.digest() for one in group]):
                    rows |= {done.digest: done for done in _run_together(group, judge, store, progress)}
                done = [rows[cell.digest()] for cell in cells if cell.digest() in rows]
                store.save_audit(assemble(case, done, complete=len(done) == len(cells), left_out=left_out))
                task.advance(len(group))
    store.save_audit(assemble(case, [rows[cell.digest()] for cell in cells], complete=True, left_out=left_out))
    return store.read_audit()


def _crafted_by(cell: Cell) -> str | None:
    """The attack of a cell if it needs a broadcast of its own making."""
    return cell.attack if ATTACKS.build(cell.attack, cell.case.effort()).crafts else None


def _together(case: Case, cells: Sequence[Cell]) -> list[list[Cell]]:
    """These cells in batches: one attack, one broadcast, not too many problems."""
    alike: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        alike.setdefault((cell.attack, cell.prior_only, DEFENSES.reshaping(cell.defense)), []).append(cell)
    batches = []
    for same in alike.values():
        each = ATTACKS.build(same[0].attack, case.effort()).problems_each * case.images // case.batch_size
        most = max(1, TOGETHER[case.device] // each)
        batches += [same[i : i + most] for i in range(0, len(same), most)]
    return batches


def _of_one_kind(batch: Sequence[Answered]) -> list[list[Answered]]:
    """A batch in parts that its attack keeps apart anyway: each is saved when it is done."""
    parts: dict[Hashable, list[Answered]] = {}
    for one in batch:
        parts.setdefault(_attack_of(one.cell).kind_of(one.exchange.observations[0]), []).append(one)
    return list(parts.values())


def _attack_of(cell: Cell) -> Attack:
    """The attack of a cell, or what is left of it without the update."""
    attack = ATTACKS.build(cell.attack, cell.case.effort())
    alone = attack.prior_only() if cell.prior_only else None
    return attack if alone is None else alone


def assemble(
    case: Case | ObservedCase,
    rows: Sequence[Row],
    *,
    complete: bool,
    left_out: Mapping[str, str] | None = None,
) -> Audit:
    """The audit as saved: the case, where it ran, its rows and what they say, and why some defenses are not in it."""
    marked = flagged(rows)
    return Audit(
        complete=complete,
        case=case.as_json(),
        environment=environment(case.device),
        rows=marked,
        verdicts=verdicts(marked, costs(case.training)),
        flags=explained(marked),
        grades=GRADES,
        left_out=dict(left_out or {}),
    )


def _run_together(group: Sequence[Answered], judge: Judge, store: Store, progress: Progress) -> Iterator[Row]:
    """Attack the replies of all these cells at once, then score and save cell by cell."""
    attack, case = _attack_of(group[0].cell), group[0].cell.case
    seen = [observation for one in group for observation in one.exchange.observations]
    each = len(seen) // len(group)
    seeds = [derive(case.seed, "attack", i) for i in range(each)] * len(group)
    started = time.perf_counter()
    found = attack(seen, seeds=seeds, progress=progress)
    seconds = (time.perf_counter() - started) / len(group)
    for i, one in enumerate(group):
        done = _row(one.cell, one.exchange, found[i * each : (i + 1) * each], seconds, judge, store)
        store.save_row(one.cell.digest(), done)
        yield done


def _row(cell: Cell, made: Exchange, found: list[Reconstruction], seconds: float, judge: Judge, store: Store) -> Row:
    digest, first = cell.digest(), made.observations[0]
    save_reconstructions(store.reconstruction(digest), found)
    return make_row(
        digest=digest,
        defense=cell.defense,
        attack=cell.attack,
        prior_only=cell.prior_only,
        seen=first,
        judgement=judge.judge(found, first.module),
        ranking=ranked(found, judge.private.index, first.candidates),
        found=found,
        seconds=seconds,
        log={} if cell.prior_only else made.log.means(),
        randomized=made.randomized and not cell.prior_only,
        files=Files(
            reconstruction=store.relative(store.reconstruction(digest)),
            observation=store.relative(store.observation(cell.defense, _crafted_by(cell))),
            truth=store.relative(store.truth),
        ),
    )


def _check_kept(store: Store, case: Case, private: Private, rows: Iterable[Row], judge: Judge) -> None:
    """Refuse to set new rows beside kept ones that are of other images or were scored by another metric."""
    kept, about = read_tensors(store.truth, "truth") if store.truth.exists() else ({}, {})
    tensors, line_up = _truth_of(private)
    same = all(name in kept and torch.equal(kept[name], tensor) for name, tensor in tensors.items())
    if kept and not (same and about.get("gallery", line_up) == line_up):
        raise GradveilError(
            f"{case.data} no longer holds the images that {store.folder} is about: audit it anew into another --out"
        )
    if any(row.identified_by not in (None, judge.identifies_by) for row in rows):
        now = judge.identifies_by.upper()
        raise GradveilError(
            f"images in {store.folder} were not identified by {now}, as they would be now: run gradveil score "
            f"{store.folder} first"
        )


def _truth_of(private: Private) -> tuple[dict[str, Tensor], str]:
    """What a folder keeps of the private images, and a digest of the line-up that they stand in."""
    tensors = {"inputs": private.batch.inputs, "labels": private.batch.labels, "index": private.index}
    line_up = hashlib.sha256(private.gallery.contiguous().numpy().tobytes()).hexdigest()
    return {name: tensor.cpu() for name, tensor in tensors.items()}, line_up


def _save_truth(store: Store, private: Private) -> None:
    tensors, line_up = _truth_of(private)
    write_tensors(store.truth, "truth", tensors, {"gallery": line_up})


def check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise GradveilError("device cuda was asked for, but torch sees no GPU here: use --device cpu")


def _with_suite(case: Case, made: Broadcast, domain: Domain) -> Case:
    """The case with the attacks of its budget that can run on it."""
    setting = SuiteSetting(
        threat=threat_model(case.threat),
        module=made.module,
        model=case.model,
        domain=domain,
        recipe=case.recipe,
        batch_size=case.batch_size,
    )
    return case.model_copy(update={"attacks": suite(case.budget, setting)})


def _with_fitting(case: Case, sends: Callable[[str | None], Broadcast]) -> tuple[Case, dict[str, str]]:
    """The case with the defenses that can work on its model, and by defense why the others cannot."""
    reasons = {}
    for defense in case.defenses:
        try:
            DEFENSES.build(defense).check(sends(DEFENSES.reshaping(defense)).module)
        except GradveilError as error:
            if case.unfit == "refuse":
                raise
            reasons[defense] = str(error)
    fitting = tuple(defense for defense in case.defenses if defense not in reasons)
    if not fitting:
        raise GradveilError(f"no defense of the case can work on {case.model}: {next(iter(reasons.values()))}")
    return case.model_copy(update={"defenses": fitting}), reasons


def _check_threat(case: Case) -> None:
    threat = threat_model(case.threat)
    for spec in case.attacks:
        threat.vet(spec, ATTACKS.build(spec, case.effort()).requires)
