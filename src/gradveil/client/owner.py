"""A client that owns its model: nothing trains it but its steps, and nothing leaves it but its reply."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradveil.client.guard import Guard
from gradveil.client.local import cross_entropy
from gradveil.client.sampling import Examples
from gradveil.core.errors import GradveilError
from gradveil.core.types import Loss, Params
from gradveil.defenses import DEFENSES, Defense, Log
from gradveil.models import AddsToLoss, arguments_of, as_pictures, logits_of

Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
"""What a model is called with: one tensor, several in their order, or several by name."""


class Client:
    """One participant of a federation, with a copy of the model that nobody else can reach.

    Args:
        model: takes tensors of inputs, with a row for each example, and returns one tensor of outputs or an object
            with ``logits``. What it holds now is the first broadcast. Frozen parameters are not trained and not sent.
        defense: a defense, or its name with options, such as ``"dp:sigma=1.1"``.
        loss: the mean over the examples, as a function of outputs and targets; default: cross entropy.
        optimizer: makes the optimizer from the parameters to train; default: SGD at a rate of 0.1.

    Raises:
        GradveilError: if the defense cannot work on this model.

    Example:
        >>> client = Client(nn.Linear(4, 3), defense="clip:bound=1+noise:sigma=0.1")
        >>> _ = client.step(torch.rand(8, 4), torch.arange(8) % 3)
        >>> sorted(client.reply())
        ['bias', 'weight']
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        defense: str | Defense,
        loss: Loss = cross_entropy,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = lambda params: torch.optim.SGD(params, lr=0.1),
    ) -> None:
        built = DEFENSES.build(defense) if isinstance(defense, str) else defense
        if not isinstance(model, nn.Module) or not isinstance(built, Defense) or not callable(optimizer):
            raise GradveilError("a client takes a torch model, a defense, and a function that makes its optimizer")
        reshaped = not built.reshapes or any(isinstance(layer, AddsToLoss) for layer in model.modules())
        self._model = copy.deepcopy(model) if reshaped else built.on_model(model)
        trained = [p for p in self._model.parameters() if p.requires_grad]
        if not trained:
            raise GradveilError(
                "the model has no parameter to train: call requires_grad_(True) on those that it should"
            )
        self._optimizer = optimizer(trained)
        self._guard = Guard(self._model, [self._optimizer], loss, built)

    def start(self, broadcast: Mapping[str, Tensor]) -> None:
        """Begin a round from what the server sent: parameters, and maybe buffers, by name."""
        self._guard.new_round(broadcast)

    def step(self, inputs: Inputs, targets: Tensor) -> float:
        """Train on one batch, defended. Returns the loss before the step.

        Args:
            inputs: a tensor; several in a tuple, or by name in a dict. Images of bytes become numbers in [0, 1].
            targets: one for each example.
        """
        arguments, keywords = arguments_of(as_pictures(inputs))
        with torch.enable_grad():
            self._optimizer.zero_grad()
            value = self._guard.loss(self._model.train()(*arguments, **keywords), targets)
            value.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        return float(value.detach())

    def sample(self, dataset: Examples, rate: float, steps: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches by Poisson sampling, for one :meth:`step` each: what ``dp`` counts at a rate below 1."""
        return self._guard.sample(dataset, rate, steps)

    def outputs(self, inputs: Inputs) -> Tensor:
        """What the model says of inputs, for the client's own eyes."""
        arguments, keywords = arguments_of(as_pictures(inputs))
        with torch.no_grad():
            return logits_of(self._model.eval()(*arguments, **keywords))

    def reply(self) -> Params:
        """All that leaves: the defended update by name, the difference to the broadcast. It ends the round."""
        return self._guard.update()

    @property
    def log(self) -> Log:
        """What the defense reported. It stays with the client."""
        return self._guard.log

    def privacy_spent(self, delta: float) -> float:
        """Epsilon of all replies and restarts so far; infinite for a defense without a proof."""
        return self._guard.privacy_spent(delta)

    def checkpoint(self) -> dict[str, Any]:
        """All that a restart needs, for ``torch.save``. It stays with the client."""
        return self._guard.checkpoint()

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of this client. Privacy that was spent stays spent."""
        self._guard.restore(checkpoint)
