"""Small studies behind single claims of OUTPOST's paper that no table of `gradveil reproduce` holds.

    PYTHONPATH=src python scripts/outpost_claims.py seeds spread --out docs/results/outpost-claims.jsonl

Each study is a function; its rows are JSON objects, one a line, and rows that the file holds are not run again. Trained
networks are trained first and kept in ``--nets``. ``--tiny`` runs everything with a few images and steps, to see that
it runs. ``identified`` counts the images that are the most similar (SSIM) to what was rebuilt, among the private ones
and 99 others. docs/results/outpost-claims.md reads the rows.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from gradveil import metrics, models
from gradveil.attacks import ATTACKS, Attack, Budget, Crafted, Reconstruction, Server
from gradveil.attacks.active.fishing import ClientReplies, Fishing
from gradveil.attacks.active.interrogation import interrogate
from gradveil.client import SimulatedClient
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import dot, norm
from gradveil.core.types import Batch, Json, Params, Recipe
from gradveil.data import ImageSet, MemoryImages, load
from gradveil.defenses import DEFENSES, Defense, Step
from gradveil.defenses.outpost import layer_risks, layers
from gradveil.lab.bench import overhead
from gradveil.models.building import Normalize
from gradveil.threat import Observation, observe, threat_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = {"tiny": False, "nets": Path("nets")}
CAT = 3
GRADIENT = Recipe()
DELTA = Recipe(sends="delta", lr=0.01)
Row = tuple[Json, Callable[[], Json]]
"""What a row is about, and what finds its figures."""


def few(number: int, tiny: int = 2) -> int:
    """So many images or steps, or next to none of them."""
    return min(tiny, number) if SETTINGS["tiny"] else number


@dataclass(frozen=True)
class Network:
    """An architecture with its weights, on the device, and the data that it is for."""

    module: nn.Module
    spec: str
    data: ImageSet

    @property
    def sent(self) -> Params:
        return SimulatedClient(self.module, recipe=GRADIENT).model.params


@cache
def network(spec: str, data: str = "cifar10-samples") -> Network:
    images = load(data)
    return Network(models.build(spec, images.domain, seed=0).to(DEVICE), spec, images)


def trained(spec: str, data: str = "cifar10", steps: int = 3000, lr: float = 1e-3) -> Network:
    """The same, trained by Adam on batches of 128, mirrored at random; kept for the next time. Accuracy is printed."""
    shown = load("cifar10-samples" if data == "cifar10" else data)
    module = models.build(spec, shown.domain, seed=0).to(DEVICE)
    path = Path(str(SETTINGS["nets"])) / f"{spec}-{data}-{steps}.pt".replace(":", "-")
    if path.exists():
        module.load_state_dict(torch.load(path, map_location=DEVICE, weights_only=True))
        return Network(module.eval(), spec, shown)
    own = load(data)
    kept = range(8, len(own)) if data != "cifar10" else range(len(own))  # the first eight are attacked
    whole = own.batch(list(kept)[: few(len(kept), 256)]).to(DEVICE)
    adam, rng = torch.optim.AdamW(module.train().parameters(), lr=lr, weight_decay=0.05), generator(0, "order")
    steps = few(steps, 5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, lr, total_steps=steps)
    for _ in range(steps):
        batch = whole.take(torch.randint(len(whole), (128,), generator=rng).to(DEVICE))
        mirrored = torch.rand(128, 1, 1, 1, generator=rng).to(DEVICE) < 0.5
        loss = nn.functional.cross_entropy(module(batch.inputs.flip(-1).where(mirrored, batch.inputs)), batch.labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{time.time_ns()}")
    torch.save(module.eval().state_dict(), part)
    part.replace(path)
    return Network(module, spec, shown)


def accuracy(net: Network, data: str = "cifar10:split=test") -> float:
    """Of the first 5,000 images of a test set."""
    test = load(data)
    with torch.no_grad():
        right = [
            int((net.module(part.inputs).argmax(1) == part.labels).sum())
            for part in (
                test.batch(range(i, i + 500)).to(DEVICE) for i in range(0, few(min(5000, len(test)), 500), 500)
            )
        ]
    return sum(right) / (500 * len(right))


def seen_by(
    net: Network, batch: Batch, *, defense: str | Defense = "none", recipe: Recipe = DELTA, threat: str = "C",
    seed: int = 0, module: nn.Module | None = None,
) -> Observation:  # fmt: skip
    """What an adversary sees of one client. ``module``: what it takes the architecture for, where it is mistaken.

    A defense that is an object is not known to it.
    """
    built = DEFENSES.build(defense) if isinstance(defense, str) else defense
    client = SimulatedClient(net.module, recipe=recipe, defense=built)
    reply = client.reply(net.sent, batch.to(DEVICE), Stream.seeded(seed, "defense"))
    return observe(
        module=module or net.module, model=net.spec, domain=net.data.domain, sent=net.sent, reply=reply.update,
        batch=batch.to(DEVICE), recipe=recipe, defense=defense if isinstance(defense, str) else "none",
        threat=threat_model(threat),
    )  # fmt: skip


def alike(seen: Sequence[Observation]) -> list[Observation]:
    """Replies to the very same broadcast, which attacks step together."""
    return [replace(one, sent=seen[0].sent) for one in seen]


def scores(net: Network, truth: Batch, found: Reconstruction) -> metrics.Scores:
    """Against the private images, and 99 others of the data set."""
    guess = metrics.matched(Batch(found.inputs.cpu(), found.labels.cpu()), truth)
    others = net.data.batch(range(min(len(net.data), 99 + len(truth)))).inputs
    new = [not bool((image == truth.inputs).flatten(1).all(1).any()) for image in others]
    gallery = torch.cat([truth.inputs, others[torch.tensor(new)][:99]])
    own = torch.arange(len(truth))
    return metrics.score(truth, guess, gallery=gallery, truth_index=own, lpips=None, representation=None)


def rebuilt(
    net: Network, batches: Sequence[Batch], attack: str | Attack, *, seeds: Sequence[int] | None = None, **how: object
) -> Json:
    """Each batch behind an update of its own: PSNR of all images, mean SSIM, how many are identified."""
    seen = alike([seen_by(net, batch, seed=i, **how) for i, batch in enumerate(batches)])  # type: ignore[arg-type]
    attack = ATTACKS.build(attack, Budget(1, 1000)) if isinstance(attack, str) else attack
    started = time.perf_counter()
    found = attack(seen, seeds=seeds)
    took = time.perf_counter() - started
    scored = [scores(net, batch, one).per_image for batch, one in zip(batches, found, strict=True)]
    rough = [_roughness(one.inputs.cpu()) / _roughness(batch.inputs) for batch, one in zip(batches, found, strict=True)]
    psnr, ssim, named = (torch.cat([each[name] for each in scored]) for name in ("psnr", "ssim", "identified"))
    return {
        "psnr": float(psnr.mean()), "best_psnr": float(psnr.max()), "ssim": float(ssim.double().mean()),
        "identified": round(float(named.sum()), 2), "images": len(psnr),
        "objective": fmean(one.objective for one in found), "roughness": fmean(rough),
        "labels_right": float(torch.cat([each["label_correct"] for each in scored]).double().mean()),
        "psnrs": [round(float(value), 1) for value in psnr[:100]], "seconds": took,
    }  # fmt: skip


def _roughness(images: Tensor) -> float:
    """The mean step between neighbouring pixels."""
    return float(images.diff(dim=-1).abs().mean() + images.diff(dim=-2).abs().mean())


def singles(net: Network, count: int) -> list[Batch]:
    return [net.data.batch([i]) for i in range(few(count, 1))]


# --- Table I, and what weights have to do with leakage


def seeds() -> Iterator[Row]:
    """O-11 to O-14: DLG from single starts on wide, usual and trained weights: how many starts arrive."""
    for weights, net in LENETS.items():
        for attack in ("dlg", "ig"):
            spec = f"{attack}:iterations={few(1000)},restarts=1"
            yield {"weights": weights, "attack": spec}, partial(_starts, net, spec)


LENETS: dict[str, Callable[[], Network]] = {
    "wide": lambda: network("lenet:init=wide"),
    "default": lambda: network("lenet"),
    "trained": lambda: trained("lenet:init=wide,normalize=true"),
    "wide, normalised": lambda: network("lenet:init=wide,normalize=true"),
}


def _starts(net: Callable[[], Network], spec: str) -> Json:
    own, starts = net(), few(10)
    images = singles(own, 8)
    row = rebuilt(own, [one for one in images for _ in range(starts)], spec)
    by_image = torch.tensor(row.pop("psnrs")).view(len(images), starts)
    row |= {"starts": starts, "arrived": (by_image > 20).sum(1).tolist(), "images": len(images)}
    return row | {"best_of_starts": float(by_image.max(1).values.mean()), "accuracy": accuracy(own)}


def spread() -> Iterator[Row]:
    """O-02, O-26: weights of LeNet drawn from U(-a, a), from narrow to wide."""
    for width in (0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 2.0):
        for attack in (f"ig:iterations={few(1000)},restarts=2", f"dlg:iterations={few(1000)},restarts=2"):
            yield {"width": width, "attack": attack}, partial(_spread, width, attack)


def _spread(width: float, attack: str) -> Json:
    net = replace(network("lenet"), module=copy.deepcopy(network("lenet").module))
    rng = generator(0, "spread")
    with torch.no_grad():
        for parameter in net.module.parameters():
            parameter.copy_(width * (2 * torch.rand(parameter.shape, generator=rng) - 1))
    return rebuilt(net, singles(net, 8), attack) | {"variance": width**2 / 3}


def rounds() -> Iterator[Row]:
    """O-15, O-38 and leakage-over-training: one digit behind each update, from an untrained LeNet to a trained one."""
    for model in ("lenet:init=wide,normalize=true", "mlp:normalize=true"):
        for mark in (0, 10, 30, 100, 300, 1000, 3000):
            yield from _round(model, mark)


def _round(model: str, mark: int) -> Iterator[Row]:
    attacks = ["analytic"] if model.startswith("mlp") else [f"ig:iterations={few(600)}", f"dlg:iterations={few(1000)}"]
    for attack in attacks:
        for defense in ("none", "noise:sigma=0.01", "outpost") if not attack.startswith("dlg") else ("none",):
            about = {"model": model, "round": mark, "attack": attack, "defense": defense}
            yield about, partial(_at_round, model, mark, attack, defense)


def _at_round(model: str, mark: int, attack: str, defense: str) -> Json:
    net = _after(model, few(mark))
    private = [net.data.batch([i]) for i in range(few(16, 1))]
    lengths = [float(norm(seen_by(net, one, recipe=GRADIENT).reply)) for one in private]
    risks = layer_risks(net.sent, layers(net.sent))
    more = {
        "length": sorted(lengths)[len(lengths) // 2],
        "risk": float(risks.mean()),
        "accuracy": accuracy(net, "mnist:split=test"),
    }
    return rebuilt(net, private, attack, defense=defense, recipe=GRADIENT) | more


@cache
def _after(model: str, steps: int) -> Network:
    """After so many rounds of FedSGD with 100 clients of one digit each: SGD with batches of 100, momentum 0.9."""
    start = network(model, "mnist-samples")
    module, rng = copy.deepcopy(start.module).train(), generator(0, "rounds")
    sgd = torch.optim.SGD(module.parameters(), lr=0.03, momentum=0.9)
    digits = load("mnist") if steps else start.data
    for _ in range(steps):
        batch = digits.batch(torch.randint(len(digits), (100,), generator=rng).tolist()).to(DEVICE)
        sgd.zero_grad()
        nn.functional.cross_entropy(module(batch.inputs), batch.labels).backward()
        sgd.step()
    return replace(start, module=module.eval())


# --- What helps or hinders the searches


def prior() -> Iterator[Row]:
    """O-06: IG with and without total variation, and the roughness of what it rebuilds."""
    for model in ("lenet:init=wide", "resnet18"):
        for images in (1, 4):
            for tv in (0.0, 1e-4, 1e-3, 1e-2):
                attack = f"ig:iterations={few(600)},restarts=1,tv={tv:g}"
                yield {"model": model, "batch": images, "tv": tv}, partial(_prior, model, images, attack)


def _prior(model: str, size: int, attack: str) -> Json:
    net = network(model)
    batches = [net.data.batch(range(i, i + size)) for i in range(0, few(8, size), size)]
    return rebuilt(net, batches, attack)


def statistics() -> Iterator[Row]:
    """O-89: an attacker who takes the mean and deviation of the data set for others, on networks that normalise."""
    for model in ("lenet:init=wide,normalize=true", "resnet18"):
        for known, moments in {"right": None, "0.5 and 0.5": (0.5, 0.5), "none": (0.0, 1.0)}.items():
            yield {"model": model, "statistics": known}, partial(_statistics, model, moments)


def _statistics(model: str, moments: tuple[float, float] | None) -> Json:
    net = network(model)
    taken = copy.deepcopy(net.module)
    for layer in (layer for layer in taken.modules() if isinstance(layer, Normalize) and moments is not None):
        layer.mean.fill_(moments[0])  # type: ignore[index]
        layer.std.fill_(moments[1])  # type: ignore[index]
    return rebuilt(net, singles(net, 4), f"ig:iterations={few(1000)},restarts=1", module=taken)


def batches() -> Iterator[Row]:
    """O-69: batches from 1 to 128 images of the test set, labels granted to the cosine search."""
    for model in ("lenet:init=wide", "resnet18"):
        for size in (1, 8, 16, 32, 64, 128):
            iterations = few(3000 if model.startswith("lenet") else 1000)
            searches = {f"ig:iterations={iterations},restarts=1": "C+labels"}
            if model.startswith("lenet"):
                searches[f"dlg:iterations={few(1000)},restarts=2"] = "C"
            for attack, threat in searches.items():
                yield {"model": model, "batch": size, "attack": attack}, partial(_batch, model, size, attack, threat)
                about = {"model": model, "batch": size, "attack": f"{attack}, without the update"}
                yield about, partial(_batch, model, size, attack, threat, True)


def _batch(model: str, size: int, attack: str, threat: str, prior_only: bool = False) -> Json:
    net = replace(network(model), data=load("cifar10:split=test"))
    search: Attack | None = ATTACKS.build(attack, Budget(1, 1000))
    search = search.prior_only() if search is not None and prior_only else search
    assert search is not None
    return rebuilt(net, [net.data.batch(range(few(size)))], search, threat=threat, recipe=GRADIENT)


def epochs() -> Iterator[Row]:
    """O-86: eight images, all in each step: one epoch and five, with searches of the same length, labels granted."""
    for weights in ("none", "cifar10"):
        for train_mode in (False, True):
            for count in (1, 5):
                recipe = replace(DELTA, epochs=count, batch_size=8, train_mode=train_mode)
                about = {"weights": weights, "train_mode": train_mode, "epochs": count}
                yield about, partial(_epochs, weights, recipe)


def _epochs(weights: str, recipe: Recipe) -> Json:
    net = network(f"resnet18:weights={weights}")
    attack = f"ig:iterations={few(300)},restarts=1"
    return rebuilt(net, [net.data.batch(range(few(8)))], attack, recipe=recipe, threat="C+labels")


def resnet50() -> Iterator[Row]:
    """O-90: single images behind an untrained ResNet-18, -50 and -152 in evaluation state."""
    for model in ("resnet18", "resnet50", "resnet18:init=he", "resnet50:init=he"):
        for attack in ("ig", "gi"):
            spec = f"{attack}:iterations={few(600)},restarts=1"
            about = {"model": model, "attack": spec}
            yield (
                about,
                partial(lambda model, spec: rebuilt(network(model), singles(network(model), 4), spec), model, spec),
            )


def transformer() -> Iterator[Row]:
    """O-91 to O-96: csDLG on a ViT, untrained and trained, at 32 and 64 pixels, beside LeNet and ResNet-18."""
    nets: dict[str, Callable[[], Network]] = {
        "ViT, untrained": lambda: network("vit"),
        "ViT, trained": lambda: trained("vit", steps=8000),
        "ViT, untrained, 64 pixels": lambda: network("vit", "photos-64"),
        "ViT, trained, 64 pixels": lambda: trained("vit", "photos-64", steps=1500),
        "LeNet, wide weights": lambda: network("lenet:init=wide"),
        "ResNet-18, untrained": lambda: network("resnet18"),
        "ResNet-18, trained": lambda: network("resnet18:weights=cifar10"),
    }
    for name, net in nets.items():
        for attack in (
            f"ig:iterations={few(3000)},restarts=2",
            f"ig:iterations={few(3000)},restarts=2,signed=false,lr=0.01",
        ):
            yield {"network": name, "attack": attack}, partial(_transformer, net, attack)


def _transformer(net: Callable[[], Network], attack: str) -> Json:
    own = net()
    row = rebuilt(own, singles(own, 4), attack)
    return row | ({"accuracy": accuracy(own)} if own.data.name == "cifar10-samples" else {})


# --- OUTPOST's parts


def ablation() -> Iterator[Row]:
    """O-37: one option of OUTPOST at a time, against IG and IG that knows the defense."""
    options = {"scale": (0, 0.2, 0.8, 3.2, 12.8), "phi": (0, 10, 40, 100), "rho": (0, 50, 80, 95, 99)}
    for name, values in options.items():
        for value in values:
            for attack in (f"ig:iterations={few(1000)},restarts=1", f"informed:iterations={few(1000)},restarts=1"):
                about = {"option": name, "value": value, "attack": attack}
                yield about, partial(_ablation, f"outpost:{name}={value}", attack, DELTA)
    recipe = replace(DELTA, epochs=5, batch_size=1)
    for value in (0, 0.1, 1, 10):
        about = {"option": "beta", "value": value, "attack": f"ig:iterations={few(600)},restarts=1", "local_steps": 10}
        yield about, partial(_ablation, f"outpost:beta={value}", f"ig:iterations={few(600)},restarts=1", recipe)


def _ablation(defense: str, attack: str, recipe: Recipe) -> Json:
    net = network("lenet:init=wide")
    size = 1 if recipe.epochs == 1 else 2
    images = [net.data.batch(range(i, i + size)) for i in range(0, few(16, size), size)]
    return rebuilt(net, images, attack, defense=defense, recipe=recipe)


@dataclass(frozen=True)
class Placed(Defense):
    """OUTPOST's noise, and no pruning, on 40% of the entries of each layer: the largest, the smallest, or any."""

    where: str

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        sent = dict(gradient)
        groups = layers(gradient)
        for names, risk in zip(groups, layer_risks(step.params, groups), strict=True):
            sizes = torch.cat([gradient[name].flatten().abs() for name in names])
            if self.where == "any":
                sizes = step.rng.uniform((len(sizes),), sizes)
            chosen = sizes.argsort(descending=self.where == "largest")[: round(0.4 * len(sizes))]
            noise = torch.zeros_like(sizes).index_copy_(0, chosen, 0.8 * risk * step.rng.normal((len(chosen),), sizes))
            for name, part in zip(names, noise.split([gradient[name].numel() for name in names]), strict=True):
                sent[name] = gradient[name] + part.view_as(gradient[name])
        return sent


