"""Who decides on a node: the node. What a run config may ask of it stands here, and nowhere else.

A run config comes from whoever submits the run. A node reads it as it reads a broadcast: as the words of a stranger.
It takes from it the facts of training that both sides must share, each within limits, and refuses to train if there is
anything else in it. Its defense, its data, its files, its seed and its device it takes from its own side alone:
the node config, then the environment variable ``GRADVEIL_NODE_CONFIG``, then the arguments of ``client_app``. The code
stands last of these, because on Flower the app comes with the run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Annotated, Any, Literal

import click
from flwr.common.config import parse_config_args
from flwr.supercore import log
from pydantic import AfterValidator, AllowInfNan, BeforeValidator, Field, model_validator

from gradveil import models
from gradveil.client import OnSuspicion
from gradveil.core.errors import GradveilError
from gradveil.core.fields import Fields, none_from_text, shown
from gradveil.core.registry import split_spec
from gradveil.core.types import Json
from gradveil.defenses import DEFENSES
from gradveil.federated.case import Number, Training
from gradveil.federated.tap import taps
from gradveil.models import split_front

VARIABLE = "GRADVEIL_NODE_CONFIG"
"""What a node config says, for nodes that have none of their own: those of a simulation."""

Folder = Annotated[Path | None, BeforeValidator(lambda path: None if path is None else Path(str(path)))]


def _within(low: float, high: float) -> Any:
    return Field(ge=low, le=high, description=f"a number from {low:,} to {high:,}")


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError
    return text


def _up_to(length: int) -> Any:
    return Field(max_length=length, description=f"a text of up to {length} printable characters")


Printable = Annotated[str, AfterValidator(_printable)]


class RunConfig(Fields):
    """What a node takes from a run config, if it does not say it itself; docs/flower.md says why for each.

    Only what is given counts: the defaults are never read.
    """

    dashed = True

    model: Annotated[Printable, _up_to(200)] = ""
    algorithm: Annotated[Printable, _up_to(20)] = ""
    lr: Annotated[Number, _within(1e-9, 10.0)] = 0
    epochs: Annotated[int, _within(1, 100)] = 0
    batch_size: Annotated[int | None, _within(8, 65_536)] = None
    momentum: Annotated[Number, _within(0.0, 0.999)] = 0
    weight_decay: Annotated[Number, _within(0.0, 1.0)] = 0
    train_mode: bool = False
    clients: Annotated[int, _within(1, 1_000_000)] = 0
    defense: Annotated[Printable, _up_to(200)] = ""


RUN_MAY_SET = {name.replace("_", "-"): field.description for name, field in RunConfig.model_fields.items()}

OF_THE_SERVER = frozenset({
    "data", "test", "seed", "rounds", "per-round", "strategy", "server-lr", "server-momentum", "evaluate-every",
    "checkpoint-every", "min-nodes", "node-timeout", "round-timeout", "out",
})  # fmt: skip
"""Keys of a run config that the server alone reads; a node does not look at their values."""

LARGEST_OPTION = 4096
"""The largest number among the options of a model that a run config names."""

_OF_A_NODE = frozenset({"data", "test", "examples", "partition", "seed", "tap", "threat", "device", "defense"})
_PLACE = frozenset({"partition-id", "num-partitions"})


class NodeSettings(Fields):
    """What one node does in a run."""

    dashed = True

    training: Training
    on_suspicion: OnSuspicion = "warn"
    statistics: Literal["withhold", "send"] = "withhold"
    """Whether the running statistics of norm layers, which no defense hides, leave the node."""
    evaluate: bool = False
    """Whether the node tells the server how good a model is on its own examples."""
    max_epsilon: Annotated[Annotated[float, AllowInfNan()] | None, Field(gt=0, description="a number above 0")] = None
    """Under dp: a reply that would bring what the node has spent above this does not leave."""
    min_batch: Annotated[int, Field(ge=1, description="a number of examples from 1")] = 2
    """The fewest examples of one local step: the node leaves a smaller last batch out."""
    repeatable: bool = False
    """Whether orders and the draws of defenses follow from the node's seed: for simulations."""
    out: Folder = None
    """Where the node writes its taps and its privacy ledger."""

    @model_validator(mode="after")
    def _fits_together(self) -> NodeSettings:
        defense = self.training.defense
        if self.max_epsilon is not None and DEFENSES.build(defense).delta is None:
            raise GradveilError(f"max-epsilon needs a defense with an epsilon: {defense} has none, dp has")
        if self.max_epsilon is not None and self.out is None:
            raise GradveilError("max-epsilon needs a folder that keeps the count from run to run: set out on the node")
        for spec in self.training.tap:
            taps(spec, 0, 1)  # one that cannot be read is an error now, not after training
        if self.training.tap and self.out is None:
            raise GradveilError("a tap needs a folder: set out on the node's side, to an absolute path")
        return self


_OWN = [name for name in NodeSettings.model_fields if name != "training"]
NODE_KEYS = _OF_A_NODE | (RUN_MAY_SET.keys() - {"clients"}) | {name.replace("_", "-") for name in _OWN}
"""What a node may say about itself. What a run may set too, the node's word decides."""


