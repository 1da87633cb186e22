"""CENSOR without a list: pictures from the right angles of several replies, labels from those of one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from exchanges import FEDSGD, SAMPLES, observed, private_batches
from gradveil import models
from gradveil.attacks import ATTACKS, Budget, Server
from gradveil.attacks.informed import answers, counter_for
from gradveil.attacks.parts import right_angles
from gradveil.attacks.parts.labels import infer_labels
from gradveil.attacks.parts.right_angles import Equations, SmoothPictures, exchanges_of
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Params, Recipe
from gradveil.defenses import DEFENSES
from gradveil.domains import Images
from gradveil.engine.network import SharedNetwork
from gradveil.metrics import psnr
from gradveil.models import Functional
from gradveil.models.resnet import BasicBlock
from gradveil.threat import Observation, observe, threat_model
from interrogation import interrogated

WIDE = "lenet:init=wide"
ONCE = Budget(1, 20)


def rounds(
    batch: Batch,
    broadcasts: list[Params],
    defense: str = "censor:trials=2",
    threat: str = "F",
    module: nn.Module | None = None,
) -> Observation:
    """What an observer has who kept the replies of one client to these broadcasts."""
    module = models.build(WIDE, SAMPLES.domain, seed=0) if module is None else module
    client = SimulatedClient(module, recipe=FEDSGD, defense=DEFENSES.build(defense))
    seen = [
        observe(
            module=module, model=WIDE, domain=SAMPLES.domain, sent=sent, batch=batch, recipe=FEDSGD, defense=defense,
            reply=client.reply(sent, batch, Stream.seeded(0, "defense", number)).update, threat=threat_model(threat),
        )
        for number, sent in enumerate(broadcasts)
    ]  # fmt: skip
    return replace(seen[-1], earlier=tuple(seen[:-1]))


def weights(count: int, *, moved: float) -> list[Params]:
    """Broadcasts that differ by so much from one to the next, as those of a training do."""
    rng = torch.Generator().manual_seed(0)
    path = [{name: p.detach() for name, p in models.build(WIDE, SAMPLES.domain, seed=0).named_parameters()}]
    for _ in range(count - 1):
        path.append({name: p + moved * torch.randn(p.shape, generator=rng) for name, p in path[-1].items()})
    return path


def quality(seen: Observation, batch: Batch, attack: str = "informed") -> float:
    (found,) = ATTACKS.build(attack, ONCE)([seen], seeds=[0])
    return float(psnr(found.inputs, batch.inputs).mean())


def nearest(inputs: torch.Tensor) -> int:
    gallery = SAMPLES.batch(range(len(SAMPLES))).inputs
    return int((gallery - inputs).flatten(1).norm(dim=1).argmin())


def test_sixteen_fresh_models_show_the_picture() -> None:
    (batch,) = private_batches(1)
    attack = ATTACKS.build("informed:replies=16,weights=fresh", ONCE)
    seen = interrogated(attack, batch, model=WIDE, defense="censor:trials=2")
    assert len({id(one.sent) for one in (*seen.earlier, seen)}) == 16
    (found,) = attack([seen], seeds=[0])
    assert found.labels.tolist() == batch.labels.tolist()
    assert nearest(found.inputs) == 0
    assert float(psnr(found.inputs, batch.inputs)) > 19
    assert found.objective == pytest.approx(found.trace[-1], rel=1e-2)
    assert found.trace[-1] < 1e-2 * found.trace[0]


def test_sixteen_honest_rounds_do_too_and_one_does_not() -> None:
    (batch,) = private_batches(1)
    seen = rounds(batch, weights(16, moved=0.01))
    many, one = quality(seen, batch), quality(replace(seen, earlier=()), batch)
    assert many > 18
    assert many > one + 2


def test_the_honest_model_asked_again_tells_more_each_time() -> None:
    (batch,) = private_batches(1)
    seen = rounds(batch, weights(1, moved=0) * 32)
    few = quality(replace(seen, earlier=seen.earlier[-3:]), batch)
    assert quality(seen, batch) > max(18, few + 1)


def test_angles_alone_suffice_where_norms_say_nothing() -> None:
    (batch,) = private_batches(1)
    seen = rounds(batch, weights(8, moved=0.1), defense="censor:trials=1,norms=random")
    assert quality(seen, batch) > quality(replace(seen, earlier=()), batch) + 1


def equations(seen: Observation, *, with_norms: bool = True) -> Equations:
    assert isinstance(seen.domain, Images)
    pictures = SmoothPictures(seen.domain, torch.device("cpu"))
    assert seen.labels is not None
    return Equations(
        Functional(seen.module), seen, exchanges_of([seen], whole=False), seen.labels[None], pictures,
        with_norms=with_norms, whole=False,
    )  # fmt: skip


def test_the_equations_hold_at_the_private_image_and_nowhere_else() -> None:
    batch = SAMPLES.batch([3, 4])
    asked = equations(rounds(batch, weights(3, moved=0.1), threat="F+labels"))
    pictures = asked.pictures
    waves = torch.einsum("bead,ce->bcad", batch.inputs - pictures.mean, pictures.colors)
    code = torch.einsum("bcad,ia,jd->bcij", waves, pictures.down, pictures.across) / pictures.amplitudes
    assert torch.allclose(pictures.decode(code), batch.inputs, atol=1e-4)
    assert float(asked.residuals(code[None]).abs().max()) < 1e-2
    assert float(asked.residuals(torch.zeros_like(code)[None]).abs().mean()) > 0.05
    assert asked.residuals(code[None]).shape == (1, 3 * 20) == (1, asked.total)


def test_the_derivatives_are_those_of_the_equations() -> None:
    asked = equations(rounds(SAMPLES.batch([3]), weights(2, moved=0.1), threat="F+labels"))
    rng = torch.Generator().manual_seed(0)
    code, along = (torch.randn((1, 1, 3, 32, 32), generator=rng) for _ in range(2))
    values, slopes = asked.linearised(code, torch.ones(1))
    assert torch.allclose(values, asked.residuals(code), atol=1e-4)
    step = 1e-2
    ahead, behind = asked.residuals(code + step * along), asked.residuals(code - step * along)
    expected = (slopes @ along.flatten())[0]
    assert torch.allclose((ahead - behind)[0] / (2 * step), expected, rtol=0.05, atol=0.02)


def test_layer_by_layer_gives_the_same_derivatives() -> None:
    """Of several replies to one model and batches of two; equations come in the order of the parameters."""
    asked = equations(rounds(SAMPLES.batch([3, 4]), weights(1, moved=0) * 2, threat="F+labels"))
    network = SharedNetwork(asked.one.module, asked.one.sent, train_mode=False)
    code = torch.randn((1, 2, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    layers = replace(asked, networks=(network,))
    (values, slopes), (others, expected) = (one.linearised(code, torch.ones(1)) for one in (layers, asked))
    assert torch.allclose(values, others, atol=1e-4)
    assert torch.allclose(layers.residuals(code), others, atol=1e-4)
    assert torch.allclose(slopes, expected, rtol=1e-3, atol=1e-4)


class Twice(nn.Module):
    """One layer is passed twice: what it is sent is the sum of two gradients."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(3072, 8), nn.Linear(8, 8), nn.Linear(8, 10)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1)).relu()
        for _ in range(self.times):
            x = self.again(x).relu()
        scores: torch.Tensor = self.last(x)
        return scores


