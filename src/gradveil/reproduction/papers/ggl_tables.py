"""The tables and figures of GGL (Li et al., CVPR 2022), with its figures."""

from __future__ import annotations

from gradveil.reproduction.landscape import landscape
from gradveil.reproduction.table import Column, Table, Word, attack, by_last, defense, left_out, same

MSE, PSNR = Column("MSE-I", "mse", digits=4), Column("PSNR", "psnr")
LPIPS, MSE_R = Column("LPIPS", "lpips", digits=4), Column("MSE-R", "mse_r", digits=4)
IDENTIFIED = Column("identified", "identified", in_paper=False)
SAMPLES = {"data": "cifar10-samples"}
CELEBA = Word(SAMPLES, SAMPLES, asks="celeba:path=FOLDER,size=32", instead="CIFAR-10")
IMAGENET = left_out("", "imagenet:path=FOLDER")
IN_SMALL = {"model": "lenet:init=wide", "images": 4}
AS_PAPER = {"model": "resnet18", "images": 10}

DISTANCES = {"D1": "squared", "D2": "cosine"}
CODES = {"R1": "kl", "R2": "norm"}
PAIRS = {
    f"{one}, {other}": f"ggl:optimizer=adam,distance={distance},code={code}"
    for one, distance in DISTANCES.items()
    for other, code in CODES.items()
}
TABLE_1 = Table(
    title="GGL by Adam, with each distance and regularizer",
    headings=("data", "loss"),
    words=(
        {"CelebA": CELEBA},
        {name: attack(f"{spec},iterations=150", f"{spec},iterations=1000") for name, spec in PAIRS.items()},
    ),
    columns=(
        MSE, Column("MSE-I, std", "mse", "spread of images", digits=4),
        PSNR, Column("PSNR, std", "psnr", "spread of images"), IDENTIFIED,
    ),
    base=Word(IN_SMALL | {"restarts": 1, "defenses": "none"}, AS_PAPER | {"restarts": 1, "defenses": "none"}),
    figures={
        ("CelebA", "D1, R1"): (0.0320, 0.0173, 15.6814, 2.6387),
        ("CelebA", "D2, R1"): (0.03671, 0.0227, 15.3471, 3.1093),
        ("CelebA", "D1, R2"): (0.0337, 0.0206, 15.5405, 2.7090),
        ("CelebA", "D2, R2"): (0.06290, 0.0815, 14.3249, 4.1627),
    },
)  # fmt: skip

TABLE_2 = Table(
    title="GGL by each optimizer",
    headings=("data", "optimizer"),
    words=(
        {"CelebA": CELEBA, "ImageNet": IMAGENET},
        {
            "Adam": attack("ggl:optimizer=adam,iterations=150", "ggl:optimizer=adam,iterations=1000"),
            "BO": attack("ggl:optimizer=turbo,iterations=30", "ggl:optimizer=turbo,iterations=200"),
            "CMA-ES": attack("ggl:iterations=30", "ggl:iterations=200"),
        },
    ),
    columns=tuple(
        column
        for one in (MSE, PSNR, LPIPS, MSE_R)
        for column in (one, Column(f"{one.title}, std", one.metric, "spread of seeds", one.digits))
    ),
    base=Word(
        IN_SMALL | {"images": 2, "restarts": 1, "defenses": "none"},
        AS_PAPER | {"images": 4, "restarts": 1, "defenses": "none"},
    ),
    seeds={"small": 2, "paper": 3},
    figures={
        ("CelebA", "Adam"): (0.0427, 0.0025, 13.6965, 0.2593, 0.1435, 0.0083, 0.0003, 0.0001),
        ("CelebA", "BO"): (0.0813, 0.0131, 10.9455, 0.6816, 0.2162, 0.0328, 0.0012, 0.0003),
        ("CelebA", "CMA-ES"): (0.0708, 0.0008, 11.4989, 0.0533, 0.2136, 0.0133, 0.0015, 0.0022),
        ("ImageNet", "Adam"): (0.5918, 0.1955, 2.4433, 1.3565, 0.7983, 0.0280, 0.1051, 0.0703),
        ("ImageNet", "BO"): (0.2648, 0.0181, 5.7783, 0.2992, 0.6166, 0.0590, 0.0035, 0.0005),
        ("ImageNet", "CMA-ES"): (0.2667, 0.0119, 5.7420, 0.1988, 0.5736, 0.0209, 0.0018, 0.0002),
    },
)

