"""The adversary who answers the defense it knows: each counter-move, and that it buys something."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from exchanges import SAMPLES, observed, private_batches
from gradveil.attacks import ATTACKS, Attack, Budget, Reconstruction
from gradveil.attacks.against import AGAINST, WITHOUT
from gradveil.attacks.against.ats import UndoPolicies
from gradveil.attacks.against.dcs2 import SearchBoth, counter_move
from gradveil.attacks.against.graddefense import SharedValues
from gradveil.attacks.against.precode import drawn
from gradveil.attacks.informed import answers, counter_for
from gradveil.attacks.parts.counter import ChannelMove, all_replies
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import map_each, norm, stack, subtract
from gradveil.core.types import Batch, Params, Recipe
from gradveil.defenses import DCS2, DEFENSES
from gradveil.defenses.ats import transformed
from gradveil.metrics import matched, psnr
from gradveil.threat import Observation, threat_model
from interrogation import interrogated

SHORT = Budget(1, 120)


def quality(attack: str, seen: list[Observation], budget: Budget = SHORT) -> float:
    """Mean PSNR of what an attack finds behind replies for the first sample images."""
    found = ATTACKS.build(attack, budget)(seen, seeds=list(range(len(seen))))
    truth = torch.cat([batch.inputs for batch in private_batches(len(seen))])
    return float(psnr(torch.cat([one.inputs for one in found]), truth).mean())


@pytest.mark.integration
@pytest.mark.parametrize(
    ("defense", "gain"),
    [
        ("soteria", 2.0),
        ("sparsify", 1.0),
        ("clip:bound=4", 2.0),
        ("noise:sigma=0.1", 2.0),
        ("outpost", 1.0),
        ("graddefense:sigma=0.3", 2.0),
        ("clip:bound=4+noise:sigma=0.02", 1.0),
    ],
)
def test_knowing_the_defense_brings_the_picture_nearer(defense: str, gain: float) -> None:
    seen = observed(private_batches(2), defense=defense)
    assert quality("informed", seen) > quality("ig", seen) + gain


def test_concealed_pictures_are_searched_together_with_the_private_one() -> None:
    seen = observed(private_batches(2), defense="dcs2:iterations=20")
    (one, *_) = ATTACKS.build("informed", Budget(1, 3))(seen, seeds=[0, 1])
    assert one.inputs.shape == (1, 3, 32, 32)
    assert one.labels.tolist() == private_batches(1)[0].labels.tolist()


@pytest.mark.parametrize(
    ("options", "weight"), [("", 1.0), ("margin=0.5", 1.0), ("margin=0.5,strict=true", 1.5), ("sensitive=1", 1.0)]
)
def test_what_the_released_projection_adds_is_counted(options: str, weight: float) -> None:
    """Half of the private gradient is added to nearly every step: the matching target of the private picture has it."""
    (one,) = observed(private_batches(1))
    defense = DEFENSES.build(f"dcs2plus:iterations=2,{options}".rstrip(","))
    assert isinstance(defense, DCS2)
    move = counter_move(defense, replace(one, defense=defense.spec))
    assert isinstance(move, SearchBoth)
    targets = move.extra(move.prepare(one))["targets"]
    assert targets.sum(1).tolist() == pytest.approx([weight, 1.0])


def test_a_picture_that_is_not_called_sensitive_is_not_concealed() -> None:
    (one,) = observed(private_batches(1))
    assert counter_move(DCS2(sensitive="30%"), replace(one, defense="dcs2:sensitive=30%")) is None, (
        "the first of ten is not among three"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("defense", "gain"), [("dcs2:iterations=100", 1.0), ("precode", 3.0), ("ats", 1.0)])
def test_knowing_a_costlier_defense_does_so_too(defense: str, gain: float) -> None:
    seen = observed(private_batches(3), defense=defense, model="lenet" if defense == "precode" else "lenet:init=wide")
    assert quality("informed", seen, Budget(1, 300)) > quality("ig", seen, Budget(1, 300)) + gain


@pytest.mark.parametrize(("defense", "threat"), [("soteria", "B"), ("none", "C"), ("censor:projection=none", "C")])
def test_without_a_counter_move_it_is_ig_that_estimates(defense: str, threat: str) -> None:
    seen = observed(private_batches(2), defense=defense, threat=threat)
    found, plain = (ATTACKS.build(attack, Budget(2, 6))(seen, seeds=[0, 1]) for attack in ("informed", "ig:aware=true"))
    assert counter_for(seen[0]) is None
    assert all(
        torch.equal(a.inputs, b.inputs) and a.objective == b.objective for a, b in zip(found, plain, strict=True)
    )


STEPS = Recipe(sends="delta", epochs=2, lr=0.01)


@pytest.mark.parametrize("defense", ["soteria", "sparsify", "clip:bound=4", "noise:sigma=0.01", "dp", "ats"])
def test_what_fits_is_done_after_several_local_steps_too(defense: str) -> None:
    seen = observed(private_batches(1, 2), defense=defense, recipe=STEPS)
    assert counter_for(seen[0]) is not None
    (found,) = ATTACKS.build("informed", Budget(1, 2))(seen, seeds=[0])
    assert found.inputs.shape == (2, 3, 32, 32)


@pytest.mark.parametrize("defense", ["precode", "dcs2:iterations=2", "graddefense", "outpost", "censor:trials=2"])
def test_what_does_not_fit_several_local_steps_is_estimated(defense: str) -> None:
    seen = observed(private_batches(1), defense=defense, recipe=STEPS)
    assert counter_for(seen[0]) is None
    assert answers(seen[0]) == {defense: None}
    found, plain = (ATTACKS.build(attack, Budget(1, 2))(seen, seeds=[0])[0] for attack in ("informed", "ig:aware=true"))
    assert torch.equal(found.inputs, plain.inputs)


def counter_moves(one: Observation) -> list[ChannelMove]:
    counter = counter_for(one)
    assert counter is not None
    return [move for move in counter.moves if isinstance(move, ChannelMove)]


def test_noise_and_clipping_are_in_units_of_what_is_sent() -> None:
    (gradient,) = observed(private_batches(1, 2), defense="noise:sigma=0.1+clip:bound=4")
    (delta,) = observed(private_batches(1, 2), defense="noise:sigma=0.1+clip:bound=4", recipe=STEPS)
    for one, variance, bound in ((gradient, 0.01, 4.0), (delta, 0.01 * 2 * 0.01**2, 4.0 * 2 * 0.01)):
        noisy, clip = counter_moves(one)
        assert float(noisy.variances(one)["fc.bias"][0]) == pytest.approx(variance)
        assert clip.bound == pytest.approx(bound)


def test_noise_that_momentum_takes_again_is_expected_as_often() -> None:
    recipe = Recipe(sends="delta", lr=1e-4, epochs=4, momentum=0.9)
    batches = private_batches(1, 2)
    (plain,), (noisy,) = observed(batches, recipe=recipe), observed(batches, recipe=recipe, defense="noise:sigma=0.1")
    (move,) = counter_moves(noisy)
    expected = move.variances(noisy)
    added = subtract(noisy.reply, plain.reply)
    entries = sum(tensor.numel() for tensor in added.values())
    assert float(norm(added)) ** 2 / entries == pytest.approx(float(expected["fc.bias"][0]), rel=0.05)


@pytest.mark.integration
@pytest.mark.parametrize("defense", ["sparsify", "soteria", "noise:sigma=0.1"])
def test_knowing_the_defense_helps_with_batches_too(defense: str) -> None:
    seen = observed(private_batches(2, 2), defense=defense)
    found, plain = (ATTACKS.build(attack, SHORT)(seen, seeds=[0, 1]) for attack in ("informed", "ig"))
    truth = private_batches(2, 2)

    def near(reconstructions: list[Reconstruction]) -> float:
        each = [matched(Batch(one.inputs, one.labels), own) for one, own in zip(reconstructions, truth, strict=True)]
        return float(torch.stack([psnr(a.inputs, b.inputs) for a, b in zip(each, truth, strict=True)]).mean())

    assert near(found) > near(plain) + 0.5


@pytest.mark.integration
def test_defenses_with_like_counter_moves_are_searched_as_one_batch() -> None:
    defenses = ["noise:sigma=0.1", "soteria", "sparsify", "clip:bound=4", "none", "ats"]
    both = [one for defense in defenses for one in observed(private_batches(1), defense=defense)]
    module, sent = both[0].module, both[0].sent
    alike = [replace(one, module=module, sent=sent) for one in both]
    found = ATTACKS.build("informed:strategy=vmap", Budget(1, 3))(alike, seeds=[0] * len(alike))
    together = [one.strategy.partition(",")[2].split()[0] for one in found]
    assert together == ["4", "4", "4", "1", "1", "4"]
    for one, seen in zip(found, alike, strict=True):
        (alone,) = ATTACKS.build("informed:strategy=vmap", Budget(1, 3))([seen], seeds=[0])
        assert one.objective == pytest.approx(alone.objective, rel=1e-3)


def test_what_other_defenses_in_the_group_are_changes_nothing() -> None:
    both = [*observed(private_batches(1), defense="soteria"), *observed(private_batches(1), defense="sparsify")]
    attack = ATTACKS.build("informed", Budget(1, 5))
    together = attack(both, seeds=[0, 0])
    assert all(
        torch.equal(one.inputs, attack([seen], seeds=[0])[0].inputs) for one, seen in zip(together, both, strict=True)
    )


def test_every_defense_has_somebody_against_it_or_a_reason_why_not() -> None:
    """A new defense comes with a file in attacks/against."""
    shipped = {name for name in DEFENSES if DEFENSES.get(name).__module__.startswith("gradveil.")}
    assert not AGAINST.keys() & WITHOUT.keys()
    assert AGAINST.keys() | WITHOUT.keys() == shipped
    assert all(WITHOUT.values())


def test_every_counter_move_says_what_it_does() -> None:
    sentences = [known.sentence for known in AGAINST.values() if known.sentence is not None]
    assert all(sentence.startswith("It ") and sentence.endswith(".") for sentence in sentences)
    assert len(sentences) == len(AGAINST)


def test_precodes_draw_is_read_off() -> None:
    (one,) = observed(private_batches(1), defense="precode")
    true = Stream.seeded(0, "defense", 0).normal((1, 256), torch.empty(0))
    assert torch.allclose(drawn(one, "fc.0"), true, atol=0.05)


def asked(defense: str, times: int) -> tuple[Attack, Observation]:
    attack = ATTACKS.build(f"informed:replies={times}", SHORT)
    return attack, interrogated(attack, private_batches(1)[0], model="lenet:init=wide", defense=defense)


def mean_of(seen: Observation) -> Params:
    return map_each(lambda tensors: tensors.mean(dim=0), stack(all_replies(seen)))


def test_noise_averages_out_over_replies() -> None:
    (plain,) = observed(private_batches(1))
    _, seen = asked("noise:sigma=0.1", 16)
    assert len(seen.earlier) == 15
    one, all_of_them = (norm(subtract(reply, plain.reply)) for reply in (seen.reply, mean_of(seen)))
    assert float(all_of_them / one) == pytest.approx(1 / 4, rel=0.05)
    counter = counter_for(seen)
    assert counter is not None
    assert torch.equal(counter.prepare(seen).reply["fc.bias"], mean_of(seen)["fc.bias"])


def test_noise_of_two_links_averages_out_as_well() -> None:
    (plain,) = observed(private_batches(1))
    _, seen = asked("noise:sigma=0.06+noise:sigma=0.08", 4)
    counter = counter_for(seen)
    assert counter is not None
    left, one = (norm(subtract(reply, plain.reply)) for reply in (counter.prepare(seen).reply, seen.reply))
    assert float(left / one) == pytest.approx(1 / 2, rel=0.05)


def test_where_graddefense_did_not_repeat_itself_the_mean_is_left() -> None:
    (plain,) = observed(private_batches(1))
    _, seen = asked("graddefense:sigma=0.1,images=5", 2)
    found = counter_for(seen)
    assert found is not None
    away = {name: norm(subtract(reply, plain.reply)) for name, reply in (
        ("one", seen.reply), ("two", found.prepare(seen).reply), ("mean", mean_of(seen))
    )}  # fmt: skip
    assert away["two"] <= away["mean"] < away["one"]


def test_what_a_clip_makes_unreadable_is_said_to_have_no_answer() -> None:
    for defense, link in (
        ("graddefense:bound=0.1,images=5", "graddefense"),
        ("precode:size=16+clip:bound=1", "precode"),
    ):
        (one,) = observed(private_batches(1), defense=defense)
        said = answers(one)
        assert next(sentence for name, sentence in said.items() if name.startswith(link)) is None


@pytest.mark.integration
def test_graddefense_repeats_itself() -> None:
    (plain,) = observed(private_batches(1))
    _, seen = asked("graddefense:sigma=0.1", 16)
    (move,) = counter_moves(seen)
    assert isinstance(move, SharedValues)
    shared = move.prepare(seen).reply
    right = sum(int((shared[name] == tensor).sum()) for name, tensor in plain.reply.items())
    assert right / sum(tensor.numel() for tensor in plain.reply.values()) > 0.95


def test_asking_again_takes_the_power_to() -> None:
    attack, _ = asked("noise", 2)
    threat_model("F").vet("informed", attack.requires)
    with pytest.raises(GradveilError, match="ask-again"):
        threat_model("C").vet("informed", attack.requires)
    with pytest.raises(GradveilError, match="replies is at least 1"):
        ATTACKS.build("informed:replies=0", SHORT)


def test_a_policy_is_undone_where_the_picture_shows() -> None:
    private = SAMPLES.batch([0, 1]).inputs
    moved = transformed(private, (43, 3), torch.tensor([[1, -1], [-1, 1]]))
    (seen,) = observed(private_batches(1))
    (found,) = ATTACKS.build("informed", Budget(1, 1))([seen], seeds=[0])
    guess = UndoPolicies(((43, 3),)).finish(replace(found, inputs=moved), seen).inputs
    again = transformed(guess, (43, 3), torch.tensor([[1, -1], [-1, 1]]))
    assert float((again - moved).abs().mean()) < 0.02
    assert float((guess - private).square().mean()) < 0.5 * float((moved - private).square().mean())
