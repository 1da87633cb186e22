"""The audit: every cell of a plan is attacked, scored and saved as a row, and the rows become an audit.

Cells of one attack whose clients answered the same broadcast are attacked as one batch of problems.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gradveil import __version__, models
from gradveil.attacks import Attack, Reconstruction, load_reconstructions, save_reconstructions
from gradveil.auditing.audit import OWN, PRIOR_ONLY, Audit, Files, Membership, Provenance, Row, SavedTraining, Trace
from gradveil.auditing.case import Case, ObservedCase, make_case, make_observed_case
from gradveil.auditing.ceilings import ceilings
from gradveil.auditing.flags import awareness_of, counter_moves, explained, flagged
from gradveil.auditing.saved import saved
from gradveil.auditing.scoring import Judge, membership, ranked, unscored
from gradveil.auditing.sources import AuditPlan, Cell, simulated
from gradveil.auditing.store import Store
from gradveil.auditing.verdict import GRADES, Ceilings, costs, verdicts
from gradveil.client import running_statistics
from gradveil.core.environment import environment, now, source_commit
from gradveil.core.errors import BadFileError, GradveilError, StrategyError
from gradveil.core.locks import alone
from gradveil.core.progress import SILENT, Progress
from gradveil.core.tensor_files import read_tensors, write_tensors
from gradveil.threat import Observation, broadcasts, save_observations, threat_model
from gradveil.threat.storage import check_options

TOGETHER = {"cpu": 128, "cuda": 1024}
"""At most so many problems in one batch: more gain little there, and an interrupted batch starts again."""


def run_case(
    case: Case, folder: Path, *, resume: bool = False, command: str | None = None, progress: Progress = SILENT
) -> Audit:
    """Audit simulated clients into a folder, and return what ``audit.json`` holds. Rows already saved are kept."""
    return run(simulated(case, progress=progress), folder, resume=resume, command=command, progress=progress)


def run_observed(
    case: ObservedCase, folder: Path, *, resume: bool = False, command: str | None = None, progress: Progress = SILENT
) -> Audit:
    """Audit saved exchanges into a folder, and return what ``audit.json`` holds. Rows already saved are kept."""
    return run(saved(case, progress=progress), folder, resume=resume, command=command, progress=progress)


@alone
def run(
    plan: AuditPlan, folder: Path, *, resume: bool = False, command: str | None = None, progress: Progress = SILENT
) -> Audit:
    """Run a plan, whatever its source, into a folder; ``command`` is what was typed or called for that."""
    store, cells = Store(folder), plan.cells
    store.open(resume=resume, case=plan.case.as_json())
    provenance = _provenance(plan, store, command)
    kept = {cell.digest: store.row(cell.digest) for cell in cells}
    rows = {digest: row for digest, row in kept.items() if row is not None}
    for cell in cells:
        row = rows.get(cell.digest)
        if row is not None and (row.prior_of if row.is_prior else row.attack) != cell.spec:
            raise BadFileError(f"{store.folder}: row {cell.digest} is not of {cell.spec}; the file is damaged")
        if row is not None:
            threat_model(row.threat)  # raises if a stranger made one up
    judge = _judge(plan, progress)
    if rows and judge is not None:
        _check_kept(store, plan, rows.values(), judge)
    if plan.private is not None:
        write_tensors(store.truth, "truth", plan.private.tensors(), {"gallery": plan.private.line_up()})

    def audit() -> Audit:
        done = [rows[cell.digest] for cell in cells if cell.digest in rows]
        complete = len(done) == len(cells)
        found = assemble(
            plan.case,
            done,
            complete=complete,
            left_out=plan.left_out,
            trainings=plan.trainings,
            ceilings=ceilings(plan.proofs, done),
            people=plan.labels_are_people,
        )
        also = {"provenance": provenance, "class_names": _named(done, plan.class_names), "veil_unfit": plan.veil_unfit}
        return found.model_copy(update=also)

    written: set[Path] = set()
    with progress.task("audit", len(cells)) as task:
        task.advance(len(rows))
        for batch in _batches(cells, plan.case.device):
            missing = [cell for cell in batch if cell.digest not in rows]
            for group in _of_one_kind(missing, store, written):
                first = group[0]
                task.note(first.title if len(group) == 1 else f"{first.spec}, {len(group)} rows together")
                with store.batch([cell.digest for cell in group]):
                    rows |= {row.digest: row for row in _run_together(group, judge, store, progress)}
                store.save_audit(audit())
                task.advance(len(group))
    done = audit()
    store.save_audit(done)
    return done


@alone
def score_again(folder: Path, *, model: str | None = None, progress: Progress = SILENT) -> Audit:
    """Score the saved reconstructions of an audit anew, such as after weights for LPIPS have been fetched.

    A folder may come from a stranger: a model that it names by import path is built only if the caller names it too.
    Saved exchanges must still lie where they were.
    """
    store = Store(folder)
    audit = store.read_audit()
    named = audit.case.get("model")
    if audit.case.get("data") == OWN:
        raise GradveilError(
            f"{folder} is an audit of a model and a batch that only your program holds, and cannot be scored again "
            "without them: call gradveil.audit(...) there"
        )
    if isinstance(named, str) and models.is_import_path(named) and named != model:
        raise GradveilError(f"this audit runs code of its own, {named}: if you trust it, add --model '{named}'")
    if "observations" in audit.case:
        plan = saved(make_observed_case(audit.case), progress=progress)
        cells: dict[Hashable, Cell] = {cell.digest: cell for cell in plan.cells}
    else:
        away = audit.case.get("device") == "cuda" and not torch.cuda.is_available()
        case = make_case({**audit.case, **({"device": "cpu"} if away else {})})
        check_options(models.split_front(case.model)[1])  # it may be a stranger's, and ask for all memory there is
        plan = simulated(case, progress=progress)
        # Not by digest: an audit may have run on another device, or in an older Gradveil.
        cells = {(cell.prior_only, cell.spec, cell.defense, cell.origin.round): cell for cell in plan.cells}
    judge, rows = _judge(plan, progress), []
    for old in audit.rows:
        key = (old.is_prior, old.prior_of or old.attack, old.defense, old.round)
        cell = cells.get(old.digest) or cells.get(key)
        if cell is None:
            raise GradveilError(f"the exchanges behind {folder} have changed: audit them anew into another --out")
        found = load_reconstructions(store.reconstruction(old.digest))
        private = cell.private()
        judged = judge.judge(private, found, cell.module(), cell.owners) if private and judge else unscored(found)
        # The attack is not asked again who is a member.
        why = {name: reason for name, reason in old.not_available.items() if name == "member"}
        kept = {"member": old.member, "not_available": judged.not_available | why}
        row = old.model_copy(update=dict(judged) | kept)
        store.save_row(row.digest, row)
        rows.append(row)
    anew = assemble(
        plan.case,
        rows,
        complete=audit.complete,
        left_out=audit.left_out,
        trainings=plan.trainings,
        ceilings=ceilings(plan.proofs, rows),
        people=plan.labels_are_people,
    )
    written = ("case", "environment", "provenance", "class_names", "veil_unfit")
    anew = anew.model_copy(update={name: getattr(audit, name) for name in written})
    store.save_audit(anew)
    return anew


def assemble(
    case: Case | ObservedCase,
    rows: Sequence[Row],
    *,
    complete: bool,
    left_out: Mapping[str, str] | None = None,
    trainings: tuple[SavedTraining, ...] = (),
    ceilings: Mapping[str, Ceilings] | None = None,
    people: bool = False,
) -> Audit:
    """The audit as saved: the case, where it ran, its rows and what they say, and why some defenses are not in it."""
    marked = flagged(rows)
    judged = verdicts(marked, costs(case.training), ceilings, people=people)
    return Audit(
        complete=complete,
        case=case.as_json(),
        environment=environment(case.device),
        rows=marked,
        verdicts=judged,
        trainings=trainings,
        labels_are_people=people,
        flags=explained(marked, judged),
        grades=GRADES,
        left_out=dict(left_out or {}),
    )


def _batches(cells: Sequence[Cell], device: str) -> Iterator[list[Cell]]:
    """The cells in batches: one attack, one broadcast, not too many problems."""
    alike: dict[Hashable, list[Cell]] = {}
    for cell in cells:
        alike.setdefault((cell.spec, cell.prior_only, cell.broadcast), []).append(cell)
    for same in alike.values():
        batch: list[Cell] = []
        problems = 0
        for cell in same:
            more = cell.attack.problems_each * len(cell.seeds)
            if batch and problems + more > TOGETHER[device]:
                yield batch
                batch, problems = [], 0
            batch.append(cell)
            problems += more
        yield batch


def _of_one_kind(batch: Sequence[Cell], store: Store, written: set[Path]) -> list[list[Cell]]:
    """A batch in parts that its attack keeps apart anyway: each is saved when it is done.

    What the adversary sees is saved before anything is attacked, where it was not read from a file and is not
    ``written`` yet.
    """
    parts: dict[Hashable, list[Cell]] = {}
    for cell in batch:
        seen = cell.exchange().observations
        parts.setdefault(cell.search.kind_of(seen[0]), []).append(cell)
        path = store.observation(cell.clients, cell.crafted_by)
        if cell.paths or not cell.keep or path in written:
            continue
        written.add(path)
        alike: dict[tuple[int, ...], list[Observation]] = {}
        for one in seen:
            alike.setdefault(broadcasts(one), []).append(one)
        for number, same in enumerate(alike.values()):
            save_observations(store.observation(cell.clients, cell.crafted_by, number), same)
    return list(parts.values())


def _run_together(group: Sequence[Cell], judge: Judge | None, store: Store, progress: Progress) -> Iterator[Row]:
    """Attack the exchanges of all these cells at once, then score and save cell by cell."""
    seen = [one for cell in group for one in cell.exchange().observations]
    started = time.perf_counter()
    try:
        seeds = [seed for cell in group for seed in cell.seeds]
        found = iter(group[0].search(seen, seeds=seeds, progress=progress))
    except StrategyError:
        found = iter([one for cell in group for one in _run_alone(cell, progress)])
    seconds = (time.perf_counter() - started) / len(seen)
    for cell in group:
        mine = [next(found) for _ in cell.seeds]
        row = _row(cell, mine, seconds * len(mine), judge, store)
        if row.ranked_first is not None and not row.is_prior:
            member, why = _members(cell, mine, progress)
            row = row.model_copy(update={"member": member, "not_available": row.not_available | why})
        store.save_row(row.digest, row)
        yield row


def _members(cell: Cell, found: list[Reconstruction], progress: Progress) -> tuple[Membership | None, dict[str, str]]:
    """Who is told to have taken part, when the same attack is asked about a list with nobody who has; or why not."""
    made, private = cell.exchange(), cell.private()
    if made.without is None or private is None or private.listed is None:
        return None, {"member": "the data set is too small for a list of others as long as that of the candidates"}
    again = [replace(one, candidates=made.without) for one in made.observations]
    return membership(found, cell.search(again, seeds=cell.seeds, progress=progress), private.listed), {}


def _run_alone(cell: Cell, progress: Progress) -> list[Reconstruction]:
    """One cell of a batch whose strategy does not fit all of it; where it does not fit this one, by any that does."""
    seen = cell.exchange().observations
    try:
        return cell.search(seen, seeds=cell.seeds, progress=progress)
    except StrategyError as error:
        found = _with_any_strategy(cell.search)(seen, seeds=cell.seeds, progress=progress)
        return [replace(one, strategy=f"{one.strategy} ({error})") for one in found]


def _with_any_strategy(attack: Attack) -> Attack:
    """The same attack, with the strategy left open in it and in the attacks that it is made of."""
    changed: dict[str, object] = {}
    known: tuple[Field[Any], ...] = fields(attack) if is_dataclass(attack) else ()
    for part in known:
        value = getattr(attack, part.name)
        if part.name == "strategy":
            changed[part.name] = "auto"
        elif isinstance(value, Attack):
            changed[part.name] = _with_any_strategy(value)
    return replace(attack, **changed) if changed else attack  # type: ignore[type-var]


def _row(cell: Cell, found: list[Reconstruction], seconds: float, judge: Judge | None, store: Store) -> Row:
    made, private, path = cell.exchange(), cell.private(), store.reconstruction(cell.digest)
    seen, truth = made.observations[0], store.truth_of(cell.digest) if cell.paths else store.truth
    save_reconstructions(path, found)
    if cell.paths and private is not None:
        write_tensors(truth, "truth", private.tensors(), {})
    kept = cell.keep and not cell.paths
    threat, prior_only = threat_model(seen.threat), cell.prior_only
    tampering = []
    if seen.crafted:
        asked = f"asked this client {len(seen.earlier) + 1} times, and " if seen.earlier else ""
        tampering = [f"The server {asked}sent a model in which it had tampered with {', '.join(seen.crafted)}."]
    judged = judge.judge(private, found, cell.module(), cell.owners) if private and judge else unscored(found)
    listed = None if private is None else private.listed
    ranking = None if listed is None else ranked(found, listed, seen.candidates)
    return Row(
        **dict(judged),
        **dict(ranking or {}),
        **asdict(cell.origin),
        digest=cell.digest,
        defense=cell.defense,
        attack=PRIOR_ONLY if prior_only else cell.spec,
        prior_of=cell.spec if prior_only else None,
        needs=tuple(sorted(cell.attack.requires)),
        awareness=awareness_of(cell.attack),
        threat=seen.threat,
        adversary=threat.title,
        assumptions=(*threat.sentences(), *tampering),
        objective=sum(one.objective for one in found) / len(found),
        seconds=seconds,
        problem_steps=sum(one.problem_steps for one in found),
        strategy=found[0].strategy,
        log={} if prior_only else dict(made.log),
        randomized=made.randomized and not prior_only,
        asked=max(len(one.earlier) for one in made.observations) + 1,
        statistics_given=seen.statistics is not None,
        # Whether a client of this recipe has running statistics to send beside its update.
        statistics_sent=seen.recipe is not None and seen.recipe.train_mode and bool(running_statistics(seen.module)),
        counter_moves=None if prior_only else counter_moves(cell.attack, seen),
        trace=Trace(steps=found[0].steps, objective=tuple(one.trace for one in found)),
        files=Files(
            reconstruction=store.relative(path),
            observation=store.relative(store.observation(cell.clients, cell.crafted_by)) if kept else None,
            observations=cell.paths,
            truth=None if private is None else store.relative(truth),
        ),
    )


def _provenance(plan: AuditPlan, store: Store, command: str | None) -> Provenance:
    """Who goes on with an audit adds a command to it, and does not begin it anew."""
    before = store.read_audit().provenance if store.audit.exists() else None
    commands = (*(before.commands if before else ()), *([command] if command else []))
    stages = {cell.paths: cell for cell in plan.cells if not cell.prior_only}
    privates = [private for cell in stages.values() if (private := cell.private()) is not None]

    def whole(digests: Sequence[str]) -> str | None:
        """One digest of all stages; of one stage its own."""
        return hashlib.sha256("".join(digests).encode()).hexdigest() if len(digests) > 1 else next(iter(digests), None)

    return Provenance(
        started=before.started if before else now(),
        version=__version__,
        commit=source_commit(),
        commands=tuple(dict.fromkeys(commands)),
        data=whole([one.digest() for one in privates]),
        line_up=whole([one.line_up() for one in privates]),
    )


def _named(rows: Sequence[Row], names: Sequence[str]) -> dict[int, str]:
    """The names of the labels in these rows. A number is no name."""
    images = [image for row in rows for image in row.per_image]
    labels = {label for image in images for label in (image.label, image.label_guess)}
    found = ((label, names[label]) for label in range(len(names)) if label in labels)
    return {label: name for label, name in found if name != str(label)}


def _judge(plan: AuditPlan, progress: Progress) -> Judge | None:
    """None where nobody knows any truth."""
    known = (private for cell in plan.cells if (private := cell.private()) is not None)
    private = next(known, None)
    return None if private is None else Judge(private.gallery, plan.domain, progress=progress)


def _check_kept(store: Store, plan: AuditPlan, rows: Iterable[Row], judge: Judge) -> None:
    """Refuse to set new rows beside kept ones that are of other images or were scored by another metric."""
    if plan.private is not None and store.truth.exists():
        kept, about = read_tensors(store.truth, "truth")
        same = all(name in kept and torch.equal(kept[name], t) for name, t in plan.private.tensors().items())
        line_up = plan.private.line_up()
        if kept and not (same and about.get("gallery", line_up) == line_up):
            data = plan.case.as_json()["data"]
            raise GradveilError(
                f"{data} no longer holds the images that {store.folder} is about: audit it anew into another --out"
            )
    if any(row.identified_by not in (None, judge.identifies_by) for row in rows):
        now = judge.identifies_by.upper()
        raise GradveilError(
            f"images in {store.folder} were not identified by {now}, as they would be now: run gradveil score "
            f"{store.folder} first"
        )
