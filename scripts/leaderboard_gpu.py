"""Parts of leaderboard entries on a machine without the command line's packages and without a network.

    PYTHONPATH=src python scripts/leaderboard_gpu.py train resnet8 --seed 1 --defense none --work DIR --keep OUT
    PYTHONPATH=src python scripts/leaderboard_gpu.py audit resnet8 --stage trained --part 1 --work DIR --keep OUT

Each part joins its entry below ``--keep`` as soon as it is done; several processes can work there. A trained model is
that of the training without a defense and of the first seed, for which an audit of it waits.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from pathlib import Path

import torch
from lines import Lines

from gradveil.attacks import ATTACKS
from gradveil.auditing.store import Store
from gradveil.core.errors import GradveilError
from gradveil.defenses import DEFENSES
from gradveil.lab.leaderboard import SEEDS, SETTINGS, Entry, Setting, Trained, save_entry
from gradveil.lab.leaderboard.entries import audited_entries, path_of, read_entry
from gradveil.lab.leaderboard.measuring import audit, parameters_of, train


def weights_of(options: argparse.Namespace, setting: Setting) -> Path:
    return options.work / f"{setting.name}_none_{SEEDS[0]}.safetensors"


def trainings(options: argparse.Namespace, setting: Setting) -> None:
    for seed in options.seed or SEEDS:
        for spec in map(DEFENSES.canonical, options.defense or setting.shown):
            entered = read_entry(path_of(options.keep, setting.name, spec))
            first = (spec, seed) == ("none", SEEDS[0]) and not weights_of(options, setting).exists()
            if not first and entered and any(one.seed == seed for one in entered.trainings):
                continue
            started, keep = time.perf_counter(), weights_of(options, setting) if first else None
            try:
                found = Trained(**train(setting, spec, seed, options.device, keep=keep, seconds=options.each))
            except GradveilError as error:
                found = Trained(seed=seed, complete=False, unfit=str(error))
            save_entry(options.keep, Entry(setting=setting.name, defense=spec, trainings=(found,)))
            last = found.accuracy[-1:] or found.unfit
            print(f"{time.perf_counter() - started:6.1f} s {setting.name} {spec} seed {seed}: {last}", flush=True)


def audits(options: argparse.Namespace, setting: Setting) -> None:
    specs = [DEFENSES.canonical(spec) for spec in options.defense or setting.shown]
    folder, trained = options.work / setting.name / f"{options.stage}-{options.part}", None
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(options.limit)
    try:
        if options.stage == "trained":
            while not weights_of(options, setting).exists():
                time.sleep(1)
            trained = parameters_of(weights_of(options, setting), options.device)
        case = setting.case(specs, options.device)
        if options.attack:
            case = case.model_copy(update={"attacks": tuple(map(ATTACKS.canonical, options.attack))})
        found = audit(case, folder, trained, Lines(folder))
    except KeyboardInterrupt:
        print(f"stopped {setting.name} {options.stage} {options.part}; finished rows are kept", flush=True)
        if not (folder / "audit.json").exists():
            return
        found = Store(folder).read_audit()
    signal.alarm(0)
    for entry in audited_entries(setting.name, found, options.stage):
        print(f"entered {save_entry(options.keep, entry)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "audit"])
    parser.add_argument("setting")
    parser.add_argument("--defense", action="append")
    parser.add_argument("--attack", action="append")
    parser.add_argument("--seed", action="append", type=int)
    parser.add_argument("--limit", type=int, default=0, help="seconds after which an audit stops; 0: none")
    parser.add_argument("--each", type=float, default=math.inf, help="seconds after which a training stops")
    parser.add_argument("--stage", choices=["untrained", "trained"], default="untrained")
    parser.add_argument("--part", default="1")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, required=True, help="folder for audits and trainings; large")
    parser.add_argument("--keep", type=Path, required=True, help="folder of the finished parts; small")
    options = parser.parse_args()
    for folder in (options.keep, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    (trainings if options.what == "train" else audits)(options, SETTINGS[options.setting])


if __name__ == "__main__":
    sys.exit(main())
