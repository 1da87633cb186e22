"""A loop of one's own that speaks in state dicts and lists of arrays, as Flower does: defend it, save it, attack it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import gradveil as gv
from gradveil import models
from gradveil.core.types import Params, Recipe
from gradveil.data import load
from gradveil.threat import load_observations, observe, save_observations, threat_model

DATA, MODEL = load("mnist-samples"), "mlp:hidden=16"
PRIVATE = DATA.batch([0])


def trained(model: nn.Module) -> Params:
    """One plain step on a private image, and the difference of the state dicts: nothing here knows of Gradveil."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.cross_entropy(model(PRIVATE.inputs), PRIVATE.labels).backward()
    optimizer.step()
    return {name: tensor - before[name] for name, tensor in model.state_dict().items()}


def psnr_of_the_attack(folder: Path, defense: str) -> float:
    """How close an attack comes to the private image behind an update that left as a list of arrays."""
    model = models.build(MODEL, DATA.domain, seed=0)
    sent = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    update = gv.defend_update(trained(model), defense=defense)

    # The client replies as Flower does: arrays in the order of the state dict.
    arrays = [tensor.numpy() for tensor in update.values()]

    # A server, or whoever taps its line, has names, broadcast and arrays, and saves what it saw.
    reply = {name: torch.from_numpy(array) for name, array in zip(sent, arrays, strict=True)}
    seen = observe(
        module=models.build(MODEL, DATA.domain, seed=0),
        model=MODEL,
        domain=DATA.domain,
        sent=sent,
        reply=reply,
        batch_size=1,
        recipe=Recipe(sends="delta", lr=0.1),
        defense=defense,
        threat=threat_model("C"),
    )
    path = folder / f"{defense.partition(':')[0]}.safetensors"
    save_observations(path, [seen])

    # Later, and elsewhere: the file is all that the attack has.
    (found,) = gv.attacks.ATTACKS.build("analytic")(load_observations(path))
    error = float((found.inputs - PRIVATE.inputs).square().mean())
    return -10 * math.log10(max(error, 1e-12))


def test_a_bare_update_in_arrays_gives_the_image_away_and_a_noisy_one_does_not(tmp_path: Path) -> None:
    assert psnr_of_the_attack(tmp_path, "none") > 60
    assert psnr_of_the_attack(tmp_path, "noise:sigma=0.1") < 15


def test_the_server_steps_along_a_defended_update_as_along_any_other() -> None:
    model = models.build(MODEL, DATA.domain, seed=0)
    sent = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    update = gv.defend_update(trained(model), defense="clip:bound=0.01,per=global")
    assert torch.cat([tensor.flatten() for tensor in update.values()]).norm() <= 0.01 * (1 + 1e-5)
    model.load_state_dict({name: sent[name] + update[name] for name in sent})


def test_counters_of_a_state_dict_leave_as_they_are() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784), nn.Linear(784, 10))
    state = model.state_dict()
    sent = gv.defend_update(state, defense="noise:sigma=0.1")
    assert sent.keys() == state.keys()
    assert torch.equal(sent["1.num_batches_tracked"], state["1.num_batches_tracked"])
    assert not torch.equal(sent["2.weight"], state["2.weight"])


def test_a_list_of_arrays_has_no_names_and_is_refused_in_one_line() -> None:
    arrays = [tensor.numpy() for tensor in trained(models.build(MODEL, DATA.domain, seed=0)).values()]
    with pytest.raises(gv.GradveilError, match="a mapping from names to tensors, not list"):
        gv.defend_update(arrays, defense="noise:sigma=0.1")  # type: ignore[arg-type]