@pytest.mark.parametrize("times", [1, 2])
def test_a_layer_that_is_passed_twice_is_not_solved_layer_by_layer(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(right_angles, "_LARGE", 0)
    asked = equations(rounds(SAMPLES.batch([3]), weights(1, moved=0), threat="F+labels"))
    module = Twice(times)
    sent = {name: parameter.detach() for name, parameter in module.named_parameters()}
    broadcasts = {name: parameter[None] for name, parameter in sent.items()}
    other = replace(
        asked, one=replace(asked.one, module=module, sent=sent), exchanges=asked.exchanges._replace(sent=broadcasts)
    )
    assert len(right_angles.networks_of(other)) == (1 if times == 1 else 0)


def test_with_open_weights_few_replies_of_a_residual_network_show_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose rectifiers switch show less: gradients jump there."""
    monkeypatch.setattr(right_angles, "_LARGE", 0)
    (batch,) = private_batches(1)
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), BasicBlock(8, 16, 2),
        BasicBlock(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    ).eval()  # fmt: skip
    server = Server(module, "own", {name: p.detach() for name, p in module.named_parameters()}, SAMPLES.domain)
    found = {}
    for kind in ("open", "fresh"):
        attack = ATTACKS.build(f"informed:replies=5,weights={kind}", Budget(1, 6))
        crafted = [attack.craft(server, [None] * number, 0) for number in range(5)]  # type: ignore[list-item]
        broadcasts = [one.sent for one in crafted if one is not None]
        (found[kind],) = attack([rounds(batch, broadcasts, module=module)], seeds=[0])
    assert nearest(found["open"].inputs) == 0
    better, other = (float(psnr(found[kind].inputs, batch.inputs)) for kind in ("open", "fresh"))
    assert better > max(16, other + 2)


def test_replies_to_one_model_are_taken_together_and_repeat_beyond_its_entries() -> None:
    seen = rounds(SAMPLES.batch([0]), weights(1, moved=0) * 12, threat="F+labels")
    found = exchanges_of([seen], whole=False)
    assert found.directions["fc.weight"].shape == (1, 1, 12, 7680)
    assert found.directions["fc.bias"].shape == (1, 1, 10, 10)


@pytest.mark.parametrize("options", ["fallback=original,source=public", "projection=none", "projection=released"])
def test_where_nobody_knows_of_a_right_angle_nothing_is_solved(options: str) -> None:
    (seen,) = observed(private_batches(1), defense=f"censor:trials=1,{options}")
    assert counter_for(seen) is None


def test_other_links_leave_no_counter_move_and_the_report_says_so() -> None:
    (seen,) = observed(private_batches(1), defense="censor:trials=1+noise:sigma=0.1")
    assert answers(seen)["censor:trials=1"] is None
    (alone,) = observed(private_batches(1), defense="censor:trials=1")
    (sentence,) = answers(alone).values()
    assert sentence is not None
    assert "right angles" in sentence


def test_same_seed_same_pictures_alone_or_together() -> None:
    seen = observed(private_batches(2), defense="censor:trials=1")
    attack = ATTACKS.build("informed", Budget(2, 4))
    both, again = attack(seen, seeds=[0, 1]), attack(seen[1:], seeds=[1])
    assert torch.allclose(both[1].inputs, again[0].inputs, atol=1e-2)
    assert len(both[0].objectives) == 2
    assert both[0].objective == min(both[0].objectives)


@pytest.mark.parametrize("model", [WIDE, "lenet"])
def test_one_reply_tells_the_label(model: str) -> None:
    batches = private_batches(30)
    found = infer_labels(observed(batches, model=model, defense="censor:trials=1"), 1)
    right = sum(int(label == batch.labels) for label, batch in zip(found.flatten(), batches, strict=True))
    assert right >= 28


def test_without_knowing_the_defense_it_does_not() -> None:
    batches = private_batches(30)
    found = infer_labels(observed(batches, defense="censor:trials=1", threat="B"), 1)
    right = sum(int(label == batch.labels) for label, batch in zip(found.flatten(), batches, strict=True))
    assert right <= 20


@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_reply_tells_the_labels_of_a_batch(size: int) -> None:
    batches = [SAMPLES.batch([13 * (i * size + j) % 100 for j in range(size)]) for i in range(2)]
    found = infer_labels(observed(batches, defense="censor:trials=1"), size)
    both = zip(found, batches, strict=True)
    right = sum((Counter(own.tolist()) & Counter(batch.labels.tolist())).total() for own, batch in both)
    assert right >= 0.9 * 2 * size


def test_replies_of_zeros_say_nothing_and_break_nothing() -> None:
    (seen,) = observed(private_batches(1), defense="censor:trials=1,fallback=skip")
    silent = replace(seen, reply={name: torch.zeros_like(tensor) for name, tensor in seen.reply.items()})
    (found,) = ATTACKS.build("informed", Budget(1, 2))([silent], seeds=[0])
    assert bool(found.inputs.isfinite().all())
    both = replace(seen, earlier=(silent,))
    norms = exchanges_of([both], whole=False).norms["fc.weight"]
    assert float(norms) == pytest.approx(float(seen.reply["fc.weight"].norm()), rel=1e-4)


def test_a_reply_of_numbers_that_are_none_harms_nobody_else() -> None:
    whole = [rounds(batch, weights(2, moved=0.1)) for batch in private_batches(2)]
    seen = [replace(one, earlier=(replace(one.earlier[0], sent=whole[0].earlier[0].sent),), sent=whole[0].sent)
            for one in whole]  # fmt: skip
    broken = replace(seen[0], reply={name: tensor / 0 for name, tensor in seen[0].reply.items()})
    attack = ATTACKS.build("informed", Budget(1, 3))
    bad, good = attack([broken, seen[1]], seeds=[0, 1])
    (alone,) = attack(seen[1:], seeds=[1])
    assert bool(bad.inputs.isfinite().all())
    assert bad.objective < bad.trace[0]  # the reply before is as good as ever
    assert torch.allclose(good.inputs, alone.inputs, atol=1e-2)


def test_a_tensor_that_was_sent_as_zeros_leaves_the_others_at_work() -> None:
    (batch,) = private_batches(1)
    seen = rounds(batch, weights(8, moved=0.1))
    first = next(iter(seen.reply))

    def without(one: Observation) -> Observation:
        return replace(one, reply={**one.reply, first: torch.zeros_like(one.reply[first])}, earlier=())

    silent = replace(without(seen), earlier=tuple(map(without, seen.earlier)))
    start = quality(replace(silent, earlier=()), batch)
    assert quality(silent, batch) > start + 1


def test_the_order_of_the_replies_and_equal_broadcasts_do_not_matter() -> None:
    (batch,) = private_batches(1)
    seen = rounds(batch, weights(2, moved=0.1) * 2)
    copied = replace(seen.earlier[0], sent={name: tensor.clone() for name, tensor in seen.earlier[0].sent.items()})
    first, *others = seen.earlier
    swapped, apart = (replace(seen, earlier=earlier) for earlier in ((*others, first), (copied, *others)))
    attack = ATTACKS.build("informed", Budget(1, 4))
    expected, *found = [attack([one], seeds=[0])[0] for one in (seen, swapped, apart)]
    for one in found:
        assert float((one.inputs - expected.inputs).abs().mean()) < 0.01


def test_one_image_twice_is_two_of_it() -> None:
    batch = SAMPLES.batch([0, 0])
    seen = rounds(batch, weights(16, moved=0.1))
    (found,) = ATTACKS.build("informed", ONCE)([seen], seeds=[0])
    assert found.labels.tolist() == batch.labels.tolist()
    assert float(psnr(found.inputs.mean(dim=0, keepdim=True), batch.inputs[:1])) > 17


def test_the_private_examples_may_change_afterwards_and_nothing_found_does() -> None:
    """No truth rides along: neither the batch nor its labels are held by what the attack gets."""
    (batch,) = private_batches(1)
    seen = rounds(batch, weights(2, moved=0.1))
    assert seen.labels is None
    attack = ATTACKS.build("informed", Budget(1, 2))
    (before,) = attack([seen], seeds=[0])
    batch.inputs.fill_(0.5)
    batch.labels.fill_(9)
    (after,) = attack([seen], seeds=[0])
    assert torch.equal(before.inputs, after.inputs)
    assert torch.equal(before.labels, after.labels)


def test_granted_labels_and_several_steps_are_read_as_before() -> None:
    (batch,) = private_batches(1, 2)
    granted = observed([batch], defense="censor:trials=1", threat="C+labels")
    assert infer_labels(granted, 2)[0].tolist() == batch.labels.tolist()
    steps = observed([batch], defense="censor:trials=1", recipe=Recipe(sends="delta", epochs=2, lr=0.01))
    assert infer_labels(steps, 2).shape == (1, 2)


def test_fresh_weights_are_the_old_ones_in_another_order_and_a_craft() -> None:
    module = models.build(WIDE, SAMPLES.domain, seed=0)
    server = Server(module, WIDE, {name: p.detach() for name, p in module.named_parameters()}, SAMPLES.domain)
    attack = ATTACKS.build("informed:replies=3,weights=fresh")
    (seen,) = observed(private_batches(1))
    first, second = attack.craft(server, (), 0), attack.craft(server, (seen,), 0)
    assert first is not None
    assert second is not None
    assert first.tampered == ()
    assert set(second.tampered) == set(server.sent)
    for name, tensor in server.sent.items():
        assert torch.equal(second.sent[name].flatten().sort().values, tensor.flatten().sort().values)
        assert not torch.equal(second.sent[name], tensor)
    assert attack.craft(server, (seen,) * 3, 0) is None
    with pytest.raises(GradveilError, match="craft"):
        threat_model("C+ask-again").vet("informed", ATTACKS.build("informed:replies=3,weights=open").requires)
    with pytest.raises(GradveilError, match="craft"):
        threat_model("C+ask-again").vet("informed", attack.requires)
    threat_model("C+ask-again").vet("informed", ATTACKS.build("informed:replies=3").requires)