DEFENSES = {
    "Additive Noise": defense("noise:sigma=0.1"),
    "Gradient Clipping": defense("clip:bound=4"),
    "Gradient Sparsification": defense("sparsify:rate=0.9"),
    "Soteria": defense("soteria:rate=0.8"),
}
NOISE, CLIP, SPARSE, SOTERIA = DEFENSES
ATTACKS = {
    "DLG": attack("dlg:iterations=200", "dlg:iterations=300"),
    "iDLG": attack("idlg:iterations=200", "idlg:iterations=300"),
    "IG": attack("ig:iterations=300", "ig:iterations=1000"),
    "GI": attack("gi:iterations=300", "gi:iterations=1000"),
    "GGL": attack("ggl:iterations=30", "ggl:iterations=200"),
}
TABLE_3 = Table(
    title="Attacks under defenses",
    headings=("data", "attack", "defense"),
    words=({"CelebA": CELEBA, "ImageNet": IMAGENET}, ATTACKS, DEFENSES),
    columns=(MSE, PSNR, LPIPS, MSE_R, IDENTIFIED),
    base=Word(IN_SMALL | {"restarts": 2}, AS_PAPER | {"restarts": 4}),
    figures=by_last(
        DEFENSES,
        {
            ("CelebA", "DLG"): (
                (0.6479, 1.8843, 0.8197, 0.0021),
                (0.2097, 6.7831, 0.7375, 0.0326),
                (0.3335, 4.7679, 0.7986, 0.0155),
                (0.3624, 4.4069, 0.8007, 0.0285),
            ),
            ("CelebA", "iDLG"): (
                (0.6261, 2.0329, 0.8209, 0.0025),
                (0.1960, 7.0762, 0.7280, 0.0326),
                (0.3301, 4.8124, 0.8035, 0.0162),
                (0.3269, 4.8553, 0.8036, 0.0396),
            ),
            ("CelebA", "IG"): (
                (0.4880, 3.1151, 0.8260, 0.0097),
                (0.0543, 12.6517, 0.2998, 0.0003),
                (0.4103, 3.8687, 0.7975, 0.0113),
                (0.3441, 4.6326, 0.8008, 0.0316),
            ),
            ("CelebA", "GI"): (
                (0.5738, 2.4116, 0.8302, 0.0023),
                (0.1790, 7.4701, 0.7142, 0.0322),
                (0.2958, 5.2888, 0.7775, 0.0163),
                (0.3179, 4.9768, 0.7991, 0.0409),
            ),
            ("CelebA", "GGL"): (
                (0.0780, 11.0766, 0.1906, 0.0010),
                (0.0760, 11.1902, 0.1670, 0.0015),
                (0.0768, 11.1466, 0.1620, 0.0007),
                (0.0968, 10.1434, 0.2561, 0.0007),
            ),
            ("ImageNet", "DLG"): (
                (0.7438, 1.2852, 0.9353, 0.0049),
                (0.3809, 4.1912, 0.9798, 2.1610),
                (0.4432, 3.5336, 0.8907, 0.0075),
                (0.5990, 2.2253, 0.9195, 0.5415),
            ),
            ("ImageNet", "iDLG"): (
                (0.7352, 1.3359, 0.9392, 0.0041),
                (0.3699, 4.3190, 0.9473, 1.8810),
                (0.4357, 3.6077, 0.8935, 0.0077),
                (0.6089, 2.1542, 0.9198, 0.5425),
            ),
            ("ImageNet", "IG"): (
                (0.3081, 5.1120, 0.8677, 0.4490),
                (0.1432, 8.4386, 0.7476, 0.0214),
                (0.2993, 5.2376, 0.8805, 0.0501),
                (0.3683, 4.3373, 0.8700, 0.5057),
            ),
            ("ImageNet", "GI"): (
                (0.6593, 1.8090, 0.9448, 0.0031),
                (0.3702, 4.3154, 0.9451, 1.8807),
                (0.4404, 3.5611, 0.8889, 0.0072),
                (0.6235, 2.0511, 0.9169, 0.5792),
            ),
            ("ImageNet", "GGL"): (
                (0.2686, 5.7089, 0.5915, 0.0018),
                (0.2230, 6.5163, 0.5592, 0.0015),
                (0.2141, 6.6920, 0.5170, 0.0017),
                (0.2484, 6.0477, 0.5685, 0.0022),
            ),
        },
    ),
)

RATES = {"0%": defense("none")} | {f"{rate}%": defense(f"soteria:rate={rate / 100}") for rate in (10, 20, 40, 60, 80)}
FIGURE_7 = Table(
    title="Attacks on Soteria by share of pruned entries",
    headings=("data", "attack", "pruned"),
    words=({"CelebA": CELEBA}, ATTACKS, RATES),
    columns=(
        Column("PSNR", "psnr", in_paper=False), Column("LPIPS", "lpips", digits=4, in_paper=False), IDENTIFIED,
    ),
    base=Word(IN_SMALL | {"images": 2, "restarts": 1}, AS_PAPER | {"images": 4, "restarts": 2}),
    figures={("CelebA", name, rate): () for name in ATTACKS for rate in RATES},
)  # fmt: skip

SEEN = {
    "none": same(defense="none"),
    "additive noise": same(defense="noise:sigma=0.1"),
    "gradient clipping": same(defense="clip:bound=4"),
    "gradient sparsification": same(defense="sparsify:rate=0.9"),
    "Soteria": same(defense="soteria:rate=0.8"),
    "CENSOR (not in the paper)": same(defense="censor"),
}
ADVERSARIES = {"plain": same(aware=False), "adapts to the defense": same(aware=True)}
IMAGENET_OR_CIFAR = Word(SAMPLES, SAMPLES, asks="folder:path=FOLDER,size=32", instead="CIFAR-10")
FIGURE_13 = Table(
    title="The objective over a slice of the generator's codes",
    headings=("data", "defense", "adversary"),
    words=(
        {"ImageNet": Word(SAMPLES, SAMPLES, instead="CIFAR-10")},
        SEEN,
        {"plain": same(aware=False), "adapts to the defense": same(aware=True)},
    ),
    columns=(
        Column("rank correlation with MSE", "with_mse", in_paper=False),
        Column("with LPIPS", "with_lpips", in_paper=False),
        Column("objective at the private picture", "at_private", digits=3, in_paper=False),
        Column("lowest", "lowest", digits=3, in_paper=False),
        Column("MSE there", "mse_at_lowest", digits=3, in_paper=False),
    ),
    base=Word(
        {"model": "lenet:init=wide", "points": 15, "steps": 300}, {"model": "resnet18", "points": 31, "steps": 1000}
    ),
    kind="measure",
    measure=landscape,
    figures={("ImageNet", name, how): () for name in SEEN for how in ADVERSARIES},
)
