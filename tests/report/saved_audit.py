"""Writes a small saved audit in the layout that `gradveil audit` leaves, with real photographs and true scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
from numpy.typing import NDArray
from safetensors.numpy import save_file
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from skimage.transform import resize

Images = NDArray[np.float32]
Z = 1.96


def photographs(count: int, *, channels: int = 3, side: int = 32) -> Images:
    """Real photographs cut and shrunk: [count, channels, side, side] in [0, 1]."""
    sources = [skimage.data.astronaut(), skimage.data.chelsea(), skimage.data.coffee(), skimage.data.rocket()]
    cut = []
    for number in range(count):
        photo = sources[number % len(sources)]
        height, width = photo.shape[:2]
        edge = min(height, width) * 2 // (3 + number // len(sources) % 4)
        top, left = (height - edge) * (number % 3) // 4, (width - edge) * (number % 5) // 5
        cut.append(resize(photo[top : top + edge, left : left + edge], (side, side), anti_aliasing=True))
    images = np.stack(cut).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(images.mean(1, keepdims=True) if channels == 1 else images, dtype=np.float32)


def write_audit(
    folder: Path,
    *,
    defenses: Sequence[str] = ("none", "noise:sigma=0.1"),
    attacks: Sequence[str] = ("ig",),
    images: int = 4,
    channels: int = 3,
    side: int = 32,
) -> Path:
    """A folder with audit.json and its picture files. The first defense protects nothing, each later one more."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    truth = photographs(images, channels=channels, side=side)
    save_pictures(folder / "truth.safetensors", "truth", truth)
    rows = []
    for d, defense in enumerate(defenses):
        for a, attack in enumerate(attacks):
            strength = min(0.05 + 0.35 * d + 0.04 * a, 0.95)
            rows.append(_row(folder, rng, truth, defense, attack, None, strength))
    rows += [_row(folder, rng, truth, defenses[0], "prior-only", attack, 1.0) for attack in attacks]
    audit = {
        "version": 1,
        "complete": True,
        "case": _case(list(defenses), list(attacks), images),
        "environment": {
            "gradveil": "0.1.0",
            "python": "3.11.9",
            "torch": "2.13.0",
            "platform": "Linux x86_64",
            "device": "cpu",
            "threads": 2,
        },
        "rows": rows,
        "verdicts": [_verdict(defense, rows) for defense in defenses],
        "flags": {
            "prior-only as good": {
                "raised_if": "the attack identified no more images than the same search without the update",
                "because": "its pictures may come from the prior alone",
            }
        },
        "grades": {
            "privacy": {"A": 0.1, "B": 0.25, "C": 0.5, "D": 0.75},
            "utility": {"A": 0.01, "B": 0.03, "C": 0.06, "D": 0.12},
        },
    }
    (folder / "audit.json").write_text(json.dumps(audit))
    return folder


def write_full_audit(folder: Path) -> Path:
    """An audit with all there can be: attacks that rank candidates and that know the defense, costs, flags, a chain."""
    defenses = ["none", "noise:sigma=0.1", "clip:bound=1.0+noise:sigma=2", "censor"]
    write_audit(folder, defenses=defenses, attacks=["informed", "identify"], images=3)
    audit = edit_audit(folder)
    for row in audit["rows"]:
        if "identify" in (row["attack"], row["prior_of"]):
            row |= {"candidates": 100, "ranks": [1] * 3, "ranked_first": row["identified"]}
        elif row["prior_of"] is None:
            links = [] if row["defense"] == "none" else row["defense"].split("+")
            row["counter_moves"] = {link: None if link == "censor" else f"It answers {link}." for link in links}
    for verdict in audit["verdicts"][1:]:
        verdict |= _by_choice(*(row for row in audit["rows"] if row["defense"] == verdict["defense"]))
    lost = dict(zip(defenses, (None, 0.02, 0.31, None), strict=True))
    for verdict in audit["verdicts"]:
        if (points := lost[verdict["defense"]]) is not None:
            cost = {"grade": "B", "accuracy": 0.8 - points, "accuracy_lost": points, "time_added": 0.25}
            verdict["cost"] = cost | {"sentence": "It costs."}
    edit_audit(folder, **audit)
    return folder


def _by_choice(informed: dict[str, Any], identify: dict[str, Any], *_: Any) -> dict[str, Any]:
    """What a verdict holds besides where its worst attack chooses among candidates."""
    rebuilt = {key: informed[key] for key in ("attack", "identified", "identified_interval")}
    ranks = {key: identify[key] for key in ("attack", "candidates", "ranked_first")}
    return ranks | {"rebuilt": rebuilt | {"prior_only_identified": 0.0}}


def edit_audit(folder: Path, **changes: Any) -> dict[str, Any]:
    """Replace top-level values of audit.json and return the whole of it."""
    audit: dict[str, Any] = json.loads((folder / "audit.json").read_text()) | changes
    (folder / "audit.json").write_text(json.dumps(audit))
    return audit


