from __future__ import annotations

import doctest
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gradveil import models
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Recipe
from gradveil.defenses import DEFENSES, Step, soteria
from gradveil.engine import without_tf32
from gradveil.models import classifier
from steps import SAMPLES, step_of, step_on

MODELS = ["lenet", "lenet:init=wide", "convnet:width=8", "mlp", "vit:depth=1,dim=48"]


def slow_scores(step: Step, score: str, offset: float = 0.0) -> Tensor:
    """[l], the larger the sooner pruned: one backward pass for each entry, with hooks on a live module."""
    module = step.model.module
    inputs, caught = step.batch.inputs.clone().requires_grad_(), []
    layer = module.get_submodule(classifier(module, inputs))
    handle = layer.register_forward_pre_hook(lambda _, arguments: caught.append(arguments[0]))
    module(inputs)
    handle.remove()
    entries, totals = caught[0], []
    for i in range(entries.shape[1]):
        (slope,) = torch.autograd.grad(entries[:, i].sum(), inputs, retain_graph=True)
        norms = slope.flatten(1).norm(dim=1)
        total = 0.0
        for r, length in zip(entries[:, i].tolist(), norms.tolist(), strict=True):
            over, under = (abs(r), length) if score == "paper" else (length, r + offset)
            total += 0.0 if over == 0 else over / under
        totals.append(total if score == "paper" else -abs(total))
    return torch.tensor(totals, dtype=torch.float64)


def zero_columns(spec: str, step: Step) -> tuple[set[int], Tensor]:
    """Which columns of the classifier's weight gradient become zero, from a gradient that has none."""
    name = classifier(step.model.module, step.batch.inputs)
    ones = {key: torch.ones_like(p) for key, p in step.params.items()}
    sent = DEFENSES.build(spec).on_gradient(ones, step)
    for key, g in sent.items():
        assert key == f"{name}.weight" or torch.equal(g, ones[key]), "all else is sent as it is"
    weight = sent[f"{name}.weight"]
    assert all(column.unique().numel() == 1 for column in weight.T)
    return set((weight[0] == 0).nonzero().flatten().tolist()), weight


@pytest.mark.integration
@pytest.mark.parametrize("score", ["paper", "released"])
@pytest.mark.parametrize("model", MODELS)
def test_the_columns_are_those_of_one_backward_pass_per_entry(model: str, score: str) -> None:
    _, step = step_on(model, examples=3)
    slow = slow_scores(step, score)
    for screen in ("true", "false"):
        columns, weight = zero_columns(f"soteria:rate=0.8,score={score},screen={screen}", step)
        count = round(0.8 * weight.shape[1])
        assert len(columns) == count
        expected = set(slow.sort(descending=True, stable=True).indices[:count].tolist())
        # Equal up to entries that float32 cannot tell apart.
        threshold = slow.sort(descending=True).values[count - 1]
        assert all(abs(slow[i] - threshold) <= 1e-5 * abs(threshold) for i in columns ^ expected), (screen, model)
    assert step.log.means() == {"pruned": pytest.approx(0.8, abs=0.01)}


@pytest.mark.integration
def test_screening_finds_the_same_columns_in_a_large_batch_with_a_part_of_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, step = step_on("lenet:init=wide", examples=16)
    exactly = soteria.RowNorms.exact
    work = []

    def counted(self: soteria.RowNorms, rows: Tensor | None = None) -> Tensor:
        work.append(len(self.values) * (self.values.shape[1] if rows is None else len(rows)))
        return exactly(self, rows)

    monkeypatch.setattr(soteria.RowNorms, "exact", counted)
    for options in ("", ",score=released", ",rate=0.5"):
        work.clear()
        everything = zero_columns(f"soteria:screen=false{options}", step)[0]
        assert sum(work) == 16 * 768
        work.clear()
        for seed in range(2):
            assert (
                zero_columns(f"soteria:screen=true{options}", replace(step, rng=Stream.seeded(seed)))[0] == everything
            )
        assert sum(work) / 2 < 0.2 * 16 * 768


@pytest.mark.integration
def test_settled_entries_are_settled_as_their_margin_says() -> None:
    """Estimates of a probe differ from exact scores by as many standard errors as normal numbers do."""
    _, step = step_on("lenet:init=wide", examples=16)
    layout = soteria.Layout(step.model.module, "classifier", step)
    rows = soteria.RowNorms(layout, step.params, step.batch.inputs)
    norms = rows.exact()
    for score in (soteria.Score(paper=True), soteria.Score(paper=False)):
        bias, variance = score.bias_and_variance(16)
        exact, errors = score(rows.values, norms).sum(0), []
        for seed in range(4):
            terms = score(rows.values, rows.estimated(16, Stream.seeded(seed))) / bias
            errors.append((terms.sum(0) - exact) / (variance * terms.square().sum(0)).sqrt())
        all_errors = torch.stack(errors)
        assert all_errors.mean().abs() < 0.15
        assert all_errors.square().mean().sqrt().item() == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize(("probes", "least"), [(16, 0.93), (256, 0.98)])
def test_estimates_alone_agree_mostly(probes: int, least: float) -> None:
    _, step = step_on("lenet:init=wide", examples=4)
    exact, weight = zero_columns("soteria:screen=false", step)
    estimated = zero_columns(f"soteria:probes={probes}", step)[0]
    assert len(estimated) == len(exact) == round(0.8 * weight.shape[1])
    assert least <= len(exact & estimated) / len(exact) < 1


