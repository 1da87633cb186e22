from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor, nn

from exchanges import SAMPLES
from gradveil import models
from gradveil.client import SimulatedClient, cross_entropy
from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator, isolated
from gradveil.core.streams import Stream
from gradveil.core.trees import add, dot, norm, subtract
from gradveil.core.types import Batch, Params, Recipe
from gradveil.defenses import DCS2, DEFENSES, Chain, Step
from gradveil.defenses import dcs2 as _dcs2
from gradveil.defenses.dcs2 import Starts
from gradveil.domains import Images
from gradveil.models import Functional
from steps import in_double, step_of, step_on

WIDE = "lenet:init=wide"
QUICK = DCS2(iterations=3, lr=0.1, alpha=0.1, beta=0.001, box=True)


def equal(a: Params, b: Params) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def close(a: Params, b: Params, tolerance: float = 1e-5) -> bool:
    return bool(norm(subtract(a, b)) <= tolerance * norm(b))


def sent(spec: str, gradient: Params, step: Step) -> Params:
    """What the defense sends, with the step's randomness from its beginning."""
    return DEFENSES.build(spec).on_gradient(gradient, replace(step, rng=Stream.seeded(0, "defense")))


# The search


@pytest.mark.parametrize("start", ["batch", "public", "noise"])
def test_the_gradient_comes_nearer_while_the_picture_goes_away(start: str) -> None:
    gradient, step = step_on(WIDE)
    DEFENSES.build(f"dcs2:iterations=60,start={start}").on_gradient(gradient, step)
    log = step.log.means()
    assert log["cosine"] > log["start_cosine"] + 0.1
    assert log["distance"] > log["start_distance"] + 2


def searched(step: Step, target: Batch, start: Batch, search: DCS2) -> Tensor:
    """One concealed sample by double backward and torch's own Adam, as the paper's formula reads."""
    names, values = list(step.params), [p.detach().requires_grad_() for p in step.params.values()]

    def gradient_and_outputs(x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        outputs = step.model(dict(zip(names, values, strict=True)), x)
        parts = torch.autograd.grad(cross_entropy(outputs, label), values, create_graph=True)
        return torch.cat([part.flatten() for part in parts]), outputs

    wanted, says = (t.detach() for t in gradient_and_outputs(target.inputs, target.labels))
    x = start.inputs.clone().requires_grad_()
    optimiser = torch.optim.Adam([x], lr=search.lr)
    for i in range(search.iterations):
        passed = [share for share in (0.375, 0.625, 0.875) if i >= share * search.iterations]
        optimiser.param_groups[0]["lr"] = search.lr / 10 ** len(passed)
        found, said = gradient_and_outputs(x, start.labels)
        objective = -torch.cosine_similarity(found, wanted, dim=0)
        objective = objective + search.alpha / (x - target.inputs).norm() + search.beta * (said - says).norm()
        (x.grad,) = torch.autograd.grad(objective, x)
        optimiser.step()
        if search.box:
            x.data.clamp_(0, 1)
    return x.detach()


@pytest.mark.parametrize("box", [True, False])
def test_the_search_is_the_written_formula(box: bool) -> None:
    batch = SAMPLES.batch(range(3))
    double = Batch(batch.inputs.double(), batch.labels)
    _, step = step_of(models.build(WIDE, SAMPLES.domain, seed=0).double(), double)
    search = DCS2(iterations=8, lr=0.1, alpha=30.0, beta=0.5, box=box)
    start = Batch(double.inputs.roll(1, 0), double.labels.roll(1, 0))
    together = search.conceal(step, double, start)
    for i in range(3):
        alone = searched(step, double.take(slice(i, i + 1)), start.take(slice(i, i + 1)), search)
        assert torch.allclose(together.inputs[i], alone[0], atol=1e-6)
    assert (together.inputs.amin() >= 0 and together.inputs.amax() <= 1) == box


def test_searches_in_groups_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = SAMPLES.batch(range(3))
    double = Batch(batch.inputs.double(), batch.labels)  # Adam's first steps follow signs, which rounding can turn
    _, step = step_of(models.build(WIDE, SAMPLES.domain, seed=0).double(), double)
    start = Batch(step.batch.inputs.roll(1, 0), step.batch.labels.roll(1, 0))
    whole = QUICK.conceal(step, step.batch, start)
    monkeypatch.setattr(_dcs2, "NUMBERS_TOGETHER", 2 * sum(p.numel() for p in step.params.values()))
    parts = QUICK.conceal(step, step.batch, start)
    assert torch.allclose(whole.inputs, parts.inputs, atol=1e-6)
    assert torch.allclose(whole.cosine, parts.cosine, atol=1e-6)
    assert torch.allclose(whole.start_distance, parts.start_distance)


def test_identical_and_dead_samples_leave_the_search_finite() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.ReLU(), nn.Linear(4, 3, bias=False))
    with torch.no_grad():
        model[1].bias.fill_(-1e3)  # no input passes: every gradient is zero
    inputs = torch.rand(1, 3, 8, 8, generator=generator(0)).expand(2, -1, -1, -1)
    gradient, step = step_of(model, Batch(inputs, torch.tensor([0, 1])))
    assert norm(gradient) == 0
    shared = sent("dcs2plus:iterations=3", gradient, step)
    assert all(torch.isfinite(tensor).all() for tensor in shared.values())