def places() -> Iterator[Row]:
    """O-31: the same noise on informative, on insignificant and on any entries."""
    for where in ("largest", "smallest", "any"):
        for model in ("lenet:init=wide", "lenet", "resnet18"):
            yield {"where": where, "model": model}, partial(_placed, where, model)


def _placed(where: str, model: str) -> Json:
    net = network(model)
    images = singles(net, 16 if model.startswith("lenet") else 4)
    cosines = []
    for i, one in enumerate(images):
        sent, bare = (seen_by(net, one, defense=d, recipe=GRADIENT, seed=i).reply for d in (Placed(where), "none"))
        cosines.append(cosine(sent, bare))
    attack = f"ig:iterations={few(1000)},restarts=1"
    return rebuilt(net, images, attack, defense=Placed(where)) | {"cosine": fmean(cosines)}


def cosine(one: Params, other: Params) -> float:
    return float(dot(one, other) / (norm(one) * norm(other)))


def fisher() -> Iterator[Row]:
    """O-28: the diagonal of the true Fisher information beside the empirical one, and the square of the mean."""
    for model in ("mlp", "lenet:init=wide", "lenet", "resnet18"):
        yield {"model": model, "images": few(8)}, partial(_fisher, model)


def _fisher(model: str) -> Json:
    net, images = network(model), few(8)
    batch = net.data.batch(range(images)).to(DEVICE)
    client, sent = SimulatedClient(net.module, recipe=GRADIENT), net.sent

    def gradient(inputs: Tensor, labels: Tensor) -> Tensor:
        update = client.reply(sent, Batch(inputs, labels), Stream.seeded(0)).update
        return torch.cat([tensor.flatten() for tensor in update.values()])

    with torch.no_grad():
        chances = net.module(batch.inputs).softmax(1)
    started = time.perf_counter()
    true = sum(
        chances[i, label] * gradient(batch.inputs[i : i + 1], torch.tensor([label], device=DEVICE)).square() / images
        for i in range(images)
        for label in range(net.data.domain.classes)
    )
    took = time.perf_counter() - started
    one_by_one = sum(
        gradient(batch.inputs[i : i + 1], batch.labels[i : i + 1]).square() / images for i in range(images)
    )
    mean = gradient(batch.inputs, batch.labels).square()
    assert isinstance(true, Tensor)
    assert isinstance(one_by_one, Tensor)
    count = round(0.4 * len(mean))
    top = {
        name: set(each.argsort(descending=True)[:count].tolist())
        for name, each in (("true", true), ("empirical", one_by_one), ("batch", mean))
    }
    shared = {f"shared_{name}": len(top["true"] & top[name]) / count for name in ("empirical", "batch")}
    return shared | {"parameters": len(mean), "entries_of_the_matrix": len(mean) ** 2, "seconds": took}


