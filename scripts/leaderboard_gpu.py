"""Parts of leaderboard entries on a machine without the command line's packages and without a network.

    PYTHONPATH=src python scripts/leaderboard_gpu.py train resnet8 --seed 1 --defense none --work DIR --keep OUT
    PYTHONPATH=src python scripts/leaderboard_gpu.py audit resnet8 --stage trained --part 1 --work DIR --keep OUT

Each part becomes a file of its own below ``--keep``, as soon as it is done, and is not measured again; ``collect``
makes entries of them. A trained model is that of the training without a defense and of the first seed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import signal
import sys
import time
from pathlib import Path

import torch
from lines import Lines

from gradveil.auditing import make_case
from gradveil.auditing.store import Store
from gradveil.core.atomic import write_atomically
from gradveil.core.errors import GradveilError
from gradveil.defenses import DEFENSES
from gradveil.lab.leaderboard.entries import path_of
from gradveil.lab.leaderboard.measuring import audit, parameters_of, records, train
from gradveil.lab.leaderboard.settings import SEEDS, SETTINGS


def slug(setting: str, spec: str) -> str:
    return path_of(Path(), setting, spec).name.partition(".json")[0]


def trainings(options: argparse.Namespace) -> None:
    setting = SETTINGS[options.setting]
    for seed in options.seed or SEEDS:
        for spec in map(DEFENSES.canonical, options.defense or setting.shown):
            stem = f"{setting.name}_{slug(setting.name, spec)}_{seed}"
            part = options.keep / f"train_{stem}.json"
            if part.exists():
                continue
            started = time.perf_counter()
            try:
                model = options.work / f"{stem}.safetensors"
                found = train(setting, spec, seed, options.device, keep=model, seconds=options.each)
            except GradveilError as error:
                found = {"seed": seed, "unfit": str(error)}
            write_atomically(part, json.dumps({"setting": setting.name, "defense": spec, "training": found}).encode())
            last = found.get("accuracy", [])[-1:] or found.get("unfit")
            print(f"{time.perf_counter() - started:6.1f} s {setting.name} {spec} seed {seed}: {last}", flush=True)


def audits(options: argparse.Namespace) -> None:
    setting = SETTINGS[options.setting]
    specs = [DEFENSES.canonical(spec) for spec in options.defense or setting.shown]
    part = options.keep / f"audit_{setting.name}_{options.stage}_{options.part}.json.gz"
    folder, trained = options.work / setting.name / f"{options.stage}-{options.part}", None
    if part.exists():
        return
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(options.limit)
    try:
        if options.stage == "trained":
            while not (options.keep / f"train_{setting.name}_none_{SEEDS[0]}.json").exists():
                time.sleep(1)
            trained = parameters_of(options.work / f"{setting.name}_none_{SEEDS[0]}.safetensors", options.device)
        case = setting.case(specs, options.device)
        named = {"attacks": options.attack, "images": options.images, "data": options.data, "budget": options.budget}
        case = make_case(case.as_json() | {name: value for name, value in named.items() if value})
        found = audit(case, folder, trained, Lines(folder))
    except KeyboardInterrupt:
        print(f"stopped {setting.name} {options.stage} {options.part}; finished rows are kept", flush=True)
        if not (folder / "audit.json").exists():
            return
        found = Store(folder).read_audit()
    signal.alarm(0)
    kept = {"setting": setting.name, "case": found.case, "records": records(found, options.stage)}
    write_atomically(part, gzip.compress(json.dumps(kept).encode(), mtime=0))
    print(f"audited {setting.name} {options.stage} {options.part}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "audit"])
    parser.add_argument("setting")
    parser.add_argument("--defense", action="append")
    parser.add_argument("--attack", action="append")
    parser.add_argument("--images", type=int)
    parser.add_argument("--data")
    parser.add_argument("--seed", action="append", type=int)
    parser.add_argument("--budget")
    parser.add_argument("--limit", type=int, default=0, help="seconds after which an audit stops; 0: none")
    parser.add_argument("--each", type=float, default=math.inf, help="seconds after which a training stops")
    parser.add_argument("--stage", choices=["untrained", "trained"], default="untrained")
    parser.add_argument("--part", default="1")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, required=True, help="folder for audits and trainings; large")
    parser.add_argument("--keep", type=Path, required=True, help="folder of the finished parts; small")
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    (trainings if options.what == "train" else audits)(options)


if __name__ == "__main__":
    sys.exit(main())
