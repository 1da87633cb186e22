"""The folder of an audit. A row counts as done when its own file is there, and that file is written last.

Rows that were attacked as one batch count as done together: a part of the batch, run alone, could differ in the last
digit. While a batch runs, ``batch.json`` names its rows; after a kill, what the batch had saved of them is dropped.

::

    audit.json, report.html      what a person reads
    truth.safetensors            the private pictures
    observations/DEFENSE-DIGEST.safetensors, or DEFENSE-ATTACK-DIGEST.safetensors for an attack that crafts what is sent
    rows/DIGEST/reconstruction.safetensors, row.json
    rows/DIGEST/truth.safetensors, where rows are of different pictures: in an audit of saved exchanges
    rows/batch.json              only while a batch runs, or after it was interrupted
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gradveil.auditing.fields import first_complaint
from gradveil.core.atomic import make_folder, remove_partial, write_json
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.reading import read_bytes

_DIGEST = "^[0-9a-f]{16}$"
_SHARED = ("data", "model", "threat", "images", "every", "batch_size", "recipe", "gallery", "seed")
"""Fields of a case in which all rows of a folder agree; attacks and defenses may be added, and budgets changed."""


class Store:
    """Paths of an audit folder and its rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.audit = folder / "audit.json"
        self.truth = folder / "truth.safetensors"
        self._batch = folder / "rows" / "batch.json"

    def open(self, *, resume: bool, case: dict[str, Any] | None = None) -> None:
        """Make the folder, and refuse one with an audit in it unless that is to be resumed and of the same case.

        What an audit that was killed left half done is removed: the folder has to be claimed.
        """
        if (self.audit.exists() or (self.folder / "rows").exists()) and not resume:
            raise GradveilError(f"{self.folder} holds an audit already: add --resume to go on with it, or choose --out")
        if case is not None and self.audit.exists():
            self._refuse_another(case)
        make_folder(self.folder)
        remove_partial(self.folder, "audit.json", "truth.safetensors", "observations/*", "rows/batch.json", "rows/*/*")
        if self._batch.exists():
            for digest in re.findall("[0-9a-f]{16}", read_bytes(self._batch).decode(errors="replace")):
                (self.folder / "rows" / digest / "row.json").unlink(missing_ok=True)
            self._batch.unlink()

    def _refuse_another(self, case: dict[str, Any]) -> None:
        """An audit of something else would be written over, and its rows be left without it."""
        then = self.read_audit()["case"]
        about = f"{self.folder} holds an audit of {then.get('data', 'saved exchanges')}"
        if ("observations" in then) != ("observations" in case):
            raise BadFileError(f"{about}, made in another way; give another --out")
        before, now = _shared(then), _shared(case)
        for name, value in before.items():
            if name in now and now[name] != value:
                raise BadFileError(f"{about}: its {name} is {value}, not {now[name]}; give another --out")

    def observation(self, defense: str, crafted_by: str | None = None, number: int = 0) -> Path:
        """One file per defense and crafting attack, readable by name and unique by digest; more where one cannot do."""
        what = defense if crafted_by is None else f"{defense} {crafted_by}"
        plain = re.sub(r"[^A-Za-z0-9.=]+", "-", what)[:60]
        digest = hashlib.sha256(what.encode()).hexdigest()[:6]
        more = f"-{number}" if number else ""
        return self.folder / "observations" / f"{plain}-{digest}{more}.safetensors"

    def reconstruction(self, digest: str) -> Path:
        return self.folder / "rows" / digest / "reconstruction.safetensors"

    def truth_of(self, digest: str) -> Path:
        """The private pictures of one row, where rows are of different ones."""
        return self.folder / "rows" / digest / "truth.safetensors"

    @contextmanager
    def batch(self, digests: list[str]) -> Iterator[None]:
        """What is saved inside counts as done when the block ends without an error, not before."""
        write_json(self._batch, digests)
        yield
        self._batch.unlink()

    def row(self, digest: str) -> dict[str, Any] | None:
        """The saved row of a cell, or None if it is not done."""
        path = self.folder / "rows" / digest / "row.json"
        if self._batch.exists() and digest.encode() in self._read(self._batch):
            return None
        try:
            row = json.loads(self._read(path))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise BadFileError(f"{path} is damaged ({error}); delete it and run again with --resume") from None
        complaint = _complaint(row) or ("" if row["digest"] == digest else "it is of another row")
        if complaint:
            raise BadFileError(f"{path} is damaged ({complaint}); delete it and run again with --resume")
        return dict(row)

    def _read(self, path: Path) -> bytes:
        try:
            return read_bytes(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise BadFileError(f"cannot read {path}: {error.strerror}") from None

    def save_row(self, digest: str, row: dict[str, Any]) -> None:
        write_json(self.folder / "rows" / digest / "row.json", row)

    def save_audit(self, audit: dict[str, Any]) -> None:
        write_json(self.audit, audit)

    def read_audit(self) -> dict[str, Any]:
        try:
            audit = json.loads(self._read(self.audit))
        except FileNotFoundError:
            raise BadFileError(f"{self.folder} holds no audit: there is no audit.json in it") from None
        except (ValueError, RecursionError) as error:
            raise BadFileError(f"{self.audit} is damaged: {error}") from None
        if not isinstance(audit, dict) or audit.get("version") != 1:
            raise BadFileError(f"{self.audit} is not an audit that this Gradveil reads")
        rows, left_out = audit.get("rows"), audit.get("left_out", {})
        whole = isinstance(audit.get("complete"), bool) and isinstance(audit.get("environment"), dict)
        if not whole or not isinstance(audit.get("case"), dict) or not isinstance(rows, list):
            raise BadFileError(f"{self.audit} is damaged: it lacks its case, its environment, its rows or its end")
        if not isinstance(left_out, dict) or not all(isinstance(why, str) for why in left_out.values()):
            raise BadFileError(f"{self.audit} is damaged: 'left_out' gives no reasons")
        for place, row in enumerate(rows, start=1):
            if complaint := _complaint(row):
                raise BadFileError(f"{self.audit} is damaged: row {place}: {complaint}")
        return audit

    def relative(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


def _shared(case: dict[str, Any]) -> dict[str, Any]:
    """The shared fields of a case, a recipe's one by one."""
    fields = {name: case[name] for name in _SHARED if name in case}
    recipe = fields.pop("recipe", None)
    return fields | {f"recipe.{name}": value for name, value in (recipe if isinstance(recipe, dict) else {}).items()}


Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=2**53)]