def delay() -> Iterator[Row]:
    """O-102: by how many times a defense makes a local step longer, sensitivities computed for it alone."""
    for model in ("lenet", "resnet18"):
        for defense in ("graddefense:sigma=0.1", "soteria:rate=0.5", "outpost"):
            for size in (16, 64):
                about = {"model": model, "defense": defense, "batch": few(size), "device": DEVICE}
                yield about, partial(_delay, model, defense, few(size))


def _delay(model: str, defense: str, size: int) -> Json:
    timed: Json = overhead(model=model, batch_size=size, device=DEVICE, defenses=[defense])["rows"][0]
    return {name: timed[name] for name in ("step_ms", "plain_step_ms", "ratio")}


# --- Production size


def production() -> Iterator[Row]:
    """O-01: 500 images, five epochs, mini-batches of 32 (80 steps), usual training state."""
    recipe = Recipe(sends="delta", lr=0.01, epochs=5, batch_size=32, train_mode=True)
    for model in ("lenet:init=wide", "lenet", "resnet18", "resnet18:weights=cifar10"):
        for defense in ("none", "outpost"):
            yield {"model": model, "defense": defense, "attack": "identify"}, partial(_named, model, defense, recipe)
        averaged = f"ig:iterations={few(300)},restarts=1,match=averaged"
        simulated = f"ig:iterations={few(100)},restarts=1"
        for attack in (averaged, simulated) if model.startswith("lenet") else (averaged,):
            for alone in (False, True):
                about = {"model": model, "defense": "none", "attack": attack + ", without the update" * alone}
                yield about, partial(_produced, model, attack, recipe, alone)


