"""What the leaderboard keeps of one defense in one setting: ``results/SETTING/DEFENSE.json``."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradveil.core.atomic import write_atomically
from gradveil.core.errors import BadFileError


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Worst(_Kept):
    """The worst that was found, over some attacks."""

    attack: str
    identified: float = Field(ge=0, le=1)
    interval: tuple[float, float]
    images: int


class Trained(_Kept):
    """What the training of the setting reached with this defense."""

    accuracy: float = Field(ge=0, le=1)
    rounds: int
    round_seconds: float = Field(ge=0)
    device: str


class Asked(BaseModel):
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


class Machine(BaseModel):
    """Where an entry was measured."""

    model_config = ConfigDict(extra="allow", frozen=True)

    device: str
    torch: str


class Entry(_Kept):
    """One defense in one setting."""

    version: int = 1
    setting: str
    defense: str
    grade: str | None = None
    worst: Worst | None = None
    rebuilt: Worst | None = None
    """The worst of the attacks that hold no candidates."""
    flags: tuple[str, ...] = ()
    unfit: str | None = None
    """Why the defense cannot work on the model of the setting."""
    trained: Trained | None = None
    attacks: tuple[str, ...] = ()
    case: Asked
    environment: Machine


def path_of(folder: Path, setting: str, defense: str) -> Path:
    """Where an entry lies: the name of the defense with a dash for all that file systems may not like."""
    return folder / "results" / setting / f"{re.sub(r'[^a-z0-9.]+', '-', defense.lower()).strip('-')}.json"


def save_entry(folder: Path, entry: Entry) -> Path:
    path = path_of(folder, entry.setting, entry.defense)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (entry.model_dump_json(indent=1, exclude_none=True) + "\n").encode())
    return path


def read_entry(path: Path) -> Entry | None:
    """The entry in a file, or None where there is no file."""
    if not path.exists():
        return None
    try:
        entry = Entry.model_validate_json(path.read_text())
    except (OSError, ValueError, ValidationError) as error:
        raise BadFileError(f"{path} is not an entry of a leaderboard: {str(error).splitlines()[0]}") from None
    if entry.version != 1:
        raise BadFileError(f"{path} was written by another version of Gradveil: run its defense again")
    return entry


def read_entries(folder: Path) -> list[Entry]:
    """All entries below a folder, in the order of their files."""
    found = [read_entry(path) for path in sorted((folder / "results").glob("*/*.json"))]
    return [entry for entry in found if entry is not None]
