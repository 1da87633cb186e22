"""The tables of DCS2 (Wu et al., 2022), with its figures."""

from __future__ import annotations

from collections.abc import Mapping

from gradveil.reproduction.measures import concealed_sample
from gradveil.reproduction.table import (
    Column,
    Figures,
    Table,
    Word,
    attack,
    defense,
    joined,
    left_out,
    same,
)  # fmt: skip

PSNR, SSIM = Column("PSNR", "psnr"), Column("SSIM", "ssim")
LPIPS = Column("LPIPS", "lpips", digits=3)
QUALITY = (PSNR, SSIM)
ACCURACY = Column("accuracy in %", "accuracy")

DIGITS, SAMPLES = {"data": "mnist-samples"}, {"data": "cifar10-samples"}
MNIST = same(model="lenet:init=wide", **DIGITS)
CIFAR = Word({"model": "lenet:init=wide", **SAMPLES}, {"model": "convnet:kernel=5", **SAMPLES})
HAM = left_out("", "ham10000:path=FOLDER,size=224")
CELEBA_224 = left_out("", "celeba:path=FOLDER,size=224")
CELEBA_32 = Word(
    {"model": "lenet:init=wide", **SAMPLES}, {"model": "resnet18", **SAMPLES},
    asks="celeba:path=FOLDER,size=32", instead="CIFAR-10",
)  # fmt: skip

FOR_SEARCHES = "alpha=0.1,beta=0.001,iterations=1000,lr=0.025,sensitive=first"
FOR_IMPRINT = "alpha=30,beta=100,iterations=100,lr=0.025,sensitive=first"
FOR_GGL = "alpha=1,beta=10,iterations=1000,lr=0.025,sensitive=first"
"""The settings of appendix B.3. The step size is that of the authors' release, in pixels from 0 to 1."""
DLG = attack("dlg:iterations=200", "dlg:iterations=600")
GS = attack("ig:iterations=300", "ig:iterations=2000")
GS_ONCE = attack("ig:iterations=300", "ig:iterations=800,restarts=1")
"""On nine wide convolutions, where every step is long."""
GGL = attack("ggl:optimizer=adam,iterations=80", "ggl:optimizer=adam,iterations=400")
IMPRINT = same(attacks="imprint:variant=fedsgd,query=mean,quantiles=public,contrast=50,gain=0.001", threat="G")
PAIRS = Word({"images": 4, "batch_size": 2, "restarts": 2}, {"images": 20, "batch_size": 2, "restarts": 4})
TENS = same(images=40, batch_size=4, restarts=1)
"""Ten clients: what Imprint reads is there at once, and one client in a few can be an exception."""
FOURS = Word({"images": 8, "batch_size": 4, "restarts": 2}, {"images": 40, "batch_size": 4, "restarts": 4})


def _defenses(prune: float, sigma: float, soteria: float, settings: str) -> dict[str, Word]:
    return {
        "-": defense("none"),
        "Prune": defense(f"sparsify:rate={prune}"),
        "Gaussian": defense(f"noise:sigma={sigma}"),
        "Laplacian": defense(f"noise:sigma={sigma},kind=laplace"),
        "Soteria": defense(f"soteria:rate={soteria}"),
        "DCS2": defense(f"dcs2:{settings}"),
        "DCS2+": defense(f"dcs2plus:{settings}"),
    }


Rows = Mapping[str, Mapping[str, tuple[float | None, ...]]]
"""Figures by attack and defense."""


def _sensitive(
    data: str, of: Word, attacks: Mapping[str, Word], defenses: Mapping[str, Word], base: Word, rows: Rows,
    columns: tuple[Column, ...] = QUALITY,
) -> Table:  # fmt: skip
    """How well the sensitive example of each batch is seen."""
    return Table(
        title=f"{data}: {' and '.join(attacks)}",
        headings=("data", "attack", "defense"),
        words=({data: of}, attacks, defenses),
        columns=columns,
        base=base,
        first_of_batch=True,
        figures={(data, name, one): row for name, each in rows.items() for one, row in each.items()},
    )