class _Image(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    stopped: str


class _Trace(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    objective: list[list[Finite | None]]


class _SavedRow(BaseModel):
    """What flags, verdicts and tables take from a row that was read from a file."""

    model_config = ConfigDict(extra="allow", strict=True)

    digest: Annotated[str, Field(pattern=_DIGEST)]
    """It names a folder: one from a stranger must not lead out of this one."""
    defense: str
    attack: str
    prior_of: str | None
    threat: str
    images: Count
    mse: Finite | None
    psnr: Finite | None
    ssim: Finite | None
    lpips: Finite | None
    mse_r: Finite | None
    identified: Share | None
    identified_interval: Annotated[list[Share], Field(min_length=2, max_length=2)] | None
    identified_by: str | None
    label_accuracy: Share | None
    gallery: Count | None
    chance: Share | None = None
    candidates: Count = 1
    ranked_first: Share = 0.0
    seconds: Finite
    not_available: dict[str, str]
    per_image: list[_Image]
    log: dict[str, Finite]
    trace: _Trace
    training: str | None = None
    stage: str | None = None
    round: int | None = None

    @model_validator(mode="after")
    def _scored_or_not(self) -> Self:
        scored = (self.psnr, self.identified_interval, self.gallery, self.label_accuracy)
        if self.identified is not None and None in scored:
            raise ValueError("it is scored in part")
        if "ranked_first" in self.model_fields_set and "candidates" not in self.model_fields_set:
            raise ValueError("it ranks no candidates")
        return self


def _complaint(row: object) -> str:
    """What is wrong with a row of a file; nothing if it is as an audit writes it."""
    try:
        _SavedRow.model_validate(row)
    except ValidationError as error:
        return first_complaint(error, "row")
    return ""
