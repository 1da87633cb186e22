"""Gradients of single examples: through one network where that serves, by vmap, or one after another.

What defenses promise rests on this file: no example reaches the gradient of another. A check decides about speed alone.
"""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from types import CellType, FunctionType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.trees import map_each, stack
from gradveil.core.types import Batch, Loss, Params
from gradveil.engine import products
from gradveil.engine.agreement import FEW, agree, random_inputs, same_tensors
from gradveil.engine.graphs import without_tf32
from gradveil.engine.network import (
    LayerPass,
    SeparateNetwork,
    SharedNetwork,
    UnsupportedError,
    gradients,
    without_outputs,
)
from gradveil.models import Functional

T = TypeVar("T")
S = TypeVar("S", bound="LocalLoss")
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
"""What torch raises where vmap, or a layer rule, cannot do what a model does."""
_TORCHS_OWN = {"aten", "flex_lib"}
"""Namespaces of operations whose batching rules are of torch; torch.compile loads the second."""
_FEW_WEIGHTS = "with so few weights it is quicker to form the gradient of every example"


class _PerThread(threading.local):
    """Of each thread its own: what is kept may hold a CUDA graph, which two threads must not replay at once."""

    def __init__(self) -> None:
        self.by_module: WeakKeyDictionary[nn.Module, dict[Hashable, Any]] = WeakKeyDictionary()


_memory = _PerThread()


def cached(module: nn.Module, key: Hashable, make: Callable[[], T]) -> T:
    """What ``make()`` gave in this thread when it was first asked for this model and key.

    It lives as long as the model, and must not hold it: neither would ever go.
    """
    known = _memory.by_module.setdefault(module, {})
    if key not in known:
        known[key] = make()
    found: T = known[key]
    return found


@dataclass(frozen=True, kw_only=True)
class LocalLoss:
    """The loss of a client's examples at its parameters, and the gradients of that loss."""

    model: Functional
    loss: Loss
    params: Params
    """What is trained, as it is before this step."""
    frozen: Params = field(default_factory=dict)
    """The model's other parameters: they are not trained and have no gradient."""
    batch: Batch
    """The examples of this step."""

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


def example_gradients(step: LocalLoss, batch: Batch) -> Params:
    """The gradient of each of these examples by itself, [n, ...] by name.

    A large model takes them through shared weights, others by vmap. Some models do not go through vmap, such as one
    with a GRU. Their examples go one after another.
    """
    passed = example_pass(step, batch)
    if passed is not None:
        with torch.no_grad():
            return trained_gradients(step, passed)
    refused: list[bool] = cached(step.model.module, "refused by vmap", list)
    if not refused and not has_own_batching_rules():
        try:  # with a copy each time: what a model remembers of these examples must not reach the next
            return _copied(step).example_gradients(batch)
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            found = one_by_one(step, batch)
            refused.append(True)
            return found
    return one_by_one(step, batch)


def example_pass(step: LocalLoss, batch: Batch) -> LayerPass | None:
    """One pass with each example as a problem of its own: outputs [n, 1, classes], and what gradients are made of.

    None where ``why_not_shared`` has a reason, or if the model takes another way in this pass than when it was checked.
    """
    if why_not_shared(step):
        return None
    try:
        passed = _pass_alone(step, batch)
    except UnsupportedError:
        return None
    return passed if products.pays_off(passed, step.params.keys()) else None


def _pass_alone(step: LocalLoss, batch: Batch) -> LayerPass:
    """The model and the loss are copied for each pass, because they may remember examples."""
    network = SeparateNetwork(step.model.module, {**step.frozen, **step.params}, train_mode=None)
    alone = batch.inputs.detach().clone().unsqueeze(1)  # a copy: the model may edit it in place
    with torch.enable_grad():
        return network.differentiate(copied_loss(step.loss), alone, batch.labels.unsqueeze(1))


def trained_gradients(step: LocalLoss, passed: LayerPass) -> Params:
    """The gradient of each problem in what the step trains, [N, ...] by name; zeros where no example reaches."""
    found = gradients(passed, step.params.keys())
    return {
        name: found[name] if name in found else parameter.new_zeros(passed.problems, *parameter.shape)
        for name, parameter in step.params.items()
    }


