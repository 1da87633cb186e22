"""What is neither an audit nor a training: costs in time and memory, and attacks on what a training's rounds sent."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from statistics import fmean

import torch

from gradveil import models
from gradveil.auditing import make_observed_case, run_observed
from gradveil.client import SimulatedClient
from gradveil.core.streams import Stream
from gradveil.core.trees import norm
from gradveil.core.types import Batch, Json, Recipe
from gradveil.data import load
from gradveil.defenses import DEFENSES, Defense, Log
from gradveil.federated import make_training, run_training
from gradveil.lab.audits import means_by_round
from gradveil.lab.bench import overhead, seconds


def step_overhead(fields: Json) -> dict[str, float | None]:
    """By how many percent a defense makes one local step longer."""
    timed = overhead(
        model=fields["model"], batch_size=fields["batch_size"], device=fields["device"], defenses=[fields["defense"]]
    )
    ratio = timed["rows"][0]["ratio"]
    return {"percent": None if ratio is None else 100 * (ratio - 1)}


def concealed_sample(fields: Json) -> dict[str, float | None]:
    """What a defense adds to the step of a client with two examples, the first of them sensitive."""
    device, data = fields["device"], load(fields["data"])
    module = models.build(fields["model"], data.domain, seed=fields["seed"]).to(device)
    batch = data.batch([0, 1]).to(device)
    plain = _cost(module, Defense(), batch, device)
    defended = _cost(module, DEFENSES.build(fields["defense"]), batch, device)
    more = None if defended[1] is None or plain[1] is None else defended[1] - plain[1]
    return {"seconds": defended[0] - plain[0], "megabytes": more}


def censor_fallbacks(fields: Json) -> dict[str, float | None]:
    """How often Algorithm 1 of CENSOR sends the gradient itself, over clients with one image each.

    Each client draws from another seed. ``cosine`` is of the gradient and what is sent, ``norm`` of the gradient.
    """
    device, data = fields["device"], load(fields["data"])
    module = models.build(f"{fields['model']}:init={fields['init']}", data.domain, seed=fields["seed"]).to(device)
    defense = DEFENSES.build(f"censor:fallback=original,projection={fields['projection']}")
    recipe = Recipe(lr=fields["lr"])
    plain, client = SimulatedClient(module, recipe=recipe), SimulatedClient(module, recipe=recipe, defense=defense)
    log, norms, sent = Log(), [], plain.model.params
    for place in range(fields["images"]):
        batch = data.batch([place]).to(device)
        log.merge(client.reply(sent, batch, Stream.seeded(fields["seed"], "steps", place)).log)
        norms.append(float(norm(plain.reply(sent, batch, Stream.seeded(place)).update)))
    return {**log.means(), "norm": fmean(norms), "steps": float(len(norms))}


def _cost(module: torch.nn.Module, defense: Defense, batch: Batch, device: str) -> tuple[float, float | None]:
    """Seconds and, on a GPU, the peak memory in MB of one reply."""
    client = SimulatedClient(module, recipe=Recipe(), defense=defense)
    sent = client.model.params
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    took = seconds(lambda: client.reply(sent, batch, Stream.seeded(0)), device)
    return took, torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else None


def leakage_in_round(fields: Json) -> dict[str, float | None]:
    """What an attack sees in one round of a defended training; all rounds are run and attacked together, once."""
    plan = {name: value for name, value in fields.items() if name != "round"}
    return _leakage_by_round(json.dumps(plan, sort_keys=True))[fields["round"]]


@cache
def _leakage_by_round(plan: str) -> dict[int, dict[str, float | None]]:
    """By round, the means of the images that the tapped clients held."""
    fields = json.loads(plan)
    attack, tapped, rounds = fields.pop("attack"), fields.pop("tapped"), fields["rounds"]
    taps = tuple(f"{client}@{number}" for number in range(1, rounds + 1) for client in range(tapped))
    with tempfile.TemporaryDirectory(prefix="gradveil-") as folder:
        trained, audited = Path(folder) / "training", Path(folder) / "audit"
        run_training(make_training(fields | {"tap": taps}), trained)
        case = {"observations": [str(trained)], "attacks": [attack], "device": fields["device"], "restarts": 1}
        return means_by_round(run_observed(make_observed_case(case), audited))
