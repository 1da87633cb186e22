"""A client that owns its model: nothing trains it but its steps, and nothing leaves it but its reply."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradveil.bounds import Certificate
from gradveil.client.client import SimulatedClient
from gradveil.client.guard import Guard
from gradveil.client.sampling import Examples
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Loss, Params, Recipe, cross_entropy
from gradveil.defenses import DEFENSES, Defense, Log
from gradveil.domains import Images
from gradveil.models import AddsToLoss, Functional, arguments_of, as_pictures, logits_of, trained_parameters
from gradveil.threat import Observation, observe, threat_model

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
        self._optimizer, self._loss, self._defense = optimizer(trained), loss, built
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

    def sample(self, dataset: Examples, rate: float, steps: int | None = None) -> Iterator[tuple[Inputs, Tensor]]:
        """Batches by Poisson sampling, for one :meth:`step` each: what ``dp`` counts at a rate below 1."""
        return self._guard.sample(dataset, rate, steps)

    def outputs(self, inputs: Inputs) -> Tensor:
        """What the model says of inputs, for the client's own eyes."""
        arguments, keywords = arguments_of(as_pictures(inputs))
        with torch.no_grad():
            return logits_of(self._model.eval()(*arguments, **keywords))

    def observe(self, images: Tensor, labels: Tensor, *, threat: str = "C") -> Observation:
        """What an adversary sees of one defended step on these examples: what attacks take.

        The step starts from the parameters that the client has now, and moves none. It is seen as the defended gradient
        or, where the defense changes updates, as the difference that one step of SGD makes. An observation is as good
        as a reply to whoever gets it, so it counts as one: :meth:`privacy_spent` holds one more step on all of these
        examples, and a plan of ``dp`` has one less.

        Args:
            images: [n, C, H, W] in [0, 1], or bytes.
            labels: [n], of int64.
            threat: the name of the threat model, which says what else is known.

        Raises:
            GradveilError: if these are no images, or if the model drops out at random, which no attack can repeat.
        """
        images, known = as_pictures(images), threat_model(threat)
        if not isinstance(images, Tensor) or images.dim() != 4 or not len(images) or labels.shape != images.shape[:1]:
            raise GradveilError("client.observe takes images [n, C, H, W] and as many labels: attacks rebuild images")
        if self._defense.summed:
            raise GradveilError("client.observe shows a reply alone, and this defense is proved for a sum of them only")
        rate = float(self._optimizer.param_groups[0].get("lr", 0.1))
        late = self._defense.changes_updates
        recipe = Recipe(sends="delta", lr=rate, train_mode=True) if late else Recipe(train_mode=True)
        spec = self._defense.spec  # raises before anything is spent
        Functional(self._model, train_mode=True)  # as does a model that no attack can follow
        domain = Images.like(images, classes=self.outputs(images[:1]).shape[-1])
        module, log = self._guard.copy_outside()
        simulated = SimulatedClient(module, recipe=recipe, defense=self._defense, loss=self._loss)
        sent, batch = trained_parameters(module), Batch(images, labels)
        reply = simulated.start(sent, batch, Stream.secret(), log=log, distinct=False).finish()
        kind = type(self._model)
        return observe(
            module=module, model=f"{kind.__module__}:{kind.__qualname__}", domain=domain, sent=sent,
            reply=reply.update, batch=batch, recipe=recipe, defense=spec, threat=known, loss=self._loss,
        )  # fmt: skip

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

    def certificate(self) -> Certificate:
        """What is proved of all replies, those that are planned included. A GradveilError says why nothing is."""
        return self._guard.certificate()

    def checkpoint(self) -> dict[str, Any]:
        """All that a restart needs, for ``torch.save``. It stays with the client."""
        return self._guard.checkpoint()

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of this client. Privacy that was spent stays spent."""
        self._guard.restore(checkpoint)
