"""Packs the results of sweeps or reproductions, to be kept: for each folder, TARGET/FOLDER/results.jsonl.gz.

    python scripts/pack_results.py reproductions/censor-1-paper reproductions/ggl-1-paper --to docs/results/paper/cases

Pictures, updates and the curves of searches stay behind. What is packed can be read in place of the folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gradveil.lab.sweeps import ResultFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, required=True, metavar="TARGET")
    options = parser.parse_args()
    for folder in options.folders:
        ResultFolder(folder).pack(options.to / folder.name)
        print(options.to / folder.name)


if __name__ == "__main__":
    main()
