"""What `learned` reaches against defenses that nobody wrote a counter-move for: one line of a table for each.

    python scripts/learned_study.py [--pairs N] [--device cuda] [--model resnet18] [--out FILE] [NAME ...]

Names are those of tests/naive.py, or specs of defenses. The private images are the 100 CIFAR-10 samples, which are also
the list; every client has a defense of its own that nobody used before. Seconds are those of one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from gradveil import models
from gradveil.attacks import Learned
from gradveil.client import SimulatedClient
from gradveil.core.streams import Stream
from gradveil.core.types import Recipe
from gradveil.data import load
from gradveil.data.public import PublicImages
from gradveil.defenses import DEFENSES, Defense
from gradveil.threat import Observation, observe, threat_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from naive import HELD_OUT, NAIVE

DATA = load("cifar10-samples")


def defense_of(name: str) -> Defense:
    make = {**NAIVE, **HELD_OUT}.get(name)
    return DEFENSES.build(name) if make is None else make()


def seen(name: str, model: str, device: str) -> list[Observation]:
    """What is seen of 100 clients with one image each."""
    module = defense_of(name).on_model(models.build(model, DATA.domain, seed=0)).to(device)
    sent, known, found = models.trained_parameters(module), defense_of(name), []
    for place in range(len(DATA)):
        batch = DATA.batch([place]).to(device)
        client = SimulatedClient(module, recipe=Recipe(), defense=defense_of(name))
        reply = client.reply(sent, batch, Stream.seeded(1, "client", place))
        found.append(
            observe(
                module=module,
                model=model,
                domain=DATA.domain,
                sent=sent,
                reply=reply.update,
                batch=batch,
                recipe=Recipe(),
                defense=DEFENSES.describe(known),
                built_defense=known,
                candidates=DATA,
                public=PublicImages.apart_from(DATA),
                threat=threat_model("D"),
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[*NAIVE, *HELD_OUT])
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--model", default="lenet:init=wide")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    for name in given.names:
        observations = seen(name, given.model, given.device)
        started = time.process_time()
        chosen = Learned(rank=True, pairs=given.pairs, keep=False)(observations)
        rebuilt = Learned(pairs=given.pairs, keep=False)(observations)
        seconds = time.process_time() - started
        first = [int(one.scores.argmin()) == place for place, one in enumerate(chosen) if one.scores is not None]
        pictures, labels = torch.cat([one.inputs for one in rebuilt]), torch.cat([one.labels for one in rebuilt])
        errors = (pictures - DATA.batch(range(len(DATA))).inputs).square().flatten(1).mean(dim=1)
        psnr, right = float((-10 * errors.log10()).mean()), float((labels == DATA.labels).float().mean())
        told = f"{chosen[0].strategy} | {seconds:.0f} s | {'yes' if name in HELD_OUT else ''}"
        line = f"| {name} | {psnr:.1f} dB | {sum(first)}% | {right:.0%} | {told} |"
        print(line, flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
