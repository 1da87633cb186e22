"""What is reproduced of GGL (Li et al., CVPR 2022), and what is known of the differences."""

from __future__ import annotations

from gradveil.reproduction.papers.ggl_tables import (
    FIGURE_7,
    FIGURE_13,
    TABLE_1,
    TABLE_2,
    TABLE_3,
)
from gradveil.reproduction.table import Reproduction

_GENERATOR = (
    "The generator is a DCGAN of CIFAR-10 at 32x32 that ships; the paper's DCGAN has learned the faces of CelebA, "
    "which are aligned and alike: its LPIPS is lower by far."
)
_UPDATES = "Searches are shorter: the paper has 2,500 updates of Adam, 1,000 of TuRBO and 800 of CMA-ES."
_WEIGHT = (
    "The regularizer has our default weight (`code_weight=0.001`), the paper's is 0.1: units of the distance differ."
)
_SMALL = "At small scale the model is a LeNet with wide weights instead of ResNet-18."
_TASK = "The model tells ten classes apart, the paper's two (gender)."
_PAPER_NOISE = (
    "On ResNet-18 noise of 0.1 on its 11.2 million entries is two hundred times longer than the gradient of one image "
    "here, and takes all but the label ([why](../censor-1.md))."
)
_COMMON = (_GENERATOR, _UPDATES, _TASK, _SMALL)
_BATCH = (
    "ImageNet needs BigGAN beside the data (`--generator 'ImageNet=biggan:path=FILE'`); no generator of that size "
    "ships."
)
REPRODUCTIONS = (
    Reproduction(
        "ggl-1",
        "ggl",
        "Table 1",
        "Which distance and which regularizer GGL should have.",
        (TABLE_1,),
        {"small": "2", "paper": "3"},
        (_WEIGHT, *_COMMON),
    ),
    Reproduction(
        "ggl-2",
        "ggl",
        "Table 2",
        "Which optimizer GGL should have.",
        (TABLE_2,),
        {"small": "2", "paper": "10"},
        (
            (
                "Spreads are those between seeds, which draw the weights of the model too; the paper's are those "
                "of the search alone."
            ),
            *_COMMON,
        ),
        (_BATCH,),
    ),
    Reproduction(
        "ggl-3",
        "ggl",
        "Table 3",
        "Five attacks under four defenses.",
        (TABLE_3,),
        {"small": "9", "paper": "20"},
        (_PAPER_NOISE, *_COMMON, "[GGL on faces](../ggl-faces.md) has real faces and ProGAN."),
        (_BATCH,),
    ),
    Reproduction(
        "ggl-fig7",
        "ggl",
        "Figure 7",
        "How much Soteria has to prune.",
        (FIGURE_7,),
        {"small": "8", "paper": "15"},
        ("The numbers under the paper's pictures are not in its text.", *_COMMON),
    ),
    Reproduction(
        "ggl-fig13",
        "ggl",
        "Figures 9 and 13",
        "How defenses bend the objective around the private picture.",
        (FIGURE_13,),
        {"small": "2", "paper": "2"},
        (
            (
                "The figures are pictures of surfaces, without numbers. Here a surface becomes the rank "
                "correlation between the objective and the distance to the private picture: 1 where a lower "
                "objective always is a better picture."
            ),
            (
                "At small scale the private picture is the lowest point of the slice under every defense of the paper, "
                "whether the adversary adapts or not. Adapting makes it lower: 5.6 becomes 0.01 under clipping, 0.23 "
                "becomes 0.0005 under sparsification, 1.9 becomes 0.005 under Soteria, as the paper shows for clipping "
                "and Soteria. Under CENSOR it is not the lowest."
            ),
            (
                "This is an analysis, not an attack: the slice goes through the code that draws the private "
                "picture best, which only its owner can find. The paper's goes from the code that GGL finds to "
                "that of the inverted picture."
            ),
            _GENERATOR,
            _SMALL,
        ),
    ),
)
