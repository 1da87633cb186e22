"""What is asked: data, a model, two wishes, and the federation that the answer is for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

from gradveil import models
from gradveil.core.fields import Fields
from gradveil.core.types import Json
from gradveil.data import DATASETS
from gradveil.defenses import DEFENSES
from gradveil.federated import Training
from gradveil.federated.case import Count, CountOrNone, Device, Number
from gradveil.federated.partition import PARTITIONS

LINE_UP = 100
"""Pictures in the line-up that ``max_recognised`` is a share of."""
ELSEWHERE = "features"
"""The model that is tried beside the one that is asked about: few numbers leave its clients."""
WISHES = ("max_recognised", "max_loss", "defenses", "trials")
"""Fields that may change when an advice is gone on with: no measurement depends on them."""


def _known_defenses(specs: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(DEFENSES.canonical(spec) for spec in specs))


class Question(Fields):
    """Data, model, wishes, and how clients train. What stands below a field is the help of its option."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    data: Annotated[str, AfterValidator(DATASETS.canonical)] = "cifar10"
    """What the clients share, such as cifar10, or folder:path=DIR,size=64."""
    model: Annotated[str, AfterValidator(models.canonical)] = "features"
    """Model, such as lenet or features, or pkg.module:factory."""
    max_recognised: Annotated[Number, Field(gt=1 / LINE_UP, lt=1, title=f"above {1 / LINE_UP:g} and below 1")] = 0.1
    """The largest share of examples that may be recognised in a line-up of 100."""
    max_loss: Annotated[Number, Field(ge=0, le=100, title="a number of points from 0 to 100")] = 3.0
    """The most points of accuracy that a defense may cost."""
    defenses: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_known_defenses)] = ()
    """Try this defense too, such as noise:sigma=0.1, or pkg.module:Class. Repeatable."""
    clients: Count = 10
    """How many clients there are."""
    examples: CountOrNone = None
    """Examples that are dealt out to the clients; default: all."""
    partition: Annotated[str, AfterValidator(PARTITIONS.canonical)] = "iid"
    """iid, dirichlet:alpha=0.5 or shards:each=2."""
    rounds: Count = 20
    """How many rounds; on public features 10 to 80 are tried instead."""
    epochs: Count = 1
    """Local epochs of a round; on public features clients send one gradient instead."""
    batch_size: Count = 32
    """Local mini-batch."""
    lr: Annotated[Number, Field(gt=0, title="a number above 0")] = 0.1
    """Local learning rate, around which others are tried."""
    short: Annotated[int, Field(ge=20, title="a whole number of at least 20")] = 2000
    """Examples of a short training and of its evaluation, together at most."""
    images: Annotated[int, Field(ge=8, le=60, title="a whole number from 8 to 60")] = 36
    """Private images of a short audit."""
    trials: Count = 32
    """How many settings are tried."""
    seed: Annotated[int, Field(ge=0, title="a whole number of at least 0")] = 0
    """All random draws derive from it."""
    device: Device = "cpu"
    """cpu or cuda; default: cuda if available."""

    def as_json(self) -> Json:
        return self.model_dump(mode="json")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A defense on a model, and how its clients train."""

    model: str
    defense: str
    lr: float
    rounds: int

    @property
    def on_features(self) -> bool:
        return is_features(self.model)

    def training(self, asked: Question, *, clients: int, examples: int, seed: int | None = None) -> Training:
        """As ``gradveil train`` runs it; on public features each client sends one gradient of all its examples."""
        how = (
            {"algorithm": "fedsgd", "batch_size": examples}
            if self.on_features
            else {"epochs": asked.epochs, "batch_size": asked.batch_size}
        )
        return Training(
            data=asked.data, examples=asked.examples, model=self.model, partition=asked.partition, clients=clients,
            rounds=self.rounds, lr=self.lr, defense=self.defense, average_from=self.rounds // 2 + 1,
            seed=asked.seed if seed is None else seed, device=asked.device, **how,
        )  # fmt: skip


def is_features(model: str) -> bool:
    return model.partition(":")[0] == "features"


def clearness(training: Training, examples: int) -> float:
    """How much of a round's mean is left beside noise that is divided by a mini-batch, up to a factor.

    Each of K clients takes s steps of B examples with noise of sigma / B. The sum of what they say grows with s K, that
    of their noise with sqrt(s K) / B, so that their ratio is sqrt(s K) B / sigma. A short training, whose examples are
    fewer, needs less noise for the same ratio.
    """
    each = max(1, examples // training.clients)
    size = min(training.batch_size or each, each)
    return math.sqrt(max(1, each // size) * training.epochs * training.clients) * size