# Start points


def start_points(step: Step, sensitive: Tensor, *, each: int, kind: Literal["batch", "public"]) -> Starts:
    return DCS2(k=each, start=kind).start_points(step, sensitive)


def test_a_start_is_another_example_preferably_of_another_label_and_not_sensitive() -> None:
    batch = SAMPLES.batch([0, 10, 1, 2])  # labels 0, 0, 1, 2
    _, step = step_of(models.build("mlp", SAMPLES.domain, seed=0), batch)
    sensitive = torch.tensor([True, False, True, False])
    for _ in range(10):
        found = start_points(step, sensitive, each=1, kind="batch")
        assert found.origin[0] == 3, "the one that has another label and is not sensitive"
        assert found.origin[1] in (1, 3)
        assert torch.equal(found.batch.inputs, batch.inputs[found.origin])
        assert torch.equal(found.batch.labels, batch.labels[found.origin])
    every = start_points(step, sensitive, each=3, kind="batch").origin.view(2, 3)
    assert [row.tolist() for row in every.sort(dim=1).values] == [[1, 2, 3], [0, 1, 3]]
    assert every[0].tolist() == [3, 2, 1]


def test_noise_starts_where_the_batch_has_no_more_examples() -> None:
    _, step = step_on("mlp", examples=2)
    found = start_points(step, torch.tensor([True, False]), each=3, kind="batch")
    assert found.origin.tolist() == [1, -1, -1]
    noise = found.batch.inputs[1:]
    assert 0 <= noise.amin() < noise.amax() <= 1
    assert noise.std().item() == pytest.approx(12**-0.5, rel=0.05)
    assert (noise[0] - noise[1]).abs().mean() > 0.2
    _, alone = step_on("mlp", examples=1)
    found = start_points(alone, torch.tensor([True]), each=200, kind="batch")
    assert set(found.batch.labels.tolist()) == set(range(1, 10)), "any label but its own"


def test_public_starts_are_public_images() -> None:
    _, step = step_on("mlp", examples=2)
    found = start_points(step, torch.tensor([True, True]), each=4, kind="public")
    public = SAMPLES.batch(range(50, 100))
    places = [int((public.inputs == x).flatten(1).all(dim=1).nonzero()) for x in found.batch.inputs]
    assert torch.equal(found.batch.labels, public.labels[places])
    assert not (found.batch.labels == step.batch.labels.repeat_interleave(4)).any()
    assert (found.origin == -1).all()
    few = Images(3, 32, 32, 2, SAMPLES.domain.mean, SAMPLES.domain.std)
    _, step = step_of(models.build("mlp", few, seed=0), SAMPLES.batch(range(2)))
    labels = start_points(step, torch.tensor([True, True]), each=9, kind="public").batch.labels
    assert labels.max() <= 1, "labels that the model does not know are drawn anew"


