"""Figures for the card of a shipped generator: precision, recall and Fréchet distance of its draws to test images.

    python scripts/generator_card.py cifar10 [--count 2000] [--seed 0]

Embeddings are the penultimate layer of a classifier of the same data: for CIFAR-10 the fetched ResNet-18, for MNIST a
small network that is trained here, on the train split, in about a minute. Other test images, in place of the draws,
give the best that can be expected of so many images. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil import generators, models
from gradveil.core.seeding import generator as seeded
from gradveil.core.seeding import isolated
from gradveil.data import ImageSet, load
from gradveil.lab.generators.quality import frechet, precision_recall

AT_ONCE = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["cifar10", "mnist"])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    began = time.monotonic()
    test, generator = load(f"{chosen.name}:split=test"), generators.build(chosen.name)
    classifier = cifar_classifier(test) if chosen.name == "cifar10" else digit_classifier(chosen.seed)
    represent = models.representation(classifier, test.domain)

    def embedded(images: Callable[[int], Tensor]) -> Tensor:
        with torch.no_grad():
            return torch.cat([represent(images(at)) for at in range(0, chosen.count, AT_ONCE)])

    codes = generator.codes(chosen.count, seeded(chosen.seed, "card"))
    labels = torch.arange(chosen.count) % 10
    order = torch.randperm(len(test), generator=seeded(chosen.seed, "order"))
    real = embedded(lambda at: test.batch(order[at : at + AT_ONCE]).inputs)
    other = embedded(lambda at: test.batch(order[chosen.count + at : chosen.count + at + AT_ONCE]).inputs)
    drawn = embedded(lambda at: generator.decode(codes[at : at + AT_ONCE], labels[at : at + AT_ONCE]))
    with torch.no_grad():
        guesses = classifier.get_submodule(represent.layer)(drawn).argmax(dim=1)
    found = {
        "generator": chosen.name,
        "images": chosen.count,
        "features": real.shape[1],
        "draws": figures(real, drawn),
        "other test images": figures(real, other),
        "draws of the class asked for": float((guesses == labels).double().mean()),
        "classifier's accuracy": accuracy(classifier, test),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(found, indent=1))


def figures(real: Tensor, other: Tensor) -> dict[str, float]:
    precision, recall = precision_recall(real, other)
    return {"precision": precision, "recall": recall, "frechet": round(frechet(real, other), 3)}


def cifar_classifier(test: ImageSet) -> nn.Module:
    return models.build("resnet18:weights=cifar10", test.domain, seed=0)


def digit_classifier(seed: int, epochs: int = 2) -> nn.Module:
    """Two convolutions and two linear layers, trained on MNIST's train split."""
    train = load("mnist")
    with isolated(seed, "digits"):
        model = nn.Sequential(
            nn.Conv2d(1, 32, 5, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 5, stride=2), nn.ReLU(), nn.Flatten(),
            nn.Linear(64 * 16, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for part in torch.randperm(len(train), generator=seeded(seed, "digits", epoch)).split(AT_ONCE):
            batch = train.batch(part)
            optimizer.zero_grad()
            F.cross_entropy(model(batch.inputs), batch.labels).backward()
            optimizer.step()
    return model.eval()


def accuracy(model: nn.Module, test: ImageSet, count: int = 1000) -> float:
    batch = test.batch(range(count))
    with torch.no_grad():
        return float((model(batch.inputs).argmax(dim=1) == batch.labels).double().mean())


if __name__ == "__main__":
    main()
