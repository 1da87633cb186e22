"""The ready ServerApp: one of Flower's own strategies, a grid that checks replies, and the folder of a training."""

from __future__ import annotations

from collections.abc import Mapping
from logging import ERROR, INFO, WARNING
from typing import Annotated, Any

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as flower
from flwr.supercore import log
from pydantic import Field, model_validator

from gradveil.core.errors import GradveilError
from gradveil.core.fields import Fields, none_from_text, shown
from gradveil.core.registry import split_spec
from gradveil.federated.case import Number, Training
from gradveil.federated.flower.grid import CheckedGrid
from gradveil.federated.flower.node import Folder, read_run
from gradveil.federated.flower.records import packed, state_of, unpacked
from gradveil.federated.rounds import Federation
from gradveil.federated.run import RESULT, Recorder, data_of

STRATEGIES = ("FedAvg", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedMedian", "FedTrimmedAvg")
"""Strategies of Flower that need nothing of a client but its parameters and how many examples are behind them."""

Seconds = Annotated[Number, Field(gt=0, description="a number of seconds")]


class Settings(Fields):
    """What a run is to its server: a training, and what only a network needs."""

    dashed = True

    training: Training
    strategy: str = "FedAvg"
    """A strategy of Flower and its own options, such as FedTrimmedAvg:beta=0.1."""
    min_nodes: int | None = None
    """The fewest nodes that a round after the first starts with, and usable replies that it ends with; None: all."""
    node_timeout: Seconds = 60.0
    """Seconds to wait while fewer nodes than that are connected."""
    round_timeout: Seconds = 3600.0
    """Seconds to wait for the replies of a round."""
    out: Folder = None
    """Where the server writes train.json and the checkpoint."""

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        clients = self.training.clients
        if self.min_nodes is not None and not 1 <= self.min_nodes <= clients:
            raise GradveilError(f"min-nodes is from 1 to the {clients} clients, not {shown(self.min_nodes)}")
        return self

    @property
    def nodes_needed(self) -> int:
        """How many nodes must be there for a round."""
        return self.min_nodes or self.training.clients

    def build_strategy(self) -> flower.FedAvg:
        """Flower's strategy as it is."""
        case, (name, options) = self.training, split_spec(self.strategy)
        if name not in STRATEGIES:
            raise GradveilError(f"no strategy here is called {name!r}; there are: {', '.join(STRATEGIES)}")
        stepping = {"server_learning_rate": case.server_lr, "server_momentum": case.server_momentum}
        if name != "FedAvgM" and (case.server_lr != 1 or case.server_momentum):
            raise GradveilError(f"{name} takes neither server-lr nor server-momentum: use strategy FedAvgM")
        each_round = case.per_round or case.clients
        try:
            strategy: flower.FedAvg = getattr(flower, name)(
                fraction_train=each_round / case.clients,
                fraction_evaluate=0.0,
                min_train_nodes=min(each_round, self.nodes_needed),
                min_available_nodes=self.nodes_needed,
                **(stepping if name == "FedAvgM" else {}),
                **{key: float(value) for key, value in options.items()},
            )
        except (TypeError, ValueError) as error:
            raise GradveilError(f"strategy {self.strategy!r}: {error}") from None
        return strategy


def read_settings(run_config: Mapping[str, Any]) -> Settings:
    """The settings that a run config spells, as ``batch-size = 8``; what nodes would refuse is refused here too."""
    read_run(run_config)
    given = {key.replace("-", "_"): value for key, value in run_config.items()}
    network = {key: given.pop(key) for key in Settings.model_fields if key in given}
    return Settings(training=Training(**none_from_text(Training, given)), **none_from_text(Settings, network))


def server_app() -> ServerApp:
    """A ServerApp that does what its run config says."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            _serve(grid, read_settings(context.run_config))
        except GradveilError as error:
            log(ERROR, "%s", error)
            raise

    return app


def _serve(grid: Grid, settings: Settings) -> None:
    case = settings.training
    if settings.out is not None and (settings.out / RESULT).exists():
        raise GradveilError(f"{settings.out} holds a training already: set out to another folder")
    train, test = data_of(case)
    federation = Federation(case, train)
    network = CheckedGrid(grid, patience=settings.node_timeout)
    record = Recorder(federation, test, settings.out)

    def evaluated(_number: int, arrays: ArrayRecord) -> MetricRecord | None:
        if network.last is None:  # before the first round
            return None
        federation.state = state_of(unpacked(arrays), federation.state)
        quality = record(network.last)
        return None if quality is None else MetricRecord({"accuracy": quality.accuracy, "loss": quality.loss})

    network.wait_for(case.clients)
    network.min_nodes = settings.nodes_needed
    settings.build_strategy().start(
        grid=network,
        initial_arrays=packed(federation.state.params | federation.state.buffers),
        num_rounds=case.rounds,
        timeout=settings.round_timeout,
        evaluate_fn=evaluated,
    )
    dropped = [(row["round"], one["client"], one["reason"]) for row in record.rows for one in row["dropped"]]
    log(
        WARNING if dropped else INFO,
        "gradveil: %.1f%% accuracy after %d rounds of %s on %s, %d replies dropped",
        100 * (record.rows[-1]["accuracy"] or 0.0), len(record.rows), settings.strategy, case.data, len(dropped),
    )  # fmt: skip
    for number, node, reason in dropped:
        log(WARNING, "the model is without the reply of node %d in round %d: %s", node, number, reason)
