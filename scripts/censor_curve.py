"""What is rebuilt of CENSOR's private examples, by how many replies are kept; one JSON object a line.

    python scripts/censor_curve.py --device cuda --model lenet:init=wide --kind fresh --replies 1,4,16,64,256 \
        --images 20 --out rows.jsonl

``fresh``: a server sends weights of its own making with every question; ``open``: such that rectifiers do not switch.
``same``: it asks about the honest model again.
``training``: an observer keeps replies of honest rounds, between which others train the model. Private images are
spread over the 100 shipped samples; each rebuilt one is looked up among all 100. ``--labels-only`` asks for labels.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gradveil import models
from gradveil.attacks import ATTACKS, BUDGETS, Server
from gradveil.attacks.parts.labels import infer_labels
from gradveil.client import SimulatedClient
from gradveil.core.seeding import derive, generator
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Params, Recipe, cross_entropy
from gradveil.data import load
from gradveil.defenses import DEFENSES, PublicData
from gradveil.engine import without_tf32
from gradveil.metrics import psnr
from gradveil.metrics.perceptual import LPIPS
from gradveil.models import Functional
from gradveil.threat import Observation, observe, threat_model

DATA = load("cifar10-samples")
STRIDE = 13
"""Steps through the samples, which are sorted by class modulo ten: all classes come up, and no image twice."""


def trained(model: Functional, params: Params, steps: int, device: str, seed: int, rate: float) -> Params:
    """SGD on the samples that are nobody's private ones, as other clients would move the model."""
    others = DATA.batch([STRIDE * i % 100 for i in range(50, 100)]).to(device)
    rng = generator(seed, "others")
    for _ in range(steps):
        some = torch.randint(len(others), (16,), generator=rng).to(device)
        slope = torch.func.grad(model.loss, argnums=1)(cross_entropy, params, others.inputs[some], others.labels[some])
        params = {name: tensor - rate * slope[name] for name, tensor in params.items()}
    return params


def broadcasts(options: argparse.Namespace, module: torch.nn.Module, count: int) -> list[Params]:
    """What is sent, question by question."""
    sent = {name: p.detach().clone() for name, p in module.named_parameters()}
    model = Functional(module)
    if options.trained:
        sent = trained(model, sent, options.trained, options.device, 0, options.rate)
    if options.kind == "training":
        path = [sent]
        for number in range(1, count):
            path.append(trained(model, path[-1], options.between, options.device, number, options.rate))
        return path
    weights = "honest" if options.kind == "same" else options.kind
    attack = ATTACKS.build(f"informed:replies={max(2, count)},weights={weights}")
    server = Server(module, options.model, sent, DATA.domain)
    asked = [attack.craft(server, [None] * number, 0) for number in range(count)]  # type: ignore[list-item]
    return [crafted.sent for crafted in asked if crafted is not None]


def asked_for(options: argparse.Namespace, count: int) -> list[list[Observation]]:
    """By client, what is seen of each of its replies."""
    defense, recipe, threat = DEFENSES.build(options.defense), Recipe(), threat_model(options.threat)
    module = models.build(options.model, DATA.domain, seed=options.seed).to(options.device)
    starts = range(0, options.images * options.batch_size, options.batch_size)
    batches = [
        DATA.batch([STRIDE * i % 100 for i in range(s, s + options.batch_size)]).to(options.device) for s in starts
    ]
    public = PublicData(torch.cat([batch.inputs for batch in batches]))
    client = SimulatedClient(module, recipe=recipe, defense=defense, public=public)
    seen: list[list[Observation]] = [[] for _ in batches]
    for question, sent in enumerate(broadcasts(options, module, count)):
        rngs = [Stream.seeded(0, "defense", number, question) for number in range(len(batches))]
        replies = client.replies(sent, [Batch(b.inputs.clone(), b.labels.clone()) for b in batches], rngs)
        for mine, batch, reply in zip(seen, batches, replies, strict=True):
            mine.append(
                observe(
                    module=module,
                    model=options.model,
                    domain=DATA.domain,
                    sent=sent,
                    reply=reply.update,
                    batch=batch,
                    recipe=recipe,
                    defense=options.defense,
                    built_defense=defense,
                    threat=threat,
                )
            )
    return seen


def right_labels(found: torch.Tensor, true: torch.Tensor) -> float:
    """The share of labels that are right, as counts of each class."""
    both = [torch.nn.functional.one_hot(labels, DATA.domain.classes).sum(1) for labels in (found, true)]
    return float(torch.minimum(*both).sum() / true.numel())


