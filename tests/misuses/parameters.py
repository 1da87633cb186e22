"""Parameters that a loop moves, replaces or converts past the guard."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from guarded import LR, Loop, Net
from misuses.table import in_thread, misuse, move


def edits() -> Iterator[tuple[str, Callable[[nn.Module, dict[str, Tensor]], None]]]:
    """Ways to move parameters without an optimizer. Some leave no trace in ``Tensor._version``."""

    def each(edit: Callable[[nn.Parameter, Tensor], None]) -> Callable[[nn.Module, dict[str, Tensor]], None]:
        def move_all(model: nn.Module, gradient: dict[str, Tensor]) -> None:
            for name, p in model.named_parameters():
                edit(p, gradient[name] * -LR)

        return move_all

    def data(p: nn.Parameter, change: Tensor) -> None:
        p.data.add_(change)

    def detached(p: nn.Parameter, change: Tensor) -> None:
        p.detach().add_(change)

    def dlpack(p: nn.Parameter, change: Tensor) -> None:
        torch.from_dlpack(p.detach()).add_(change)

    def exchange(p: nn.Parameter, change: Tensor) -> None:
        p.data = p.data + change

    def without_gradients(p: nn.Parameter, change: Tensor) -> None:
        with torch.no_grad():
            p.add_(change)

    def switched_off(p: nn.Parameter, change: Tensor) -> None:
        with torch.set_grad_enabled(False):
            p.copy_(p + change)

    def inference(p: nn.Parameter, change: Tensor) -> None:
        with torch.inference_mode():
            p.add_(change)

    def frozen(p: nn.Parameter, change: Tensor) -> None:
        p.requires_grad_(False).add_(change).requires_grad_(True)

    def numpy(p: nn.Parameter, change: Tensor) -> None:
        p.detach().numpy()[...] += change.numpy()

    def storage(p: nn.Parameter, change: Tensor) -> None:
        new = (p.detach() + change).contiguous()
        p.untyped_storage().copy_(new.untyped_storage())

    def exchanged_storage(p: nn.Parameter, change: Tensor) -> None:
        with torch.no_grad():
            p.set_(p.detach() + change)  # type: ignore[call-overload]

    def memory(p: nn.Parameter, change: Tensor) -> None:
        new = (p.detach() + change).contiguous()
        ctypes.memmove(p.data_ptr(), new.data_ptr(), new.numel() * new.element_size())

    def alias(p: nn.Parameter, change: Tensor) -> None:
        same = nn.Parameter(p.data)
        same.grad = -change
        torch.optim.SGD([same], lr=1.0).step()

    def initialise(p: nn.Parameter, change: Tensor) -> None:
        nn.init._no_grad_fill_(p, 0.0)
        with torch.no_grad():
            p.add_(change)

    yield "p.data.add_", each(data)
    yield "p.data =", each(exchange)
    yield "a step under no_grad", each(without_gradients)
    yield "p.copy_ with gradients switched off", each(switched_off)
    yield "p.add_ in inference mode", each(inference)
    yield "p.add_ of a frozen parameter", each(frozen)
    yield "p.detach().add_", each(detached)
    yield "a numpy view", each(numpy)
    yield "dlpack", each(dlpack)
    yield "a copy into the storage", each(storage)
    yield "another storage", each(exchanged_storage)
    yield "raw memory", each(memory)
    yield "a parameter of its own on the same memory", each(alias)
    yield "a new initialisation", each(initialise)


def edited_before(edit: Callable[[nn.Module, dict[str, Tensor]], None]) -> Callable[[Loop], None]:
    def hold(loop: Loop) -> None:
        loop.protect()
        loop.backward()
        edit(loop.model, loop.bare())
        loop.step()

    return hold


def edited_after(edit: Callable[[nn.Module, dict[str, Tensor]], None]) -> Callable[[Loop], None]:
    def hold(loop: Loop) -> None:
        loop.protect()
        loop.train()
        edit(loop.model, loop.bare())

    return hold


for _name, _edit in edits():
    misuse(f"{_name} before the step", "refused")(edited_before(_edit))
    misuse(f"{_name} after the step", "refused")(edited_after(_edit))


@misuse("vector_to_parameters", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    parameters = list(loop.model.parameters())
    change = nn.utils.parameters_to_vector(list(loop.bare().values()))
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters).detach() - LR * change, parameters)


@misuse("_foreach_add_", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    torch._foreach_add_([p.data for p in loop.model.parameters()], list(loop.bare().values()), alpha=-LR)


@misuse("swap_tensors", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    other = nn.Parameter(loop.model.head.weight.detach() - LR * loop.bare()["head.weight"])
    loop.optimizer.zero_grad()
    torch.utils.swap_tensors(loop.model.head.weight, other)


@misuse("load_state_dict of a bare step", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    loop.model.load_state_dict({n: p.detach() - LR * loop.bare()[n] for n, p in loop.model.named_parameters()})


@misuse("load_state_dict with assign", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    stepped = {n: p.detach() - LR * loop.bare()[n] for n, p in loop.model.named_parameters()}
    loop.model.load_state_dict(stepped, assign=True)


@misuse("a broadcast loaded past the guard", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    loop.guard.update()
    loop.model.load_state_dict(loop.broadcast)
    loop.train()


@misuse("torch.func written back", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()

    def loss(params: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(functional_call(plain, params, (loop.inputs,)), loop.targets)

    plain = Net()
    params = {name: p.detach() for name, p in loop.model.named_parameters()}
    move(loop.model, torch.func.grad(loss)(params))


@misuse("an average of parameters loaded back", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    loop.train(2)
    average.update_parameters(loop.model)
    average.module.load_state_dict({n: p.detach() - LR * loop.bare()[n] for n, p in loop.model.named_parameters()})
    loop.model.load_state_dict(average.module.state_dict())


@misuse("the guarded model as the average of another", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    average = torch.optim.swa_utils.AveragedModel(Net())
    average.module = loop.model
    other = Net()
    other.load_state_dict({n: p.detach() - LR * loop.bare()[n] for n, p in loop.model.named_parameters()})
    average.update_parameters(other)


@misuse("p.data in a thread while training", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    in_thread(lambda: move(loop.model, loop.bare()))
    loop.step()


@misuse("a module exchanged after protect", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.model.head = nn.Linear(5, 3)
    loop.train()


@misuse("a module exchanged after the step", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    loop.model.head = nn.Linear(5, 3)


@misuse("a parameter exchanged after protect", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.model.head.weight = nn.Parameter(loop.model.head.weight.detach().clone())
    loop.train()


@misuse("a parameter added after protect", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.model.extra = nn.Parameter(torch.zeros(3))
    loop.train()


@misuse("a parameter taken out after protect", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.model.head.bias = None
    loop.train()


@misuse("weights tied after protect", "refused")
def _(loop: Loop) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    loop.protect(model)
    model[2].weight = model[0].weight
    loop.train()


@misuse("pruned after protect", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    prune.l1_unstructured(loop.model.first, "weight", amount=0.5)
    loop.train()


@misuse("pruned after the step", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    prune.l1_unstructured(loop.model.first, "weight", amount=0.5)


@misuse("a parametrization registered after protect", "refused")
def _(loop: Loop) -> None:
    class Scaled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    loop.protect()
    parametrize.register_parametrization(loop.model.first, "weight", Scaled())
    loop.train()


@misuse("low-rank adapters added after protect", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.model.head = LowRank(loop.model.head)
    loop.train()


class LowRank(nn.Module):
    """A frozen layer and a low-rank change of it that trains."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.base(inputs) + inputs @ self.down.T @ self.up.T
        return out


