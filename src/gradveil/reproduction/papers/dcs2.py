"""What is reproduced of DCS2 (Wu et al., 2022), and what is known of the differences."""

from __future__ import annotations

from gradveil.reproduction.papers.dcs2_tables import (
    CIFAR_IMPRINT,
    CIFAR_SEARCHES,
    MNIST_IMPRINT,
    MNIST_SEARCHES,
    STARTS_ON_IMPRINT,
    STARTS_ON_SEARCHES,
    TABLE_1_LEARNING,
    TABLE_2,
    TABLE_3,
    TABLE_3_LEARNING,
    TABLE_4_LEARNING,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    TABLE_7_LEARNING,
    TABLE_8,
)
from gradveil.reproduction.table import Reproduction

_CAP = "PSNR is capped at 100 dB here; the paper has no cap."
_CLOSEST = (
    "Figures are of the sensitive example of each batch, the first, and the picture that is matched with it when each "
    "example gets one; labels are inferred."
)
_STEP = (
    "The paper names no step size for its search; 0.025 is that of the authors' release. Whether a concealed sample "
    "hides the sensitive one from Imprint depends on it, and one client whose sample misses counts with 100 dB in the "
    "mean: see [table 1 by another script](../dcs2-1.md), which has two step sizes and fresh clients. DCS2 and DCS2+ "
    "start from other draws here; the projection itself did not act there."
)
_FRONT = "Imprint sends about what its public implementation sends: brightness, ReLU, thresholds from public images."
_PLAIN = "At small scale CIFAR-10 has a LeNet instead of the nine convolutions of the paper, and searches are short."
_FL = (
    "In training, the concealed sample gets ten iterations instead of a thousand, and the LeNet is Zhu's with wide "
    "weights; the paper's is another."
)
_NO_CIFAR = (
    "Federated learning on CIFAR-10: a round with DCS2 took 14 s on a shared H200, a hundred rounds for each defense "
    "take longer than minutes."
)
_NO_LEARNING = "The column for federated learning: it needs the data, which are not at hand."
_COMMON = (_CLOSEST, _STEP, _FRONT, _CAP, _PLAIN)
REPRODUCTIONS = (
    Reproduction(
        "dcs2-1",
        "dcs2",
        "Table 1",
        "Three attacks on MNIST and CIFAR-10, and federated learning.",
        (MNIST_SEARCHES, MNIST_IMPRINT, CIFAR_SEARCHES, CIFAR_IMPRINT, TABLE_1_LEARNING),
        {"small": "4", "paper": "20"},
        (*_COMMON, _FL),
        (_NO_CIFAR,),
    ),
    Reproduction(
        "dcs2-2",
        "dcs2",
        "Table 2",
        "Imprint on HAM10000 and CelebA.",
        TABLE_2,
        {"small": "0", "paper": "5"},
        _COMMON,
        (_NO_LEARNING,),
    ),
    Reproduction(
        "dcs2-3",
        "dcs2",
        "Table 3",
        "DCS2+ together with noise, for all examples.",
        (TABLE_3, TABLE_3_LEARNING),
        {"small": "3", "paper": "15"},
        (_STEP, _PLAIN, _FL, "A batch has four private digits here, all of which count."),
    ),
    Reproduction(
        "dcs2-4",
        "dcs2",
        "Table 4",
        "Where the search for concealed samples starts.",
        (STARTS_ON_SEARCHES, STARTS_ON_IMPRINT, TABLE_4_LEARNING),
        {"small": "4", "paper": "15"},
        ("For QMNIST, which is not at hand, the search starts from digits of MNIST that ship.", *_COMMON, _FL),
    ),
    Reproduction(
        "dcs2-5",
        "dcs2",
        "Table 5",
        "GGL and Imprint on faces.",
        TABLE_5,
        {"small": "7", "paper": "10"},
        (
            (
                "For GGL an update is of two images, of which the first is sensitive: the search for a concealed "
                "sample starts from the other."
            ),
            "The generator is a DCGAN of CIFAR-10 that ships.",
            *_COMMON,
        ),
        (_NO_LEARNING,),
    ),
    Reproduction(
        "dcs2-6",
        "dcs2",
        "Table 6",
        "PRECODE and ATS beside DCS2+.",
        TABLE_6,
        {"small": "1", "paper": "10"},
        (
            "PRECODE's bottleneck draws anew at each step; GS here does not know that.",
            "Under ATS pictures are compared with the image before its augmentation; the paper does not say which.",
            *_COMMON,
        ),
        (_NO_CIFAR,),
    ),
    Reproduction(
        "dcs2-7",
        "dcs2",
        "Table 7",
        "How many concealed samples.",
        (TABLE_7, TABLE_7_LEARNING),
        {"small": "1", "paper": "15"},
        (*_COMMON, _FL),
    ),
    Reproduction(
        "dcs2-8",
        "dcs2",
        "Table 8",
        "Time and memory of one concealed sample.",
        (TABLE_8,),
        {"small": "5", "paper": "1"},
        (
            (
                "The paper timed a GeForce RTX 3090. Time is that of a local step with the defense less one "
                "without; memory is the peak on the GPU beyond that of the plain step, and is not measured on a "
                "CPU."
            ),
        ),
    ),
)
