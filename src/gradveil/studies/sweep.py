"""A sweep: a study run into a folder, from wherever an earlier sweep left it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gradveil.core.errors import GradveilError
from gradveil.core.locks import claimed
from gradveil.studies.agenda import Agenda, Standing, agenda_of
from gradveil.studies.ledger import Ledger
from gradveil.studies.local import Start, run_locally
from gradveil.studies.study import Study
from gradveil.studies.units import units_of

Tell = Callable[[Standing], None]
_PATIENCE = 10.0
"""Seconds to wait for another sweep: workers of one that was just killed need a moment to notice."""
_LEAST_SHARE = 0.0001
"""Of a GPU: Ray counts no finer."""


def run_study(
    study: Study,
    out: Path,
    *,
    workers: int = 1,
    ray: str | None = None,
    gpus: float = 1.0,
    retry: bool = False,
    part: tuple[int, int] = (1, 1),
    start: Start = "spawn",
    tell: Tell = lambda _standing: None,
) -> Standing:
    """Run what of a study is not done yet: on so many processes here, or on the Ray cluster at an address.

    ``gpus`` is the share of one, or the number, that a case on a GPU takes of a Ray cluster, ``part`` (k, n) the k-th
    of n parts.
    """
    if workers < 1 or not 1 <= part[0] <= part[1]:
        raise GradveilError("a sweep needs at least one worker, and a part K/N with K from 1 to N")
    if not (_LEAST_SHARE <= gpus <= 1 or (gpus > 1 and gpus % 1 == 0)):
        raise GradveilError(
            f"--gpus is a share of one GPU, from {_LEAST_SHARE:g} to 1, or a whole number; not {gpus:g}"
        )
    with claimed(out, patience=_PATIENCE) as claim:
        ledger = Ledger(out)
        ledger.save_study(study)
        agenda = agenda_of(study, ledger, retry=retry, part=part)
        shown: list[str] = []

        def told() -> None:
            nonlocal shown
            standing = agenda.standing()
            if shown != sorted(standing.running):
                shown = sorted(standing.running)
                claim.say(running=_running(agenda), workers=agenda.workers)
            tell(standing)

        if ray is not None:
            from gradveil.studies.cluster import run_on_ray

            run_on_ray(agenda, address=ray, workers=workers, threads=study.threads, gpus=gpus, tell=told)
        else:
            run_locally(agenda, workers=workers, threads=study.threads, start=start, tell=told)
        ledger.clean(units_of(study))
        return agenda.standing()


def _running(agenda: Agenda) -> list[str]:
    return [digest for unit, _ in agenda.running.values() for digest in unit.digests if digest not in agenda.done]
