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
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import from_json

from gradveil.auditing.audit import Audit, Row, complaint, read_audit
from gradveil.auditing.version1 import upgraded_row
from gradveil.core.atomic import make_folder, remove_partial, write_json
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.fields import Json
from gradveil.core.reading import read_bytes

_DIGEST = "[0-9a-f]{16}"
_SHARED = ("data", "model", "threat", "images", "every", "batch_size", "recipe", "gallery", "seed")
"""Fields of a case in which all rows of a folder agree; attacks and defenses may be added, and budgets changed."""


class Store:
    """Paths of an audit folder and its rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.audit = folder / "audit.json"
        self.truth = folder / "truth.safetensors"
        self._batch = folder / "rows" / "batch.json"

    def open(self, *, resume: bool, case: Json | None = None) -> None:
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
            for digest in re.findall(_DIGEST, read_bytes(self._batch).decode(errors="replace")):
                (self.folder / "rows" / digest / "row.json").unlink(missing_ok=True)
            self._batch.unlink()

    def _refuse_another(self, case: Json) -> None:
        """An audit of something else would be written over, and its rows be left without it."""
        then = self.read_audit().case
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

    def row(self, digest: str) -> Row | None:
        """The saved row of a cell, or None if it is not done."""
        path = self.folder / "rows" / digest / "row.json"
        if self._batch.exists() and digest.encode() in self._read(self._batch):
            return None
        try:
            found = from_json(self._read(path))
            older = isinstance(found, dict) and "at_random" not in found
            row = Row.model_validate(upgraded_row(found) if older else found)
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise BadFileError(f"{path}{complaint(error)}: delete it and run again with --resume") from None
        except ValueError as error:
            raise BadFileError(f"{path} is damaged ({error}): delete it and run again with --resume") from None
        if row.digest != digest:
            raise BadFileError(f"{path} is of another row: delete it and run again with --resume")
        return row

    def _read(self, path: Path) -> bytes:
        try:
            return read_bytes(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise BadFileError(f"cannot read {path}: {error.strerror}") from None

    def save_row(self, digest: str, row: Row) -> None:
        write_json(self.folder / "rows" / digest / "row.json", row.model_dump(mode="json"))

    def save_audit(self, audit: Audit) -> None:
        write_json(self.audit, audit.as_json())

    def read_audit(self) -> Audit:
        """The audit in the folder, which may come from a stranger: the digests of its rows name folders."""
        audit = read_audit(self.folder)
        for place, row in enumerate(audit.rows, start=1):
            if not re.fullmatch(_DIGEST, row.digest):
                raise BadFileError(f"{self.audit}, row {place}: 'digest' names no row; the file is damaged")
        return audit

    def relative(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


def _shared(case: Json) -> Json:
    """The shared fields of a case, a recipe's one by one."""
    fields = {name: case[name] for name in _SHARED if name in case}
    recipe = fields.pop("recipe", None)
    return fields | {f"recipe.{name}": value for name, value in (recipe if isinstance(recipe, dict) else {}).items()}