def why_not_shared(step: LocalLoss) -> str:
    """Why the examples of a step cannot or need not share the weights of the model; empty if they do."""
    inputs: object = step.batch.inputs
    if not isinstance(inputs, Tensor):
        return "the model takes several inputs"
    if sum(tensor.numel() for tensor in step.params.values()) < products.PAYS_OFF:
        return _FEW_WEIGHTS
    if len({tensor.device for tensor in (*step.frozen.values(), *step.params.values())}) > 1:
        return "the model is spread over several devices"
    own = dict(step.model.module.named_buffers())
    if any(not torch.equal(own[name], buffer) for name, buffer in step.model.buffers.items()):
        return "the batch has draws of its own"
    if has_own_batching_rules():
        return "an operation has a vmap rule of its own, which sees all examples at once"

    def checked() -> str:
        try:
            return _complaint(step)
        except torch.OutOfMemoryError:
            raise
        except (*FAILURES, UnsupportedError) as error:
            return f"the layer rules do not serve this model: {error}"

    # A model may call its layers more often for inputs of another shape.
    inputs = step.batch.inputs
    kind = ("layer rules", tuple(step.params), inputs.shape[1:], inputs.dtype, inputs.device)
    return cached(step.model.module, kind, checked)


def _complaint(step: LocalLoss) -> str:
    """Why the layer rules do not serve this model, judged by a few random inputs; empty if they do.

    Code may go around its layers: then the rules miss a part of the gradient. A branch may be dead at the parameters
    of this step, such as one behind a layer of zeros, so others nearby are tried as well. No private example takes
    part: one must not decide how all others are treated.

    Nothing in a guarantee rests on this. Examples pass under vmap, so whatever the rules give an example is its own.
    """
    own, rng = step.batch, generator(0, "beside these parameters")
    drawn = random_inputs(own.inputs.shape[1:]).to(own.inputs)
    labels = torch.zeros_like(own.labels[:1]).repeat_interleave(FEW, dim=0)
    if labels.is_floating_point():
        labels = torch.rand(labels.shape, generator=rng).to(labels)

    def nearby(parameter: Tensor) -> Tensor:
        entering = max(1, parameter[:1].numel()) if parameter.dim() > 1 else 1  # inputs of one output; 1 for a bias
        moved: Tensor = parameter + (0.1 * torch.randn(parameter.shape, generator=rng)).to(parameter) / entering**0.5
        return moved

    beside = replace(step, params=map_each(nearby, step.params))
    with without_tf32():
        if not products.pays_off(_pass_alone(step, Batch(drawn, labels)), step.params.keys()):
            return _FEW_WEIGHTS
    for at in (step, beside):

        def same(point: Params, at: LocalLoss = at) -> bool:
            some = Batch(point["inputs"], labels)
            with torch.no_grad():
                found = trained_gradients(at, _pass_alone(at, some))
            return same_tensors(found, _copied(at).example_gradients(some))

        if not agree(same, {"inputs": drawn}):
            return "the layer rules do not give the gradients of this model's examples"
    return ""


def shared_gradients(
    module: nn.Module, sent: Params, loss: Loss, *, train_mode: bool, shape: tuple[int, ...], classes: int
) -> Callable[[Tensor, Tensor], Params] | None:
    """(inputs [c, ...], labels [c]) -> the gradient of each candidate alone, [c, ...] by name, at the broadcast.

    One pass of a batch through the shared weights serves all candidates, which are of a ``shape`` and of so many
    ``classes``. None where the model's layers forbid that, or where it does not give what backward gives: code may go
    around its layers, or edit what left them.
    """

    def through(network: SharedNetwork, inputs: Tensor, labels: Tensor) -> Params:
        with without_tf32(), torch.enable_grad():
            passed = network.differentiate(loss, inputs.unsqueeze(1).requires_grad_(), labels.unsqueeze(1))
        with without_tf32(), torch.no_grad():
            return gradients(passed)

    def checked() -> bool:
        """In eval mode, for one example may be too few for batch norm."""
        start, model = next(iter(sent.values())), Functional(module)
        network = SharedNetwork(module, sent, train_mode=False)
        labels = torch.arange(FEW, device=start.device) % classes

        def same(point: Params) -> bool:
            each = [Batch(point["inputs"][i : i + 1], labels[i : i + 1]) for i in range(FEW)]
            alone = [LocalLoss(model=model, loss=loss, params=sent, batch=one).gradient() for one in each]
            return same_tensors(through(network, point["inputs"], labels), stack(alone))

        return agree(same, {"inputs": random_inputs(shape).to(start)})

    try:
        network = SharedNetwork(module, sent, train_mode=train_mode)
        agrees = cached(module, "shared gradients", checked)
    except UnsupportedError:
        return None
    return (lambda inputs, labels: through(network, inputs, labels)) if agrees else None


