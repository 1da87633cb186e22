"""An audit on a machine without the command line's packages and without a network; one line for each finished row.

    PYTHONPATH=src python scripts/audit_gpu.py cases/all-defenses.yaml --npz test.npz --model resnet18 --images 20 \
        --budget thorough --out DIR --limit 1200

Private images are spread evenly over those of the npz (x uint8 [n, 32, 32, 3], y [n]), which are the candidates too.
After ``--limit`` seconds it stops between two steps; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lines import Lines

from gradveil.auditing import make_case, read_case
from gradveil.auditing.run import run
from gradveil.auditing.sources import simulated
from gradveil.data import ImageSet, MemoryImages, load


def images_of(path: str, count: int) -> ImageSet:
    like = load("cifar10-samples")
    with np.load(path) as file:
        images, labels = torch.from_numpy(file["x"][:count]).permute(0, 3, 1, 2), torch.from_numpy(file["y"][:count])
    return MemoryImages(
        name="cifar10 test", images=images.contiguous(), labels=labels.long(), class_names=like.class_names,
        mean=like.mean, std=like.std,
    )  # fmt: skip


def fields_of(options: argparse.Namespace) -> dict[str, Any]:
    """The case of the file with the options over it."""
    said = {
        "model": options.model, "images": options.images, "budget": options.budget, "threat": options.threat,
        "defenses": options.defense, "attacks": options.attack, "seed": options.seed,
    }  # fmt: skip
    fields = read_case(options.case) | {name: value for name, value in said.items() if value is not None}
    return fields | {"device": "cuda" if torch.cuda.is_available() else "cpu"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", type=Path)
    parser.add_argument("--npz", help="test images of CIFAR-10; without it the data of the case")
    parser.add_argument("--candidates", type=int, default=1000, help="how many images of the npz to take")
    parser.add_argument("--model")
    parser.add_argument("--images", type=int)
    parser.add_argument("--budget")
    parser.add_argument("--threat")
    parser.add_argument("--defense", action="append")
    parser.add_argument("--attack", action="append")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out", type=Path, default=Path("audit"), help="folder; large, for it holds every update")
    parser.add_argument("--keep", type=Path, default=os.environ.get("OUT"), help="copy all but the updates to here")
    parser.add_argument("--limit", type=int, default=0, help="seconds after which to stop; 0: none")
    options = parser.parse_args()
    fields, lines = fields_of(options), Lines(options.out)
    data = load(fields["data"]) if options.npz is None else images_of(options.npz, options.candidates)
    if options.npz is not None:
        fields["every"] = max(1, len(data) // fields["images"])
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(options.limit)
    try:
        run(simulated(make_case(fields), data, progress=lines), options.out, resume=True, progress=lines)
        signal.alarm(0)
    except KeyboardInterrupt:
        print(f"stopped after {time.perf_counter() - lines.started:.0f} s; finished rows are kept")
    if options.keep is not None and options.out.exists():
        updates = shutil.ignore_patterns("observations")
        shutil.copytree(options.out, options.keep, ignore=updates, dirs_exist_ok=True)
    print(f"{time.perf_counter() - lines.started:.1f} s on {fields['device']}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
