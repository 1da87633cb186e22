from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from exchanges import SAMPLES
from gradveil import models
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import norm
from gradveil.core.types import Batch, Params, Recipe
from gradveil.data import load
from gradveil.defenses import DEFENSES, Log, Step, censor
from gradveil.defenses.public import public_images
from steps import step_of, step_on


def defended(spec: str, gradient: Params, step: Step, seed: int = 0) -> Params:
    fresh = replace(step, rng=Stream.seeded(seed, "defense"))
    return DEFENSES.build(spec).on_gradient(gradient, fresh)


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


def flat(tree: Params) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tree.values()]).double()


def slow_candidates(gradient: Params, draws: list[Tensor], *, layerwise: bool = True) -> list[Params]:
    """Algorithm 1 as its lines stand in the paper, in float64: ``draws`` is one vector of all entries per trial."""
    found = []
    for drawn in draws:
        parts = torch.split(drawn.double(), [g.numel() for g in gradient.values()])
        random = {name: part.view_as(gradient[name]) for name, part in zip(gradient, parts, strict=True)}
        if not layerwise:
            random, original = {"all": flat(random)}, {"all": flat(gradient)}
        else:
            original = {name: g.double() for name, g in gradient.items()}
        candidate = {}
        for name, g in original.items():
            other = random[name] - (random[name] * g).sum() / (g * g).sum() * g
            candidate[name] = other * g.norm() / other.norm()
        pieces = torch.split(flat(candidate), [g.numel() for g in gradient.values()])
        found.append({n: p.view_as(gradient[n]).float() for n, p in zip(gradient, pieces, strict=True)})
    return found


def losses_after(step: Step, candidates: list[Params], lr: float = 0.1) -> list[float]:
    return [
        step.loss_at({name: p - lr * candidate[name] for name, p in step.params.items()}).item()
        for candidate in candidates
    ]


@pytest.mark.parametrize("model", ["lenet", "convnet:width=8", "mlp"])
def test_every_tensor_is_orthogonal_and_keeps_its_norm(model: str) -> None:
    gradient, step = step_on(model, examples=2)
    sent = defended("censor:trials=3", gradient, step)
    for name, tensor in sent.items():
        assert abs(cosine(tensor, gradient[name])) < 1e-5, name
        assert tensor.norm().item() == pytest.approx(gradient[name].norm().item(), rel=1e-5), name


def test_the_whole_gradient_can_be_made_orthogonal_instead() -> None:
    gradient, step = step_on("lenet")
    sent = defended("censor:layerwise=false,trials=3", gradient, step)
    assert abs(cosine(flat(sent), flat(gradient))) < 1e-5
    assert norm(sent).item() == pytest.approx(norm(gradient).item(), rel=1e-5)
    assert max(abs(cosine(sent[name], gradient[name])) for name in sent) > 1e-3
    assert any(abs(sent[n].norm() / gradient[n].norm() - 1) > 0.1 for n in sent)


