"""Losses that bypass the guard, and gradients that change between backward and step."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from guarded import Loop, Net
from misuses.table import misuse


@misuse("a plain loss", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
    loop.step()


@misuse("a guard that is thrown away and a plain loss", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    del loop.guard
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
    loop.step()


@misuse("a plain loss beside the guarded one", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    outputs = loop.model(loop.inputs)
    (loop.guard.loss(outputs, loop.targets) + outputs.square().mean()).backward()
    loop.step()


@misuse("a plain loss of another forward pass", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    guarded = loop.guard.loss(loop.model(loop.inputs), loop.targets)
    (guarded + F.cross_entropy(loop.model(loop.inputs), loop.targets)).backward()
    loop.step()


@misuse("a plain loss after the guarded one", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
    loop.step()


@misuse("a plain loss before the guarded one", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
    loop.backward()
    loop.step()


@misuse("a gradient from before protect", "refused")
def _(loop: Loop) -> None:
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
    loop.protect()
    loop.step()


@misuse("a penalty added to the loss", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    penalty = sum(p.square().sum() for p in loop.model.parameters())
    (loop.guard.loss(loop.model(loop.inputs), loop.targets) + 0.1 * penalty).backward()
    loop.step()


@misuse("a penalty that goes backward by itself", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    (0.1 * loop.model.head.weight.square().sum()).backward()
    loop.step()


@misuse("a loss times a parameter", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    (loop.guard.loss(loop.model(loop.inputs), loop.targets) * loop.model.head.bias.sum()).backward()
    loop.step()


@misuse("a loss that closes over parameters", "defended")
def _(loop: Loop) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + 0.1 * loop.model.head.weight.square().sum()

    loop.protect(loss=loss)
    loop.train()


@misuse("half the loss", "defended")
def _(loop: Loop) -> None:
    loop.protect()
    loop.least /= 2
    (0.5 * loop.guard.loss(loop.model(loop.inputs), loop.targets)).backward()
    loop.step()


@misuse("a loss times zero", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    (0 * loop.guard.loss(loop.model(loop.inputs), loop.targets)).backward()
    loop.step()


@misuse("a loss times minus one", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    (-loop.guard.loss(loop.model(loop.inputs), loop.targets)).backward()
    loop.step()


@misuse("a loss times NaN", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    (float("nan") * loop.guard.loss(loop.model(loop.inputs), loop.targets)).backward()
    loop.step()


@misuse("a loss times infinity", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    (float("inf") * loop.guard.loss(loop.model(loop.inputs), loop.targets)).backward()
    loop.step()


@misuse("one loss backward twice", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loss = loop.guard.loss(loop.model(loop.inputs), loop.targets)
    loss.backward(retain_graph=True)
    loss.backward()
    loop.step()


@misuse("two losses of one forward pass", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    outputs = loop.model(loop.inputs)
    loop.guard.loss(outputs, loop.targets).backward(retain_graph=True)
    loop.guard.loss(outputs, loop.targets).backward()
    loop.step()


@misuse("outputs of a copy", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    twin = Net()
    loop.guard.loss(twin(loop.inputs), loop.targets).backward()
    loop.step()


@misuse("detached outputs that get a gradient again", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    outputs = loop.model(loop.inputs)
    loop.guard.loss(outputs.detach().requires_grad_(), loop.targets).backward()
    outputs.backward(gradient=torch.softmax(outputs.detach(), 1))
    loop.step()


@misuse("outputs computed without gradients that get one", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    with torch.set_grad_enabled(False):
        outputs = loop.model(loop.inputs)
    loop.guard.loss(outputs.requires_grad_(), loop.targets).backward()
    loop.step()


@misuse("outputs changed before the loss", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.guard.loss(loop.model(loop.inputs) / 2, loop.targets).backward()
    loop.step()


@misuse("outputs changed in place before the loss", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    outputs = loop.model(loop.inputs)
    outputs.mul_(2)
    loop.guard.loss(outputs, loop.targets).backward()
    loop.step()


@misuse("some rows of the outputs", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.guard.loss(loop.model(loop.inputs)[:4], loop.targets[:4]).backward()
    loop.step()


@misuse("functional_call with other parameters", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    other = {name: (p.detach() + 1).requires_grad_() for name, p in loop.model.named_parameters()}
    loop.guard.loss(functional_call(loop.model, other, (loop.inputs,)), loop.targets).backward()
    loop.step()


@misuse("gradients clipped by norm", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
    loop.step()


@misuse("gradients clipped by value", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    nn.utils.clip_grad_value_(loop.model.parameters(), 1e-3)
    loop.step()


@misuse("an edit of p.grad", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    loop.model.head.weight.grad.mul_(2)
    loop.step()


@misuse("an edit of p.grad.data of one entry", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    loop.model.head.weight.grad.data[0, 0] = 7
    loop.step()


@misuse("p.grad exchanged", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    for name, p in loop.model.named_parameters():
        p.grad = 2 * loop.bare()[name]
    loop.step()


@misuse("p.grad taken from one parameter", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    loop.model.head.weight.grad = None
    loop.step()


@misuse("p.grad zeroed for one parameter", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    loop.model.head.weight.grad.zero_()
    loop.step()


@misuse("p.grad for a parameter that the loss does not use", "refused")
def _(loop: Loop) -> None:
    model = Net()
    model.spare = nn.Linear(6, 3)
    loop.protect(model)
    loop.backward()
    model.spare.weight.grad = torch.randn(3, 6)
    loop.step()


@misuse("p.grad set with no backward pass at all", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    for name, p in loop.model.named_parameters():
        p.grad = loop.bare()[name]
    loop.step()


@misuse("p.grad put back after guard.gradient()", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    bare = {name: p.grad.clone() for name, p in loop.model.named_parameters() if p.grad is not None}
    loop.guard.gradient()
    for name, p in loop.model.named_parameters():
        p.grad = bare[name]
    loop.step()


@misuse("a hook on a parameter that doubles its gradient", "defended")
def _(loop: Loop) -> None:
    loop.model.head.weight.register_hook(lambda g: 2 * g)
    loop.protect()
    loop.train()


@misuse("a hook on a module that changes gradients", "defended")
def _(loop: Loop) -> None:
    loop.protect()
    loop.model.head.register_full_backward_hook(lambda _m, into, _out: (2 * into[0],))
    loop.train()


@misuse("a hook on the outputs that changes their gradient", "defended")
def _(loop: Loop) -> None:
    loop.protect()
    outputs = loop.model(loop.inputs)
    outputs.register_hook(lambda g: 2 * g)
    loop.guard.loss(outputs, loop.targets).backward()
    loop.step()


@misuse("a hook after accumulation that changes the gradient", "refused")
def _(loop: Loop) -> None:
    def double(p: Tensor) -> None:
        p.grad = 2 * p.grad  # type: ignore[operator,assignment]

    for p in loop.model.parameters():
        p.register_post_accumulate_grad_hook(double)
    loop.protect()
    loop.train()


@misuse("parameters frozen between backward and step", "defended")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    loop.model.head.requires_grad_(False)
    loop.step()


@misuse("all parameters frozen between backward and step", "defended")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    loop.model.requires_grad_(False)
    loop.step()


@misuse("unequal micro-batches without weights", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    for part in (slice(0, 2), slice(2, 8)):
        loop.guard.loss(loop.model(loop.inputs[part]), loop.targets[part]).backward()
    loop.step()


@misuse("micro-batches with weights that are not their sizes", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    for part, weight in ((slice(0, 4), 0.9), (slice(4, 8), 0.1)):
        (weight * loop.guard.loss(loop.model(loop.inputs[part]), loop.targets[part])).backward()
    loop.step()


@misuse("inputs overwritten between backward and step", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    loop.inputs.zero_()
    loop.step()


@misuse("targets overwritten between backward and step", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    loop.targets.zero_()
    loop.step()


@misuse("a gradient that is exactly zero", "defended")
def _(loop: Loop) -> None:
    loop.protect(loss=lambda outputs, _targets: (0 * outputs).mean())
    loop.train()


@misuse("a gradient that is exactly zero in one layer", "defended")
def _(loop: Loop) -> None:
    nn.init.zeros_(loop.model.head.weight)
    loop.protect()
    loop.train()


@misuse("a loss for each example", "refused")
def _(loop: Loop) -> None:
    loop.protect(loss=nn.CrossEntropyLoss(reduction="none"))
    loop.guard.loss(loop.model(loop.inputs), loop.targets).mean().backward()
    loop.step()


@misuse("a loss that is NaN", "refused", under=("noise",))
def _(loop: Loop) -> None:
    loop.protect(loss=lambda outputs, targets: F.cross_entropy(outputs, targets) + outputs.sum() * float("nan"))
    loop.train()


@misuse("sparse gradients", "defended")
def _(loop: Loop) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(24, 3))
    loop.inputs = torch.randint(10, (8, 6), generator=torch.Generator().manual_seed(0))
    loop.protect(model)
    loop.train()


@misuse("autocast around backward and step", "defended")
def _(loop: Loop) -> None:
    loop.protect()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loop.train()


@misuse("a backward pass into chosen parameters", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.guard.loss(loop.model(loop.inputs), loop.targets).backward(inputs=[loop.model.head.weight])
    loop.step()


@misuse("a loss with parameters of its own", "refused")
def _(loop: Loop) -> None:
    """The guard takes the gradient in the model's parameters only: these would stay untrained without a word."""

    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heat = nn.Parameter(torch.ones(()))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs / self.heat, targets)

    loop.protect(loss=Tempered())
    loop.train()


