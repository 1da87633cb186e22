"""How the objective of GGL looks around the private picture: an analysis, for it needs the truth, not an attack.

``inversion`` finds the best code for the picture itself, which bounds what any attack on this generator's codes can
reach. It returns figures and no reconstruction, so that nobody can take it for an attack.

``landscape`` is a slice through the code that draws the private picture best (found from the picture itself), toward a
random code and in a second random direction: z(a, b) = z0 + a (z1 - z0) + b e. Where the objective of the adversary is
low is compared with where pictures are like the private one, and with the objective without a defense.

Both keep the codes that span what they looked at, so that ``add_lpips`` can complete figures of a machine without it.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.func import vmap

from gradveil import models
from gradveil.attacks import ATTACKS
from gradveil.attacks.generative import GGL, SHIPPED
from gradveil.attacks.parts.channel import Adjustment, Estimated
from gradveil.attacks.parts.objectives import Squared
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError, NotAvailableError
from gradveil.core.progress import SILENT
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import detached, stack
from gradveil.core.types import Batch, Json, Params, Recipe
from gradveil.data import load
from gradveil.defenses import DEFENSES, Defense
from gradveil.domains import Domain
from gradveil.generators import Generator, build
from gradveil.metrics import LPIPS
from gradveil.metrics.pixel import mse, psnr
from gradveil.threat import Observation, observe, threat_model

_AT_ONCE = 64
"""Pictures whose gradients are in memory together."""
REACH = 1.5
"""How far the slice goes to each side of the private picture's code, in distances to the random code."""
LINE = 11
"""Points of the line from GGL's code to that of the inversion, ends included."""
LOOKS = {
    2: ("ggl_lpips", "inverted_lpips", "lowest_lpips_at"),
    3: ("with_lpips", "lpips_at_lowest", "least_lpips"),
}
"""What LPIPS tells of a line, which two codes span, and of a slice, which three do."""


def landscape(fields: Json) -> Json:
    """The objective over the slice, and how its order agrees with that of the distances to the private picture.

    Means over the pictures; ``surface`` is that of the first. ``minima`` counts the points that are lower than all
    eight neighbours, and ``with_undefended`` is the rank correlation with what an undefended client would give.
    """
    from scipy.stats import spearmanr  # takes a second to load

    device, side, data = fields["device"], fields["points"], load(fields["data"])
    draws, rng = _shipped(data.domain).to(device), generator(fields["seed"], "landscape", device=device)
    every, each = data.batch(list(range(fields["images"]))).to(device), []
    client = {name: fields[name] for name in ("model", "seed", "device")}
    seen, undefended = (
        observations(every, data.domain, defense=defense, **client) for defense in (fields["defense"], "none")
    )
    for i, center in enumerate(_codes_of(draws, every, fields["steps"], fields["seed"])):
        private, span = every.take(slice(i, i + 1)), _span(draws, center, rng)
        drawn = _drawn(draws, _slice(span, side), private.labels)
        objective = _objective(seen[i], drawn, aware=fields["aware"])
        plain = _objective(undefended[i], drawn, aware=False)
        pixels, middle = mse(drawn.inputs, private.inputs).cpu(), side**2 // 2
        lowest = int(objective.argmin())
        each.append({
            "with_mse": float(spearmanr(objective, pixels).statistic),
            "with_undefended": float(spearmanr(objective, plain).statistic),
            "at_private": float(objective[middle]),
            "lowest": float(objective[lowest]),
            "lowest_is_private": float(lowest == middle),
            "minima": float(_minima(objective.view(side, side))),
            "mse_at_lowest": float(pixels[lowest]),
            "mse_at_private": float(pixels[middle]),
            "surface": objective.view(side, side).tolist(),
            "codes": span.tolist(),
        })  # fmt: skip
    return add_lpips(fields, {"each": each, "surface": each[0]["surface"]})


def _shipped(domain: Domain) -> Generator:
    name = SHIPPED.get(domain.shape)
    if name is None:
        raise GradveilError(f"no generator is shipped for pictures of {'x'.join(map(str, domain.shape))}")
    return build(name)


