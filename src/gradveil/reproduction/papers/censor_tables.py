"""The tables and figures of CENSOR (Zhang et al., NDSS 2025), with its figures."""

from __future__ import annotations

from gradveil.reproduction.measures import leakage_in_round, step_overhead
from gradveil.reproduction.table import (
    Column,
    Table,
    Word,
    attack,
    by_last,
    defense,
    joined,
    left_out,
    same,
)  # fmt: skip

MSE, LPIPS = Column("MSE", "mse", digits=4), Column("LPIPS", "lpips", digits=4)
PSNR, SSIM = Column("PSNR", "psnr"), Column("SSIM", "ssim", digits=4)
IDENTIFIED = Column("identified", "identified", in_paper=False)
FALLBACK = Column("no trial lowered the loss", "fallback_rate", in_paper=False)
QUALITY = (MSE, LPIPS, PSNR, SSIM, IDENTIFIED)

DEFENSES = {
    "No Defense": defense("none"),
    "Noise": defense("noise:sigma=0.1"),
    "Clipping": defense("clip:bound=4"),
    "Sparsi": defense("sparsify:rate=0.9"),
    "Soteria": defense("soteria:rate=0.8"),
    "CENSOR": defense("censor"),
}
ATTACKS = {
    "IG": attack("ig:iterations=300", "ig:iterations=1000"),
    "GI": attack("gi:iterations=300", "gi:iterations=1000"),
    "GGL": attack("ggl:optimizer=adam,iterations=80", "ggl:optimizer=adam,iterations=400"),
    "GIAS": attack("gias:iterations=48,restarts=1", "gias:iterations=500"),
    "GIFD": attack("gifd:iterations=80", "gifd:iterations=600"),
}
SAMPLES = {"data": "cifar10-samples"}
IN_SMALL = {"model": "lenet:init=wide", "images": 4, "restarts": 2, **SAMPLES}
AS_PAPER = {"model": "resnet18", "images": 10, "restarts": 4, **SAMPLES}
BASE = Word(IN_SMALL, AS_PAPER)
CIFAR = Word(SAMPLES, {"data": "cifar10:split=test", "every": 1000})
IMAGENET = left_out("", "imagenet:path=FOLDER")
FFHQ = left_out("", "folder:path=FOLDER,size=64")
IMAGENET_OR_CIFAR = Word(SAMPLES, SAMPLES, asks="imagenet:path=FOLDER", instead="CIFAR-10")
FFHQ_OR_CIFAR = Word(SAMPLES, SAMPLES, asks="folder:path=FOLDER,size=64", instead="CIFAR-10")

