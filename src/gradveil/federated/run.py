"""Running a training into a folder, from which it can be resumed and compared with others.

::

    train.json                 the case, the machine, and one row per round
    checkpoint.safetensors     the server's state after the round that its header names
    taps/round-R-client-C.safetensors, with .truth.safetensors beside it
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gradveil.core.atomic import make_folder, remove_partial, write_json
from gradveil.core.environment import environment
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.locks import alone
from gradveil.core.progress import SILENT, Progress
from gradveil.core.reading import read_text
from gradveil.core.registry import split_spec
from gradveil.core.seeding import generator
from gradveil.core.tensor_files import read_tensors, write_tensors
from gradveil.core.trees import moved
from gradveil.core.types import Params
from gradveil.data import DATASETS, ImageSet, load
from gradveil.defenses import DEFENSES
from gradveil.defenses.accounting import Ledger
from gradveil.federated.case import Training
from gradveil.federated.rounds import Federation, RoundExchange, State, participants
from gradveil.federated.tap import Tap, tapped

VERSION = 1
KIND = "training"
RESULT, CHECKPOINT = "train.json", "checkpoint.safetensors"
HELD_OUT = 5
_MAY_CHANGE = {"rounds", "tap", "threat", "evaluate_every", "checkpoint_every"}
"""Fields that change nothing in the rounds already done."""


@alone
def run_training(
    case: Training,
    folder: Path,
    *,
    resume: bool = False,
    progress: Progress = SILENT,
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Train a case into a folder and return what ``train.json`` holds; ``say`` is told what a person should know."""
    if case.device == "cuda" and not torch.cuda.is_available():
        raise GradveilError("device cuda was asked for, but torch sees no GPU here: use --device cpu")
    if (folder / RESULT).exists() and not resume:
        raise GradveilError(f"{folder} holds a training already: add --resume to go on with it, or choose --out")
    remove_partial(folder, RESULT, CHECKPOINT, "taps/*.safetensors")
    _check_plan(case)
    train, test = data_of(case, progress)
    federation = Federation(case, train)
    make_folder(folder / "taps" if case.tap else folder)  # first: what cannot be kept is not worth a round
    pairs, save = tapped(case), Tap.on(federation, folder / "taps")

    def tap(one: RoundExchange) -> None:
        if (one.client, one.round_number) in pairs:
            save(one)

    federation.on_exchange = tap
    if federation.sends_statistics and case.defense != "none":
        say("running statistics of norm layers leave as they are: no defense hides them (docs/federated.md)")
    rows = _resumed(federation, folder) if resume else []
    with progress.task("train", case.rounds, "rounds") as task:
        task.advance(len(rows))
        for number in range(len(rows) + 1, case.rounds + 1):
            done = federation.round(number)
            for client, reason in done.dropped.items():
                say(f"round {number}: the reply of client {client} was dropped: {reason}")
            looks = number % case.evaluate_every == 0 or number == case.rounds
            quality = federation.quality(test) if looks else None
            rows.append(done.as_json(quality))
            save_rows(case, rows, folder, len(train), len(test))
            if number % case.checkpoint_every == 0 or number == case.rounds:
                save_state(federation.state, number, folder, federation.ledgers)
            task.advance()
            if quality is not None:
                spent = f", epsilon {done.spent.epsilon:.4g}" if done.spent else ""
                task.note(f"accuracy {quality.accuracy:.1%}{spent} after round {number}")
    return read_training(folder)


def data_of(case: Training, progress: Progress = SILENT) -> tuple[ImageSet, ImageSet]:
    """What the clients share, and what the global model is evaluated on: never the same examples."""
    train, test = _train_and_test(case, progress)
    if case.examples is None:
        return train, test
    if case.examples > len(train):
        raise GradveilError(f"{case.examples} examples are more than the {len(train)} of {case.data}")
    drawn = torch.randperm(len(train), generator=generator(case.seed, "federated", "examples"))[: case.examples]
    return train.subset(drawn.sort().values), test


def _train_and_test(case: Training, progress: Progress) -> tuple[ImageSet, ImageSet]:
    train, name = load(case.data, progress=progress), split_spec(case.data)[0]
    test = case.test
    if test is None and "split" in DATASETS.options(name) and DATASETS.parse(case.data)[1].get("split") != "test":
        kept = [f"{key}={value}" for key, value in split_spec(case.data)[1].items() if key != "split"]
        test = f"{name}:{','.join([*kept, 'split=test'])}"
    if test is not None:
        other = load(test, progress=progress)
        if (other.domain.shape, other.domain.classes) != (train.domain.shape, train.domain.classes):
            raise GradveilError(f"{test} has other images or classes than {case.data}: it cannot test what that trains")
        return train, other
    order = torch.randperm(len(train), generator=generator(case.seed, "federated", "held out"))
    held_out = len(train) // HELD_OUT
    if held_out == 0:
        raise GradveilError(f"{case.data} is too small to hold a part of it out: name a data set to --test on")
    return train.subset(order[held_out:].sort().values), train.subset(order[:held_out].sort().values)


