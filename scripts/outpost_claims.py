"""Small studies behind single claims of OUTPOST's paper that no table of `gradveil reproduce` holds.

    PYTHONPATH=src python scripts/outpost_claims.py seeds spread --out docs/results/outpost-claims.jsonl

Each study is a function, of a size that one core carries in minutes; its rows are JSON objects, one a line, and rows
that the file holds are not run again. Trained networks are trained first and kept among the temporary files.
``identified`` counts the images that are the most similar (SSIM) to what was rebuilt, among the private ones and 99
others. docs/results/outpost-claims.md reads the rows.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
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
NETS = Path(tempfile.gettempdir()) / "gradveil-nets"
CAT = 3
GRADIENT = Recipe()
DELTA = Recipe(sends="delta", lr=0.01)
IG, DLG = "ig:iterations=400,restarts=1", "dlg:iterations=500,restarts=1"
Row = tuple[Json, Callable[[], Json]]
"""What a row is about, and what finds its figures."""


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
    path = NETS / f"{spec}-{data}-{steps}.pt".replace(":", "-")
    if path.exists():
        module.load_state_dict(torch.load(path, map_location=DEVICE, weights_only=True))
        return Network(module.eval(), spec, shown)
    own = load(data)
    kept = range(8, len(own)) if data != "cifar10" else range(len(own))  # the first eight are attacked
    whole = own.batch(kept).to(DEVICE)
    adam, rng = torch.optim.AdamW(module.train().parameters(), lr=lr, weight_decay=0.05), generator(0, "order")
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
    """Of the first 2,000 images of a test set."""
    test = load(data).batch(range(2000)).to(DEVICE)
    with torch.no_grad():
        return float((net.module(test.inputs).argmax(1) == test.labels).float().mean())


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
    return [net.data.batch([i]) for i in range(count)]


# --- Table I, and what weights have to do with leakage


def seeds() -> Iterator[Row]:
    """O-11 to O-14: Table I, DLG from single starts on wide, usual and trained weights: how many starts arrive."""
    nets: dict[str, Callable[[], Network]] = {
        "wide": lambda: network("lenet:init=wide"),
        "PyTorch's": lambda: network("lenet"),
        "trained": lambda: trained("lenet:init=wide", steps=1500),
    }
    for weights, net in nets.items():
        yield {"weights": weights, "attack": DLG}, partial(_starts, net, 3, 4)


def _starts(net: Callable[[], Network], images: int, starts: int) -> Json:
    own = net()
    row = rebuilt(own, [one for one in singles(own, images) for _ in range(starts)], DLG)
    by_image = torch.tensor(row.pop("psnrs")).view(images, starts)
    row |= {"starts": starts, "arrived": (by_image > 20).sum(1).tolist(), "images": images}
    return row | {"best_of_starts": float(by_image.max(1).values.mean()), "accuracy": accuracy(own)}


def spread() -> Iterator[Row]:
    """O-02, O-26: weights of LeNet drawn from U(-a, a), from narrow to wide."""
    for width in (0.05, 0.2, 0.5, 1.0, 2.0):
        for attack in (IG, DLG):
            yield {"width": width, "attack": attack}, partial(_spread, width, attack)


def _spread(width: float, attack: str) -> Json:
    net = replace(network("lenet"), module=copy.deepcopy(network("lenet").module))
    rng = generator(0, "spread")
    with torch.no_grad():
        for parameter in net.module.parameters():
            parameter.copy_(width * (2 * torch.rand(parameter.shape, generator=rng) - 1))
    return rebuilt(net, singles(net, 3), attack) | {"variance": width**2 / 3}


def rounds() -> Iterator[Row]:
    """O-15, O-38 and leakage-over-training: one digit behind each update, from an untrained LeNet to a trained one."""
    for model in ("lenet:init=wide,normalize=true", "mlp:normalize=true"):
        for mark in (0, 30, 300, 1000):
            yield from _round(model, mark)


def _round(model: str, mark: int) -> Iterator[Row]:
    for defense in ("none",) if model.startswith("mlp") else ("none", "noise:sigma=0.01", "outpost"):
        about = {"model": model, "round": mark, "defense": defense}
        attack = "analytic" if model.startswith("mlp") else "ig:iterations=300,restarts=1"
        yield about | {"attack": attack}, partial(_at_round, model, mark, attack, defense)


def _at_round(model: str, mark: int, attack: str, defense: str) -> Json:
    net = _after(model, mark)
    private = [net.data.batch([i]) for i in range(6)]
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
    """O-06: IG with and without total variation, and the roughness of what it rebuilds as a share of the truth's."""
    for size in (1, 4):
        for tv in (0.0, 1e-3, 1e-2):
            yield {"batch": size, "tv": tv}, partial(_prior, size, f"{IG},tv={tv:g}")


