from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gradveil import models
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import norm, scaled, subtract
from gradveil.core.types import Batch, Recipe
from gradveil.defenses import DEFENSES, Log, Step, accounting, clip, dp
from gradveil.defenses.accounting import Ledger, guarantee
from gradveil.engine import examples as engine_examples
from steps import SAMPLES, step_on


def test_without_noise_it_is_the_mean_of_clipped_examples() -> None:
    _, step = step_on("lenet:init=wide", examples=4)
    singles = [step.gradient(step.batch.take(slice(i, i + 1))) for i in range(4)]
    sent = DEFENSES.build("dp:sigma=0,bound=0.5").on_gradient(step.gradient(), step)
    for name in sent:
        expected = sum(g[name] * min(1.0, 0.5 / float(norm(g))) for g in singles) / 4
        assert torch.allclose(sent[name], expected, rtol=1e-4, atol=1e-8)  # type: ignore[arg-type]
    assert min(float(norm(g)) for g in singles) > 0.5
    assert step.log.means() == {"clipped": 1.0}


@pytest.mark.parametrize("examples", [1, 4])
def test_noise_has_the_deviation_sigma_bound_over_n(examples: int) -> None:
    _, step = step_on("lenet", examples=examples)
    without = DEFENSES.build("dp:sigma=0,bound=2").on_gradient(step.gradient(), step)
    sent = DEFENSES.build("dp:sigma=0.7,bound=2").on_gradient(step.gradient(), step)
    noise = torch.cat([(sent[name] - without[name]).flatten() for name in sent]).double()
    assert noise.std().item() == pytest.approx(0.7 * 2 / examples, rel=0.02)
    assert noise.mean().abs() < 4 * 0.7 * 2 / examples / math.sqrt(len(noise))


def batch_paths() -> list[tuple[str, str]]:
    """A model, and how its examples are clipped: gradients formed by vmap or through shared weights, or not formed."""
    return [("lenet:init=wide", "vmap"), ("vit", "unformed"), ("vit", "shared"), ("vit", "vmap")]


@pytest.fixture(params=batch_paths(), ids=lambda path: "-".join(path))
def clipped_step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    """A step on four examples under Poisson sampling, whose examples go the way that the fixture names."""
    model, path = request.param
    step = replace(step_on(model, examples=4)[1], sample_rate=0.1, expected=6.5)

    if path != "unformed":
        monkeypatch.setattr(clip, "_unformed", lambda *_: None)
    if path == "vmap":
        monkeypatch.setattr(engine_examples, "why_not_shared", lambda _: "so that the test chooses the way")
    else:
        assert not engine_examples.why_not_shared(step)  # compares with vmap once for each model
    taken = {"formed": 0, "vmap": 0}
    formed, by_vmap = clip._formed, Step.example_gradients

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            taken[name] += 1
            return function(*given)

        return call

    monkeypatch.setattr(clip, "_formed", counted("formed", formed))
    monkeypatch.setattr(Step, "example_gradients", counted("vmap", by_vmap))
    yield step
    assert (taken["formed"] > 0, taken["vmap"] > 0) == (path != "unformed", path == "vmap")


def test_one_example_more_or_less_changes_at_most_bound_over_expected(clipped_step: Step) -> None:
    batch, bound = clipped_step.batch, 0.05
    whole = clip.clipped_mean(clipped_step, bound)
    for place in range(4):
        rest = batch.take(torch.tensor([i for i in range(4) if i != place]))
        without = clip.clipped_mean(replace(clipped_step, batch=rest), bound)
        change = float(norm(subtract(whole, without)))
        assert change == pytest.approx(bound / 6.5, rel=1e-3), "all are longer than the bound, so that it is reached"
    loose = clip.clipped_mean(clipped_step, 1e6)
    single = clipped_step.gradient(batch.take(slice(3, 4)))
    others = clip.clipped_mean(replace(clipped_step, batch=batch.take(slice(0, 3))), 1e6)
    assert float(norm(subtract(loose, others))) == pytest.approx(float(norm(single)) / 6.5, rel=1e-3)


