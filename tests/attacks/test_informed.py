"""The adversary who answers the defense it knows: each counter-move, and that it buys something."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from exchanges import SAMPLES, observed, private_batches
from gradveil.attacks import ATTACKS, Attack, Budget
from gradveil.attacks.informed import COUNTER_MOVES
from gradveil.attacks.informed.asking import mean, most_frequent, replies
from gradveil.attacks.informed.bottleneck import drawn
from gradveil.attacks.informed.moves import counter_for
from gradveil.attacks.informed.policies import UndoPolicies
from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.trees import map_each, norm, subtract
from gradveil.core.types import Recipe
from gradveil.defenses import DEFENSES
from gradveil.defenses.ats import transformed
from gradveil.metrics import psnr
from gradveil.threat import Observation, threat_model
from interrogation import interrogated

SHORT = Budget(1, 120)


def quality(attack: str, seen: list[Observation], budget: Budget = SHORT) -> float:
    """Mean PSNR of what an attack finds behind replies for the first sample images."""
    found = ATTACKS.build(attack, budget)(seen, seeds=list(range(len(seen))))
    truth = torch.cat([batch.inputs for batch in private_batches(len(seen))])
    return float(psnr(torch.cat([one.inputs for one in found]), truth).mean())


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


@pytest.mark.slow
@pytest.mark.parametrize(("defense", "gain"), [("dcs2:iterations=100", 1.0), ("precode", 3.0), ("ats", 1.0)])
def test_knowing_a_costlier_defense_does_so_too(defense: str, gain: float) -> None:
    seen = observed(private_batches(3), defense=defense, model="lenet" if defense == "precode" else "lenet:init=wide")
    assert quality("informed", seen, Budget(1, 300)) > quality("ig", seen, Budget(1, 300)) + gain


@pytest.mark.parametrize(("defense", "threat"), [("soteria", "B"), ("none", "C"), ("censor", "C")])
def test_without_a_counter_move_it_is_ig_that_estimates(defense: str, threat: str) -> None:
    seen = observed(private_batches(2), defense=defense, threat=threat)
    found, plain = (ATTACKS.build(attack, Budget(2, 6))(seen, seeds=[0, 1]) for attack in ("informed", "ig:aware=true"))
    assert counter_for(seen[0]) is None
    assert all(
        torch.equal(a.inputs, b.inputs) and a.objective == b.objective for a, b in zip(found, plain, strict=True)
    )


def test_several_local_steps_have_no_counter_move() -> None:
    recipe = Recipe(sends="delta", epochs=2, lr=0.01)
    (one,) = observed(private_batches(1), defense="soteria", recipe=recipe)
    assert counter_for(one) is None


def test_what_other_defenses_in_the_group_are_changes_nothing() -> None:
    both = [*observed(private_batches(1), defense="soteria"), *observed(private_batches(1), defense="sparsify")]
    attack = ATTACKS.build("informed", Budget(1, 5))
    together = attack(both, seeds=[0, 0])
    assert all(
        torch.equal(one.inputs, attack([seen], seeds=[0])[0].inputs) for one, seen in zip(together, both, strict=True)
    )


def test_every_move_is_of_a_defense_and_says_what_it_does() -> None:
    assert set(COUNTER_MOVES) <= set(DEFENSES)
    assert all(move.sentence.startswith("It ") and move.sentence.endswith(".") for move in COUNTER_MOVES.values())


def test_precodes_draw_is_read_off() -> None:
    (one,) = observed(private_batches(1), defense="precode")
    true = torch.randn(1, 256, generator=generator(0, "defense", 0))
    assert torch.allclose(drawn(one, "fc.0"), true, atol=0.05)


def asked(defense: str, times: int) -> tuple[Attack, Observation]:
    attack = ATTACKS.build(f"informed:replies={times}", SHORT)
    return attack, interrogated(attack, private_batches(1)[0], model="lenet:init=wide", defense=defense)


def test_noise_averages_out_over_replies() -> None:
    (plain,) = observed(private_batches(1))
    _, seen = asked("noise:sigma=0.1", 16)
    assert len(seen.earlier) == 15
    one, all_of_them = (norm(subtract(reply, plain.reply)) for reply in (seen.reply, map_each(mean, replies(seen))))
    assert float(all_of_them / one) == pytest.approx(1 / 4, rel=0.05)
    counter = counter_for(seen)
    assert counter is not None
    assert torch.equal(counter.observed(seen).reply["fc.bias"], replies(seen)["fc.bias"].mean(0))


def test_graddefense_repeats_itself() -> None:
    (plain,) = observed(private_batches(1))
    _, seen = asked("graddefense:sigma=0.1", 8)
    shared = map_each(most_frequent, replies(seen))
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
    guess = UndoPolicies(((43, 3),)).revealed(replace(found, inputs=moved), seen).inputs
    again = transformed(guess, (43, 3), torch.tensor([[1, -1], [-1, 1]]))
    assert float((again - moved).abs().mean()) < 0.02
    assert float((guess - private).square().mean()) < 0.5 * float((moved - private).square().mean())
