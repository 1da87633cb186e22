# ruff: noqa: E501  (lines of the page)
"""Write docs/results/veil.md from the rows beside it.

python scripts/veil_page.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gradveil.core.registry import split_spec

FOLDER = Path(__file__).parents[1] / "docs" / "results"
Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def points(share: float) -> str:
    return f"{100 * share:.1f}%"


def table(titles: str, lines: Sequence[tuple[str, ...]]) -> str:
    head = [f"| {titles} |", "| --- |" + " ---: |" * titles.count("|")]
    return "\n".join(head + [f"| {' | '.join(line)} |" for line in lines])


def promise(defense: str) -> str:
    if defense == "none":
        return "no defense"
    options = split_spec(defense)[1]
    kept = f"{float(options['ceiling']):.1%} of a line-up of 100".replace(".0%", "%")
    return f"{kept}, in the sum of 100 replies" if "cohort" in options else f"{kept}, in each reply"


def trainings(rows: list[Row], data: str, partition: str) -> str:
    """One line for each defense: the mean over seeds, and all of them."""
    some = [row for row in rows if (row["data"], row["partition"]) == (data, partition)]
    lines = []
    for defense in sorted({row["defense"] for row in some}, key=lambda one: (one != "none", "cohort" in one, one)):
        own = [row for row in some if row["defense"] == defense]
        each = sorted(row["accuracy"] for row in own)
        bound = split_spec(defense)[1].get("bound", "")
        lines.append((promise(defense), points(fmean(each)), ", ".join(map(points, each)), str(own[0]["rounds"]), bound,
                      f"{own[0]['lr']:g}"))  # fmt: skip
    return table("promise, all rounds together | accuracy | each seed | rounds | bound | step", lines)


def chosen(settings: list[Row], data: str) -> str:
    found = [row for row in settings if row["data"] == data and "chosen" in row and "scattering" not in row["model"]]
    lines = []
    for row in found:
        words = ",".join(f"{key}={value}" for key, value in row["promise"].items())
        defense = f"veil:{words}" if words else "none"
        lines.append((promise(defense), points(row["held_out"]), str(row["rounds"]), f"{row['lr']:g}"))
    return table("promise | accuracy on images that were left out | rounds | step", lines)


def variants(settings: list[Row]) -> str:
    lines = []
    for row in settings:
        if row["data"] == "cifar10" and "rounds" not in row and "tried" not in row:
            options = split_spec(row["model"])[1]
            networks = options["backbone"].replace("efficientnet-", "").replace("+", " and ")
            lines.append((networks, options["mirror"], options["bias"], options["pca"], options["whiten"],
                          *map(points, row["held_out"])))  # fmt: skip
    return table("networks | mirror | bias | pca | whiten | 10% | 3.4% | 10%, summed", lines)


def without_weights(settings: list[Row]) -> str:
    found = [row for row in settings if "chosen" in row and "scattering" in row["model"]]
    if not found:
        return ""
    lines = [
        (data, *(points(row["held_out"]) for row in found if row["data"] == data))
        for data in dict.fromkeys(row["data"] for row in found)
    ]
    return f"""
## Without any weights

`{found[0]["model"]}` needs no network that somebody trained. These are estimates in small:
{found[0]["images"]:,} training images, and noise in proportion, so that it weighs as much as beside all images at 100 clients;
{found[0]["rounds"]} rounds. The accuracy is that on {found[0]["looked_at"]:,} other training images.

{table("data | no defense | 10% | 3.4% | 10%, summed", lines)}
"""


def from_nothing(settings: list[Row]) -> str:
    found = [row for row in settings if "numbers" in row]
    if not found:
        return ""
    lines = [(f"`{row['model']}`", f"{row['numbers']:,}", f"{row['lr']:g}", points(row["held_out"])) for row in found]
    return f"""
## A network from nothing

ResNet-8 with group norm has 78,042 numbers, and the noise as many entries. `subspace` trains it in some 500 public
directions, and its last layer whole. These are estimates in small: {found[0]["images"]:,} training images, and noise in
proportion, so that it weighs as much as beside 50,000 images at 100 clients; {found[0]["rounds"]} rounds; within 10% of a
line-up of 100. The step was not searched for: after 0.3, with which `layers` reached 9.1% in 10 rounds on 1,000 images, 4 was
taken for all. The accuracy is that on {found[0]["looked_at"]:,} other training images, and guessing has 10%. There is no undefended figure
beside them: what is lost to noise and what to so few images cannot be told apart here, nor which way is best.

{table("model | numbers in a reply | step | accuracy", lines)}