def _codes_of(draws: Generator, private: Batch, steps: int, seed: int) -> Tensor:
    """For each private picture the code [n, latent] that draws it best, by Adam over pixels."""
    device = private.inputs.device
    code = draws.codes(len(private), generator(seed, "inversion", device=device)).requires_grad_()
    adam = torch.optim.Adam([code], lr=0.05)
    for _ in range(steps):
        loss = (draws.decode(code, private.labels) - private.inputs).square().flatten(1).mean(dim=1).sum()
        (code.grad,) = torch.autograd.grad(loss, [code])
        adam.step()
    return code.detach()


def _span(draws: Generator, center: Tensor, rng: torch.Generator) -> Tensor:
    """The center of a slice and its two directions, of one length, [3, latent]."""
    toward = draws.codes(1, rng)[0] - center
    across = draws.codes(1, rng)[0]
    return torch.stack([center, toward, across * toward.norm() / across.norm()])


def _slice(span: Tensor, side: int) -> Tensor:
    """Codes [side * side, latent] with the center in the middle."""
    along = torch.linspace(-REACH, REACH, side, device=span.device)
    return span[0] + torch.cartesian_prod(along, along) @ span[1:]


def _minima(surface: Tensor) -> int:
    """How many points inside are lower than their eight neighbours."""
    rows, columns = (length - 2 for length in surface.shape)
    shifts = [(i, j) for i in range(3) for j in range(3) if (i, j) != (1, 1)]
    around = torch.stack([surface[i : i + rows, j : j + columns] for i, j in shifts])
    return int((surface[1:-1, 1:-1] < around).all(dim=0).sum())


def _drawn(draws: Generator, codes: Tensor, label: Tensor) -> Batch:
    labels = label.expand(len(codes))
    with torch.no_grad():
        return Batch(draws.decode(codes, labels), labels)


def inversion(fields: Json) -> Json:
    """GGL against the inversion of the generator on the same pictures, and the codes on the line between the two.

    Means over the pictures: of what GGL draws and of the inversion the PSNR and LPIPS; where on the line, from 0 for
    GGL to 1 for the inversion, the objective and LPIPS are lowest. ``code_length`` is that of GGL's code, as a share of
    the typical one.
    """
    device, data, each = fields["device"], load(fields["data"]), []
    attack = ATTACKS.build(fields["attack"])
    assert isinstance(attack, GGL)
    every = data.batch(list(range(fields["images"]))).to(device)
    client = {name: fields[name] for name in ("model", "defense", "seed", "device")}
    seen = observations(every, data.domain, **client)
    codes = attack.codes(seen[0])
    with SILENT.task("", None) as task:
        search = attack.phases[0].search
        own = search.run(attack.prepare(seen, [fields["seed"] + i for i in range(len(seen))]), task)
    ends = torch.stack(
        [codes.code(own.unknowns)[:, 0], _codes_of(codes.generator, every, fields["steps"], fields["seed"])], dim=1
    )
    for i, one in enumerate(seen):
        private = every.take(slice(i, i + 1))
        drawn = _drawn(codes.generator, _line(ends[i]), private.labels)
        away = _objective(one, drawn, aware=attack.aware)
        near = psnr(drawn.inputs, private.inputs.expand_as(drawn.inputs)).cpu()
        each.append({
            "ggl_psnr": float(near[0]),
            "inverted_psnr": float(near[-1]),
            "ggl_objective": float(away[0]),
            "inverted_objective": float(away[-1]),
            "lowest_objective_at": int(away.argmin()) / (LINE - 1),
            "highest_psnr_at": int(near.argmax()) / (LINE - 1),
            "code_length": float(ends[i, 0].norm()) / ends.shape[-1] ** 0.5,
            "codes": ends[i].tolist(),
        })  # fmt: skip
    return add_lpips(fields, {"each": each})


def _line(ends: Tensor) -> Tensor:
    """Codes [LINE, latent] from the first end to the second."""
    return torch.lerp(ends[0], ends[1], torch.linspace(0, 1, LINE, device=ends.device)[:, None])


