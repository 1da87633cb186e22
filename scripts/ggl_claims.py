"""Small studies behind claims of GGL's paper for which `gradveil reproduce` has no table: one JSON object a line.

    PYTHONPATH=src python scripts/ggl_claims.py seeds labels --out docs/results/ggl-claims.jsonl
    PYTHONPATH=src python scripts/ggl_claims.py --out docs/results/ggl-claims.jsonl --page docs/results/ggl-claims.md

A study is a function that yields the settings of a row and the work that measures it; rows that the file has are kept.
They take minutes of one core: a LeNet with wide weights, the first CIFAR-10 samples, one start, short searches.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gradveil.attacks import ATTACKS
from gradveil.attacks.generative import GGL
from gradveil.attacks.parts.population import TuRBO
from gradveil.attacks.parts.search import Problems
from gradveil.core.progress import SILENT
from gradveil.core.seeding import generator
from gradveil.core.trees import dot, map_each, norm
from gradveil.core.types import Batch, Params, Recipe
from gradveil.data import load
from gradveil.lab.reproduce.landscape import observations
from gradveil.metrics.pixel import psnr
from gradveil.threat import Observation

Row = dict[str, Any]
Work = Callable[[], Row]
Study = Iterator[tuple[Row, Work]]
ROOT = Path(__file__).parents[1]
CIFAR, WIDE = load("cifar10-samples"), "lenet:init=wide"
SEARCH = "ggl:optimizer=adam,iterations=100"
SOTERIA, SPARSE = "soteria:rate=0.8", "sparsify:rate=0.9"


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def first(count: int) -> Batch:
    return CIFAR.batch(list(range(count)))


def seen_under(defense: str, private: Batch, **options: Any) -> list[Observation]:
    chosen: Any = {"model": WIDE, "seed": 0, "device": "cpu"} | options
    return observations(private, CIFAR.domain, defense=defense, **chosen)


def attacked(spec: str, seen: Sequence[Observation], truth: Tensor, seeds: Sequence[int] = ()) -> list[float]:
    """The PSNR of every private picture, from one start; a batch is scored in the order of its best match."""
    found = ATTACKS.build(f"{spec},restarts=1")(list(seen), seeds=list(seeds) or range(len(seen)))
    values = []
    for one, true in zip(found, truth.split(len(truth) // len(found)), strict=True):
        each = torch.stack([psnr(one.inputs.clamp(0, 1), picture.expand_as(one.inputs)) for picture in true])
        values += [rounded(value) for value in each.max(dim=1).values.tolist()]
    return values


def crossed(spec: str, defenses: Sequence[str], images: int) -> Row:
    """One attack under several defenses, stepped together: by defense, the PSNR of each picture."""
    private = first(images)
    seen = [one for defense in defenses for one in seen_under(defense, private)]
    found = attacked(spec, seen, private.inputs.repeat(len(defenses), 1, 1, 1), [*range(images)] * len(defenses))
    return {"psnr": {name: found[i * images : (i + 1) * images] for i, name in enumerate(defenses)}}


def over(attacks: Sequence[str], defenses: Sequence[str], images: int) -> Study:
    for spec in attacks:
        yield {"attack": spec, "images": images}, partial(crossed, spec, defenses, images)


def table3() -> Study:
    """G-55, G-57, G-67, G-77: attacks of Table 3 under its defenses, a clip that acts, and clip with noise."""
    clips = ("clip:bound=4", "clip:bound=4,per=global", "clip:bound=4+noise:sigma=0.1")
    attacks = ("ig:iterations=300", "gi:iterations=300", SEARCH)
    return over(attacks, ("none", "noise:sigma=0.1", *clips, SPARSE, SOTERIA), 2)


def dlg() -> Study:
    """G-55, G-67, G-80, G-81: DLG, which needs 1,000 steps here, under clips, sparsification and Soteria by rate."""
    shares = [f"soteria:rate={rate}" for rate in (0.1, 0.4, 0.8)]
    clips = ("clip:bound=4", "clip:bound=4,per=global")
    return over(("dlg:iterations=1000",), ("none", *clips, SPARSE, *shares), 1)


def rates() -> Study:
    """G-79 to G-81, G-83: Soteria by the share that it prunes."""
    shares = [f"soteria:rate={rate}" for rate in (0.1, 0.2, 0.4, 0.6, 0.8)]
    return over(("ig:iterations=300", "gi:iterations=300", SEARCH), ("none", *shares), 2)


def parts() -> Study:
    """G-13, G-19, G-26, G-70, G-96: GGL without one part at a time, and IG with its transform as the control."""
    changes = ("", ",aware=false", ",pruned=anew", ",code=none", ",condition=none", ",condition=wrong")
    attacks = [f"{SEARCH}{change}" for change in (*changes, ",generator=untrained")]
    return over([*attacks, "ig:iterations=300,aware=true"], ("none", "clip:bound=4", SPARSE, SOTERIA), 2)


def settings() -> Study:
    """G-26, G-34, G-98, G-101: the weight of the code's cost, BigGAN's schedule, and codes that a tanh bounds."""
    weights = [f",code_weight={weight}" for weight in (0.0001, 0.001, 0.0155, 1)]
    attacks = [f"{SEARCH}{change}" for change in (*weights, ",code=none", ",schedule=plateau", ",limit=1")]
    return over(attacks, ("none",), 2)


def epsilon() -> Study:
    """G-78: differential privacy of one update (clipped to 4, noise of sigma times 4), by sigma."""
    sigmas = [f"dp:bound=4,sigma={sigma}" for sigma in (0.01, 0.03, 0.1, 1.1)]
    return over((SEARCH,), ("none", "clip:bound=4,per=global", *sigmas), 2)


def budgets() -> Study:
    """G-52: IG and DLG with the paper's number of steps, and with fewer."""
    attacks = (
        "dlg:iterations=300",
        "dlg:iterations=1000",
        "ig:iterations=300",
        "ig:iterations=1000",
        "ig:iterations=8000",
    )
    return over(attacks, ("none",), 1)


