"""Attacks: problems that the engine steps per second, and generations of CMA-ES."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import torch

from gradveil import models
from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.parts.matching import Matching
from gradveil.attacks.parts.search import Adam
from gradveil.client import SimulatedClient, cross_entropy
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Silent
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import moved
from gradveil.core.types import Batch, Json, Recipe
from gradveil.domains import Domain
from gradveil.lab.bench.base import CIFAR, benchmark, seconds
from gradveil.threat import Observation, observe, threat_model


@benchmark
def throughput(
    *,
    attack: Annotated[str, "Attack to step."] = "ig",
    model: Annotated[str, "Model, such as resnet18."] = "lenet:init=wide",
    problems: Annotated[int, "Problems stepped together."] = 16,
    steps: Annotated[int, "Timed steps."] = 20,
    size: Annotated[int, "Side of the images."] = 32,
    classes: Annotated[int, "Classes of the images."] = 10,
    device: Annotated[str, "cpu or cuda."] = "cpu",
) -> Json:
    """Problem-steps per second of the engine against a plain eager loop."""
    domain = replace(CIFAR, height=size, width=size, classes=classes)
    matching = ATTACKS.build(attack, Budget(1, steps))
    if not isinstance(matching, Matching):
        raise GradveilError(f"attack {attack!r} does not match gradients, so there is no eager loop to compare with")
    seen = observations(model, domain, problems, device)
    ready = matching.prepare(seen, list(range(problems)))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    search = Adam(iterations=steps, signed=True)
    replace(search, iterations=2).run(ready, Silent())
    walk = partial(search.run, ready, Silent())
    fast = problems * (steps + 1) / seconds(walk, device)  # a search evaluates once more at its end
    slow = _eager_rate(matching, seen[0], device, steps)
    return {
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
        value = value + sum(weight * rule(one.domain, pixels) for weight, rule in matching.phases[0].regularisers)
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


@benchmark
def generation(
    *,
    model: Annotated[str, "Model, such as resnet18."] = "lenet:init=wide",
    images: Annotated[int, "Images that are attacked together."] = 8,
    population: Annotated[int, "Codes in a generation of each."] = 50,
    rounds: Annotated[int, "Timed generations."] = 10,
    generator: Annotated[str, "Generator of the codes."] = "auto",
    device: Annotated[str, "cpu or cuda."] = "cpu",
) -> Json:
    """Time of one generation of CMA-ES against one gradient step on as many codes."""
    seen = observations(model, CIFAR, images, device)
    searches = {
        "generation": f"ggl:generator={generator},optimizer=cma,population={population},restarts=1",
        "step": f"ggl:generator={generator},optimizer=adam,restarts={population}",
    }
    took = {}
    for name, spec in searches.items():
        attack = ATTACKS.build(f"{spec},iterations={rounds}", Budget(1, rounds))
        assert isinstance(attack, Matching)
        ready, search = attack.prepare(seen, list(range(len(seen)))), attack.phases[0].search
        walk = partial(search.run, ready, Silent())
        walk()  # what is prepared once for all rounds is left out
        took[name] = seconds(walk, device) / rounds
    return {
        "generation_ms": round(1e3 * took["generation"], 2),
        "gradient_step_ms": round(1e3 * took["step"], 2),
        "ratio": round(took["generation"] / took["step"], 3),
    }