def read_run(run_config: Mapping[str, Any]) -> Json:
    """What a run config asks of a node, by the names of fields.

    Raises:
        GradveilError: it holds a key or a value that no run config may have.
    """
    for key in run_config:
        if key in RUN_MAY_SET or key in OF_THE_SERVER:
            continue
        if key in NODE_KEYS:
            raise GradveilError(
                f"the run config sets {key!r}, which only a node decides: say it in the node config or, for a "
                f"simulation, in {VARIABLE}"
            )
        raise GradveilError(f"the run config holds the unknown key {shown(key)}: docs/flower.md lists what it may set")
    asked = {key.replace("-", "_"): run_config[key] for key in RUN_MAY_SET if key in run_config}
    try:
        checked = RunConfig(**none_from_text(RunConfig, asked))
    except GradveilError as error:
        raise GradveilError(f"the run config's {error}: a node that wants another says so itself") from None
    return checked.model_dump(exclude_unset=True)


def read_node(
    run_config: Mapping[str, Any], node_config: Mapping[str, Any], code: Mapping[str, Any] | None = None
) -> NodeSettings:
    """What a node does: what it says itself and, where it says nothing, what the run may set.

    Raises:
        GradveilError: the run asks for something that it may not, or the node does not say what only it can.
    """
    own = own_settings(code or {}) | own_settings(_from_environment()) | own_settings(node_config)
    asked = read_run(run_config)
    if "model" in asked and "model" not in own:
        _check_model(asked["model"])
    given = asked | {key.replace("-", "_"): value for key, value in own.items()}
    if "data" not in own:
        raise GradveilError(
            f'this node does not say what it trains on: set data, such as data="mnist-samples", in the node config or '
            f"in {VARIABLE}"
        )
    given["defense"] = _defense(own, asked)
    if own.get("batch-size") == 1:  # a node that says so wants single examples
        given.setdefault("min_batch", 1)
    if run_config.get("seed", 0) != own.get("seed", 0):
        log(WARNING, "this node deals and holds out by its own seed: for a simulation, set that of the run on it too")
    if isinstance(given.get("tap"), str):
        given["tap"] = tuple(given["tap"].split())
    extra = {name: given.pop(name) for name in _OWN if name in given}
    training = Training(**none_from_text(Training, given))
    return NodeSettings(training=training, **none_from_text(NodeSettings, extra))


def own_settings(config: Mapping[str, Any]) -> Json:
    """What one source on the node's side says, by its keys; a key that a node does not have is an error."""
    spelled = {key.replace("_", "-"): value for key, value in config.items()}
    for key in spelled.keys() - NODE_KEYS - _PLACE:
        raise GradveilError(f"a node has no setting {shown(key)}; there are: {', '.join(sorted(NODE_KEYS))}")
    return {key: value for key, value in spelled.items() if key in NODE_KEYS}


def _from_environment() -> Mapping[str, Any]:
    try:
        return parse_config_args([os.environ.get(VARIABLE, "")])
    except (click.ClickException, ValueError, OSError) as error:
        raise GradveilError(f'{VARIABLE} cannot be read: write it as a node config, key="value" ...') from error


def _defense(own: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """The node's own defense, on the model as the run reshapes it.

    A run never chooses the defense, not even for a node that says nothing: its ``noise:sigma=1e-9`` would look like
    one. It only says which links change the architecture, because the broadcast is of that.
    """
    chosen, wish = own.get("defense"), asked.get("defense", "none")
    if not isinstance(chosen, str):
        raise GradveilError(
            'this node does not say how it is defended: set defense on its side; "none" sends updates as they are'
        )
    reshaping, wanted = DEFENSES.reshaping(chosen), DEFENSES.reshaping(wish)
    if reshaping is not None and reshaping != wanted:
        raise GradveilError(
            f"this node's defense changes the model by {reshaping}, and the run's by {wanted or 'nothing'}: both "
            "sides must agree on that"
        )
    if wanted is not None and reshaping is None:
        chosen = wanted if DEFENSES.canonical(chosen) == "none" else f"{wanted}+{chosen}"
    log(INFO, "this node trains under %s, as it says itself; the run config asks for %s", chosen, wish)
    return chosen


def _check_model(spec: str) -> None:
    """Refuse a model from a run config that would run other code than that of Gradveil, or take much memory."""
    front, behind = split_front(spec)
    if front is not None or models.is_import_path(behind):
        raise GradveilError(
            f"the run config's model {shown(spec)} is not one that Gradveil ships, without a front: a node that trusts "
            "it names it itself, as model in its own config"
        )
    if split_spec(behind)[1].get("weights", "none") != "none":
        raise GradveilError("the run config's model asks for weights, which a node would download: the node names them")
    for key, text in split_spec(behind)[1].items():
        try:
            number = float(text)
        except ValueError:
            continue
        if not math.isfinite(number) or abs(number) > LARGEST_OPTION:
            raise GradveilError(
                f"the run config's model has {shown(key)} above {LARGEST_OPTION:,}: a node that wants it names the "
                "model itself"
            )