@pytest.mark.parametrize(("at_once", "layerwise"), [(2**26, True), (1, True), (2**26, False)])
def test_the_candidate_of_the_lowest_loss_is_sent(
    at_once: int, layerwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(censor.CANDIDATES_AT_ONCE, "cpu", at_once)
    gradient, step = step_on("lenet:init=wide", examples=8)
    sent = defended(f"censor:layerwise={str(layerwise).lower()}", gradient, step)
    rng, like = Stream.seeded(0, "defense"), flat(gradient)
    rows = [20] if at_once > 1 else [1] * 20
    draws = [row for count in rows for row in rng.normal((count, len(like)), like)]
    candidates = slow_candidates(gradient, draws, layerwise=layerwise)
    losses = losses_after(step, candidates)
    best = candidates[losses.index(min(losses))]
    assert sorted(losses)[1] - min(losses) > 1e-4, "the best stands out"
    for name in sent:
        assert torch.allclose(sent[name], best[name], rtol=1e-3, atol=1e-4 * best[name].abs().max().item()), name


def test_many_candidates_in_one_call_have_the_losses_of_one_after_another() -> None:
    for model in ("lenet", "convnet:width=8"):
        gradient, step = step_on(model)
        layout = censor.Flat(gradient)
        drawn = [0.1 * part for part in layout.gaussian(3, Stream.seeded(1))]
        judge = censor.LossAfter(step, layout, lr=0.1)
        in_turn = judge.in_turn(drawn, start_too=True)
        assert torch.allclose(in_turn, judge.at_once(drawn, start_too=True), rtol=1e-4)
        assert torch.allclose(in_turn, judge.replayed(drawn, start_too=True), rtol=1e-4)
        assert in_turn[0].item() == pytest.approx(step.loss_at(step.params).item(), rel=1e-5)
        assert len(set(in_turn.tolist())) == 4


def test_losses_of_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(96, 96, bias=False), nn.Linear(96, 96, bias=False)
            self.second.weight = self.first.weight
            self.fc = nn.Linear(96, 10)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.fc(self.second(torch.tanh(self.first(inputs.flatten(1)[:, :96]))))

    gradient, step = step_of(Tied(), SAMPLES.batch(range(4)))
    layout = censor.Flat(gradient)
    drawn = layout.gaussian(2, Stream.seeded(1))
    candidates = [{name: t[trial] for name, t in layout.named(drawn).items()} for trial in range(2)]
    assert censor.LossAfter(step, layout, lr=0.1)(drawn) == pytest.approx(losses_after(step, candidates), rel=1e-5)


def test_the_released_projection_is_orthogonal_only_at_norm_one() -> None:
    gradient, step = step_on("lenet:init=wide", examples=1)
    exact = defended("censor:trials=1", gradient, step)
    unit = {name: g / g.norm() for name, g in gradient.items()}
    ten = {name: 10 * g for name, g in unit.items()}
    for name in gradient:
        assert abs(cosine(defended("censor:trials=1,projection=released", unit, step)[name], unit[name])) < 1e-5
        # |o.u| = 9 |r.u|, so the cosine is 9 c / sqrt(1 - c^2 + 81 c^2) for a random direction of cosine c
        assert abs(cosine(defended("censor:trials=1,projection=released", ten, step)[name], ten[name])) > 1e-3
        assert abs(cosine(exact[name], gradient[name])) < 1e-5


def test_as_published_an_untrained_lenet_sends_the_original_gradient() -> None:
    log = Log()
    for place in range(24):
        gradient, step = step_of(models.build("lenet", SAMPLES.domain, seed=0), SAMPLES.batch([place]), seed=place)
        sent = DEFENSES.build("censor:fallback=original").on_gradient(gradient, replace(step, log=log))
        original = all(torch.equal(sent[name], gradient[name]) for name in gradient)
        assert original == (log.values("fallback_rate")[-1] == 1)
        assert log.values("cosine")[-1] == pytest.approx(float(original), abs=1e-5)
    assert log.means()["fallback_rate"] > 0.9


def test_by_default_the_original_gradient_is_never_sent() -> None:
    gradient, step = step_on("lenet", examples=1)
    sent = defended("censor", gradient, step)
    assert step.log.values("fallback_rate") == (1.0,)
    assert all(abs(cosine(sent[name], gradient[name])) < 1e-5 for name in sent)
    assert abs(step.log.values("cosine")[0]) < 1e-5
    skipped = defended("censor:fallback=skip", gradient, step)
    assert all(not tensor.any() for tensor in skipped.values())


def test_tensors_without_a_gradient_stay_zero() -> None:
    gradient, step = step_on("lenet")
    for spec in ("censor", "censor:norms=random", "censor:projection=released", "censor:source=public"):
        sent = defended(spec, {**gradient, "fc.bias": torch.zeros(10)}, step)
        assert not sent["fc.bias"].any()
        assert all(torch.isfinite(tensor).all() for tensor in sent.values())
        nothing = defended(spec, {name: torch.zeros_like(g) for name, g in gradient.items()}, step)
        assert all(not tensor.any() for tensor in nothing.values())
    assert step.log.values("cosine")[-1] == 0


def test_one_entry_has_no_other_direction_and_is_not_sent() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))
            self.fc = nn.Linear(3 * 32 * 32, 10, bias=False)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.scale * self.fc(inputs.flatten(1))

    gradient, step = step_of(Scaled(), SAMPLES.batch([0, 1]))
    assert gradient["scale"].abs() > 0
    assert defended("censor", gradient, step)["scale"] == 0


