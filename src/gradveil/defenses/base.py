"""What a defense is: the identity at every hook of a client's local run, of which it overrides one or two."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, cast

from torch import Tensor, nn
from torch.func import grad, vmap

from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import all_finite, is_dense
from gradveil.core.types import Batch, Loss, Params
from gradveil.defenses.accounting import Guarantee, Ledger, check_rate
from gradveil.models.functional import Functional


class Log:
    """Figures a defense reports while it works, such as how often it fell back; each becomes its mean in the result.

    ``ledger`` is where a defense with a guarantee enters each step before it sends something of it, so that nobody
    else has to count. A log lives as long as its owner says: one reply, or a whole training under a guard. Whoever
    counts beyond that gives it a ledger that lives longer, or merges it into one.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self._values: dict[str, list[float | Tensor]] = defaultdict(list)

    def add(self, name: str, value: float | Tensor) -> None:
        """A tensor is read when somebody asks: a GPU need not stop for it now."""
        self._values[name].append(value.detach() if isinstance(value, Tensor) else value)

    def merge(self, other: Log) -> None:
        """Take over the figures of another log; not its ledger, which is about other data."""
        for name, values in other._values.items():
            self._values[name].extend(values)

    def values(self, name: str) -> tuple[float, ...]:
        """Everything reported under a name, in order."""
        return tuple(map(float, self._values.get(name, ())))

    def means(self) -> dict[str, float]:
        return {name: sum(self.values(name)) / len(self._values[name]) for name in sorted(self._values)}


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a defense may look at in one local step: everything here is on the client's side."""

    model: Functional
    loss: Loss
    params: Params
    """What is trained, as it is before this step."""
    frozen: Params = field(default_factory=dict)
    """The model's other parameters: they are not trained and have no gradient."""
    batch: Batch
    """The examples of this step."""
    index: Tensor | None = None
    """[n]: where the examples of this step stand in the client's local data; None where nobody knows."""
    number: int
    """Counts from 1 over the whole local run."""
    round_number: int = 1
    """Counts from 1 over the broadcasts that this client has answered."""
    lr: float
    rng: Stream
    log: Log = field(default_factory=Log)
    value: Tensor | None = None
    """The loss at ``params`` on ``batch``, where computing the gradient gave it anyway."""
    sample_rate: float | None = None
    """With which probability each example is in this step, independently of all others and in secret (Poisson
    sampling); None where examples are chosen in any other way."""
    expected: float | None = None
    """Goes with ``sample_rate``: how many examples there are in such a step on average. The batch may be empty."""

    def __post_init__(self) -> None:
        if (self.sample_rate is None) != (self.expected is None):
            raise GradveilError("sample_rate and expected describe one draw of examples and go together: give both")
        if self.sample_rate is not None:
            check_rate(self.sample_rate)
        if self.expected is not None and not 0 < self.expected < math.inf:
            raise GradveilError(f"expected is a number of examples above 0, not {self.expected}")

    @property
    def divisor(self) -> float:
        """What a sum over examples is divided by.

        Under Poisson sampling the size of the batch is secret too, and the expected size stands in for it.
        """
        return len(self.batch) if self.expected is None else self.expected

    def loss_at(self, params: Params, batch: Batch | None = None) -> Tensor:
        """The mean loss at other parameters, on this step's batch or on other examples."""
        on = batch or self.batch
        return self.model.loss(self.loss, {**self.frozen, **params}, on.inputs, on.labels)

    def gradient(self, batch: Batch | None = None) -> Params:
        """The gradient at this step's parameters, of its batch or of other examples."""
        return cast(Params, grad(self.loss_at)(self.params, batch))

    def example_gradients(self, batch: Batch | None = None) -> Params:
        """The gradient of every example by itself, [n, ...] by name, in one batched call."""
        on = batch or self.batch

        def one(inputs: Tensor, label: Tensor) -> Params:
            alone = Batch(inputs[None], label[None])
            return cast(Params, grad(self.loss_at)(self.params, alone))

        return vmap(one)(on.inputs, on.labels)