def batches() -> Study:
    """G-105: GGL on batches, without a defense and under Soteria; of each picture the best of the batch."""
    for size in (1, 2, 4):

        def work(size: int = size) -> Row:
            private, found = first(4), {}
            for defense in ("none", SOTERIA):
                found[defense] = attacked(SEARCH, seen_under(defense, private, batch_size=size), private.inputs)
            return {"psnr": found}

        yield {"batch": size, "attack": SEARCH}, work


def steps() -> Study:
    """G-106: GGL on updates of several local steps at a rate of 0.01."""
    for count in (1, 2, 5):

        def work(count: int = count) -> Row:
            recipe, private = Recipe(sends="delta", epochs=count, lr=0.01), first(2)
            return {"psnr": {"none": attacked(SEARCH, seen_under("none", private, recipe=recipe), private.inputs)}}

        yield {"steps": count, "attack": SEARCH}, work


def statistics() -> Study:
    """G-107: a ConvNet with batch norm in train mode, whose statistics threat model E gives away, by their weight."""
    for weight in (0, 0.01, 0.1):

        def work(weight: float = weight) -> Row:
            private, found = first(4), {}
            options: Any = {"model": "convnet:width=8", "recipe": Recipe(train_mode=True), "threat": "E"}
            for defense in ("none", "noise:sigma=0.1"):
                seen = seen_under(defense, private, batch_size=2, **options)
                found[defense] = attacked(f"{SEARCH},statistics={weight}", seen, private.inputs)
            return {"psnr": found}

        yield {"statistics": weight, "attack": SEARCH, "batch": 2}, work


def seeds() -> Study:
    """G-53: one update and three seeds of the search alone; the seeds of the first image, then of the next."""
    private, each = first(2), 3
    for spec in ("ig:iterations=300", "gi:iterations=300", SEARCH):

        def work(spec: str = spec) -> Row:
            found, truth = {}, private.inputs.repeat_interleave(each, dim=0)
            for defense in ("none",):
                seen = [one for one in seen_under(defense, private) for _ in range(each)]
                found[defense] = attacked(spec, seen, truth, [*range(each)] * len(private))
            return {"psnr": found}

        yield {"attack": spec, "images": len(private), "each": each}, work