MNIST_SEARCHES = _sensitive(
    "MNIST", MNIST, {"DLG": DLG, "GS": GS}, _defenses(0.7, 0.01, 0.05, FOR_SEARCHES), PAIRS,
    {
        "DLG": {
            "-": (31.95, 0.75), "Prune": (9.56, 0.24), "Gaussian": (19.51, 0.44), "Laplacian": (16.17, 0.38),
            "Soteria": (11.69, 0.29), "DCS2": (6.64, 0.15), "DCS2+": (5.98, 0.12),
        },
        "GS": {
            "-": (45.25, 0.92), "Prune": (11.69, 0.28), "Gaussian": (22.83, 0.51), "Laplacian": (19.45, 0.44),
            "Soteria": (11.48, 0.22), "DCS2": (10.35, 0.23), "DCS2+": (10.58, 0.22),
        },
    },
)  # fmt: skip
MNIST_IMPRINT = _sensitive(
    "MNIST", MNIST, {"Imprint": IMPRINT}, _defenses(0.3, 0.01, 0.01, FOR_IMPRINT), TENS,
    {
        "Imprint": {
            "-": (82.43, 1.00), "Prune": (75.41, 0.96), "Gaussian": (53.87, 0.99), "Laplacian": (51.35, 0.99),
            "Soteria": (82.43, 1.00), "DCS2": (19.95, 0.60), "DCS2+": (19.95, 0.60),
        },
    },
)  # fmt: skip
CIFAR_SEARCHES = _sensitive(
    "CIFAR10", CIFAR, {"DLG": DLG, "GS": GS_ONCE}, _defenses(0.7, 0.001, 0.9, FOR_SEARCHES), PAIRS,
    {
        "DLG": {
            "-": (15.85, 0.52), "Prune": (13.37, 0.35), "Gaussian": (8.14, 0.12), "Laplacian": (7.57, 0.10),
            "Soteria": (12.22, 0.33), "DCS2": (6.15, 0.10), "DCS2+": (5.49, 0.08),
        },
        "GS": {
            "-": (18.50, 0.65), "Prune": (10.67, 0.22), "Gaussian": (8.73, 0.14), "Laplacian": (7.97, 0.12),
            "Soteria": (9.08, 0.14), "DCS2": (6.34, 0.12), "DCS2+": (6.39, 0.11),
        },
    },
)  # fmt: skip
CIFAR_IMPRINT = _sensitive(
    "CIFAR10", CIFAR, {"Imprint": IMPRINT}, _defenses(0.7, 0.001, 0.9, FOR_IMPRINT), TENS,
    {
        "Imprint": {
            "-": (140.62, 0.98), "Prune": (15.44, 0.54), "Gaussian": (33.21, 0.86), "Laplacian": (32.18, 0.85),
            "Soteria": (140.62, 0.98), "DCS2": (13.46, 0.47), "DCS2+": (14.14, 0.49),
        },
    },
)  # fmt: skip

_TEN_MINUTES = (
    "a hundred rounds for each defense take two cores more than ten minutes; [convergence](../convergence.md) has MNIST"
)
NON_IID = {
    "data": "mnist", "examples": 4000, "clients": 10, "partition": "shards:each=2",
    "model": "lenet:init=wide,normalize=true", "batch_size": 256, "lr": 0.01, "rounds": 100,
    "evaluate_every": 10, "checkpoint_every": 10, "device": "cpu",
}  # fmt: skip
"""On a CPU at every scale: so small a model does not fill a GPU."""
IID = NON_IID | {"examples": 20000, "per_round": 5, "partition": "iid"}
TRAINED = "iterations=10,sensitive=first"


def _learning(defenses: Mapping[str, str], figures: Figures) -> Table:
    """The columns for federated learning, on MNIST."""
    return Table(
        title="MNIST: federated learning",
        headings=("setting", "defense"),
        words=(
            {"IID": Word(None, IID, _TEN_MINUTES), "Non-IID": Word(None, NON_IID, _TEN_MINUTES)},
            {name: same(defense=spec) for name, spec in defenses.items()},
        ),
        columns=(ACCURACY,),
        base=same(),
        kind="training",
        figures=figures,
    )


TABLE_1_LEARNING = _learning(
    {
        "-": "none", "Prune": "sparsify:rate=0.7",
        "Gaussian": "noise:sigma=0.01", "Laplacian": "noise:sigma=0.01,kind=laplace",
        "Soteria": "soteria:rate=0.05", "DCS2": f"dcs2:{TRAINED}", "DCS2+": f"dcs2plus:{TRAINED}",
    },
    {
        ("Non-IID", "-"): (68.03,), ("Non-IID", "Prune"): (66.26,), ("Non-IID", "Gaussian"): (67.99,),
        ("Non-IID", "Laplacian"): (67.80,), ("Non-IID", "Soteria"): (68.05,), ("Non-IID", "DCS2"): (67.98,),
        ("Non-IID", "DCS2+"): (72.46,),
    },
)  # fmt: skip

