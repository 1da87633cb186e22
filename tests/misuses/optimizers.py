"""Optimizers that the guard does not know, that remember bare gradients, or that step in their own way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from guarded import LR, Left, Loop, Net
from misuses.table import in_thread, misuse, move


@misuse("an optimizer made anew", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=LR)
    loop.train()


@misuse("an optimizer made anew in the second round", "refused")
def _(loop: Loop) -> None:
    guard = loop.protect()
    loop.train()
    guard.update()
    guard.new_round(loop.broadcast)
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=LR)
    loop.train()


@misuse("an optimizer made anew and a plain loss", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
    loop.step(torch.optim.SGD(loop.model.parameters(), lr=LR))


@misuse("a fused optimizer made anew", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    loop.step(torch.optim.SGD(loop.model.parameters(), lr=LR, fused=True))


@misuse("a foreach optimizer made anew", "refused", under=("marks",))
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    loop.step(torch.optim.AdamW(loop.model.parameters(), lr=LR, foreach=True))


@misuse("a second optimizer that steps first", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    loop.step(torch.optim.SGD(loop.model.head.parameters(), lr=LR))
    loop.step()


@misuse("a second optimizer that steps after the guarded one", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
    loop.step(torch.optim.SGD([loop.model.head.bias], lr=LR))


@misuse("two optimizers of which protect got one", "refused")
def _(loop: Loop) -> None:
    first, head = (torch.optim.SGD(layer.parameters(), lr=LR) for layer in (loop.model.first, loop.model.head))
    loop.protect(optimizer=first)
    loop.backward()
    loop.step(first)
    loop.step(head)


@misuse("add_param_group with a foreign parameter", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    foreign = nn.Parameter(torch.zeros(3))
    loop.optimizer.add_param_group({"params": [foreign]})
    outputs = loop.model(loop.inputs)
    (loop.guard.loss(outputs, loop.targets) + F.cross_entropy(outputs.detach() + foreign, loop.targets)).backward()
    loop.step()
    loop.left.append(Left("a foreign parameter", {"foreign": foreign.detach()}, loop.least))


@misuse("a foreign parameter in the optimizer from the start", "refused")
def _(loop: Loop) -> None:
    loop.protect(optimizer=torch.optim.SGD([*loop.model.parameters(), nn.Parameter(torch.zeros(3))], lr=LR))
    loop.train()


@misuse("guard.use with an optimizer of another model", "refused")
def _(loop: Loop) -> None:
    loop.protect().use(torch.optim.SGD(Net().parameters(), lr=LR))
    loop.train()


@misuse("guard.use with no optimizer", "refused")
def _(loop: Loop) -> None:
    loop.protect().use()
    loop.train()


@misuse("a parameter of a group exchanged for another", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    loop.optimizer.param_groups[0]["params"][0] = nn.Parameter(loop.model.first.weight.detach().clone())
    loop.step()


@misuse("momentum from before protect", "refused")
def _(loop: Loop) -> None:
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=LR, momentum=0.9)
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
    optimizer.step()
    loop.protect(optimizer=optimizer)
    loop.train()


@misuse("Adam's moments from before protect", "refused", under=("marks",))
def _(loop: Loop) -> None:
    optimizer = torch.optim.Adam(loop.model.parameters(), lr=LR)
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
    optimizer.step()
    loop.protect(optimizer=optimizer)
    loop.train()


@misuse("guard.use with an optimizer that remembers bare gradients", "refused")
def _(loop: Loop) -> None:
    warm = torch.optim.SGD(loop.model.parameters(), lr=0.0, momentum=0.9)
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
    warm.step()
    warm.zero_grad()
    loop.protect().use(warm)
    warm.param_groups[0]["lr"] = LR
    loop.optimizer = warm
    loop.train()


@misuse("an edit of the optimizer's state", "refused")
def _(loop: Loop) -> None:
    loop.protect(optimizer=torch.optim.SGD(loop.model.parameters(), lr=LR, momentum=0.9))
    loop.train()
    for name, p in loop.model.named_parameters():
        loop.optimizer.state[p]["momentum_buffer"].add_(loop.bare()[name])
    loop.train()


@misuse("an exchange of tensors of the optimizer's state", "refused")
def _(loop: Loop) -> None:
    loop.protect(optimizer=torch.optim.SGD(loop.model.parameters(), lr=LR, momentum=0.9))
    for name, p in loop.model.named_parameters():
        loop.optimizer.state[p]["momentum_buffer"] = loop.bare()[name]
    loop.train()


@misuse("a state loaded into the optimizer", "refused")
def _(loop: Loop) -> None:
    loop.protect(optimizer=torch.optim.SGD(loop.model.parameters(), lr=LR, momentum=0.9))
    other = Net()
    donor = torch.optim.SGD(other.parameters(), lr=LR, momentum=0.9)
    F.cross_entropy(other(loop.inputs), loop.targets).backward()
    donor.step()
    loop.optimizer.load_state_dict(donor.state_dict())
    loop.train()


@misuse("a closure", "refused")
def _(loop: Loop) -> None:
    loop.protect()

    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        loss = F.cross_entropy(loop.model(loop.inputs), loop.targets)
        loss.backward()
        return loss

    loop.optimizer.step(closure)  # type: ignore[arg-type]
    loop.send(loop.model)


@misuse("a closure by name", "refused")
def _(loop: Loop) -> None:
    loop.protect()

    def closure() -> float:
        for name, p in loop.model.named_parameters():
            p.grad = loop.bare()[name]
        return 0.0

    loop.optimizer.step(closure=closure)
    loop.send(loop.model)


@misuse("LBFGS", "refused", under=("marks",))
def _(loop: Loop) -> None:
    loop.protect(optimizer=torch.optim.LBFGS(loop.model.parameters(), lr=LR, max_iter=2))

    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        loss = loop.guard.loss(loop.model(loop.inputs), loop.targets)
        loss.backward()
        return loss

    loop.optimizer.step(closure)  # type: ignore[arg-type]
    loop.send(loop.model)


class SharpnessAware(torch.optim.Optimizer):
    """Sharpness-aware minimisation: up along the gradient, a second gradient there, back, and a step with that."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(params, options)
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def climb(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["moved"] = 0.05 * p.grad
            p.add_(self.state[p]["moved"])
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["moved"])
        self.base.step()


