"""What is trained: a federated training as a person writes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

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

_count = Field(ge=1, title="a whole number of at least 1")
Count = Annotated[int, _count]
CountOrNone = Annotated[int | None, _count]


class Training(Fields):
    """One federated training: who holds what, how a client trains, how the server steps, and what is taken down.

    What stands below a field is the help of its option.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    data: Annotated[str, AfterValidator(DATASETS.canonical)] = "mnist"
    """What the clients share, such as mnist or cifar10."""
    test: Annotated[str | None, AfterValidator(lambda spec: spec and DATASETS.canonical(spec))] = None
    """Data to evaluate on; default: the test split of the data or, where it has none, a fifth held out."""
    examples: CountOrNone = None
    """Examples, drawn at random, that are dealt out to the clients; default: all."""
    model: Annotated[str, AfterValidator(models.canonical)] = "mlp:normalize=true"
    """Model, such as resnet18, or pkg.module:factory."""
    partition: Annotated[str, AfterValidator(PARTITIONS.canonical)] = "iid"
    """iid, dirichlet:alpha=0.5 or shards:each=2."""
    clients: Count = 10
    """How many clients there are."""
    per_round: CountOrNone = None
    """How many take part in a round, drawn anew each time; default: all."""
    rounds: Count = 10
    """How many rounds."""
    algorithm: Algorithm = "fedavg"
    """fedavg, or fedsgd: one gradient per client and round."""
    lr: Number = 0.1
    """Local learning rate."""
    epochs: Count = 1
    """Local epochs (FedAvg)."""
    batch_size: CountOrNone = 64
    """FedAvg: local mini-batch. FedSGD: examples per gradient. A file can say null: all that the client has."""
    momentum: Number = 0.0
    """Momentum of the local steps."""
    weight_decay: Number = 0.0
    """Weight decay of the local steps."""
    train_mode: bool = True
    """Batch norm in train or eval mode on the client; default: train."""
    server_lr: Annotated[Number, Field(gt=0, title="a number above 0")] = 1.0
    """Step of the server along the clients' mean."""
    server_momentum: Annotated[Number, Field(ge=0, lt=1, title="a number of at least 0 and below 1")] = 0.0
    """Momentum of the server's step."""
    average_from: CountOrNone = None
    """Evaluate the mean of the models from this round on; default: the last model."""
    defense: Annotated[str, AfterValidator(DEFENSES.canonical)] = "none"
    """Defense of every client, such as censor:trials=20, or pkg.module:Class."""
    tap: Annotated[tuple[str, ...], Field(strict=False, title="a list such as ['0@1']")] = ()
    """Save this exchange, as 0@1 or, of every client, *@1. Repeatable."""
    threat: Annotated[str, AfterValidator(lambda name: threat_model(name).name)] = "C"
    """Who sees the exchanges that are saved, A to H."""
    evaluate_every: Count = 1
    """Evaluate every k-th round, and the last."""
    checkpoint_every: Count = 1
    """Save the model every k-th round."""
    side_by_side: Annotated[
        SideBySide, BeforeValidator(lambda way: str(way).lower() if isinstance(way, bool) else way)  # YAML reads both
    ] = "auto"
    """Clients batched together: auto, true or false."""
    seed: Annotated[int, Field(ge=0, title="a whole number of at least 0")] = 0
    """All random draws derive from it."""
    device: Device = "cpu"
    """cpu or cuda; default: cuda if available."""

    @model_validator(mode="after")
    def _fits_together(self) -> Training:
        if self.per_round is not None and self.per_round > self.clients:
            raise GradveilError(f"{self.per_round} clients per round are more than the {self.clients} there are")
        if self.algorithm == "fedsgd" and (self.epochs > 1 or self.momentum or self.weight_decay):
            raise GradveilError("fedsgd has no local steps for epochs, momentum or weight_decay: see server_momentum")
        if self.average_from is not None and self.average_from > self.rounds:
            raise GradveilError(f"average_from={self.average_from} is after the last of {self.rounds} rounds")
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