TABLE_1 = Table(
    title="Attacks against defenses, one image behind each gradient",
    headings=("data", "attack", "defense"),
    words=({"ImageNet": IMAGENET, "FFHQ": FFHQ, "CIFAR-10": CIFAR}, ATTACKS, DEFENSES),
    columns=QUALITY,
    base=BASE,
    figures=by_last(
        DEFENSES,
        {
            ("ImageNet", "IG"): (
                (0.0195, 0.5574, 17.819, 0.2309),
                (0.0246, 0.6294, 16.338, 0.1754),
                (0.0167, 0.5008, 18.883, 0.3128),
                (0.0137, 0.4945, 19.383, 0.3419),
                (0.0662, 0.7596, 12.220, 0.0135),
                (0.0600, 0.7551, 12.463, 0.0067),
            ),
            ("ImageNet", "GI"): (
                (0.0191, 0.5402, 17.908, 0.2400),
                (0.0269, 0.6300, 15.883, 0.1549),
                (0.0383, 0.7302, 14.844, 0.0106),
                (0.0157, 0.4941, 18.799, 0.3099),
                (0.0682, 0.7485, 12.215, 0.0134),
                (0.0416, 0.8615, 14.446, 0.0021),
            ),
            ("ImageNet", "GGL"): (
                (0.0453, 0.5952, 13.873, 0.0745),
                (0.0410, 0.5697, 14.252, 0.0817),
                (0.0477, 0.5823, 13.520, 0.0749),
                (0.0456, 0.6080, 13.743, 0.0776),
                (0.0461, 0.5986, 13.879, 0.0708),
                (0.0419, 0.7912, 14.262, 0.0094),
            ),
            ("ImageNet", "GIAS"): (
                (0.0191, 0.4795, 18.452, 0.3099),
                (0.0253, 0.5947, 16.601, 0.1854),
                (0.0203, 0.4825, 18.738, 0.3186),
                (0.0135, 0.3981, 20.483, 0.4182),
                (0.0245, 0.4986, 17.646, 0.2664),
                (0.0650, 0.7591, 12.266, 0.0139),
            ),
            ("ImageNet", "GIFD"): (
                (0.0130, 0.3782, 21.364, 0.4528),
                (0.0196, 0.5380, 18.166, 0.2686),
                (0.0150, 0.4433, 19.547, 0.3798),
                (0.0179, 0.4444, 19.486, 0.3686),
                (0.0139, 0.3967, 20.602, 0.4335),
                (0.0507, 0.7610, 13.323, 0.0094),
            ),
            ("FFHQ", "IG"): (
                (0.0143, 0.5247, 18.666, 0.4209),
                (0.0311, 0.6666, 15.298, 0.2377),
                (0.0262, 0.6245, 15.963, 0.2865),
                (0.0225, 0.5745, 17.113, 0.3411),
                (0.1124, 0.8446, 9.662, 0.0165),
                (0.1009, 0.8347, 10.125, 0.0080),
            ),
            ("FFHQ", "GI"): (
                (0.0194, 0.5692, 17.246, 0.3490),
                (0.0388, 0.7131, 14.243, 0.1507),
                (0.0593, 0.8223, 12.514, 0.0080),
                (0.0278, 0.6189, 16.068, 0.2889),
                (0.1105, 0.8467, 9.753, 0.0157),
                (0.0992, 0.8335, 10.550, 0.0061),
            ),
            ("FFHQ", "GGL"): (
                (0.0421, 0.5424, 14.167, 0.1953),
                (0.0454, 0.5784, 13.866, 0.1752),
                (0.0381, 0.4881, 14.571, 0.2286),
                (0.0421, 0.5479, 14.182, 0.2035),
                (0.0438, 0.5279, 13.842, 0.2014),
                (0.0823, 0.8155, 10.947, 0.0219),
            ),
            ("FFHQ", "GIAS"): (
                (0.0173, 0.4228, 18.738, 0.4792),
                (0.0225, 0.5878, 17.070, 0.3449),
                (0.0171, 0.4267, 18.693, 0.4808),
                (0.0146, 0.4057, 19.490, 0.5130),
                (0.0114, 0.3560, 20.551, 0.5489),
                (0.1108, 0.7895, 9.613, 0.0268),
            ),
            ("FFHQ", "GIFD"): (
                (0.0149, 0.4353, 20.116, 0.5102),
                (0.0190, 0.5250, 17.953, 0.3972),
                (0.0147, 0.4353, 20.113, 0.5139),
                (0.0125, 0.4070, 20.581, 0.5423),
                (0.0165, 0.4686, 19.296, 0.4789),
                (0.1037, 0.8097, 9.904, 0.0195),
            ),
            ("CIFAR-10", "IG"): (
                (0.0023, 0.0905, 26.324, 0.8139),
                (0.0052, 0.2229, 22.810, 0.7010),
                (0.0036, 0.1050, 24.396, 0.8048),
                (0.0093, 0.3210, 20.311, 0.5933),
                (0.0558, 0.5846, 12.537, 0.1222),
                (0.0939, 0.6884, 10.272, 0.0112),
            ),
            ("CIFAR-10", "GI"): (
                (0.0192, 0.3909, 17.170, 0.4574),
                (0.0060, 0.2587, 22.242, 0.7241),
                (0.0496, 0.5317, 13.042, 0.0482),
                (0.0041, 0.1631, 23.841, 0.7614),
                (0.0891, 0.6986, 10.501, 0.0378),
                (0.0806, 0.7006, 10.937, 0.0167),
            ),
            ("CIFAR-10", "GGL"): (
                (0.0275, 0.5569, 15.601, 0.1099),
                (0.0292, 0.5974, 15.339, 0.1002),
                (0.0689, 0.6125, 11.621, 0.0935),
                (0.0583, 0.6491, 12.340, 0.1407),
                (0.0326, 0.6274, 14.867, 0.0731),
                (0.0260, 0.7159, 15.857, 0.0179),
            ),
            ("CIFAR-10", "GIAS"): (
                (0.0009, 0.0333, 30.414, 0.9276),
                (0.0022, 0.2600, 26.660, 0.6555),
                (0.0014, 0.0568, 28.567, 0.8863),
                (0.0003, 0.0100, 35.652, 0.9631),
                (0.0012, 0.0461, 29.308, 0.9050),
                (0.0789, 0.6819, 11.027, 0.0789),
            ),
            ("CIFAR-10", "GIFD"): (
                (0.0201, 0.5297, 16.968, 0.2408),
                (0.0137, 0.5166, 18.648, 0.3581),
                (0.0228, 0.5492, 16.426, 0.2179),
                (0.0297, 0.4557, 15.267, 0.2432),
                (0.0239, 0.5577, 16.222, 0.3907),
                (0.0916, 0.6398, 10.381, 0.1452),
            ),
        },
    ),
)

