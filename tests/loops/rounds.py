"""Loops with several rounds, models, guards, copies or checkpoints."""

from __future__ import annotations

import copy
import io
import threading

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils

import gradveil
from guarded import LR, Net
from loops.table import BATCHES, Run, loop


@loop("a moving average of the parameters")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    average = swa_utils.AveragedModel(run.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for batch in BATCHES:
        run.train(optimizer, [batch])
        average.update_parameters(run.model)
    with torch.no_grad():
        run.figures.append(average(BATCHES[0][0]).sum().item())


@loop("a moving average made before protect")
def _(run: Run) -> None:
    model = Net()
    average = swa_utils.AveragedModel(model)
    optimizer = run.protect(model)
    for batch in BATCHES:
        run.train(optimizer, [batch])
        average.update_parameters(model)
    run.figures.append(average.eval()(BATCHES[0][0]).sum().item())


@loop("stochastic weight averaging with batch norm")
def _(run: Run) -> None:
    optimizer = run.protect(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    average, schedule = swa_utils.AveragedModel(run.model), swa_utils.SWALR(optimizer, swa_lr=0.05)
    for batch in BATCHES:
        run.train(optimizer, [batch])
        average.update_parameters(run.model)
        schedule.step()
    swa_utils.update_bn(BATCHES, average)
    with torch.no_grad():
        run.figures.append(average.eval()(BATCHES[0][0]).sum().item())


@loop("a copy of the best model that is only evaluated")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    best = copy.deepcopy(run.model).eval()
    run.train(optimizer)
    with torch.no_grad():
        run.figures.append(best(BATCHES[0][0]).sum().item())


@loop("a teacher copied from the model")
def _(run: Run) -> None:
    """A proximal or distilling client compares itself with the broadcast, in grad mode or not."""
    optimizer = run.protect(Net())
    teacher = copy.deepcopy(run.model).eval().requires_grad_(False)
    for inputs, _ in BATCHES:
        run.train(optimizer, [(inputs, torch.softmax(teacher(inputs), 1))])


@loop("a state saved while training")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for batch in BATCHES:
        run.train(optimizer, [batch])
        file = io.BytesIO()
        torch.save({"model": run.model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        run.figures.append(len(file.getvalue()) > 1000)


@loop("a state saved while training and loaded back unchanged")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    run.model.load_state_dict(copy.deepcopy(run.model.state_dict()))
    run.train(optimizer)


@loop("early stopping")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    best = run.checkpoint(optimizer)
    run.train(optimizer)
    run.restore(best, optimizer)


@loop("training on from the best epoch")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    best = run.checkpoint(optimizer)
    for _ in range(2):
        run.train(optimizer)
        run.restore(best, optimizer)
    run.train(optimizer)


@loop("rounds that keep their optimizer")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for number in range(3):
        run.train(optimizer)
        run.update()
        run.new_round({name: tensor + 0.01 * number for name, tensor in run.broadcast.items()})
    run.train(optimizer)


@loop("rounds with an optimizer made anew")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for number in range(3):
        run.train(optimizer)
        run.update()
        run.new_round({name: tensor + 0.01 * number for name, tensor in run.broadcast.items()})
        optimizer = torch.optim.Adam(run.model.parameters(), lr=0.01)
        run.use(optimizer)
    run.train(optimizer)


@loop("an optimizer made anew within a round")
def _(run: Run) -> None:
    run.train(run.protect(Net()))
    optimizer = torch.optim.SGD(run.model.parameters(), lr=LR / 4)
    run.use(optimizer)
    run.train(optimizer)


@loop("rounds that average updates")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for _ in range(3):
        run.train(optimizer)
        update = run.update()
        run.new_round({name: run.broadcast[name] + 0.5 * change for name, change in update.items()})
    run.train(optimizer)


@loop("a broadcast with buffers")
def _(run: Run) -> None:
    optimizer = run.protect(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    for _ in range(2):
        run.train(optimizer)
        run.update()
        run.new_round(run.broadcast)
    run.train(optimizer)


@loop("a broadcast without buffers")
def _(run: Run) -> None:
    optimizer = run.protect(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    run.train(optimizer)
    run.update()
    run.new_round({name: run.broadcast[name] for name, _ in run.model.named_parameters()})
    run.train(optimizer)


@loop("a broadcast in half precision")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    run.update()
    run.new_round({name: tensor.half() for name, tensor in run.broadcast.items()})
    run.train(optimizer)


@loop("a broadcast of tensors that ask for a gradient")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    run.new_round(dict(Net().named_parameters()))
    run.train(optimizer)


@loop("a round that starts anew before its update")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    run.new_round(run.broadcast)
    run.train(optimizer)


@loop("a new round between backward and step")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.loss(run.model(BATCHES[0][0]), BATCHES[0][1]).backward()
    run.new_round(run.broadcast)
    run.train(optimizer)


@loop("two models with a guard each")
def _(run: Run) -> None:
    other = Net()
    second = Run(run.defense)
    step = second.protect(other)
    optimizer = run.protect(Net())
    for batch in BATCHES:
        run.train(optimizer, [batch])
        second.train(step, [batch])
    run.figures += [p.sum().item() for p in other.parameters()]


@loop("a generator and a discriminator with a guard each")
def _(run: Run) -> None:
    """The losses of two models take turns, and one optimizer never holds the other's parameters."""
    first, second = Run(run.defense), run
    one, two = first.protect(Net()), second.protect(Net())
    for inputs, targets in BATCHES:
        first.train(one, [(inputs, targets)])
        with torch.no_grad():
            soft = torch.softmax(first.model(inputs), 1)
        second.train(two, [(inputs, soft)])


@loop("threads with a guard each")
def _(run: Run) -> None:
    runs = [Run(run.defense) for _ in range(3)]
    optimizers = [one.protect(Net()) for one in runs]
    failed: list[BaseException] = []

    def work(one: Run, optimizer: torch.optim.Optimizer) -> None:
        try:
            one.train(optimizer)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(runs, optimizers, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    run.figures += [p.sum().item() for one in runs for p in one.model.parameters()]
    run.train(run.protect(Net()))


@loop("a guard made in one thread and used in another")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    thread = threading.Thread(target=run.train, args=(optimizer,))
    thread.start()
    thread.join()
    run.train(optimizer)


@loop("a model in shared memory")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    run.model.share_memory()
    run.train(optimizer)


@loop("a guard that is closed, and plain training after it")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    if run.guard:
        run.update()
        run.guard.close()
        run.guard, run.loss = None, F.cross_entropy
    run.train(optimizer)


@loop("a guard that is closed, and another one")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    if run.guard:
        run.guard.close()
    run.protect(run.model, optimizer)
    run.train(optimizer)


@loop("a guard on a copy of a guarded model")
def _(run: Run) -> None:
    first = Run(run.defense)
    first.train(first.protect(Net()))
    run.train(run.protect(copy.deepcopy(first.model)))


@loop("a guard on a model loaded from a file")
def _(run: Run) -> None:
    first = Run(run.defense)
    first.train(first.protect(Net()))
    file = io.BytesIO()
    torch.save(first.model, file)
    file.seek(0)
    run.train(run.protect(torch.load(file, weights_only=False)))


@loop("a training that is saved and taken up again")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    file = io.BytesIO()
    torch.save(run.checkpoint(optimizer), file)
    file.seek(0)
    broadcast = run.broadcast
    optimizer = run.protect(Net())  # as in a new process
    run.restore(torch.load(file, weights_only=True), optimizer)
    run.broadcast = broadcast
    run.train(optimizer)


@loop("a guard in a with statement")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    with run.guard or torch.enable_grad():
        run.train(optimizer)
        run.figures.append(len(run.update()))


@loop("a participant that owns its model")
def _(run: Run) -> None:
    model = Net()
    run.model, run.broadcast = model, copy.deepcopy(model.state_dict())
    if run.defense is None:
        run.train(run.protect(model, torch.optim.SGD(model.parameters(), lr=LR)))
        return
    client = gradveil.Client(
        model, loss=F.cross_entropy, defense=run.defense, optimizer=lambda p: torch.optim.SGD(p, lr=LR)
    )
    client.start(run.broadcast)
    run.figures += [client.step(*batch) for batch in BATCHES]
    model.load_state_dict({name: run.broadcast[name] + change for name, change in client.reply().items()})


@loop("the model's own state for a broadcast")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for _ in range(2):
        run.train(optimizer)
        run.update()
        run.new_round(run.model.state_dict())
    run.train(optimizer)


@loop("batch norm in a training that is saved and taken up again")
def _(run: Run) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    optimizer = run.protect(model())
    run.train(optimizer)
    state, broadcast = run.checkpoint(optimizer), run.broadcast
    optimizer = run.protect(model())
    run.restore(state, optimizer)
    run.broadcast = broadcast
    run.train(optimizer)


@loop("a copy that is evaluated with gradients on")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    run.figures.append(copy.deepcopy(run.model).eval()(BATCHES[0][0]).sum().item())
    run.train(optimizer)


@loop("a model loaded by hand before a checkpoint is restored")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    state, broadcast, saved = run.checkpoint(optimizer), run.broadcast, copy.deepcopy(run.model.state_dict())
    optimizer = run.protect(Net())
    run.model.load_state_dict(saved)
    run.restore(state, optimizer)
    run.broadcast = broadcast
    run.train(optimizer)
