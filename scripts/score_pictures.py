"""Scores pictures that ``generative_gpu.py`` saved, where the weights of LPIPS are: a table and one JSON row each."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from quality_gpu import ten_images

from gradveil.core.seeding import generator
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.metrics import LPIPS, score


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path, help="npz files, one for each attack")
    parser.add_argument("--images", help="npz with the ten images, where CIFAR-10 cannot be fetched")
    parser.add_argument("--out", type=Path, help="where the rows go, one JSON object a line")
    arguments = parser.parse_args()
    truth = ten_images(arguments.images).batch(range(10))
    test = load("cifar10:split=test")
    others = torch.randperm(len(test), generator=generator(0, "gallery"))
    others = others[others % 1000 != 0][:90]
    gallery, lpips = torch.cat([truth.inputs, test.batch(others).inputs]), LPIPS("vgg")
    rows = []
    for path in arguments.files:
        with np.load(path) as file:
            pictures, defenses = torch.from_numpy(file["pictures"].astype(np.float32) / 65535), file["defenses"]
        for defense, drawn in zip(defenses.tolist(), pictures, strict=True):
            found = score(
                truth,
                Batch(drawn, truth.labels),
                gallery=gallery,
                truth_index=torch.arange(10),
                lpips=lpips,
                representation=None,
            ).means()
            rows.append(
                {"attack": path.stem, "defense": defense, **{key: round(value, 4) for key, value in found.items()}}
            )
            print(json.dumps(rows[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