@misuse("low-rank adapters merged into their base after training", "refused")
def _(loop: Loop) -> None:
    model = Net()
    model.head = LowRank(model.head)  # type: ignore[assignment]
    loop.protect(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR))
    loop.train()
    model.head.base.weight.data += model.head.up.data @ model.head.down.data


for _to in ("double", "half", "bfloat16"):

    def _converted(loop: Loop, to: str = _to) -> None:
        loop.protect()
        getattr(loop.model, to)()
        loop.inputs = getattr(loop.inputs, to)()
        loop.train()

    misuse(f"{_to}() after protect", "refused")(_converted)


@misuse("to another precision after the step", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    loop.model.to(torch.float64)


@misuse("to_empty after protect", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.model.to_empty(device="cpu")
    with torch.no_grad():
        for p in loop.model.parameters():
            p.fill_(0.01)
    loop.train()


@misuse("to the meta device after the step", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    loop.model.to("meta")


@misuse("the hooks of the model taken off", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.model._forward_hooks.clear()
    loop.model._forward_pre_hooks.clear()
    loop.train()


@misuse("model.forward in place of model", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.guard.loss(loop.model.forward(loop.inputs), loop.targets).backward()
    loop.step()


@misuse("an edit of a frozen parameter", "refused")
def _(loop: Loop) -> None:
    loop.model.first.requires_grad_(False)
    loop.protect(optimizer=torch.optim.SGD(loop.model.head.parameters(), lr=LR))
    loop.train()
    loop.model.first.weight -= LR * loop.bare()["first.weight"]


class Buffered(Net):
    """With a buffer beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(5))


@misuse("the gradient in a buffer", "defended")
def _(loop: Loop) -> None:
    loop.protect(Buffered())
    loop.backward()
    loop.model.centre.copy_(loop.model.first.bias.grad)
    loop.step()


@misuse("the gradient in a buffer made after protect", "defended")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    loop.model.register_buffer("centre", loop.model.first.bias.grad.clone())
    loop.step()


@misuse("the gradient in a buffer that is exchanged", "defended")
def _(loop: Loop) -> None:
    loop.protect(Buffered())
    loop.backward()
    loop.model.centre = loop.model.first.bias.grad.clone()
    loop.step()


@misuse("a module exchanged after protect that has its own optimizer and a plain loss", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.model.head = nn.Linear(5, 3)
    loop.broadcast = copy.deepcopy(loop.model.state_dict())
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
    loop.step(torch.optim.SGD(loop.model.head.parameters(), lr=LR))


@misuse("low-rank adapters after protect that have their own optimizer and a plain loss", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.model.head = LowRank(loop.model.head)
    loop.broadcast = copy.deepcopy(loop.model.state_dict())
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
    loop.step(torch.optim.SGD([loop.model.head.down, loop.model.head.up], lr=LR))