def add_lpips(fields: Json, figures: Json) -> Json:
    """The figures with what LPIPS tells, from the codes in them, and their means; None where LPIPS is missing."""
    from scipy.stats import spearmanr

    data, each = load(fields["data"]), []
    draws = _shipped(data.domain)
    for i, one in enumerate(figures["each"]):
        private, codes = data.batch([i]), torch.tensor(one["codes"])
        pictures = _drawn(draws, _line(codes) if len(codes) == 2 else _slice(codes, fields["points"]), private.labels)
        looks = _lpips(pictures.inputs, private.inputs.expand_as(pictures.inputs))
        if looks is None:
            found = dict.fromkeys(LOOKS[len(codes)])
        elif len(codes) == 2:
            found = dict(zip(LOOKS[2], (looks[0], looks[-1], looks.argmin() / (LINE - 1)), strict=True))
        else:
            objective = torch.tensor(one["surface"]).flatten()
            lowest = looks[objective.argmin()]
            found = dict(zip(LOOKS[3], (spearmanr(objective, looks).statistic, lowest, looks.min()), strict=True))
        each.append(one | {name: None if value is None else float(value) for name, value in found.items()})
    means: Json = {}
    for name, value in each[0].items():
        if not isinstance(value, list):
            means[name] = None if value is None else fmean(one[name] for one in each)
    return figures | means | {"each": each}


def _lpips(pictures: Tensor, truth: Tensor) -> Tensor | None:
    try:
        return LPIPS("vgg").distance(pictures, truth)
    except NotAvailableError:
        return None


def observations(
    private: Batch,
    domain: Domain,
    *,
    model: str,
    defense: str,
    seed: int,
    device: str,
    batch_size: int = 1,
    recipe: Recipe = Recipe(),  # noqa: B008 (frozen)
    threat: str = "C",
) -> list[Observation]:
    """What the adversary sees of clients that hold one batch each and answer the same broadcast."""
    built, seen, (module, sent) = DEFENSES.build(defense), [], _broadcast(model, domain, seed, device)
    guarded = built.on_model(module)
    if guarded is not module:
        sent = detached(dict(guarded.named_parameters()))
    client = SimulatedClient(guarded, recipe=recipe, defense=built)
    for i in range(0, len(private), batch_size):
        batch = private.take(slice(i, i + batch_size)).to(device)
        seen.append(
            observe(
                module=guarded,
                model=model,
                domain=domain,
                sent=sent,
                reply=client.reply(sent, batch, Stream.seeded(seed, "defense", i)).update,
                batch=batch,
                recipe=recipe,
                defense=defense,
                threat=threat_model(threat),
            )
        )
    return seen


@lru_cache(maxsize=1)  # the same objects under every defense: then attacks step all of them together
def _broadcast(model: str, domain: Domain, seed: int, device: str) -> tuple[nn.Module, Params]:
    module = models.build(model, domain, seed=seed).to(device)
    return module, detached(dict(module.named_parameters()))


def _objective(seen: Observation, drawn: Batch, *, aware: bool) -> Tensor:
    """How far the gradient of each picture is from the update that was sent, as the adversary sees it, [n]."""
    plain, rng = SimulatedClient(seen.module, recipe=Recipe(), defense=Defense()), Stream.seeded(0, "plain")
    adjustment = Estimated() if aware else Adjustment()
    # What is estimated has an axis of observations, of which there is one here.
    about = {
        name: {key: tensor[0] for key, tensor in value.items()} if isinstance(value, dict) else value[0]
        for name, value in adjustment.extra([seen]).items()
    } | {"reply": seen.reply}

    def away(update: Params) -> Tensor:
        return Squared()(*adjustment.pair(update, seen.reply, about))

    def of_some(some: list[Batch]) -> Tensor:
        return vmap(away)(stack([one.update for one in plain.replies(seen.sent, some, [rng] * len(some))])).cpu()

    each = [drawn.take(slice(i, i + 1)) for i in range(len(drawn))]
    return torch.cat([of_some(each[i : i + _AT_ONCE]) for i in range(0, len(each), _AT_ONCE)])
