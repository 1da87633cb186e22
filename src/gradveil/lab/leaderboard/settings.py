"""What every defense is measured on. These are fixed: a change of one makes its old entries worthless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from gradveil.auditing import Case, make_case
from gradveil.core.errors import UnknownNameError
from gradveil.core.types import Json
from gradveil.federated import Training, make_training

Stage = Literal["untrained", "trained"]
SEEDS = (1, 2, 3)
"""Of the trainings."""
PUBLISHED = (
    "none",
    "noise:sigma=0.01",
    "noise:sigma=0.1",
    "clip:bound=4",
    "clip:bound=4+noise:sigma=0.01",
    "sparsify:rate=0.9",
    "topk:rate=0.9",
    "quantise",
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
"""The defenses of papers and of practice that promise nothing, with the options of their papers."""


@dataclass(frozen=True)
class Setting:
    """One table of the leaderboard."""

    name: str
    title: str
    about: str
    """What a reader has to know of its audit."""
    audit: Json
    """Fields of the case, but for defenses and the device."""
    training: Json | None
    """Fields of the training that accuracy and time are read off, and whose model is audited; None: there is none."""
    shown: tuple[str, ...]
    """The defenses that it is about when none is named."""
    reaches: float | None = None
    """The accuracy that the training reaches without a defense, at least."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The models that are audited: as they start, and as training without a defense leaves them."""
        return ("untrained",) if self.training is None else ("untrained", "trained")

    def case(self, defenses: Sequence[str], device: str) -> Case:
        return make_case({**self.audit, "defenses": list(defenses), "device": device})

    def trained(self, defense: str, seed: int, device: str) -> Training | None:
        if self.training is None:
            return None
        return make_training({**self.training, "defense": defense, "seed": seed, "device": device})


_AUDIT = {"threat": "D", "unfit": "leave out", "budget": "standard", "in_rounds": [1]}
_SHORT = ["identify", "fingerprint", "informed:iterations=80,restarts=1", "replay"]
"""Where a problem is a batch of ten: a search is both shorter and started once."""
_SAME_BATCH = (
    "A reply is one gradient of ten examples, in the training and in the audit. Intervals count updates: the ten "
    "examples behind one stand or fall together."
)
_FEDSGD = {
    "algorithm": "fedsgd", "clients": 100, "batch_size": 10, "server_momentum": 0.9, "evaluate_every": 100,
    "train_mode": False,
}  # fmt: skip
_FEATURES = "features:backbone=efficientnet-lite0+efficientnet-lite2,pca=512"

_LINEAR = "mlp:depth=0"
_OTHERS_KNOWN = (
    "A reply is one gradient of all 500 examples of a client. The audit takes the adversary of a certificate, who "
    "knows the other 499: what is left is a reply about one example. For `dp` and `veil` that is the same noise on the "
    "same example. Noise that is not in units of one example hides more among 500 than these figures say."
)
_EVERY = [
    "identify", "fingerprint", "replay", "learned", "learned:rank=true",
    *(
        f"{spec},restarts=1"
        for spec in (
            "informed:iterations=60", "ig:iterations=60", "idlg:iterations=30", "gi:iterations=40",
            "ggl:iterations=40,optimizer=adam", "ggl:iterations=40", "gias:iterations=40", "gifd:iterations=40",
        )
    ),
]  # fmt: skip
"""Every attack of the thorough suite for one example behind a reply and threat D, with shorter searches."""

SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(
            name="linear",
            title="MNIST, a linear classifier",
            about=f"The setting that two CPU cores can afford. {_OTHERS_KNOWN}",
            audit={
                **_AUDIT, "data": "mnist:first=300", "model": _LINEAR, "images": 100,
                "attacks": ["analytic", "identify", "fingerprint", "replay"],
            },
            training={
                **_FEDSGD, "data": "mnist", "examples": 10_000, "clients": 20, "model": _LINEAR, "batch_size": None,
                "rounds": 40, "lr": 0.4, "average_from": 21, "evaluate_every": 5,
            },
            shown=("none", "veil:bound=3", "dp:bound=3,sigma=1.5", *PUBLISHED[1:]),
            reaches=0.89,
        ),
        Setting(
            name="linear-200",
            title="MNIST, a linear classifier, 200 examples",
            about=(
                "The certified defense alone, against every attack that the thorough suite has for this setting. "
                "Searches are shorter than the suite's and started once."
            ),
            audit={
                **_AUDIT, "budget": "thorough", "data": "mnist:first=600", "model": _LINEAR, "images": 200,
                "attacks": ["analytic", *_EVERY],
            },
            training=None,
            shown=("veil:bound=3",),
        ),
        Setting(
            name="features",
            title="CIFAR-10, a linear head on public features",
            about=_OTHERS_KNOWN,
            audit={
                **_AUDIT, "data": "cifar10:first=300", "model": _FEATURES, "images": 100,
                "attacks": ["identify", "fingerprint", "informed:iterations=60,restarts=1,strategy=vmap", "replay"],
            },
            training={
                **_FEDSGD, "data": "cifar10", "model": _FEATURES, "batch_size": None, "rounds": 80, "lr": 20.0,
                "average_from": 41, "evaluate_every": 10,
            },
            shown=(
                "none", "veil:bound=0.3,rounds=80", "dp:bound=0.3,sigma=4", "dp:bound=0.3,sigma=1.1", *PUBLISHED[1:],
            ),
            reaches=0.91,
        ),
        Setting(
            name="features-200",
            title="CIFAR-10, public features, 200 examples",
            about="The certified defense alone, as on the linear classifier.",
            audit={
                **_AUDIT, "budget": "thorough", "data": "cifar10:first=600", "model": _FEATURES,
                "images": 200,
                "attacks": _EVERY,
            },
            training=None,
            shown=("veil:bound=0.3,rounds=80",),
        ),
        Setting(
            name="resnet8",
            title="CIFAR-10, ResNet-8 with group norm from scratch",
            about=_SAME_BATCH,
            audit={
                **_AUDIT, "data": "cifar10:first=1500", "model": "resnet8:init=he", "images": 600,
                "batch_size": 10, "attacks": _SHORT,
            },
            training={
                **_FEDSGD, "data": "cifar10", "model": "resnet8:init=he", "per_round": 16, "rounds": 1500, "lr": 0.1,
                "average_from": 751,
            },
            shown=(
                "none", "veil:rounds=300", "dp:bound=0.3,sigma=0.3", "dp:bound=0.3,sigma=1.1", *PUBLISHED[1:],
            ),
            reaches=0.65,
        ),
        Setting(
            name="convnet",
            title="MNIST, ConvNet with group norm from scratch",
            about=_SAME_BATCH,
            audit={
                **_AUDIT, "data": "mnist:first=1500", "model": "convnet:group_norm=true,init=he,width=8",
                "images": 600, "batch_size": 10, "attacks": _SHORT,
            },
            training={
                **_FEDSGD, "data": "mnist", "model": "convnet:group_norm=true,init=he,width=8", "per_round": 10,
                "rounds": 600, "lr": 0.05, "average_from": 301, "evaluate_every": 50,
            },
            shown=(
                "none", "veil:rounds=90", "dp:bound=0.3,sigma=0.3", "dp:bound=0.3,sigma=1.1", *PUBLISHED[1:],
            ),
            reaches=0.98,
        ),
        Setting(
            name="worst-case",
            title="CIFAR-10, untrained LeNet, one example behind each reply",
            about="The worst case: a model that is easy to invert, before its first step, and nobody to hide among.",
            audit={
                **_AUDIT, "data": "cifar10:first=300", "model": "lenet:init=wide", "images": 100,
                "attacks": ["identify", "fingerprint", "informed", "ig:iterations=800,restarts=1", "replay"],
            },
            training=None,
            shown=("none", "veil", "dp:sigma=1.1", "dp:sigma=0.3", *PUBLISHED[1:]),
        ),
        Setting(
            name="sum-of-10",
            title="The same, in a secure sum of 10 clients",
            about=(
                "The observer sees the sum of 10 replies about one example each, and no reply. That is the mean "
                "gradient of 10 examples, times 10: a batch of 10 is audited."
            ),
            audit={
                **_AUDIT, "data": "cifar10:first=1500", "model": "lenet:init=wide", "images": 600,
                "batch_size": 10, "attacks": _SHORT,
            },
            training=None,
            shown=("none",),
        ),
        Setting(
            name="sum-of-100",
            title="The same, in a secure sum of 100 clients",
            about=(
                "The observer sees the sum of 100 replies about one example each: a batch of 100 is audited."
            ),
            audit={
                **_AUDIT, "data": "cifar10:first=10000", "model": "lenet:init=wide", "images": 2000,
                "batch_size": 100, "attacks": ["identify", "fingerprint"],
            },
            training=None,
            shown=("none",),
        ),
    )
}  # fmt: skip


def settings_named(patterns: Sequence[str]) -> list[Setting]:
    """The settings of some names, which may hold ``*``; all where none is given."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in SETTINGS):
            raise UnknownNameError(f"no setting is called {pattern!r}; there are: {', '.join(SETTINGS)}")
    chosen = patterns or ["*"]
    return [setting for name, setting in SETTINGS.items() if any(fnmatchcase(name, p) for p in chosen)]