def test_frozen_parameters_take_part_in_the_losses() -> None:
    gradient, step = step_on("lenet:init=wide", examples=8)
    trained = {name: g for name, g in gradient.items() if name.startswith("fc")}
    params = {name: step.params[name] for name in trained}
    part = replace(step, params=params, frozen={n: p for n, p in step.params.items() if n not in trained})
    sent = defended("censor", trained, part)
    draws = list(Stream.seeded(0, "defense").normal((20, flat(trained).numel()), flat(trained)))
    candidates = slow_candidates(trained, draws)
    losses = losses_after(part, candidates)
    assert sent.keys() == trained.keys()
    assert cosine(flat(sent), flat(candidates[losses.index(min(losses))])) > 0.9999


def test_public_norms_do_not_depend_on_the_private_image() -> None:
    gradients = [step_of(models.build("lenet", SAMPLES.domain, seed=0), SAMPLES.batch([place])) for place in (0, 1)]
    one, two = (defended("censor:norms=public", *each) for each in gradients)
    step = gradients[0][1]
    public = step.gradient(public_images("samples", step.batch.inputs, 50).take(slice(1)))
    for name in one:
        assert one[name].norm().item() == pytest.approx(public[name].norm().item(), rel=1e-5)
        assert two[name].norm().item() == pytest.approx(public[name].norm().item(), rel=1e-5)
        assert abs(cosine(one[name], gradients[0][0][name])) < 1e-5


def test_random_norms_are_spread_around_the_true_ones() -> None:
    gradient, step = step_on("lenet")
    factors = torch.tensor([
        [(sent[name].norm() / gradient[name].norm()).item() for name in gradient]
        for sent in (defended("censor:norms=random,spread=0.5,trials=1", gradient, step, seed) for seed in range(60))
    ]).log()  # fmt: skip
    assert factors.std().item() == pytest.approx(0.5, rel=0.1)
    assert factors.mean().abs() < 0.08
    assert torch.corrcoef(factors.T).fill_diagonal_(0).abs().max() < 0.5, "tensors do not share their factor"


def test_norms_name_the_private_image_unless_they_are_hidden() -> None:
    gradients, step = step_on("lenet", examples=100)
    each = step.example_gradients()
    known = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()], dim=1).log()

    def identified(spec: str) -> int:
        found = 0
        for place in range(20):
            alone = replace(step, batch=step.batch.take(slice(place, place + 1)))
            sent = defended(spec, {name: g[place] for name, g in each.items()}, alone, seed=place)
            norms = torch.stack([sent[name].norm() for name in gradients]).log()
            found += int((known - norms).abs().sum(1).argmin()) == place
        return found

    assert identified("censor:trials=1") == 20
    assert identified("censor:trials=1,norms=public") <= 3
    assert identified("censor:trials=1,norms=random") <= 5


def test_a_public_gradient_is_what_remains_of_a_candidate() -> None:
    gradient, step = step_on("lenet:init=wide")
    sent = defended("censor:source=public,trials=1", gradient, step)
    place = int(Stream.seeded(0, "defense").permutation(50)[0])
    public = step.gradient(SAMPLES.batch([50 + place]))
    for name in sent:
        along = (public[name] * gradient[name]).sum() / gradient[name].square().sum()
        assert cosine(sent[name], public[name] - along * gradient[name]) > 0.999, name
        assert abs(cosine(sent[name], gradient[name])) < 1e-5, name


