"""Saved exchanges, read and checked: what a tap left in a training's folder, or any folder of observation files.

The truth of ``NAME.safetensors`` is ``NAME.truth.safetensors`` beside it. Nothing here runs code that a file names.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.auditing.audit import SavedTraining
from gradveil.auditing.case import ObservedCase
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.reading import read_bytes
from gradveil.core.tensor_files import MAX_BYTES, read_tensors
from gradveil.core.types import Batch, Params
from gradveil.federated import read_training
from gradveil.threat import Observation, load_observations

_TAP = re.compile(r"round-(\d{1,15})-client-(\d{1,15})(?:-\d+)?")
_TRUTH = ".truth.safetensors"


@dataclass(frozen=True)
class Truth:
    """The private examples behind the replies of one file, and where they stand in their data set."""

    batch: Batch
    index: Tensor


@dataclass(frozen=True)
class Saved:
    """One file of observations."""

    path: Path
    digest: str
    """Of the bytes of the file and of its truth: what a row depends on."""
    round_number: int | None
    client: int | None
    seen: tuple[Observation, ...]
    truth: Truth | None


@dataclass(frozen=True)
class Source:
    """One folder that was given: its files, and what the ``train.json`` beside them says, if there is one."""

    name: str
    folder: Path
    files: tuple[Saved, ...]
    said: dict[str, Any]

    @property
    def data(self) -> str | None:
        return _text(self.said.get("case", {}).get("data"))

    @property
    def defense(self) -> str:
        """As the adversary knows it, else as the training says it."""
        return self.files[0].seen[0].defense or _text(self.said.get("case", {}).get("defense")) or "unknown"

    def record(self) -> SavedTraining:
        """What the exchanges have in common, for a reader of the audit."""
        one = self.files[0].seen[0]
        return SavedTraining(
            name=self.name,
            folder=str(self.folder),
            data=self.data,
            model=one.model,
            defense=self.defense,
            threat=one.threat,
            recipe=None if one.recipe is None else asdict(one.recipe),
            batch_size=one.batch_size,
            rounds=tuple(sorted({file.round_number for file in self.files if file.round_number is not None})),
            clients=tuple(sorted({file.client for file in self.files if file.client is not None})),
        )

    def accuracy_before(self, number: int | None) -> float | None:
        """The accuracy of the model that clients were sent in a round, where the round before was evaluated."""
        rows = [row for row in self.said.get("rows", []) if isinstance(row, dict)]
        found = {row.get("round"): row.get("accuracy") for row in rows}
        share = None if number is None else found.get(number - 1)
        return share if isinstance(share, float) else None


def read_sources(case: ObservedCase) -> list[Source]:
    """Every folder of the case with its files. Replies to equal broadcasts share them, so that they step together."""
    folders = [Path(folder) for folder in case.observations]
    if len(set(folders)) < len(folders):
        raise GradveilError("a folder of observations stands twice in the case")
    names = [Path(os.path.realpath(folder)).name for folder in folders]  # resolve() raises on a loop of links
    found = [
        _read_source(folder, name if names.count(name) == 1 else str(folder), case.model)
        for folder, name in zip(folders, names, strict=True)
    ]
    everything = [file for source in found for file in source.files]
    _check_alike(everything)
    shared = iter(_shared([one.to(case.device) for file in everything for one in file.seen], case.device))
    return [
        replace(source, files=tuple(replace(f, seen=tuple(next(shared) for _ in f.seen)) for f in source.files))
        for source in found
    ]


def _read_source(folder: Path, name: str, model: str | None) -> Source:
    if not folder.is_dir():
        raise GradveilError(f"{folder} is no folder: give one in which gradveil train --tap saved exchanges")
    taps = folder / "taps" if (folder / "taps").is_dir() else folder
    paths = sorted(path for path in taps.glob("*.safetensors") if not path.name.endswith(_TRUTH))
    if not paths:
        raise GradveilError(f"there are no saved exchanges in {taps}: gradveil train --tap CLIENT@ROUND saves some")
    home = taps.parent if taps.name == "taps" else taps
    said = read_training(home) if (home / "train.json").exists() else {}
    return Source(name, folder, tuple(_read_file(path, model) for path in paths), said)


def _read_file(path: Path, model: str | None) -> Saved:
    seen, beside = (
        tuple(load_observations(path, module=model)),
        path.with_name(path.name.removesuffix(".safetensors") + _TRUTH),
    )
    truth = _read_truth(beside, seen) if beside.exists() else None
    named = _TAP.fullmatch(path.name.removesuffix(".safetensors"))
    number, client = (int(part) for part in named.groups()) if named else (None, None)
    content = [read_bytes(part, most=MAX_BYTES) for part in (path, *([beside] if truth else []))]
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in content)).hexdigest()
    return Saved(path, digest, number, client, seen, truth)


def _read_truth(path: Path, seen: Sequence[Observation]) -> Truth:
    """The truth of a file, which has to be what its replies can be of."""
    domain, size = seen[0].domain, seen[0].batch_size

    def check(_meta: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
        inputs = shapes.get("inputs", ())
        count = inputs[0] if inputs else 0
        wanted = {"inputs": (count, *domain.shape), "labels": (count,), "index": (count,)}
        if shapes != wanted or count == 0 or count % len(seen) or size not in (None, count // len(seen)):
            raise BadFileError(f"{path} is not the truth of the exchange beside it: it has other shapes")

    tensors, _ = read_tensors(path, "truth", check=check)
    inputs, labels, index = tensors["inputs"], tensors["labels"], tensors["index"]
    kinds = (inputs.dtype, labels.dtype, index.dtype) == (torch.float32, torch.int64, torch.int64)
    if not kinds or inputs.min() < 0 or inputs.max() > 1 or labels.min() < 0 or labels.max() >= domain.classes:
        raise BadFileError(f"{path}: pictures are float32 in [0, 1], labels are classes below {domain.classes}")
    # Clients shuffle anew in every round, and no attack recovers the order: in that of the data set, rounds line up.
    order = index.view(len(seen), -1).argsort(dim=1)
    order = (order + torch.arange(0, len(index), order.shape[1])[:, None]).flatten()
    return Truth(Batch(inputs[order], labels[order]), index[order])


def _check_alike(files: Sequence[Saved]) -> None:
    """Rows are compared with each other and scored against one gallery: pictures must be of one kind."""
    first = files[0]
    for file in files:
        one, other = first.seen[0].domain, file.seen[0].domain
        if (one.shape, one.classes) != (other.shape, other.classes):
            raise GradveilError(f"{file.path} is about other pictures than {first.path}: audit them apart")


def _shared(seen: Sequence[Observation], device: str) -> list[Observation]:
    """The same with equal architectures and equal broadcasts as one object each."""
    modules: dict[str, nn.Module] = {}
    broadcasts: dict[str, Params] = {}
    found = []
    for one in seen:
        named = repr((one.model, one.reshaped, one.domain))
        module = modules.setdefault(_digest(named, dict(one.module.named_buffers())), one.module.to(device))
        sent = broadcasts.setdefault(_digest(named, one.sent), one.sent)
        found.append(replace(one, module=module, sent=sent))
    return found


def _digest(name: str, tensors: Params) -> str:
    whole = hashlib.sha256(name.encode())
    for key, tensor in sorted(tensors.items()):
        whole.update(key.encode() + tensor.detach().cpu().double().numpy().tobytes())
    return whole.hexdigest()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and len(value) <= 500 else None
