"""What a run is to its server: a training, and what only a network needs, from the flat keys of a run config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flwr.serverapp import strategy as flower

from gradveil.core.errors import GradveilError
from gradveil.core.registry import split_spec
from gradveil.federated.case import Training, make_training
from gradveil.federated.flower.node import read_run

STRATEGIES = ("FedAvg", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedMedian", "FedTrimmedAvg")
"""Strategies of Flower that need nothing of a client but its parameters and how many examples are behind them."""

_MAY_BE_NONE = {"test", "per_round", "batch_size", "min_nodes", "out"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A training on a network."""

    training: Training
    strategy: str = "FedAvg"
    """A strategy of Flower and its own options, such as FedTrimmedAvg:beta=0.1."""
    min_nodes: int | None = None
    """The fewest nodes that a round after the first starts with, and usable replies that it ends with; None: all."""
    node_timeout: float = 60.0
    """Seconds to wait while fewer nodes than that are connected."""
    round_timeout: float = 3600.0
    """Seconds to wait for the replies of a round."""
    out: Path | None = None
    """Where the server writes train.json and the checkpoint."""

    def __post_init__(self) -> None:
        if self.min_nodes is not None and not (
            type(self.min_nodes) is int and 1 <= self.min_nodes <= self.training.clients
        ):
            raise GradveilError(f"min-nodes is from 1 to the {self.training.clients} clients, not {self.min_nodes!r}")
        for name in ("node_timeout", "round_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise GradveilError(f"{name.replace('_', '-')} is a number of seconds, not {value!r}")

    @property
    def fewest(self) -> int:
        """How many nodes must be there for a round."""
        return self.min_nodes or self.training.clients

    def made_strategy(self) -> flower.FedAvg:
        """Flower's strategy as it is."""
        case, (name, options) = self.training, split_spec(self.strategy)
        if name not in STRATEGIES:
            raise GradveilError(f"no strategy here is called {name!r}; there are: {', '.join(STRATEGIES)}")
        stepping = {"server_learning_rate": case.server_lr, "server_momentum": case.server_momentum}
        if name != "FedAvgM" and (case.server_lr != 1 or case.server_momentum):
            raise GradveilError(f"{name} takes neither server-lr nor server-momentum: use strategy FedAvgM")
        each_round = case.per_round or case.clients
        try:
            made: flower.FedAvg = getattr(flower, name)(
                fraction_train=each_round / case.clients,
                fraction_evaluate=0.0,
                min_train_nodes=min(each_round, self.fewest),
                min_available_nodes=self.fewest,
                **(stepping if name == "FedAvgM" else {}),
                **{key: float(value) for key, value in options.items()},
            )
        except (TypeError, ValueError) as error:
            raise GradveilError(f"strategy {self.strategy!r}: {error}") from None
        return made


def read_settings(run_config: Mapping[str, Any]) -> Settings:
    """The settings that a run config spells, as ``batch-size = 8``; what nodes would refuse is refused here too."""
    read_run(run_config)
    given = {key.replace("-", "_"): value for key, value in run_config.items()}
    for key in _MAY_BE_NONE & given.keys():
        given[key] = None if given[key] == "none" else given[key]  # TOML has no null
    own = {field.name for field in fields(Settings)} - {"training"}
    network = {key: given.pop(key) for key in own & given.keys()}
    if network.get("out") is not None:
        network["out"] = Path(str(network["out"]))
    return Settings(training=make_training(given), **network)