class Defense:
    """Sends everything as it is. Overrides return new objects and never edit an argument in place.

    Instances hold options and nothing that changes: what one local run needs to remember is made by ``prepared``.
    """

    reshapes: ClassVar[bool] = False
    """Whether ``on_model`` changes the architecture, which server and clients then agree on."""
    gains_together: ClassVar[bool] = False
    """Whether ``on_gradients`` is faster than one client after another; such a defense is its own ``prepared``."""
    guaranteed: ClassVar[bool] = False
    """Whether what it leaves has a proof, which holds for whatever is made of it without the private examples."""
    delta: float | None = None
    """For which delta ``step.log.ledger.spent(delta)`` is the epsilon of what it sent; None: it has no epsilon."""

    @property
    def changes_updates(self) -> bool:
        """Whether ``on_update`` changes what leaves, and steps alone would leave it bare."""
        return type(self).on_update is not Defense.on_update

    @property
    def starts_over(self) -> bool:
        """Whether ``on_gradient`` begins with the private examples, whatever became of their gradient before it."""
        return False

    def __repr__(self) -> str:
        """The class and its options: what tells one defense from another."""
        plain = (bool, int, float, str, tuple, type(None))
        options = {k: v for k, v in sorted(vars(self).items()) if not k.startswith("_") and isinstance(v, plain)}
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def planned(self) -> Guarantee | None:
        """What the training that its options plan will have spent; None: they plan none."""
        return None

    def check_steps(self, steps: int) -> None:
        """Raise a GradveilError if an example would take part in more steps than planned."""

    def check(self, model: nn.Module) -> None:
        """Raise a GradveilError that names the fix if this defense cannot work on this model."""

    def on_model(self, model: nn.Module) -> nn.Module:
        """Change the architecture that server and clients agree on, before the first broadcast."""
        return model

    def on_inputs(self, inputs: Tensor, rng: Stream) -> Tensor:  # noqa: ARG002
        """Change the local inputs [n, C, H, W] in [0, 1] before training on them."""
        return inputs

    def prepared(self, start: Step) -> Defense:  # noqa: ARG002
        """The defense for one local run. ``start`` has number 0, the broadcast and all local examples."""
        return self

    def on_forward(self, model: Functional, examples: int, rng: Stream) -> Functional:  # noqa: ARG002
        """The model as this client evaluates it in one local step on so many examples."""
        return model

    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        """Change the gradient of one local step before the optimiser takes it."""
        return gradient

    def on_gradients(self, gradients: Sequence[Params], steps: Sequence[Step]) -> list[Params]:
        """``on_gradient`` for several clients that answer the same broadcast."""
        return [self.on_gradient(gradient, step) for gradient, step in zip(gradients, steps, strict=True)]

    def on_update(self, update: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        """Change what leaves the client."""
        return update


class Transform(Defense):
    """A defense that needs nothing but the tensors: on every local gradient, or once on the outgoing update."""

    def __init__(self, *, at: Literal["step", "update"] = "step") -> None:
        self.at = at

    @property
    def changes_updates(self) -> bool:
        return self.at == "update"

    @abstractmethod
    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:
        """What is sent instead of these named tensors."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return self.transform(gradient, step.rng, step.log) if self.at == "step" else gradient

    def on_update(self, update: Params, rng: Stream, log: Log) -> Params:
        return self.transform(update, rng, log) if self.at == "update" else update


def check_result(sent: Params, given: Params) -> None:
    """Raise unless a defense returned what it got: the same names and shapes, and finite real numbers."""
    if not isinstance(sent, dict) or (odd := sorted(sent.keys() ^ given.keys())):
        raise GradveilError("the defense did not return the tensors it got by name: some are missing or new")
    odd = [name for name, tensor in sent.items() if not is_dense(tensor) or tensor.shape != given[name].shape]
    if odd or not all_finite(sent):
        odd = odd or [name for name, tensor in sent.items() if not all_finite({name: tensor})]
        raise GradveilError(f"the defense gave {odd[0]!r} another shape, or something else than finite real numbers")
