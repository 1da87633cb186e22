"""An audit from Python: a model and a batch in, a result with verdicts and pictures out, which shows itself."""

from __future__ import annotations

import html
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradveil.attacks import BUDGETS, Attack, load_reconstructions
from gradveil.auditing.audit import Audit, Row, Verdict
from gradveil.auditing.case import BudgetName
from gradveil.auditing.run import run
from gradveil.auditing.sources import own
from gradveil.client import cross_entropy
from gradveil.core.atomic import write_atomically
from gradveil.core.errors import GradveilError
from gradveil.core.fields import Json
from gradveil.core.progress import SILENT, Progress
from gradveil.core.tensor_files import read_tensors
from gradveil.core.types import Batch, Loss, Recipe
from gradveil.data import ImageSet
from gradveil.defenses import Defense
from gradveil.domains import Domain
from gradveil.domains.pictures import data_address
from gradveil.report import render

_SHOWN = 8
"""So many pictures of each defense, at most, are shown in a notebook."""
_PATIENCE = 2.0
"""Seconds that work may take before its progress is shown."""

Defenses = str | Defense | Sequence[str | Defense]
Attacks = str | Attack | Sequence[str | Attack]


def audit(
    model: nn.Module,
    batch: Batch | tuple[Tensor, Tensor],
    *,
    defenses: Defenses = "none",
    attacks: Attacks = (),
    loss: Loss = cross_entropy,
    recipe: Recipe | None = None,
    threat: str = "D",
    batch_size: int = 1,
    budget: BudgetName = "quick",
    gallery: ImageSet | Tensor | None = None,
    out: Path | str | None = None,
    seed: int = 0,
    progress: Progress | bool = True,
    defense: Defenses | None = None,
    attack: Attacks | None = None,
) -> AuditResult:
    """What an update of this module on these private examples gives away.

    Args:
        model: Any module that maps inputs [n, ...] to scores [n, classes]. It is not changed.
        batch: Inputs [n, ...], which are images in [0, 1], and labels [n].
        defenses: Specs such as ``"noise:sigma=0.1"``, or objects, registered or not; one or several.
        attacks: The same for attacks, or ``"quick"``, ``"standard"`` or ``"thorough"``: all that fit, as a suite.
        loss: What clients minimise.
        recipe: How clients train; by default they send one gradient.
        threat: What the adversary knows, A to H.
        batch_size: How many of the examples are behind each update.
        budget: How hard attacks try that do not say it themselves.
        gallery: Other pictures of the kind, out of which a reconstruction has to pick the private one; by default the
            shipped samples of this shape.
        out: A folder to keep; by default the files are removed together with the result.
        seed: All random draws derive from it.
        progress: Where progress is reported; True shows it on a terminal or in a notebook, False nowhere.
        defense: Another name of ``defenses``.
        attack: Another name of ``attacks``.

    Raises:
        GradveilError: one line, if something does not fit.
    """
    guards, chosen = defenses if defense is None else defense, attacks if attack is None else attack
    if isinstance(chosen, str) and chosen in BUDGETS:
        budget, chosen = cast(BudgetName, chosen), ()
    shown = (_Line() if _is_watched() else SILENT) if progress is True else progress or SILENT
    plan = own(
        model,
        batch,
        defenses=[guards] if isinstance(guards, str | Defense) else list(guards),
        attacks=[chosen] if isinstance(chosen, str | Attack) else list(chosen),
        loss=loss,
        recipe=recipe,
        threat=threat,
        batch_size=batch_size,
        budget=budget,
        gallery=gallery,
        seed=seed,
        progress=shown,
    )
    if out is None:
        folder = Path(tempfile.mkdtemp(prefix="gradveil-"))
    elif (folder := Path(out)) and (folder / "audit.json").exists():
        raise GradveilError(f"{folder} holds an audit already: give out= another folder")
    try:
        result = AuditResult(run(plan, folder, progress=shown), folder, plan.domain)
    except BaseException:
        if out is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if out is None:
        weakref.finalize(result, shutil.rmtree, folder, ignore_errors=True)
    return result


