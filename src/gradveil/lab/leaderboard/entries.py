"""What the leaderboard keeps of one defense in one setting: ``entries/SETTING/DEFENSE.json.gz``; written, read, merged.

An entry holds what was measured and no figure that follows from it: trainings by round, and rows of audits with the
score of each private example. The page is computed from that.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from gradveil.attacks import ATTACKS
from gradveil.auditing import Case
from gradveil.auditing.audit import Audit, CeilingAnswer, Files, ImageScore, Row, Trace, Verdict
from gradveil.auditing.case import first_complaint
from gradveil.auditing.verdict import verdicts
from gradveil.core.atomic import write_atomically
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.locks import claimed
from gradveil.core.progress import SILENT, Progress
from gradveil.core.reading import read_bytes
from gradveil.core.registry import split_spec
from gradveil.core.types import Json
from gradveil.defenses import DEFENSES
from gradveil.lab.leaderboard.measuring import audit, parameters_of, train
from gradveil.lab.leaderboard.settings import SEEDS, SETTINGS, Setting, Stage

PATIENCE = 60.0
"""Seconds to wait for another process that writes an entry or the page, which takes less than one."""
ENTRIES, ENDING = "entries", ".json.gz"
LARGEST = 2**26
"""Bytes of an entry once unpacked: a small file may be made to fill the memory."""
KEPT_OF_IMAGE = ("index", "picture", "label", "label_guess", "rank", "identified_share", "psnr", "client")
"""What rows keep of each private example. ``identified`` and ``label_correct`` follow from it."""
_MARKUP = frozenset("`|<>&")
_OF_A_RUN = ("defenses", "attacks", "training", "device", "unfit", "restarts")
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


class Trained(_Strict):
    """One training of the setting under the defense."""

    seed: int = Field(ge=0)
    complete: bool = True
    """False: it was too slow, and stopped."""
    rounds: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """After which the model was evaluated."""
    accuracy: tuple[Share, ...] = ()
    round_seconds: float | None = Field(default=None, gt=0)
    dropped: int = Field(default=0, ge=0)
    """Replies that could not be used."""
    device: Plain = "cpu"
    unfit: str | None = None
    """Why it cannot be trained so."""

    @model_validator(mode="after")
    def _whole(self) -> Trained:
        if len(self.rounds) != len(self.accuracy) or (self.complete and not self.unfit and not self.rounds):
            raise ValueError("a training has one accuracy for each round that was evaluated, and one at its end")
        return self


class EntryMachine(BaseModel):
    """Where an audit ran."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    device: Plain
    torch: Plain


class Audited(_Strict):
    """The audit of the defense on the model in one state."""

    stage: Stage
    unfit: str | None = None
    """Why the defense cannot work on the model of the setting."""
    rows: tuple[Row, ...] = ()
    """Of all attacks, and of their searches without the update."""
    ceilings: tuple[CeilingAnswer | None, CeilingAnswer | None] = (None, None)
    """For a reply, and for a whole training."""
    case: Json = {}
    environment: EntryMachine | None = None

    @model_validator(mode="after")
    def _rows_fit(self) -> Audited:
        for row in self.rows:
            _plain(row.attack + (row.prior_of or ""))
            if row.images != len(row.per_image):
                raise ValueError("a row has not one score for each of its images")
        return self

    @property
    def attacks(self) -> tuple[str, ...]:
        return tuple(row.attack for row in self.rows if not row.is_prior)

    def verdict(self) -> Verdict | None:
        """The verdict on all rows together, as an audit gives it."""
        own = next((row.defense for row in self.rows if not row.is_prior), None)
        if own is None:
            return None
        one, of_run = self.ceilings
        found = verdicts(self.rows, ceilings={} if one is None else {own: (one, of_run)})
        return next(each for each in found if each.defense == own)


