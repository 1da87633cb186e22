"""Auditing saved exchanges: the same rows, flags and verdicts, on replies that a tap or another engine took down.

All exchanges of one attack go to it together, whatever their round; the engine steps what can be stepped together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from gradveil.attacks import ATTACKS, Reconstruction, load_reconstructions, save_reconstructions
from gradveil.auditing.audit import Audit, Files, Judgement, Row
from gradveil.auditing.case import ObservedCase, make_observed_case
from gradveil.auditing.costs import costs
from gradveil.auditing.exchange import Private
from gradveil.auditing.rows import make_row
from gradveil.auditing.run import TOGETHER, assemble, check_device
from gradveil.auditing.saved import Source, Truth, read_sources
from gradveil.auditing.scoring import Judge, unscored
from gradveil.auditing.stages import Stage, StageCell, cells_of, private_of
from gradveil.auditing.store import Store
from gradveil.auditing.suites import suite_for_saved
from gradveil.core.errors import GradveilError
from gradveil.core.locks import alone
from gradveil.core.progress import SILENT, Progress
from gradveil.core.tensor_files import write_tensors
from gradveil.data import load
from gradveil.threat import threat_model


@alone
def run_observed(case: ObservedCase, folder: Path, *, resume: bool = False, progress: Progress = SILENT) -> Audit:
    """Audit saved exchanges into a folder, and return what ``audit.json`` holds. Rows already saved are kept."""
    check_device(case.device)
    sources = read_sources(case)
    costs(case.training, [source.defense for source in sources])
    case = case if case.attacks else _with_suite(case, sources)
    _vet(case, sources)
    cells = cells_of(case, sources)
    judges = Judges(case, progress)
    for cell in cells:
        judges.check(cell.stage)
    store = Store(folder)
    store.open(resume=resume, case=case.as_json())
    saved = {cell.digest(): store.row(cell.digest()) for cell in cells}
    rows = {digest: done for digest, done in saved.items() if done is not None}

    def save() -> None:
        done = [rows[cell.digest()] for cell in cells if cell.digest() in rows]
        store.save_audit(_assembled(case, sources, done, complete=len(done) == len(cells)))

    with progress.task("audit", len(cells)) as task:
        task.advance(len(rows))
        for group in _together(case, [cell for cell in cells if cell.digest() not in rows]):
            task.note(_title(group))
            with store.batch([cell.digest() for cell in group]):
                rows |= {done.digest: done for done in _run_together(group, judges, store, progress)}
            save()
            task.advance(len(group))
    save()
    return store.read_audit()


def score_observed(folder: Path, *, progress: Progress = SILENT) -> Audit:
    """Score the saved reconstructions of such an audit anew; the exchanges must still lie where they were."""
    store = Store(folder)
    audit = store.read_audit()
    case = make_observed_case(audit.case)
    sources = read_sources(case)
    cells, judges, rows = {cell.digest(): cell for cell in cells_of(case, sources)}, Judges(case, progress), []
    for old in audit.rows:
        if old.digest not in cells:
            raise GradveilError(f"the exchanges behind {folder} have changed: audit them anew into another --out")
        found = load_reconstructions(store.reconstruction(old.digest))
        scored = old.model_copy(update=dict(judges.scores(cells[old.digest].stage, found)))
        store.save_row(scored.digest, scored)
        rows.append(scored)
    store.save_audit(_assembled(case, sources, rows, complete=audit.complete))
    return store.read_audit()


class Judges:
    """Scores each stage against its own truth, or says that there is none; loads networks once."""

    def __init__(self, case: ObservedCase, progress: Progress) -> None:
        self._case, self._progress = case, progress
        self._data = cache(lambda spec: load(spec, progress=progress))
        self._first: Judge | None = None

    def check(self, stage: Stage) -> None:
        """Raise now what would make scoring fail after the attack."""
        if stage.truth is not None:
            self._private(stage, stage.truth)

    def scores(self, stage: Stage, found: Sequence[Reconstruction]) -> Judgement:
        truth = stage.truth
        if truth is None:
            return unscored(found, "there is no truth beside the exchange: only the attack's own objective is known")
        private = self._private(stage, truth)
        if self._first is None:
            self._first = Judge(private, stage.seen[0].domain, progress=self._progress)
        scores = self._first.about(private).judge(found, stage.module())
        each = zip(scores.per_image, stage.client_of_each_image(), strict=True)
        named = tuple(image.model_copy(update={"client": client}) for image, client in each)
        return scores.model_copy(update={"per_image": named})

    def _private(self, stage: Stage, truth: Truth) -> Private:
        spec = stage.source.data
        return private_of(stage, truth, self._case, None if spec is None else self._data(spec))


def _with_suite(case: ObservedCase, sources: Sequence[Source]) -> ObservedCase:
    """The case with the attacks of its budget that can run on all of its exchanges."""
    seen = [file.seen[0] for source in sources for file in source.files]
    return case.model_copy(update={"attacks": suite_for_saved(case.budget, seen)})


def _vet(case: ObservedCase, sources: Sequence[Source]) -> None:
    """Refuse attacks that need more than the saved exchanges give."""
    for spec in case.attacks:
        attack = ATTACKS.build(spec, case.effort())
        for file in (file for source in sources for file in source.files):
            threat_model(file.seen[0].threat).vet(spec, attack.requires)
            if attack.crafts and not file.seen[0].crafted:
                raise GradveilError(f"attack {spec!r} crafts what is sent, but {file.path} answers an honest broadcast")


def _together(case: ObservedCase, cells: Sequence[StageCell]) -> Iterator[list[StageCell]]:
    """These cells in batches: one attack, not too many problems."""
    most = max(1, TOGETHER[case.device] // case.effort().restarts)
    group: list[StageCell] = []
    for cell in cells:
        same = not group or (group[0].attack, group[0].prior_only) == (cell.attack, cell.prior_only)
        if group and (not same or sum(len(c.stage.seen) for c in (*group, cell)) > most):
            yield group
            group = []
        group.append(cell)
    if group:
        yield group


def _title(group: Sequence[StageCell]) -> str:
    first = group[0]
    return f"{first.attack} without the updates" if first.prior_only else f"{first.attack} on {len(group)} stages"


def _run_together(group: Sequence[StageCell], judges: Judges, store: Store, progress: Progress) -> Iterator[Row]:
    """Attack the exchanges of all these cells at once, then score and save cell by cell."""
    first = group[0]
    attack = ATTACKS.build(first.attack, first.case.effort())
    alone = attack.prior_only()
    chosen = alone if first.prior_only and alone is not None else attack
    seen = [one for cell in group for one in cell.stage.seen]
    seeds = [seed for cell in group for seed in cell.stage.seeds(cell.case.seed)]
    started = time.perf_counter()
    found = iter(chosen(seen, seeds=seeds, progress=progress))
    seconds = (time.perf_counter() - started) / len(seen)
    for cell in group:
        own = [next(found) for _ in cell.stage.seen]
        done = _row(cell, own, seconds * len(own), judges, store)
        store.save_row(done.digest, done)
        yield done


def _row(cell: StageCell, found: list[Reconstruction], seconds: float, judges: Judges, store: Store) -> Row:
    digest, stage, truth = cell.digest(), cell.stage, cell.stage.truth
    save_reconstructions(store.reconstruction(digest), found)
    if truth is not None:
        private = {"inputs": truth.batch.inputs, "labels": truth.batch.labels, "index": truth.index}
        write_tensors(store.truth_of(digest), "truth", private, {})
    row = make_row(
        digest=digest,
        defense=stage.source.defense,
        attack=cell.attack,
        prior_only=cell.prior_only,
        seen=stage.seen[0],
        judgement=judges.scores(stage, found),
        found=found,
        seconds=seconds,
        files=Files(
            reconstruction=store.relative(store.reconstruction(digest)),
            observations=tuple(str(file.path) for file in stage.files),
            truth=None if truth is None else store.relative(store.truth_of(digest)),
        ),
    )
    return row if cell.prior_only else Row(**{**dict(row), **_place(stage)})


def _place(stage: Stage) -> dict[str, object]:
    """When and where the exchanges of a row were saved, and how good the model was by then."""
    return {
        "training": stage.source.name,
        "stage": stage.title,
        "round": stage.round_number,
        "clients": tuple(stage.clients),
        "model_accuracy": stage.source.accuracy_before(stage.round_number),
    }


def _assembled(case: ObservedCase, sources: Sequence[Source], rows: Sequence[Row], *, complete: bool) -> Audit:
    found = assemble(case, rows, complete=complete)
    return found.model_copy(update={"trainings": tuple(source.record() for source in sources)})