TABLE_2 = Table(
    title="Four images behind each gradient",
    headings=("data", "attack", "defense"),
    words=({"ImageNet": IMAGENET_OR_CIFAR}, {name: ATTACKS[name] for name in ("GIAS", "GIFD")}, DEFENSES),
    columns=QUALITY,
    base=Word(IN_SMALL | {"images": 8, "batch_size": 4}, AS_PAPER | {"images": 12, "batch_size": 4}),
    figures=by_last(
        DEFENSES,
        {
            ("ImageNet", "GIAS"): (
                (0.0249, 0.5569, 16.519, 0.2096),
                (0.0368, 0.6551, 14.776, 0.1077),
                (0.0267, 0.5666, 16.223, 0.2100),
                (0.0284, 0.5650, 16.137, 0.2128),
                (0.0259, 0.5641, 16.536, 0.2037),
                (0.0776, 0.7680, 11.686, 0.0099),
            ),
            ("ImageNet", "GIFD"): (
                (0.0271, 0.5582, 16.332, 0.2309),
                (0.0350, 0.6401, 14.991, 0.1338),
                (0.0294, 0.5655, 15.943, 0.2092),
                (0.0286, 0.5587, 16.256, 0.2221),
                (0.0284, 0.5593, 16.174, 0.2247),
                (0.0686, 0.7614, 12.245, 0.0088),
            ),
        },
    ),
)

TABLE_3 = Table(
    title="GIFD on CENSOR, without and with expectation over transformation",
    headings=("data", "EOT"),
    words=(
        {"ImageNet": IMAGENET_OR_CIFAR, "FFHQ": FFHQ_OR_CIFAR},
        {
            "w/o": attack("gifd:iterations=80", "gifd:iterations=600"),
            "w/.": attack("gifd:iterations=80,draws=8", "gifd:iterations=600,draws=8"),
        },
    ),
    columns=QUALITY,
    base=Word(IN_SMALL | {"defenses": "censor"}, AS_PAPER | {"defenses": "censor", "restarts": 1}),
    figures={
        ("ImageNet", "w/o"): (0.0507, 0.7610, 13.32, 0.0094),
        ("ImageNet", "w/."): (0.0518, 0.7668, 13.39, 0.0087),
        ("FFHQ", "w/o"): (0.1037, 0.8097, 9.90, 0.0195),
        ("FFHQ", "w/."): (0.1098, 0.8340, 9.82, 0.0195),
    },
)

TABLE_5 = Table(
    title="GIFD on CENSOR in the first ten rounds",
    headings=("data", "round"),
    words=({"ImageNet": IMAGENET_OR_CIFAR}, {str(number): same(round=number + 1) for number in range(10)}),
    columns=QUALITY,
    base=joined(
        same(clients=20, rounds=10, algorithm="fedsgd", batch_size=1, lr=0.1, defense="censor", tapped=4),
        Word(
            {"model": "lenet:init=wide", "attack": "gifd:iterations=60"},
            {"model": "resnet18", "attack": "gifd:iterations=600"},
        ),
    ),
    kind="measure",
    measure=leakage_in_round,
    figures=by_last(
        [str(number) for number in range(10)],
        {
            ("ImageNet",): (
                (0.0507, 0.7610, 13.32, 0.009), (0.0989, 0.7368, 10.50, 0.036), (0.1224, 0.7394, 9.94, 0.036),
                (0.1040, 0.7370, 10.37, 0.042), (0.1717, 0.7528, 9.07, 0.041), (0.1233, 0.7296, 10.16, 0.035),
                (0.1049, 0.7272, 10.28, 0.034), (0.1232, 0.7425, 9.95, 0.033), (0.1067, 0.7173, 10.69, 0.041),
                (0.1034, 0.7247, 10.65, 0.038),
            ),
        },
    ),
)  # fmt: skip

