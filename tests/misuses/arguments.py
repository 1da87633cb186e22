"""Models, losses and defenses that ``protect`` cannot work with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradveil
from gradveil.defenses import Defense, Transform
from guarded import LR, Loop, Marked, Net
from misuses.table import misuse


class Clumsy(Defense):
    """A defense of the user's own that does one thing wrong."""

    def __init__(self, change: Callable[[dict[str, Tensor]], Any]) -> None:
        self.change = change

    def on_gradient(self, gradient, step):  # type: ignore[no-untyped-def]  # noqa: ARG002
        return self.change({name: torch.ones_like(tensor) for name, tensor in gradient.items()})


def _clumsy() -> Iterator[tuple[str, Callable[[dict[str, Tensor]], Any]]]:
    yield "returns fewer names", lambda g: {n: t for n, t in g.items() if n != "head.bias"}
    yield "returns no names", lambda _: {}
    yield "returns more names", lambda g: {**g, "tail": torch.ones(2)}
    yield "returns another shape", lambda g: {**g, "head.bias": torch.ones(4)}
    yield "returns a shape that would broadcast", lambda g: {**g, "head.bias": torch.ones(1)}
    yield "returns NaN", lambda g: {**g, "head.bias": torch.full((3,), float("nan"))}
    yield "returns infinity", lambda g: {**g, "head.bias": torch.full((3,), float("inf"))}
    yield "returns nothing", lambda _: None
    yield "returns a list", lambda g: list(g.values())
    yield "returns numbers", lambda g: dict.fromkeys(g, 1.0)
    yield "returns complex numbers", lambda g: {n: t.to(torch.complex64) for n, t in g.items()}
    yield "returns sparse tensors", lambda g: {n: t.to_sparse() for n, t in g.items()}
    yield "returns meta tensors", lambda g: {n: t.to("meta") for n, t in g.items()}


for _name, _change in _clumsy():

    def _clumsily(loop: Loop, change: Callable[[dict[str, Tensor]], Any] = _change) -> None:
        loop.protect(defense=Clumsy(change))
        loop.train()

    misuse(f"a defense that {_name}", "refused", under=("marks",))(_clumsily)


@misuse("a defense that returns another precision", "defended", under=("marks",))
def _(loop: Loop) -> None:
    loop.protect(defense=Clumsy(lambda g: {n: t.double() for n, t in g.items()}))
    loop.train()


@misuse("a defense that works in place", "defended", under=("marks",))
def _(loop: Loop) -> None:
    class InPlace(Defense):
        def on_gradient(self, gradient, step):  # type: ignore[no-untyped-def]  # noqa: ARG002
            for tensor in gradient.values():
                tensor.fill_(1)
            return gradient

    loop.protect(defense=InPlace())
    loop.train()


@misuse("a defense that returns one tensor under two names", "defended", under=("marks",))
def _(loop: Loop) -> None:
    class Shared(Defense):
        def on_gradient(self, gradient, step):  # type: ignore[no-untyped-def]  # noqa: ARG002
            one = torch.ones(30)
            return {name: one[: tensor.numel()].view_as(tensor) for name, tensor in gradient.items()}

    loop.protect(defense=Shared(), optimizer=torch.optim.SGD(loop.model.parameters(), lr=LR, weight_decay=0.0))
    loop.train(2)


@misuse("a defense that moves the parameters", "refused", under=("marks",))
def _(loop: Loop) -> None:
    class Meddling(Defense):
        def on_gradient(self, gradient, step):  # type: ignore[no-untyped-def]
            for name, tensor in step.params.items():
                tensor.sub_(LR * gradient[name])
            return {name: torch.ones_like(tensor) for name, tensor in gradient.items()}

    loop.protect(defense=Meddling())
    loop.train()


@misuse("a defense that works on the update only", "refused", under=("marks",))
def _(loop: Loop) -> None:
    class Late(Defense):
        def on_update(self, update, rng, log):  # type: ignore[no-untyped-def]  # noqa: ARG002
            return {name: torch.ones_like(tensor) for name, tensor in update.items()}

    loop.protect(defense=Late())
    loop.train()


@misuse("a transform at the update", "refused", under=("marks",))
def _(loop: Loop) -> None:
    loop.protect(defense="noise:sigma=1,at=update")
    loop.train()


@misuse("a transform of one's own at the update", "refused", under=("marks",))
def _(loop: Loop) -> None:
    class Ones(Transform):
        def transform(self, tree, rng, log):  # type: ignore[no-untyped-def]  # noqa: ARG002
            return {name: torch.ones_like(tensor) for name, tensor in tree.items()}

    loop.protect(defense=Ones(at="update"))
    loop.train()


