"""What defenses share: gradients of single examples, through one network where it serves, and a memory by model."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from types import CellType, FunctionType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from gradveil import joint
from gradveil.core.errors import GradveilError
from gradveil.core.precise import without_tf32
from gradveil.core.seeding import generator
from gradveil.core.trees import map_each
from gradveil.core.types import Batch, Loss, Params
from gradveil.defenses.base import Step
from gradveil.joint import moments

T = TypeVar("T")
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


def remembered(module: nn.Module, key: Hashable, make: Callable[[], T]) -> T:
    """What ``make()`` gave in this thread when it was first asked for this model and key.

    It lives as long as the model, and must not hold it: neither would ever go.
    """
    known = _memory.by_module.setdefault(module, {})
    if key not in known:
        known[key] = make()
    found: T = known[key]
    return found


def network_of(step: Step) -> joint.SharedNetwork:
    """The model at the parameters of a step; raises UnsupportedError where its examples cannot or need not share it."""
    if not isinstance(step.batch.inputs, Tensor):
        raise joint.UnsupportedError("the model takes several inputs")
    if sum(tensor.numel() for tensor in step.params.values()) < moments.WORTH:
        raise joint.UnsupportedError(_FEW_WEIGHTS)
    if len({tensor.device for tensor in (*step.frozen.values(), *step.params.values())}) > 1:
        raise joint.UnsupportedError("the model is spread over several devices")
    own = dict(step.model.module.named_buffers())
    if any(not torch.equal(own[name], buffer) for name, buffer in step.model.buffers.items()):
        raise joint.UnsupportedError("the batch has draws of its own")
    if has_own_batching_rules():
        raise joint.UnsupportedError("an operation has a vmap rule of its own, which sees all examples at once")

    def judged() -> str:
        try:
            return _complaint(step)
        except torch.OutOfMemoryError:
            raise
        except (*FAILURES, joint.UnsupportedError) as error:
            return f"the layer rules do not serve this model: {error}"

    # A model may call its layers more often for inputs of another shape.
    inputs = step.batch.inputs
    kind = ("layer rules", tuple(step.params), inputs.shape[1:], inputs.dtype, inputs.device)
    complaint = remembered(step.model.module, kind, judged)
    if complaint:
        raise joint.UnsupportedError(complaint)
    return _separate(step)


def forward_backward(
    network: joint.SharedNetwork, step: Step, batch: Batch
) -> tuple[Tensor, list[joint.Call], tuple[Tensor, ...]]:
    """What the model says of each example alone, [n, classes], and what the gradient of each is made of."""
    with torch.enable_grad():
        alone = batch.inputs.detach().clone().unsqueeze(1)  # a copy: the model may edit it in place
        says, calls, slopes = network.derived(copied_loss(step.loss), alone, batch.labels.unsqueeze(1))
    return says[:, 0].detach(), calls, slopes


def gradients(step: Step, calls: list[joint.Call], slopes: tuple[Tensor, ...], problems: int) -> Params:
    """The gradient of each problem in what the step trains, [N, ...] by name; zeros where no example reaches."""
    found = joint.gradients(calls, slopes, problems, step.params.keys())
    return {
        name: found[name] if name in found else parameter.new_zeros(problems, *parameter.shape)
        for name, parameter in step.params.items()
    }


class ExampleGradients:
    """Gradients of single examples of a step: a large model takes them through shared weights, others by vmap.

    Some models do not go through vmap, such as one with a GRU. Their examples go one after another.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        try:
            network_of(step)
            self._through_rules = True
        except joint.UnsupportedError:
            self._through_rules = False

    def gradients(self, batch: Batch) -> Params:
        """That of every one of these examples, [n, ...] by name."""
        step, module = self._step, self._step.model.module
        if self._through_rules:
            _, calls, slopes = forward_backward(network_of(step), step, batch)
            with torch.no_grad():
                return gradients(step, calls, slopes, len(batch))
        refused: list[bool] = remembered(module, "refused by vmap", list)
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