# What is sent


def gradient_of(step: Step, inputs: Tensor, labels: Tensor) -> Params:
    """Summed, not averaged, over examples."""
    values = {name: p.detach().clone().requires_grad_() for name, p in step.params.items()}
    loss = nn.functional.cross_entropy(step.model(values, inputs), labels, reduction="sum")
    return dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))


@pytest.mark.parametrize("combine", ["add", "literal", "average", "replace"])
def test_what_is_sent_is_equation_seven(combine: str) -> None:
    gradient, step = step_on(WIDE)
    shared = sent(f"dcs2:iterations=3,mix=0.3,k=2,sensitive=first,combine={combine}", gradient, step)
    again = replace(step, rng=Stream.seeded(0, "defense"))
    starts = start_points(again, torch.arange(4) == 0, each=2, kind="batch")
    hidden = Batch(
        QUICK.conceal(again, step.batch.take(torch.tensor([0, 0])), starts.batch).inputs, starts.batch.labels
    )
    own = gradient_of(step, hidden.inputs, hidden.labels)
    as_sensitive = gradient_of(step, hidden.inputs, step.batch.labels[[0, 0]])
    added = add({name: 0.3 * tensor for name, tensor in own.items()}, as_sensitive, 0.7)
    kept = [i for i in range(4) if combine != "replace" or i not in starts.origin]
    batch = step.batch.take(torch.tensor(kept))
    total = add(gradient_of(step, batch.inputs, batch.labels), added, 4 if combine == "literal" else 1)
    expected = {name: tensor / (6 if combine == "average" else 4) for name, tensor in total.items()}
    assert len(kept) == (2 if combine == "replace" else 4)
    assert close(shared, expected)


def test_a_batch_of_one_gets_equation_seven_as_printed() -> None:
    gradient, step = step_on(WIDE, examples=1)
    shared = sent("dcs2:iterations=3", gradient, step)
    assert equal(shared, sent("dcs2:iterations=3,start=noise", gradient, step))
    assert close(shared, sent("dcs2:iterations=3,combine=literal", gradient, step))
    assert not close(shared, gradient, 0.1)


def test_only_what_is_called_sensitive_is_concealed() -> None:
    gradient, step = step_on(WIDE)
    labels = sent("dcs2:iterations=3,sensitive=label,label=2", gradient, step)
    assert step.log.values("sensitive") == (1.0,)

    def told(sensitive: object) -> Params:
        defense = _dcs2.DCS2(iterations=3, sensitive=sensitive)  # type: ignore[arg-type]
        return defense.on_gradient(gradient, replace(step, rng=Stream.seeded(0, "defense")))

    assert equal(labels, told(lambda batch: batch.labels == 2))
    assert equal(labels, told(torch.tensor([False, False, True, False])))
    assert equal(told("first"), told(torch.tensor([True, False, False, False])))
    assert equal(told("all"), told(torch.ones(4, dtype=torch.bool)))
    assert not close(labels, told("first"), 0.01)


@pytest.mark.parametrize(
    ("sensitive", "places"),
    [
        ("2", [0, 1]), ("9", [0, 1, 2, 3]), ("50%", [1, 3]), ("30%", [3]), ("100%", [0, 1, 2, 3]), ("0%", []),
        ("mask-0110", [1, 2]),
    ],
)  # fmt: skip
def test_a_spec_names_a_number_a_share_or_a_mask(sensitive: str, places: list[int]) -> None:
    _, step = step_on(WIDE)
    defense = DEFENSES.build(f"dcs2:sensitive={sensitive}")
    assert isinstance(defense, DCS2)
    assert defense.sensitive_in(step).nonzero()[:, 0].tolist() == places
    assert DEFENSES.build(defense.spec) is not None