@pytest.mark.parametrize("model", ["lenet", "vit"])
def test_an_empty_batch_has_a_mean_of_zero_and_sends_noise_alone(model: str) -> None:
    step = replace(step_on(model, examples=2)[1], sample_rate=0.1, expected=4.0)
    empty = replace(step, batch=step.batch.take(slice(0, 0)))
    mean = clip.clipped_mean(empty, 1.0)
    assert {name: tensor.shape for name, tensor in mean.items()} == {n: p.shape for n, p in step.params.items()}
    assert not any(tensor.any() for tensor in mean.values())
    assert not any(t.any() for t in DEFENSES.build("clip:per=example").on_gradient(mean, empty).values())
    sent = DEFENSES.build("dp:sigma=0.7,bound=2").on_gradient(mean, empty)
    noise = torch.cat([tensor.flatten() for tensor in sent.values()]).double()
    assert noise.std().item() == pytest.approx(0.7 * 2 / 4, rel=0.02)
    assert empty.log.ledger.state() == [[0.7, 0.1, 1]]
    assert empty.log.means() == {}


def test_noise_under_poisson_sampling_does_not_depend_on_how_many_were_drawn() -> None:
    deviations = []
    for examples in (1, 4):
        step = replace(step_on("lenet", examples=examples)[1], sample_rate=0.01, expected=2.5)
        without = DEFENSES.build("dp:sigma=0,bound=2").on_gradient({}, step)
        sent = DEFENSES.build("dp:sigma=0.7,bound=2").on_gradient({}, step)
        noise = torch.cat([(sent[name] - without[name]).flatten() for name in sent]).double()
        deviations.append(noise.std().item())
    assert deviations == pytest.approx([0.7 * 2 / 2.5] * 2, rel=0.02)


