"""Loops that differ in what else people do while they train."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from guarded import Net, examples
from loops.table import BATCHES, Run, loop


@loop("zero_grad that keeps zeros")
def _(run: Run) -> None:
    run.train(run.protect(Net()), set_to_none=False)


@loop("model.zero_grad")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        run.model.zero_grad()
        run.loss(run.model(inputs), targets).backward()
        optimizer.step()


@loop("zero_grad after the step")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        run.loss(run.model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop("zero_grad between forward and backward")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        loss = run.loss(run.model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@loop("p.grad set to None by hand")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        for p in run.model.parameters():
            p.grad = None
        run.loss(run.model(inputs), targets).backward()
        optimizer.step()


@loop("equal micro-batches with weights")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        for part in (slice(0, 4), slice(4, 8)):
            (run.loss(run.model(inputs[part]), targets[part]) / 2).backward()
        optimizer.step()


@loop("equal micro-batches without weights")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        for part in (slice(0, 4), slice(4, 8)):
            run.loss(run.model(inputs[part]), targets[part]).backward()
        optimizer.step()


@loop("unequal micro-batches with weights")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        for part in (slice(0, 3), slice(3, 8)):
            (run.loss(run.model(inputs[part]), targets[part]) * len(inputs[part]) / 8).backward()
        optimizer.step()


@loop("micro-batches that go backward together")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        parts = [run.loss(run.model(inputs[at : at + 4]), targets[at : at + 4]) for at in (0, 4)]
        torch.stack(parts).mean().backward()
        optimizer.step()


@loop("a loss times a constant")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        (0.3 * run.loss(run.model(inputs), targets)).backward()
        optimizer.step()


@loop("a step that is skipped after backward")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for number, (inputs, targets) in enumerate(BATCHES):
        optimizer.zero_grad()
        run.loss(run.model(inputs), targets).backward()
        if number != 1:
            optimizer.step()


@loop("a loss that never goes backward")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        run.figures.append(run.loss(run.model(inputs), targets).item())
        run.train(optimizer, [(inputs, targets)])


@loop("a step before any backward pass")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    optimizer.step()
    run.train(optimizer)


@loop("a step that fails in a hook and is tried again")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    fail = [True]

    def once(*_: Any) -> None:
        if fail.pop() if fail else False:
            raise OSError("the logger's disk is full")

    run.train(optimizer)
    optimizer.register_step_pre_hook(once)
    optimizer.zero_grad()
    run.loss(run.model(BATCHES[0][0]), BATCHES[0][1]).backward()
    try:
        optimizer.step()
    except OSError:
        optimizer.step()
    run.train(optimizer)


@loop("evaluation under no_grad between backward and step")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        run.loss(run.model(inputs), targets).backward()
        with torch.no_grad():
            run.figures.append(run.loss(run.model(inputs[:2]), targets[:2]).item())
        optimizer.step()


@loop("evaluation between forward and backward")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        loss = run.loss(run.model(inputs), targets)
        with torch.no_grad():
            run.figures.append(run.model(inputs[:2]).sum().item())
        loss.backward()
        optimizer.step()


@loop("evaluation in inference mode")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for batch in BATCHES:
        run.train(optimizer, [batch])
        with torch.inference_mode():
            run.figures.append(run.loss(run.model.eval()(batch[0]), batch[1]).item())
        run.model.train()


@loop("evaluation with gradients on")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        run.train(optimizer, [(inputs, targets)])
        run.figures.append(F.cross_entropy(run.model.eval()(inputs), targets).item())
        run.model.train()


@loop("metrics from the outputs that train")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        outputs = run.model(inputs)
        run.figures.append((outputs.argmax(1) == targets).float().mean().item())
        run.loss(outputs, targets).backward()
        run.figures.append(outputs.detach().norm().item())
        optimizer.step()


@loop("gradient norms that are only read")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        run.loss(run.model(inputs), targets).backward()
        run.figures.append(sum(p.grad.norm().item() for p in run.model.parameters() if p.grad is not None))
        optimizer.step()


@loop("batched evaluation with vmap")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    with torch.no_grad():
        run.figures.append(vmap(run.model)(BATCHES[0][0][:, None]).sum().item())
    run.train(optimizer)


@loop("gradients of examples by torch.func, for a metric")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    now = {name: p.detach() for name, p in run.model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(run.model, params, (x[None],)), y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(now, *BATCHES[0])
    run.figures.append(each["head.bias"].norm(dim=1).max().item())
    run.train(optimizer)


@loop("a loader with worker processes")
def _(run: Run) -> None:
    data = TensorDataset(torch.cat([x for x, _ in BATCHES]), torch.cat([y for _, y in BATCHES]))
    optimizer = run.protect(Net())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*pin_memory.*")  # there is no accelerator to pin memory for
        run.train(optimizer, (tuple(batch) for batch in DataLoader(data, 8, num_workers=1, pin_memory=True)))


@loop("a loader that shuffles")
def _(run: Run) -> None:
    """The order comes from the global generator: a guard must not draw from it."""
    data = TensorDataset(torch.cat([x for x, _ in BATCHES]), torch.cat([y for _, y in BATCHES]))
    optimizer = run.protect(Net())
    for _ in range(2):
        run.train(optimizer, (tuple(batch) for batch in DataLoader(data, 8, shuffle=True)))


@loop("anomaly detection")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
        with torch.autograd.detect_anomaly(check_nan=True):
            run.train(optimizer)


@loop("deterministic algorithms")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    torch.use_deterministic_algorithms(True)
    try:
        run.train(optimizer)
    finally:
        torch.use_deterministic_algorithms(False)


@loop("a profiler")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    with torch.autograd.profiler.record_function("epoch"):
        run.train(optimizer)


@loop("gradients switched off and on again")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    with torch.no_grad(), torch.enable_grad():
        run.train(optimizer)
    with torch.set_grad_enabled(True):
        run.train(optimizer)


@loop("conversions that change nothing")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    run.model.to("cpu").float().requires_grad_(True).train()
    run.train(optimizer)


@loop("a compiled model", slow=True)
def _(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        optimizer = run.protect(Net())
        fast = torch.compile(run.model, backend="aot_eager")
        for inputs, targets in BATCHES:
            optimizer.zero_grad()
            run.loss(fast(inputs), targets).backward()
            optimizer.step()


@loop("a model compiled in place", slow=True)
def _(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        model = Net()
        model.compile(backend="aot_eager")
        run.train(run.protect(model))


@loop("gradients that are sent")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        run.loss(run.model(inputs), targets).backward()
        sent = run.guard.gradient() if run.guard else {n: p.grad for n, p in run.model.named_parameters()}
        run.figures += [tensor.sum().item() for tensor in sent.values() if tensor is not None]
        optimizer.step()


@loop("gradients that are sent and never stepped")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        run.loss(run.model(inputs), targets).backward()
        if run.guard:
            run.guard.gradient()
    run.train(optimizer)


@loop("accumulation over a last group of other size")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for group in ([*BATCHES], [examples(5, n=8), examples(6, n=2)]):
        optimizer.zero_grad()
        whole = sum(len(x) for x, _ in group)
        for inputs, targets in group:
            (run.loss(run.model(inputs), targets) * (len(inputs) / whole)).backward()
        optimizer.step()


@loop("a proximal term inside the loss")
def _(run: Run) -> None:
    model = Net()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def proximal(outputs: Tensor, targets: Tensor) -> Tensor:
        apart = sum((p - start[name]).square().sum() for name, p in model.named_parameters())
        return F.cross_entropy(outputs, targets) + 0.05 * apart

    run.train(run.protect(model, loss=proximal))


@loop("a batch that fails in the forward pass")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in [BATCHES[0], (torch.rand(8, 5), BATCHES[0][1]), *BATCHES[1:]]:
        optimizer.zero_grad()
        try:
            run.loss(run.model(inputs), targets).backward()
        except RuntimeError:
            continue
        optimizer.step()


@loop("a batch that fails in the loss")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in [BATCHES[0], (BATCHES[0][0], torch.rand(5, 2)), *BATCHES[1:]]:
        optimizer.zero_grad()
        try:
            run.loss(run.model(inputs), targets).backward()
        except (RuntimeError, ValueError):
            continue
        optimizer.step()


@loop("two forward passes before the first backward pass")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    (one, its), (two, other) = BATCHES[:2]
    optimizer.zero_grad()
    first, second = run.model(one), run.model(two)
    run.loss(second, other).backward()
    run.loss(first, its).backward()
    optimizer.step()


@loop("a GradScaler that is switched off")
def _(run: Run) -> None:
    optimizer, scaler = run.protect(Net()), torch.amp.GradScaler("cpu", enabled=False)
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        scaler.scale(run.loss(run.model(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()


@loop("gradients of activations that are only read")
def _(run: Run) -> None:
    optimizer, seen = run.protect(Net()), []
    run.model.first.register_forward_hook(lambda _m, _in, out: out.retain_grad() or seen.append(out))
    for batch in BATCHES:
        run.train(optimizer, [batch])
        run.figures.append(seen[-1].grad.norm().item())


@loop("a progress bar around the batches")
def _(run: Run) -> None:
    def bar(items: Iterable[Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            yield item
            run.figures.append(number)

    run.train(run.protect(Net()), bar(BATCHES))