_WITHOUT_SOTERIA = {
    name: word for name, word in _defenses(0.5, 0.1, 0.5, FOR_IMPRINT).items() if name not in ("Soteria", "DCS2")
}
_LARGE = Word(None, {"model": "resnet18", "images": 8, "batch_size": 4}, "224x224 pixels are for a GPU")
TABLE_2 = tuple(
    _sensitive(name, of, {"Imprint": IMPRINT}, _WITHOUT_SOTERIA, _LARGE, {"Imprint": rows}, (PSNR, SSIM, LPIPS))
    for name, of, rows in (
        ("HAM10000", HAM, {
            "-": (87.87, 0.90, 0.100), "Prune": (48.86, 0.86, 0.209), "Gaussian": (53.56, 0.97, 0.034),
            "Laplacian": (51.73, 0.97, 0.034), "DCS2+": (20.26, 0.83, 0.212),
        }),
        ("CelebA", CELEBA_224, {
            "-": (143.56, 1.00, 0.000), "Prune": (49.35, 0.76, 0.275), "Gaussian": (50.38, 0.84, 0.175),
            "Laplacian": (47.88, 0.82, 0.172), "DCS2+": (13.72, 0.56, 0.402),
        }),
    )
)  # fmt: skip

COMBINED = {
    "-": "none", "Gaussian, 0.001": "noise:sigma=0.001", "Gaussian, 0.01": "noise:sigma=0.01",
    "DCS2+ and Gaussian, 0.001": "dcs2plus:{}+noise:sigma=0.001",
}  # fmt: skip
TABLE_3 = Table(
    title="MNIST: GS, all examples of a batch",
    headings=("data", "defense"),
    words=({"MNIST": MNIST}, {name: defense(spec.format(FOR_SEARCHES)) for name, spec in COMBINED.items()}),
    columns=QUALITY,
    base=joined(FOURS, GS),
    figures={
        ("MNIST", "-"): (25.16, 0.64),
        ("MNIST", "Gaussian, 0.001"): (24.69, 0.63),
        ("MNIST", "Gaussian, 0.01"): (13.64, 0.31),
        ("MNIST", "DCS2+ and Gaussian, 0.001"): (12.74, 0.26),
    },
)
TABLE_3_LEARNING = _learning(
    {name: spec.format(TRAINED) for name, spec in COMBINED.items()},
    {
        ("IID", "-"): (92.08,), ("IID", "Gaussian, 0.001"): (92.07,), ("IID", "Gaussian, 0.01"): (91.91,),
        ("IID", "DCS2+ and Gaussian, 0.001"): (93.12,),
        ("Non-IID", "-"): (68.03,), ("Non-IID", "Gaussian, 0.001"): (68.00,), ("Non-IID", "Gaussian, 0.01"): (67.99,),
        ("Non-IID", "DCS2+ and Gaussian, 0.001"): (72.47,),
    },
)  # fmt: skip

STARTS = {"MNIST": "batch", "QMNIST": "public", "Noise": "noise"}
STARTS_ON_SEARCHES, STARTS_ON_IMPRINT = (
    _sensitive(
        "MNIST", MNIST, attacks,
        {name: defense(f"dcs2plus:{settings},start={kind}") for name, kind in STARTS.items()}, base, rows,
    )
    for attacks, settings, base, rows in (
        ({"DLG": DLG, "GS": GS}, FOR_SEARCHES, PAIRS, {
            "DLG": {"MNIST": (6.00, 0.12), "QMNIST": (6.04, 0.13), "Noise": (5.66, 0.12)},
            "GS": {"MNIST": (10.58, 0.22), "QMNIST": (10.86, 0.23), "Noise": (10.03, 0.19)},
        }),
        ({"Imprint": IMPRINT}, FOR_IMPRINT, TENS, {
            "Imprint": {"MNIST": (19.95, 0.60), "QMNIST": (14.68, 0.57), "Noise": (18.68, 0.35)},
        }),
    )
)  # fmt: skip
TABLE_4_LEARNING = _learning(
    {name: f"dcs2plus:{TRAINED},start={kind}" for name, kind in STARTS.items()},
    {
        ("IID", "MNIST"): (93.11,), ("IID", "QMNIST"): (93.05,), ("IID", "Noise"): (93.13,),
        ("Non-IID", "MNIST"): (72.52,), ("Non-IID", "QMNIST"): (72.50,), ("Non-IID", "Noise"): (72.43,),
    },
)  # fmt: skip

