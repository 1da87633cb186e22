"""Why the undefended training of DCS2's Table 1 ends at 68% (MNIST, Non-IID): one difference at a time.

The paper's Table 11 gives ten clients, 400 examples of two labels each, batches of 256, a rate of 0.01 and 100 rounds.
The authors' release adds what the text leaves out: three convolutions, momentum that a client keeps from round to
round, incomplete batches dropped, labels drawn at random for each client, and the best round as the result. Prints one
JSON object a line; ``docs/defenses/dcs2.md`` reads them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil import models
from gradveil.core.seeding import generator
from gradveil.data import ImageSet, load

RELEASED = [[7, 0], [1, 6], [3, 1], [3, 2], [3, 2], [1, 5], [4, 6], [8, 1], [3, 4], [1, 8]]
"""The labels of the clients that numpy draws with the release's seed, 42 and 4: nobody has the digit 9."""
CLIENTS, EACH, LABELS, ROUNDS, EVERY = 10, 200, 2, 100, 10
EACH_IID = 2000


@dataclass(frozen=True)
class Setting:
    """One way to read Table 11."""

    name: str
    convolutions: int = 4
    normalize: bool = True
    init: str = "wide"
    momentum: float = 0.0
    """Of SGD; a client keeps it from round to round."""
    batch_size: int = 256
    drop_last: bool = False
    """Leave out a batch that is not full: 400 examples are one step of 256 then, not two."""
    labels: str = "shards"
    """Every label with two clients (shards), two drawn for each client (random), those that the release draws
    (released), or 2,000 examples of any label (iid)."""
    per_round: int = 10
    rate: float = 0.01
    """DCS2+ of the release adds half of the gradient to nearly every step, which is this rate times 1.5."""


TABLE_11 = Setting("as Table 11 reads")
SETTINGS = [
    TABLE_11,
    replace(TABLE_11, name="pixels from 0 to 1", normalize=False),
    replace(TABLE_11, name="PyTorch's initialisation", init="default"),
    replace(TABLE_11, name="three convolutions", convolutions=3),
    replace(TABLE_11, name="momentum 0.9", momentum=0.9),
    replace(TABLE_11, name="three convolutions, momentum 0.9", convolutions=3, momentum=0.9),
    Setting("the release: full batches alone", convolutions=3, momentum=0.9, drop_last=True),
    Setting("the release: labels at random", convolutions=3, momentum=0.9, drop_last=True, labels="random"),
    Setting("the release: its own labels", convolutions=3, momentum=0.9, drop_last=True, labels="released"),
    Setting("its own labels, 1.5 times the rate", 3, momentum=0.9, drop_last=True, labels="released", rate=0.015),
    Setting("IID: as Table 11 reads", labels="iid", per_round=5),
    Setting("IID: the release", 3, momentum=0.9, drop_last=True, labels="iid", per_round=5),
    Setting("its own labels, batches of 64", 3, momentum=0.9, drop_last=True, labels="released", batch_size=64),
]


def deal(data: ImageSet, labels: str, seed: int) -> list[list[int]]:
    """Where each client's examples stand: 200 of each of its two labels, drawn anew for everybody."""
    rng = generator(seed, "labels")
    if labels == "iid":
        return [
            some.tolist() for some in torch.randperm(len(data), generator=rng)[: CLIENTS * EACH_IID].split(EACH_IID)
        ]
    table = torch.arange(CLIENTS * LABELS).remainder(10)[torch.randperm(CLIENTS * LABELS, generator=rng)]
    owned = table.view(CLIENTS, LABELS)
    while labels == "shards" and bool((owned[:, 0] == owned[:, 1]).any()):
        owned = table[torch.randperm(len(table), generator=rng)].view(CLIENTS, LABELS)
    if labels == "random":
        owned = torch.stack([torch.randperm(10, generator=rng)[:LABELS] for _ in range(CLIENTS)])
    if labels == "released":
        owned = torch.tensor(RELEASED)
    of_label = [(data.labels == label).nonzero()[:, 0] for label in range(10)]

    def drawn(label: int) -> Tensor:
        return of_label[label][torch.randint(len(of_label[label]), (EACH,), generator=rng)]

    return [torch.cat([drawn(int(label)) for label in row]).tolist() for row in owned]


def train(setting: Setting, seed: int) -> Iterator[tuple[int, float]]:
    """FedAvg with one local epoch: round and accuracy in percent on the test set."""
    data, test = load("mnist:split=train"), load("mnist:split=test")
    spec = f"lenet:convolutions={setting.convolutions},init={setting.init},normalize={str(setting.normalize).lower()}"
    shared = models.build(spec, data.domain, seed=seed)
    clients = [data.batch(own) for own in deal(data, setting.labels, seed)]
    modules: list[nn.Module] = [models.build(spec, data.domain, seed=seed) for _ in clients]
    steps = [torch.optim.SGD(each.parameters(), lr=setting.rate, momentum=setting.momentum) for each in modules]
    rng, turns, everything = generator(seed, "batches"), generator(seed, "turns"), test.batch(range(len(test)))
    for number in range(1, ROUNDS + 1):
        chosen = sorted(torch.randperm(CLIENTS, generator=turns)[: setting.per_round].tolist())
        for module, optimizer, own in ((modules[i], steps[i], clients[i]) for i in chosen):
            module.load_state_dict(shared.state_dict())
            for some in torch.randperm(len(own), generator=rng).split(setting.batch_size):
                if setting.drop_last and len(some) < setting.batch_size:
                    continue
                optimizer.zero_grad()
                F.cross_entropy(module(own.inputs[some]), own.labels[some]).backward()
                optimizer.step()
        trained = [modules[i].parameters() for i in chosen]
        mean = [torch.stack(same).mean(0) for same in zip(*trained, strict=True)]
        with torch.no_grad():
            for parameter, value in zip(shared.parameters(), mean, strict=True):
                parameter.copy_(value)
            if number % EVERY == 0:
                right = shared(everything.inputs).argmax(1) == everything.labels
                yield number, 100 * float(right.float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", type=int, action="append", help="the number of a setting, from 0")
    chosen = parser.parse_args()
    for i in chosen.only or range(len(SETTINGS)):
        for seed in range(chosen.seeds):
            curve = dict(train(SETTINGS[i], seed))
            row = {**asdict(SETTINGS[i]), "seed": seed, "last": curve[ROUNDS], "best": max(curve.values())}
            paper = 92.08 if SETTINGS[i].labels == "iid" else 68.03
            print(json.dumps({**row, "curve": curve, "paper": paper}), flush=True)


if __name__ == "__main__":
    main()
