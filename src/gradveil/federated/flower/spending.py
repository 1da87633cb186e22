"""What a node has spent of its privacy, over rounds and over runs.

Flower keeps a node's state for one run. A file in the node's folder keeps the ledger for all of them, because whoever
submits runs could otherwise start the count anew.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context
from flwr.supercore import log

from gradveil.core.atomic import open_file, write_json
from gradveil.core.errors import GradveilError, NotAvailableError
from gradveil.core.reading import read_json
from gradveil.defenses import DEFENSES
from gradveil.defenses.accounting import Ledger
from gradveil.federated.flower.node import NodeSettings
from gradveil.federated.flower.records import writing

SPENT = "gradveil.spent"
"""Where the state of a node keeps its ledger."""
_COLUMNS = ("sigma", "rate", "steps")


def spend(settings: NodeSettings, client: int, context: Context, steps: Ledger) -> None:
    """Enter the steps of one reply into the ledger of the node, before the reply leaves, and log what is spent by then.

    Raises:
        GradveilError: that is more than the node allows, or than its defense plans, or it cannot be kept.
    """
    defense = DEFENSES.build(settings.training.defense)
    if defense.delta is None:
        return
    with _kept(settings.out, client, context) as ledger:
        ledger.merge(steps)
        defense.check_steps(ledger.steps)
        try:
            epsilon = ledger.spent(defense.delta)
        except NotAvailableError as error:
            if settings.max_epsilon is not None:
                raise
            log(WARNING, "%s", error)
            return
        if settings.max_epsilon is not None and epsilon > settings.max_epsilon:
            raise GradveilError(
                f"this reply does not leave: with it the node would have spent epsilon {epsilon:.4g} at delta "
                f"{defense.delta:g}, and its max-epsilon is {settings.max_epsilon:g}"
            )
        log(INFO, "with this reply the node has spent epsilon %.4g at delta %g", epsilon, defense.delta)


@contextlib.contextmanager
def _kept(folder: Path | None, client: int, context: Context) -> Iterator[Ledger]:
    """The ledger of the node, kept afterwards unless there was an error; locked, for two runs may be under way."""
    record = context.state.config_records.get(SPENT, ConfigRecord({name: [] for name in _COLUMNS}))
    columns: Any = [record[name] for name in _COLUMNS]
    entries: object = list(zip(*columns, strict=True))
    with contextlib.ExitStack() as stack:
        path = None if folder is None else folder / f"privacy-client-{client:04d}.json"
        if path is not None:
            import fcntl

            stack.enter_context(writing("its privacy ledger"))
            lock = open_file(path.with_suffix(".lock"), os.O_RDWR)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                try:
                    entries = read_json(path)
                except ValueError as error:
                    log(ERROR, "%s cannot be read: %s", path, error)
                    raise GradveilError("this node cannot read its privacy ledger: its log says which file") from None
        ledger = Ledger.restored(entries)
        yield ledger
        columns = zip(*ledger.state(), strict=True)
        context.state[SPENT] = ConfigRecord({name: list(c) for name, c in zip(_COLUMNS, columns, strict=True)})
        if path is not None:
            write_json(path, ledger.state())
