"""Somebody who tries to break the search behind CENSOR's right angles: odd replies, odd models, the bare gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from exchanges import FEDSGD, SAMPLES
from gradveil import models
from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.against.censor import MatchBareReply, SolveRightAngles, right_angle
from gradveil.attacks.informed import counter_for
from gradveil.attacks.parts import right_angles
from gradveil.attacks.parts.labels import infer_labels
from gradveil.attacks.parts.right_angle_labels import bare_replies
from gradveil.attacks.parts.right_angles import Equations, SmoothPictures, exchanges_of
from gradveil.auditing import make_case
from gradveil.auditing.sources import Simulation
from gradveil.client import SimulatedClient
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Recipe
from gradveil.data import load
from gradveil.defenses import DEFENSES, Censor, PublicData
from gradveil.metrics import ranks
from gradveil.models import Functional
from gradveil.threat import Observation, observe, threat_model

FEW = Budget(1, 3)
IMAGE = SAMPLES.batch([3])


def small(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 5, 4), *layers, nn.Sigmoid(), nn.Flatten(), nn.Linear(196, 10))


def replied(
    module: nn.Module,
    batch: Batch = IMAGE,
    defense: str = "censor:trials=1",
    *,
    count: int = 2,
    moved: float = 0.1,
    threat: str = "C",
    recipe: Recipe = FEDSGD,
) -> Observation:
    """What an observer keeps of replies to so many broadcasts, which differ as those of a training do."""
    rng, client = (
        torch.Generator().manual_seed(0),
        SimulatedClient(module, recipe=recipe, defense=DEFENSES.build(defense)),
    )
    sent, seen = models.trained_parameters(module), list[Observation]()
    for number in range(count):
        seen.append(
            observe(
                module=module, model="own", domain=SAMPLES.domain, sent=sent, batch=batch, recipe=recipe,
                defense=defense, reply=client.reply(sent, batch, Stream.seeded(0, "defense", number)).update,
                threat=threat_model(threat),
            )
        )  # fmt: skip
        sent = {name: p + moved * torch.randn(p.shape, generator=rng) for name, p in sent.items()}
    return replace(seen[-1], earlier=tuple(seen[:-1]))


def found(seen: Observation, budget: Budget = FEW) -> Tensor:
    return ATTACKS.build("informed", budget)([seen], seeds=[0])[0].inputs


def residuals(seen: Observation, inputs: Tensor) -> Tensor:
    """Of the equations of a known image."""
    pictures = SmoothPictures(SAMPLES.domain, torch.device("cpu"))
    train_mode = seen.recipe is not None and seen.recipe.train_mode
    assert seen.labels is not None
    asked = Equations(
        Functional(seen.module, train_mode=train_mode), seen, exchanges_of([seen], whole=False), seen.labels[None],
        pictures, with_norms=True, whole=False,
    )  # fmt: skip
    waves = torch.einsum("bead,ce->bcad", inputs - pictures.mean, pictures.colors)
    return asked.residuals(
        (torch.einsum("bcad,ia,jd->bcij", waves, pictures.down, pictures.across) / pictures.amplitudes)[None]
    )


def test_models_in_double_precision_are_solved() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        seen = replied(small(), Batch(IMAGE.inputs.double(), IMAGE.labels))
        assert bool(found(seen).isfinite().all())
    finally:
        torch.set_default_dtype(before)


def wider(_: Observation) -> Observation:
    torch.manual_seed(1)
    other = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.Sigmoid(), nn.Flatten(), nn.Linear(392, 10))
    return replied(other, count=1)


def without_first(one: Observation) -> Observation:
    return replace(one, reply=dict(list(one.reply.items())[1:]))


STRANGE: dict[str, Callable[[Observation], Observation]] = {
    "another model": wider,
    "other names": lambda _: replied(models.build("lenet:init=wide", SAMPLES.domain, seed=0), count=1),
    "a part frozen": without_first,
    "several steps": partial(replace, kind="delta"),
    "another batch size": partial(replace, batch_size=2),
}


@pytest.mark.parametrize("change", STRANGE.values(), ids=STRANGE.keys())
def test_an_earlier_reply_of_another_kind_is_left_out(change: Callable[[Observation], Observation]) -> None:
    seen = replied(small())
    mixed, alone = replace(seen, earlier=(change(seen.earlier[0]),)), replace(seen, earlier=())
    assert torch.allclose(found(mixed), found(alone), atol=1e-3)


def test_all_tensors_are_one_vector_in_whatever_order_they_were_written_down() -> None:
    seen = replied(small(), defense="censor:trials=1,layerwise=false")
    turned = replace(seen.earlier[0], reply=dict(reversed(seen.earlier[0].reply.items())))
    assert torch.allclose(found(replace(seen, earlier=(turned,))), found(seen), atol=1e-3)


def test_a_cost_beyond_all_numbers_is_no_cost() -> None:
    huge = right_angles._costs(torch.tensor([[math.inf], [math.nan], [1.0]]), torch.zeros(3, 1), 1.0)
    assert huge.tolist() == [math.inf, math.inf, 1.0]


@pytest.mark.parametrize("size", [1, 2])
def test_what_rounding_left_of_a_bias_is_no_equation(size: int) -> None:
    """Batch norm takes the mean away, and with it the gradient of a bias before it."""
    batch = SAMPLES.batch(range(3, 3 + size))
    seen = replied(small(nn.BatchNorm2d(4)), batch, threat="C+labels", recipe=Recipe(train_mode=True))
    assert float(residuals(seen, batch.inputs).abs().max()) < 1e-2
    assert float(residuals(seen, 1 - batch.inputs).abs().mean()) > 0.05


def test_a_broadcast_of_nan_is_recorded_and_harms_no_other() -> None:
    seen = replied(small())
    broken = {name: tensor * math.nan for name, tensor in seen.sent.items()}
    (bad,) = ATTACKS.build("informed", FEW)([replace(seen, sent=broken)], seeds=[0])
    assert bad.stopped == "diverged"
    assert infer_labels([replace(seen, sent=broken)], 1).item() == 3, "the broadcast before tells the label"
    (listed,) = ATTACKS.build("identify")([replace(seen, sent=broken, candidates=SAMPLES)], seeds=[0])
    assert listed.stopped == "diverged"


def test_many_clients_are_solved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [replied(small(), SAMPLES.batch([i]), count=1) for i in range(3)]
    seen = [replace(one, module=seen[0].module, sent=seen[0].sent) for one in seen]
    attack = ATTACKS.build("informed", FEW)
    together = attack(seen, seeds=[0, 1, 2])
    monkeypatch.setattr(right_angles, "_ROOM_OF_ALL", {"cpu": 1})
    parts = attack(seen, seeds=[0, 1, 2])
    assert right_angles.clients_at_once(seen[0], torch.zeros(3, 1), 1) == 1
    for one, other in zip(together, parts, strict=True):
        assert torch.allclose(one.inputs, other.inputs, atol=1e-2)
    assert together[0].strategy.endswith("3 together")
    assert parts[0].strategy.endswith("1 together")


def test_rounds_that_are_far_away_do_not_hide_right_angles() -> None:
    """A CENSOR that would rest after a million rounds is CENSOR until then."""
    usual, other = (replied(small(), defense=f"censor:trials=3{more}") for more in ("", ",rounds=1000000"))
    assert bare_replies(other, right_angle(Censor(rounds=1000000))) == []
    assert isinstance(_move(other), SolveRightAngles)
    assert torch.allclose(found(usual), found(other), atol=1e-3)
    assert infer_labels([other], 1).item() == 3


def _move(seen: Observation) -> object:
    moves = counter_for(seen)
    assert moves is not None
    return moves.moves[0]


def test_a_bare_gradient_among_the_replies_is_found_and_matched() -> None:
    """Two rounds of CENSOR are over: the reply in the middle is the gradient itself."""
    module, spec = small(), "censor:trials=1,rounds=2"
    seen, plain = replied(module, defense=spec, count=3), replied(module, defense="none", count=3)
    middle = replace(seen.earlier[1], reply=plain.earlier[1].reply)
    mixed = replace(seen, earlier=(seen.earlier[0], middle))
    move = _move(mixed)
    assert isinstance(move, MatchBareReply)
    assert move.bare is middle
    assert infer_labels([mixed], 1).item() == 3, "by the right angles of the others"
    assert infer_labels([replace(middle, earlier=(seen.earlier[0],))], 1).item() == 3, "by the gradient itself"
    (one,), (last,) = (ATTACKS.build(name, Budget(1, 5))([mixed], seeds=[0]) for name in ("informed", "ig"))
    assert one.objective < 0.05 < 0.5 < last.objective


def test_where_nobody_can_tell_the_bare_gradient_nothing_is_solved() -> None:
    """A public gradient at right angles has a last layer whose rows add up to zero, too."""
    seen = replied(small(), defense="censor:trials=1,source=public,fallback=original", count=1)
    assert counter_for(seen) is None
    own = replied(small(), defense="censor:trials=1,rounds=9", count=1)
    assert counter_for(replace(own, loss=lambda outputs, _: outputs.square().sum())) is None


@pytest.mark.parametrize(("options", "tells"), [("norms=public", True), ("norms=public,trials=1", False)])
def test_the_best_of_several_draws_goes_down_the_gradient(options: str, tells: bool) -> None:
    """Without a projection and with norms of others, one draw says nothing, and the best of twenty says something."""
    spec, images = f"censor:{options},projection=none", range(24)
    module = models.build("lenet:init=wide", SAMPLES.domain, seed=0)
    sent, public = models.trained_parameters(module), PublicData(SAMPLES.batch(images).inputs)
    client = SimulatedClient(module, recipe=FEDSGD, defense=DEFENSES.build(spec), public=public)
    replies = [client.reply(sent, SAMPLES.batch([i]), Stream.seeded(0, "defense", i)).update for i in images]
    seen = [
        observe(
            module=module, model="lenet:init=wide", domain=SAMPLES.domain, sent=sent, reply=reply, recipe=FEDSGD,
            defense=spec, threat=threat_model("D"), batch=SAMPLES.batch([i]), candidates=SAMPLES,
        )
        for i, reply in enumerate(replies)
    ]  # fmt: skip
    scores = torch.stack([one.scores for one in ATTACKS.build("identify")(seen) if one.scores is not None])
    place = ranks(scores, torch.arange(len(images))).float().mean()
    assert place < 32 if tells else place == 50.5


def tensors(thing: object, known: set[int]) -> Iterator[Tensor]:
    """All tensors that somebody reaches from here by attributes, items and what functions hold."""
    if id(thing) in known or isinstance(thing, str | bytes | int | float | type(None)):
        return
    known.add(id(thing))
    inside: list[object] = [*vars(thing).values()] if hasattr(thing, "__dict__") and not isinstance(thing, type) else []
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        inside += [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset):
        inside += [*thing]
    inside += [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
    inside += [getattr(thing, name, None) for name in ("__self__", "__func__", "func", "args", "keywords")]
    for part in inside:
        yield from tensors(part, known)


@pytest.mark.parametrize("defense", ["none", "censor:trials=1,norms=public", "dcs2:iterations=1,start=public"])
def test_nothing_that_an_attack_gets_leads_to_a_private_example(defense: str) -> None:
    """Clients are told which examples are private, so that none passes for public; what is seen of them is not."""
    fields = {"data": "cifar10-samples", "model": "mlp", "images": 3, "threat": "C+ask-again+public-data"}
    case = make_case({**fields, "attacks": ["informed:replies=2"], "defenses": [defense]})
    data = load("cifar10-samples")
    clients = Simulation(case, data, lambda: models.build("mlp", data.domain, seed=0))
    attack = ATTACKS.build("informed:replies=2", FEW)
    seen = clients.exchange(defense, DEFENSES.build(defense), attack).observations
    private, reached = clients.private.batch.inputs.flatten(1), list(tensors([*seen], set()))
    assert any(tensor is seen[0].reply["fc.weight"] for tensor in reached), "the search goes deep enough"
    for tensor in reached:
        if tensor.numel() and tensor.numel() % private.shape[1] == 0 and not tensor.is_complex():
            rows = tensor.detach().reshape(-1, private.shape[1]).float()
            assert float(torch.cdist(rows, private, p=math.inf).min()) > 1e-3