CIFAR_TRAINING = {
    "data": "cifar10", "model": "resnet18", "partition": "dirichlet:alpha=0.5", "clients": 100, "per_round": 10,
    "algorithm": "fedsgd", "batch_size": 64, "lr": 0.1, "rounds": 300, "evaluate_every": 20, "checkpoint_every": 50,
}  # fmt: skip
DIGITS_TRAINING = CIFAR_TRAINING | {
    "data": "mnist", "model": "mlp:normalize=true", "examples": 6000, "rounds": 60, "evaluate_every": 20,
}  # fmt: skip
TRAINING = Word(DIGITS_TRAINING, CIFAR_TRAINING)
ACCURACY = Column("accuracy in %", "accuracy")

TABLE_6 = Table(
    title="Accuracy by clients per round",
    headings=("clients per round", "defense"),
    words=(
        {count: same(per_round=int(count)) for count in ("10", "30", "50")},
        {
            "none": same(defense="none"),
            "CENSOR": same(defense="censor:fallback=original"),
            "CENSOR, best candidate": same(defense="censor"),
        },
    ),
    columns=(ACCURACY,),
    base=TRAINING,
    kind="training",
    figures={
        ("10", "none"): (None,),
        ("10", "CENSOR"): (85.27,),
        ("10", "CENSOR, best candidate"): (None,),
        ("30", "none"): (None,),
        ("30", "CENSOR"): (85.33,),
        ("30", "CENSOR, best candidate"): (None,),
        ("50", "none"): (None,),
        ("50", "CENSOR"): (85.30,),
        ("50", "CENSOR, best candidate"): (None,),
    },
)

TABLE_7 = Table(
    title="GIFD on CENSOR by layer and on the entire gradient",
    headings=("data", "config"),
    words=(
        {"ImageNet": IMAGENET_OR_CIFAR},
        {"Layer-wise gradient": defense("censor"), "Entire gradient": defense("censor:layerwise=false")},
    ),
    columns=QUALITY,
    base=joined(BASE, ATTACKS["GIFD"]),
    figures={
        ("ImageNet", "Layer-wise gradient"): (0.0507, 0.7610, 13.32, 0.009),
        ("ImageNet", "Entire gradient"): (0.0452, 0.7532, 13.81, 0.012),
    },
)

TRIALS = ("1", "5", "10", "20", "50")
FIGURE_7 = Table(
    title="Accuracy and loss at the end of training",
    headings=("defense",),
    words=(
        {"vanilla": same(defense="none")}
        | {f"CENSOR, T={count}": same(defense=f"censor:fallback=original,trials={count}") for count in TRIALS},
    ),
    columns=(ACCURACY, Column("loss", "loss", digits=3)),
    base=TRAINING,
    kind="training",
    figures=by_last(["vanilla", *(f"CENSOR, T={count}" for count in TRIALS)], {(): [(86.0, None)] * 6}),
)

FIGURE_9 = Table(
    title="GIAS on CENSOR by number of trials",
    headings=("data", "trials"),
    words=(
        {"ImageNet": IMAGENET_OR_CIFAR},
        {count: defense(f"censor:fallback=original,trials={count}") for count in TRIALS},
    ),
    columns=(*QUALITY, FALLBACK),
    base=joined(BASE, ATTACKS["GIAS"]),
    figures={("ImageNet", count): (None, None, None, None) for count in TRIALS},
)

FIGURE_10 = Table(
    title="GGL on CENSOR with normal vectors and with gradients of public images",
    headings=("data", "vectors"),
    words=(
        {"ImageNet": IMAGENET_OR_CIFAR},
        {"normal": defense("censor"), "gradients of public images": defense("censor:source=public")},
    ),
    columns=(*QUALITY, Column("label right", "label_accuracy", in_paper=False)),
    base=joined(BASE, ATTACKS["GGL"]),
    figures={
        ("ImageNet", "normal"): (0.0419, 0.7912, 14.262, 0.0094),
        ("ImageNet", "gradients of public images"): (None, None, None, None),
    },
)

OVERHEAD = Table(
    title="Time that a defense adds to a local step",
    headings=("defense",),
    words=({"CENSOR": same(defense="censor"), "Soteria": same(defense="soteria")},),
    columns=(Column("overhead in %", "percent", digits=4),),
    base=Word({"model": "lenet", "batch_size": 64}, {"model": "resnet18", "batch_size": 64}),
    kind="measure",
    measure=step_overhead,
    figures={("CENSOR",): (0.00236,), ("Soteria",): (0.3092,)},
)
