"""What `learned` reaches against defenses that nobody wrote a counter-move for: one JSON object a line for each.

    python scripts/learned_study.py [--pairs N] [--round N] [--device cuda] [--model resnet18] [--out FILE] [NAME ...]

Names are those of tests/naive.py, or specs of defenses. The private images are the 100 CIFAR-10 samples, which are also
the list; every client has a defense of its own that nobody used before. Seconds are those of the processor, for
learning, choosing and rebuilding together.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from gradveil import models
from gradveil.attacks import Learned
from gradveil.attacks import learned as attack
from gradveil.attacks.parts.pairs import make_pairs
from gradveil.client import SimulatedClient, replies_in_round
from gradveil.core.streams import Stream
from gradveil.core.types import Recipe
from gradveil.data import load
from gradveil.data.public import PublicImages
from gradveil.defenses import DEFENSES, Defense
from gradveil.metrics import luck, picks, psnr
from gradveil.threat import Observation, observe, threat_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from naive import HELD_OUT, NAIVE

DATA = load("cifar10-samples")


def defense_of(name: str) -> Defense:
    make = {**NAIVE, **HELD_OUT}.get(name)
    return DEFENSES.build(name) if make is None else make()


def seen(name: str, model: str, device: str, round_number: int) -> list[Observation]:
    """What is seen of 100 clients with one image each."""
    module = defense_of(name).on_model(models.build(model, DATA.domain, seed=0)).to(device)
    sent, known, found = models.trained_parameters(module), defense_of(name), []
    for place in range(len(DATA)):
        batch = DATA.batch([place]).to(device)
        client = SimulatedClient(module, recipe=Recipe(), defense=defense_of(name))
        streams: list[Callable[[int], Stream]] = [partial(Stream.seeded, 1, "client", place)]
        (reply,) = replies_in_round(client, sent, [batch], streams, round_number)
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
                round_number=round_number,
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[*NAIVE])
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--round", type=int, default=1)
    parser.add_argument("--model", default="lenet:init=wide")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    made, truth = [], DATA.batch(range(len(DATA)))

    def counted(*args, **options):  # type: ignore[no-untyped-def]
        pairs = make_pairs(*args, **options)
        made.append(len(pairs.labels))
        return pairs

    mock.patch.object(attack, "make_pairs", counted).start()
    for name in given.names:
        observations = seen(name, given.model, given.device, given.round)
        started = os.times()
        chosen = Learned(rank=True, pairs=given.pairs, keep=False)(observations)
        rebuilt = Learned(pairs=given.pairs, keep=False)(observations)
        ended = os.times()
        named = picks(torch.stack([one.scores for one in chosen if one.scores is not None]))
        pictures, labels = torch.cat([one.inputs for one in rebuilt]), torch.cat([one.labels for one in rebuilt])
        quality = psnr(pictures, truth.inputs)
        row = {
            "defense": name,
            "held_out": name in HELD_OUT,
            "round": given.round,
            "model": given.model,
            "device": given.device,
            "pairs": made[-1],
            "images": len(DATA),
            "recognised": round(float(named.diagonal().mean()), 4),
            "luck": luck(named.numpy(), torch.arange(len(DATA))[:, None].numpy()),
            "strategy": chosen[0].strategy,
            "psnr": round(float(quality.mean()), 2),
            "psnrs": [round(value, 1) for value in quality.tolist()],
            "labels_right": round(float((labels == DATA.labels).double().mean()), 4),
            "seconds_user": round(ended.user - started.user, 1),
            "seconds_system": round(ended.system - started.system, 1),
            "seconds_wall": round(ended.elapsed - started.elapsed, 1),
            "threads": torch.get_num_threads(),
        }
        print({key: value for key, value in row.items() if key != "psnrs"}, flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
