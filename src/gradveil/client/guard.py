"""A defense around a user's own training loop: the optimiser steps with the defended gradient.

The model and the loss are watched, so that the defense knows the examples behind a gradient; just before the optimiser
steps, the gradients it is about to use are replaced. Nothing else of the loop changes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from gradveil.core.errors import GradveilError
from gradveil.core.seeding import secret
from gradveil.core.types import Batch, Loss, Params
from gradveil.defenses import DEFENSES, Chain, Defense, Log, Step, Transform
from gradveil.models import AddsToLoss, Functional


def protect(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, *, defense: str | Defense, seed: int | None = None
) -> Guard:
    """Put a defense between ``loss.backward()`` and ``optimizer.step()``.

    Compute the loss with ``guard.loss`` in the loop; ``loss`` itself must be the mean over the examples. ``seed`` makes
    the draws of the defense repeatable, for experiments only: who knows it can take the noise away again.
    """
    return Guard(model, optimizer, loss, _built(defense), _generator(seed, _device(model)))


def defend_update(update: Mapping[str, Tensor], *, defense: str | Defense, seed: int | None = None) -> Params:
    """What to send instead of an update (or gradient) by name; integers, such as counters, pass as they are.

    For defenses that need nothing but the tensors: noise, clipping, sparsification and chains of them.
    """
    links = _links(_built(defense))
    for link in links:
        if not isinstance(link, Transform):
            raise GradveilError(
                f"{type(link).__name__} needs the client's model and data, not only its update: use gradveil.protect"
            )
    moving = {name: tensor for name, tensor in update.items() if tensor.is_floating_point()}
    if not moving:
        return dict(update)
    rng, log = _generator(seed, next(iter(moving.values())).device), Log()
    for link in links:
        if isinstance(link, Transform):
            moving = link.transform(moving, rng, log)
    return {name: moving.get(name, tensor) for name, tensor in update.items()}


class Guard:
    """A training loop under a defense. ``close()`` it, or use it in a ``with``, to take the defense off again."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, defense: Defense, rng: torch.Generator
    ) -> None:
        _check(model, optimizer, defense)
        self.log = Log()
        """What the defense reported, such as how often it fell back."""
        self._model, self._optimizer, self._loss, self._defense, self._rng = model, optimizer, loss, defense, rng
        self._twin = copy.deepcopy(model)  # before the hook below: a copy of the model must not watch itself
        self._functions: dict[tuple[bool, ...], Functional] = {}
        self._prepared: Defense | None = None
        self._step, self._round = 0, 1
        self._inputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._function: Functional | None = None
        self._replaced: Params = {}
        self._value: Tensor | None = None
        self._handles = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            optimizer.register_step_pre_hook(self._before_step),
        ]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss given to :func:`protect`, plus what layers of the model add to it."""
        total = self._loss(outputs, targets)
        for layer in self._model.modules():
            if isinstance(layer, AddsToLoss) and layer.term is not None:
                total = total + layer.taken()
        if outputs.requires_grad:
            self._targets.append(targets.detach())
            self._value = total.detach()
        return total

    def new_round(self) -> None:
        """Say that a new broadcast was loaded into the model: defenses that prepare for a round do so again."""
        self._prepared, self._step, self._round = None, 0, self._round + 1

    def close(self) -> None:
        """Take the defense off: the loop trains with plain gradients from here on."""
        self._restore_buffers()
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _before_forward(
        self, _model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._restore_buffers()
        if not torch.is_grad_enabled():
            return None  # evaluation
        if len(arguments) != 1 or keywords or not isinstance(arguments[0], Tensor):
            raise GradveilError("a protected model takes one tensor of inputs: call it as model(inputs)")
        inputs = self._defense.on_inputs(arguments[0].detach(), self._rng)
        self._inputs.append(inputs)
        self._function = self._evaluated(len(inputs))
        return (inputs,), {}

    def _evaluated(self, examples: int) -> Functional:
        """The model as a function, in the mode it is in, with this step's own values in the buffers that have them."""
        modes = tuple(layer.training for layer in self._model.modules())
        if modes not in self._functions:
            for layer, mode in zip(self._twin.modules(), modes, strict=True):
                layer.training = mode
            self._functions[modes] = Functional(self._twin, train_mode=None)
        plain = self._functions[modes]
        plain = plain.with_buffers({n: b for n, b in self._model.named_buffers() if n in plain.buffers})
        used = self._defense.on_forward(plain, examples, self._rng)
        self._replace_buffers({n: b for n, b in used.buffers.items() if b is not plain.buffers[n]})
        return used

    def _replace_buffers(self, changed: Params) -> None:
        self._replaced = {name: self._model.get_buffer(name) for name in changed}
        _set_buffers(self._model, changed)

    def _restore_buffers(self) -> None:
        _set_buffers(self._model, self._replaced)
        self._replaced = {}

    def _before_step(self, _optimizer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if any(callable(value) for value in (*arguments[1:], *keywords.values())):
            raise GradveilError("a protected optimizer takes no closure: call loss.backward(), then optimizer.step()")
        named = dict(self._model.named_parameters())
        slopes = {name: p.grad for name, p in named.items() if p.grad is not None and p.requires_grad}
        if not slopes:
            return
        step = self._seen(named, slopes)
        if self._prepared is None:
            self._prepared = self._defense.prepared(replace(step, number=0))
        for name, gradient in self._prepared.on_gradient(slopes, step).items():
            named[name].grad = gradient.detach()

    def _seen(self, named: Mapping[str, Tensor], slopes: Params) -> Step:
        """What the defense may look at: all since the last step, several passes too where gradients accumulate."""
        inputs, targets = self._inputs, self._targets
        self._inputs, self._targets = [], []
        if [len(x) for x in inputs] != [len(y) for y in targets] or not inputs or self._function is None:
            raise GradveilError(
                "the defense saw inputs without targets: compute the loss with guard.loss(outputs, targets)"
            )
        self._step += 1
        live = {name: p.detach() for name, p in named.items()}
        return Step(
            model=self._function,
            loss=self._loss,
            params={name: live[name] for name in slopes},
            frozen={name: tensor for name, tensor in live.items() if name not in slopes},
            batch=Batch(torch.cat(inputs), torch.cat(targets)),
            number=self._step,
            round_number=self._round,
            lr=float(self._optimizer.param_groups[0]["lr"]),
            rng=self._rng,
            log=self.log,
            value=self._value if len(inputs) == 1 and not _drops_out(self._model) else None,
        )


def _built(defense: str | Defense) -> Defense:
    return DEFENSES.build(defense) if isinstance(defense, str) else defense


def _links(defense: Defense) -> list[Defense]:
    return [part for link in defense.links for part in _links(link)] if isinstance(defense, Chain) else [defense]


def _check(model: nn.Module, optimizer: torch.optim.Optimizer, defense: Defense) -> None:
    """Whatever can be known to go wrong is said before training starts."""
    defense.check(model)
    if defense.reshapes and not any(isinstance(layer, AddsToLoss) for layer in model.modules()):
        raise GradveilError(
            "this defense changes the architecture: write model = DEFENSES.build(...).on_model(model) "
            "before you make the optimizer"
        )
    late = [link for link in _links(defense) if isinstance(link, Transform) and link.at == "update"]
    if late:
        raise GradveilError(f"{type(late[0]).__name__} with at=update changes what is sent: use gradveil.defend_update")
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise GradveilError("the optimizer steps parameters that the model does not have: they would go undefended")


def _set_buffers(model: nn.Module, values: Params) -> None:
    for name, value in values.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, value)


def _drops_out(model: nn.Module) -> bool:
    """Whether the loop's own loss rests on a draw that the defense, which has dropout off, cannot repeat."""
    return any(isinstance(layer, _DropoutNd) and layer.training and layer.p > 0 for layer in model.modules())


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _generator(seed: int | None, device: torch.device) -> torch.Generator:
    """Fresh from the system's entropy unless a seed is given."""
    return secret(device) if seed is None else torch.Generator(device).manual_seed(seed)
