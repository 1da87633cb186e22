"""What the leaderboard keeps of one defense in one setting: ``results/SETTING/DEFENSE.json``; measured, written, read.

What was measured before is kept, as audits and trainings do.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from gradveil.auditing import Case, run_case
from gradveil.auditing.audit import Answer, Row
from gradveil.auditing.case import first_complaint
from gradveil.auditing.verdict import without_candidates, worst_of
from gradveil.core.atomic import write_atomically
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.locks import claimed
from gradveil.core.progress import SILENT, Progress
from gradveil.core.reading import read_text
from gradveil.core.registry import split_spec
from gradveil.core.types import Json
from gradveil.defenses import DEFENSES
from gradveil.federated import run_training
from gradveil.lab.leaderboard.settings import SETTINGS, Setting

PATIENCE = 60.0
"""Seconds to wait for another process that writes an entry or the page, which takes less than one."""
_MARKUP = frozenset("`|<>&")
_OF_A_RUN = ("defenses", "attacks", "training")
"""Fields of an audit's case that are no part of a setting; entries do not keep them with the case."""


def _plain(text: str) -> str:
    """Text that stands in the page as it is: entries come from strangers."""
    if not text.isprintable() or _MARKUP & set(text):
        raise ValueError("it holds line breaks or markup")
    return text


def _spec(spec: str) -> str:
    """The spec of a defense as entries name it. One that is not registered here may be somebody's own."""
    try:
        names = {split_spec(link)[0] for link in DEFENSES.links(_plain(spec))}
        known = all(name in DEFENSES or name.partition(":")[0] in DEFENSES for name in names)
        if not all(names) or (known and DEFENSES.canonical(spec) != spec):
            raise ValueError(f"{spec!r} is not how a defense is written")
    except GradveilError as error:
        raise ValueError(str(error)) from None
    return spec