def _prior(size: int, attack: str) -> Json:
    net = network("lenet:init=wide")
    return rebuilt(net, [net.data.batch(range(i, i + size)) for i in range(0, 4, size)], attack)


def statistics() -> Iterator[Row]:
    """O-89: an attacker who takes the mean and deviation of the data set for others; LeNet that normalises."""
    for known, moments in {"right": None, "0.5 and 0.5": (0.5, 0.5), "none": (0.0, 1.0)}.items():
        yield {"statistics": known}, partial(_statistics, moments)


def _statistics(moments: tuple[float, float] | None) -> Json:
    net = network("lenet:init=wide,normalize=true")
    taken = copy.deepcopy(net.module)
    for layer in (layer for layer in taken.modules() if isinstance(layer, Normalize) and moments is not None):
        layer.mean.fill_(moments[0])  # type: ignore[index]
        layer.std.fill_(moments[1])  # type: ignore[index]
    return rebuilt(net, singles(net, 4), IG, module=taken)


def batches() -> Iterator[Row]:
    """O-69: LeNet with wide weights, one batch of 1 to 128 test images, labels granted to IG; 200 iterations."""
    attack = "ig:iterations=200,restarts=1"
    for size in (1, 8, 16, 32, 64, 128):
        yield {"batch": size, "attack": attack}, partial(_batch, size, attack, "C+labels")
        if size in (16, 32):
            spec = "dlg:iterations=200,restarts=1"
            yield {"batch": size, "attack": spec}, partial(_batch, size, spec, "C")
        yield {"batch": size, "attack": "IG without the update"}, partial(_batch, size, attack, "C", True)


def _batch(size: int, attack: str, threat: str, alone: bool = False) -> Json:
    net = replace(network("lenet:init=wide"), data=load("cifar10:split=test"))
    return rebuilt(net, [net.data.batch(range(size))], search(attack, alone), threat=threat, recipe=GRADIENT)


def search(spec: str, alone: bool = False) -> Attack:
    """The attack of a spec, or what is left of it without the update."""
    attack: Attack | None = ATTACKS.build(spec)
    attack = attack.prior_only() if attack is not None and alone else attack
    assert attack is not None
    return attack


def epochs() -> Iterator[Row]:
    """O-86: two images, both in each step: one epoch and five on a trained ResNet-18, labels granted."""
    for train_mode in (True, False):
        for count in (1, 5):
            recipe = replace(DELTA, epochs=count, train_mode=train_mode)
            yield {"train_mode": train_mode, "epochs": count}, partial(_epochs, recipe)


def _epochs(recipe: Recipe) -> Json:
    net = network(RESNETS["trained"])
    return rebuilt(net, [net.data.batch(range(2))], "ig:iterations=100,restarts=1", recipe=recipe, threat="C+labels")


def resnet50() -> Iterator[Row]:
    """O-90: single images behind an untrained ResNet-18 and ResNet-50 in evaluation state."""
    for model in ("resnet18", "resnet50"):
        yield {"model": model, "attack": "ig:iterations=80,restarts=1"}, partial(_residual, model)


def _residual(model: str) -> Json:
    return rebuilt(network(model), singles(network(model), 2), "ig:iterations=80,restarts=1")


VIT = "vit:depth=2,dim=96"
VITS: dict[str, Callable[[], Network]] = {
    "ViT, untrained": lambda: network(VIT),
    "ViT, trained": lambda: trained(VIT, steps=500),
}


