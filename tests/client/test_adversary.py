"""What an adversary broke once: bare steps after an error, buffers that tell of the examples, counts that were lost."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
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


def test_dp_refuses_a_buffer_that_carries_examples_into_later_steps() -> None:
    model = nn.Sequential(Centred(torch.zeros(6)), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    guard = gradveil.protect(model, optimizer, cross_entropy, defense="dp:sigma=1")
    inputs, targets = examples()
    guard.loss(model(inputs), targets).backward()
    with pytest.raises(GradveilError, match=r"buffer '0\.mean'"):
        optimizer.step()


def test_dp_takes_a_counter_in_a_buffer() -> None:
    class Counted(Net):
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
            self.register_buffer("other", self.one)
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