class Entry(_Strict):
    """One defense in one setting."""

    version: int = 2
    """Written always: of a later version it would not be the default."""
    setting: str
    defense: Annotated[str, AfterValidator(_spec)]
    trainings: tuple[Trained, ...] = ()
    audits: tuple[Audited, ...] = ()

    @model_validator(mode="after")
    def _of_one_defense(self) -> Entry:
        if any(row.defense != self.defense for one in self.audits for row in one.rows if not row.is_prior):
            raise ValueError("a row is of another defense")
        if len({one.seed for one in self.trainings}) < len(self.trainings):
            raise ValueError("two trainings have the same seed")
        if len({one.stage for one in self.audits}) < len(self.audits):
            raise ValueError("two audits are of the same stage")
        return self

    @property
    def unfit(self) -> str | None:
        return next((one.unfit for one in self.audits if one.unfit is not None), None)

    def lacks(self) -> list[str]:
        """Attacks of the setting that were not run on it in every state of the model that was audited."""
        wanted = [ATTACKS.canonical(spec) for spec in SETTINGS[self.setting].audit["attacks"]]
        return [spec for spec in wanted if any(spec not in one.attacks for one in self.audits if one.unfit is None)]

    def unseen(self) -> list[Stage]:
        """States of the model that were not audited."""
        audited = {one.stage for one in self.audits}
        return [stage for stage in SETTINGS[self.setting].stages if stage not in audited]


def merged(old: Entry | None, new: Entry) -> Entry:
    """Both together; what both have is the new one's. So attacks and seeds are added to an entry one by one."""
    if old is None:
        return new
    trainings = {one.seed: one for one in (*old.trainings, *new.trainings)}
    audits = {one.stage: one for one in old.audits}
    for one in new.audits:
        if (before := audits.get(one.stage)) is not None and one.unfit is None:
            rows = {(row.attack, row.prior_of): row for row in (*before.rows, *one.rows)}
            one = one.model_copy(update={"rows": tuple(rows.values())})
        audits[one.stage] = one
    return new.model_copy(
        update={"trainings": tuple(trainings[seed] for seed in sorted(trainings)), "audits": tuple(audits.values())}
    )


def path_of(folder: Path, setting: str, defense: str) -> Path:
    """Where an entry lies: the name of the defense with a dash for all that file systems may not like.

    Where that is the name of another defense too, as for ``shift=-1`` and ``shift=1``, a digest tells them apart.
    """
    slug = re.sub(r"[^a-z0-9.]+", "-", defense.lower()).strip("-")
    if _defense_of(slug) != defense:
        slug = f"{slug}-{hashlib.sha256(defense.encode()).hexdigest()[:8]}"
    return folder / ENTRIES / setting / f"{slug}{ENDING}"


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
    attacks: Sequence[str] = (),
    train_too: bool = True,
    progress: Progress = SILENT,
) -> Iterator[Path]:
    """Measure these defenses and write their entries below ``folder``; all that is large stays below ``work``.

    ``attacks`` are run in the place of those of the setting, and join what entries have. Without ``train_too`` nothing
    is trained, and models are audited as they start. What entries have already is not measured again.
    """
    specs = [DEFENSES.canonical(spec) for spec in defenses]
    for spec in specs:
        try:
            _spec(spec)
        except ValueError as error:
            raise GradveilError(f"the defense {spec!r} cannot be entered: {error}") from None
    for spec in specs:
        read_entry(path_of(folder, setting.name, spec))  # first: what cannot be added to is not measured
    weights = work / setting.name / f"none-{SEEDS[0]}.safetensors"
    if setting.training is not None and train_too:
        if not weights.exists():
            train(setting, "none", SEEDS[0], device, keep=weights)
        for spec in specs:
            _enter_trainings(setting, spec, folder, device)
    case = setting.case(specs, device)
    if attacks:
        case = case.model_copy(update={"attacks": tuple(ATTACKS.canonical(spec) for spec in attacks)})
    for stage in setting.stages if train_too else setting.stages[:1]:
        trained = parameters_of(weights, device) if stage == "trained" else None
        found = audit(case, work / setting.name / stage, trained, progress)
        for entry in audited_entries(setting.name, found, stage):
            path = save_entry(folder, entry)
            if stage == setting.stages[-1] or not train_too or entry.unfit is not None:
                yield path


def _enter_trainings(setting: Setting, spec: str, folder: Path, device: str) -> None:
    entered = read_entry(path_of(folder, setting.name, spec))
    done = {one.seed for one in entered.trainings if one.complete} if entered else set()
    for seed in SEEDS:
        if seed in done:
            continue
        try:
            found = Trained(**train(setting, spec, seed, device))
        except GradveilError as error:
            found = Trained(seed=seed, complete=False, unfit=str(error))
        save_entry(folder, Entry(setting=setting.name, defense=spec, trainings=(found,)))


