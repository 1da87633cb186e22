"""Entries of the leaderboard on a machine without the command line's packages and without a network; no trainings.

    PYTHONPATH=src python scripts/leaderboard_gpu.py cifar10-lenet-b1 'cifar10-resnet18-*' --work DIR --limit 560

After ``--limit`` seconds it stops between two steps; the same command goes on where it stopped. All entries of a
setting are written when its audit is done.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
from pathlib import Path

import torch
from lines import Lines

from gradveil.lab.leaderboard import SHOWN, enter, settings_named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+")
    parser.add_argument("--defense", action="append")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, default=Path("out/leaderboard"), help="folder for audits; large")
    parser.add_argument("--out", type=Path, default=Path("docs/leaderboard"))
    parser.add_argument("--keep", type=Path, default=os.environ.get("OUT"), help="copy entries and audits to here")
    parser.add_argument("--limit", type=int, default=0, help="seconds after which to stop; 0: none")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(options.limit)
    try:
        for setting in settings_named(options.settings):
            lines, defenses = Lines(options.work / setting.name / "audit"), options.defense or list(SHOWN)
            for path in enter(
                setting, defenses, options.out, options.work, device=options.device, train=False, progress=lines
            ):
                lines.note(f"entered {path}")
    except KeyboardInterrupt:
        print("stopped; finished rows are kept")
    signal.alarm(0)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        for audit in options.work.glob("*/audit/audit.json"):
            shutil.copy(audit, options.keep / f"{audit.parent.parent.name}.json")
        if (options.out / "results").exists():
            shutil.copytree(options.out / "results", options.keep / "results", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