class AuditResult:
    """An audit with its pictures. ``audit`` is the whole record, as it stands in ``audit.json``."""

    def __init__(self, audit: Audit, folder: Path, domain: Domain) -> None:
        self.audit, self.folder, self._domain = audit, folder, domain
        self.rows = tuple(ResultRow(row, self) for row in audit.rows)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """One for each defense: its worst case."""
        return self.audit.verdicts

    @property
    def case(self) -> Mapping[str, Any]:
        return self.audit.case

    @cached_property
    def private_images(self) -> Tensor:
        """[n, ...]: the truth, in the order in which rows have their images."""
        return read_tensors(self.folder / "truth.safetensors", "truth")[0]["inputs"]

    def report(self, path: Path | str) -> Path:
        """Write the report, one page that is complete in itself, and return its path."""
        page = render(self.folder).read_bytes()
        write_atomically(Path(path), page)
        return Path(path)

    def as_json(self) -> Json:
        """What ``audit.json`` holds."""
        return self.audit.as_json()

    def __repr__(self) -> str:
        lines = [f"{grade:<10} {verdict.sentence}{flags}" for verdict, grade, flags in self._graded()]
        return "\n".join([f"Audit of {len(self.rows)} {'row' if len(self.rows) == 1 else 'rows'}:", *lines])

    def _graded(self) -> Iterator[tuple[Verdict, str, str]]:
        for verdict in self.verdicts:
            flags = f" Flags: {', '.join(verdict.flags)}." if verdict.flags else ""
            yield verdict, "not graded" if verdict.grade is None else f"grade {verdict.grade}", flags

    def _repr_html_(self) -> str:
        """For notebooks: the verdicts, and the private images above what the worst attack on each defense rebuilt."""
        lines = [
            f"<tr><td><b>{html.escape(grade)}</b></td>"
            f"<td style='text-align:left'>{html.escape(verdict.sentence + flags)}</td></tr>"
            for verdict, grade, flags in self._graded()
        ]
        strips = [self._strip("private", self.private_images)]
        for verdict in self.verdicts:
            worst = verdict.rebuilt_apart or verdict
            row = next(row for row in self.rows if (row.defense, row.attack) == (verdict.defense, worst.attack))
            strips.append(self._strip(f"{row.attack} on {row.defense}", row.images))
        return f"<table>{''.join(lines)}</table><table>{''.join(strips)}</table>"

    def _strip(self, title: str, inputs: Tensor) -> str:
        style = "width:64px;image-rendering:pixelated;display:inline-block;margin:1px"
        pictures = [data_address(self._domain.show(one[None])) for one in inputs[:_SHOWN]]
        shown = "".join(f"<img style='{style}' alt='' src='{address}'>" for address in pictures)
        return f"<tr><td>{html.escape(title)}</td><td>{shown}</td></tr>"


class ResultRow:
    """A row of an audit, with all fields of its record, and its reconstructions."""

    def __init__(self, record: Row, result: AuditResult) -> None:
        self.record = record
        self._result = result  # whose files live as long as somebody holds a row of it

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "record"), name)

    @cached_property
    def images(self) -> Tensor:
        """[n, ...] in [0, 1]: what the attack rebuilt of each private image."""
        found = load_reconstructions(self._result.folder / self.record.files.reconstruction)
        return torch.cat([one.inputs for one in found])[[image.picture for image in self.record.per_image]]

    def __repr__(self) -> str:
        share = self.record.identified
        identified = "not scored" if share is None else f"{share:.0%} identified"
        return f"<{self.record.attack} on {self.record.defense}: {identified}>"


def _is_watched() -> bool:
    """Whether somebody looks: standard error is a terminal, or this is a notebook."""
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


class _Line:
    """Progress as one line that is written over, once the work has taken a while."""

    def __init__(self) -> None:
        self._started, self._told, self._width = time.monotonic(), 0.0, 0

    @contextmanager
    def task(self, title: str, total: float | None, unit: str = "") -> Iterator[_LineTask]:  # noqa: ARG002
        try:
            yield _LineTask(self, title, total)
        finally:
            self.show("")

    def show(self, text: str) -> None:
        now = time.monotonic()
        if (text and now - self._told < 0.2) or now - self._started < _PATIENCE:
            return
        self._told = now if text else 0.0
        text = text[: max(20, shutil.get_terminal_size().columns - 1)]
        sys.stderr.write("\r" + text.ljust(self._width) + ("" if text else "\r"))
        sys.stderr.flush()
        self._width = len(text)


class _LineTask:
    def __init__(self, line: _Line, title: str, total: float | None) -> None:
        self._line, self._title, self._total, self._done, self._note = line, title, total, 0.0, ""

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        self._show()

    def note(self, text: str) -> None:
        self._note = text
        self._show()

    def _show(self) -> None:
        share = f" {self._done / self._total:.0%}" if self._total else ""
        self._line.show(f"{self._title}{share}  {self._note}".rstrip())
