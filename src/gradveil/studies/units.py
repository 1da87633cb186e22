"""Units of work: cases whose clients answer the same broadcast, which the engine steps as one batch.

What is attacked beside a case can change its last digits. So units are made from the study alone, never from what is
left of it to do, and an interrupted unit is run again in the same company.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from gradveil.auditing import Case
from gradveil.auditing.run import TOGETHER
from gradveil.defenses import DEFENSES
from gradveil.studies.study import Entry, Study


@dataclass(frozen=True)
class Unit:
    """Cases that are run together, or one by itself."""

    entries: tuple[Entry, ...]

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()[:16]

    @cached_property
    def digests(self) -> list[str]:
        return [entry.digest for entry in self.entries]

    @property
    def alone(self) -> bool:
        return len(self.entries) == 1

    @property
    def on_gpu(self) -> bool:
        return self.entries[0].case.device == "cuda"

    def apart(self) -> list[Unit]:
        """Every case by itself."""
        return [Unit((entry,)) for entry in self.entries]


def units_of(study: Study) -> list[Unit]:
    """The study in units, in the order of its cases."""
    alike: dict[str, list[Entry]] = {}
    for entry in study.entries:
        alike.setdefault(_company(entry), []).append(entry)
    units = []
    for same in alike.values():
        most = _most(same[0], study.together)
        units += [Unit(tuple(same[i : i + most])) for i in range(0, len(same), most)]
    return units


def _company(entry: Entry) -> str:
    """Equal for cases that differ in nothing but defenses, the first of which sends the same broadcast."""
    if not isinstance(entry.case, Case):
        return entry.digest
    fields = entry.case.as_json()
    first, *_ = fields.pop("defenses")
    return json.dumps([fields, DEFENSES.reshaping(first)], sort_keys=True)


def _most(entry: Entry, wanted: int | None) -> int:
    """How many such cases fill a batch of the engine: more would only wait for each other."""
    if not isinstance(entry.case, Case):
        return 1
    case = entry.case
    problems = case.effort().restarts * (case.images // case.batch_size) * len(case.defenses)
    most = max(1, TOGETHER[case.device] // problems)
    return most if wanted is None else min(wanted, most)