def test_a_private_image_that_is_nearly_public_is_not_given_away() -> None:
    """Of one that is public outright, nothing is sent: tests/defenses/test_public.py."""
    public = SAMPLES.batch([99])
    brighter = Batch((public.inputs + 1 / 255).clamp(0, 1), public.labels)
    gradient, step = step_of(models.build("lenet", SAMPLES.domain, seed=0), brighter)
    sent = defended("censor:source=public,trials=50", gradient, step)
    assert max(abs(cosine(sent[name], gradient[name])) for name in sent) < 1e-4


def test_temperature_accepts_by_the_rule_of_metropolis() -> None:
    _, step = step_on("lenet", examples=4)
    cold, warm = (DEFENSES.build(f"censor:temperature={t}") for t in (0.0, 2.0))
    losses = [0.5] * 4000
    assert cold._scores(losses, step) == losses  # type: ignore[attr-defined]
    for here, chance in ((0.6, 1.0), (0.5, 1.0), (0.4, 2.718 ** (-4 * 0.1 / 2)), (0.0, 2.718 ** (-4 * 0.5 / 2))):
        accepted = sum(score < here for score in warm._scores(losses, step))  # type: ignore[attr-defined]
        assert accepted / 4000 == pytest.approx(chance, abs=0.03)


def test_heat_makes_the_choice_among_candidates_random() -> None:
    gradient, step = step_on("lenet", examples=4)

    def losses(temperature: float) -> Tensor:
        spec = f"censor:trials=8,temperature={temperature}"
        return torch.tensor(losses_after(step, [defended(spec, gradient, step, seed) for seed in range(24)]))

    coldest, cold, hot = (losses(temperature) for temperature in (0.0, 1e-7, 1e3))
    assert (cold == coldest).float().mean() > 0.9
    assert (hot >= coldest - 1e-6).all(), "the same seed draws the same candidates"
    assert 0 < (hot == coldest).sum() < 12, "the best of 8 is chosen now and then"


@pytest.mark.parametrize("layerwise", ["true", "false"])
def test_what_is_sent_can_be_orthogonal_to_every_example_under_every_label(layerwise: str) -> None:
    gradient, step = step_on("mlp:hidden=24", examples=3)
    plain = defended(f"censor:layerwise={layerwise},trials=3", gradient, step)
    sent = defended(f"censor:orthogonal=examples,layerwise={layerwise},trials=3", gradient, step)

    def largest(update: Params) -> float:
        found = []
        for label in range(10):
            other = replace(step, batch=Batch(step.batch.inputs, torch.full((3,), label)))
            each = other.example_gradients()
            for place in range(3):
                if layerwise == "false":
                    found.append(abs(cosine(flat(update), flat({name: g[place] for name, g in each.items()}))))
                else:
                    found += [abs(cosine(update[name], each[name][place])) for name in update if update[name].any()]
        return max(found)

    assert largest(sent) < 1e-4
    assert largest(plain) > 1e-3, "Algorithm 1 is orthogonal to the gradient of the batch alone"
    assert norm(sent).item() == pytest.approx(norm(gradient).item(), rel=1e-4)


def test_a_tensor_whose_examples_span_it_all_is_sent_as_zero() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.fc = nn.Parameter(torch.ones(2)), nn.Linear(2, 10)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.fc(self.scale * inputs.flatten(1)[:, :2])

    gradient, step = step_of(Narrow(), SAMPLES.batch([0, 1]))
    sent = defended("censor:orthogonal=examples", gradient, step)
    assert not sent["scale"].any()
    assert sent["fc.weight"].norm() == 0 or abs(cosine(sent["fc.weight"], gradient["fc.weight"])) < 1e-4
    with pytest.raises(GradveilError, match="projection is exact under orthogonal=examples, not released"):
        DEFENSES.build("censor:orthogonal=examples,projection=released")