@misuse("a two-step optimizer that climbs along the bare gradient", "refused")
def _(loop: Loop) -> None:
    optimizer = SharpnessAware(loop.model.parameters(), torch.optim.SGD, lr=LR)
    loop.protect(optimizer=optimizer)
    loop.backward()
    optimizer.climb()
    loop.backward()
    optimizer.descend()
    loop.send(loop.model)


@misuse("a two-step optimizer whose base protect knows", "refused")
def _(loop: Loop) -> None:
    optimizer = SharpnessAware(loop.model.parameters(), torch.optim.SGD, lr=LR)
    loop.protect(optimizer=[optimizer.base])
    loop.backward()
    optimizer.climb()
    loop.backward()
    optimizer.descend()
    loop.send(loop.model)


class Wrapper:
    """What libraries put around an optimizer: the same interface, and the real one inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self) -> None:
        self.optimizer.step()


@misuse("a wrapper of an optimizer given to protect", "defended")
def _(loop: Loop) -> None:
    loop.protect(optimizer=[Wrapper(torch.optim.SGD(loop.model.parameters(), lr=LR))])  # type: ignore[list-item]
    loop.train()


@misuse("a wrapper of the guarded optimizer", "defended")
def _(loop: Loop) -> None:
    loop.protect()
    loop.optimizer = Wrapper(loop.optimizer)  # type: ignore[assignment]
    loop.train(2)


@misuse("a wrapper that is an optimizer", "refused")
def _(loop: Loop) -> None:
    class Deep(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step(closure)

    loop.protect()
    loop.backward()
    loop.step(Deep(torch.optim.SGD(loop.model.parameters(), lr=LR)))


@misuse("the optimizer's own step without its hooks", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    torch.optim.SGD.step.__wrapped__(loop.optimizer)  # type: ignore[attr-defined]


@misuse("another step method set on the optimizer", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    loop.optimizer.step = lambda: torch._foreach_add_(  # type: ignore[method-assign,assignment,misc]
        [p.data for p in loop.model.parameters()],
        [p.grad for p in loop.model.parameters()],
        alpha=-LR,  # type: ignore[misc]
    )
    loop.optimizer.zero_grad()
    loop.backward()
    loop.optimizer.step()


@misuse("an optimizer's hook that puts the bare gradient back", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    bare = loop.bare()

    def back(*_: Any) -> None:
        for name, p in loop.model.named_parameters():
            p.grad = bare[name].clone()

    loop.optimizer.register_step_pre_hook(back)
    loop.train()


@misuse("an optimizer's hook from before protect that puts the bare gradient back", "refused")
def _(loop: Loop) -> None:
    optimizer, bare = torch.optim.SGD(loop.model.parameters(), lr=LR), loop.bare()

    def back(*_: Any) -> None:
        for name, p in loop.model.named_parameters():
            p.grad.copy_(bare[name])  # type: ignore[union-attr]

    optimizer.register_step_pre_hook(back)
    loop.protect(optimizer=optimizer)
    loop.train()


@misuse("a hook on all optimizers that puts the bare gradient back", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    bare = loop.bare()

    def back(*_: Any) -> None:
        for name, p in loop.model.named_parameters():
            p.grad.data.copy_(bare[name])  # type: ignore[union-attr]

    handle = register_optimizer_step_pre_hook(back)
    try:
        loop.train()
    finally:
        handle.remove()


@misuse("an optimizer's hook that moves parameters before the step", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    bare = loop.bare()
    loop.optimizer.register_step_pre_hook(lambda *_: move(loop.model, bare))
    loop.train()


@misuse("an optimizer's hook that moves parameters after the step", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    bare = loop.bare()
    loop.optimizer.register_step_post_hook(lambda *_: move(loop.model, bare))
    loop.optimizer.zero_grad()
    loop.backward()
    loop.optimizer.step()


@misuse("a step in the backward pass", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    for p in loop.model.parameters():
        own = torch.optim.SGD([p], lr=LR)
        p.register_post_accumulate_grad_hook(lambda _p, own=own: own.step())
    loop.backward()
    loop.send(loop.model)


@misuse("a step in the backward pass of a plain loss", "refused")
def _(loop: Loop) -> None:
    for p in loop.model.parameters():
        own = torch.optim.SGD([p], lr=LR)
        p.register_post_accumulate_grad_hook(lambda _p, own=own: own.step())
    loop.protect()
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
    loop.send(loop.model)


@misuse("a step by hand in the backward pass of a plain loss", "refused")
def _(loop: Loop) -> None:
    def by_hand(p: Tensor) -> None:
        p.data.sub_(LR * p.grad)

    for p in loop.model.parameters():
        p.register_post_accumulate_grad_hook(by_hand)
    loop.protect()
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()


@misuse("a GradScaler with a fused optimizer", "refused")
def _(loop: Loop) -> None:
    loop.protect(optimizer=torch.optim.SGD(loop.model.parameters(), lr=LR, fused=True))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loop.guard.loss(loop.model(loop.inputs), loop.targets)).backward()
    scaler.step(loop.optimizer)
    loop.send(loop.model)


@misuse("a GradScaler with an optimizer that is not fused", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loop.guard.loss(loop.model(loop.inputs), loop.targets)).backward()
    scaler.step(loop.optimizer)
    loop.send(loop.model)


@misuse("a GradScaler that unscales before a clip", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loop.guard.loss(loop.model(loop.inputs), loop.targets)).backward()
    scaler.unscale_(loop.optimizer)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
    scaler.step(loop.optimizer)
    loop.send(loop.model)


@misuse("two steps with one gradient", "defended")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    loop.step()


@misuse("a step without a backward pass", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.step()


@misuse("a forgotten zero_grad", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    for _ in range(2):
        loop.backward()
        loop.step()


@misuse("a step in another thread", "defended")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    in_thread(loop.step)


@misuse("a whole round in another thread", "defended")
def _(loop: Loop) -> None:
    loop.protect()
    in_thread(loop.train)


@misuse("a hook of the optimizer that clips", "refused")
def _(loop: Loop) -> None:
    """It cannot be told from a hook that puts the bare gradient back: clip with a defense."""
    loop.protect()
    loop.optimizer.register_step_pre_hook(lambda *_: [nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)].clear())
    loop.train()


@misuse("the hooks of all optimizers taken off", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    kept = dict(_global_optimizer_pre_hooks)
    _global_optimizer_pre_hooks.clear()
    try:
        loop.backward()
        loop.optimizer.step()
    finally:
        _global_optimizer_pre_hooks.update(kept)


@misuse("a hook of the optimizer that adds a closure", "refused")
def _(loop: Loop) -> None:
    """Hooks may exchange the arguments of a step, and the closure runs after all of them."""
    loop.protect()

    def closure() -> float:
        with torch.enable_grad():
            F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
        return 0.0

    loop.optimizer.register_step_pre_hook(lambda o, _a, _k: ((o, closure), {}))
    loop.train()


class Nested(torch.optim.Optimizer):
    """Momentum of the user's own, kept in a list."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            past = self.state[p].setdefault("past", [torch.zeros_like(p)])
            past[0].mul_(0.9).add_(p.grad)
            p.sub_(LR * past[0])


@misuse("an edit of a list in the optimizer's state", "refused")
def _(loop: Loop) -> None:
    loop.protect(optimizer=Nested(loop.model.parameters(), {"lr": LR}))
    loop.train()
    for name, p in loop.model.named_parameters():
        loop.optimizer.state[p]["past"][0].add_(loop.bare()[name])
    loop.train()


@misuse("the guard's hook exchanged for one that puts the bare gradient back", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    bare = loop.bare()

    def back(*_: Any) -> None:
        for name, p in loop.model.named_parameters():
            p.grad = bare[name].clone()

    loop.optimizer._optimizer_step_pre_hooks.clear()
    loop.optimizer.register_step_pre_hook(back)
    loop.optimizer.zero_grad()
    loop.backward()
    loop.optimizer.step()
