"""What every defense is measured on. These are fixed: a change of one makes its old entries worthless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gradveil.auditing import Case, make_case
from gradveil.core.errors import UnknownNameError
from gradveil.core.types import Json
from gradveil.federated import Training, make_training

SHOWN = (
    "none",
    "noise:sigma=0.01",
    "noise:sigma=0.1",
    "clip:bound=4",
    "clip:bound=4+noise:sigma=0.01",
    "sparsify:rate=0.9",
    "dp",
    "soteria",
    "graddefense",
    "censor",
    "censor:norms=public",
    "outpost",
    "dcs2:iterations=100,sensitive=first",
    "dcs2plus:iterations=100,sensitive=first",
    "precode",
    "ats",
)
"""The defenses that the leaderboard is about when none is named."""


@dataclass(frozen=True)
class Setting:
    """One table of the leaderboard."""

    name: str
    title: str
    audit: Json
    """Fields of the case, but for defenses and the device."""
    training: Json | None
    """Fields of the training that accuracy and time are read off; None: too slow for all defenses."""

    def case(self, defenses: Sequence[str], device: str) -> Case:
        return make_case({**self.audit, "defenses": list(defenses), "device": device})

    def trained(self, defense: str, device: str) -> Training | None:
        return None if self.training is None else make_training({**self.training, "defense": defense, "device": device})


_AUDIT = {"threat": "D", "unfit": "leave out"}
_BUDGETS = {("resnet18", "b1"): "thorough", ("resnet18", "b8"): "quick", ("resnet18", "fedavg"): "quick"}
"""Where the suite is not ``standard``. The thorough audit is that of docs/results/audit-cifar10. Where a step is one of
eight images through a large model, or repeats several of its local steps, the strongest attacks have to do."""
_SAMPLES = {"mnist": "mnist-samples", "cifar10": "cifar10-samples"}
_MODELS = {"lenet": "lenet:init=wide", "resnet18": "resnet18"}
_TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "lenet": "LeNet", "resnet18": "ResNet-18"}
_WAYS: dict[str, tuple[str, Json]] = {
    "b1": ("FedSGD, one image behind each update", {"images": 20}),
    "b8": ("FedSGD, eight images behind each update", {"images": 16, "batch_size": 8}),
    "fedavg": (
        "FedAvg, eight images in two epochs of mini-batches of four",
        {"images": 16, "batch_size": 8, "recipe": {"sends": "delta", "epochs": 2, "batch_size": 4, "lr": 0.01}},
    ),
}
_TRAININGS: dict[tuple[str, str], Json] = {
    ("mnist", "lenet"): {
        "data": "mnist", "examples": 4000, "model": "lenet:init=wide,normalize=true", "clients": 10, "rounds": 10,
        "epochs": 2, "batch_size": 20, "lr": 0.1, "evaluate_every": 10, "checkpoint_every": 10,
    },
    ("cifar10", "lenet"): {
        "data": "cifar10", "model": "lenet:init=wide,normalize=true", "partition": "dirichlet:alpha=0.5,equal=true",
        "clients": 100, "per_round": 10, "rounds": 20, "epochs": 5, "batch_size": 32, "lr": 0.01,
        "evaluate_every": 20, "checkpoint_every": 10,
    },
}  # fmt: skip


SETTINGS = {
    f"{data}-{model}-{way}": Setting(
        name=f"{data}-{model}-{way}",
        title=f"{_TITLES[data]}, {_TITLES[model]}: {title}",
        audit={
            **_AUDIT, "budget": _BUDGETS.get((model, way), "standard"), "data": samples, "model": spec, **fields,
        },
        training=_TRAININGS.get((data, model)),
    )
    for data, samples in _SAMPLES.items()
    for model, spec in _MODELS.items()
    for way, (title, fields) in _WAYS.items()
}  # fmt: skip


def settings_named(patterns: Sequence[str]) -> list[Setting]:
    """The settings of some names, which may hold ``*``; all where none is given."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in SETTINGS):
            raise UnknownNameError(f"no setting is called {pattern!r}; there are: {', '.join(SETTINGS)}")
    chosen = patterns or ["*"]
    return [setting for name, setting in SETTINGS.items() if any(fnmatchcase(name, p) for p in chosen)]
