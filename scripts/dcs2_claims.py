"""Small studies of claims in DCS2's text that none of its tables holds; one JSON object a line.

    python scripts/dcs2_claims.py                          # all, some minutes of one core
    python scripts/dcs2_claims.py cosines objectives --few # some of them, as short as they get

``docs/results/dcs2-claims.jsonl`` has what it printed; ``docs/results/claims/dcs2.yaml`` and ``docs/defenses/dcs2.md``
read it. Every row names its study and setting; the docstring of a study names the claims that it is for.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

import gradveil
from gradveil import models
from gradveil.client import SimulatedClient
from gradveil.core.streams import Stream
from gradveil.core.types import Json, Loss, Recipe, cross_entropy
from gradveil.data import load
from gradveil.defenses import DEFENSES, Defense
from gradveil.federated import Federation, make_training

EXACT = 1e-6
"""Mean squared error of an image that was read exactly, 60 dB."""


@dataclass(frozen=True)
class Run:
    """Where the studies are run, and whether as briefly as they can be."""

    device: str
    few: bool

    def times(self, full: int, few: int) -> int:
        return few if self.few else full


def cosines(run: Run) -> Iterator[Json]:
    """D-19, D-66: how near the gradient of a concealed sample comes, by model and by the label of its start."""
    data, briefly, longer = load("cifar10-samples"), run.times(20, 5), run.times(100, 5)
    lengths = {"lenet:init=wide": longer, "lenet": longer, "convnet:kernel=5": briefly, "convnet:last=2": briefly}
    for model, iterations in lengths.items():
        pairs = run.times(4 if iterations == longer else 2, 1)
        module = models.build(model, data.domain, seed=0).to(run.device)
        for label in ("other", "same"):
            spec = f"dcs2:iterations={iterations},sensitive=first,start_label={label},lr=0.025"
            client = SimulatedClient(module, recipe=Recipe(), defense=DEFENSES.build(spec))
            logs = []
            for i in range(pairs):
                # the samples lie class by class in turns: ten further on is another image of the same label
                pair = data.batch([i, i + 10 if label == "same" else i + 1]).to(run.device)
                logs.append(client.reply(client.model.params, pair, Stream.seeded(i)).log.means())
            names = ("start_cosine", "cosine", "start_distance", "distance")
            means = {name: round(sum(log[name] for log in logs) / pairs, 3) for name in names}
            yield {"model": model, "start_label": label, "iterations": iterations, "pairs": pairs, **means}


def objectives(run: Run) -> Iterator[Json]:
    """D-11: clients that minimise something else than cross-entropy, attacked by IG, which knows their loss."""
    losses: dict[str, Loss] = {
        "cross-entropy": cross_entropy,
        "smoothed labels": partial(F.cross_entropy, label_smoothing=0.2),
    }
    data = load("mnist-samples")
    images = data.batch(range(run.times(4, 2))).to(run.device)
    module = models.build("lenet:init=wide", data.domain, seed=0).to(run.device)
    for name, loss in losses.items():
        specs = ["none", f"dcs2:iterations={run.times(100, 2)},sensitive=first,lr=0.025"]
        attack = f"ig:iterations={run.times(300, 2)},restarts=1"
        found = gradveil.audit(
            module, images, defenses=specs, attacks=attack, loss=loss, threat="C+labels", batch_size=2, progress=False
        )
        for row in (row for row in found.rows if row.prior_of is None):
            first = row.per_image[::2]
            shown = {key: round(row.log[key], 3) for key in ("start_cosine", "cosine", "opposed") if key in row.log}
            psnr = round(sum(image.psnr for image in first) / len(first), 2)
            yield {"loss": name, "defense": row.defense, "clients": len(first), "psnr": psnr, **shown}


def silent(run: Run) -> Iterator[Json]:
    """D-14: images of a batch that some row of an honest, untrained ReLU layer holds alone, read as Eq. (3) does."""
    data = load("cifar10-samples")
    for width in (256, 1000, 4000):
        module = models.build(f"mlp:hidden={width}", data.domain, seed=0).to(run.device)
        client = SimulatedClient(module, recipe=Recipe())
        for size in (8, 32, 96):
            batch = data.batch(range(size)).to(run.device)
            update = client.reply(client.model.params, batch, Stream.seeded(0)).update
            read = update["body.0.weight"] / update["body.0.bias"][:, None]
            images = batch.inputs.flatten(1)
            apart = torch.cdist(read, images, compute_mode="donot_use_mm_for_euclid_dist")  # [rows, images]
            exact = int((apart.square() / images.shape[1] < EXACT).any(dim=0).sum())
            yield {"model": f"mlp:hidden={width}", "images": size, "read_exactly": exact}


def participants(run: Run) -> Iterator[Json]:
    """D-08: DP-SGD by the number of clients that take part in a round; each has 20 digits, all of them other ones."""
    test = load("mnist:split=test")
    for clients in (10, 40):
        for defense in ("none", "dp:sigma=4"):
            case = make_training(
                {
                    "data": "mnist", "examples": 20 * clients, "clients": clients, "batch_size": 20, "lr": 0.5,
                    "model": "mlp:hidden=64,normalize=true", "algorithm": "fedsgd", "defense": defense,
                    "rounds": run.times(40, 1), "device": run.device,
                }
            )  # fmt: skip
            everything = load("mnist:split=train")
            federation = Federation(case, everything.subset(torch.arange(20 * clients)))
            for number in range(1, case.rounds + 1):
                federation.round(number)
            accuracy = round(100 * federation.quality(test).accuracy, 2)
            yield {"clients": clients, "defense": defense, "rounds": case.rounds, "accuracy": accuracy}


def cost(run: Run) -> Iterator[Json]:
    """D-53, D-70: seconds of one processor core for one concealed sample; short searches, scaled to 1,000 steps."""
    for source, model, iterations in (("mnist", "lenet:init=wide", 200), ("cifar10", "convnet:kernel=5", 5)):
        data, took = load(f"{source}-samples"), []
        module, steps = models.build(model, data.domain, seed=0), run.times(iterations, 1)
        for guard in (Defense(), DEFENSES.build(f"dcs2:iterations={steps},lr=0.025,sensitive=first")):
            client, began = SimulatedClient(module, recipe=Recipe(), defense=guard), time.process_time()
            client.reply(client.model.params, data.batch([0, 1]), Stream.seeded(0))
            took.append(time.process_time() - began)
        seconds = round((took[1] - took[0]) * 1000 / steps, 1)
        yield {"data": source, "model": model, "iterations": steps, "cpu_seconds_of_1000": seconds}


STUDIES: dict[str, Callable[[Run], Iterator[Json]]] = {
    study.__name__: study for study in (cosines, objectives, silent, participants, cost)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"default: {', '.join(STUDIES)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--few", action="store_true", help="as short as it gets, to see that it runs")
    options = parser.parse_args()
    for name in options.studies or STUDIES:
        for row in STUDIES[name](Run(options.device, options.few)):
            print(json.dumps({"study": name, "device": options.device, **row}), flush=True)


if __name__ == "__main__":
    main()
