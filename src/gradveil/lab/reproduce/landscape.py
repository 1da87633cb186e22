"""How the objective of GGL looks around the private picture: an analysis, for it needs the truth, not an attack.

``inversion`` finds the best code for the picture itself, which bounds what any attack on this generator's codes can
reach. It returns figures and no reconstruction, so that nobody can take it for an attack.

The slice goes through the code that draws the private picture best (found from the picture itself), toward a random
code and in a second random direction: z(a, b) = z0 + a (z1 - z0) + b e. Where the objective of the adversary is low is
compared with where pictures are like the private one.
"""

from __future__ import annotations

import torch
from torch import Tensor
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


def landscape(fields: Json) -> Json:
    """The objective over the slice, and how its order agrees with that of the distances to the private picture."""
    from scipy.stats import spearmanr  # takes a second to load

    device, side, data = fields["device"], fields["points"], load(fields["data"])
    name = SHIPPED.get(data.domain.shape)
    if name is None:
        raise GradveilError(f"no generator is shipped for the pictures of {fields['data']}")
    draws, rng = build(name).to(device), generator(fields["seed"], "landscape", device=device)
    private = data.batch([0]).to(device)
    codes = _slice(draws, _code_of(draws, private, fields["steps"], rng), side, rng)
    labels = private.labels.expand(len(codes))
    with torch.no_grad():
        pictures = draws.decode(codes, labels)
    objective = _objective(_observed(fields, private, data.domain), Batch(pictures, labels), aware=fields["aware"])
    truth = private.inputs.expand_as(pictures).cpu()
    pixels = mse(pictures.cpu(), truth)
    looks = _lpips(pictures.cpu(), truth)
    lowest = int(objective.argmin())
    return {
        "with_mse": float(spearmanr(objective, pixels).statistic),
        "with_lpips": None if looks is None else float(spearmanr(objective, looks).statistic),
        "at_private": float(objective[len(objective) // 2]),
        "lowest": float(objective[lowest]),
        "mse_at_lowest": float(pixels[lowest]),
        "mse_at_private": float(pixels[len(pixels) // 2]),
        "surface": objective.view(side, side).tolist(),
    }


def _code_of(draws: Generator, private: Batch, steps: int, rng: torch.Generator) -> Tensor:
    """The code [1, latent] whose picture is nearest to the private one, by Adam over pixels."""
    code = draws.codes(1, rng).requires_grad_()
    adam = torch.optim.Adam([code], lr=0.05)
    for _ in range(steps):
        loss = (draws.decode(code, private.labels) - private.inputs).square().mean()
        (code.grad,) = torch.autograd.grad(loss, [code])
        adam.step()
    return code.detach()


def _slice(draws: Generator, center: Tensor, side: int, rng: torch.Generator) -> Tensor:
    """Codes [side * side, latent] with the center in the middle."""
    toward = draws.codes(1, rng) - center
    across = draws.codes(1, rng)
    across = across * toward.norm() / across.norm()
    along = torch.linspace(-REACH, REACH, side, device=center.device)
    steps = torch.cartesian_prod(along, along)
    return center + steps @ torch.cat([toward, across])


def inversion(fields: Json) -> Json:
    """GGL against the inversion of the generator on the same pictures, and the codes on the line between the two.

    Means over the pictures: of what GGL draws and of the inversion the PSNR and LPIPS; where on the line, from 0 for
    GGL to 1 for the inversion, the objective and LPIPS are lowest.
    """
    device, data, found = fields["device"], load(fields["data"]), []
    attack = ATTACKS.build(fields["attack"])
    assert isinstance(attack, GGL)
    for i in range(fields["images"]):
        private = data.batch([i]).to(device)
        seen, rng = _observed(fields, private, data.domain), generator(fields["seed"], "inversion", i, device=device)
        codes = attack.codes(seen)
        with SILENT.task("", None) as task:
            own = attack.phases[0].search.run(attack.prepare([seen], [fields["seed"] + i]), task)
        ends = [codes.code(own.unknowns)[int(own.objectives.argmin())]]
        ends.append(_code_of(codes.generator, private, fields["steps"], rng))
        shares = torch.linspace(0, 1, LINE, device=device)[:, None]
        labels = private.labels.expand(LINE)
        with torch.no_grad():
            pictures = codes.generator.decode((1 - shares) * ends[0] + shares * ends[1], labels)
        away = _objective(seen, Batch(pictures, labels), aware=attack.aware)
        truth = private.inputs.expand_as(pictures).cpu()
        near, looks = psnr(pictures.cpu(), truth), _lpips(pictures.cpu(), truth)
        found.append({
            "ggl_psnr": float(near[0]),
            "inverted_psnr": float(near[-1]),
            "ggl_objective": float(away[0]),
            "inverted_objective": float(away[-1]),
            "lowest_objective_at": float(shares[away.argmin()]),
            "highest_psnr_at": float(shares[near.argmax()]),
            "ggl_lpips": None if looks is None else float(looks[0]),
            "inverted_lpips": None if looks is None else float(looks[-1]),
            "lowest_lpips_at": None if looks is None else float(shares[looks.argmin()]),
        })  # fmt: skip
    means: Json = {"each": found}
    for key in found[0]:
        known = [value for one in found if (value := one[key]) is not None]
        means[key] = sum(known) / len(known) if known else None
    return means


def _lpips(pictures: Tensor, truth: Tensor) -> Tensor | None:
    try:
        return LPIPS("vgg").distance(pictures, truth)
    except NotAvailableError:
        return None


def _observed(fields: Json, private: Batch, domain: Domain) -> Observation:
    """What the adversary sees of a client that holds this picture."""
    defense = DEFENSES.build(fields["defense"])
    module = defense.on_model(models.build(fields["model"], domain, seed=fields["seed"]).to(fields["device"]))
    sent = detached(dict(module.named_parameters()))
    rng = Stream.seeded(fields["seed"], "defense")
    return observe(
        module=module,
        model=fields["model"],
        domain=domain,
        sent=sent,
        reply=SimulatedClient(module, recipe=Recipe(), defense=defense).reply(sent, private, rng).update,
        batch=private,
        recipe=Recipe(),
        defense=fields["defense"],
        threat=threat_model("C"),
    )


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