def one_by_one(step: LocalLoss, batch: Batch) -> Params:
    """The gradient of every example, [n, ...] by name, by a loop of plain backward passes: slow, for any model."""
    params = {name: parameter.detach().requires_grad_() for name, parameter in step.params.items()}
    before, found = _random_states(batch.inputs.device), []
    for place in range(len(batch)):
        alone = Batch(batch.inputs[place : place + 1].clone(), batch.labels[place : place + 1])
        try:
            fresh = _copied(step)  # for each: what a model remembers of one example must not reach the next
            with torch.enable_grad():
                each = torch.autograd.grad(
                    fresh.loss_at(params, alone), list(params.values()), allow_unused=True, materialize_grads=True
                )
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            raise GradveilError(
                "the gradient of one example alone cannot be taken, which this defense needs: "
                + (str(error) or type(error).__name__).splitlines()[0][:160]
            ) from error
        found.append(each)
    if before != _random_states(batch.inputs.device):
        # Later examples would draw other numbers if an earlier one were not there: each would move all of them.
        raise GradveilError(
            "the model draws random numbers, and gradients of single examples allow none: use eval mode, or a rate of "
            "0 for dropout by a function (that of layers and of attention is off already)"
        )
    dense = [[tensor.to_dense() for tensor in each] for each in found]
    return {name: torch.stack(each) for name, each in zip(params, zip(*dense, strict=True), strict=True)}


def has_own_batching_rules() -> bool:
    """Whether somebody has given an operation a rule for vmap, which gets all examples and may mix them.

    Nobody can see whether a model will call it, so any in this process counts. Rules of torch itself are trusted.
    """
    found = list(torch.autograd.Function.__subclasses__())
    for kind in found:
        found += kind.__subclasses__()  # the list grows while it is read
    plain = torch.autograd.Function.vmap
    rules = [kind for kind in found if kind.vmap is not plain and not kind.generate_vmap_rule]
    operations = torch._C._dispatch_get_registrations_for_dispatch_key("FuncTorchBatched")  # those of C++ as well
    return any(not f"{rule.__module__}.".startswith(("torch.", "gradveil.")) for rule in rules) or any(
        name.partition("::")[0] not in _TORCHS_OWN for name in operations
    )


def _copied(step: S) -> S:
    """The step with a copy of model and loss, which shares the parameters and forgets outputs of a pass before."""
    tensors = (*step.model.module.parameters(), *step.model.params.values(), *step.model.frozen.values())
    memo = {id(tensor): tensor for tensor in tensors} | without_outputs(step.model.module)
    return replace(step, model=copy.deepcopy(step.model, memo), loss=copied_loss(step.loss))


def copied_loss(loss: Loss) -> Loss:
    """A loss that remembers examples does so in the copy: in attributes, in buffers, in modules that a function uses.

    Nothing else that a function uses is copied.
    """
    try:
        if not isinstance(loss, FunctionType) or not loss.__closure__:
            return copy.deepcopy(loss)  # a function is its own copy
        used = [cell.cell_contents for cell in loss.__closure__]
        cells = [CellType(copy.deepcopy(one)) if isinstance(one, nn.Module) else CellType(one) for one in used]
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:80]
        raise GradveilError(
            f"the loss cannot be copied, and might remember examples: give a function, or a plain object ({reason})"
        ) from error
    copied = FunctionType(loss.__code__, loss.__globals__, loss.__name__, loss.__defaults__, tuple(cells))
    copied.__kwdefaults__ = loss.__kwdefaults__
    return copied


def _random_states(device: torch.device) -> list[object]:
    """Those of torch, numpy and Python, which all code in a process shares."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        kind = torch.get_device_module(device)
        states += kind.get_rng_state_all() if hasattr(kind, "get_rng_state_all") else [kind.get_rng_state()]
    others = [random.getstate(), pickle.dumps(np.random.get_state())]  # noqa: NPY002
    return [*others, *(state.tolist() for state in states)]
