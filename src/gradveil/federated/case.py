"""What is trained: a federated training as a person writes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gradveil import models
from gradveil.core.errors import GradveilError
from gradveil.core.fields import Fields
from gradveil.core.types import Json, Recipe
from gradveil.data import DATASETS
from gradveil.defenses import DEFENSES
from gradveil.engine import SideBySide
from gradveil.federated.partition import PARTITIONS
from gradveil.threat import threat_model

Algorithm = Literal["fedavg", "fedsgd"]
Device = Literal["cpu", "cuda"]
Number = int | float
"""As it was written: a case is compared, and its digest taken, by its JSON."""

_count = Field(ge=1, description="a whole number of at least 1")
Count = Annotated[int, _count]
CountOrNone = Annotated[int | None, _count]


class Training(Fields):
    """One federated training: who holds what, how a client trains, how the server steps, and what is taken down."""

    data: Annotated[str, AfterValidator(DATASETS.canonical)] = "mnist"
    test: Annotated[str | None, AfterValidator(lambda spec: spec and DATASETS.canonical(spec))] = None
    """What is evaluated on; None: the test split of the data or, where it has none, a fifth held out."""
    examples: CountOrNone = None
    """How many examples, drawn at random, are dealt out to the clients; None: all."""
    model: Annotated[str, AfterValidator(models.canonical)] = "mlp:normalize=true"
    partition: Annotated[str, AfterValidator(PARTITIONS.canonical)] = "iid"
    clients: Count = 10
    per_round: CountOrNone = None
    """How many take part in a round, drawn anew each time; None: all."""
    rounds: Count = 10
    algorithm: Algorithm = "fedavg"
    lr: Number = 0.1
    epochs: Count = 1
    batch_size: CountOrNone = 64
    """FedAvg: local mini-batch. FedSGD: examples drawn for the one gradient. None: all that the client has."""
    momentum: Number = 0.0
    weight_decay: Number = 0.0
    train_mode: bool = True
    server_lr: Annotated[Number, Field(gt=0, description="a number above 0")] = 1.0
    server_momentum: Annotated[Number, Field(ge=0, lt=1, description="a number of at least 0 and below 1")] = 0.0
    defense: Annotated[str, AfterValidator(DEFENSES.canonical)] = "none"
    tap: Annotated[tuple[str, ...], Field(strict=False, description="a list such as ['0@1']")] = ()
    """Whose exchanges are saved, as CLIENT@ROUND; ``*`` stands for every one."""
    threat: Annotated[str, AfterValidator(lambda name: threat_model(name).name)] = "C"
    """Who sees the exchanges that are saved."""
    evaluate_every: Count = 1
    checkpoint_every: Count = 1
    side_by_side: Annotated[
        SideBySide, BeforeValidator(lambda way: str(way).lower() if isinstance(way, bool) else way)
    ] = "auto"
    """YAML reads true and false as such."""
    seed: Annotated[int, Field(ge=0, description="a whole number of at least 0")] = 0
    device: Device = "cpu"

    @model_validator(mode="after")
    def _fits_together(self) -> Training:
        if self.per_round is not None and self.per_round > self.clients:
            raise GradveilError(f"{self.per_round} clients per round are more than the {self.clients} there are")
        if self.algorithm == "fedsgd" and (self.epochs > 1 or self.momentum or self.weight_decay):
            raise GradveilError("fedsgd has no local steps for epochs, momentum or weight_decay: see server_momentum")
        _ = self.recipe  # checks the learning rate and its like
        return self

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

    def as_json(self) -> Json:
        return self.model_dump(mode="json")


def make_training(given: Json) -> Training:
    """A training from fields as the command line or a file gives them; what is wrong is said in one line."""
    return Training(**given)