def _arguments() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "an unknown defense", {"defense": "nois"}
    yield "no defense", {"defense": None}
    yield "a class for a defense", {"defense": Marked}
    yield "a function for a defense", {"defense": lambda gradient: gradient}
    yield "no optimizer", {"optimizer": None}
    yield "an empty list of optimizers", {"optimizer": []}
    yield "a list that holds no optimizer", {"optimizer": [0.1]}
    yield "parameters for an optimizer", {"optimizer": nn.ParameterList([torch.zeros(3)])}
    yield "an optimizer of another model", {"optimizer": torch.optim.SGD(Net().parameters(), lr=LR)}
    yield "a function for a model", {"model": F.relu}
    yield "an optimizer for a model", {"model": torch.optim.SGD(Net().parameters(), lr=LR)}
    yield "a class for a model", {"model": Net}
    yield "a class for a loss", {"loss": nn.CrossEntropyLoss}
    yield "a name for a loss", {"loss": "cross_entropy"}
    yield "no loss", {"loss": None}


for _name, _wrong in _arguments():

    def _called(loop: Loop, wrong: dict[str, Any] = _wrong) -> None:
        loop.broadcast = loop.model.state_dict()
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=LR)
        right = {"model": loop.model, "optimizer": loop.optimizer, "loss": F.cross_entropy, "defense": Marked()}
        loop.guard = gradveil.protect(**{**right, **wrong})
        loop.train()

    misuse(f"protect with {_name}", "refused", under=("marks",))(_called)


@misuse("protect with one optimizer twice", "defended")
def _(loop: Loop) -> None:
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=LR)
    loop.protect(optimizer=[optimizer, optimizer])
    loop.train()


@misuse("a lazy layer", "refused")
def _(loop: Loop) -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    loop.broadcast = {}
    loop.guard = gradveil.protect(
        model, torch.optim.SGD(model.parameters(), lr=LR), F.cross_entropy, defense=loop.defense
    )
    loop.model = model
    loop.optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loop.train()


@misuse("parameters on the meta device", "refused")
def _(loop: Loop) -> None:
    loop.protect(Net().to("meta"))
    loop.train()


class Wide(Net):
    """Takes a second tensor, or a number, and returns an object."""

    def forward(self, inputs: Tensor, more: Any = 0.0) -> Any:  # type: ignore[override]
        hidden = torch.tanh(self.first(inputs + more))
        logits = self.head(hidden)
        return SimpleNamespace(logits=logits, hidden=hidden, loss=logits.square().mean())


@misuse("a model that takes two tensors", "defended")
def _(loop: Loop) -> None:
    loop.protect(Wide())
    loop.guard.loss(loop.model(loop.inputs, more=loop.inputs), loop.targets).backward()
    loop.step()


@misuse("a second tensor under a defense of one", "refused", under=("marks",))
def _(loop: Loop) -> None:
    loop.protect(Wide(), defense="ats")
    loop.guard.loss(loop.model(loop.inputs, loop.inputs), loop.targets).backward()
    loop.step()


@misuse("a number beside the inputs", "refused")
def _(loop: Loop) -> None:
    loop.protect(Wide())
    loop.guard.loss(loop.model(loop.inputs, float(loop.inputs.max())), loop.targets).backward()
    loop.step()


@misuse("a tensor of the whole batch beside the inputs", "refused")
def _(loop: Loop) -> None:
    loop.protect(Wide())
    loop.guard.loss(loop.model(loop.inputs, more=loop.inputs.amax(0, keepdim=True)), loop.targets).backward()
    loop.step()


@misuse("a second tensor that needs a gradient", "refused")
def _(loop: Loop) -> None:
    loop.protect(Wide())
    more = torch.zeros_like(loop.inputs, requires_grad=True)
    loop.guard.loss(loop.model(loop.inputs, more=more), loop.targets).backward()
    loop.step()


@misuse("the loss that the model returns", "refused")
def _(loop: Loop) -> None:
    loop.protect(Wide())
    loop.model(loop.inputs).loss.backward()
    loop.step()


@misuse("a penalty on what the model returns beside its logits", "refused")
def _(loop: Loop) -> None:
    loop.protect(Wide())
    outputs = loop.model(loop.inputs)
    (loop.guard.loss(outputs, loop.targets) + outputs.hidden.square().mean()).backward()
    loop.step()


@misuse("other logits in what the model returned", "refused")
def _(loop: Loop) -> None:
    loop.protect(Wide())
    outputs = loop.model(loop.inputs)
    outputs.logits = outputs.logits + 0.0
    loop.guard.loss(outputs, loop.targets).backward()
    loop.step()


@misuse("a model that returns two tensors", "refused")
def _(loop: Loop) -> None:
    class Pair(Net):
        def forward(self, inputs: Tensor) -> Any:
            out = super().forward(inputs)
            return out, out

    loop.protect(Pair())
    loop.guard.loss(loop.model(loop.inputs)[0], loop.targets).backward()
    loop.step()


@misuse("targets of another length", "refused")
def _(loop: Loop) -> None:
    loop.protect(loss=lambda outputs, targets: outputs.square().mean() + 0 * targets.sum())
    loop.guard.loss(loop.model(loop.inputs), loop.targets[:3]).backward()
    loop.step()


@misuse("the old weight norm", "refused")
def _(loop: Loop) -> None:
    """The model cannot be copied, which a guard has to do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        loop.model.first = nn.utils.weight_norm(loop.model.first)  # type: ignore[assignment]
    loop.model(loop.inputs)
    loop.broadcast = {}
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=LR)
    loop.guard = gradveil.protect(loop.model, optimizer, F.cross_entropy, defense=loop.defense)