At full size each model takes some minutes of a GPU. That was not run:
`python scripts/veil_any.py --device cuda --seeds 1,2,3 --model resnet8:init=he --out rows.jsonl`.
"""


def page() -> str:
    rows, settings = rows_of("veil.jsonl"), rows_of("veil-settings.jsonl")
    cifar = [row for row in rows if row["data"] == "cifar10" and row["partition"] == "iid"]
    own = next(row for row in cifar if "ceiling=0.1," in row["defense"] and "cohort" not in row["defense"])
    plain = fmean(row["seconds"] for row in cifar if row["defense"] == "none")
    veiled = fmean(row["seconds"] for row in cifar if row["defense"] != "none")
    steps = own["rounds"] * own["clients"]
    tried = {row["tried"]: " / ".join(map(points, row["held_out"])) for row in settings if "tried" in row}
    digits = next(row for row in rows if row["data"] == "mnist")
    return f"""# What `veil` costs

[`veil`](../defenses/veil.md) on CIFAR-10: 100 clients of 500 images, one gradient of all of them in each round, three seeds, the
whole test set. Clients train a linear head on frozen public features: `{own["model"]}`.
The noise is in each client's own reply, or shared in a sum that hides single replies. A promise is about all rounds together.

{trainings(rows, "cifar10", "iid")}

One training as a command, with `--seed 1`, `2` and `3`:

    gradveil train --data cifar10 --model {own["model"]} \\
      --clients 100 --rounds {own["rounds"]} --algorithm fedsgd --batch-size 500 --lr {own["lr"]:g} --server-momentum 0.9 --average-from {own["rounds"] // 2 + 1} \\
      --no-train-mode --evaluate-every {own["rounds"]} --checkpoint-every {own["rounds"]} --defense {own["defense"]} --seed 1

## How settings were chosen, and what that does to the promise

On a fifth of the training images, which were left out: features, rounds, bound and step. The test set was asked once for each
seed, after that. The certificate covers what clients send in the training. **It does not cover the choice of settings**: here that
looked at training images of CIFAR-10, as somebody would who tries settings on public data of the same kind. Who chooses on private
examples sends something that nobody accounted for.

The mean and the directions of features come from 1,419 public photographs, the weights of the networks from ImageNet. Bound and step are
fixed numbers. Nothing else is learned from private examples outside of the noise.

{chosen(settings, "cifar10")}

What each option of the features is worth, on the images that were left out (80 rounds, the best bound and step of 24):

{variants(settings)}

With 512 directions and other draws of noise, the three promises reach {tried["size-matched 512 .5"]} where public photographs are shown at 32x32 as the
private pictures are, and {tried["native 512 .5"]} where they keep their own size. With 320 rounds it is {tried["rounds 320"]}: there is a little more to get.
Differences of half a point are within the spread of these images.

## Skewed shares

Classes dealt by a Dirichlet distribution of 0.1, shares of {min(row["smallest"] for row in rows)} to {max(row["largest"] for row in rows):,} images:

{trainings(rows, "cifar10", "dirichlet:alpha=0.1")}

Nothing is lost: each seed ends at the accuracy that it has with equal shares. A round adds up the bounded gradients of all
examples and one portion of noise for each client, whoever holds which example. A client with few images hides as well as others.
This holds for one gradient of all local examples in a round, not for local epochs.

## A domain that the features fit badly

MNIST, 100 clients of 600 digits, `{digits["model"]}`.
Chosen and measured on 12,000 training images that were left out, by the sum over clients in one product:

{chosen(settings, "mnist")}

Client by client, on the test set, the undefended training reaches {points(digits["accuracy"])} (one seed); the others were not run there.
{without_weights(settings)}{from_nothing(settings)}
## Client time

Once features are computed, a client's round takes {1000 * plain / steps:.1f} ms without a defense and {1000 * veiled / steps:.1f} ms with `veil`, {veiled / plain:.1f} times as
long (500 images, 10,240 numbers, one processor core; means over the trainings of the first table).

Raw rows: [veil.jsonl](veil.jsonl), one for each training; [veil-settings.jsonl](veil-settings.jsonl), what was tried on the images that were left
out (rows with `tried` come from an exploration beside the script). Again:

    python scripts/veil_frontier.py search --device cuda --store /dev/shm --rounds 40,80,160 --out settings.jsonl
    python scripts/veil_frontier.py train --store /dev/shm --settings settings.jsonl --out veil.jsonl
    python scripts/veil_page.py
"""


if __name__ == "__main__":
    (FOLDER / "veil.md").write_text(page())
