"""Reconstructions on disk: one file holds those of one attack, in the order of what it saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gradveil.attacks.base import Reconstruction
from gradveil.core.errors import BadFileError
from gradveil.core.tensor_files import read_tensors, write_tensors

KIND = "reconstruction"


def save_reconstructions(path: Path, found: Sequence[Reconstruction]) -> None:
    """Inputs [n, C, H, W] and labels [n] of all batches one after the other, scores of candidates [batches, m].

    Everything else is in the header.
    """
    tensors = {"inputs": torch.cat([f.inputs for f in found]), "labels": torch.cat([f.labels for f in found])}
    scores = [f.scores for f in found if f.scores is not None]
    if scores:
        tensors["scores"] = torch.stack(scores)
    facts = [_plain(f) for f in found]
    write_tensors(path, KIND, tensors, {"sizes": [len(f.inputs) for f in found], "facts": facts})


def load_reconstructions(path: Path) -> list[Reconstruction]:
    """The reconstructions of a file, checked."""
    tensors, meta = read_tensors(path, KIND, check=lambda meta, shapes: _check(path, meta, shapes))
    inputs, labels = torch.split(tensors["inputs"], meta["sizes"]), torch.split(tensors["labels"], meta["sizes"])
    scores = tensors.get("scores", [None] * len(meta["sizes"]))
    try:
        return [
            Reconstruction(inputs=x, labels=y, scores=each, **_read(fact))
            for x, y, each, fact in zip(inputs, labels, scores, meta["facts"], strict=True)
        ]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise BadFileError(f"{path}: its header is impossible: {error!r}") from None


def _check(path: Path, meta: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    sizes = meta.get("sizes")
    whole = isinstance(sizes, list) and all(type(size) is int and size >= 1 for size in sizes)
    inputs = shapes.get("inputs", ())
    good = whole and len(inputs) == 4 and shapes.get("labels") == (sum(sizes or []),) == inputs[:1]
    good = good and ("scores" not in shapes or (len(shapes["scores"]), shapes["scores"][0]) == (2, len(sizes or [])))
    if not good or not isinstance(meta.get("facts"), list):
        raise BadFileError(f"{path} does not hold as many pictures and labels as its header says")


def _plain(found: Reconstruction) -> dict[str, Any]:
    """The facts as JSON takes them: infinities, which it lacks, as None."""
    facts = {key: value for key, value in asdict(found).items() if key not in ("inputs", "labels", "scores")}
    for key in ("objectives", "trace"):
        facts[key] = [finite_or_none(value) for value in facts[key]]
    return facts | {"objective": finite_or_none(found.objective)}


def _read(fact: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: tuple(_number(v) for v in fact[key]) for key in ("objectives", "trace")}
    return {**fact, **numbers, "objective": _number(fact["objective"]), "steps": tuple(fact["steps"])}


def _number(value: float | None) -> float:
    return float("inf") if value is None else float(value)


def finite_or_none(value: float) -> float | None:
    """The value, or None for NaN and infinity."""
    return value if -float("inf") < value < float("inf") else None
