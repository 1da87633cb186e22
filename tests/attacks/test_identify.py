"""Candidates are ranked by what a defense leaves of the gradient, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from exchanges import SAMPLES, observed, private_batches
from gradveil.attacks import ATTACKS, BUDGETS, Reconstruction, load_reconstructions, save_reconstructions
from gradveil.attacks.parts import mixture, path
from gradveil.attacks.parts.candidate_updates import updates_for
from gradveil.attacks.parts.objectives import OrthogonalObjective
from gradveil.attacks.parts.path import straight
from gradveil.auditing import Case, run_case
from gradveil.auditing.audit import Ranking
from gradveil.auditing.scoring import ranked
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Recipe
from gradveil.metrics import ranks
from gradveil.models import Functional
from gradveil.threat import Observation, threat_model


def attacked(attack: str, seen: list[Observation]) -> list[Reconstruction]:
    return ATTACKS.build(attack, BUDGETS["quick"])(seen, seeds=list(range(len(seen))))


def firsts(found: list[Reconstruction]) -> int:
    """How many of the first samples are ranked first behind their own updates."""
    scores = [one.scores for one in found if one.scores is not None]
    return int((ranks(torch.stack(scores), torch.arange(len(found))) == 1).sum())


@pytest.fixture(scope="module")
def censored() -> dict[str, list[Observation]]:
    """Replies for twenty samples under CENSOR, by how it treats norms."""
    batches, specs = private_batches(20), ("preserve", "public", "random")
    return {norms: observed(batches, model="lenet", defense=f"censor:norms={norms}", threat="D") for norms in specs}


@pytest.mark.integration
def test_preserved_norms_name_the_image_and_its_label(censored: dict[str, list[Observation]]) -> None:
    found = attacked("fingerprint", censored["preserve"])
    assert firsts(found) >= 19
    right = [int(one.labels[0]) == int(SAMPLES.labels[i]) for i, one in enumerate(found)]
    assert sum(right) >= 19


def test_public_norms_say_nothing_and_right_angles_everything(censored: dict[str, list[Observation]]) -> None:
    assert firsts(attacked("fingerprint", censored["public"])) <= 2
    assert firsts(attacked("fingerprint:by=orthogonality", censored["public"])) >= 19
    assert firsts(attacked("identify", censored["random"])) >= 19
    assert firsts(attacked("identify:informed=false", censored["preserve"])) <= 2


def test_the_gradient_as_one_vector_and_the_gradient_itself() -> None:
    for options in ("layerwise=false", "fallback=original", "projection=released"):
        seen = observed(private_batches(6), model="lenet", defense=f"censor:{options}", threat="D")
        assert firsts(attacked("fingerprint:by=both", seen)) == 6, options


def test_a_tensor_that_had_no_other_direction_says_nothing_of_its_norm() -> None:
    seen = observed(private_batches(6), model="lenet:init=wide", defense="censor:orthogonal=examples", threat="D")
    assert any(not tensor.any() for tensor in seen[0].reply.values())
    assert firsts(attacked("identify", seen)) == 6


DEFENSES_LEFT = {
    "none": 6, "clip:bound=0.5": 6, "clip:bound=0.5,per=global": 6, "sparsify:rate=0.95": 6, "soteria": 6, "outpost": 6,
    "graddefense:sigma=0.01,images=5": 6, "precode:size=16": 6, "dcs2:iterations=5": 6, "ats": 4,
    "clip:bound=4+noise:sigma=0.01": 6, "dp:sigma=0.01": 6, "graddefense:bound=0.1,images=5": 6,
    "soteria+noise:sigma=0.0001": 6, "sparsify+noise:sigma=0.0001": 5, "outpost+noise:sigma=0.0001": 5,
    "dp:sigma=0.001+clip:bound=0.5": 6, "soteria+graddefense:images=5": 6,
    "censor+clip:bound=1": 6, "clip:bound=1+censor": 6, "censor+clip:bound=1,per=global": 6,
}  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize("defense", DEFENSES_LEFT)
def test_who_knows_the_defense_identifies(defense: str) -> None:
    seen = observed(private_batches(6), defense=defense, threat="D")
    assert firsts(attacked("identify", seen)) >= DEFENSES_LEFT[defense]


@pytest.mark.parametrize(
    "defense", ["sparsify:rate=0.95", "precode:size=16", "outpost", "graddefense:sigma=0.01,images=5"]
)
def test_knowing_the_defense_helps(defense: str) -> None:
    seen = observed(private_batches(6), model="lenet", defense=defense, threat="D")
    assert firsts(attacked("identify:informed=false", seen)) < firsts(attacked("identify", seen)) == 6


def test_what_is_not_granted_is_not_used() -> None:
    seen = observed(private_batches(6), model="lenet", defense="sparsify:rate=0.95", threat="B+candidates")
    assert seen[0].defense is None
    known = observed(private_batches(6), model="lenet", defense="sparsify:rate=0.95", threat="D")
    plain = attacked("identify:informed=false", known)
    for one, other in zip(attacked("identify", seen), plain, strict=True):
        assert torch.equal(one.scores, other.scores)  # type: ignore[arg-type]


def test_noise_hides() -> None:
    seen = observed(private_batches(6), defense="noise:sigma=10", threat="D")
    assert firsts(attacked("identify", seen)) <= 1


def test_a_place_in_the_list_tells_nothing() -> None:
    """The attack sees candidates and no truth: in another order, each has the score it had."""
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    (one,) = observed(private_batches(1), defense="censor", threat="D")
    (before,) = attacked("identify", [one])
    (after,) = attacked("identify", [replace(one, candidates=SAMPLES.subset(order))])
    torch.testing.assert_close(after.scores, before.scores[order])
    assert torch.equal(before.inputs, after.inputs)


def test_a_list_without_the_private_image_gives_another_of_its_label() -> None:
    seen = observed(private_batches(10), model="lenet", defense="censor", threat="D")
    others = SAMPLES.subset(range(10, 100))
    found = attacked("fingerprint", [replace(one, candidates=others) for one in seen])
    right = [int(one.labels[0]) == int(SAMPLES.labels[i]) for i, one in enumerate(found)]
    assert sum(right) >= 8


def test_the_examples_of_a_batch_are_found_one_by_one() -> None:
    for model in ("lenet:init=wide", "convnet:width=4"):
        (found,) = attacked("identify", observed(private_batches(1, 5), model=model, threat="D"))
        assert ranked([found], torch.arange(5), SAMPLES).ranked_first == 1
        assert sorted(found.labels.tolist()) == sorted(SAMPLES.labels[:5].tolist())


BATCHES_LEFT = {
    "graddefense:sigma=0.01,images=5": 15, "dcs2:iterations=5,sensitive=first": 12, "dcs2:iterations=5": 6,
    "soteria:probes=4": 15, "sparsify:rate=0.9": 15, "noise:sigma=0.01": 13, "clip:bound=4+noise:sigma=0.01": 12,
    "clip:bound=1,per=example+noise:sigma=0.001": 12, "precode:size=16": 15, "ats": 10, "outpost": 6,
    "sparsify:rate=0.9+noise:sigma=0.0001": 12, "graddefense:sigma=0.01,images=5,bound=0.1": 12,
}  # fmt: skip


@pytest.mark.parametrize("defense", BATCHES_LEFT)
def test_who_knows_the_defense_identifies_those_of_a_batch(defense: str) -> None:
    """Of 16 images in two batches of 8: the angle finds three at most, chance one."""
    seen = observed(private_batches(2, 8), defense=defense, threat="D")
    first = ranked(attacked("identify", seen), torch.arange(16), SAMPLES).ranked_first
    assert 16 * first >= BATCHES_LEFT[defense]


@pytest.mark.integration
@pytest.mark.parametrize("options", ["norms=preserve", "norms=public", "fallback=original"])
def test_the_set_behind_a_censored_batch_is_the_one_at_right_angles_to_it(options: str) -> None:
    seen = observed(private_batches(3, 4), defense=f"censor:{options}", threat="D")
    found = attacked("identify", seen)
    assert ranked(found, torch.arange(12), SAMPLES).ranked_first == 1
    assert max(one.objective for one in found) < mixture.FOUND


def test_where_censor_sends_the_gradient_itself_those_who_explain_it_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "STARTS", 100)
    seen = observed(private_batches(3, 4), model="lenet", defense="censor:fallback=original", threat="D")
    assert ranked(attacked("identify", seen), torch.arange(12), SAMPLES).ranked_first == 1


def test_where_censor_has_come_to_rest_a_batch_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "STARTS", 100)
    seen = observed(private_batches(3, 4), threat="D")
    rests = [replace(one, defense="censor:rounds=1") for one in seen]
    assert ranked(attacked("identify", rests), torch.arange(12), SAMPLES).ranked_first == 1


def test_one_angle_for_all_tensors_hides_a_batch() -> None:
    seen = observed(private_batches(3, 4), defense="censor:layerwise=false", threat="D")
    assert ranked(attacked("identify", seen), torch.arange(12), SAMPLES).ranked_first < 0.5


@pytest.mark.integration
def test_a_set_is_found_among_unlike_equations() -> None:
    """Seven of sixty rows add up to zero; all equations but one are nearly the same."""
    rng = torch.Generator().manual_seed(0)
    parts = torch.randn((60, 6), generator=rng, dtype=torch.float64)
    parts[:, 1:5] = parts[:, :1] + 0.01 * parts[:, 1:5]
    parts *= torch.tensor([1e-9, 1.0, 1e3, 1.0, 1.0, 1e-3])
    parts[6] = -parts[:6].sum(dim=0)
    reply = {str(number): torch.zeros(1) for number in range(6)}
    (scores,) = mixture.OrthogonalSets(examples=7).scores_of_all(parts, [reply])
    assert set(scores.argsort()[:7].tolist()) == set(range(7))
    assert scores[:7].max() < mixture.FOUND < scores[7:].min()


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(sends="delta", epochs=2, batch_size=1, lr=0.01)])
def test_an_update_of_zeros_names_nobody(recipe: Recipe) -> None:
    (one,) = observed(private_batches(1, 2), threat="D", recipe=recipe)
    silent = replace(one, reply={name: torch.zeros_like(tensor) for name, tensor in one.reply.items()})
    (found,) = ATTACKS.build("identify", BUDGETS["quick"])([silent], seeds=[0])
    assert found.scores is not None
    assert float(found.scores.max() - found.scores.min()) < 1e-6


def test_a_long_list_is_fitted_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "FITTED", 50)
    seen = observed(private_batches(2, 8), defense="noise:sigma=0.01", threat="D")
    found = attacked("identify", seen)
    assert 16 * ranked(found, torch.arange(16), SAMPLES).ranked_first >= 12
    assert all(len(set(one.scores.tolist())) == len(SAMPLES) for one in found if one.scores is not None)


def test_a_batch_of_more_examples_than_classes_is_found_too() -> None:
    (found,) = attacked("identify", observed(private_batches(1, 16), threat="D"))
    assert ranked([found], torch.arange(16), SAMPLES).ranked_first == 1


FEDAVG = Recipe(sends="delta", epochs=2, batch_size=4, lr=0.01)


@pytest.mark.parametrize(
    ("defense", "least"), [("none", 8), ("noise:sigma=0.01", 7), ("clip:bound=4", 6), ("soteria:probes=4", 6)]
)
def test_those_behind_several_steps_are_found_along_their_path(defense: str, least: int) -> None:
    """Of 8 images in two epochs of two mini-batches: by angles it is one or two, chance is less than one."""
    seen = observed(private_batches(1, 8), defense=defense, threat="D", recipe=FEDAVG)
    assert 8 * ranked(attacked("identify", seen), torch.arange(8), SAMPLES).ranked_first >= least
    assert 8 * ranked(attacked("identify:informed=false", seen), torch.arange(8), SAMPLES).ranked_first <= 3


def test_without_the_recipe_there_is_no_path() -> None:
    seen = observed(private_batches(1, 8), threat="B+candidates", recipe=FEDAVG)
    assert seen[0].recipe is None
    for one, plain in zip(attacked("identify", seen), attacked("identify:informed=false", seen), strict=True):
        assert torch.equal(one.scores, plain.scores)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "defense", ["none", "clip:bound=4", "sparsify:rate=0.9", "soteria:probes=4", "precode:size=16"]
)
def test_the_one_behind_several_steps_is_found_by_directions(defense: str) -> None:
    seen = observed(private_batches(6), defense=defense, threat="D", recipe=FEDAVG)
    assert firsts(attacked("identify", seen)) >= 5


def test_a_path_is_walked_as_the_client_did() -> None:
    """One mini-batch of all, momentum and decay: with the right shares the path ends where the client's did."""
    recipe = Recipe(sends="delta", epochs=3, lr=0.01, momentum=0.9, weight_decay=0.01)
    (batch,) = private_batches(1, 4)
    (one,) = observed([batch], threat="D", recipe=recipe)
    walked = straight(one).walked(batch, torch.ones(1, 4))
    shorter = replace(recipe, epochs=2)
    (earlier,) = observed([batch], threat="D", recipe=shorter)
    mean = {name: tensor.mean(dim=0) for name, tensor in walked.updates()(batch.inputs, batch.labels).items()}
    for name, tensor in walked.seen().reply.items():
        torch.testing.assert_close(walked.points[2][name], one.sent[name] + earlier.reply[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mean[name], tensor, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("defense", ["noise:sigma=0.05", "clip:bound=0.5,per=global"])
def test_norms_after_several_steps_are_those_of_their_sum(defense: str) -> None:
    """A bound and noise are on one gradient. What was sent is the learning rate times the sum of three."""
    seen = observed(private_batches(5), defense=defense, threat="D", recipe=Recipe(sends="delta", epochs=3, lr=0.1))
    assert firsts(attacked("fingerprint", seen)) == 5


@pytest.mark.integration
def test_a_long_path_is_looked_at_in_some_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path, "POINTS", 3)
    seen = observed(private_batches(1, 8), threat="D", recipe=replace(FEDAVG, epochs=4, lr=0.005))
    assert 8 * ranked(attacked("identify", seen), torch.arange(8), SAMPLES).ranked_first >= 6


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("lenet:init=wide", Recipe()),
        ("convnet:width=4", Recipe()),
        ("lenet:init=wide", Recipe(sends="delta", epochs=2, lr=0.05)),
    ],
)
def test_the_updates_of_candidates_are_those_that_clients_would_send(model: str, recipe: Recipe) -> None:
    seen = observed(private_batches(3), model=model, threat="D", recipe=recipe)
    (batch,) = private_batches(1, 3)
    updates = updates_for(seen[0])(batch.inputs, batch.labels)
    for i, one in enumerate(seen):
        for name, tensor in one.reply.items():
            torch.testing.assert_close(updates[name][i], tensor, rtol=1e-9, atol=1e-12)