def distances(found: torch.Tensor, kind: str, device: str) -> torch.Tensor | None:
    """[n, 100] from what was found to all samples; None where LPIPS is not installed."""
    gallery = DATA.batch(range(100)).inputs
    if kind == "pixels":
        return torch.cdist(found.flatten(1), gallery.flatten(1))
    try:
        return LPIPS().pairwise(found.to(device), gallery.to(device)).cpu()
    except Exception as error:  # its weights may not be on this machine: the row is then without it
        print(f"without LPIPS: {error!r}"[:200], flush=True)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="lenet:init=wide")
    parser.add_argument("--kind", choices=["fresh", "open", "same", "training"], default="fresh")
    parser.add_argument("--defense", default="censor")
    parser.add_argument("--replies", default="1,4,16,64,256")
    parser.add_argument("--images", type=int, default=20, help="clients, each with one batch")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--threat", default="F", help="F+labels grants the labels")
    parser.add_argument("--trained", type=int, default=0, help="steps of training before the first question")
    parser.add_argument("--between", type=int, default=5, help="steps of others between two rounds of training")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--labels-only", action="store_true")
    parser.add_argument("--seconds", type=float, default=3600, help="no point is begun that would end after so many")
    parser.add_argument("--out", type=Path, default=None, help="a file of rows; points that it holds are not run again")
    options = parser.parse_args()
    begun = time.perf_counter()
    lines = options.out.read_text().splitlines() if options.out is not None and options.out.exists() else []
    known = [json.loads(line) for line in lines]
    wanted = [point(options, int(count)) for count in options.replies.split(",")]
    counts = [row["replies"] for row in wanted if not any(row.items() <= other.items() for other in known)]
    if not counts:
        return
    with without_tf32():
        seen = asked_for(options, max(counts))
    print(f"{max(counts)} replies of {len(seen)} clients in {time.perf_counter() - begun:.1f} s", flush=True)
    private = (STRIDE * torch.arange(len(seen) * options.batch_size) % 100).view(len(seen), -1)
    true = DATA.labels[private]
    each = 0.0
    for count in counts:
        kept = [replace(mine[count - 1], earlier=tuple(mine[: count - 1])) for mine in seen]
        started = time.perf_counter()
        if started - begun + each * count > options.seconds:
            print(f"{count} replies would take {each * count:.0f} s: left out", flush=True)
            break
        row = point(options, count)
        with without_tf32():
            if options.labels_only:
                labels = infer_labels([replace(one, labels=None) for one in kept], options.batch_size).cpu()
            else:
                attack = ATTACKS.build(
                    f"informed:restarts={options.restarts},iterations={options.iterations}", BUDGETS["standard"]
                )
                found = attack(kept, seeds=[derive(0, "attack", i) for i in range(len(kept))])
                labels = torch.stack([one.labels for one in found])
                inputs = torch.stack([one.inputs for one in found])
                row |= scored(inputs, private, options.device)
        row |= {
            "labels_right": round(right_labels(labels, true), 4),
            "seconds": round(time.perf_counter() - started, 1),
        }
        each = (time.perf_counter() - started) / count
        print(json.dumps(row), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def point(options: argparse.Namespace, count: int) -> dict[str, Any]:
    """What tells one point of a curve from others."""
    asked_labels = {"labels_only": True} if options.labels_only else {"iterations": options.iterations}
    return {
        "model": options.model, "kind": options.kind, "defense": options.defense, "replies": count,
        "images": options.images, "batch_size": options.batch_size, "threat": options.threat,
        "trained": options.trained, "restarts": options.restarts, "seed": options.seed, **asked_labels,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
    }  # fmt: skip


def scored(inputs: torch.Tensor, private: torch.Tensor, device: str) -> dict[str, object]:
    """PSNR, and the share of private images that are nearest to what was rebuilt; inputs [clients, B, ...]."""
    truth = torch.stack([DATA.batch(row.tolist()).inputs for row in private])
    # of a batch, each private image counts with what comes nearest to it
    pairs = torch.cdist(truth.flatten(2), inputs.flatten(2)).argmin(dim=2)
    nearest = torch.stack([one[order] for one, order in zip(inputs, pairs, strict=True)]).flatten(0, 1)
    quality = psnr(nearest, truth.flatten(0, 1))
    row: dict[str, object] = {
        "psnr": round(float(quality.mean()), 2), "median": round(float(quality.median()), 2),
        "least": round(float(quality.min()), 2), "psnrs": [round(value, 1) for value in quality.tolist()],
    }  # fmt: skip
    for kind in ("pixels", "lpips"):
        away = distances(nearest, kind, device)
        if away is not None:
            row[f"recognised_by_{kind}"] = float((away.argmin(dim=1) == private.flatten()).float().mean())
    return row


if __name__ == "__main__":
    main()
