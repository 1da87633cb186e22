"""Running a training into a folder, from which it can be resumed and compared with others.

::

    train.json                 the case, the machine, and one row per round
    checkpoint.safetensors     the server's state after the round that its header names
    taps/round-R-client-C.safetensors, with .truth.safetensors beside it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, cast

import torch
from pydantic import TypeAdapter, ValidationError

from gradveil.core.atomic import make_folder, remove_partial, write_json
from gradveil.core.environment import environment
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.locks import alone
from gradveil.core.progress import SILENT, Progress
from gradveil.core.reading import read_json
from gradveil.core.registry import split_spec
from gradveil.core.seeding import generator
from gradveil.core.tensor_files import read_tensors, write_tensors
from gradveil.core.trees import moved
from gradveil.core.types import Json
from gradveil.data import DATASETS, ImageSet, load
from gradveil.defenses import can_remember
from gradveil.defenses.accounting import Ledger
from gradveil.federated.case import Training
from gradveil.federated.rounds import Federation, Quality, Round, RoundExchange, RoundRecord, State
from gradveil.federated.tap import Tap, tapped

VERSION = 1
KIND = "training"
RESULT, CHECKPOINT = "train.json", "checkpoint.safetensors"
HELD_OUT = 5
_MAY_CHANGE = {"rounds", "tap", "threat", "evaluate_every", "checkpoint_every"}
"""Fields that change nothing in the rounds already done."""


class TrainingRecord(TypedDict):
    """What ``train.json`` holds. Files may come from others: rows are checked where they are used."""

    version: int
    complete: bool
    case: Json
    examples: int
    test_examples: int
    environment: Json
    rows: list[RoundRecord]


@alone
def run_training(
    case: Training,
    folder: Path,
    *,
    resume: bool = False,
    progress: Progress = SILENT,
    say: Callable[[str], None] = lambda _line: None,
) -> TrainingRecord:
    """Train a case into a folder and return what ``train.json`` holds; ``say`` is told what a person should know."""
    if case.device == "cuda" and not torch.cuda.is_available():
        raise GradveilError("device cuda was asked for, but torch sees no GPU here: use --device cpu")
    if (folder / RESULT).exists() and not resume:
        raise GradveilError(f"{folder} holds a training already: add --resume to go on with it, or choose --out")
    remove_partial(folder, RESULT, CHECKPOINT, "taps/*.safetensors")
    train, test = data_of(case, progress)
    federation = Federation(case, train)
    if federation.defense.delta is not None:  # refused now: who takes part when is known beforehand
        federation.defense.check_steps(max(federation.turns_before(case.rounds + 1).values()) * case.epochs)
    make_folder(folder / "taps" if case.tap else folder)  # first: what cannot be kept is not worth a round
    pairs, save = tapped(case), Tap.on(federation, folder / "taps")

    def tap(one: RoundExchange) -> None:
        if (one.client, one.round_number) in pairs:
            save(one)

    federation.on_exchange = tap
    if federation.sends_statistics and case.defense != "none":
        say("running statistics of norm layers leave as they are: no defense hides them (docs/federated.md)")
    smallest = min(len(share) for share in federation.shares)
    word = federation.defense.caution(sum(p.numel() for p in federation.state.params.values()), smallest)
    if word is not None:
        say(word)
    rows = _resumed(federation, folder) if resume else []
    record = Recorder(federation, test, folder, rows, ledgers=federation.ledgers)
    with progress.task("train", case.rounds) as task:
        task.advance(len(rows))
        for number in range(len(rows) + 1, case.rounds + 1):
            done = federation.round(number)
            for client, reason in done.dropped.items():
                say(f"round {number}: the reply of client {client} was dropped: {reason}")
            quality = record(done)
            task.advance()
            if quality is not None:
                spent = f", epsilon {done.spent.epsilon:.4g}" if done.spent else ""
                task.note(f"accuracy {quality.accuracy:.1%}{spent} after round {number}")
    return read_training(folder)


def data_of(case: Training, progress: Progress = SILENT) -> tuple[ImageSet, ImageSet]:
    """What the clients share, and what the global model is evaluated on: never the same examples."""
    train, (name, options) = load(case.data, progress=progress), split_spec(case.data)
    spec = case.test
    if spec is None and "split" in DATASETS.options(name) and options.get("split") != "test":
        kept = [f"{key}={value}" for key, value in options.items() if key != "split"]
        spec = f"{name}:{','.join([*kept, 'split=test'])}"
    if spec is not None:
        test = load(spec, progress=progress)
        if (test.domain.shape, test.domain.classes) != (train.domain.shape, train.domain.classes):
            raise GradveilError(f"{spec} has other images or classes than {case.data}: it cannot test what that trains")
    else:
        order = torch.randperm(len(train), generator=generator(case.seed, "federated", "held out"))
        held_out = len(train) // HELD_OUT
        if held_out == 0:
            raise GradveilError(f"{case.data} is too small to hold a part of it out: name a data set to --test on")
        train, test = (train.subset(part.sort().values) for part in (order[held_out:], order[:held_out]))
    if case.examples is None:
        return train, test
    if case.examples > len(train):
        raise GradveilError(f"{case.examples} examples are more than the {len(train)} of {case.data}")
    drawn = torch.randperm(len(train), generator=generator(case.seed, "federated", "examples"))[: case.examples]
    return train.subset(drawn.sort().values), test


def read_training(folder: Path) -> TrainingRecord:
    """What ``train.json`` of a folder holds."""
    path = folder / RESULT
    try:
        found = read_json(path)
    except FileNotFoundError:
        raise BadFileError(f"{folder} holds no training: there is no {RESULT} in it") from None
    except (OSError, ValueError) as error:
        raise BadFileError(f"{path} is damaged: {error}") from None
    rows = found.get("rows") if isinstance(found, dict) and found.get("version") == VERSION else None
    if not isinstance(rows, list) or not isinstance(found.get("case"), dict):
        raise BadFileError(f"{path} is not a training that this Gradveil reads")
    return cast(TrainingRecord, found)


@dataclass(frozen=True)
class Recorder:
    """Evaluates rounds as the case says and writes them into a folder; without one it only keeps their rows."""

    federation: Federation
    test: ImageSet
    folder: Path | None
    rows: list[RoundRecord] = field(default_factory=list)
    ledgers: Sequence[Ledger] = ()
    """What was spent on the examples of each client, where this process knows it."""

    def __call__(self, done: Round) -> Quality | None:
        """Record a round after which ``federation`` stands; the quality if it was evaluated."""
        case, state, last = self.federation.case, self.federation.state, done.number == self.federation.case.rounds
        quality = self.federation.quality(self.test) if last or done.number % case.evaluate_every == 0 else None
        self.rows.append(done.as_json(quality))
        if self.folder is None:
            return quality
        whole: TrainingRecord = {
            "version": VERSION,
            "complete": len(self.rows) == case.rounds,
            "case": case.as_json(),
            "examples": len(self.federation.train),
            "test_examples": len(self.test),
            "environment": environment(case.device),
            "rows": self.rows,
        }
        write_json(self.folder / RESULT, whole)
        if last or done.number % case.checkpoint_every == 0:
            parts = {"params": state.params, "buffers": state.buffers, "velocity": state.velocity, "mean": state.mean}
            tensors = {f"{part}/{name}": tensor for part, tree in parts.items() for name, tensor in tree.items()}
            meta = {"round": done.number, "spent": [ledger.state() for ledger in self.ledgers]}
            write_tensors(self.folder / CHECKPOINT, KIND, tensors, meta)
        return quality


def _resumed(federation: Federation, folder: Path) -> list[RoundRecord]:
    """Put the federation where the checkpoint is, and return the rows up to there; rows after it are run again."""
    if not (folder / RESULT).exists() and not (folder / CHECKPOINT).exists():
        return []
    saved, case = read_training(folder), federation.case.as_json()
    for name, value in case.items():
        if name not in _MAY_CHANGE and saved["case"].get(name) != value:
            then = saved["case"].get(name)
            raise GradveilError(f"{folder} was trained with {name}={then}, not {value}: resume it with that")
    if not (folder / CHECKPOINT).exists() or can_remember(federation.defense):
        return []  # what clients remember is in no checkpoint: all rounds are run again
    rows, record = saved["rows"], TypeAdapter(RoundRecord)
    for place, row in enumerate(rows, start=1):
        try:
            damaged = record.validate_python(row, strict=True)["round"] != place
        except ValidationError:
            damaged = True
        if damaged:
            raise BadFileError(f"{folder / RESULT}: its row {place} is damaged: train anew into another --out")
    path, started = folder / CHECKPOINT, federation.state
    tensors, meta = read_tensors(path, KIND)
    number, tensors = meta.get("round"), moved(tensors, federation.case.device)
    # in the order of the model: noise is drawn in that order, and a file has another
    params, velocity, mean, buffers = (
        {name: tensors[f"{part}/{name}"] for name in like if f"{part}/{name}" in tensors}
        for part, like in (
            ("params", started.params),
            ("velocity", started.params),
            ("mean", started.params),
            ("buffers", started.buffers),
        )
    )
    shapes, expected = ({name: tensor.shape for name, tensor in tree.items()} for tree in (params, started.params))
    odd = [tree for tree in (velocity, mean) if tree and {n: t.shape for n, t in tree.items()} != expected]
    if odd or shapes != expected or type(number) is not int or not 0 < number <= min(len(rows), federation.case.rounds):
        raise BadFileError(f"{path} does not fit {RESULT} beside it: train anew into another --out")
    federation.state = State(params, buffers, velocity, mean)
    if federation.defense.delta is not None:  # without what was spent before, epsilon would be too small
        spent = meta.get("spent")
        if not isinstance(spent, list) or len(spent) != federation.case.clients:
            raise BadFileError(f"{path} does not say what each client has spent: train anew into another --out")
        try:
            federation.ledgers = [Ledger.restored(ledger) for ledger in spent]
        except GradveilError as error:
            raise BadFileError(f"{path} does not say what each client has spent: {error}") from None
    return list(rows[:number])
