"""The tables and figures of OUTPOST (Wang, Hugh and Li, 2024), with its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

MSE, LPIPS, SSIM = Column("MSE", "mse"), Column("LPIPS", "lpips"), Column("SSIM", "ssim", digits=3)
LOSS, PSNR = Column("loss", "objective", digits=3), Column("PSNR", "psnr")
OUR_PSNR = Column("PSNR", "psnr", in_paper=False)
IDENTIFIED = Column("identified", "identified", in_paper=False)

DEFENSES = {
    "No defense": defense("none"),
    "GC": defense("sparsify:rate=0.8"),
    "DP": defense("noise:sigma=0.316,kind=laplace"),
    "Soteria": defense("soteria:rate=0.5"),
    "GD": defense("graddefense:sigma=0.1"),
    "OUTPOST": defense("outpost"),
}
DIGITS = {"data": "mnist-samples"}
EMNIST = Word(DIGITS, DIGITS, asks="emnist:path=FOLDER", instead="MNIST")
SAMPLES = {"data": "cifar10-samples"}
CIFAR = Word(SAMPLES, SAMPLES)
CIFAR_100 = Word(SAMPLES, SAMPLES, asks="cifar100:path=FOLDER", instead="CIFAR-10")
FEDAVG = {"recipe.sends": "delta", "recipe.lr": 0.01}


def _scenario(small: int, paper: int, n: int, mini_batch: int) -> Word:
    """So many images at each scale, n at each client, in mini-batches."""
    fixed = {"batch_size": n, "recipe.batch_size": mini_batch}
    return Word({"images": small, **fixed}, {"images": paper, **fixed})


TABLE_3 = Table(
    title="Attacks on one local epoch, in four scenarios",
    headings=("scenario", "data", "attack", "defense"),
    words=(
        {
            "1: E=1, n=1, B=1": _scenario(2, 4, 1, 1),
            "2: E=1, n=2, B=1": _scenario(4, 8, 2, 1),
            "3: E=1, n=1, B=1": _scenario(2, 4, 1, 1),
            "4: E=1, n=16, B=16": _scenario(16, 16, 16, 16),
        },
        {"EMNIST": EMNIST, "CIFAR-10": CIFAR},
        {
            "DLG": attack("dlg:iterations=200", "dlg:iterations=1000"),
            "csDLG": attack("ig:iterations=300", "ig:iterations=3000"),
        },
        DEFENSES,
    ),
    columns=(MSE, LPIPS, SSIM, OUR_PSNR, IDENTIFIED),
    base=Word(
        FEDAVG | {"model": "lenet:init=wide", "restarts": 2}, FEDAVG | {"model": "lenet:init=wide", "restarts": 10}
    ),
    figures=by_last(
        DEFENSES,
        {
            ("1: E=1, n=1, B=1", "EMNIST", "DLG"): (
                (6.6e-3, 7.1e-2, 0.99),
                (13.96, 0.55, 0.30),
                (113.63, 0.60, 0.19),
                (95.19, 0.63, 3.3e-2),
                (32.57, 0.64, 1.0e-2),
                (77.05, 0.58, 0.13),
            ),
            ("1: E=1, n=1, B=1", "EMNIST", "csDLG"): (
                (2.6e-7, 5.8e-7, 1.00),
                (199.08, 0.60, 0.32),
                (297.84, 0.66, 6.5e-2),
                (296.76, 0.63, 4.1e-2),
                (360.98, 0.64, 1.7e-2),
                (294.678, 0.68, 1.6e-2),
            ),
            ("2: E=1, n=2, B=1", "EMNIST", "DLG"): (
                (5.8e-2, 0.31, 0.77),
                (69.87, 0.61, 3.7e-2),
                (319.30, 0.66, 2.4e-2),
                (16.07, 0.70, 4.7e-2),
                (25.50, 0.65, 2.7e-2),
                (75.92, 0.67, 6.4e-2),
            ),
            ("2: E=1, n=2, B=1", "EMNIST", "csDLG"): (
                (0.14, 0.40, 0.70),
                (336.05, 0.60, 3.3e-2),
                (1231.82, 0.65, 1.4e-2),
                (782.93, 0.59, 1.6e-2),
                (668.79, 0.63, 3.4e-2),
                (277.73, 0.66, 3.8e-2),
            ),
            ("3: E=1, n=1, B=1", "CIFAR-10", "DLG"): (
                (5.1e-2, 0.53, 0.57),
                (7.83, 0.77, 4.4e-2),
                (34.08, 0.77, 3.6e-2),
                (25.91, 0.76, 5.5e-2),
                (11.46, 0.74, 2.2e-2),
                (13.10, 0.77, 2.1e-2),
            ),
            ("3: E=1, n=1, B=1", "CIFAR-10", "csDLG"): (
                (5.9e-5, 1.8e-3, 0.99),
                (27.50, 0.76, 2.6e-2),
                (34.51, 0.78, 2.9e-2),
                (25.91, 0.76, 5.5e-2),
                (56.66, 0.77, 1.7e-2),
                (35.24, 0.77, 3.4e-2),
            ),
            ("4: E=1, n=16, B=16", "CIFAR-10", "DLG"): (
                (1.37, 0.67, 2.9e-2),
                (4.82, 0.69, 1.9e-2),
                (19.92, 0.71, 1.5e-2),
                (2.85, 0.70, 2.2e-2),
                (4.04, 0.69, 2.2e-2),
                (15.85, 0.70, 1.7e-2),
            ),
            ("4: E=1, n=16, B=16", "CIFAR-10", "csDLG"): (
                (6.2e-2, 0.51, 0.30),
                (6.85, 0.69, 4.5e-2),
                (13.68, 0.71, 1.6e-2),
                (14.87, 0.69, 2.7e-2),
                (2.1e10, 0.71, 3.8e-2),
                (13.03, 0.70, 3.1e-2),
            ),
        },
    ),
)

EVAL, TRAIN = "original (eval state)", "theirs (training state)"
STATES = {EVAL: same({"recipe.train_mode": False}), TRAIN: same({"recipe.train_mode": True})}
ONE, EIGHT, EPOCHS, HALVES = "E=1, n=1, B=1", "E=1, n=8, B=8", "E=5, n=8, B=8", "E=1, n=8, B=4"
_TOO_LONG = "eight images through ResNet-18 take two cores more than ten minutes"


SHORTER = {"attacks": "ig:iterations=400", "restarts": 1}
"""Where every step is long."""
SHORTEST = {"attacks": "ig:iterations=200", "restarts": 1}
"""Where it repeats five local steps."""


def _of_eight(epochs: int, mini_batch: int) -> Word:
    fields = {"images": 8, "batch_size": 8, "recipe.epochs": epochs, "recipe.batch_size": mini_batch}
    shorter = SHORTEST if epochs > 1 else SHORTER if mini_batch < 8 else {}
    return Word(None, fields | shorter, _TOO_LONG)


SETTINGS = {
    ONE: Word({"images": 1, "recipe.batch_size": 1}, {"images": 4, "recipe.batch_size": 1}),
    EIGHT: _of_eight(1, 8),
    EPOCHS: _of_eight(5, 8),
    HALVES: _of_eight(1, 4),
}
R18, R18_TRAINED = "ResNet-18, untrained", "ResNet-18, pretrained"
R152, R152_TRAINED = "ResNet-152, untrained", "ResNet-152, pretrained"
NETWORKS = {
    R18: same(model="resnet18"),
    R18_TRAINED: same(model="resnet18:weights=cifar10"),
    R152: Word(None, {"model": "resnet152"} | SHORTER, "152 layers take two cores more than ten minutes"),
    R152_TRAINED: left_out("no trained ResNet-152 for 32x32 images is at hand"),
}
_STEPS = "several local steps through 152 layers, differentiated twice, take an H200 longer than minutes"
RESNETS = Word(
    FEDAVG | {"attacks": "ig:iterations=100", "restarts": 1}, FEDAVG | {"attacks": "ig:iterations=1000", "restarts": 2}
)

TABLE_4 = Table(
    title="csDLG on ResNets, in the evaluation and in the training state",
    headings=("data", "setting", "network", "implementation"),
    words=({"CIFAR-100": CIFAR_100}, SETTINGS, NETWORKS, STATES),
    columns=(LOSS, PSNR, IDENTIFIED),
    base=RESNETS,
    skipped={(R152, EPOCHS): _STEPS, (R152, HALVES): _STEPS},
    figures={
        ("CIFAR-100", ONE, R18, EVAL): (0.022, 18.565),
        ("CIFAR-100", ONE, R18_TRAINED, EVAL): (0.204, 10.289),
        ("CIFAR-100", ONE, R18, TRAIN): (0.598, 10.568),
        ("CIFAR-100", ONE, R18_TRAINED, TRAIN): (0.730, 9.570),
        ("CIFAR-100", ONE, R152, EVAL): (0.012, 11.898),
        ("CIFAR-100", ONE, R152_TRAINED, EVAL): (0.090, 10.382),
        ("CIFAR-100", ONE, R152, TRAIN): (0.992, 10.755),
        ("CIFAR-100", ONE, R152_TRAINED, TRAIN): (0.807, 9.699),
        ("CIFAR-100", EIGHT, R18, EVAL): (0.022, 19.222),
        ("CIFAR-100", EIGHT, R18_TRAINED, EVAL): (0.173, 9.301),
        ("CIFAR-100", EIGHT, R18, TRAIN): (0.681, 10.630),
        ("CIFAR-100", EIGHT, R18_TRAINED, TRAIN): (0.316, 10.906),
        ("CIFAR-100", EIGHT, R152, EVAL): (0.004, 9.152),
        ("CIFAR-100", EIGHT, R152_TRAINED, EVAL): (0.244, 8.841),
        ("CIFAR-100", EIGHT, R152, TRAIN): (0.983, 10.646),
        ("CIFAR-100", EIGHT, R152_TRAINED, TRAIN): (0.538, 9.470),
        ("CIFAR-100", EPOCHS, R18, EVAL): (0.013, 12.585),
        ("CIFAR-100", EPOCHS, R18_TRAINED, EVAL): (0.119, None),
        ("CIFAR-100", EPOCHS, R18, TRAIN): (0.565, None),
        ("CIFAR-100", EPOCHS, R18_TRAINED, TRAIN): (0.321, None),
        ("CIFAR-100", EPOCHS, R152, EVAL): (0.023, None),
        ("CIFAR-100", EPOCHS, R152_TRAINED, EVAL): (0.092, None),
        ("CIFAR-100", EPOCHS, R152, TRAIN): (0.761, None),
        ("CIFAR-100", EPOCHS, R152_TRAINED, TRAIN): (0.549, 11.350),
        ("CIFAR-100", HALVES, R18, EVAL): (0.096, 9.563),
        ("CIFAR-100", HALVES, R18_TRAINED, EVAL): (0.031, 11.821),
        ("CIFAR-100", HALVES, R18, TRAIN): (0.695, 10.160),
        ("CIFAR-100", HALVES, R18_TRAINED, TRAIN): (0.389, 10.678),
        ("CIFAR-100", HALVES, R152, EVAL): (0.883, 12.535),
        ("CIFAR-100", HALVES, R152_TRAINED, EVAL): (0.119, 10.582),
        ("CIFAR-100", HALVES, R152, TRAIN): (0.739, 12.460),
        ("CIFAR-100", HALVES, R152_TRAINED, TRAIN): (0.617, 9.995),
    },
)

PHOTOS = {"data": "photos-64"}
UNTRAINED, PRETRAINED = "untrained", "pretrained"
TABLE_5 = Table(
    title="csDLG on vision transformers",
    headings=("data", "implementation", "weights"),
    words=(
        {
            "Tiny ImageNet": Word(
                PHOTOS, PHOTOS, asks="folder:path=FOLDER,size=64", instead="500 photographs of its classes"
            ),
            "CIFAR-100": CIFAR_100,
        },
        STATES,
        {UNTRAINED: same(model="vit"), PRETRAINED: left_out("no trained vision transformer of this size is at hand")},
    ),
    columns=(LOSS, PSNR, IDENTIFIED),
    base=joined(RESNETS, Word({"images": 1}, {"images": 4})),
    figures={
        ("Tiny ImageNet", EVAL, UNTRAINED): (0.106, 10.891),
        ("Tiny ImageNet", EVAL, PRETRAINED): (0.429, 8.941),
        ("Tiny ImageNet", TRAIN, UNTRAINED): (0.116, 11.178),
        ("Tiny ImageNet", TRAIN, PRETRAINED): (0.208, 9.164),
        ("CIFAR-100", EVAL, UNTRAINED): (0.108, 9.979),
        ("CIFAR-100", EVAL, PRETRAINED): (0.099, 9.321),
        ("CIFAR-100", TRAIN, UNTRAINED): (0.120, 8.764),
        ("CIFAR-100", TRAIN, PRETRAINED): (0.088, 9.822),
    },
)

TABLE_1 = Table(
    title="DLG on one image, by initialization",
    headings=("data", "network"),
    words=(
        {"CIFAR-10": CIFAR},
        {
            "untrained, explicit initialization": same(model="lenet:init=wide"),
            "untrained, PyTorch's initialization": same(model="lenet"),
            "trained with the same data": left_out("no trained LeNet is at hand"),
        },
    ),
    columns=(OUR_PSNR, Column("spread of seeds", "psnr", "spread of seeds", in_paper=False), IDENTIFIED),
    base=Word(
        {"attacks": "dlg:iterations=200", "restarts": 1, "images": 4},
        {"attacks": "dlg:iterations=1000", "restarts": 1, "images": 10},
    ),
    seeds={"small": 3, "paper": 3},
    figures={
        ("CIFAR-10", "untrained, explicit initialization"): (),
        ("CIFAR-10", "untrained, PyTorch's initialization"): (),
        ("CIFAR-10", "trained with the same data"): (),
    },
)

LENET = "lenet:init=wide,normalize=true"
FIGURE_3_PAPER = {
    "model": LENET, "clients": 100, "per_round": 10, "epochs": 5, "batch_size": 32, "lr": 0.01, "rounds": 60,
    "evaluate_every": 10, "checkpoint_every": 10, "partition": "dirichlet:alpha=0.5,equal=true",
}  # fmt: skip
MNIST_TRAINING = Word(
    {"data": "mnist", "examples": 2000}, {"data": "mnist"}, asks="emnist:path=FOLDER", instead="MNIST"
)
_SLOW = "it makes a round twenty times longer (docs/results/convergence.md has twenty rounds)"
FIGURE_3 = Table(
    title="Accuracy at the end of training",
    headings=("data", "defense"),
    words=(
        {
            "EMNIST": MNIST_TRAINING,
            "CIFAR-10": Word(None, {"data": "cifar10"}, "LeNet on CIFAR-10 learns too slowly for ten minutes"),
        },
        {
            "No defense": same(defense="none"),
            "GC": same(defense="sparsify:rate=0.8"),
            "DP": same(defense="noise:sigma=0.316,kind=laplace"),
            "Soteria": left_out(_SLOW),
            "GD": same(defense="graddefense:sigma=0.1"),
            "OUTPOST": same(defense="outpost"),
        },
    ),
    columns=(
        Column("kept of the undefended accuracy, %", "accuracy", "kept"),
        Column("accuracy, %", "accuracy", in_paper=False),
    ),
    base=Word(
        FIGURE_3_PAPER | {"model": "mlp:normalize=true", "rounds": 8, "clients": 20, "per_round": 5}, FIGURE_3_PAPER
    ),
    kind="training",
    figures={
        ("EMNIST", "No defense"): (100.0,),
        ("EMNIST", "GC"): (None,),
        ("EMNIST", "DP"): (91.5,),
        ("EMNIST", "Soteria"): (None,),
        ("EMNIST", "GD"): (None,),
        ("EMNIST", "OUTPOST"): (96.72,),
        ("CIFAR-10", "No defense"): (100.0,),
        ("CIFAR-10", "GC"): (None,),
        ("CIFAR-10", "DP"): (83.1,),
        ("CIFAR-10", "Soteria"): (None,),
        ("CIFAR-10", "GD"): (None,),
        ("CIFAR-10", "OUTPOST"): (97.81,),
    },
)

FIGURE_4 = Table(
    title="csDLG on a trained ResNet-18 under each defense",
    headings=("data", "setting", "defense"),
    words=({"CIFAR-100": CIFAR_100}, {name: SETTINGS[name] for name in (ONE, EIGHT)}, DEFENSES),
    columns=(OUR_PSNR, Column("LPIPS", "lpips", in_paper=False), IDENTIFIED),
    base=joined(RESNETS, same({"model": "resnet18:weights=cifar10", "recipe.train_mode": True})),
    figures={("CIFAR-100", setting, name): () for setting in (ONE, EIGHT) for name in DEFENSES},
)

CLASS_ALONE, CLASS_SHARED = "one of the class", "two of the class"
FISHED = {name: DEFENSES[name] for name in ("No defense", "GC", "DP", "OUTPOST")}
FISHING = "fishing:then=ig:iterations={};restarts=1"
MODIFIED = {
    "Fishing": attack(FISHING.format(100), FISHING.format(1000)),
    "without modification": attack("ig:iterations=30,restarts=1", "ig:iterations=1000,restarts=1"),
}


def _fishing(networks: Mapping[str, Word], lines: Sequence[tuple[str, str, str]]) -> Table:
    """Lines are of a network, an attack and a defense, for both kinds of batch."""
    named = {name: FISHED[name] for _, _, name in lines}
    batches = {CLASS_ALONE: same(images=10, batch_size=10), CLASS_SHARED: same(images=20, batch_size=20)}
    return Table(
        title="The image that is fished out of a batch",
        headings=("data", "batch", "network", "attack", "defense"),
        words=({"CIFAR-100": CIFAR_100}, batches, networks, MODIFIED, named),
        columns=(
            Column("PSNR, best of the batch", "psnr", "best", in_paper=False),
            Column("SSIM, best of the batch", "ssim", "best", digits=3, in_paper=False),
            Column("identified", "identified", "best", in_paper=False),
        ),
        base=same(threat="F"),
        figures={("CIFAR-100", batch, *line): () for batch in batches for line in lines},
    )


FIGURE_5 = _fishing(
    {R18: NETWORKS[R18], R18_TRAINED: NETWORKS[R18_TRAINED]},
    [
        (R18, "Fishing", "No defense"),
        (R18_TRAINED, "Fishing", "No defense"),
        (R18_TRAINED, "without modification", "No defense"),
        *((R18_TRAINED, "Fishing", name) for name in ("GC", "DP", "OUTPOST")),
    ],
)
VIT, VIT_TRAINED = "ViT, untrained", "ViT, pretrained"
FIGURE_6 = _fishing(
    {VIT: same(model="vit"), VIT_TRAINED: left_out("no trained vision transformer of this size is at hand")},
    [
        (VIT, "Fishing", "No defense"),
        (VIT_TRAINED, "Fishing", "No defense"),
        (VIT_TRAINED, "without modification", "No defense"),
    ],
)