def one_by_one(step: Step, batch: Batch) -> Params:
    """The gradient of every example, [n, ...] by name, by a loop of plain backward passes: slow, for any model."""
    params = {name: parameter.detach().requires_grad_() for name, parameter in step.params.items()}
    before, found = _random_states(batch.inputs.device), []
    for place in range(len(batch)):
        alone = Batch(batch.inputs[place : place + 1].clone(), batch.labels[place : place + 1])
        try:
            fresh = _copied(step)  # for each: what a model remembers of one example must not reach the next
            with torch.enable_grad():
                slopes = torch.autograd.grad(
                    fresh.loss_at(params, alone), list(params.values()), allow_unused=True, materialize_grads=True
                )
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            raise GradveilError(
                "the gradient of one example alone cannot be taken, which this defense needs: "
                + (str(error) or type(error).__name__).splitlines()[0][:160]
            ) from error
        found.append(slopes)
    if before != _random_states(batch.inputs.device):
        # Later examples would draw other numbers if an earlier one were not there: each would move all of them.
        raise GradveilError(
            "the model draws random numbers, and gradients of single examples allow none: use eval mode, or a rate of "
            "0 for dropout by a function (that of layers and of attention is off already)"
        )
    dense = [[slope.to_dense() for slope in slopes] for slopes in found]
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


def _copied(step: Step) -> Step:
    """The step with a copy of model and loss, which shares the parameters and forgets outputs of a pass before."""
    tensors = (*step.model.module.parameters(), *step.model.params.values(), *step.model.frozen.values())
    attributes = [value for layer in step.model.module.modules() for value in vars(layer).values()]
    outputs = [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]
    memo = {id(tensor): tensor for tensor in tensors} | {id(value): value.new_empty(0) for value in outputs}
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


def _separate(step: Step) -> joint.SharedNetwork:
    return joint.SeparateNetwork(_copied(step).model.module, {**step.frozen, **step.params}, train_mode=None)


def _complaint(step: Step) -> str:
    """Why the layer rules do not serve this model, judged by a few random inputs; empty if they do.

    Code may go around its layers: then the rules miss a part of the gradient. A branch may be dead at the parameters
    of this step, such as one behind a layer of zeros, so others nearby are tried as well. No private example takes
    part: one must not decide how all others are treated.

    Nothing in a guarantee rests on this. Examples pass under vmap, so whatever the rules give an example is its own.
    """
    own, rng = step.batch, generator(0, "beside these parameters")
    drawn = joint.random_inputs(own.inputs.shape[1:]).to(own.inputs)
    labels = torch.zeros_like(own.labels[:1]).repeat_interleave(joint.FEW, dim=0)
    if labels.is_floating_point():
        labels = torch.rand(labels.shape, generator=rng).to(labels)

    def nearby(parameter: Tensor) -> Tensor:
        entering = max(1, parameter[:1].numel()) if parameter.dim() > 1 else 1  # inputs of one output; 1 for a bias
        moved: Tensor = parameter + (0.1 * torch.randn(parameter.shape, generator=rng)).to(parameter) / entering**0.5
        return moved

    beside = map_each(nearby, step.params)
    with without_tf32():
        _, calls, _ = forward_backward(_separate(step), step, Batch(drawn, labels))
        if not moments.worth(calls, joint.FEW, step.params.keys()):
            return _FEW_WEIGHTS
        for at in (step, replace(step, params=beside)):
            network = _separate(at)

            def right(point: Params, at: Step = at, network: joint.SharedNetwork = network) -> bool:
                some = Batch(point["inputs"], labels)
                _, calls, slopes = forward_backward(network, at, some)
                with torch.no_grad():
                    found = gradients(at, calls, slopes, joint.FEW)
                return joint.same_gradients(found, _copied(at).example_gradients(some))

            if not joint.agree_nearby(right, {"inputs": drawn}):
                return "the layer rules do not give the gradients of this model's examples"
    return ""
