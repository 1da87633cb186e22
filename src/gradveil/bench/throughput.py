"""How many problems the engine steps per second, against a plain eager loop of the same attack in the same process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gradveil import models
from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.parts.matching import Matching
from gradveil.attacks.parts.search import Adam, Search
from gradveil.bench.timing import CIFAR, seconds
from gradveil.client import SimulatedClient, cross_entropy
from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import moved
from gradveil.core.types import Batch, Domain, Recipe
from gradveil.threat import Observation, observe, threat_model


def throughput(
    *, attack: str = "ig", model: str = "lenet:init=wide", problems: int = 16, steps: int = 20, device: str = "cpu",
    domain: Domain = CIFAR,
) -> dict[str, Any]:  # fmt: skip
    """Problem-steps per second of the engine and of the eager loop, each after a warm-up."""
    matching = ATTACKS.build(attack, Budget(1, steps))
    if not isinstance(matching, Matching):
        raise GradveilError(f"attack {attack!r} does not match gradients, so there is no eager loop to compare with")
    seen = observations(model, domain, problems, device)
    ready = matching.prepare(seen, list(range(problems)))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def walk(search: Search) -> None:
        with SILENT.task("", None) as task:
            search.run(ready, task)

    search = Adam(iterations=steps, signed=True)
    walk(replace(search, iterations=2))
    fast = problems * (steps + 1) / seconds(lambda: walk(search), device)  # a search evaluates once more at its end
    slow = _eager_rate(matching, seen[0], device, steps)
    return {
        "bench": "throughput",
        "attack": attack,
        "model": model,
        "input": list(domain.shape),
        "problems": problems,
        "steps": steps,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "strategy": str(ready.plan),
        "problem_steps_per_s": round(fast, 2),
        "baseline_problem_steps_per_s": round(slow, 2),
        "ratio": round(fast / slow, 2),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None,
    }


def observations(model: str, domain: Domain, count: int, device: str) -> list[Observation]:
    """Replies of undefended clients, one random image each, to one broadcast."""
    module = models.build(model, domain, seed=0).to(device)
    recipe = Recipe()
    client = SimulatedClient(module, recipe=recipe)
    sent = moved(client.model.params, device)
    rng = generator(0, "bench")
    inputs, labels = torch.rand((count, *domain.shape), generator=rng), torch.arange(count) % domain.classes
    seen = []
    for i in range(count):
        batch = Batch(inputs[i : i + 1], labels[i : i + 1]).to(device)
        reply = client.reply(sent, batch, Stream.seeded(0)).update
        seen.append(
            observe(
                module=module, model=model, domain=domain, sent=sent, reply=reply, batch=batch, recipe=recipe,
                defense="none", threat=threat_model("C"),
            )
        )  # fmt: skip
    return seen


def _eager_rate(matching: Matching, one: Observation, device: str, steps: int) -> float:
    """The attack as public toolkits write it: one problem, double backward through the module, torch's Adam."""
    module, target = one.module, one.reply
    parameters = dict(module.named_parameters())
    pixels = torch.rand((1, *one.domain.shape), device=device, requires_grad=True)
    labels = torch.zeros(1, dtype=torch.int64, device=device)
    optimizer = torch.optim.Adam([pixels], lr=0.1)
    objective = matching.objective

    def step() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(module(pixels), labels)
        gradient = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        value = objective(dict(zip(parameters, gradient, strict=True)), target)
        value = value + sum(weight * rule(pixels) for weight, rule in matching.phases[0].regularisers)
        (pixels.grad,) = torch.autograd.grad(value, [pixels])
        pixels.grad.sign_()
        optimizer.step()
        with torch.no_grad():
            pixels.clamp_(0, 1)

    def run(count: int) -> None:
        for _ in range(count):
            step()

    run(2)
    return steps / seconds(lambda: run(steps), device)