def labels() -> Study:
    """G-82: the same pictures with ten labels, and with two, animals and vehicles, under Soteria."""
    ten = first(2)
    two = Batch(ten.inputs, ((ten.labels >= 2) & (ten.labels <= 7)).long())
    for classes, private in ((10, ten), (2, two)):

        def work(classes: int = classes, private: Batch = private) -> Row:
            found, domain = {}, replace(CIFAR.domain, classes=classes)
            for defense in ("none", "soteria:rate=0.1", "soteria:rate=0.2"):
                seen = observations(private, domain, model=WIDE, defense=defense, seed=0, device="cpu")
                found[defense] = attacked("ig:iterations=300", seen, private.inputs)
            return {"psnr": found}

        yield {"classes": classes, "attack": "ig:iterations=300"}, work


def entries() -> Study:
    """G-68: every entry is cut to a bound (L-infinity), and what that does to length, direction and attacks."""
    for spec in ("ig:iterations=300", SEARCH):
        for bound in (1.0, 0.1, 0.01, 0.001):

            def work(spec: str = spec, bound: float = bound) -> Row:
                private = first(2)
                plain = seen_under("none", private)
                seen = [replace(one, reply=cut(one.reply, bound)) for one in plain]
                before, after = ([float(norm(one.reply)) for one in many] for many in (plain, seen))
                cosines = [
                    float(dot(a.reply, b.reply)) / long / short
                    for a, b, long, short in zip(plain, seen, before, after, strict=True)
                ]
                return {
                    "norm": rounded(float(np.mean(before))),
                    "norm_sent": rounded(float(np.mean(after))),
                    "most": rounded(bound * sum(t.numel() for t in plain[0].reply.values()) ** 0.5),
                    "cosine": rounded(float(np.mean(cosines))),
                    "psnr": {"cut": attacked(spec, seen, private.inputs)},
                }

            yield {"attack": spec, "bound": bound}, work


def cut(update: Params, bound: float) -> Params:
    """A clip to the L-infinity norm that changes directions: every entry by itself."""
    return map_each(lambda tensor: tensor.clamp(-bound, bound), update)


class PlainBO(TuRBO):
    """Bayesian optimisation over the whole box: TuRBO without a region, candidates anywhere."""

    def _proposed(self, model: Any, points: Tensor, values: Tensor, region: Any, rngs: list[torch.Generator]) -> Tensor:
        del values, region
        shape = (self.candidates, points.shape[-1])
        candidates = torch.stack([torch.rand(shape, generator=rng) for rng in rngs]).to(points)
        with torch.no_grad():
            posterior = model.posterior(candidates.double())
            mean, root = posterior.mean[..., 0], posterior.variance[..., 0].clamp_min(0).sqrt()
        noise = torch.stack([torch.randn((self.population, self.candidates), generator=rng) for rng in rngs])
        chosen = (mean[:, None] + root[:, None] * noise.to(mean)).argmax(dim=-1)
        return candidates.gather(1, chosen[..., None].expand(-1, -1, points.shape[-1]))


def bayesian() -> Study:
    """G-28: the objective after 300 evaluations, by how many entries of the code are searched; the others are 0."""
    rounds = 30
    searches = {"random": None, "plain BO": PlainBO(iterations=rounds), "TuRBO": TuRBO(iterations=rounds)}
    for free in (2, 128):
        for name, search in searches.items():

            def work(free: int = free, search: TuRBO | None = search) -> Row:
                attack = ATTACKS.build("ggl:optimizer=turbo,restarts=1")
                assert isinstance(attack, GGL)
                seen = seen_under("none", first(3))
                whole = attack.prepare(seen, range(len(seen)))
                latent = whole.start["code"].shape[-1]

                def evaluate(point: Params) -> tuple[Params, Tensor]:
                    return whole.evaluate({"code": torch.nn.functional.pad(point["code"], (0, latent - free))})

                if search is None:
                    rng, values = generator(0, "random points"), []
                    for _ in range(rounds):
                        points = 4 * torch.rand((10 * len(seen), 1, free), generator=rng) - 2
                        values.append(evaluate({"code": points})[1].view(len(seen), 10))
                    lowest = torch.cat(values, dim=1).min(dim=1).values
                else:
                    problems = Problems(evaluate, {"code": whole.start["code"][..., :free]}, seeds=whole.seeds)
                    with SILENT.task("", None) as task:
                        lowest = search.run(problems, task).objectives
                return {"objective": {"none": [rounded(value) for value in lowest.tolist()]}}

            yield {"entries": free, "search": name, "evaluations": 10 * rounds}, work