def transformer() -> Iterator[Row]:
    """O-91 to O-96: Table V, csDLG on a small ViT at 32 and 64 pixels, beside LeNet; 300 iterations."""
    nets = VITS | {
        "ViT, untrained, 64 pixels": lambda: network(VIT, "photos-64"),
        "LeNet, wide weights": lambda: network("lenet:init=wide"),
    }
    for name, net in nets.items():
        yield {"network": name}, partial(_transformer, net)


def _transformer(net: Callable[[], Network]) -> Json:
    own = net()
    row = rebuilt(own, singles(own, 2), "ig:iterations=300,restarts=1")
    return row | ({"accuracy": accuracy(own)} if own.data.name == "cifar10-samples" else {})


def release() -> Iterator[Row]:
    """Table III in small, at the release's settings: csDLG by L-BFGS, labels granted, LeNet of three convolutions."""
    for defense in ("none", *RELEASED):
        yield {"defense": defense, "iterations": 1000}, partial(_release, defense, 1000)
    for steps in (300, 3000):
        yield {"defense": "none", "iterations": steps}, partial(_release, "none", steps)


RELEASED = (
    "sparsify:rate=0.8", "noise:sigma=0.1,kind=laplace,unit=scale", "soteria:rate=0.5,score=released",
    "graddefense:sigma=0.01,bound=0.01", "outpost:beta=0.125,per=tensor,threshold=all,fisher=outputs,first=false",
)  # fmt: skip


def _release(defense: str, steps: int) -> Json:
    net = network("lenet:init=wide,convolutions=3")
    attack = f"idlg:iterations={steps},restarts=2,distance=cosine"
    return rebuilt(net, singles(net, 2), attack, defense=defense, threat="C+labels")


# --- OUTPOST's parts


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
        for model in ("lenet:init=wide", "lenet"):
            yield {"where": where, "model": model}, partial(_placed, where, model)


def _placed(where: str, model: str) -> Json:
    net = network(model)
    images = singles(net, 6)
    cosines = []
    for i, one in enumerate(images):
        sent, bare = (seen_by(net, one, defense=d, recipe=GRADIENT, seed=i).reply for d in (Placed(where), "none"))
        cosines.append(cosine(sent, bare))
    return rebuilt(net, images, IG, defense=Placed(where)) | {"cosine": fmean(cosines)}


def cosine(one: Params, other: Params) -> float:
    return float(dot(one, other) / (norm(one) * norm(other)))


def fisher() -> Iterator[Row]:
    """O-28: the diagonal of the true Fisher information beside the empirical one, and the square of the mean."""
    for model in ("mlp", "lenet:init=wide", "lenet"):
        yield {"model": model}, partial(_fisher, model, 8)


def _fisher(model: str, images: int) -> Json:
    net = network(model)
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
            yield {"model": model, "defense": defense, "batch": 8, "device": DEVICE}, partial(_delay, model, defense)


def _delay(model: str, defense: str) -> Json:
    timed: Json = overhead(model=model, batch_size=8, device=DEVICE, defenses=[defense], repeats=2)["rows"][0]
    return {name: timed[name] for name in ("step_ms", "plain_step_ms", "ratio")}


# --- Production size


def production() -> Iterator[Row]:
    """O-01: 500 images, five epochs, mini-batches of 32 (80 steps); LeNet."""
    recipe = Recipe(sends="delta", lr=0.01, epochs=5, batch_size=32, train_mode=True)
    for model in ("lenet:init=wide",):
        for defense in ("none", "outpost"):
            about = {"model": model, "defense": defense, "attack": "identify"}
            yield about, partial(_named, model, defense, recipe)
        for alone in (False, True):
            about = {"model": model, "defense": "none", "attack": "IG without the update" if alone else "IG"}
            yield about, partial(_produced, model, recipe, alone)


