"""The ready ServerApp: one of Flower's own strategies, a grid that checks replies, and the folder of a training."""

from __future__ import annotations

from logging import ERROR, INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from gradveil.core.errors import GradveilError
from gradveil.federated.flower.grid import CheckedGrid
from gradveil.federated.flower.records import packed, state_of, unpacked
from gradveil.federated.flower.settings import Settings, read_settings
from gradveil.federated.rounds import Federation
from gradveil.federated.run import RESULT, data_of, save_rows, save_state


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
    rows: list[dict[str, Any]] = []

    def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        if network.last is None:  # before the first round
            return None
        federation.state = state_of(unpacked(arrays), federation.state)
        looks = number % case.evaluate_every == 0 or number == case.rounds
        quality = federation.quality(test) if looks else None
        rows.append(network.last.as_json(quality))
        if settings.out is not None:
            save_rows(case, rows, settings.out, len(train), len(test))
            if number % case.checkpoint_every == 0 or number == case.rounds:
                save_state(federation.state, number, settings.out)
        return None if quality is None else MetricRecord({"accuracy": quality.accuracy, "loss": quality.loss})

    network.wait_for(case.clients)
    network.fewest = settings.fewest
    settings.made_strategy().start(
        grid=network,
        initial_arrays=packed(federation.state.params | federation.state.buffers),
        num_rounds=case.rounds,
        timeout=settings.round_timeout,
        evaluate_fn=evaluated,
    )
    dropped = [(row["round"], one["client"], one["reason"]) for row in rows for one in row["dropped"]]
    log(
        WARNING if dropped else INFO,
        "gradveil: %.1f%% accuracy after %d rounds of %s on %s, %d replies dropped",
        100 * rows[-1]["accuracy"], len(rows), settings.strategy, case.data, len(dropped),
    )  # fmt: skip
    for number, node, reason in dropped:
        log(WARNING, "the model is without the reply of node %d in round %d: %s", node, number, reason)