def test_without_a_projection_the_best_of_the_random_draws_is_sent() -> None:
    gradient, step = step_on("lenet:init=wide", examples=8)
    sent = defended("censor:projection=none", gradient, step)
    draws = Stream.seeded(0, "defense").normal((20, flat(gradient).numel()), flat(gradient))
    candidates = []
    for drawn in draws:
        parts = zip(gradient, torch.split(drawn, [g.numel() for g in gradient.values()]), strict=True)
        candidates.append({n: (p.view_as(gradient[n]) * gradient[n].norm() / p.norm()).float() for n, p in parts})
    losses = losses_after(step, candidates)
    best = candidates[losses.index(min(losses))]
    assert all(cosine(sent[name], best[name]) > 0.9999 for name in sent)
    assert max(abs(cosine(sent[name], gradient[name])) for name in sent) > 1e-3, "nothing was taken out"


def test_acceptance_as_printed_takes_everything_when_cold_and_the_best_when_hot() -> None:
    gradient, step = step_on("lenet", examples=4)

    def rate(temperature: float) -> float:
        log = Log()
        spec = f"censor:trials=1,acceptance=printed,temperature={temperature}"
        for seed in range(40):
            DEFENSES.build(spec).on_gradient(gradient, replace(step, rng=Stream.seeded(seed), log=log))
        return log.means()["fallback_rate"]

    assert rate(0.0) < 0.1, "an exponent near 0 accepts what the prior accepts"
    assert rate(1e6) > 0.8, "a large exponent accepts only what lowers the loss"
    here, rise = 0.5, 0.1
    accepted = 0
    for _ in range(2000):
        accepted += bool(DEFENSES.build("censor:temperature=2")._as_printed([here + rise], here, [-0.2], step))  # type: ignore[attr-defined]
    assert accepted / 2000 == pytest.approx(2.718 ** -(2 * 4 * rise + 0.2), abs=0.03)


def test_the_first_that_is_accepted_as_printed_is_sent() -> None:
    gradient, step = step_on("lenet:init=wide", examples=8)
    sent = defended("censor:acceptance=printed,temperature=1e-9", gradient, step)
    draws = Stream.seeded(0, "defense").normal((20, flat(gradient).numel()), flat(gradient))
    cosines = [cosine(flat(one), flat(sent)) for one in slow_candidates(gradient, list(draws))]
    assert max(cosines) > 0.999
    judge = censor.LossAfter(step, censor.Flat(gradient), lr=0.1)
    drawn = censor.Flat(gradient).gaussian(2, Stream.seeded(3))
    before = sum(p.square().sum() for p in step.params.values())
    for trial, prior in enumerate(judge.priors(drawn)):
        named = censor.Flat(gradient).named([part[trial] for part in drawn])
        after = sum((p - 0.1 * named[name]).square().sum() for name, p in step.params.items())
        assert prior == pytest.approx(float(before - after) / 2, rel=1e-3)


def test_public_images_of_one_class_make_candidates_of_that_class() -> None:
    gradient, step = step_on("lenet:init=wide")
    sent = defended("censor:source=public,public_class=6,trials=1", gradient, step)
    images = SAMPLES.batch((SAMPLES.labels == 6).nonzero().flatten())
    place = int(Stream.seeded(0, "defense").permutation(len(images))[0])
    public = step.gradient(images.take(slice(place, place + 1)))
    for name in sent:
        along = (public[name] * gradient[name]).sum() / gradient[name].square().sum()
        assert cosine(sent[name], public[name] - along * gradient[name]) > 0.999, name
    assert defended("censor:source=public,public_class=6,trials=40", gradient, step).keys() == gradient.keys()
    with pytest.raises(GradveilError, match="has no public image of class 77"):
        defended("censor:source=public,public_class=77", gradient, step)


def test_rounds_are_those_of_the_federation_where_they_are_known() -> None:
    gradient, step = step_on("lenet", round_number=1)
    assert defended("censor:rounds=2", gradient, replace(step, federation_round=3)) is gradient
    assert defended("censor:rounds=2", gradient, replace(step, federation_round=2)) is not gradient
    assert defended("censor:rounds=2", gradient, replace(step, round_number=3)) is gradient


