"""Loops that differ in their models, inputs, targets and losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from guarded import LR, Net, examples
from loops.table import BATCHES, Run, loop


@loop("dropout")
def _(run: Run) -> None:
    run.train(run.protect(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@loop("batch norm in train mode")
def _(run: Run) -> None:
    run.train(run.protect(normed()))


@loop("batch norm in eval mode")
def _(run: Run) -> None:
    run.train(run.protect(normed().eval()))


@loop("batch norm evaluated between steps")
def _(run: Run) -> None:
    optimizer = run.protect(normed())
    for batch in BATCHES:
        run.model.train()
        run.train(optimizer, [batch])
        run.model.eval()
        with torch.no_grad():
            run.figures.append(run.model(batch[0]).sum().item())


@loop("batch norm frozen in a model that trains")
def _(run: Run) -> None:
    model = normed()
    optimizer = run.protect(model.train())
    model[1].eval()
    run.train(optimizer)


@loop("layer norm and group norm")
def _(run: Run) -> None:
    run.train(run.protect(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.Linear(8, 3))))


@loop("a frozen backbone")
def _(run: Run) -> None:
    model = Net()
    model.first.requires_grad_(False)
    run.train(run.protect(model))


@loop("a frozen backbone in the optimizer")
def _(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    model.first.requires_grad_(False)
    run.train(run.protect(model, optimizer))


@loop("a layer that is unfrozen while training")
def _(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    model.first.requires_grad_(False)
    run.protect(model, optimizer)
    run.train(optimizer)
    model.first.requires_grad_(True)
    run.train(optimizer)


@loop("a layer that is frozen while training")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    run.train(optimizer)
    run.model.first.requires_grad_(False)
    run.train(optimizer)


@loop("tied weights")
def _(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    run.train(run.protect(model))


@loop("one layer used twice")
def _(run: Run) -> None:
    layer = nn.Linear(6, 6)
    run.train(run.protect(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 3))))


@loop("a layer that is not used")
def _(run: Run) -> None:
    model = Net()
    model.spare = nn.Linear(4, 4)
    run.train(run.protect(model))


@loop("weight norm")
def _(run: Run) -> None:
    run.train(run.protect(nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3))))


@loop("spectral norm")
def _(run: Run) -> None:
    run.train(run.protect(nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3))))


@loop("orthogonal weights")
def _(run: Run) -> None:
    run.train(run.protect(nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))))


@loop("low-rank adapters")
def _(run: Run) -> None:
    class LowRank(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(2, base.in_features) / 4)
            self.up = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.base(inputs) + inputs @ self.down.T @ self.up.T
            return out

    model = Net()
    model.first, model.head = LowRank(model.first), LowRank(model.head)  # type: ignore[assignment]
    run.train(run.protect(model))


@loop("gradient checkpointing")
def _(run: Run) -> None:
    class Frugal(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.head(torch.tanh(checkpoint(self.first, inputs, use_reentrant=False)))
            return out

    run.train(run.protect(Frugal()))


@loop("a convolution in channels-last order")
def _(run: Run) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    data = [(torch.rand(8, 3, 4, 4).to(memory_format=torch.channels_last), targets) for _, targets in BATCHES]
    run.train(run.protect(model), data)


@loop("embeddings of tokens")
def _(run: Run) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, padding_idx=0), nn.Flatten(), nn.Linear(24, 3))
    run.train(run.protect(model), [(torch.randint(10, (8, 6)), targets) for _, targets in BATCHES])


@loop("a table with numbers and categories in one tensor")
def _(run: Run) -> None:
    class Tabular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.colour = nn.Embedding(4, 2)
            self.head = nn.Linear(7, 3)

        def forward(self, rows: Tensor) -> Tensor:
            out: Tensor = self.head(torch.cat([rows[:, :5], self.colour(rows[:, 5].long())], 1))
            return out

    data = [(torch.cat([x[:, :5], torch.randint(4, (8, 1)).float()], 1), y) for x, y in BATCHES]
    run.train(run.protect(Tabular()), data)


@loop("a recurrent network")
def _(run: Run) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(2, 4, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.head(self.cell(inputs.view(len(inputs), 3, 2))[0][:, -1])
            return out

    run.train(run.protect(Recurrent()))


@loop("a transformer layer")
def _(run: Run) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(2, 1, 4, batch_first=True, dropout=0.1)
            self.head = nn.Linear(6, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.head(self.layer(inputs.view(len(inputs), 3, 2)).flatten(1))
            return out

    run.train(run.protect(Attention()))


@loop("a transformer layer with the plain attention kernel")
def _(run: Run) -> None:
    model = nn.Sequential(nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 4, batch_first=True), nn.Flatten())
    with sdpa_kernel(SDPBackend.MATH):
        run.train(run.protect(model), [(x, y) for x, y in BATCHES])


class Wide(Net):
    """Takes several tensors, and returns an object with logits."""

    def forward(self, inputs: Tensor, more: Tensor | None = None, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        total = inputs if more is None else inputs + more
        logits = super().forward(total if mask is None else total * mask)
        size = logits.norm()
        return {"logits": logits, "size": size, "same": (size, size)}


@loop("several inputs, by position and by name")
def _(run: Run) -> None:
    optimizer = run.protect(Wide())
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        outputs = run.model(inputs, inputs.flip(0), mask=(inputs > 0.1).long())
        loss = run.loss(outputs["logits"], targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        run.figures += [loss.item(), outputs["size"].item()]


@loop("several inputs, in parts of a batch")
def _(run: Run) -> None:
    optimizer = run.protect(Wide())
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        for part in (slice(0, 4), slice(4, 8)):
            outputs = run.model(inputs[part], more=None, mask=inputs[part].round())
            (run.loss(outputs["logits"], targets[part]) / 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@loop("buffers of the model's own")
def _(run: Run) -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Tensor
            self.scale: Tensor
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)

        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                self.seen += len(inputs)
            return super().forward(inputs * self.scale)

    run.train(run.protect(Counting()))
    run.figures.append(run.model.seen.item())


@loop("a model in double precision")
def _(run: Run) -> None:
    run.train(run.protect(Net().double()), [(x.double(), y) for x, y in BATCHES])


@loop("a model in bfloat16")
def _(run: Run) -> None:
    run.train(run.protect(Net().bfloat16()), [(x.bfloat16(), y) for x, y in BATCHES])


@loop("layers of two precisions")
def _(run: Run) -> None:
    class Mixed(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.head(torch.tanh(self.first(inputs)).double())
            return out

    model = Mixed()
    model.head.double()
    run.train(run.protect(model))


@loop("autocast")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run.loss(run.model(inputs), targets)
        loss.backward()
        optimizer.step()


@loop("batches of one example")
def _(run: Run) -> None:
    run.train(run.protect(Net()), [(x[:1], y[:1]) for x, y in BATCHES])


@loop("a last batch that is smaller")
def _(run: Run) -> None:
    run.train(run.protect(Net()), [*BATCHES, examples(7, n=3)])


@loop("soft targets")
def _(run: Run) -> None:
    run.train(run.protect(Net()), [(x, torch.softmax(torch.rand(8, 3), 1)) for x, _ in BATCHES])


@loop("label smoothing")
def _(run: Run) -> None:
    run.train(run.protect(Net(), loss=nn.CrossEntropyLoss(label_smoothing=0.1)))


@loop("mixed examples")
def _(run: Run) -> None:
    def mixed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hot = F.one_hot(y, 3).float()
        return 0.7 * x + 0.3 * x.flip(0), 0.7 * hot + 0.3 * hot.flip(0)

    run.train(run.protect(Net()), [mixed(x, y) for x, y in BATCHES])


@loop("regression")
def _(run: Run) -> None:
    run.train(run.protect(Net(), loss=F.mse_loss), [(x, torch.rand(8, 3)) for x, _ in BATCHES])


@loop("several labels for each example")
def _(run: Run) -> None:
    data = [(x, torch.randint(2, (8, 3)).float()) for x, _ in BATCHES]
    run.train(run.protect(Net(), loss=nn.BCEWithLogitsLoss()), data)


@loop("a loss of the user's own")
def _(run: Run) -> None:
    def focal(outputs: Tensor, targets: Tensor) -> Tensor:
        log_p = torch.log_softmax(outputs, 1).gather(1, targets[:, None]).squeeze(1)
        return (-((1 - log_p.exp()) ** 2) * log_p).mean()

    run.train(run.protect(Net(), loss=focal))


@loop("one output for each example")
def _(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))
    run.train(run.protect(model, loss=F.mse_loss), [(x, y.float()) for x, y in BATCHES])


@loop("a loss on the outputs' mean square beside the targets")
def _(run: Run) -> None:
    run.train(run.protect(Net(), loss=lambda out, y: F.cross_entropy(out, y) + 0.01 * out.square().mean()))


@loop("examples changed to deceive the model")
def _(run: Run) -> None:
    """The gradient in the inputs is taken with a plain loss; none of it reaches the parameters."""
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        probe = inputs.clone().requires_grad_()
        (along,) = torch.autograd.grad(F.cross_entropy(run.model(probe), targets), probe)
        run.train(optimizer, [((inputs + 0.05 * along.sign()).detach(), targets)])


@loop("layers that work in place")
def _(run: Run) -> None:
    run.train(run.protect(nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))))


@loop("hooks of modules that only read")
def _(run: Run) -> None:
    model = Net()
    model.first.register_forward_hook(lambda _m, _in, out: run.figures.append(out.mean().item()))
    model.head.register_full_backward_hook(lambda _m, into, _out: run.figures.append(into[0].norm().item()))
    run.train(run.protect(model))


@loop("a gradient that is exactly zero")
def _(run: Run) -> None:
    run.train(run.protect(Net(), loss=lambda out, _y: 0 * out.mean()))


@loop("checkpointing of the whole model")
def _(run: Run) -> None:
    optimizer = run.protect(Net())
    for inputs, targets in BATCHES:
        optimizer.zero_grad()
        run.loss(checkpoint(run.model, inputs, use_reentrant=False), targets).backward()
        optimizer.step()


@loop("a recurrent state kept between batches")
def _(run: Run) -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head, self.past = nn.GRUCell(6, 4), nn.Linear(4, 3), torch.zeros(8, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            now = self.cell(inputs, self.past)
            self.past = now.detach()
            out: Tensor = self.head(now)
            return out

    run.train(run.protect(Stateful()))


@loop("a gradient that is one number in every entry")
def _(run: Run) -> None:
    """Autograd gives such a gradient without memory for each entry, and zeros cannot be written into that."""

    class Shifted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(4))

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs + self.shift.mean())

    optimizer = run.protect(Shifted())
    for number, (inputs, targets) in enumerate(BATCHES * 2):
        optimizer.zero_grad(set_to_none=False)
        run.loss(run.model(inputs), targets).backward()
        if number % 2:
            optimizer.step()


@loop("two parameters with one gradient")
def _(run: Run) -> None:
    class Twice(Net):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) + (self.one + self.two)

    optimizer = run.protect(Twice())
    for inputs, targets in BATCHES:
        optimizer.zero_grad(set_to_none=False)
        for part in (slice(0, 4), slice(4, 8)):
            (run.loss(run.model(inputs[part]), targets[part]) / 2).backward()
        optimizer.step()