def attributes() -> Study:
    """G-73: the four faces of ggl-faces, by column of its picture: how far coarse attributes are from the private ones.

    Grey values are in [0, 1], mean absolute differences over the four faces; colour is the mean spread of channels.
    """
    columns = ("none", "noise:sigma=0.1", "clip:bound=4", SPARSE, SOTERIA, "prior")

    def work() -> Row:
        sheet = torch.from_numpy(np.array(Image.open(ROOT / "docs/images/ggl-faces.png"))).float() / 255
        cells = sheet[2:, 2:].permute(2, 0, 1).unfold(1, 64, 68).unfold(2, 64, 68)  # [3, rows, columns, 64, 64]
        true, *found = (measures(cells[:, :, i].transpose(0, 1)) for i in range(7))
        differences = [{name: float(np.abs(one[name] - true[name]).mean()) for name in true} for one in found]
        return {name: {by: [rounded(d[name])] for by, d in zip(columns, differences, strict=True)} for name in true}

    yield {"images": 4, "picture": "docs/images/ggl-faces.png"}, work


def measures(pictures: Tensor) -> dict[str, np.ndarray]:
    """Coarse attributes of faces [n, 3, 64, 64] that need no classifier."""
    grey = pictures.mean(dim=1)
    sides = torch.cat([grey[:, :48, :6], grey[:, :48, -6:]], dim=2)
    halves = grey[:, :, :32].mean(dim=(1, 2)) - grey[:, :, 32:].mean(dim=(1, 2))
    return {
        "whole": grey.mean(dim=(1, 2)).numpy(),
        "background": sides.mean(dim=(1, 2)).numpy(),
        "hair": grey[:, :14, 20:44].mean(dim=(1, 2)).numpy(),
        "skin": grey[:, 32:44, 20:44].mean(dim=(1, 2)).numpy(),
        "left less right": halves.numpy(),
        "colour": (pictures.amax(dim=1) - pictures.amin(dim=1)).mean(dim=(1, 2)).numpy(),
    }


STUDIES = {
    study.__name__: study
    for study in (
        table3, dlg, rates, parts, settings, epsilon, budgets, batches, steps, statistics, seeds, labels, entries,
        bayesian, attributes,
    )
}  # fmt: skip


def page(rows: list[Row]) -> str:
    """All studies as tables: the settings of each row, then means of what was found."""
    parts = [
        "# Small studies behind claims of GGL's paper",
        """\
Each takes seconds of one core: a LeNet with wide weights, the first CIFAR-10 samples (one to four), one start and short
searches. Cells are the mean PSNR in dB over the images, by defense, unless a study says otherwise; where a row has
several seeds, the deviation between the seeds of one image stands behind it. With so few images differences below some
two decibels say little.""",
        "    PYTHONPATH=src python scripts/ggl_claims.py STUDY --out docs/results/ggl-claims.jsonl",
    ]
    for name, study in STUDIES.items():
        own = [shown(row) for row in rows if row["study"] == name]
        if own:
            columns = list(dict.fromkeys(key for row in own for key in row))
            lines = [columns, ["---"] * len(columns), *([row.get(key, "") for key in columns] for row in own)]
            about = " ".join(str(study.__doc__).split())
            parts += [f"## {name}", about, "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join([*parts, "Rows: [ggl-claims.jsonl](ggl-claims.jsonl)."]) + "\n"


def shown(row: Row) -> dict[str, str]:
    """The cells of a row."""
    cells: dict[str, str] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            for name, each in value.items():
                cell = f"{np.mean(each):.2f}" if key == "psnr" else f"{np.mean(each):.3g}"
                if "each" in row:
                    cell += f" ({np.std(np.reshape(each, (row['images'], -1)), axis=1, ddof=1).mean():.2f})"
                cells[f"`{name}`" if key == "psnr" else f"{key}, `{name}`"] = cell
        elif key not in ("study", "digest", "images", "each"):
            cells[key] = f"`{value}`" if isinstance(value, str) else f"{value:g}"
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="write the page of the rows to here")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    for name in options.studies:
        for key, work in STUDIES[name]():
            digest = hashlib.sha256(json.dumps({"study": name, **key}, sort_keys=True).encode()).hexdigest()[:12]
            if any(row["digest"] == digest for row in rows):
                continue
            rows.append({"study": name, **key, **work(), "digest": digest})
            with options.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    if options.page is not None:
        options.page.write_text(page(rows))


if __name__ == "__main__":
    main()