def test_it_rests_after_its_rounds() -> None:
    gradient, second = step_on("lenet", round_number=2)
    _, third = step_on("lenet", round_number=3)
    assert all(abs(cosine(t, gradient[n])) < 1e-5 for n, t in defended("censor:rounds=2", gradient, second).items())
    assert defended("censor:rounds=2", gradient, third) is gradient
    assert third.log.means() == {"active": 0.0, "cosine": 1.0}
    assert second.log.means()["active"] == 1


def test_candidates_are_judged_at_the_given_learning_rate() -> None:
    """At two rates at which other candidates are best, by far more than float32 rounds a loss (1e-6)."""
    gradient, step = step_on("lenet:init=wide", examples=8)
    rows = list(Stream.seeded(0, "defense").normal((20, flat(gradient).numel()), flat(gradient)))
    candidates, best = slow_candidates(gradient, rows), []
    for spec, lr in (("censor", step.lr), ("censor:lr=2", 2.0)):
        losses = losses_after(step, candidates, lr)
        assert sorted(losses)[1] - min(losses) > 1e-3, "the best stands out"
        best.append(candidates[losses.index(min(losses))])
        assert cosine(flat(defended(spec, gradient, step)), flat(best[-1])) > 0.999
    assert cosine(flat(best[0]), flat(best[1])) < 0.9


def test_a_local_run_repeats_and_reads_its_public_images_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(censor, "public_images", lambda *a, **k: read.append(1) or public_images(*a, **k))
    recipe = Recipe(sends="delta", epochs=2, batch_size=2)
    for spec in ("censor:trials=3", "censor:trials=3,source=public,norms=public,temperature=0.1"):
        client = SimulatedClient(
            models.build("lenet", SAMPLES.domain, seed=0), recipe=recipe, defense=DEFENSES.build(spec)
        )
        batch, sent = SAMPLES.batch(range(4)), client.model.params
        first, second = (client.reply(sent, batch, Stream.seeded(3)) for _ in range(2))
        assert all(torch.equal(first.update[name], second.update[name]) for name in sent)
        assert len(first.log.values("cosine")) == 4
    assert len(read) == 2, "once for each of two replies, not for each of their four steps"


def test_public_images_come_from_the_end_of_a_set_that_fits() -> None:
    digits = load("mnist-samples")
    found = public_images("samples", torch.zeros(1, 1, 28, 28, dtype=torch.float64), 3)
    assert found.inputs.dtype == torch.float64
    assert torch.equal(found.inputs.float(), digits.batch([97, 98, 99]).inputs)
    assert torch.equal(public_images("cifar10-samples", torch.zeros(1, 3, 32, 32), 1).labels, SAMPLES.labels[-1:])
    with pytest.raises(GradveilError, match="3 x 64 x 64: write censor:public=DATA"):
        public_images("samples", torch.zeros(1, 3, 64, 64), 1, defense="censor")
    gradient, step = step_on("lenet")
    with pytest.raises(GradveilError, match=r"1 x 28 x 28, the client's are 3 x 32 x 32.*censor:public=DATA"):
        defended("censor:source=public,public=mnist-samples", gradient, step)
    with pytest.raises(GradveilError, match="needs 101 public images but mnist-samples has 100"):
        public_images("samples", torch.zeros(1, 1, 28, 28), 101)


@pytest.mark.parametrize("bad", ["trials=0", "rounds=0", "spread=-1", "temperature=-0.1", "lr=-1"])
def test_options_out_of_range_are_refused(bad: str) -> None:
    with pytest.raises(GradveilError, match=f"censor: {bad.partition('=')[0]} is at least"):
        DEFENSES.build(f"censor:{bad}")


def test_a_rate_that_is_no_number_is_refused_from_python_too() -> None:
    with pytest.raises(GradveilError, match="censor: lr is at least"):
        censor.Censor(lr=float("nan"))
