"""How near the gradient of DCS2's concealed sample comes to the sensitive one's, by model and by label of its start.

Prints one JSON object a line, the mean over pairs of two images of which the first is sensitive;
``docs/defenses/dcs2.md`` reads them.
"""

from __future__ import annotations

import argparse
import json

from gradveil import models
from gradveil.client import SimulatedClient
from gradveil.core.streams import Stream
from gradveil.core.types import Recipe
from gradveil.data import load
from gradveil.defenses import DEFENSES

MODELS = ("lenet:init=wide", "lenet", "convnet:kernel=5", "convnet:last=2", "resnet18:weights=cifar10")
"""LeNet, the ConvNet of the text and that of the release, and a trained network."""
START_LABELS = ("other", "same")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    data = load("cifar10-samples")
    for model in chosen.model or MODELS:
        module = models.build(model, data.domain, seed=0).to(chosen.device)
        for label in START_LABELS:
            defense = f"dcs2:iterations={chosen.iterations},sensitive=first,start_label={label},lr=0.025"
            client = SimulatedClient(module, recipe=Recipe(), defense=DEFENSES.build(defense))
            found: dict[str, float] = {}
            for i in range(chosen.pairs):
                # the samples lie class by class in turns: ten further on is another image of the same label
                pair = data.batch([i, i + 10 if label == "same" else i + 1]).to(chosen.device)
                log = client.reply(client.model.params, pair, Stream.seeded(i)).log.means()
                for name in ("start_cosine", "cosine", "start_distance", "distance"):
                    found[name] = found.get(name, 0.0) + log[name] / chosen.pairs
            row = {"model": model, "start_label": label, "iterations": chosen.iterations, "pairs": chosen.pairs}
            print(json.dumps({**row, **{name: round(value, 3) for name, value in found.items()}}), flush=True)


if __name__ == "__main__":
    main()