def test_a_share_is_the_same_in_any_mini_batch() -> None:
    _, step = step_on(WIDE)
    thirty = DCS2(sensitive="30%")
    found = thirty.by_place(torch.arange(1000))
    assert found is not None
    assert int(found.sum()) == 300
    assert int(found[:10].sum()) == 3
    later = replace(step, index=torch.tensor([6, 7, 8, 9]))
    assert thirty.sensitive_in(later).tolist() == found[6:10].tolist()


def test_a_mask_in_a_spec_is_as_long_as_the_local_data() -> None:
    client = SimulatedClient(
        models.build(WIDE, SAMPLES.domain, seed=0), recipe=Recipe(), defense=DEFENSES.build("dcs2:sensitive=mask-01")
    )
    with pytest.raises(GradveilError, match="mask of sensitive examples has 2 entries"):
        client.reply(client.model.params, SAMPLES.batch(range(4)), Stream.seeded(0))


def test_starts_may_have_the_label_of_the_sensitive_example() -> None:
    batch = SAMPLES.batch([0, 10, 1, 2])  # labels 0, 0, 1, 2
    _, step = step_of(models.build("mlp", SAMPLES.domain, seed=0), batch)
    first = torch.tensor([True, False, False, False])
    assert DCS2(start_label="same").start_points(step, first).origin.tolist() == [1]
    chosen = {int(DCS2(start_label="any").start_points(step, first).origin) for _ in range(40)}
    assert chosen == {1, 2, 3}
    noise = DCS2(start="noise", start_label="same", k=5).start_points(step, first).batch.labels
    assert noise.tolist() == [0] * 5


@pytest.mark.parametrize("name", ["dcs2", "dcs2plus"])
def test_without_a_sensitive_sample_nothing_changes(name: str) -> None:
    gradient, step = step_on(WIDE)
    assert equal(sent(f"{name}:sensitive=label,label=9", gradient, step), gradient)
    assert step.log.means() == {"sensitive": 0.0}


def test_a_mask_follows_the_local_data_through_mini_batches() -> None:
    recipe = Recipe(sends="delta", epochs=2, batch_size=2)
    module, batch = models.build(WIDE, SAMPLES.domain, seed=0), SAMPLES.batch(range(4))

    def concealed(sensitive: object) -> tuple[float, ...]:
        client = SimulatedClient(module, recipe=recipe, defense=_dcs2.DCS2(iterations=1, sensitive=sensitive))  # type: ignore[arg-type]
        return client.reply(client.model.params, batch, Stream.seeded(0)).log.values("sensitive")

    assert concealed(torch.tensor([False, False, True, True])) == (0, 2, 0, 2)
    assert concealed("first") == (1, 0, 1, 0)
    assert concealed(lambda part: part.labels == 3) == (0, 1, 0, 1)
    with pytest.raises(GradveilError, match="3 entries, the client has 4 examples"):
        concealed(torch.tensor([True, False, True]))
    with pytest.raises(GradveilError, match="below the model's 10, not 10"):
        SimulatedClient(module, recipe=recipe, defense=DEFENSES.build("dcs2:sensitive=label,label=10")).reply(
            dict(module.named_parameters()), batch, Stream.seeded(0)
        )


def test_more_concealed_samples_weigh_more() -> None:
    gradient, step = step_on(WIDE)
    lengths = [norm(subtract(sent(f"dcs2:iterations=3,k={k}", gradient, step), gradient)).item() for k in (1, 2, 4)]
    assert lengths[0] < lengths[1] < lengths[2]


@pytest.mark.parametrize("examples", [1, 3])
@pytest.mark.parametrize("model", ["lenet", "convnet:width=8", "mlp"])
def test_it_repeats_itself_and_edits_nothing(model: str, examples: int) -> None:
    gradient, step = step_on(model, examples=examples)
    before, inputs = {name: tensor.clone() for name, tensor in gradient.items()}, step.batch.inputs.clone()
    first, second = (sent("dcs2plus:iterations=2", gradient, step) for _ in range(2))
    assert equal(first, second)
    assert equal(gradient, before)
    assert torch.equal(step.batch.inputs, inputs)
    assert {n: (t.shape, t.dtype) for n, t in first.items()} == {n: (t.shape, t.dtype) for n, t in gradient.items()}
    assert all(torch.isfinite(tensor).all() for tensor in first.values())
    assert not close(first, gradient, 0.01)
    other = DEFENSES.build("dcs2plus:iterations=2,start=noise").on_gradient(
        gradient, replace(step, rng=Stream.seeded(1, "defense"))
    )
    assert not equal(first, other)


