"""What an adversary broke once: bare steps after an error, buffers that tell of the examples, counts that were lost."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import gradveil
from gradveil.client import guard as guard_file
from gradveil.core.errors import GradveilError
from guarded import LR, NOISE, Loop, Net, examples


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_backward_pass_that_breaks_off_leaves_nothing_to_step_with(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the gradient is where memory runs out. The gradient was there already, and the step was bare."""
    loop = Loop(NOISE)
    loop.protect()
    loop.train()

    def no_memory(_tree: Any) -> Any:
        raise error

    loop.optimizer.zero_grad()
    loss = loop.guard.loss(loop.model(loop.inputs), loop.targets)
    with monkeypatch.context() as patched:
        patched.setattr(guard_file, "detached", no_memory)
        with pytest.raises(error):
            loss.backward()
    with contextlib.suppress(GradveilError):
        loop.step()
    loop.ask()
    assert loop.bareness() is None


def test_a_gradient_that_no_pass_gave_is_never_stepped() -> None:
    loop = Loop(NOISE)
    loop.protect()
    loop.train()
    loop.optimizer.zero_grad()
    loop.backward()
    loop.guard._passes.clear()  # whatever went wrong in the guard itself
    with pytest.raises(GradveilError, match="gradient"):
        loop.optimizer.step()


