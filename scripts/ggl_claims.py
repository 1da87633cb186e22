"""Small studies behind claims of GGL's paper for which `gradveil reproduce` has no table: one JSON object a line.

    PYTHONPATH=src python scripts/ggl_claims.py seeds labels --device cuda --out docs/results/ggl-claims.jsonl
    PYTHONPATH=src python scripts/ggl_claims.py --score --out docs/results/ggl-claims.jsonl

A study is a function that yields the settings of a row and the work that measures it; rows that the file has are kept.
Pictures are kept in a folder beside the file, and ``--score`` adds their LPIPS to the rows. Studies of faces need the
assets orl-faces and progan-128.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradveil.attacks import ATTACKS
from gradveil.attacks.generative import GGL
from gradveil.attacks.parts.population import TuRBO
from gradveil.attacks.parts.search import Problems
from gradveil.core.progress import SILENT
from gradveil.core.trees import dot, map_each, norm
from gradveil.core.types import Batch, Params
from gradveil.data import load
from gradveil.lab.reproduce.landscape import observations
from gradveil.metrics import LPIPS
from gradveil.metrics.pixel import psnr, ssim
from gradveil.threat import Observation

Row = dict[str, Any]
Work = Callable[[], Row]
WIDE, HE = "lenet:init=wide", "resnet18:init=he"
CIFAR = load("cifar10-samples")
GENERATIVE = "ggl:optimizer=adam,restarts=1,iterations=400"


def first(count: int) -> Batch:
    return CIFAR.batch(list(range(count)))


def attacked(spec: str, seen: list[Observation], seeds: list[int], truth: Tensor) -> Row:
    """What an attack finds of each observation, beside the pictures that they are of."""
    started = time.perf_counter()
    found = ATTACKS.build(spec)(seen, seeds=seeds)
    took = {"objective": [rounded(one.objective) for one in found], "seconds": round(time.perf_counter() - started, 1)}
    return took | scored(torch.cat([one.inputs for one in found]), truth)


def scored(found: Tensor, truth: Tensor) -> Row:
    found = found.clamp(0, 1).cpu()
    return {
        "psnr": [rounded(value) for value in psnr(found, truth).tolist()],
        "ssim": [rounded(value) for value in ssim(found, truth).tolist()],
        "pictures": {"found": found, "truth": truth},
    }


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def seeds(device: str) -> Iterator[tuple[Row, Work]]:
    """G-53: one update, several seeds of the search alone. Rows list the seeds of the first image, then the next."""
    private, each = first(3), 4
    attacks = ["dlg:iterations=300", "idlg:iterations=300", "ig:iterations=600", "gi:iterations=600", GENERATIVE]
    for model in (WIDE, HE):
        for spec in [*attacks, *(["ggl:iterations=60,restarts=1"] if model == WIDE else [])]:
            one_start = spec if "restarts" in spec else f"{spec},restarts=1"
            for defense in ("none", "sparsify:rate=0.9"):

                def work(model: str = model, spec: str = one_start, defense: str = defense) -> Row:
                    seen = observations(private, CIFAR.domain, model=model, defense=defense, seed=0, device=device)
                    repeated = [one for one in seen for _ in range(each)]
                    truth = private.inputs.repeat_interleave(each, dim=0)
                    return attacked(spec, repeated, list(range(each)) * len(private), truth)

                yield (
                    {"model": model, "attack": one_start, "defense": defense, "images": len(private), "each": each},
                    work,
                )


def labels(device: str) -> Iterator[tuple[Row, Work]]:
    """G-82: the same pictures with ten labels, and with two, animals and vehicles, under Soteria."""
    private = first(6)
    coarse = Batch(private.inputs, ((private.labels >= 2) & (private.labels <= 7)).long())
    for model in (WIDE, HE):
        for spec in ("ig:iterations=600,restarts=1", *(["gi:iterations=600,restarts=1"] if model == WIDE else [])):
            for classes, batch in ((10, private), (2, coarse)):
                domain = replace(CIFAR.domain, classes=classes)
                for rate in (0.0, 0.1, 0.4, 0.8):
                    defense = f"soteria:rate={rate}" if rate else "none"

                    def work(
                        model: str = model,
                        spec: str = spec,
                        batch: Batch = batch,
                        domain: Any = domain,
                        by: str = defense,
                    ) -> Row:
                        seen = observations(batch, domain, model=model, defense=by, seed=0, device=device)
                        return attacked(spec, seen, list(range(len(batch))), batch.inputs)

                    yield {"model": model, "attack": spec, "classes": classes, "defense": defense}, work


def entries(device: str) -> Iterator[tuple[Row, Work]]:
    """G-68: IG and GGL where single entries are clipped, and what that does to length and direction."""
    private = first(4)
    for model in (WIDE, HE):
        for spec in ("ig:iterations=600,restarts=1", "ig:iterations=600,restarts=1,aware=true", GENERATIVE):
            for bound in (None, 0.1, 0.01, 0.001, 0.0001):

                def work(model: str = model, spec: str = spec, bound: float | None = bound) -> Row:
                    plain = observations(private, CIFAR.domain, model=model, defense="none", seed=0, device=device)
                    seen = plain if bound is None else [replace(one, reply=cut(one.reply, bound)) for one in plain]
                    lengths = [[float(norm(one.reply)) for one in many] for many in (plain, seen)]
                    cosines = [
                        float(dot(a.reply, b.reply)) / before / after
                        for a, b, before, after in zip(plain, seen, *lengths, strict=True)
                    ]
                    facts = {
                        "norm": rounded(np.mean(lengths[0])),
                        "norm_sent": rounded(np.mean(lengths[1])),
                        "cosine": rounded(np.mean(cosines)),
                        "largest_entry": rounded(max(float(t.abs().max()) for t in plain[0].reply.values())),
                        "entries": sum(t.numel() for t in plain[0].reply.values()),
                    }
                    return facts | attacked(spec, seen, list(range(len(private))), private.inputs)

                yield {"model": model, "attack": spec, "bound": bound}, work


def cut(update: Params, bound: float) -> Params:
    """A clip to the L-infinity norm that changes directions: every entry by itself."""
    return map_each(lambda tensor: tensor.clamp(-bound, bound), update)


class PlainBO(TuRBO):
    """Bayesian optimisation over the whole box: TuRBO without a region, candidates anywhere."""

    def _proposed(self, model: Any, points: Tensor, values: Tensor, region: Any, rngs: list[torch.Generator]) -> Tensor:  # noqa: ARG002
        shape = (self.candidates, points.shape[-1])
        candidates = torch.stack([torch.rand(shape, generator=rng) for rng in rngs]).to(points)
        with torch.no_grad():
            posterior = model.posterior(candidates.double())
            mean, root = posterior.mean[..., 0], posterior.variance[..., 0].clamp_min(0).sqrt()
        noise = torch.stack([torch.randn((self.population, self.candidates), generator=rng) for rng in rngs])
        chosen = (mean[:, None] + root[:, None] * noise.to(mean)).argmax(dim=-1)
        return candidates.gather(1, chosen[..., None].expand(-1, -1, points.shape[-1]))


def bayesian(device: str) -> Iterator[tuple[Row, Work]]:
    """G-28: random points, plain Bayesian optimisation and TuRBO by how many entries of the code are searched."""
    private, rounds = first(4), 40
    searches = {
        "random": TuRBO(iterations=rounds, initial=10 * rounds),
        "plain BO": PlainBO(iterations=rounds),
        "TuRBO": TuRBO(iterations=rounds),
    }
    for free in (2, 8, 32, 128):
        for name, search in searches.items():

            def work(free: int = free, name: str = name, search: TuRBO = search) -> Row:
                attack = ATTACKS.build("ggl:optimizer=turbo,restarts=1")
                assert isinstance(attack, GGL)
                seen = observations(private, CIFAR.domain, model=WIDE, defense="none", seed=0, device=device)
                whole = attack.prepare(seen, list(range(len(seen))))
                latent = whole.start["code"].shape[-1]

                def evaluate(point: Params) -> tuple[Params, Tensor]:
                    return whole.evaluate({"code": torch.nn.functional.pad(point["code"], (0, latent - free))})

                start = {"code": whole.start["code"][..., :free]}
                with SILENT.task("", None) as task:
                    if name == "random":  # all its points are first points
                        drawn = [search._first(10 * rounds, free, torch.Generator().manual_seed(i)) for i in range(4)]
                        codes = ((2 * torch.stack(drawn) - 1) * search.box).to(start["code"])[:, :, None]
                        values = [
                            evaluate({"code": codes[:, i : i + 10].flatten(0, 1)})[1].view(len(seen), 10)
                            for i in range(0, 10 * rounds, 10)
                        ]
                        lowest = torch.cat(values, dim=1).min(dim=1).values
                    else:
                        problems = Problems(evaluate=evaluate, start=start, seeds=whole.seeds)
                        lowest = search.run(problems, task).objectives
                return {"objective": [rounded(value) for value in lowest.tolist()]}

            yield {"free": free, "search": name, "evaluations": 10 * rounds, "model": WIDE}, work


def faces(count: int, every: int = 37) -> tuple[Batch, Any]:
    data = load("orl-faces:channels=3,size=64")
    return data.batch([every * i for i in range(count)]), data.domain


PROGAN = "ggl:generator=progan-128:size=64,restarts=1,precision=bfloat16"
TABLE_3 = ("none", "soteria:rate=0.8", "noise:sigma=0.1", "clip:bound=4,per=global", "sparsify:rate=0.9")
SEARCHES = {
    "Adam": f"{PROGAN},optimizer=adam,iterations=500",
    "Adam, BigGAN's schedule": f"{PROGAN},optimizer=adam,schedule=plateau,iterations=500",
    "CMA-ES": f"{PROGAN},iterations=60",
    "TuRBO": f"{PROGAN},optimizer=turbo,iterations=60",
}


def searches(device: str) -> Iterator[tuple[Row, Work]]:
    """G-27, G-37 to G-39, G-43: Adam, CMA-ES and TuRBO on a deep generator, three seeds of the search each."""
    for name, spec in SEARCHES.items():

        def work(spec: str = spec) -> Row:
            private, domain = faces(3)
            seen = observations(private, domain, model=HE, defense="none", seed=0, device=device)
            repeated = [one for one in seen for _ in range(3)]
            return attacked(spec, repeated, [0, 1, 2] * 3, private.inputs.repeat_interleave(3, dim=0))

        yield {"search": name, "model": HE, "attack": spec, "images": 3, "each": 3}, work


def shifted(device: str) -> Iterator[tuple[Row, Work]]:
    """G-40: aligned faces, and the same ones moved by a quarter to the side and mirrored at the edge."""
    for name in ("Adam", "CMA-ES"):
        for moved in (0, 16):

            def work(spec: str = SEARCHES[name], moved: int = moved) -> Row:
                private, domain = faces(4)
                wide = (
                    torch.nn.functional.pad(private.inputs, (moved, 0, 0, 0), mode="reflect")
                    if moved
                    else private.inputs
                )
                private = Batch(wide[..., :64], private.labels)
                seen = observations(private, domain, model=HE, defense="none", seed=0, device=device)
                return attacked(spec, seen, list(range(4)), private.inputs)

            yield {"search": name, "moved": moved, "model": HE}, work


def others(device: str) -> Iterator[tuple[Row, Work]]:
    """Table 3 on faces: IG and GI under its defenses, on the first four faces of ``attributes``, which has GGL."""
    for spec in ("ig:iterations=600,restarts=1", "gi:iterations=600,restarts=1"):
        for defense in TABLE_3:

            def work(spec: str = spec, defense: str = defense) -> Row:
                private, domain = faces(4, every=33)
                seen = observations(private, domain, model=HE, defense=defense, seed=0, device=device)
                return attacked(spec, seen, list(range(4)), private.inputs)

            yield {"defense": defense, "attack": spec, "model": HE, "images": 4}, work


def attributes(device: str) -> Iterator[tuple[Row, Work]]:
    """G-73: what of a face comes through, by correlation over faces, with the search without the update beside it."""
    for defense in TABLE_3:
        for prior in (False, True) if defense == "none" else (False,):

            def work(defense: str = defense, prior: bool = prior) -> Row:
                private, domain = faces(12, every=33)
                seen = observations(private, domain, model=HE, defense=defense, seed=0, device=device)
                spec = SEARCHES["Adam"].replace("500", "300")
                if prior:
                    alone = ATTACKS.build(spec).prior_only()
                    assert alone is not None
                    found = scored(torch.cat([one.inputs for one in alone(seen)]), private.inputs)
                else:
                    found = attacked(spec, seen, list(range(12)), private.inputs)
                drawn, true = measures(found["pictures"]["found"]), measures(private.inputs)
                found["correlation"] = {
                    name: rounded(float(np.corrcoef(drawn[name], true[name])[0, 1])) for name in true
                }
                return found

            yield {"defense": defense, "prior": prior, "model": HE, "images": 12}, work


def measures(pictures: Tensor) -> dict[str, np.ndarray]:
    """Coarse attributes of faces [n, 3, 64, 64] that need no classifier."""
    grey = pictures.mean(dim=1).cpu()
    sides = torch.cat([grey[:, :48, :6], grey[:, :48, -6:]], dim=2)
    return {
        "grey of the whole": grey.mean(dim=(1, 2)).numpy(),
        "background (sides)": sides.mean(dim=(1, 2)).numpy(),
        "hair (above the forehead)": grey[:, :14, 20:44].mean(dim=(1, 2)).numpy(),
        "skin (cheeks)": grey[:, 32:44, 20:44].mean(dim=(1, 2)).numpy(),
        "pose and light (left less right)": (
            grey[:, :, :32].mean(dim=(1, 2)) - grey[:, :, 32:].mean(dim=(1, 2))
        ).numpy(),
    }


def foreign(device: str) -> Iterator[tuple[Row, Work]]:
    """G-40, G-84, G-110: one set of pictures, with generators of these, of others, and of nothing."""
    pairs = {
        "cifar10-samples": ("cifar10", "untrained"),
        "orl-faces:channels=3,size=32": ("progan-128:size=32", "cifar10,condition=none", "untrained"),
        "mnist-samples": ("mnist", "untrained"),
        "fashion-mnist": ("mnist,condition=none", "untrained"),
    }
    for spec, generators in pairs.items():
        for drawn_by in generators:

            def work(spec: str = spec, drawn_by: str = drawn_by) -> Row:
                data = load(spec)
                private = data.batch([37 * i % len(data) for i in range(8)])
                seen = observations(private, data.domain, model=WIDE, defense="none", seed=0, device=device)
                return attacked(f"{GENERATIVE},generator={drawn_by}", seen, list(range(8)), private.inputs)

            yield {"data": spec, "generator": drawn_by, "model": WIDE, "images": 8}, work


STUDIES = {
    study.__name__: study
    for study in (seeds, labels, entries, bayesian, searches, shifted, others, attributes, foreign)
}


def add_scores(out: Path) -> None:
    """LPIPS for rows whose pictures lie beside the file."""
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for row in rows:
        path = out.with_suffix("") / f"{row['digest']}.npz"
        if "lpips" not in row and path.exists():
            with np.load(path) as file:
                found, truth = (torch.from_numpy(file[name]).float() / 255 for name in ("found", "truth"))
            row["lpips"] = [rounded(value) for value in LPIPS("vgg").distance(found, truth).tolist()]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


RESULTS = ("digest", "device", "seconds", "ssim")
"""What rows hold and the page leaves out."""


def page(rows: list[Row]) -> str:
    """All studies as tables: the settings of each row, then means of what was found."""
    parts = [
        "# Small studies behind claims of GGL's paper",
        """\
