"""Sweeps: grids over the fields of a case, run on workers or on a cluster, with one result file for each case."""

from gradveil.lab.sweeps.queue import Queue, queue_of, status_of
from gradveil.lab.sweeps.results import MEASURED, ResultFolder, Status
from gradveil.lab.sweeps.run import Start, run_study
from gradveil.lab.sweeps.study import CaseBatch, Study, StudyEntry, batches_of, make_study, read_study

__all__ = [
    "MEASURED",
    "CaseBatch",
    "Queue",
    "ResultFolder",
    "Start",
    "Status",
    "Study",
    "StudyEntry",
    "batches_of",
    "make_study",
    "queue_of",
    "read_study",
    "run_study",
    "status_of",
]