def test_the_offset_of_the_second_release_is_added_to_the_entry() -> None:
    _, step = step_on("mlp", examples=2)
    columns, weight = zero_columns("soteria:score=released,offset=0.1,rate=0.5", step)
    slow = slow_scores(step, "released", 0.1)
    expected = set(slow.sort(descending=True, stable=True).indices[: round(0.5 * weight.shape[1])].tolist())
    assert columns == expected
    assert columns != zero_columns("soteria:score=released,rate=0.5", step)[0]


def test_parameters_of_the_step_count_not_those_of_the_module() -> None:
    _, step = step_on("lenet", examples=2)
    wide = step_on("lenet:init=wide", examples=2)[1]
    moved = replace(step, params=wide.params)
    assert zero_columns("soteria", moved)[0] == zero_columns("soteria", wide)[0] != zero_columns("soteria", step)[0]


def test_a_hidden_layer_can_be_chosen_and_a_frozen_one_is_left_alone() -> None:
    gradient, step = step_on("mlp", examples=2)
    sent = DEFENSES.build("soteria:layer=body.2,rate=0.25").on_gradient(gradient, step)
    zero = (sent["body.2.weight"] == 0).all(0) & ~(gradient["body.2.weight"] == 0).all(0)
    assert 0 < int(zero.sum()) <= 64
    assert torch.equal(sent["fc.weight"], gradient["fc.weight"])
    part = {name: g for name, g in gradient.items() if not name.startswith("fc")}
    frozen = {name: p for name, p in step.params.items() if name.startswith("fc")}
    trained = replace(step, params={name: step.params[name] for name in part}, frozen=frozen)
    assert DEFENSES.build("soteria").on_gradient(part, trained) == part
    assert trained.log.values("pruned")[-1] == 0.0


@pytest.mark.integration
def test_statistics_over_the_batch_are_differentiated_as_they_are() -> None:
    module = models.build("convnet:width=8", SAMPLES.domain, seed=0)
    client = SimulatedClient(module, recipe=Recipe(train_mode=True), defense=DEFENSES.build("soteria"))
    batch = SAMPLES.batch(range(4))
    sent = client.reply(client.model.params, batch, Stream.seeded(0)).update["linear.weight"]
    _, step = step_of(client.model.module, batch)
    step = replace(step, model=client.model)
    slow = slow_scores(step, "paper").sort(descending=True, stable=True).indices
    assert set((sent == 0).all(0).nonzero().flatten().tolist()) >= set(slow[: round(0.8 * len(slow))].tolist())
    client = SimulatedClient(module, recipe=Recipe(train_mode=True), defense=DEFENSES.build("soteria:probes=8"))
    with pytest.raises(GradveilError, match="takes statistics over the batch"):
        client.reply(client.model.params, batch, Stream.seeded(0))


def test_models_that_do_not_fit_are_refused() -> None:
    bare = nn.Sequential(nn.Conv2d(3, 10, 32), nn.Flatten())
    with pytest.raises(GradveilError, match="end it with one"):
        SimulatedClient(bare, recipe=Recipe(), defense=DEFENSES.build("soteria"))
    with pytest.raises(GradveilError, match="layer is one of classifier, fc"):
        SimulatedClient(
            models.build("lenet", SAMPLES.domain, seed=0), recipe=Recipe(), defense=DEFENSES.build("soteria:layer=x")
        )
    _, step = step_on("vit:depth=1,dim=48", examples=1)
    with pytest.raises(GradveilError, match="takes 65 vectors per example"):
        DEFENSES.build("soteria:layer=blocks.0.fc1").on_gradient(step.gradient(), step)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("soteria:rate=1.1", "rate is from 0 to 1"),
        ("soteria:probes=2", "at least 4"),
        ("soteria:offset=0.1", "belongs to score=released"),
    ],
)
def test_impossible_options_are_refused(spec: str, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        DEFENSES.build(spec)


def test_random_signs_are_balanced_and_independent() -> None:
    signs = Stream.seeded(0).signs((40, 1000), torch.empty(0))
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 4 / 200
    products = (signs @ signs.T / 1000)[~torch.eye(40, dtype=torch.bool)]
    assert products.std().item() == pytest.approx(1000**-0.5, rel=0.1)
    bits = signs.view(-1, 8)
    assert torch.corrcoef(bits.T)[~torch.eye(8, dtype=torch.bool)].abs().max() < 0.06


def test_the_mean_of_a_root_is_as_in_its_examples() -> None:
    assert doctest.testmod(soteria).failed == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_finds_the_same_norms_however_many_rows_are_asked_for() -> None:
    _, step = step_on("lenet:init=wide", examples=4)
    layout = soteria.Layout(step.model.module, "classifier", step)
    at, inputs = step.params, step.batch.inputs
    exact = soteria.RowNorms(layout, at, inputs).exact()
    there = {name: tensor.cuda() for name, tensor in at.items()}
    with without_tf32():
        rows = soteria.RowNorms(layout, there, inputs.cuda())
        for entries in (torch.arange(768), torch.tensor([5, 700]), torch.arange(100, 300)):
            torch.testing.assert_close(rows.exact(entries.cuda()).cpu(), exact[:, entries], rtol=1e-4, atol=1e-6)