def test_frozen_parameters_take_no_part() -> None:
    _, step = step_on(WIDE, examples=2)
    trained = {name: step.params[name] for name in step.params if name.startswith("fc.")}
    frozen = {name: tensor for name, tensor in step.params.items() if name not in trained}
    part = replace(step, params=trained, frozen=frozen)
    shared = sent("dcs2:iterations=3", part.gradient(), part)
    assert shared.keys() == trained.keys()
    assert not close(shared, part.gradient(), 0.1)


def test_batch_norm_in_train_mode_takes_one_example_at_a_time() -> None:
    with isolated(0, "batch norm"):
        layers = nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
    function = Functional(nn.Sequential(*layers), train_mode=True)
    _, step = step_on("mlp", examples=2)
    step = in_double(replace(step, model=function, params=function.params))  # a search follows rounding
    start = Batch(step.batch.inputs.flip(0), step.batch.labels.flip(0))
    both = QUICK.conceal(step, step.batch, start)
    alone = QUICK.conceal(step, step.batch.take(slice(1)), start.take(slice(1)))
    assert torch.allclose(both.inputs[:1], alone.inputs, atol=1e-6)
    shared = sent("dcs2:iterations=1", step.gradient(), step)
    assert all(torch.isfinite(tensor).all() for tensor in shared.values())


# The projection


def solved(shared: NDArray[np.float64], g: NDArray[np.float64]) -> NDArray[np.float64]:
    """The quadratic program (8), by a solver that knows nothing of its closed form."""
    found = minimize(  # type: ignore[call-overload]
        lambda z: 0.5 * ((z - shared) ** 2).sum(), np.zeros_like(g), jac=lambda z: z - shared,
        method="SLSQP", options={"ftol": 1e-14}, constraints={"type": "ineq", "fun": lambda z: g @ z},
    )  # fmt: skip
    assert found.success
    return found.x


def test_the_closed_form_solves_the_quadratic_program() -> None:
    rng = generator(3)
    acted = 0
    for _ in range(20):
        g, shared = (torch.randn(6, generator=rng, dtype=torch.float64) for _ in range(2))
        found = _dcs2.project({"w": shared}, {"w": g})["w"].numpy()
        assert np.allclose(found, solved(shared.numpy(), g.numpy()), atol=1e-6)
        acted += not np.allclose(found, shared.numpy())
    assert 5 <= acted <= 15, "both cases were met"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_leaves_no_product_below_zero(dtype: torch.dtype) -> None:
    rng = generator(4)
    for scale in (1e-6, 1.0, 1e6):
        for _ in range(50):
            g = {"a": torch.randn(300, generator=rng).to(dtype), "b": torch.randn(40, 5, generator=rng).to(dtype)}
            drawn = {name: scale * torch.randn(tensor.shape, generator=rng) for name, tensor in g.items()}
            against = {name: (tensor - 2 * scale * g[name].float()).to(dtype) for name, tensor in drawn.items()}
            assert _dcs2.product(against, g) < 0
            found = _dcs2.project(against, g)
            assert _dcs2.product(found, g) >= 0
            assert norm(subtract(found, against)) <= norm(against) * (1.01 if dtype == torch.float32 else 1.3)


def opposed(name: str) -> tuple[Params, Params, Step]:
    """A sample that the model is sure of and right about, hidden by one that it is wrong about."""
    module, inputs = models.build(WIDE, SAMPLES.domain, seed=0), SAMPLES.batch([0]).inputs
    with torch.no_grad():
        labels = module(inputs).argmax(dim=1)
    gradient, step = step_of(module, Batch(inputs, labels))
    return gradient, sent(f"{name},iterations=1,mix=1,start=noise", gradient, step), step