class Centred(nn.Module):
    """Takes off a running mean that it keeps in a buffer of its own."""

    mean: Tensor | None

    def __init__(self, start: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("mean", start)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            now = inputs.detach().mean(0)
            self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return inputs if self.mean is None else inputs - self.mean


@pytest.mark.parametrize("start", [torch.zeros(6), None])
@pytest.mark.parametrize("again", [False, True])
def test_under_dp_a_buffer_carries_no_example_into_later_steps(start: Tensor | None, again: bool) -> None:
    """It is put back. To refuse would tell a server that an example is there which moves its buffer."""

    class Recomputed(Centred):
        def forward(self, inputs: Tensor) -> Tensor:
            return checkpoint(super().forward, inputs, use_reentrant=False) if again else super().forward(inputs)

    model = nn.Sequential(Recomputed(start), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    guard = gradveil.protect(model, optimizer, cross_entropy, defense="dp:sigma=1")
    inputs, targets = examples()
    for _ in range(2):
        optimizer.zero_grad()
        loss = guard.loss(model(inputs), targets)
        assert model[0].mean is None if start is None else torch.equal(model[0].mean, start)  # type: ignore[arg-type]
        loss.backward()
        optimizer.step()
    guard.update()
    guard.new_round(parameters_of(model))
    if start is not None:
        model[0].mean.fill_(0.5)
        with pytest.raises(GradveilError, match=r"buffer '0\.mean' changed outside"):
            guard.loss(model(inputs), targets)


def test_buffers_with_two_names_stay_one_when_they_are_put_back() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.head = Centred(torch.zeros(6)), nn.Module(), nn.Linear(6, 3)
            self.other.register_buffer("mean", self.one.mean)

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.head(self.one(inputs))
            return out

    loop = Loop("dp:sigma=1")
    loop.protect(model=Shared())
    loop.train(2)
    assert loop.model.one.mean is loop.model.other.mean
    assert not loop.guard.state_dict()["other.mean"].any()


def test_under_dp_outputs_of_private_examples_decide_no_refusal() -> None:
    """A crafted broadcast makes the loss of some examples overflow, in one sum with others and not alone."""
    inputs = torch.full((8, 4), 0.0)
    inputs[:, 0], inputs[0, 1] = 0.5, 1.0
    weight = torch.zeros(10, 4)
    weight[:, 0], weight[:, 1] = 5.66e18, 1.04e18
    client = gradveil.Client(nn.Linear(4, 10), defense="dp:sigma=1", loss=nn.MSELoss())
    client.start({"weight": weight, "bias": torch.zeros(10)})
    client.step(inputs, torch.zeros(8, 10))
    assert all(change.any() for change in client.reply().values())


@pytest.mark.parametrize("seed", [0, 2])
def test_outputs_in_bfloat16_are_no_other_loss(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 10))
    guard = gradveil.protect(model, torch.optim.SGD(model.parameters(), lr=LR), cross_entropy, defense="dp:sigma=1")
    inputs, targets = examples(seed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(inputs)
    guard.loss(outputs, targets).backward()
    assert all(p.grad is not None for p in model.parameters()), "it was not refused"
    guard.close()


def test_dp_takes_a_counter_in_a_buffer() -> None:
    class Counted(Net):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return super().forward(inputs)

    loop = Loop("dp:sigma=1")
    loop.protect(model=Counted())
    loop.train(3)
    assert loop.guard.log.ledger.steps == 3


def test_a_buffer_that_training_made_is_not_sent() -> None:
    """Layers that initialise themselves with their first batch keep a row of it."""
    model = nn.Sequential(Centred(None), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    guard = gradveil.protect(model, optimizer, cross_entropy, defense=NOISE)
    inputs, targets = examples(n=1)
    for _ in range(2):
        optimizer.zero_grad()
        guard.loss(model(inputs), targets).backward()
        optimizer.step()
        assert sorted(guard.state_dict()) == ["1.bias", "1.weight"]
        guard.new_round(parameters_of(model))


def test_own_statistics_in_a_completed_broadcast_are_not_sent_back() -> None:
    """A server sends parameters, and the loop completes them from the model's state."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=1.0), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    guard = gradveil.protect(model, optimizer, cross_entropy, defense=NOISE)
    sent = model.state_dict()["1.running_mean"].clone()
    inputs, targets = examples()
    guard.loss(model(inputs), targets).backward()
    optimizer.step()
    guard.update()
    guard.new_round(model.state_dict())
    model.eval()
    optimizer.zero_grad()
    guard.loss(model(inputs), targets).backward()
    optimizer.step()
    assert torch.equal(guard.state_dict()["1.running_mean"], sent)
    guard.new_round(parameters_of(model) | {"1.running_mean": torch.full((4,), 0.5)})
    optimizer.zero_grad()
    guard.loss(model(inputs), targets).backward()
    optimizer.step()
    assert torch.equal(guard.state_dict()["1.running_mean"], torch.full((4,), 0.5)), "the server's own"


def test_a_guard_for_each_round_goes_on_counting() -> None:
    model, (inputs, targets), spent = Net(), examples(), []
    for _ in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with gradveil.protect(model, optimizer, cross_entropy, defense="dp:sigma=1.1,steps=3") as guard:
            guard.loss(model(inputs), targets).backward()
            optimizer.step()
            guard.update()
            spent.append(guard.privacy_spent(1e-5))
    assert spent[0] < spent[1] < spent[2]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    guard = gradveil.protect(model, optimizer, cross_entropy, defense="dp:sigma=1.1,steps=3")
    optimizer.zero_grad()
    guard.loss(model(inputs), targets).backward()
    with pytest.raises(GradveilError, match="planned"):
        optimizer.step()


def test_parameters_that_a_batch_does_not_reach_get_noise_too() -> None:
    """Otherwise exact zeros say how long the longest example is."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.at = nn.ParameterList([nn.Parameter(torch.ones(6, 3)) for _ in range(4)])

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.stack([inputs[:, i] @ self.at[i] for i in range(inputs.shape[1])]).sum(0)

    model = Positions()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    guard = gradveil.protect(model, optimizer, cross_entropy, defense="dp:sigma=1")
    guard.loss(model(torch.rand(5, 2, 6)), torch.arange(5) % 3).backward()
    optimizer.step()
    assert all(change.any() for change in guard.update().values())


def test_a_restore_that_fails_keeps_what_was_spent() -> None:
    loop = Loop("dp:sigma=1")
    loop.protect()
    loop.train(3)
    checkpoint = loop.guard.checkpoint()
    other = Loop("dp:sigma=1")
    other.protect(model=nn.Sequential(Net(), nn.Linear(3, 3)))
    with pytest.raises(GradveilError, match="another model"):
        other.guard.restore(checkpoint)
    assert other.guard.log.ledger.steps == 3


def test_a_checkpoint_of_another_optimizer_is_refused() -> None:
    model = Net()
    first = gradveil.protect(model, torch.optim.SGD(model.parameters(), lr=LR), cross_entropy, defense=NOISE)
    checkpoint = first.checkpoint()
    first.close()
    second = gradveil.protect(model, torch.optim.Adam(model.parameters()), cross_entropy, defense=NOISE)
    with pytest.raises(GradveilError, match="other optimizers"):
        second.restore(checkpoint)


def test_an_empty_batch_fits_models_that_reshape() -> None:
    class Reshaping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(inputs.view(inputs.size(0), -1))

    client = gradveil.Client(Reshaping(), defense="dp:sigma=1")
    inputs, targets = examples(n=20)
    for batch in client.sample(TensorDataset(inputs.view(20, 2, 3), targets), rate=1e-9, steps=2):
        assert len(batch[0]) == 0
        client.step(*batch)
    assert all(change.any() for change in client.reply().values())


def test_a_thread_that_failed_in_a_step_holds_up_nobody() -> None:
    loop = Loop(NOISE)
    loop.protect()
    loop.backward()

    def fail(*_: Any) -> None:
        raise ValueError("a hook of the loop's own")

    hook = loop.optimizer.register_step_pre_hook(fail)

    def step() -> None:
        with pytest.raises(ValueError):
            loop.optimizer.step()

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    hook.remove()
    loop.guard.new_round(loop.broadcast)
    loop.train()
    assert loop.bareness() is None
    assert loop.guard.update()


def test_states_of_layers_that_are_no_tensors_are_left_out_of_a_broadcast() -> None:
    class Noted(Net):
        def get_extra_state(self) -> dict[str, int]:
            return {"note": 1}

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError(state)

    loop = Loop(NOISE)
    loop.protect(model=Noted())
    loop.train()
    loop.guard.update()
    loop.guard.new_round(loop.broadcast)
    loop.train()
    assert sorted(loop.guard.state_dict()) == sorted(parameters_of(loop.model))


def test_a_state_has_tied_and_shared_tensors_under_all_their_names() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.head
            self.register_buffer("one", torch.ones(2))
            self.register_buffer("other", self.one)  # type: ignore[arg-type]
            self.register_buffer("passing", torch.ones(2), persistent=False)
            self._register_state_dict_hook(lambda _m, state, *_: {n: t.clone() for n, t in state.items()})

    loop = Loop(NOISE)
    loop.protect(model=Tied())
    loop.train()
    assert sorted(loop.guard.state_dict()) == sorted(loop.model.state_dict())


@pytest.mark.parametrize("targets", [(torch.tensor([0]),), {"labels": torch.tensor([0])}, [0]])
def test_targets_of_another_kind_are_one_line(targets: Any) -> None:
    loop = Loop(NOISE)
    loop.protect()
    with pytest.raises(GradveilError, match="one of targets"):
        loop.guard.loss(loop.model(loop.inputs), targets)


def test_what_has_nothing_to_train_is_one_line() -> None:
    frozen = Net().requires_grad_(False)
    for model in (frozen, nn.Flatten()):
        with pytest.raises(GradveilError, match="no parameter to train"):
            gradveil.Client(model, defense=NOISE)


def test_optimizers_that_cannot_be_guarded_are_one_line() -> None:
    model = Net()
    with pytest.raises(GradveilError, match="optimizers"):
        gradveil.protect(model, torch.optim.SparseAdam(model.parameters()), cross_entropy, defense=NOISE)


# -------------------------------------------------------------------------- what a second adversary broke of the mends


def clipped_sums(model: nn.Module, loss: Any, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The sum of clipped gradients of each step, in bounds: without noise, and at the same parameters in each step."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.0), []
    with gradveil.protect(model, optimizer, loss, defense="dp:sigma=0,bound=1") as guard:
        for inputs, targets in batches:
            optimizer.zero_grad()
            guard.loss(model(inputs), targets).backward()
            optimizer.step()
            found.append(torch.cat([p.grad.flatten() * len(inputs) for p in model.parameters() if p.grad is not None]))
    return found


def drawn(seed: int, n: int = 64) -> tuple[Tensor, Tensor]:
    return 3 * torch.randn(n, 4, generator=torch.Generator().manual_seed(seed)), torch.zeros(n).long()


class Remembering(nn.Module):
    """Keeps its last input and uses it in the next pass; wide enough for the layer rules if asked for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, width), nn.Linear(width, 2)
        self.middle = nn.Linear(width, width) if width > 100 else nn.Identity()
        self.last: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if self.last is not None and self.last.shape == inputs.shape:
            hidden = hidden * (1 + self.last.sum(-1, keepdim=True))
        self.last = inputs.detach()
        out: Tensor = self.head(torch.tanh(self.middle(hidden)))
        return out


@pytest.mark.parametrize("width", [8, 1100])
def test_what_a_model_remembers_reaches_no_other_example(width: int) -> None:
    first, (inputs, targets) = drawn(1), drawn(2, 65)
    one = clipped_sums(Remembering(width), cross_entropy, [first, (inputs[:64], targets[:64]), first])
    other = clipped_sums(Remembering(width), cross_entropy, [first, (inputs[1:], targets[1:]), first])
    assert (one[2] - other[2]).norm() < 1e-3, "in the next step"
    inputs, targets = drawn(3, 128)
    moved = torch.arange(128).roll(1)
    one = clipped_sums(Remembering(width), cross_entropy, [(inputs, targets)])
    other = clipped_sums(Remembering(width), cross_entropy, [(inputs[moved], targets)])
    assert (one[0] - other[0]).norm() < 1e-2, "in the next part of a batch"


def one_example_larger() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    inputs, targets = drawn(4)
    return (inputs, targets), (torch.cat([300 * inputs[:1], inputs[1:]]), targets)


ROUNDED = """
class Rounded(torch.autograd.Function):  # by the scale of the whole tensor, and under vmap by that of all examples
    @staticmethod
    def forward(x):
        return torch.round(x / x.abs().max() * 2) * x.abs().max() / 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient

    @staticmethod
    def vmap(info, places, x):
        return Rounded.apply(x), places[0]

rounded = Rounded.apply
"""
DEFINED = """
torch.library.define("own::scale", "(Tensor x) -> Tensor")

@torch.library.impl("own::scale", "CPU")
def scale(x):
    return x.abs().max().clone()

@torch.library.register_vmap("own::scale")
def _(info, places, x):
    return torch.ops.own.scale(x), None

def rounded(x):
    largest = torch.ops.own.scale(x.detach())
    return x + (torch.round(x / largest * 2) * largest / 2 - x).detach()
"""
QUANTISED = """
import torch
from torch import nn
%s
class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, inputs):
        return self.head(rounded(self.first(inputs)))

from test_adversary import clipped_sums, cross_entropy, one_example_larger
one, other = one_example_larger()
a, b = (clipped_sums(Quantised(), cross_entropy, [batch])[0] for batch in (one, other))
print(float((a - b).norm()))
"""


@pytest.mark.integration
@pytest.mark.parametrize("rule", [ROUNDED, DEFINED])
def test_a_vmap_rule_of_ones_own_mixes_no_examples(rule: str) -> None:
    """In a process of its own: such a rule anywhere in a process has gradients taken one by one."""
    here, package = Path(__file__).parent, Path(gradveil.__file__).parent
    places = os.pathsep.join(map(str, [here, here.parent, package.parent]))
    ran = subprocess.run(
        [sys.executable, "-c", QUANTISED % rule], env=os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert 0 < float(ran.stdout) <= 2.001, "one example was replaced"


class Levelled(nn.Module):
    """Divides by a running mean of itself, in a buffer, or stops after a large output, by a counter."""

    level: Tensor
    large: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.last = 1.0
        self.register_buffer("level", torch.ones(()))
        self.register_buffer("large", torch.tensor(0))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(outputs, targets)
        if outputs.requires_grad and len(outputs) > 1:
            self.last = 0.9 * self.last + 0.1 * loss.item()
            self.level = 0.9 * self.level + 0.1 * loss.detach()
            self.large += (outputs.detach().abs() > 100).sum()
        return 0.1 * loss / self.last / self.level * (self.large == 0)


class PlainLevelled:
    """The same in an object that is no module, in a tensor that is written under vmap too."""

    def __init__(self) -> None:
        self.level = torch.ones(())

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(outputs, targets)
        level, self.level = self.level.detach(), 0.9 * self.level + 0.1 * loss
        return loss / level


def levelled_in_a_function() -> Any:
    levelled = Levelled()
    return lambda outputs, targets: levelled(outputs, targets)


@pytest.mark.parametrize(
    ("loss", "width"), [(Levelled, 8), (PlainLevelled, 8), (levelled_in_a_function, 8), (PlainLevelled, 1100)]
)
def test_what_a_loss_remembers_reaches_no_other_example(loss: Any, width: int) -> None:
    (one, other), later = one_example_larger(), drawn(5)
    middle = nn.Linear(width, width) if width > 100 else nn.Identity()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), middle, nn.Linear(width, 2))
    found = [clipped_sums(model, loss(), [batch, later]) for batch in (one, other)]
    assert 0 < (found[0][0] - found[1][0]).norm() <= 2.001, "one example was replaced"
    torch.testing.assert_close(found[0][1], found[1][1])


def test_a_loss_that_cannot_be_copied_is_one_line() -> None:
    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(outputs, targets)

    with pytest.raises(GradveilError, match="loss cannot be copied"):
        clipped_sums(nn.Linear(4, 2), Locked(), [drawn(5)])


def test_a_counter_of_data_reaches_no_later_step() -> None:
    class Counting(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(4, 2)
            self.register_buffer("seen", torch.tensor(0))

        def forward(self, inputs: Tensor) -> Tensor:
            self.seen = self.seen + (inputs > 0).sum()
            out: Tensor = self.head(inputs) * torch.cos(self.seen * torch.pi / 4)
            return out

    (inputs, targets), later = drawn(6), drawn(7)
    inputs[0] = inputs[0].abs()
    one = clipped_sums(Counting(), cross_entropy, [(inputs, targets), later])
    other = clipped_sums(Counting(), cross_entropy, [(torch.cat([-inputs[:1], inputs[1:]]), targets), later])
    torch.testing.assert_close(one[1], other[1])


@pytest.mark.integration
def test_a_model_in_a_new_wrapper_goes_on_counting() -> None:
    layer, spent = nn.Linear(4, 2), []
    optimizer, (inputs, targets) = torch.optim.SGD(layer.parameters(), lr=LR), drawn(8)
    for wrapped in (layer, nn.Sequential(layer), torch.compile(layer, backend="eager")):
        with gradveil.protect(wrapped, optimizer, cross_entropy, defense="dp:sigma=1") as guard:  # type: ignore[arg-type]
            optimizer.zero_grad()
            guard.loss(wrapped(inputs), targets).backward()
            optimizer.step()
            guard.update()
            spent.append(guard.privacy_spent(1e-5))
    assert spent[0] < spent[1] < spent[2]


def steps_counted(model: nn.Module) -> int:
    """After one more step under dp."""
    optimizer, (inputs, targets) = torch.optim.SGD(model.parameters(), lr=LR), drawn(8)
    with gradveil.protect(model, optimizer, cross_entropy, defense="dp:sigma=1") as guard:
        optimizer.zero_grad()
        guard.loss(model(inputs), targets).backward()
        optimizer.step()
        guard.update()
    return guard.log.ledger.steps


def test_a_model_with_new_layers_or_parameters_goes_on_counting() -> None:
    model = nn.Sequential(nn.Linear(4, 2, bias=False))
    assert steps_counted(model) == 1
    nn.utils.parametrizations.weight_norm(model[0])
    assert steps_counted(model) == 2
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert steps_counted(model) == 3
    model[0] = nn.Linear(4, 2)
    assert steps_counted(model) == 4
    other = nn.Linear(4, 2)
    other.weight = model[0].weight  # type: ignore[assignment]
    assert steps_counted(other) == 5
    assert steps_counted(nn.Sequential(nn.Linear(4, 2), nn.Identity())) == 1, "another model counts anew"


def test_dp_after_a_defense_without_a_proof_promises_nothing() -> None:
    model, (inputs, targets), spent = nn.Linear(4, 2), drawn(9), []
    for defense in ("noise:sigma=0.0001", "dp:sigma=5"):
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with gradveil.protect(model, optimizer, cross_entropy, defense=defense) as guard:
            guard.loss(model(inputs), targets).backward()
            optimizer.step()
            guard.update()
            spent.append(guard.privacy_spent(1e-5))
    assert spent == [float("inf"), float("inf")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_own_statistics_are_known_to_the_next_guard_and_in_another_type(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer, (inputs, targets) = torch.optim.SGD(model.parameters(), lr=LR), drawn(10)
    sent = parameters_of(model)
    for _ in range(2):
        with gradveil.protect(model, optimizer, cross_entropy, defense=NOISE) as guard:
            for _ in range(2):
                optimizer.zero_grad()
                guard.loss(model(inputs), targets).backward()
                optimizer.step()
                assert not guard.state_dict()["1.running_mean"].any(), "the server's are zeros"
                assert model[1].running_mean.any()
                statistics = {n: b.to(dtype) for n, b in model.named_buffers() if b.is_floating_point()}
                guard.new_round({n: p.to(dtype) for n, p in sent.items()} | statistics)


def test_what_a_server_sends_is_not_taken_for_the_clients_own() -> None:
    """A counter that equals the client's, and statistics that are the client's in another order."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer, (inputs, targets) = torch.optim.SGD(model.parameters(), lr=LR), drawn(10)
    guard = gradveil.protect(model, optimizer, cross_entropy, defense=NOISE)
    guard.loss(model(inputs), targets).backward()
    optimizer.step()
    guard.update()
    sent = {"1.num_batches_tracked": torch.tensor(1), "1.running_mean": model[1].running_mean.flip(0)}
    guard.new_round(parameters_of(model) | sent)
    optimizer.zero_grad()
    guard.loss(model(inputs), targets).backward()
    optimizer.step()
    assert all(torch.equal(guard.state_dict()[name], buffer) for name, buffer in sent.items())


def test_an_empty_batch_leaves_running_statistics_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    guard = gradveil.protect(model, optimizer, cross_entropy, defense=NOISE)
    guard.loss(model(torch.zeros(0, 4)), torch.zeros(0).long()).backward()
    optimizer.step()
    assert torch.equal(model[1].running_var, torch.ones(3))  # type: ignore[arg-type]


def test_spectral_norm_works_under_dp() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))
    loop = Loop("dp:sigma=1")
    loop.protect(model=nn.Sequential(layer, nn.Linear(3, 3)))
    loop.train(2)
    assert loop.guard.log.ledger.steps == 2


def test_equal_tensors_count_each_in_a_clip_of_all() -> None:
    update = {f"b{place}": torch.full((16,), -0.01) for place in range(100)}
    sent = gradveil.defend_update(update, defense="clip:bound=0.01,per=global")
    assert torch.cat(list(sent.values())).norm() <= 0.010001


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(inputs).mean(1))
        return out