def test_an_empty_batch_of_unknown_expectation_is_refused() -> None:
    _, step = step_on(examples=1)
    with pytest.raises(GradveilError, match="without examples needs the number that is expected"):
        DEFENSES.build("dp").on_gradient({}, replace(step, batch=step.batch.take(slice(0, 0))))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        ({"sample_rate": 0.1}, "go together"),
        ({"expected": 3.0}, "go together"),
        ({"sample_rate": 0.0, "expected": 3.0}, "sample_rate is above 0"),
        ({"sample_rate": math.nan, "expected": 3.0}, "sample_rate is above 0"),
        ({"sample_rate": 0.1, "expected": 0.0}, "expected is a number of examples above 0"),
        ({"sample_rate": 0.1, "expected": math.nan}, "expected is a number of examples above 0"),
    ],
)
def test_a_draw_that_cannot_be_is_refused(draw: dict[str, Any], message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        replace(step_on(examples=1)[1], **draw)


def test_only_poisson_sampling_counts_as_such() -> None:
    """Whatever rate the options plan: a batch that was chosen in another way costs a whole step."""
    defense = DEFENSES.build("dp:sample_rate=0.01,steps=10")
    _, step = step_on(examples=2)
    defense.on_gradient({}, step)
    assert step.log.ledger.state() == [[1.1, 1.0, 1]]
    run = defense.for_round(step)
    run.on_gradient({}, step)
    run.on_gradient({}, replace(step, sample_rate=0.2, expected=2.0, index=torch.arange(2)))
    assert step.log.ledger.state() == [[1.1, 0.2, 1], [1.1, 1.0, 2]]


def test_known_examples_cost_the_visits_of_the_most_visited_one() -> None:
    _, step = step_on(examples=2)
    run = DEFENSES.build("dp").for_round(step)
    counts = []
    for index in ([0, 1], [2, 3], [4, 5], [0, 1], [2, 1], [7, 7]):
        run.on_gradient({}, replace(step, index=torch.tensor(index)))
        counts.append(step.log.ledger.steps)
    assert counts == [1, 1, 1, 2, 3, 4]  # the last: twice in one batch is as much as four steps


def test_equal_examples_in_one_batch_count_each_time() -> None:
    """Where nobody knows which examples they are: three times in one batch is as much as nine steps."""
    _, step = step_on(examples=4)
    inputs, labels = step.batch.inputs, step.batch.labels

    def cost(inputs: torch.Tensor, labels: torch.Tensor, **known: Any) -> int:
        one = replace(step, batch=Batch(inputs, labels), log=Log(), **known)
        defense = DEFENSES.build("dp:beyond_plan=true,steps=1")
        defense.for_round(one).on_gradient({}, one)
        (entry,) = one.log.ledger.state()
        return int(entry[2])

    thrice = torch.tensor([2, 0, 2, 1, 2, 0])
    assert cost(inputs, labels) == 1
    assert cost(inputs[thrice], labels[thrice]) == 9
    assert cost(inputs[thrice], torch.arange(6)) == 1, "another label, another example"
    assert cost(inputs[thrice], torch.tensor([5, 0, 5, 1, 6, 0])) == 4
    nearly = inputs[thrice].clone()
    nearly[2, 0, 0, 0] += 1e-3
    assert cost(nearly, labels[thrice]) == 4
    shuffled = inputs[:1].repeat(2, 1, 1, 1)
    shuffled[1] = shuffled[1].flip(-1)  # has the same sum of bits
    assert cost(shuffled, labels[:1].repeat(2)) == 1
    one_hot = nn.functional.one_hot(labels[thrice], 10).float()
    assert cost(inputs[thrice], one_hot) == 9
    assert cost(inputs[thrice], labels[thrice], sample_rate=0.1, expected=4.0) == 1, "records of one secret draw"
    assert cost(inputs[thrice], labels[thrice], index=torch.arange(6)) == 1, "known to be different ones"


def test_copies_count_against_the_plan() -> None:
    _, step = step_on(examples=1)
    twice = replace(step, batch=step.batch.take(torch.tensor([0, 0])))
    defense = DEFENSES.build("dp:steps=3")
    for one in (defense, defense.for_round(twice)):
        with pytest.raises(GradveilError, match="4 steps, more than the 3 that are planned"):
            one.on_gradient({}, twice)
    assert twice.log.ledger.steps == 0


def test_a_chain_counts_as_its_link_does() -> None:
    chain = DEFENSES.build("dp:delta=1e-6,steps=2+sparsify")
    _, step = step_on(examples=2)
    chain.for_round(step).on_gradient(step.gradient(), step)
    assert (chain.delta, step.log.ledger.state()) == (1e-6, [[1.1, 1.0, 1]])
    plan = chain.planned()
    assert plan == guarantee(sigma=1.1, sample_rate=1.0, steps=2, delta=1e-6)
    with pytest.raises(GradveilError, match="more than the 2 that are planned"):
        chain.check_steps(3)
    plain = DEFENSES.build("clip+noise")
    assert (plain.delta, plain.planned()) == (None, None)
    plain.check_steps(10**9)


def test_a_reply_logs_epsilon_for_the_steps_that_saw_an_example() -> None:
    pytest.importorskip("dp_accounting")
    module = models.build("lenet", SAMPLES.domain, seed=0)
    for recipe, visits in [
        (Recipe(), 1),
        (Recipe(sends="delta", epochs=3), 3),
        (Recipe(sends="delta", epochs=2, batch_size=2), 2),  # four steps, but each example is in two of them
    ]:
        client = SimulatedClient(module, recipe=recipe, defense=DEFENSES.build("dp"))
        log = client.reply(client.model.params, SAMPLES.batch(range(4)), Stream.seeded(0)).log
        expected = guarantee(sigma=1.1, sample_rate=1.0, steps=visits).epsilon
        assert log.values("epsilon_reply") == (expected,)
        assert log.ledger.state() == [[1.1, 1.0, visits]]


def test_the_plan_and_the_reply_are_told_apart() -> None:
    pytest.importorskip("dp_accounting")
    defense = DEFENSES.build("dp:sample_rate=0.01,steps=1000")
    client = SimulatedClient(models.build("lenet", SAMPLES.domain, seed=0), recipe=Recipe(), defense=defense)
    log = client.reply(client.model.params, SAMPLES.batch(range(2)), Stream.seeded(0)).log
    assert log.means()["epsilon_planned"] == pytest.approx(1.517, abs=2e-3)
    assert log.means()["epsilon_reply"] == guarantee(sigma=1.1, sample_rate=1.0, steps=1).epsilon


def test_a_plan_without_a_rate_is_counted_at_rate_one() -> None:
    assert DEFENSES.build("dp:steps=3").planned() == guarantee(sigma=1.1, sample_rate=1.0, steps=3)


def test_more_steps_than_planned_are_refused_unless_asked_for() -> None:
    module, recipe = models.build("lenet", SAMPLES.domain, seed=0), Recipe(sends="delta", epochs=3)
    sent, batch = dict(module.named_parameters()), SAMPLES.batch(range(2))
    strict = SimulatedClient(module, recipe=recipe, defense=DEFENSES.build("dp:steps=2"))
    with pytest.raises(GradveilError, match=r"3 steps, more than the 2 that are planned: .*beyond_plan=true"):
        strict.reply(sent, batch, Stream.seeded(0))
    free = SimulatedClient(module, recipe=recipe, defense=DEFENSES.build("dp:steps=2,beyond_plan=true"))
    assert free.reply(sent, batch, Stream.seeded(0)).log.ledger.state() == [[1.1, 1.0, 3]]


def test_a_ledger_that_lives_longer_than_a_reply_counts_against_the_plan() -> None:
    """A guard, or a client over its rounds, hands the ledger so far to each log."""
    ledger, defense = Ledger(), DEFENSES.build("dp:steps=3")
    for _ in range(3):
        _, step = step_on(examples=2)
        defense.for_round(step).on_gradient({}, replace(step, log=Log(ledger)))
    _, step = step_on(examples=2)
    with pytest.raises(GradveilError, match="4 steps, more than the 3"):
        defense.for_round(step).on_gradient({}, replace(step, log=Log(ledger)))
    assert ledger.state() == [[1.1, 1.0, 3]]


def test_running_statistics_which_it_does_not_cover_are_refused() -> None:
    kept, forgotten = (nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=track)) for track in (True, False))
    with pytest.raises(GradveilError, match=r"layer '0'.*track_running_stats=False"):
        DEFENSES.build("dp").check(kept)
    DEFENSES.build("dp").check(forgotten)


