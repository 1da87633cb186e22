"""Studies: grids over the fields of a case, run on workers or on a cluster, with one result file for each case."""

from gradveil.studies.agenda import Standing
from gradveil.studies.ledger import Ledger
from gradveil.studies.status import status_of
from gradveil.studies.study import Entry, Study, make_study, read_study
from gradveil.studies.sweep import run_study
from gradveil.studies.units import Unit, units_of

__all__ = [
    "Entry",
    "Ledger",
    "Standing",
    "Study",
    "Unit",
    "make_study",
    "read_study",
    "run_study",
    "status_of",
    "units_of",
]