@pytest.mark.parametrize("defense", [NOISE, "clip:bound=1", "dp:sigma=1", "clip:bound=1,per=example"])
def test_batches_of_different_lengths_before_one_step(defense: str) -> None:
    """Defenses that need nothing but the tensors take them; others say in one line what to do."""
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    guard = gradveil.protect(model, optimizer, cross_entropy, defense=defense)
    for length in (5, 7):
        (0.5 * guard.loss(model(torch.randint(20, (4, length))), torch.tensor([0, 1, 0, 1]))).backward()
    if defense in (NOISE, "clip:bound=1"):
        optimizer.step()
        assert guard.update()
    else:
        with pytest.raises(GradveilError, match="different shapes"):
            optimizer.step()


class Heated(nn.Module):
    """A temperature that a loop may set, a number that is of the last examples, and an activation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.head, self.temperature, self.last = (
            nn.Linear(4, 8),
            nn.ReLU(),
            nn.Linear(8, 2),
            1.0,
            0.0,
        )

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(self.act(self.first(inputs))) / self.temperature * (1 + self.last)
        self.last = 0.0 if torch._C._functorch.is_batchedtensor(inputs) else float(inputs.mean())
        return out


@pytest.mark.parametrize("evaluates", [False, True])
def test_dp_follows_numbers_that_a_loop_sets_and_not_those_of_examples(evaluates: bool) -> None:
    model, (inputs, targets) = Heated(), drawn(11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = gradveil.protect(model, optimizer, cross_entropy, defense="dp:sigma=0,bound=1000")
    for temperature in (1.0, 100.0):
        model.temperature = temperature
        if evaluates:
            with torch.no_grad():
                model(inputs + 1)
        optimizer.zero_grad()
        guard.loss(model(inputs), targets).backward()
        optimizer.step()
        plain = Heated()
        plain.temperature = temperature
        cross_entropy(plain(inputs), targets).backward()
        torch.testing.assert_close(model.first.weight.grad, plain.first.weight.grad)


class Fragile(Heated):
    """Fails on large examples, after it set a number that is of them."""

    def forward(self, inputs: Tensor) -> Tensor:
        out = super().forward(inputs)
        if not torch._C._functorch.is_batchedtensor(inputs) and inputs.max() > 9:
            raise ValueError("out of range")
        return out


class Forgetful(Heated):
    """Its number is of the last examples only after the backward pass has computed a part again."""

    def hidden(self, inputs: Tensor) -> Tensor:
        self.last = float(inputs.mean())
        hidden: Tensor = self.act(self.first(inputs))
        return hidden

    def forward(self, inputs: Tensor) -> Tensor:
        last = self.last
        if torch._C._functorch.is_batchedtensor(inputs):
            hidden = self.act(self.first(inputs))
        else:
            hidden, self.last = checkpoint(self.hidden, inputs, use_reentrant=False), 0.0
        out: Tensor = self.head(hidden) * (1 + last)
        return out


@pytest.mark.parametrize("kind", [Fragile, Forgetful])
def test_dp_follows_no_number_of_a_pass_that_failed_or_ran_again(kind: type[nn.Module]) -> None:
    def gradient(before: Tensor) -> Tensor:
        model, (inputs, targets) = kind(), drawn(11)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        guard = gradveil.protect(model, optimizer, cross_entropy, defense="dp:sigma=0,bound=1000")
        with contextlib.suppress(ValueError):
            guard.loss(model(before), targets).backward()
        optimizer.zero_grad()
        guard.loss(model(inputs), targets).backward()
        optimizer.step()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    first, _ = drawn(12)
    assert torch.equal(gradient(first), gradient(first + 10)), "the examples before are not in this step"


def test_dp_refuses_a_layer_that_was_replaced_after_protect() -> None:
    model, (inputs, targets) = Heated(), drawn(11)
    guard = gradveil.protect(model, torch.optim.SGD(model.parameters(), lr=LR), cross_entropy, defense="dp:sigma=1")
    model.act = nn.Tanh()  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(GradveilError, match="'act' was replaced"):
            guard.loss(model(inputs), targets)
    guard.close()
    assert steps_counted(model) == 1


def test_dp_refuses_a_number_that_became_a_tensor() -> None:
    model, (inputs, targets) = Heated(), drawn(11)
    guard = gradveil.protect(model, torch.optim.SGD(model.parameters(), lr=LR), cross_entropy, defense="dp:sigma=1")
    model.temperature = torch.tensor(3.0)  # type: ignore[assignment]
    with pytest.raises(GradveilError, match="'temperature' was replaced"):
        guard.loss(model(inputs), targets)
