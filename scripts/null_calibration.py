"""How often a verdict says "above chance" of updates that hold nothing of the private examples.

Zeros, pure noise and the update of somebody outside the list, a third of the audits each, are attacked by all of the
standard suite. Updates of all audits go through an attack together; they are scored and judged audit by audit.

    python scripts/null_calibration.py --updates 1000 --batch-size 8 --device cuda --out rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import nn

from gradveil import models
from gradveil.attacks import ATTACKS, BUDGETS, Attack, Reconstruction
from gradveil.auditing.audit import PRIOR_ONLY, Files, Row
from gradveil.auditing.case import make_case
from gradveil.auditing.flags import awareness_of
from gradveil.auditing.scoring import Judge, membership, ranked
from gradveil.auditing.sources import Simulation
from gradveil.auditing.suites import SuiteSetting, suite
from gradveil.auditing.verdict import verdicts
from gradveil.client import SimulatedClient
from gradveil.core.seeding import derive, generator
from gradveil.core.streams import Stream
from gradveil.core.types import Params, Recipe
from gradveil.data import ImageSet, load
from gradveil.threat import Observation, observe, threat_model

KINDS = ("zeros", "noise", "somebody else")
ANSWERS = ("rebuilt", "recognised", "member", "labels")
TOGETHER = {"cpu": 64, "cuda": 1024}
MOST = 250
"""Examples of a larger data set that an audit is about."""
EACH = 8
"""Updates of an audit; fewer where the data set has too few examples for them."""


@dataclass
class NullAudit:
    """The private examples of one audit, and updates that have nothing to do with them."""

    kind: str
    clients: Simulation
    seen: list[Observation]
    seeds: list[int]


@cache
def network(model: str, data: str, seed: int, device: str) -> tuple[ImageSet, nn.Module, Params]:
    """One for all audits: attacks search together in updates of one module and one broadcast alone."""
    images = load(data)
    module = models.build(model, images.domain, seed=seed).to(device)
    return images, module, models.trained_parameters(module)


def null_audit(options: argparse.Namespace, number: int, device: str) -> NullAudit:
    threat = threat_model("D")
    data, module, sent = network(options.model, options.data, options.seed, device)
    client, size = SimulatedClient(module, recipe=Recipe()), options.batch_size
    each = min(EACH, len(data) // (4 * size))  # as many others in the list, and as many again who are not in it
    order = torch.randperm(len(data), generator=generator(options.seed, "null", number))
    listed, outside = order[: -each * size][:MOST], order[-each * size :]
    case = make_case({
        "model": options.model, "threat": "D", "images": each * size, "batch_size": size,
        "seed": derive(options.seed, "audit", number) % 2**31, "device": device,
    })  # fmt: skip
    clients = Simulation(case, data.subset(listed), lambda: module)
    candidates = clients.candidates(clients.lists[0])
    kind, seen = KINDS[number % len(KINDS)], []
    for i, batch in enumerate(data.batch(outside[k : k + size]) for k in range(0, each * size, size)):
        reply: Params = client.reply(sent, batch.to(device), Stream.seeded(0, "null")).update
        if kind == "zeros":
            reply = {name: torch.zeros_like(tensor) for name, tensor in reply.items()}
        elif kind == "noise":
            rng = generator(options.seed, "noise", number, i)
            spread = {name: float(tensor.std()) if tensor.numel() > 1 else 1.0 for name, tensor in reply.items()}
            reply = {
                name: (spread[name] * torch.randn(tensor.shape, generator=rng)).to(tensor)
                for name, tensor in reply.items()
            }
        one = observe(
            module=module, model=options.model, domain=data.domain, sent=sent, reply=reply, batch=batch,
            recipe=Recipe(), defense="none", threat=threat, candidates=candidates,
        )  # fmt: skip
        seen.append(one)
    return NullAudit(kind, clients, seen, [derive(options.seed, "attack", number, i) for i in range(each)])


def attacked(attack: Attack, asked: Sequence[NullAudit], device: str, *, without: bool) -> list[list[Reconstruction]]:
    """What an attack finds in the updates of each audit, all together; ``without``: in lists of others."""
    seen, seeds = [], []
    for audit in asked:
        others = audit.clients.candidates(audit.clients.lists[1]) if without else None
        seen += [replace(one, candidates=others) if without else one for one in audit.seen]
        seeds += audit.seeds
    found, most = list[Reconstruction](), max(1, TOGETHER[device] // attack.problems_each)
    for start in range(0, len(seen), most):
        found += attack(seen[start : start + most], seeds=seeds[start : start + most])
    ends = [sum(len(audit.seen) for audit in asked[:i]) for i in range(len(asked) + 1)]
    return [found[first:last] for first, last in pairwise(ends)]


Found = dict[str, tuple[Attack, list[Reconstruction], list[Reconstruction]]]
"""By attack: what it found in lists that hold the private examples, and in lists that do not."""
KEPT = {"attack", "prior_of", "identified", "luck", "label_accuracy", "label_chance", "ranked_first", "member"}


def judged(options: argparse.Namespace, number: int, found: Found) -> dict[str, object]:
    """What the verdict says of one audit, with its rows as the audit makes them. Runs in a process of its own."""
    torch.set_num_threads(1)
    audit = null_audit(options, number, "cpu")
    private, rows, first = audit.clients.private, [], audit.seen[0]
    judge = Judge(private.gallery, first.domain)
    for name, (attack, mine, others) in found.items():
        alone = name.startswith(PRIOR_ONLY)
        ranking = ranked(mine, private.listed, first.candidates)  # type: ignore[arg-type]
        row = Row(
            **dict(judge.judge(private, mine, first.module)),
            **dict(ranking),
            defense="none",
            attack=PRIOR_ONLY if alone else name,
            prior_of=name.removeprefix(f"{PRIOR_ONLY} ") if alone else None,
            needs=tuple(sorted(attack.requires)),
            awareness=awareness_of(attack),
            threat="D",
            files=Files(reconstruction=""),
        )
        member = membership(mine, others, private.listed) if others else None  # type: ignore[arg-type]
        rows.append(row.model_copy(update={"member": member}))
    (verdict,) = verdicts(rows)
    answers = {name: getattr(verdict, name) for name in ANSWERS}
    above = {name: None if one is None else one.above_chance for name, one in answers.items()}
    return {
        "audit": number, "kind": audit.kind, "batch_size": options.batch_size, "updates": len(audit.seen),
        "candidates": rows[0].gallery, "grade": verdict.grade,
        "above_chance": above | {"verdict": verdict.above_chance},
        "rows": [row.model_dump(mode="json", include=KEPT) for row in rows],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--data", default="cifar10-samples")
    parser.add_argument("--model", default="lenet:init=wide")
    parser.add_argument("--budget", default="standard", choices=list(BUDGETS))
    parser.add_argument("--attack", action="append", help="default: all of the suite")
    parser.add_argument("--device", default="cpu", choices=list(TOGETHER))
    parser.add_argument("--workers", type=int, default=2, help="processes that score and judge")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    started, audits = time.perf_counter(), [null_audit(options, 0, options.device)]
    audits += [null_audit(options, i, options.device) for i in range(1, -(-options.updates // len(audits[0].seen)))]
    first = audits[0]
    setting = SuiteSetting(
        threat=threat_model("D"), module=first.seen[0].module, model=options.model, domain=first.seen[0].domain,
        recipe=Recipe(), batch_size=options.batch_size,
    )  # fmt: skip
    found: list[Found] = [{} for _ in audits]
    for spec in options.attack or suite(options.budget, setting):
        attack = ATTACKS.build(spec, BUDGETS[options.budget])
        for name, search in ((spec, attack), (f"{PRIOR_ONLY} {spec}", attack.prior_only())):
            if search is None:
                continue
            mine = attacked(search, audits, options.device, without=False)
            asked = mine[0][0].scores is not None and name == spec and first.clients.lists[1] is not None
            others = attacked(search, audits, options.device, without=True) if asked else [[]] * len(mine)
            for own, held, lacking in zip(found, mine, others, strict=True):
                own[name] = (attack, held, lacking)
            print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    alarms = Counter[str]()
    with options.out.open("w") as out, ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        for line in pool.map(partial(judged, options), range(len(audits)), found):
            alarms.update(name for name, said in line["above_chance"].items() if said is True)  # type: ignore[attr-defined]
            out.write(json.dumps(line) + "\n")
            out.flush()
    count = len(audits)
    shares = {name: f"{alarms[name]} of {count} ({alarms[name] / count:.1%})" for name in ("verdict", *ANSWERS)}
    print(json.dumps({"audits": count, "updates": sum(len(one.seen) for one in audits), "above_chance": shares}))
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