def test_a_real_gradient_that_turned_against_the_batch_is_turned_back() -> None:
    gradient, plain, step = opposed("dcs2:k=1")
    assert dot(plain, gradient) < -0.01 * norm(plain) * norm(gradient)
    assert step.log.values("opposed") == (1.0,)
    assert "projected" not in step.log.means()
    gradient, turned, step = opposed("dcs2plus:k=1")
    assert dot(turned, gradient) >= 0
    assert step.log.values("projected") == (1.0,)
    assert close(turned, _dcs2.project(plain, gradient))
    orthogonal = add(plain, gradient, -dot(plain, gradient) / dot(gradient, gradient))
    assert close(turned, orthogonal, 1e-4)


def test_the_release_adds_half_of_the_gradient_nearly_always() -> None:
    gradient, step = step_on(WIDE, examples=2)
    plain = sent("dcs2:iterations=2", gradient, step)
    assert dot(plain, gradient) > 0
    assert equal(plain, sent("dcs2plus:iterations=2", gradient, step))
    assert equal(plain, sent("dcs2plus:iterations=2,margin=0.5", gradient, step))
    release = sent("dcs2plus:iterations=2,margin=0.5,strict=true", gradient, step)
    assert close(release, add(plain, gradient, 0.5))


# Options


def test_a_chain_builds_and_runs() -> None:
    chain = DEFENSES.build("dcs2:iterations=1+noise:sigma=0.01")
    assert isinstance(chain, Chain)
    gradient, step = step_on(WIDE, examples=1)
    noisy = chain.on_gradient(gradient, step)
    plain = sent("dcs2:iterations=1", gradient, step)
    entries = sum(tensor.numel() for tensor in plain.values())
    assert norm(subtract(noisy, plain)).item() == pytest.approx(0.01 * entries**0.5, rel=0.05)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("dcs2:iterations=0", "dcs2: iterations is at least 1, not 0"),
        ("dcs2plus:lr=0", "dcs2plus: lr is above 0"),
        ("dcs2:mix=1.5", "mix is from 0 to 1"),
        ("dcs2:alpha=-1", "alpha is at least 0"),
        ("dcs2:beta=nan", "dcs2: beta=nan is not a finite number"),
        ("dcs2:k=0", "k is at least 1"),
        ("dcs2:sensitive=some", "sensitive is all, first, a number, a share such as 30%, mask-0110 or label"),
        ("dcs2:sensitive=0", "sensitive is all, first, a number"),
        ("dcs2:sensitive=130%", "sensitive is all, first, a number"),
        ("dcs2:sensitive=mask-012", "sensitive is all, first, a number"),
        ("dcs2:start_label=mine", "start_label is one of"),
        ("dcs2:sensitive=label", "go together"),
        ("dcs2:label=3", "go together"),
        ("dcs2:sensitive=label,label=-1", "label is at least 0"),
        ("dcs2:start=nowhere", "start is one of"),
        ("dcs2:start=noise,combine=replace", "needs start=batch"),
        ("dcs2plus:margin=-1", "margin is at least 0"),
    ],
)
def test_bad_options_are_refused(spec: str, says: str) -> None:
    with pytest.raises(GradveilError, match=says):
        DEFENSES.build(spec)


@pytest.mark.parametrize(
    ("sensitive", "says"),
    [
        (torch.ones(4), "mask of booleans"),
        (torch.ones(2, dtype=torch.bool), "mask of booleans"),
        (lambda batch: batch.labels, "returns booleans"),
    ],
)
def test_a_bad_answer_to_what_is_sensitive_is_refused(sensitive: object, says: str) -> None:
    gradient, step = step_on("mlp")
    with pytest.raises(GradveilError, match=says):
        _dcs2.DCS2(iterations=1, sensitive=sensitive).on_gradient(gradient, step)  # type: ignore[arg-type]
    with pytest.raises(GradveilError, match="sensitive is all, first, a number"):
        _dcs2.DCS2(sensitive=[True])  # type: ignore[arg-type]
