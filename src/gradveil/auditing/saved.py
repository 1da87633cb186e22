"""Saved exchanges: what a tap left in a training's folder, or any folder of observation files, read and checked.

The truth of ``NAME.safetensors`` is ``NAME.truth.safetensors`` beside it. Nothing here runs code that a file names.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.attacks import ATTACKS
from gradveil.auditing.audit import SavedTraining
from gradveil.auditing.case import ObservedCase
from gradveil.auditing.sources import AuditPlan, Cell, Exchange, Origin, Private, check_device, label_counts
from gradveil.auditing.suites import suite_for_saved
from gradveil.auditing.verdict import costs
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.fields import Json
from gradveil.core.progress import SILENT, Progress
from gradveil.core.reading import read_bytes
from gradveil.core.seeding import derive, generator
from gradveil.core.tensor_files import MAX_BYTES, Shapes, read_tensors
from gradveil.core.types import Batch, Params
from gradveil.data import ImageSet, load
from gradveil.federated import read_training
from gradveil.models import Fronted
from gradveil.threat import Observation, load_observations, threat_model

_TAP = re.compile(r"round-(\d{1,15})-client-(\d{1,15})(?:-\d+)?")
_TRUTH = ".truth.safetensors"


@dataclass(frozen=True)
class Truth:
    """The private examples behind the replies of one file, and where they stand in their data set."""

    batch: Batch
    index: Tensor


@dataclass(frozen=True)
class ExchangeFile:
    """One file of observations."""

    path: Path
    digest: str
    """Of the bytes of the file and of its truth: what a row depends on."""
    round_number: int | None
    client: int | None
    seen: tuple[Observation, ...]
    truth: Truth | None


@dataclass(frozen=True)
class ExchangeFolder:
    """One folder that was given: its files, and the content of the ``train.json`` beside them, if there is one."""

    name: str
    folder: Path
    files: tuple[ExchangeFile, ...]
    training: Mapping[str, Any]

    def _of_case(self, name: str) -> str | None:
        value = self.training.get("case", {}).get(name)
        return value if isinstance(value, str) and len(value) <= 500 else None

    @property
    def data(self) -> str | None:
        return self._of_case("data")

    @property
    def defense(self) -> str:
        """As the adversary knows it, else as the training has it."""
        return self.files[0].seen[0].defense or self._of_case("defense") or "unknown"

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
        rows = [row for row in self.training.get("rows", []) if isinstance(row, dict)]
        found = {row.get("round"): row.get("accuracy") for row in rows}
        share = None if number is None else found.get(number - 1)
        return share if isinstance(share, float) else None

    def stages(self) -> list[Stage]:
        """By round, or by file where its name tells none; apart where the truth is missing."""
        groups: dict[tuple[object, ...], list[ExchangeFile]] = {}
        for file in self.files:
            when = file.path if file.round_number is None else file.round_number
            groups.setdefault((when, file.truth is None), []).append(file)
        return [Stage(self, tuple(files)) for files in groups.values()]


@dataclass(frozen=True)
class Stage:
    """Exchanges that are attacked and scored together: all with their truth, or all without."""

    folder: ExchangeFolder
    files: tuple[ExchangeFile, ...]

    @property
    def seen(self) -> list[Observation]:
        return [one for file in self.files for one in file.seen]

    def origin(self) -> Origin:
        first = self.files[0]
        return Origin(
            training=self.folder.name,
            stage=first.path.stem if first.round_number is None else f"round {first.round_number}",
            round=first.round_number,
            clients=tuple(file.client for file in self.files if file.client is not None),
            model_accuracy=self.folder.accuracy_before(first.round_number),
        )

    def module(self) -> nn.Module:
        """The model as it was broadcast, without the front that a server put before it."""
        module = copy.deepcopy(self.seen[0].module)
        module.load_state_dict(self.seen[0].sent, strict=False)
        return module.model if isinstance(module, Fronted) else module

    def private(self, case: ObservedCase, data: ImageSet | None) -> Private | None:
        """The private examples in a gallery of others of their kind; None where nobody knows them.

        Others come from ``data``, which the training names or, where nothing says what it was, from the other files.
        """
        parts = [file.truth for file in self.files if file.truth is not None]
        if not parts:
            return None
        batch = Batch(torch.cat([p.batch.inputs for p in parts]), torch.cat([p.batch.labels for p in parts]))
        known, count, rng = batch.inputs, case.gallery + len(batch), generator(case.seed, "gallery")
        if data is None:
            every = torch.cat([file.truth.batch.inputs for file in self.folder.files if file.truth is not None])
            every = torch.unique(every, dim=0)
            others = every[torch.randperm(len(every), generator=rng)[:count]]
        elif data.domain.shape != self.seen[0].domain.shape:
            raise BadFileError(
                f"{self.folder.folder}: its train.json names {self.folder.data}, which has other pictures"
            )
        else:
            others = data.batch(torch.randperm(len(data), generator=rng)[:count]).inputs
        distances = torch.cdist(others.flatten(1), known.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
        others = others[distances.amin(dim=1) > 0]
        gallery = torch.cat([known, others[: max(0, case.gallery - len(known))]])
        if len(gallery) < 2:
            raise GradveilError(
                f"{self.files[0].path} is alone with its picture: to identify it takes others of its kind, "
                "from more exchanges or from the data set that a train.json beside taps/ names"
            )
        order = torch.randperm(len(gallery), generator=rng)
        places = order.argsort()[: len(known)]
        return Private(
            batch,
            torch.cat([p.index for p in parts]),
            gallery[order],
            places,
            label_counts=None if data is None else label_counts(data),
        )


def saved(case: ObservedCase, *, progress: Progress = SILENT) -> AuditPlan:
    """Replies that a tap or another program saved, by stage. All of one attack go to it together, of any round."""
    check_device(case.device)
    folders = read_folders(case)
    costs(case.training, [folder.defense for folder in folders])  # what is wrong with the trainings is raised now
    files = [file for folder in folders for file in folder.files]
    if not case.attacks:
        specs = suite_for_saved(case.budget, [file.seen[0] for file in files])
        case = case.model_copy(update={"attacks": specs})
    attacks = {spec: ATTACKS.build(spec, case.effort()) for spec in case.attacks}
    for spec, attack in attacks.items():
        for file in files:
            threat_model(file.seen[0].threat).vet(spec, attack.requires)
            if attack.crafts and not file.seen[0].crafted:
                raise GradveilError(f"attack {spec!r} crafts what is sent, but {file.path} answers an honest broadcast")
    read = cache(lambda spec: load(spec, progress=progress))

    def private(stage: Stage) -> Private | None:
        return stage.private(case, None if stage.folder.data is None else read(stage.folder.data))

    def cell(spec: str, stage: Stage, *, prior_only: bool) -> Cell:
        exchanges = [file.digest for file in stage.files]
        distractors = stage.folder.data or [file.digest for file in stage.folder.files]
        sizes = [(file.client, 0 if file.truth is None else len(file.truth.batch)) for file in stage.files]
        return Cell(
            spec=spec,
            attack=attacks[spec],
            defense=stage.folder.defense,
            prior_only=prior_only,
            digest=case.digest(spec, exchanges, distractors, prior_only=prior_only),
            seeds=[derive(case.seed, "attack", i) for i in range(len(stage.seen))],
            exchange=lambda: Exchange(stage.seen),
            private=lambda: private(stage),
            module=stage.module,
            paths=tuple(str(file.path) for file in stage.files),
            owners=tuple(client for client, size in sizes for _ in range(size)),
            origin=Origin() if prior_only else stage.origin(),
        )

    stages = [stage for folder in folders for stage in folder.stages()]
    for stage in stages:
        private(stage)  # what would make scoring fail after the attack is raised now
    cells = [cell(spec, stage, prior_only=False) for spec in attacks for stage in stages]
    pictures: dict[bytes, ExchangeFile] = {}
    for file in (file for stage in stages for file in stage.files):
        if file.truth is not None:
            pictures.setdefault(file.truth.batch.inputs.numpy().tobytes(), file)
    if pictures:  # chance is measured on every picture once
        chance = Stage(stages[0].folder, tuple(pictures.values()))
        searching = [spec for spec, attack in attacks.items() if attack.prior_only() is not None]
        cells += [cell(spec, chance, prior_only=True) for spec in searching]
    records = tuple(folder.record() for folder in folders)
    data = folders[0].data if all(folder.data == folders[0].data for folder in folders) else None
    known = read(data) if pictures and data is not None else None  # with no truth, no data set was read
    people = {folder.data for folder in folders if folder.data is not None} if pictures else set()
    return AuditPlan(
        case=case,
        cells=cells,
        domain=files[0].seen[0].domain,
        trainings=records,
        class_names=() if known is None else known.class_names,
        labels_are_people=any(read(name).labels_are_people for name in people),
    )


def read_folders(case: ObservedCase) -> list[ExchangeFolder]:
    """Every folder of the case with its files. Replies to equal broadcasts share them, so that they step together."""
    folders = [Path(folder) for folder in case.observations]
    if len(set(folders)) < len(folders):
        raise GradveilError("a folder of observations stands twice in the case")
    names = [Path(os.path.realpath(folder)).name for folder in folders]  # resolve() raises on a loop of links
    found = [
        _read_folder(folder, name if names.count(name) == 1 else str(folder), case.model)
        for folder, name in zip(folders, names, strict=True)
    ]
    everything = [file for folder in found for file in folder.files]
    first = everything[0]
    for file in everything:  # rows are compared with each other and scored against one gallery
        one, other = first.seen[0].domain, file.seen[0].domain
        if (one.shape, one.classes) != (other.shape, other.classes):
            raise GradveilError(f"{file.path} is about other pictures than {first.path}: audit them apart")
    shared = iter(_shared([one.to(case.device) for file in everything for one in file.seen], case.device))
    return [
        replace(folder, files=tuple(replace(f, seen=tuple(next(shared) for _ in f.seen)) for f in folder.files))
        for folder in found
    ]


def _read_folder(folder: Path, name: str, model: str | None) -> ExchangeFolder:
    if not folder.is_dir():
        raise GradveilError(f"{folder} is no folder: give one in which gradveil train --tap saved exchanges")
    taps = folder / "taps" if (folder / "taps").is_dir() else folder
    paths = sorted(path for path in taps.glob("*.safetensors") if not path.name.endswith(_TRUTH))
    if not paths:
        raise GradveilError(f"there are no saved exchanges in {taps}: gradveil train --tap CLIENT@ROUND saves some")
    home = taps.parent if taps.name == "taps" else taps
    training = dict(read_training(home)) if (home / "train.json").exists() else {}
    files = []
    for path in paths:
        seen = tuple(load_observations(path, module=model))
        beside = path.with_name(path.name.removesuffix(".safetensors") + _TRUTH)
        truth = _read_truth(beside, seen) if beside.exists() else None
        named = _TAP.fullmatch(path.name.removesuffix(".safetensors"))
        number, client = (int(part) for part in named.groups()) if named else (None, None)
        content = [read_bytes(part, most=MAX_BYTES) for part in (path, *([beside] if truth else []))]
        digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in content)).hexdigest()
        files.append(ExchangeFile(path, digest, number, client, seen, truth))
    return ExchangeFolder(name, folder, tuple(files), training)


def _read_truth(path: Path, seen: Sequence[Observation]) -> Truth:
    """The truth of a file, which has to be what its replies can be of."""
    domain, size = seen[0].domain, seen[0].batch_size

    def check(_meta: Json, shapes: Shapes) -> None:
        inputs = shapes.get("inputs", ())
        count = inputs[0] if inputs else 0
        wanted = {"inputs": (count, *domain.shape), "labels": (count,), "index": (count,)}
        if shapes != wanted or count == 0 or count % len(seen) or size not in (None, count // len(seen)):
            raise BadFileError(f"{path} is not the truth of the exchange beside it: it has other shapes")

    tensors, _ = read_tensors(path, "truth", check=check)
    inputs, labels, index = tensors["inputs"], tensors["labels"], tensors["index"]
    kinds = (inputs.dtype, labels.dtype, index.dtype) == (torch.float32, torch.int64, torch.int64)
    if not kinds or domain.fault(inputs) or labels.min() < 0 or labels.max() >= domain.classes:
        raise BadFileError(f"{path}: pictures are float32 in [0, 1], labels are classes below {domain.classes}")
    # Clients shuffle anew in every round, and no attack recovers the order: in that of the data set, rounds line up.
    order = index.view(len(seen), -1).argsort(dim=1)
    order = (order + torch.arange(0, len(index), order.shape[1])[:, None]).flatten()
    return Truth(Batch(inputs[order], labels[order]), index[order])


def _shared(seen: Sequence[Observation], device: str) -> list[Observation]:
    """The same with equal architectures and equal broadcasts as one object each."""
    modules: dict[str, nn.Module] = {}
    broadcasts: dict[str, Params] = {}

    def digest(name: str, tensors: Params) -> str:
        whole = hashlib.sha256(name.encode())
        for key, tensor in sorted(tensors.items()):
            whole.update(key.encode() + tensor.detach().cpu().double().numpy().tobytes())
        return whole.hexdigest()

    found = []
    for one in seen:
        named = repr((one.model, one.reshaped, one.domain))
        module = modules.setdefault(digest(named, dict(one.module.named_buffers())), one.module.to(device))
        sent = broadcasts.setdefault(digest(named, one.sent), one.sent)
        found.append(replace(one, module=module, sent=sent))
    return found