def save_pictures(path: Path, kind: str, images: Images) -> None:
    """A file of pictures whose header says what they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"gradveil": json.dumps({"kind": kind, "version": 1, "meta": {}})}
    save_file({"inputs": images, "labels": np.arange(len(images), dtype=np.int64) % 10}, path, metadata=header)


def _row(
    folder: Path,
    rng: np.random.Generator,
    truth: Images,
    defense: str,
    attack: str,
    prior_of: str | None,
    strength: float,
) -> dict[str, Any]:
    """Truth drowned in noise of the given strength: 0 is the truth, 1 is noise alone."""
    noise = rng.normal(0.5, 0.25, truth.shape)
    guess = ((1 - strength) * truth + strength * noise).clip(0, 1).astype(np.float32)
    name = f"cells/{defense}-{attack}-{prior_of}".replace(":", "_").replace("=", "_")
    save_pictures(folder / name / "reconstruction.safetensors", "reconstruction", guess)
    scores = [_scores(i, a, b) for i, (a, b) in enumerate(zip(truth, guess, strict=True))]
    means = {key: float(np.mean([s[key] for s in scores])) for key in ("mse", "psnr", "ssim", "lpips", "identified")}
    return {
        "digest": name,
        "defense": defense,
        "attack": attack,
        "prior_of": prior_of,
        "threat": "C",
        "assumptions": [
            "The adversary sees the update of every round.",
            "It knows the model, the parameters that were broadcast and the client's training recipe.",
            *(["It knows that noise was added, but not which."] if defense.startswith("noise") else []),
        ],
        "images": len(truth),
        **means,
        "mse_r": None,
        "identified_interval": _wilson(means["identified"], len(truth)),
        "identified_by": "lpips",
        "label_accuracy": 1.0 if strength < 0.9 else 0.25,
        "not_available": {"mse_r": "the model has no representation layer"},
        "per_image": scores,
        "objective": strength / 10,
        "seconds": 12.5 + 10 * strength,
        "problem_steps": 300 * len(truth),
        "strategy": "vmap",
        "flags": ["prior-only as good"] if 0.7 < strength < 1 else [],
        "log": {"sigma": 0.1} if defense.startswith("noise") else {},
        "trace": _trace(rng, len(truth), strength),
        "files": {
            "reconstruction": f"{name}/reconstruction.safetensors",
            "observation": f"{name}/observation.safetensors",
            "truth": "truth.safetensors",
        },
    }


def _scores(index: int, truth: Images, guess: Images) -> dict[str, Any]:
    psnr = float(peak_signal_noise_ratio(truth, guess, data_range=1.0))
    ssim = float(structural_similarity(truth, guess, data_range=1.0, channel_axis=0))
    return {
        "index": 100 + 7 * index,
        "label": index % 10,
        "label_guess": index % 10,
        "mse": float(np.mean((truth - guess) ** 2)),
        "psnr": psnr,
        "ssim": ssim,
        "lpips": max(0.0, 0.75 * (1 - ssim)),  # stands in for the real one, which needs weights
        "mse_r": None,
        "rank": 1 if ssim > 0.45 else 7,
        "identified": ssim > 0.45,
        "objective": 1 - ssim,
        "stopped": "budget",
    }


def _trace(rng: np.random.Generator, images: int, strength: float) -> dict[str, Any]:
    steps = np.arange(0, 301, 5)
    fall = 0.02 * strength + np.exp(-steps / (25 + 60 * strength))
    wobble = np.exp(rng.normal(0, 0.05, (images, len(steps))).cumsum(1) * 0.3)
    return {"steps": steps.tolist(), "objective": (fall * wobble).tolist()}


def _wilson(share: float, count: int) -> list[float]:
    middle = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * np.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return [float(max(0.0, middle - half)), float(min(1.0, middle + half))]


def _case(defenses: list[str], attacks: list[str], images: int) -> dict[str, Any]:
    recipe = {"sends": "gradient", "lr": 0.1, "epochs": 1, "batch_size": None, "momentum": 0.0, "weight_decay": 0.0}
    return {
        "data": "cifar10-samples",
        "model": "lenet:init=wide",
        "defenses": defenses,
        "attacks": attacks,
        "threat": "C",
        "images": images,
        "every": 1,
        "batch_size": 1,
        "recipe": recipe | {"train_mode": False},
        "restarts": None,
        "budget": "quick",
        "seed": 0,
        "device": "cpu",
        "gallery": 100,
    }


def _verdict(defense: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    worst = max((r for r in rows if r["defense"] == defense and r["prior_of"] is None), key=lambda r: r["identified"])
    chance = next(r["identified"] for r in rows if r["prior_of"] == worst["attack"])
    count, attack = round(worst["identified"] * worst["images"]), worst["attack"]
    return {
        "defense": defense,
        "grade": "F" if worst["identified_interval"][1] > 0.75 else "C",
        "identified": worst["identified"],
        "identified_interval": worst["identified_interval"],
        "attack": attack,
        "threat": "C",
        "prior_only_identified": chance,
        "images": worst["images"],
        "sentence": f"{count} of {worst['images']} private images were picked out of 100 by what {attack} rebuilt.",
        "flags": worst["flags"],
        "cost": None,
    }
