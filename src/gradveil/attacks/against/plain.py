"""Against defenses of which the channel is all that there is to say, in a few lines each."""

from __future__ import annotations

from gradveil.attacks.parts.channel import Channel, Per
from gradveil.attacks.parts.counter import against
from gradveil.attacks.parts.updates import counts, local_steps
from gradveil.core.trees import add
from gradveil.defenses import DP, Clip, ClipExamples, Noise, Outpost, Quantise, Soteria, Sparsify, TopK
from gradveil.defenses.outpost import layer_risks
from gradveil.models import classifier
from gradveil.threat.observation import Observation

_PER: dict[str, Per] = {"layer": "tensor", "global": "update", "example": "example"}


@against(
    "noise",
    sentence="It averages all replies to the same model, and asks for smoother pictures the more noise is left.",
    after_steps=True,
)
def noise(defense: Noise, one: Observation) -> Channel:
    return Channel(
        noise=defense.deviation**2,
        counted=_counted(one, defense.at),
        draw=lambda update, drawn: add(update, drawn, defense.deviation),
    )


@against(
    "clip",
    sentence="It matches the direction of each tensor and takes its length from the candidate.",
    after_steps=True,
)
def clip(defense: Clip | ClipExamples, one: Observation) -> Channel:
    return Channel(bound=defense.bound, per=_PER[defense.per], counted=_counted(one, defense.at))


@against(
    "dp",
    "veil",
    sentence="It averages all replies to the same model, and asks for smoother pictures by the noise left.",
    after_steps=True,
)
def dp(defense: DP, one: Observation) -> Channel:
    """The noise on the mean of a mini-batch: of all examples, where they are fewer than it may hold."""
    size = (one.recipe and one.recipe.batch_size) or one.batch_size or 1
    sigma = defense.sigma * defense.bound / min(size, one.batch_size or size)
    return Channel(bound=defense.bound, per="example", noise=sigma**2, counted=_counted(one, "step"))


@against("sparsify", "topk", sentence="It matches only the entries that were sent.", after_steps=True)
def sparsify(_defense: Sparsify | TopK, one: Observation) -> Channel:
    return Channel(zeroed=frozenset(one.sent), largest=True)


@against("quantise", sentence="It reads the step between levels off each tensor, and counts rounding as noise.")
def quantise(_defense: Quantise, one: Observation) -> Channel:
    """All entries are multiples of one step. Rounding by chance between two of them has a variance of a sixth of its
    square on average, where entries are spread evenly between them.
    """
    steps = {name: float(g[g != 0].abs().min()) if bool(g.any()) else 0.0 for name, g in one.reply.items()}
    return Channel(noise_by_tensor={name: step**2 / 6 for name, step in steps.items()})


@against(
    "soteria",
    sentence="It leaves the layer that Soteria prunes out of the matching; the rest was sent as it is.",
    after_steps=True,
)
def soteria(defense: Soteria, one: Observation) -> Channel:
    layer = classifier(one.module, one.domain) if defense.layer == "classifier" else defense.layer
    return Channel(zeroed=frozenset({f"{layer}.weight"}))


@against(
    "outpost",
    sentence="It matches only the entries that were sent, and layers by how much of them is not noise: "
    "the spread of their weights tells.",
)
def outpost(defense: Outpost, one: Observation) -> Channel:
    """The broadcast shows the spread of the weights, and which entries are sent does not depend on the noise.

    Where Fisher information is a mean over outputs, small entries get noise too, and those sent are not the largest.
    """
    groups = defense.groups(one.sent)
    levels = (defense.scale * layer_risks(one.sent, groups)).square().tolist()
    noise = {name: level for names, level in zip(groups, levels, strict=True) for name in names}
    return Channel(noise_by_tensor=noise, zeroed=frozenset(one.sent), largest=defense.fisher != "outputs")


def _counted(one: Observation, at: str) -> tuple[float, ...]:
    """By what the defense's gradients were multiplied; what it did to the update itself counts once."""
    if one.kind == "gradient" or one.recipe is None or at == "update":
        return (1.0,)
    return tuple(one.recipe.lr * times for times in counts(one.recipe, local_steps(one) or 1))