def _client(size: int) -> Batch:
    """Images of the training set, half of them of one class and a fifth of another: a client with data of its own."""
    data = load("cifar10")
    by_class = [torch.nonzero(torch.as_tensor(data.labels) == label).flatten()[:size] for label in range(10)]
    shares = [size // 2, size // 5, *[size * 3 // 80] * 8]
    chosen = torch.cat([of[:share] for of, share in zip(by_class, shares, strict=True)])
    rest = by_class[9][shares[9] : shares[9] + size - len(chosen)]
    chosen = torch.cat([chosen, rest])
    return data.batch(chosen[torch.randperm(len(chosen), generator=generator(0, "client"))].tolist())


def _produced(model: str, recipe: Recipe, alone: bool) -> Json:
    """IG that takes the update for one mean gradient, labels granted."""
    attack = search("ig:iterations=40,restarts=1,match=averaged", alone)
    row = rebuilt(network(model), [_client(500)], attack, recipe=recipe, threat="C+labels")
    return {name: value for name, value in row.items() if name != "psnrs"}


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


def pond(net: Network, cats: int, size: int) -> Batch:
    """So many cats first, and others: the shipped images and their mirror images."""
    every = net.data.batch(range(100))
    inputs, labels = torch.cat([every.inputs, every.inputs.flip(-1)]), every.labels.repeat(2)
    own, others = torch.nonzero(labels[:100] == CAT).flatten(), torch.nonzero(labels != CAT).flatten()
    chosen = torch.cat([own[:cats], others[torch.randperm(len(others), generator=generator(0, "others"))]])
    return Batch(inputs[chosen[:size]], labels[chosen[:size]])


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


def caught(
    net: Network, cats: int, size: int, defense: str = "none", recipe: Recipe = GRADIENT, more: str = ""
) -> Catch:
    """One cat of a batch: questions, and cosines of the isolated gradient with that of the nearest cat alone."""
    attack, batch = ATTACKS.build(f"fishing:target={CAT}{more}", Budget(1, 1)), pond(net, cats, size)
    assert isinstance(attack, Fishing)
    started = time.perf_counter()
    seen = asked(net, attack, batch, defense, recipe)
    took = time.perf_counter() - started
    alone = attack.isolated(seen)
    assert alone.labels is not None
    single, near = SimulatedClient(net.module, recipe=Recipe(train_mode=recipe.train_mode)), list[Json]()
    for image in batch.inputs[:cats].split(1):
        own = single.reply(alone.sent, Batch(image.to(DEVICE), alone.labels), Stream.seeded(0)).update
        body = [name for name in own if name.split(".")[0] not in {"fc", "head"}]
        below = cosine({name: alone.reply[name] for name in body}, {name: own[name] for name in body})
        near.append({"cosine": cosine(alone.reply, own), "below": below})
    place = max(range(cats), key=lambda i: float(near[i]["below"]))
    questions = len(ClientReplies([*seen.earlier, seen], CAT))
    return Catch(alone, batch, place, {"questions": questions, **near[place], "seconds_of_questions": took})


def picture(net: Network, catch: Catch, iterations: int) -> Json:
    """How well IG rebuilds what was caught."""
    found = ATTACKS.build(f"ig:iterations={iterations},restarts=1")(catch.alone).inputs.cpu().clamp(0, 1)
    truth = catch.batch.inputs[catch.place : catch.place + 1]
    line_up = metrics.ssim_pairwise(found, torch.cat([catch.batch.inputs, net.data.batch(range(100)).inputs]))
    scored = {"psnr": float(metrics.psnr(found, truth)), "ssim": float(metrics.ssim(found, truth))}
    return scored | {"identified": int(line_up.argmax()) == catch.place}


RESNETS = {"trained": "resnet18:weights=cifar10", "untrained": "resnet18"}
FIGURE_5 = ("none", "sparsify:rate=0.8", "noise:sigma=0.316,kind=laplace", "outpost")
OTHERS = ("noise:sigma=0.1,kind=laplace,unit=scale", "noise:sigma=0.01", "soteria:rate=0.5", "graddefense:sigma=0.1")


def fishing() -> Iterator[Row]:
    """O-112 to O-121: Figure 5, one or two cats in a batch: 128 images on LeNet, 32 on ResNet-18."""
    for cats in (1, 2):
        for defense in (*FIGURE_5, *OTHERS):
            about = {"model": "lenet:init=wide", "size": 128, "cats": cats, "defense": defense}
            yield about, partial(_one_catch, "lenet:init=wide", cats, 128, defense, GRADIENT, 400)


def fishing_resnet() -> Iterator[Row]:
    """O-112 to O-121: Figure 5 on ResNet-18, batches of 32, 60 iterations for a picture."""
    for cats in (1, 2):
        for weights, model in RESNETS.items():
            for defense in FIGURE_5 if weights == "trained" else ("none",):
                about = {"weights": weights, "cats": cats, "defense": defense}
                yield about, partial(_one_catch, model, cats, 32, defense, GRADIENT, 60)
    about = {"weights": "trained", "cats": 1, "defense": "none", "train_mode": True}
    yield about, partial(_one_catch, RESNETS["trained"], 1, 32, "none", Recipe(train_mode=True), 0)


def _one_catch(model: str, cats: int, size: int, defense: str, recipe: Recipe, iterations: int, more: str = "") -> Json:
    catch = caught(network(model), cats, size, defense, recipe, more)
    return catch.row | (picture(network(model), catch, iterations) if iterations else {})


def fishing_honest() -> Iterator[Row]:
    """O-116: the same without the change of parameters: IG on all 128 images, two cats, labels granted; LeNet."""
    yield {"model": "lenet:init=wide", "cats": 2}, partial(_honest, lambda: network("lenet:init=wide"), 2, 128)


def _honest(net: Callable[[], Network], cats: int, size: int) -> Json:
    batch = pond(net(), cats, size)
    row = rebuilt(net(), [batch], "ig:iterations=150,restarts=1", recipe=GRADIENT, threat="C+labels")
    return row | {"psnrs_of_cats": row.pop("psnrs")[:cats]}


def fishing_steps() -> Iterator[Row]:
    """O-110: Fishing on clients of several local steps, at two learning rates; one cat in 128, LeNet."""
    for lr in (0.01, 1e-5):
        for count, size in ((1, 128), (2, 128), (1, 32), (5, 32)):
            recipe = Recipe(sends="delta", lr=lr, epochs=count, batch_size=size)
            about = {"lr": lr, "epochs": count, "batch_size": size}
            yield about, partial(_one_catch, "lenet:init=wide", 1, 128, "none", recipe, 300)


def fishing_queries() -> Iterator[Row]:
    """O-119: questions until one of four cats stands alone under noise, at most 60; LeNet, batches of 128."""
    for defense in (
        "none",
        "noise:sigma=0.0001",
        "noise:sigma=0.001",
        "noise:sigma=0.01",
        "noise:sigma=0.316,kind=laplace",
    ):
        for most in (10, 60):
            about = {"defense": defense, "most_questions": most}
            yield about, partial(_one_catch, "lenet:init=wide", 4, 128, defense, GRADIENT, 0, f",queries={most}")


def fishing_vit() -> Iterator[Row]:
    """O-122 to O-124: Figure 6 on a small ViT, untrained and trained, batches of 128; and IG on 32 honest images."""
    for network_name, net in VITS.items():
        for cats in (1, 2):
            yield {"network": network_name, "cats": cats, "attack": "Fishing"}, partial(_fished_vit, net, cats)
        yield {"network": network_name, "cats": 2, "attack": "IG without the change"}, partial(_honest, net, 2, 32)


def _fished_vit(net: Callable[[], Network], cats: int) -> Json:
    catch = caught(net(), cats, 128)
    return catch.row | picture(net(), catch, 300)


STUDIES: dict[str, Callable[[], Iterator[Row]]] = {
    study.__name__: study
    for study in (
        seeds, spread, rounds, prior, statistics, batches, epochs, resnet50, transformer, release, places,
        fisher, delay, production, fishing, fishing_resnet, fishing_honest, fishing_steps, fishing_queries,
        fishing_vit,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=STUDIES)
    parser.add_argument("--out", type=Path, required=True)
    asked_for = parser.parse_args()
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