Means over images: PSNR in dB, LPIPS by VGG, the objective as a share of the update's square. Where a row has several
seeds, `spread` is the deviation of PSNR between the seeds of one image, averaged over the images.""",
        "    PYTHONPATH=src python scripts/ggl_claims.py STUDY --device cuda --out docs/results/ggl-claims.jsonl",
    ]
    for name, study in STUDIES.items():
        own = [shown(row) for row in rows if row["study"] == name]
        if own:
            columns = list(dict.fromkeys(key for row in own for key in row))
            lines = [columns, ["---"] * len(columns), *([row.get(key, "") for key in columns] for row in own)]
            parts += [f"## {name}", str(study.__doc__), "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join([*parts, "Rows: [ggl-claims.jsonl](ggl-claims.jsonl)."]) + "\n"


def shown(row: Row) -> dict[str, str]:
    """The cells of a row."""
    cells: dict[str, str] = {}
    for key, value in row.items():
        if isinstance(value, list):
            digits = {"psnr": 2, "lpips": 3}.get(key)
            cells[key] = f"{np.mean(value):.3g}" if digits is None else f"{np.mean(value):.{digits}f}"
            if key == "psnr" and "each" in row:
                cells["spread"] = f"{np.std(np.reshape(value, (row['images'], -1)), axis=1, ddof=1).mean():.2f}"
        elif isinstance(value, dict):
            cells |= {name: f"{number:.2f}" for name, number in value.items()}
        elif key != "study":
            cells[key] = (
                f"`{value}`" if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
            )
    return {key: cell for key, cell in cells.items() if key not in RESULTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows with this text in their settings")
    parser.add_argument("--score", action="store_true", help="run nothing: add LPIPS to the rows")
    parser.add_argument("--page", type=Path, help="write the page of the rows to here")
    options = parser.parse_args()
    if options.score:
        add_scores(options.out)
    done = (
        {json.loads(line)["digest"] for line in options.out.read_text().splitlines()} if options.out.exists() else set()
    )
    for name in options.studies:
        for settings, work in STUDIES[name](options.device):
            key = {"study": name, **settings}
            digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
            if digest in done or options.only not in json.dumps(key):
                continue
            row = key | {"digest": digest, "device": options.device} | work()
            if pictures := row.pop("pictures", {}):
                bytes_of = {name: (255 * images).round().byte().numpy() for name, images in pictures.items()}
                options.out.with_suffix("").mkdir(exist_ok=True)
                np.savez_compressed(options.out.with_suffix("") / f"{digest}.npz", **bytes_of)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if options.page is not None:
        options.page.write_text(page([json.loads(line) for line in options.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