def test_no_noise_is_no_guarantee_and_logs_none() -> None:
    client = SimulatedClient(
        models.build("lenet", SAMPLES.domain, seed=0), recipe=Recipe(), defense=DEFENSES.build("dp:sigma=0")
    )
    log = client.reply(client.model.params, SAMPLES.batch(range(2)), Stream.seeded(0)).log
    assert log.values("epsilon_reply") == ()
    assert log.ledger.spent(1e-5) == math.inf


def test_without_an_accountant_it_works_and_only_numbers_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refusing(name: str, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "dp_accounting":
            raise ImportError(name)
        return real(name, *rest, **named)

    accounting._library.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refusing)
    client = SimulatedClient(
        models.build("lenet", SAMPLES.domain, seed=0), recipe=Recipe(), defense=DEFENSES.build("dp:sigma=1.234")
    )
    log = client.reply(client.model.params, SAMPLES.batch(range(2)), Stream.seeded(0)).log
    assert set(log.means()) == {"clipped"}
    assert log.ledger.state() == [[1.234, 1.0, 1]]


def test_batch_norm_is_refused_with_the_fix() -> None:
    with pytest.raises(GradveilError, match=r"layer 'body.bn0'.*batch_norm=false.*torch.nn.GroupNorm"):
        SimulatedClient(
            models.build("convnet:width=8", SAMPLES.domain, seed=0), recipe=Recipe(), defense=DEFENSES.build("dp")
        )
    fixed = models.build("convnet:width=8,batch_norm=false", SAMPLES.domain, seed=0)
    SimulatedClient(fixed, recipe=Recipe(), defense=DEFENSES.build("dp"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dp:sigma=-1", "sigma is at least 0"),
        ("dp:bound=0", "bound is above 0"),
        ("dp:delta=1", "delta is above 0 and below 1"),
        ("dp:sample_rate=0.1", "give its steps"),
        ("dp:beyond_plan=true", "give its steps"),
        ("dp:sample_rate=2,steps=5", "sample_rate is above 0 and at most 1"),
        ("dp:sample_rate=0.1,steps=0", "steps is at least 1"),
        (f"dp:steps={10**16}", "steps is at least 1 and at most"),
    ],
)
def test_impossible_options_are_refused(spec: str, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        DEFENSES.build(spec)


@pytest.mark.integration
@pytest.mark.parametrize("model", ["lenet", "convnet:width=64,batch_norm=false"])
def test_an_example_that_a_crafted_broadcast_makes_infinite_does_not_show(model: str) -> None:
    """An error, or NaN, would tell the server that an example is there which meets its condition."""
    _, step = step_on(model, examples=3)
    loud = step.batch.inputs.clone()
    loud[1] *= 1e30
    step = replace(step, batch=Batch(loud, step.batch.labels))
    found = clip.clipped_mean(step, 1.0)
    others = replace(step, batch=step.batch.take(torch.tensor([0, 2])))
    assert all(tensor.isfinite().all() for tensor in found.values())
    change = subtract(scaled(found, 3.0), scaled(clip.clipped_mean(others, 1.0), 2.0))
    assert float(norm(change)) <= 1.0001


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_cannot_be_bounded(dtype: torch.dtype) -> None:
    with pytest.raises(GradveilError, match="float32"):
        DEFENSES.build("dp").check(nn.Linear(2, 2).to(dtype))
    frozen = nn.Linear(2, 2).to(dtype).requires_grad_(False)
    DEFENSES.build("dp").check(nn.Sequential(frozen, nn.Linear(2, 2)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_in_half_precision_is_not_sent(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    _, step = step_on(examples=2)
    monkeypatch.setattr(dp, "clipped_mean", lambda step, _: {n: p.to(dtype) for n, p in step.params.items()})
    with pytest.raises(GradveilError, match="half precision"):
        DEFENSES.build("dp").on_gradient({}, step)
