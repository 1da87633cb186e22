"""Throughput on one GPU for the three standard settings, each way of running apart; one JSON object a line."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from gradveil.lab.bench import throughput

SETTINGS: dict[str, dict[str, Any]] = {
    "lenet": {"model": "lenet:init=wide", "problems": 512, "steps": 40},
    "resnet18": {"model": "resnet18", "problems": 128, "steps": 10},
    "resnet18-224": {"model": "resnet18", "problems": 32, "steps": 10, "size": 224, "classes": 1000},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS))
    parser.add_argument("--attacks", nargs="*", default=["ig", "ig:precision=tf32", "ig:strategy=vmap"])
    arguments = parser.parse_args()
    for name in arguments.settings:
        for attack in arguments.attacks:
            torch.cuda.empty_cache()
            print(json.dumps(throughput(attack=attack, device="cuda", **SETTINGS[name])), flush=True)


if __name__ == "__main__":
    main()