_FACES = {name: word for name, word in _defenses(0.2, 0.1, 0.1, FOR_GGL).items() if name != "DCS2"}
TABLE_5 = tuple(
    _sensitive("CelebA", CELEBA_32, attacks, _FACES, base, rows)
    for attacks, base, rows in (
        ({"GGL": GGL}, PAIRS, {
            "GGL": {
                "-": (11.59, 0.27), "Prune": (10.56, 0.24), "Gaussian": (10.56, 0.24), "Laplacian": (10.69, 0.22),
                "Soteria": (11.50, 0.27), "DCS2+": (8.27, 0.16),
            },
        }),
        ({"Imprint": IMPRINT}, TENS, {
            "Imprint": {
                "-": (155.79, 1.00), "Prune": (140.86, 1.00), "Gaussian": (38.64, 0.99), "Laplacian": (36.87, 0.98),
                "Soteria": (155.79, 1.00), "DCS2+": (19.13, 0.72),
            },
        }),
    )
)  # fmt: skip

TABLE_6 = tuple(
    _sensitive(
        "CIFAR10", CIFAR, attacks,
        {"PRECODE": defense("precode"), "ATS": defense("ats"), "DCS2+": defense(f"dcs2plus:{settings}")}, base, rows,
    )
    for attacks, settings, base, rows in (
        ({"GS": GS}, FOR_SEARCHES, PAIRS, {
            "GS": {"PRECODE": (5.06, 0.07), "ATS": (17.50, 0.47), "DCS2+": (6.43, 0.11)},
        }),
        ({"Imprint": IMPRINT}, FOR_IMPRINT, TENS, {
            "Imprint": {"PRECODE": (120.02, 0.85), "ATS": (49.97, 0.48), "DCS2+": (14.14, 0.49)},
        }),
    )
)  # fmt: skip

_SEVERAL = left_out(
    "no option of the defense names more than one sensitive example of a batch but all, and then none is left to "
    "start from"
)
TABLE_7 = Table(
    title="MNIST: GS, by number of concealed samples",
    headings=("sensitive", "concealed"),
    words=(
        {"m = 1": same(), "m = 2": _SEVERAL, "m = 4": _SEVERAL},
        {f"k = {k}": defense(f"dcs2plus:{FOR_SEARCHES},k={k}") for k in (1, 2, 4)},
    ),
    columns=QUALITY,
    base=joined(PAIRS, GS, MNIST),
    first_of_batch=True,
    figures={
        ("m = 1", "k = 1"): (10.53, 0.12), ("m = 1", "k = 2"): (10.05, 0.11), ("m = 1", "k = 4"): (9.24, 0.10),
        ("m = 2", "k = 1"): (10.40, 0.09), ("m = 2", "k = 2"): (10.21, 0.09), ("m = 2", "k = 4"): (9.75, 0.09),
        ("m = 4", "k = 1"): (10.31, 0.10), ("m = 4", "k = 2"): (9.99, 0.09), ("m = 4", "k = 4"): (9.15, 0.08),
    },
)  # fmt: skip
TABLE_7_LEARNING = _learning(
    {f"k = {k}": f"dcs2plus:{TRAINED},k={k}" for k in (1, 2, 4)},
    {("Non-IID", "k = 1"): (72.46,), ("Non-IID", "k = 2"): (72.40,), ("Non-IID", "k = 4"): (72.46,)},
)

TABLE_8 = Table(
    title="What one concealed sample costs",
    headings=("data",),
    words=(
        {
            "MNIST": same(model="lenet:init=wide", **DIGITS),
            "CIFAR10": same(model="convnet:kernel=5", **SAMPLES),
            "CelebA": Word(None, None, "", "celeba:path=FOLDER,size=224"),
        },
    ),
    columns=(Column("seconds", "seconds"), Column("memory in MB", "megabytes", digits=0)),
    base=Word(
        {"model": "resnet18", "defense": f"dcs2:{FOR_SEARCHES}"},
        {"model": "resnet18", "defense": f"dcs2:{FOR_SEARCHES}"},
    ),
    kind="measure",
    measure=concealed_sample,
    figures={("MNIST",): (7.7, 50), ("CIFAR10",): (25.8, 90), ("CelebA",): (8.8, 1072)},
)