def audited_entries(setting: str, found: Audit, stage: Stage) -> Iterator[Entry]:
    """An entry for each defense of an audit, with its rows as they are kept."""
    case = {name: value for name, value in found.case.items() if name not in _OF_A_RUN}
    for defense, why in found.left_out.items():
        yield Entry(setting=setting, defense=defense, audits=(Audited(stage=stage, unfit=why, case=case),))
    for verdict in found.verdicts:
        own = [row for row in found.rows if row.defense == verdict.defense and not row.is_prior]
        priors = [row for row in found.rows if any(row.prior_of == one.attack for one in own)]
        audited = Audited(
            stage=stage,
            rows=tuple(map(trimmed, (*own, *priors))),
            ceilings=(verdict.ceiling, verdict.ceiling_of_run),
            case=case,
            environment=EntryMachine.model_validate(found.environment),
        )
        yield Entry(setting=setting, defense=verdict.defense, audits=(audited,))


def trimmed(row: Row) -> Row:
    """A row without what no figure needs."""
    images = tuple(
        ImageScore(**{name: getattr(one, name) for name in KEPT_OF_IMAGE}, stopped=one.stopped) for one in row.per_image
    )
    spare = {"trace": Trace(), "files": Files(reconstruction=""), "log": {}, "digest": "", "not_available": {}}
    return row.model_copy(update={**spare, "per_image": images})


def save_entry(folder: Path, entry: Entry) -> Path:
    """Write an entry, together with what lies in its place already."""
    path = path_of(folder, entry.setting, entry.defense)
    with claimed(folder, patience=PATIENCE):
        whole = merged(read_entry(path), entry)
        fields = {"version": whole.version} | whole.model_dump(mode="json", exclude_defaults=True)
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        write_atomically(path, gzip.compress(_rounded(text).encode(), mtime=0))
    return path


def _rounded(text: str) -> str:
    """Numbers with five digits after the point: what one example is judged by is no finer."""
    return re.sub(r"(\d+\.\d{5})\d+(?![\deE])", r"\1", text)


def read_entry(path: Path) -> Entry | None:
    """The entry in a file, or None where there is no file."""
    if not path.exists():
        return None
    try:
        unpack = zlib.decompressobj(wbits=31)
        text = unpack.decompress(read_bytes(path, most=LARGEST), LARGEST)
        if unpack.unconsumed_tail or not unpack.eof:
            raise ValueError("it is damaged or too large")
        entry = Entry.model_validate_json(text)
    except ValidationError as error:
        complaint = " ".join(first_complaint(error, "file").split())[:300]  # it may name fields of a stranger's
        raise BadFileError(f"{path} is not an entry of a leaderboard: {complaint}") from None
    except (OSError, ValueError, zlib.error) as error:
        raise BadFileError(f"{path} is not an entry of a leaderboard: {error}") from None
    if entry.version != 2:
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
    setting = SETTINGS[entry.setting]
    whole = setting.case(["none"], "cpu").as_json()
    asked = {name: value for name, value in whole.items() if name not in _OF_A_RUN}
    for one in entry.audits:
        said = {name: value for name, value in Case().as_json().items() if name not in _OF_A_RUN} | one.case
        differing = next(
            (name for name in sorted(asked.keys() | said.keys()) if asked.get(name) != said.get(name)), None
        )
        if differing is not None:
            return (
                f"its case differs from that of {entry.setting} in {differing[:100]!r}: remove it and run its defense "
                "again"
            )
        if any(row.images != whole["images"] or row.threat != whole["threat"] for row in one.rows):
            return f"a row is of other examples, or of another adversary, than those of {entry.setting}"
    rounds = None if setting.training is None else setting.training["rounds"]
    if any(one.complete and one.rounds[-1:] not in ((), (rounds,)) for one in entry.trainings):
        return f"a training has not the {rounds} rounds of {entry.setting}"
    return None


def read_entries(folder: Path) -> list[Entry]:
    """All entries below a folder, in the order of their files."""
    found = [read_entry(path) for path in sorted((folder / ENTRIES).glob(f"*/*{ENDING}"))]
    return [entry for entry in found if entry is not None]
