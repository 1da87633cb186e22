"""What a guard puts into a model and its loss, what it refuses before it does, and what it compares."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils.parametrizations import _SpectralNorm

from gradveil.core.errors import GradveilError, RefusedError
from gradveil.core.seeding import generator
from gradveil.core.trees import differing, is_plain
from gradveil.core.types import Batch, Loss, Params
from gradveil.defenses import Defense, Transform, check_model, links_of
from gradveil.engine import copied_loss
from gradveil.models import AddsToLoss, Functional, SeveralInputs, joined_inputs, returned_tensors


def refuse(text: str) -> NoReturn:
    raise RefusedError(text)


@dataclass(eq=False)
class Pass:
    """One forward pass of the guarded model, as far as it has come."""

    outputs: weakref.ref[Tensor]
    version: int
    inputs: Tensor
    """Or the tensors of a call with several, which take its place."""
    model: Functional | None
    moved: str | None
    returned: list[weakref.ref[Tensor]]
    """All that the model returned: the outputs, and what stands beside them."""
    targets: Tensor = field(default_factory=lambda: torch.empty(0))
    versions: tuple[object, int] = (0, 0)
    factor: float | None = None


class Cut(torch.autograd.Function):
    """The loss as the loop sees it: its backward pass leaves the gradient to the guard, and to nobody else."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, value: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        ctx.take = take
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[None, None, None]:
        ctx.take(factor)
        return None, None, None


class Hook:
    """A hook of a guarded model. In a copy of the model, or one that was saved whole, it becomes a :class:`Ghost`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ghost, ()


class Ghost:
    """What is left of a guard in a copy: the copy may be evaluated, averaged and compared, but it does not train."""

    def __call__(self, model: nn.Module, *arguments: Any) -> None:
        hint = "this model is a copy of a guarded one and has no guard: protect it"
        for outputs in returned_tensors(arguments[-1]):
            if outputs.requires_grad and any(p.requires_grad for p in model.parameters()):
                outputs.register_hook(lambda _: refuse(hint))  # type: ignore[no-untyped-call]


def inputs_of_call(arguments: tuple[Any, ...], keywords: dict[str, Any], defense: Defense) -> Tensor:
    """What a guarded model is called with: one tensor, or several with a row for each example in all of them.

    Anything else could carry something of the examples past the defense, and is refused.
    """
    if len(arguments) == 1 and not keywords and isinstance(arguments[0], Tensor):
        return arguments[0]
    given = [one for one in (*arguments, *keywords.values()) if one is not None]
    rows = {len(one) if one.dim() else -1 for one in given if isinstance(one, Tensor)}
    if not given or not all(isinstance(one, Tensor) for one in given) or len(rows) != 1 or rows == {-1}:
        refuse(
            "a guarded model takes tensors of inputs, each with a row for every example: call it as model(inputs) or "
            "model(name=inputs, ...), and set everything else when you build it"
        )
    for link in links_of(defense):
        if not link.several_inputs and type(link) is not Defense:
            refuse(f"{type(link).__name__} works on one tensor of inputs: call the model as model(inputs)")
    return cast(Tensor, SeveralInputs(arguments, keywords))


def check_arguments(model: nn.Module, loss: Loss, defense: Defense, guarded: set[int]) -> None:
    """Refuse what is known before training. ``guarded`` are the parameters that have a guard, by id."""
    called = callable(loss) and not isinstance(loss, type)
    if not (isinstance(model, nn.Module) and isinstance(defense, Defense) and called):
        refuse("a guard takes a torch model, a loss function of outputs and targets, and a defense")
    if isinstance(model, DistributedDataParallel | DataParallel):
        refuse(f"{type(model).__name__} shares gradients before they are defended: protect a model without it")
    if isinstance(model, torch.jit.ScriptModule) or not any(p.requires_grad for p in model.parameters()):
        refuse("the model is compiled by torch.jit, or has no parameter to train: protect a plain one that has")
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        refuse("the loss has parameters of its own, which nobody would train: put them into the model")
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p) or not is_plain(p) or id(p) in guarded:
            refuse(f"parameter {name!r} has no finite real values yet, or has a guard already: close that one")
    check_model(defense, model)
    if defense.reshapes and not any(isinstance(layer, AddsToLoss) for layer in model.modules()):
        refuse("this defense changes the architecture: write model = defense.on_model(model) before the optimizer")
    remove_ghosts(model)  # a copy of a guarded model gets its own guard


def remove_ghosts(model: nn.Module) -> None:
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, Ghost)]:
            del hooks[key]


def changed_buffers(model: nn.Module, sent: Params, names: Collection[str]) -> list[str]:
    """Those that are not as the server sent them, or have none of these names.

    Counters are left out, and what follows from the weights.
    """
    buffers = dict(model.named_buffers())
    free = {name for name, b in buffers.items() if b.dim() == 0 and not b.is_floating_point()}
    for place, layer in model.named_modules():
        if isinstance(layer, _SpectralNorm):
            free |= {f"{place}.{name}" for name, _ in layer.named_buffers(recurse=False)}
    changed = differing(buffers, {name: buffer for name, buffer in sent.items() if name not in free})
    return changed + sorted(buffers.keys() - sent.keys() - free - set(names))


def joined(passes: list[Pass], defense: Defense) -> Batch:
    """All examples of some passes; the last ones where shapes differ and the defense looks at none of them."""
    try:
        return Batch(joined_inputs([one.inputs for one in passes]), torch.cat([one.targets for one in passes]))
    except RuntimeError:
        if not all(isinstance(link, Transform) or type(link) is Defense for link in links_of(defense)):
            refuse("batches of different shapes went backward before one step: pad them, or step on each")
        return Batch(passes[-1].inputs, passes[-1].targets)


def check_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    """A defense that begins with the examples computes the loss of each alone: nothing else may be in it.

    Of outputs and targets only shapes and types are used. An error that depends on private examples, and on what a
    model says of them, would tell a server, which can craft the model, that one of them is there.
    """
    rng, rows = generator(0, "examples for a loss"), torch.arange(len(targets), device=outputs.device) % 4
    kind = torch.promote_types(outputs.dtype, torch.float32)
    drawn = torch.rand((4, *outputs.shape[1:]), generator=rng).to(outputs.device, kind)
    numbers = torch.rand((4, *targets.shape[1:]), generator=rng)
    classes = torch.arange(4) % (outputs.shape[1] if outputs.dim() > 1 else 2)
    classes = classes.view(-1, *[1] * (targets.dim() - 1)).expand_as(numbers)
    wanted = (numbers if targets.is_floating_point() else classes).to(targets)
    failures = (RuntimeError, ValueError, IndexError)
    with torch.autocast(outputs.device.type, enabled=False), torch.autocast("cpu", enabled=False):
        try:
            whole = copied_loss(loss)(drawn[rows], wanted[rows])
        except failures:
            return  # it takes other numbers than these: nothing can be said of it
        if whole.requires_grad:
            refuse("the loss has a part of its own in parameters, which this defense would lose: use weight_decay")
        try:
            whole = copied_loss(loss)(drawn[rows[:4]], wanted[rows[:4]])
            each = [copied_loss(loss)(drawn[i : i + 1], wanted[i : i + 1]) for i in range(len(rows[:4]))]
        except failures as error:
            raise GradveilError("the loss cannot be computed of one example alone, which this defense needs") from error
    if not torch.allclose(whole, torch.stack(each).mean(), rtol=1e-3, atol=1e-6, equal_nan=True):
        refuse("the loss is not the mean over the examples, which this defense needs: no sums, no class weights")
