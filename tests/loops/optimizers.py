"""Loops that differ in their optimizers and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from guarded import LR, Net
from loops.table import BATCHES, Run, loop

VARIANTS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=LR),
    "SGD with momentum": lambda p: optim.SGD(p, lr=LR, momentum=0.9),
    "SGD with Nesterov's momentum": lambda p: optim.SGD(p, lr=LR, momentum=0.9, nesterov=True),
    "SGD with damped momentum and weight decay": lambda p: optim.SGD(
        p, lr=LR, momentum=0.9, dampening=0.1, weight_decay=0.01
    ),
    "SGD that maximizes": lambda p: optim.SGD(p, lr=LR, maximize=True),
    "SGD foreach": lambda p: optim.SGD(p, lr=LR, momentum=0.9, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, lr=LR, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam foreach": lambda p: optim.Adam(p, lr=0.01, foreach=True),
    "Adam fused": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "Adam with a tensor for a rate": lambda p: optim.Adam(p, lr=torch.tensor(0.01)),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "Adagrad that starts above zero": lambda p: optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01),
    "RMSprop centered with momentum": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.01),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.01),
}

for _name, _made in VARIANTS.items():

    def _optimized(run: Run, made: Callable[[Any], optim.Optimizer] = _made) -> None:
        model = Net()
        run.train(run.protect(model, made(model.parameters())))

    loop(_name)(_optimized)


def _schedules() -> Iterator[tuple[str, Callable[[optim.Optimizer], Any]]]:
    yield "StepLR", lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5)
    yield "LambdaLR", lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch)
    yield "CosineAnnealingLR", lambda o: lr_scheduler.CosineAnnealingLR(o, 3)
    yield "OneCycleLR", lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=9)
    yield "CyclicLR", lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2)
    yield (
        "a warm-up before a schedule",
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
        ),
    )


for _name, _scheduled in _schedules():

    def _loop(run: Run, scheduled: Callable[[optim.Optimizer], Any] = _scheduled) -> None:
        optimizer = run.protect(Net())
        schedule = scheduled(optimizer)
        for batch in BATCHES * 2:
            run.train(optimizer, [batch])
            schedule.step()

    loop(_name)(_loop)


@loop("ReduceLROnPlateau")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        run.train(optimizer)
        schedule.step(1.0)


@loop("a schedule made before protect")
def _(run: Run) -> None:
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    schedule = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run.protect(model, optimizer)
    for batch in BATCHES:
        run.train(optimizer, [batch])
        schedule.step()


@loop("weight decay for weights and none for biases")
def _(run: Run) -> None:
    model = Net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    run.train(run.protect(model, optim.AdamW(groups, lr=0.01)))


@loop("a rate for each layer")
def _(run: Run) -> None:
    model = Net()
    groups = [{"params": model.first.parameters(), "lr": 0.01}, {"params": model.head.parameters(), "lr": 0.2}]
    run.train(run.protect(model, optim.SGD(groups, lr=0.1)))


@loop("a rate set by hand")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for number, batch in enumerate(BATCHES):
        optimizer.param_groups[0]["lr"] = LR / (1 + number)
        run.train(optimizer, [batch])


@loop("two optimizers for two parts")
def _(run: Run) -> None:
    model = Net()
    both = [optim.SGD(model.first.parameters(), lr=LR), optim.Adam(model.head.parameters(), lr=0.01)]
    run.protect(model, both)
    for inputs, targets in BATCHES:
        for optimizer in both:
            optimizer.zero_grad()
        run.loss(model(inputs), targets).backward()
        for optimizer in both:
            optimizer.step()


@loop("two optimizers that take turns")
def _(run: Run) -> None:
    model = Net()
    both = [optim.SGD(model.first.parameters(), lr=LR), optim.SGD(model.head.parameters(), lr=LR)]
    run.protect(model, both)
    for number, (inputs, targets) in enumerate(BATCHES):
        model.zero_grad()
        run.loss(model(inputs), targets).backward()
        both[number % 2].step()


@loop("an optimizer over some of the parameters")
def _(run: Run) -> None:
    model = Net()
    optimizer = run.protect(model, optim.SGD(model.head.parameters(), lr=LR))
    for inputs, targets in BATCHES:
        model.zero_grad()
        run.loss(model(inputs), targets).backward()
        optimizer.step()


@loop("a parameter group added while training")
def _(run: Run) -> None:
    model = Net()
    model.first.requires_grad_(False)
    optimizer = run.protect(model, optim.SGD(model.head.parameters(), lr=LR, momentum=0.9))
    run.train(optimizer)
    model.first.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.first.parameters()), "lr": LR / 2})
    run.train(optimizer)


@loop("the optimizer's state saved and loaded back")
def _(run: Run) -> None:
    optimizer = run.protect(Net(), None)
    run.train(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    run.train(optimizer)


@loop("hooks of the optimizer that only read")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    optimizer.register_step_pre_hook(lambda o, *_: run.figures.append(o.param_groups[0]["lr"]))
    optimizer.register_step_post_hook(lambda o, *_: run.figures.append(len(o.state)))
    run.train(optimizer)


@loop("a wrapper around the optimizer")
def _(run: Run) -> None:
    class Counting:
        def __init__(self, inner: optim.Optimizer) -> None:
            self.inner, self.steps = inner, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def step(self) -> None:
            self.steps += 1
            self.inner.step()

    optimizer: Any = Counting(run.protect(Net()))
    run.train(optimizer)
    run.figures.append(optimizer.steps)


@loop("two steps with one gradient")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    optimizer.step()


@loop("an optimizer that skips parameters without a gradient")
def _(run: Run) -> None:
    model = Net()
    model.spare = nn.Linear(3, 3)
    run.train(run.protect(model, optim.AdamW(model.parameters(), lr=0.01)))


@loop("an optimizer class of the user's own")
def _(run: Run) -> None:
    class Lion(optim.Optimizer):
        """Steps by the sign of a mixture of momentum and gradient."""

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(0.01 * (0.9 * momentum + 0.1 * p.grad).sign())
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)

    model = Net()
    run.train(run.protect(model, Lion(model.parameters(), {})))


@loop("an optimizer that calls another one")
def _(run: Run) -> None:
    class Lookahead(optim.Optimizer):
        """Follows another optimizer at half its pace."""

        def __init__(self, inner: optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner
            self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            self.inner.step()
            params = [p for group in self.param_groups for p in group["params"]]
            for slow, p in zip(self.slow, params, strict=True):
                p.copy_(slow.lerp_(p, 0.5))

    model = Net()
    inner = optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    outer = Lookahead(inner)
    run.protect(model, [outer, inner])
    run.train(outer)


@loop("an optimizer that counts its steps in its state")
def _(run: Run) -> None:
    class Counting(optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[call-overload]
            for p in self.param_groups[0]["params"]:
                p.sub_(LR / self.state["steps"] * p.grad)  # type: ignore[index]

    model = Net()
    run.train(run.protect(model, Counting(model.parameters(), {"lr": LR})))


@loop("an optimizer whose momentum is made with it")
def _(run: Run) -> None:
    class Eager(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": LR})
            for p in self.param_groups[0]["params"]:
                self.state[p]["momentum"] = torch.zeros_like(p)

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.sub_(LR * self.state[p]["momentum"].mul_(0.9).add_(p.grad))

    model = Net()
    run.train(run.protect(model, Eager(model.parameters())))