@misuse("a trace of the model", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.guard.loss(torch.fx.symbolic_trace(loop.model)(loop.inputs), loop.targets).backward()
    loop.step()


@misuse("a trace of the model and a plain loss", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    F.cross_entropy(torch.fx.symbolic_trace(loop.model)(loop.inputs), loop.targets).backward()
    loop.step()


@misuse("p.grad moved to another parameter of its shape", "refused")
def _(loop: Loop) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    loop.protect(model)
    loop.backward()
    model[0].weight.grad, model[2].weight.grad = model[2].weight.grad, model[0].weight.grad
    loop.step()


@misuse("a penalty on activations beside the guarded loss", "defended")
def _(loop: Loop) -> None:
    """Torch refuses the backward pass, as the guard has gone through the graph. A loop may step all the same."""
    loop.protect()
    seen: list[Tensor] = []
    loop.model.first.register_forward_hook(lambda _m, _in, out: seen.append(out))
    loss = loop.guard.loss(loop.model(loop.inputs), loop.targets)
    with suppress(RuntimeError):
        (loss + seen[0].square().mean()).backward()
    loop.step()


@misuse("a penalty on activations inside the loss", "defended")
def _(loop: Loop) -> None:
    seen: list[Tensor] = []
    loop.model.first.register_forward_hook(lambda _m, _in, out: seen.append(out))
    loop.protect(loss=lambda outputs, targets: F.cross_entropy(outputs, targets) + seen[-1].square().mean())
    loop.train()


@misuse("inputs that ask for a gradient", "refused")
def _(loop: Loop) -> None:
    """The gradient in the inputs is bare: no defense has seen it."""
    loop.inputs = loop.inputs.clone().requires_grad_()
    loop.protect()
    loop.train()


@misuse("an encoder before the guarded model that trains with its loss", "refused")
def _(loop: Loop) -> None:
    encoder = nn.Linear(6, 6)
    own = torch.optim.SGD(encoder.parameters(), lr=0.125)
    loop.protect()
    loop.guard.loss(loop.model(encoder(loop.inputs)), loop.targets).backward()
    own.step()
    loop.step()
