"""How many images Imprint and the trap read off an update: by options, of FedAvg clients, and under defenses.

One JSON object a line, the figures of ``docs/attacks/imprint.md`` and ``trap.md``: over batches in the order of the
test set, how many images have a reconstruction above 60 dB, and the median PSNR of the closest reconstruction.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import torch

from gradveil import models
from gradveil.attacks import ATTACKS, Budget, Server
from gradveil.client import SimulatedClient
from gradveil.core.streams import Stream
from gradveil.core.trees import detached
from gradveil.core.types import Recipe
from gradveil.data import load
from gradveil.defenses import DEFENSES
from gradveil.threat import observe, threat_model

BATCHES, PUBLIC, EXACT_DB = 8, 50, 60.0
FEDSGD = Recipe()
DEFENDED = (
    "none", "noise:sigma=0.001", "noise:sigma=0.1", "clip:bound=4", "clip:bound=1,per=global", "sparsify:rate=0.8",
    "soteria:rate=0.8", "clip:bound=1+noise:sigma=0.001", "dp", "outpost", "censor:trials=20",
)  # fmt: skip


def measured(
    attack_spec: str, *, data: str = "cifar10", model: str = "mlp", size: int = 16, defense: str = "none",
    recipe: Recipe = FEDSGD, honest_server: bool = False,
) -> dict[str, object]:  # fmt: skip
    """One line: the attack on ``BATCHES`` clients with ``size`` images each; an honest server only reads replies."""
    images = load(f"{data}:split=test")
    attack, honest = ATTACKS.build(attack_spec, Budget(1, 1)), models.build(model, images.domain, seed=0)
    public = images.batch(range(len(images) - PUBLIC, len(images)))
    made = attack.craft(Server(honest, model, detached(dict(honest.named_parameters())), images.domain, public), [], 0)
    assert made is not None
    if honest_server:
        made = replace(made, sent=detached(dict(honest.named_parameters())))
    client = SimulatedClient(made.module, recipe=recipe, defense=DEFENSES.build(defense))
    scores = []
    for i in range(BATCHES):
        batch = images.batch(range(i * size, (i + 1) * size))
        reply = client.reply(made.sent, batch, Stream.seeded(0, "defense", i))
        seen = observe(
            module=made.module, model=made.model, domain=images.domain, sent=made.sent, reply=reply.update,
            batch=batch, recipe=recipe, defense=defense, threat=threat_model("G"), crafted=made.tampered,
        )  # fmt: skip
        (found,) = attack([seen], seeds=[0])
        errors = (found.inputs[:, None] - batch.inputs).square().mean(dim=(2, 3, 4)).amin(dim=0)
        scores.append(-10 * errors.clamp(min=1e-16).log10())
    psnr = torch.stack(scores)
    return {
        "data": data, "model": model, "attack": attack_spec, "images": size, "defense": defense,
        "sends": recipe.sends, "epochs": recipe.epochs, "mini_batch": recipe.batch_size, "lr": recipe.lr,
        "recovered": round(float((psnr > EXACT_DB).sum(dim=1).float().mean()), 1),
        "fewest": int((psnr > EXACT_DB).sum(dim=1).min()),
        "median_psnr": round(float(psnr.median()), 1),
        "honest_server": honest_server, "psnrs": [[round(one, 1) for one in batch] for batch in psnr.tolist()],
    }  # fmt: skip


def lines() -> Iterator[dict[str, object]]:
    for data in ("cifar10", "mnist"):
        for query in ("mean", "dct", "random"):
            for quantiles in ("public", "normal", "laplace"):
                for size, bins in ((16, 128), (64, 256)):
                    options = f"imprint:bins={bins},query={query},quantiles={quantiles}"
                    yield measured(options, data=data, size=size)
    for variant in ("sparse", "fedsgd"):
        yield measured(f"imprint:variant={variant}", model="lenet", size=32)
        for epochs, mini_batch, lr in ((1, 8, 0.1), (1, 8, 0.01), (1, 1, 0.1), (3, 8, 0.01)):
            recipe = Recipe(sends="delta", epochs=epochs, batch_size=mini_batch, lr=lr)
            yield measured(f"imprint:variant={variant}", model="lenet", size=32, recipe=recipe)
    for defense in DEFENDED:
        for options in ("imprint", "imprint:query=mean,quantiles=public"):
            yield measured(options, model="lenet:init=wide", defense=defense)
    for hidden in (256, 1000):
        for honest_server in (False, True):
            yield measured("trap", model=f"mlp:hidden={hidden}", size=32, honest_server=honest_server)
    for scale in (0.9, 0.93, 0.97, 0.98):
        yield measured(f"trap:scale={scale}", size=32)
    for size in (4, 8, 64, 100):
        yield measured("trap", size=size)
    for defense in ("clip:bound=4", "soteria", "sparsify:rate=0.9", "noise:sigma=0.001", "dp", "outpost", "censor"):
        yield measured("trap", size=32, defense=defense)


def main() -> None:
    for line in lines():
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
