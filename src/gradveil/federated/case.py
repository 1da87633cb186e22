"""What is trained: a federated training as a person writes it."""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from gradveil import models
from gradveil.core.errors import GradveilError
from gradveil.core.types import Recipe
from gradveil.data import DATASETS
from gradveil.defenses import DEFENSES
from gradveil.federated.partition import PARTITIONS
from gradveil.threat import threat_model

Algorithm = Literal["fedavg", "fedsgd"]
SideBySide = Literal["auto", "true", "false"]
Device = Literal["cpu", "cuda"]

_WHOLE = {"clients": 1, "rounds": 1, "epochs": 1, "evaluate_every": 1, "checkpoint_every": 1, "seed": 0}
_WHOLE_OR_NONE = {"per_round": 1, "batch_size": 1, "examples": 1}


@dataclass(frozen=True, kw_only=True)
class Training:
    """One federated training: who holds what, how a client trains, how the server steps, and what is taken down."""

    data: str = "mnist"
    test: str | None = None
    """What is evaluated on; None: the test split of the data or, where it has none, a fifth held out."""
    examples: int | None = None
    """How many examples, drawn at random, are dealt out to the clients; None: all."""
    model: str = "mlp:normalize=true"
    partition: str = "iid"
    clients: int = 10
    per_round: int | None = None
    """How many take part in a round, drawn anew each time; None: all."""
    rounds: int = 10
    algorithm: Algorithm = "fedavg"
    lr: float = 0.1
    epochs: int = 1
    batch_size: int | None = 64
    """FedAvg: local mini-batch. FedSGD: examples drawn for the one gradient. None: all that the client has."""
    momentum: float = 0.0
    weight_decay: float = 0.0
    train_mode: bool = True
    server_lr: float = 1.0
    server_momentum: float = 0.0
    defense: str = "none"
    tap: tuple[str, ...] = ()
    """Whose exchanges are saved, as CLIENT@ROUND; ``*`` stands for every one."""
    threat: str = "C"
    """Who sees the exchanges that are saved."""
    evaluate_every: int = 1
    checkpoint_every: int = 1
    side_by_side: SideBySide = "auto"
    seed: int = 0
    device: Device = "cpu"

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choices()
        spelled = {
            "data": DATASETS.canonical(self.data),
            "test": None if self.test is None else DATASETS.canonical(self.test),
            "model": models.canonical(self.model),
            "partition": PARTITIONS.canonical(self.partition),
            "defense": DEFENSES.canonical(self.defense),
            "threat": threat_model(self.threat).name,
            "tap": tuple(self.tap),
        }
        for name, value in spelled.items():
            object.__setattr__(self, name, value)
        if self.per_round is not None and self.per_round > self.clients:
            raise GradveilError(f"{self.per_round} clients per round are more than the {self.clients} there are")
        if self.algorithm == "fedsgd" and (self.epochs > 1 or self.momentum or self.weight_decay):
            raise GradveilError("fedsgd has no local steps for epochs, momentum or weight_decay: see server_momentum")
        _ = self.recipe  # checks the learning rate and its like

    def _check_numbers(self) -> None:
        for name, low in (_WHOLE | _WHOLE_OR_NONE).items():
            value = getattr(self, name)
            if not (value is None and name in _WHOLE_OR_NONE) and (type(value) is not int or value < low):
                raise GradveilError(f"{name} is a whole number of at least {low}, not {value!r}")
        for name in ("server_lr", "server_momentum"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise GradveilError(f"{name} is a number, not {value!r}")
        if not (self.server_lr > 0 and 0 <= self.server_momentum < 1):
            raise GradveilError("server_lr is above 0, and server_momentum is at least 0 and below 1")

    def _check_choices(self) -> None:
        known = {"algorithm": get_args(Algorithm), "side_by_side": get_args(SideBySide), "device": get_args(Device)}
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                raise GradveilError(f"{name} is one of {', '.join(choices)}, not {getattr(self, name)!r}")
        for name in ("data", "test", "model", "partition", "defense", "threat"):
            if not isinstance(getattr(self, name), str) and not (name == "test" and self.test is None):
                raise GradveilError(f"{name} is a text, not {getattr(self, name)!r}")
        if not isinstance(self.tap, list | tuple) or not all(isinstance(spec, str) for spec in self.tap):
            raise GradveilError(f"tap is a list such as ['0@1'], not {self.tap!r}")

    @property
    def recipe(self) -> Recipe:
        """How a client turns the broadcast into what it sends."""
        if self.algorithm == "fedsgd":
            return Recipe(lr=self.lr, train_mode=self.train_mode)
        return Recipe(
            sends="delta",
            lr=self.lr,
            epochs=self.epochs,
            batch_size=self.batch_size,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            train_mode=self.train_mode,
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"tap": list(self.tap)}


def make_training(given: dict[str, Any]) -> Training:
    """A training from fields as the command line or a file gives them; what is wrong is said in one line."""
    known = [field.name for field in fields(Training)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise GradveilError(f"a training has no field {name!r}; {hint}")
    if isinstance(given.get("side_by_side"), bool):  # as YAML reads true and false
        given = given | {"side_by_side": str(given["side_by_side"]).lower()}
    return Training(**given)