class EditsInPlace(nn.Module):
    """An activation that no layer stands for, and that edits what left the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 5, stride=3), nn.Linear(400, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(nn.functional.relu(self.conv(x), inplace=True).flatten(1))
        return out


@pytest.mark.usefixtures("double_precision")
def test_a_model_that_the_layer_rules_get_wrong_has_its_gradients_taken_one_by_one() -> None:
    (one,), (batch,) = observed(private_batches(1), threat="D"), private_batches(1, 3)
    torch.manual_seed(0)
    module = EditsInPlace()
    params = Functional(module).params
    updates = updates_for(replace(one, module=module, sent=params))(batch.inputs, batch.labels)
    for i in range(3):
        alone = (
            SimulatedClient(module, recipe=Recipe()).reply(params, batch.take(slice(i, i + 1)), Stream.seeded(0)).update
        )
        for name, tensor in alone.items():
            torch.testing.assert_close(updates[name][i], tensor, rtol=1e-9, atol=1e-12)


def test_candidates_have_to_be_granted_and_to_fit() -> None:
    with pytest.raises(GradveilError, match="candidates, which threat C lacks; it fits threat model D"):
        threat_model("C").vet("identify", ATTACKS.build("identify", BUDGETS["quick"]).requires)
    (one,) = observed(private_batches(1), threat="C")
    with pytest.raises(GradveilError, match="candidates=DATA"):
        attacked("identify", [one])
    with pytest.raises(GradveilError, match="choose other candidates="):
        attacked("identify:candidates=mnist-samples", [one])
    (found,) = attacked("identify:candidates=cifar10-samples", [one])
    assert torch.equal(found.inputs, SAMPLES.batch([0]).inputs)


def test_the_private_image_has_the_least_marks_of_all() -> None:
    """What a search in a generator minimises is lowest at the true gradient, under any norms that are preserved."""
    (one,) = observed(private_batches(1), model="lenet", defense="censor", threat="D")
    batch = SAMPLES.batch(range(10))
    updates = updates_for(one)(batch.inputs, batch.labels)
    objective = OrthogonalObjective()
    reply = {name: tensor.expand(10, *tensor.shape) for name, tensor in one.reply.items()}
    slopes, values = objective.slopes(updates, reply)
    assert values.argmin() == 0
    assert values[0] < 1e-6 < values[1:].min()
    alone = {name: tensor[3] for name, tensor in updates.items()}
    torch.testing.assert_close(values[3], objective(alone, one.reply))
    moved = {name: alone[name] + 1e-2 * slopes[name][3] for name in alone}
    assert objective(moved, one.reply) > values[3]


def test_scores_are_saved_and_ranks_are_of_the_granted_list_only(tmp_path: Path) -> None:
    found = attacked("identify", observed(private_batches(2), threat="D"))
    save_reconstructions(tmp_path / "x", found)
    loaded = load_reconstructions(tmp_path / "x")
    for one, again in zip(found, loaded, strict=True):
        assert torch.equal(one.scores, again.scores)  # type: ignore[arg-type]
        assert again.candidates == SAMPLES.name
    index = torch.arange(2)
    assert ranked(loaded, index, SAMPLES) == Ranking(candidates=100, ranks=(1, 1), ranked_first=1.0)
    assert ranked(loaded, index, replace(SAMPLES, name="other")) == Ranking()
    assert ranked(loaded, index, None) == Ranking()


@pytest.mark.integration
def test_an_audit_says_where_the_private_images_stand(tmp_path: Path) -> None:
    case = Case(model="lenet", defenses=("censor",), attacks=("fingerprint",), threat="D", gallery=10)
    row, alone = run_case(case, tmp_path / "audit").rows
    assert list(row.ranks) == [1, 1, 1, 1]
    assert row.candidates == 96, "as many as a list without the private images can have"
    assert row.identified == row.label_accuracy == row.ranked_first == 1
    assert alone.attack == "prior-only"
    assert alone.ranked_first <= 0.25
