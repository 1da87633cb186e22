"""An audit of what a program already holds: its module, its private batch, its loss."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from gradveil.attacks import ATTACKS
from gradveil.auditing.audit import Audit
from gradveil.auditing.case import BudgetName, Case
from gradveil.auditing.run import run_on
from gradveil.client import cross_entropy
from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.types import Batch, Loss, Recipe
from gradveil.data import ImageSet, MemoryImages, load
from gradveil.defenses import DEFENSES
from gradveil.defenses.public import SHIPPED
from gradveil.models import as_pictures, logits_of
from gradveil.threat import threat_model


def audit(
    model: nn.Module,
    batch: Batch | tuple[Tensor, Tensor],
    *,
    loss: Loss = cross_entropy,
    recipe: Recipe | None = None,
    defense: str | Sequence[str] = "none",
    attack: str | Sequence[str] = (),
    threat: str = "C",
    batch_size: int = 1,
    budget: BudgetName = "quick",
    gallery: ImageSet | Tensor | None = None,
    out: Path | str | None = None,
    seed: int = 0,
    progress: Progress = SILENT,
) -> Audit:
    """What an update of this module on these private examples gives away: what ``audit.json`` holds.

    ``batch`` has inputs [n, C, H, W] in [0, 1] and labels [n]; ``batch_size`` of them are behind each update. A
    reconstruction has to pick the private picture out of these examples and those of ``gallery``: other pictures of
    the kind, by itself the shipped samples of this shape. Without ``attack``, the budget's suite runs. With ``out``,
    the folder of the audit is kept there.
    """
    inputs, labels = (batch.inputs, batch.labels) if isinstance(batch, Batch) else batch
    inputs = as_pictures(inputs)
    device = next(iter(model.parameters())).device.type
    private = _private_first(inputs.detach().cpu(), labels.detach().cpu(), gallery, _classes(model, inputs))
    case = Case.model_construct(
        data="your batch",
        model=f"{type(model).__module__}:{type(model).__qualname__}",
        defenses=tuple(DEFENSES.canonical(spec) for spec in _several(defense)),
        attacks=tuple(ATTACKS.canonical(spec) for spec in _several(attack)),
        threat=threat_model(threat).name,
        images=len(inputs),
        batch_size=batch_size,
        recipe=recipe or Recipe(),
        budget=budget,
        gallery=len(private),
        seed=seed,
        device=device,
    )
    if not len(inputs) or len(inputs) % batch_size:
        raise GradveilError(f"{len(inputs)} examples cannot be cut into batches of {batch_size}")
    if out is not None:
        return run_on(case, private, Path(out), own=model, loss=loss, progress=progress)
    with tempfile.TemporaryDirectory() as folder:
        return run_on(case, private, Path(folder), own=model, loss=loss, progress=progress)


def _private_first(inputs: Tensor, labels: Tensor, gallery: ImageSet | Tensor | None, classes: int) -> MemoryImages:
    """The private examples and after them the other pictures, whose labels nobody looks at."""
    others = _others(inputs, gallery)
    return MemoryImages(
        name="your batch",
        images=torch.cat([inputs, others]),
        labels=torch.cat([labels, labels.new_zeros(len(others))]),
        class_names=tuple(map(str, range(classes))),
        mean=(0.0,) * inputs.shape[1],
        std=(1.0,) * inputs.shape[1],
    )


def _others(inputs: Tensor, gallery: ImageSet | Tensor | None) -> Tensor:
    if gallery is None:
        shape = tuple(inputs.shape[1:])
        gallery = next((samples for samples in map(load, SHIPPED) if samples.shape == shape), None)
        if gallery is None:
            size = " x ".join(map(str, shape))
            raise GradveilError(f"no shipped sample is {size}: give gallery= other pictures of that shape to hide in")
    pictures = gallery if isinstance(gallery, Tensor) else gallery.batch(range(len(gallery))).inputs
    pictures = pictures.detach().to(inputs)
    # A private picture that is in the gallery as well would be its own distractor.
    same = torch.cdist(pictures.flatten(1), inputs.flatten(1), p=float("inf")) == 0
    return pictures[~same.any(1)]


def _classes(model: nn.Module, inputs: Tensor) -> int:
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            return int(logits_of(model(inputs[:1].to(next(iter(model.parameters())).device))).shape[1])
    finally:
        model.train(was)


def _several(specs: str | Sequence[str]) -> list[str]:
    return [specs] if isinstance(specs, str) else list(specs)