Plain = Annotated[str, AfterValidator(_plain)]
Share = Annotated[float, Field(ge=0, le=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Worst(_Strict):
    """The worst that was found, over some attacks."""

    attack: Plain
    identified: Share
    interval: tuple[Share, Share]
    images: int = Field(ge=1)
    updates: int | None = Field(default=None, ge=1)
    """How many updates the interval counts: images of one update stand or fall together. None in older entries."""


class Told(_Strict):
    """Another answer about a defense: the share of labels read, or of members found at 1% false alarms."""

    attack: Plain | None = None
    share: Share
    interval: tuple[Share, Share] | None = None
    chance: Share | None = None
    above_chance: bool | None = None


class Trained(_Strict):
    """What the training of the setting reached with this defense."""

    accuracy: Share
    rounds: int = Field(ge=1)
    round_seconds: float = Field(gt=0)
    device: str


class EntryCase(BaseModel):
    """What the page says of the audit behind an entry; the rest of the case is kept with it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    data: str
    images: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    gallery: int = Field(ge=2)

    @property
    def chance(self) -> float:
        """The share of images that random picks identify."""
        return min(1.0, self.batch_size / self.gallery)


class EntryMachine(BaseModel):
    """Where an entry was measured."""

    model_config = ConfigDict(extra="allow", frozen=True)

    device: Plain
    torch: Plain


class Entry(_Strict):
    """One defense in one setting."""

    version: int = 1
    setting: str
    defense: Annotated[str, AfterValidator(_spec)]
    grade: Plain | None = None
    worst: Worst | None = None
    rebuilt: Worst | None = None
    """The worst of the attacks that hold no candidates."""
    labels: Told | None = None
    """It and the next two are None in older entries, and where the audit has no answer."""
    member: Told | None = None
    ceiling: Share | None = None
    """The share that no attack can recognise more of."""
    flags: tuple[str, ...] = ()
    unfit: str | None = None
    """Why the defense cannot work on the model of the setting."""
    trained: Trained | None = None
    attacks: tuple[str, ...] = ()
    case: EntryCase
    environment: EntryMachine


def path_of(folder: Path, setting: str, defense: str) -> Path:
    """Where an entry lies: the name of the defense with a dash for all that file systems may not like.

    Where that is the name of another defense too, as for ``shift=-1`` and ``shift=1``, a digest tells them apart.
    """
    slug = re.sub(r"[^a-z0-9.]+", "-", defense.lower()).strip("-")
    if _defense_of(slug) != defense:
        slug = f"{slug}-{hashlib.sha256(defense.encode()).hexdigest()[:8]}"
    return folder / "results" / setting / f"{slug}.json"


def _defense_of(slug: str) -> str:
    """The one defense that has a slug to itself: a single one, or a chain of two with as many options each.

    A name and its options are an odd number of words, so that an even number can only be such a chain.
    """
    words = slug.split("-")
    half = len(words) // 2
    links = []
    for name, *rest in [words] if len(words) % 2 else [words[:half], words[half:]]:
        options = ",".join(map("=".join, zip(rest[0::2], rest[1::2], strict=False)))
        links.append(f"{name}:{options}" if options else name)
    return "+".join(links)


def enter(
    setting: Setting,
    defenses: Sequence[str],
    folder: Path,
    work: Path,
    *,
    device: str,
    train: bool = True,
    progress: Progress = SILENT,
) -> Iterator[Path]:
    """Measure these defenses and write their entries below ``folder``; all that is large stays below ``work``."""
    specs = [DEFENSES.canonical(spec) for spec in defenses]
    for spec in specs:
        try:
            _spec(spec)
        except ValueError as error:
            raise GradveilError(f"the defense {spec!r} cannot be entered: {error}") from None
    before = {spec: read_entry(path_of(folder, setting.name, spec)) for spec in specs}  # first: an audit takes long
    # Rows that the folder of the audit holds already, of these or other defenses, are not run again.
    case = setting.case(specs, device)
    audit = run_case(case, work / setting.name / "audit", resume=True, progress=progress)
    kept, machine = EntryCase.model_validate(_kept(audit.case)), EntryMachine.model_validate(audit.environment)
    entry = partial(Entry, setting=setting.name, case=kept, environment=machine)
    for spec in specs:
        if spec in audit.left_out:
            yield save_entry(folder, entry(defense=spec, unfit=audit.left_out[spec]))
            continue
        trained = _trained(setting, spec, work, device, progress) if train else None
        if trained is None and (entered := before[spec]) is not None:
            trained = entered.trained
        rows = [row for row in audit.rows if row.defense == spec and not row.is_prior]
        verdict = next(one for one in audit.verdicts if one.defense == spec)
        measured = entry(
            defense=spec,
            grade=verdict.grade,
            worst=_worst([row for row in rows if row.attack == verdict.attack]),
            rebuilt=_worst(without_candidates(rows)),
            labels=_told(verdict.labels),
            member=_told(verdict.member),
            ceiling=verdict.ceiling.recognised if verdict.ceiling else None,
            flags=verdict.flags,
            trained=trained,
            attacks=tuple(row.attack for row in rows),
        )
        yield save_entry(folder, measured)


def _worst(rows: Sequence[Row]) -> Worst | None:
    worst = worst_of(rows)
    if worst is None or worst.identified is None or worst.identified_interval is None:
        return None
    return Worst(
        attack=worst.attack,
        identified=worst.identified,
        interval=worst.identified_interval,
        images=worst.images,
        updates=worst.updates or None,
    )


def _told(answer: Answer | None) -> Told | None:
    if answer is None or answer.share is None:
        return None
    return Told(
        attack=answer.attack,
        share=answer.share,
        interval=answer.interval,
        chance=answer.chance,
        above_chance=answer.above_chance,
    )


def _trained(setting: Setting, spec: str, work: Path, device: str, progress: Progress) -> Trained | None:
    """What the training of the setting reaches; None where the setting has none."""
    case = setting.trained(spec, device)
    if case is None:
        return None
    data, model = setting.name.split("-")[:2]
    folder = work / "trainings" / f"{data}-{model}" / path_of(Path(), setting.name, spec).stem
    done = run_training(case, folder, resume=True, progress=progress)
    accuracy = done["rows"][-1]["accuracy"]
    assert accuracy is not None, "the last round is always evaluated"
    return Trained(
        accuracy=accuracy,
        rounds=len(done["rows"]),
        round_seconds=max(0.001, round(median(row["seconds"] for row in done["rows"]), 3)),  # others are divided by it
        device=done["environment"]["device"],
    )


def _kept(case: Json) -> Json:
    """What an entry keeps of the case of its audit."""
    return {name: value for name, value in case.items() if name not in _OF_A_RUN}


def save_entry(folder: Path, entry: Entry) -> Path:
    path = path_of(folder, entry.setting, entry.defense)
    with claimed(folder, patience=PATIENCE):
        write_atomically(path, (entry.model_dump_json(indent=1, exclude_none=True) + "\n").encode())
    return path


def read_entry(path: Path) -> Entry | None:
    """The entry in a file, or None where there is no file."""
    if not path.exists():
        return None
    try:
        entry = Entry.model_validate_json(read_text(path))
    except ValidationError as error:
        complaint = " ".join(first_complaint(error, "file").split())[:300]  # it may name fields of a stranger's
        raise BadFileError(f"{path} is not an entry of a leaderboard: {complaint}") from None
    except (OSError, ValueError) as error:
        raise BadFileError(f"{path} is not an entry of a leaderboard: {error}") from None
    if entry.version != 1:
        raise BadFileError(f"{path} was written by another version of Gradveil: run its defense again")
    if (reason := _misplaced(entry, path)) is not None:
        raise BadFileError(f"{path} is not an entry of this leaderboard: {reason}")
    return entry


def _misplaced(entry: Entry, path: Path) -> str | None:
    """Why an entry does not belong where it lies: it stands there for a defense in a setting, whatever it says."""
    if entry.setting not in SETTINGS:
        return f"no setting is called {entry.setting[:100]!r}"
    place = path_of(Path(), entry.setting, entry.defense)
    if path.parts[-2:] != place.parts[-2:]:
        return f"by its setting and defense it belongs into {str(place)[:200]}"
    asked = _kept(SETTINGS[entry.setting].case(["none"], "cpu").as_json()) | {"device": None}
    said = _kept(Case().as_json()) | entry.case.model_dump() | {"device": None}  # fields newer than it: the defaults
    differing = next((name for name in sorted(asked.keys() | said.keys()) if asked.get(name) != said.get(name)), None)
    if differing is not None:
        return (
            f"its case differs from that of {entry.setting} in {differing[:100]!r}: remove it and run its defense again"
        )
    return None


def read_entries(folder: Path) -> list[Entry]:
    """All entries below a folder, in the order of their files."""
    found = [read_entry(path) for path in sorted((folder / "results").glob("*/*.json"))]
    return [entry for entry in found if entry is not None]