def _client(size: int) -> Batch:
    """Images of the training set, half of them of one class and a fifth of another: a client with data of its own."""
    data, size = load("cifar10"), few(size, 40)
    by_class = [torch.nonzero(torch.as_tensor(data.labels) == label).flatten()[:size] for label in range(10)]
    shares = [size // 2, size // 5, *[size * 3 // 80] * 8]
    chosen = torch.cat([of[:share] for of, share in zip(by_class, shares, strict=True)])
    rest = by_class[9][shares[9] : shares[9] + size - len(chosen)]
    chosen = torch.cat([chosen, rest])
    return data.batch(chosen[torch.randperm(len(chosen), generator=generator(0, "client"))].tolist())


def _produced(model: str, attack: str, recipe: Recipe, alone: bool) -> Json:
    net = network(model)
    search: Attack | None = ATTACKS.build(attack, Budget(1, 100))
    search = search.prior_only() if search is not None and alone else search
    assert search is not None
    row = rebuilt(net, [_client(500)], search, recipe=recipe, threat="C+labels")
    row.pop("psnrs")
    return row


def _named(model: str, defense: str, recipe: Recipe) -> Json:
    """How well the 500 private images are told from 500 others of the same classes: AUC, and right among the first."""
    net, private = network(model), _client(500)
    data = load("cifar10")
    taken = torch.as_tensor(data.labels)
    others = []
    for label, count in enumerate(private.labels.bincount(minlength=10).tolist()):
        others += torch.nonzero(taken == label).flatten()[-count:].tolist() if count else []
    outside = data.batch(others)
    both = Batch(torch.cat([private.inputs, outside.inputs]), torch.cat([private.labels, outside.labels]))
    names = data.class_names
    candidates = MemoryImages(
        name="both", images=both.inputs, labels=both.labels, class_names=names, mean=data.mean, std=data.std
    )
    seen = replace(seen_by(net, private, defense=defense, recipe=recipe), candidates=candidates)
    started = time.perf_counter()
    found = ATTACKS.build("identify")(seen).scores
    assert found is not None
    own, other = found[: len(private)].cpu(), found[len(private) :].cpu()
    earlier = (own[:, None] < other).double() + (own[:, None] == other).double() / 2
    first = found.argsort()[: len(private)].cpu()
    return {
        "auc": float(earlier.mean()), "right": float((first < len(private)).double().mean()), "images": len(private),
        "candidates": len(both), "seconds": time.perf_counter() - started,
    }  # fmt: skip


# --- Fishing


def pond(net: Network, cats: int) -> Batch:
    """So many cats first, and others: the shipped images and their mirror images."""
    every = net.data.batch(range(100))
    inputs, labels = torch.cat([every.inputs, every.inputs.flip(-1)]), every.labels.repeat(2)
    own, others = torch.nonzero(labels[:100] == CAT).flatten(), torch.nonzero(labels != CAT).flatten()
    chosen = torch.cat([own[:cats], others[torch.randperm(len(others), generator=generator(0, "others"))]])
    chosen = chosen[: few(128, 8)]
    return Batch(inputs[chosen], labels[chosen])


def asked(net: Network, attack: Fishing, batch: Batch, defense: str, recipe: Recipe) -> Observation:
    """What is seen of the last reply, with the earlier ones in it."""
    server = Server(net.module, net.spec, net.sent, net.data.domain)
    client = SimulatedClient(net.module, recipe=recipe, defense=DEFENSES.build(defense))

    def answer(crafted: Crafted, question: int) -> Observation:
        reply = client.reply(crafted.sent, batch.to(DEVICE), Stream.seeded(0, "defense", question))
        return observe(
            module=crafted.module, model=crafted.model, domain=net.data.domain, sent=crafted.sent, reply=reply.update,
            batch=batch.to(DEVICE), recipe=recipe, defense=defense, threat=threat_model("F"), crafted=crafted.tampered,
        )  # fmt: skip

    return interrogate(attack, server, [answer], 0)[0]


@dataclass(frozen=True)
class Catch:
    """The gradient that Fishing isolated from a batch, whose it is, and how near it came to it."""

    alone: Observation
    batch: Batch
    place: int
    row: Json


def caught(net: Network, cats: int, defense: str = "none", recipe: Recipe = GRADIENT, more: str = "") -> Catch:
    """One cat of a batch of 128: questions, and cosines of the isolated gradient with that of the nearest example."""
    attack, batch = ATTACKS.build(f"fishing:target={CAT}{more}", Budget(1, 1)), pond(net, cats)
    assert isinstance(attack, Fishing)
    started = time.perf_counter()
    seen = asked(net, attack, batch, defense, recipe)
    took = time.perf_counter() - started
    alone = attack.isolated(seen)
    single, near = SimulatedClient(net.module, recipe=Recipe(train_mode=recipe.train_mode)), list[Json]()
    for image in batch.inputs[: few(128, cats)].split(1):
        own = single.reply(alone.sent, Batch(image.to(DEVICE), alone.labels), Stream.seeded(0)).update  # type: ignore[arg-type]
        body = [name for name in own if name.split(".")[0] not in {"fc", "head"}]
        below = cosine({name: alone.reply[name] for name in body}, {name: own[name] for name in body})
        near.append({"cosine": cosine(alone.reply, own), "below": below})
    place = max(range(len(near)), key=lambda i: float(near[i]["below"]))
    questions = len(ClientReplies([*seen.earlier, seen], CAT))
    row = {"questions": questions, **near[place], "is_cat": place < cats, "seconds_of_questions": took}
    return Catch(alone, batch, place, row)


def pictures(net: Network, catches: Sequence[Catch], iterations: int = 500) -> list[Json]:
    """The rows of catches, with how well IG rebuilds each; those of the same question are searched together."""
    shared: list[Observation] = []
    for one in catches:
        same = (other.sent for other in shared if all(torch.equal(other.sent[n], t) for n, t in one.alone.sent.items()))
        shared.append(replace(one.alone, sent=next(same, one.alone.sent)))
    found = ATTACKS.build(f"ig:iterations={few(iterations)},restarts=1")(shared, seeds=[0] * len(shared))
    rows = []
    for one, picture in zip(catches, found, strict=True):
        image, truth = picture.inputs.cpu().clamp(0, 1), one.batch.inputs[one.place : one.place + 1]
        line_up = metrics.ssim_pairwise(image, torch.cat([one.batch.inputs, net.data.batch(range(100)).inputs]))
        scored = {"psnr": float(metrics.psnr(image, truth)), "ssim": float(metrics.ssim(image, truth))}
        rows.append(one.row | scored | {"identified": int(line_up.argmax()) == one.place})
    return rows


RESNETS = {"trained": "resnet18:weights=cifar10", "untrained": "resnet18"}
AGAINST_FISHING = (
    "none", "sparsify:rate=0.8", "noise:sigma=0.316,kind=laplace", "noise:sigma=0.1,kind=laplace,unit=scale", "outpost",
    "sparsify:rate=0.9", "noise:sigma=0.01", "soteria:rate=0.5", "graddefense:sigma=0.1",
)  # fmt: skip


def fishing() -> Iterator[Row]:
    """O-112 to O-121: Figure 5, one, two or four cats in 128 images on ResNet-18; figures by defense."""
    for cats in (1, 2, 4):
        for weights, model in RESNETS.items():
            yield {"weights": weights, "cats": cats}, partial(_by_defense, model, cats)
    for weights, model in RESNETS.items():
        about = {"weights": weights, "cats": 1, "train_mode": True}
        yield about, partial(_one_catch, model, 1, "none", Recipe(train_mode=True))


def _by_defense(model: str, cats: int) -> Json:
    net, chosen = network(model), AGAINST_FISHING[: few(len(AGAINST_FISHING))]
    return dict(zip(chosen, pictures(net, [caught(net, cats, one) for one in chosen]), strict=True))


def _one_catch(model: str, cats: int, defense: str, recipe: Recipe = GRADIENT, more: str = "") -> Json:
    return pictures(network(model), [caught(network(model), cats, defense, recipe, more)])[0]


def fishing_honest() -> Iterator[Row]:
    """O-116: the same batches without the change of parameters: IG on all 128 images, labels granted."""
    for cats in (1, 2):
        yield {"weights": "trained", "cats": cats}, partial(_honest, lambda: network(RESNETS["trained"]), cats)
    yield {"weights": "untrained", "cats": 1}, partial(_honest, lambda: network(RESNETS["untrained"]), 1)


def _honest(net: Callable[[], Network], cats: int) -> Json:
    batch = pond(net(), cats)
    row = rebuilt(net(), [batch], f"ig:iterations={few(500)},restarts=1", recipe=GRADIENT, threat="C+labels")
    return row | {"psnrs_of_cats": row.pop("psnrs")[:cats]}


def fishing_steps() -> Iterator[Row]:
    """O-110: Fishing on clients of several local steps, at two learning rates."""
    for model in ("lenet:init=wide", RESNETS["trained"]):
        for lr in (0.01, 1e-5):
            for count, size in ((1, 128), (2, 128), (1, 32), (5, 32)):
                recipe = Recipe(sends="delta", lr=lr, epochs=count, batch_size=size)
                about = {"model": model, "lr": lr, "epochs": count, "batch_size": size}
                yield about, partial(_one_catch, model, 1, "none", recipe)


def fishing_queries() -> Iterator[Row]:
    """O-119: questions until one of four cats stands alone under noise, at most 300."""
    for model in ("lenet:init=wide", RESNETS["trained"]):
        for kind, sigma in (
            ("gaussian", 0.0),
            ("gaussian", 1e-4),
            ("gaussian", 1e-3),
            ("gaussian", 0.01),
            ("laplace", 0.316),
        ):
            for queries in (10, few(300, 12)):
                defense = f"noise:sigma={sigma},kind={kind}" if sigma else "none"
                about = {"model": model, "cats": 4, "defense": defense, "most_questions": queries}
                yield about, partial(_queried, model, defense, queries)


def _queried(model: str, defense: str, queries: int) -> Json:
    return caught(network(model), 4, defense, more=f",queries={queries}").row


def fishing_others() -> Iterator[Row]:
    """What is left of one cat's gradient on a network without batch norm, and with another boost."""
    for defense in ("none", "dp", "dp:sigma=0", "sparsify:rate=0.9", "outpost"):
        about = {"model": "convnet:batch_norm=false", "cats": 1, "defense": defense}
        yield about, partial(_isolated, "convnet:batch_norm=false", defense, "")
    for model in RESNETS.values():
        about = {"model": model, "cats": 1, "defense": "outpost", "boost": 1}
        yield about, partial(_isolated, model, "outpost", ",boost=1")


def _isolated(model: str, defense: str, more: str) -> Json:
    return caught(network(model), 1, defense, more=more).row


def fishing_vit() -> Iterator[Row]:
    """O-122 to O-124: Figure 6, the same on a ViT, untrained and trained."""
    nets: dict[str, Callable[[], Network]] = {
        "untrained": lambda: network("vit"), "trained": lambda: trained("vit", steps=8000)
    }  # fmt: skip
    for weights, net in nets.items():
        for cats in (1, 2, 4):
            yield {"weights": weights, "cats": cats, "attack": "Fishing"}, partial(_vit, net, cats)
        yield {"weights": weights, "cats": 2, "attack": "IG without the change"}, partial(_honest, net, 2)


def _vit(net: Callable[[], Network], cats: int) -> Json:
    return pictures(net(), [caught(net(), cats)], 1000)[0]


STUDIES: dict[str, Callable[[], Iterator[Row]]] = {
    study.__name__: study
    for study in (
        seeds, spread, rounds, prior, statistics, batches, epochs, resnet50, transformer, ablation, places, fisher,
        delay, production, fishing, fishing_honest, fishing_steps, fishing_queries, fishing_others, fishing_vit,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=STUDIES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nets", type=Path, default=Path("nets"))
    parser.add_argument("--tiny", action="store_true")
    asked_for = parser.parse_args()
    SETTINGS.update(tiny=asked_for.tiny, nets=asked_for.nets)
    lines = asked_for.out.read_text().splitlines() if asked_for.out.exists() else []
    done = [json.loads(line) for line in lines]
    for name in asked_for.studies:
        for about, figures in STUDIES[name]():
            row = {"study": name, **about}
            if any(row.items() <= one.items() for one in done if all(not isinstance(v, list) for v in row.values())):
                continue
            row |= {"found": _rounded(figures())}
            with asked_for.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