def _check_plan(case: Training) -> None:
    """Refuse more steps than a defense plans; who takes part when is known beforehand."""
    defense = DEFENSES.build(case.defense)
    if defense.delta is not None:
        rounds = range(1, case.rounds + 1)
        turns = Counter(
            c for r in rounds for c in participants(case.clients, case.per_round, seed=case.seed, round_number=r)
        )
        defense.check_steps(max(turns.values()) * case.epochs)


def read_training(folder: Path) -> dict[str, Any]:
    """What ``train.json`` of a folder holds."""
    path = folder / RESULT
    try:
        found = json.loads(read_text(path))
    except FileNotFoundError:
        raise BadFileError(f"{folder} holds no training: there is no {RESULT} in it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadFileError(f"{path} is damaged: {error}") from None
    rows = found.get("rows") if isinstance(found, dict) and found.get("version") == VERSION else None
    if not isinstance(rows, list) or not isinstance(found.get("case"), dict):
        raise BadFileError(f"{path} is not a training that this Gradveil reads")
    return dict(found)


def save_rows(case: Training, rows: list[dict[str, Any]], folder: Path, examples: int, tested: int) -> None:
    """Write ``train.json``."""
    whole = {
        "version": VERSION,
        "complete": len(rows) == case.rounds,
        "case": case.as_json(),
        "examples": examples,
        "test_examples": tested,
        "environment": environment(case.device),
        "rows": rows,
    }
    write_json(folder / RESULT, whole)


def save_state(state: State, number: int, folder: Path, ledgers: Sequence[Ledger] = ()) -> None:
    """Write the checkpoint of a round, with what was spent on the examples of each client."""
    parts = {"params": state.params, "buffers": state.buffers, "velocity": state.velocity}
    tensors = {f"{part}/{name}": tensor for part, tree in parts.items() for name, tensor in tree.items()}
    write_tensors(
        folder / CHECKPOINT, KIND, tensors, {"round": number, "spent": [ledger.state() for ledger in ledgers]}
    )


def _resumed(federation: Federation, folder: Path) -> list[dict[str, Any]]:
    """Put the federation where the checkpoint is, and return the rows up to there; rows after it are run again."""
    if not (folder / RESULT).exists() and not (folder / CHECKPOINT).exists():
        return []
    saved, case = read_training(folder), federation.case.as_json()
    for name, value in case.items():
        if name not in _MAY_CHANGE and saved["case"].get(name) != value:
            then = saved["case"].get(name)
            raise GradveilError(f"{folder} was trained with {name}={then}, not {value}: resume it with that")
    if not (folder / CHECKPOINT).exists():
        return []
    for place, row in enumerate(saved["rows"], start=1):
        if not _is_row(row, place):
            raise BadFileError(f"{folder / RESULT}: its row {place} is damaged: train anew into another --out")
    tensors, meta = read_tensors(folder / CHECKPOINT, KIND)
    number, rows = meta.get("round"), saved["rows"]
    tensors, started = moved(tensors, federation.case.device), federation.state
    params, buffers = (_part(tensors, f"{part}/", getattr(started, part)) for part in ("params", "buffers"))
    state = State(params, buffers, _part(tensors, "velocity/", started.params))
    fits = _shapes(state.params) == _shapes(federation.state.params)
    if not fits or type(number) is not int or not 0 < number <= min(len(rows), federation.case.rounds):
        raise BadFileError(f"{folder / CHECKPOINT} does not fit {RESULT} beside it: train anew into another --out")
    federation.state = state
    if federation.defense.delta is not None:
        federation.ledgers = _ledgers(meta.get("spent"), federation.case.clients, folder / CHECKPOINT)
    return list(rows[:number])


def _ledgers(saved: object, clients: int, path: Path) -> list[Ledger]:
    """What was spent on the examples of each client before the checkpoint: without it epsilon would be too small."""
    if not isinstance(saved, list) or len(saved) != clients:
        raise BadFileError(f"{path} does not say what each client has spent: train anew into another --out")
    try:
        return [Ledger.restored(state) for state in saved]
    except GradveilError as error:
        raise BadFileError(f"{path} does not say what each client has spent: {error}") from None


def _is_row(row: object, place: int) -> bool:
    """Whether it can be what :meth:`Round.as_json` made of the round of this number."""
    if not isinstance(row, dict) or row.get("round") != place:
        return False
    amounts, log = [row.get(name) for name in ("seconds", "bytes_down", "bytes_up")], row.get("log")
    shares = [row[name] for name in ("accuracy", "loss") if row.get(name) is not None]
    lists = isinstance(row.get("dropped"), list) and isinstance(log, dict)
    return lists and "loss" in row and all(map(_is_number, (*amounts, *shares, *log.values())))  # type: ignore[union-attr]


def _is_number(value: object) -> bool:
    """JSON has whole numbers of any length, infinities and NaN; ``true`` is one too, for Python."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _part(tensors: Params, prefix: str, like: Params) -> Params:
    """The tensors of one part in the order of the model: noise is drawn in that order, and a file has another."""
    return {name: tensors[f"{prefix}{name}"] for name in like if f"{prefix}{name}" in tensors}


def _shapes(tree: Params) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tree.items()}
