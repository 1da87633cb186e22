"""What is reproduced of OUTPOST (Wang, Hugh and Li, 2024), and what is known of the differences."""

from __future__ import annotations

from gradveil.reproduction.papers.outpost_tables import (
    FIGURE_3,
    FIGURE_4,
    FIGURE_5,
    FIGURE_6,
    TABLE_1,
    TABLE_3,
    TABLE_4,
    TABLE_5,
)
from gradveil.reproduction.table import Reproduction

_UNITS = (
    "The paper's MSE of tens to hundreds is that of pixels without bounds, in units that it does not name; ours is of "
    "pictures from 0 to 1, so that only LPIPS and SSIM compare. Its two lines for Soteria on CIFAR-10, one image, are "
    "the same to the last digit."
)
_CSDLG = (
    "csDLG is `ig`: cosine distance by signed Adam with total variation; the paper has it by L-BFGS with 3,000 "
    "iterations, and shows the worst of ten trials for the defense. Ours are chosen by the attack's own objective."
)
_DP = (
    "The paper gives variances. DP is Laplace noise of variance 0.1 (a deviation of 0.316) on every local step, "
    "GradDefense Gaussian noise of variance 0.01 (0.1) without the clipping that the paper turns on, whose bound it "
    "does not give. With a deviation of 0.01 instead GradDefense hid nothing here: csDLG identified all digits."
)
_PICTURES = "The figure is pictures, without numbers."
_BATCHES = (
    "Batches are of ten images, one of each class, and of twenty, two of each; the paper has 128 of a hundred classes."
)
_FISHING = (
    "Fishing returns one image of a batch and gray for the others, so that the best of the batch is what counts; gray "
    "alone has a PSNR of some ten."
)
_STATISTICS = (
    "The adversary repeats the client's local steps in the state that the client is in, as the recipe tells it. In "
    "the training state batch norm takes the mean and spread of the batch itself."
)
REPRODUCTIONS = (
    Reproduction(
        "outpost-1",
        "outpost",
        "Table I",
        "How much DLG depends on how the network was initialized.",
        (TABLE_1,),
        {"small": "2", "paper": "2"},
        (_PICTURES, "A seed is that of the weights too, not of the dummy image alone."),
    ),
    Reproduction(
        "outpost-3",
        "outpost",
        "Table III",
        ("Two attacks, two data sets, four scenarios, five defenses and none."),
        (TABLE_3,),
        {"small": "4", "paper": "10"},
        (_UNITS, _CSDLG, _DP),
        ("The pictures beside the figures are not repeated here; `gradveil report` draws ours.",),
    ),
    Reproduction(
        "outpost-4",
        "outpost",
        "Table IV",
        ("Whether the client's model is in the evaluation or in the training state."),
        (TABLE_4,),
        {"small": "5", "paper": "15"},
        (
            _STATISTICS,
            _CSDLG,
            "The trained ResNet-18 has learned CIFAR-10 (93.7%), the paper's CIFAR-100 (over 60%).",
            "Private images may be cropped or flipped in the paper; here they are as they are.",
        ),
        (
            (
                "Five of the paper's PSNRs for E=5 cannot be told apart in the text of the table at hand, and are "
                "left open."
            ),
        ),
    ),
    Reproduction(
        "outpost-5",
        "outpost",
        "Table V",
        "csDLG on vision transformers.",
        (TABLE_5,),
        {"small": "3", "paper": "5"},
        (
            (
                "The model is a small vision transformer without dropout (2.7 million parameters), so that the "
                "two states are the same for it; the paper has a larger one of HuggingFace."
            ),
            _CSDLG,
        ),
    ),
    Reproduction(
        "outpost-fig3",
        "outpost",
        "Figure 3",
        "What defenses cost in accuracy.",
        (FIGURE_3,),
        {"small": "3", "paper": "25"},
        (
            (
                "The paper's numbers are those of its text: accuracy reached with DP as a share of that without, "
                "and 3.28% and 2.19% lost with OUTPOST, read as shares. Its curves for the others have no "
                "numbers."
            ),
            "60 rounds instead of 100 and 150; [convergence](../convergence.md) has up to 150 for more defenses.",
            (
                "At small scale a fully connected network learns 2,000 digits for 8 rounds, too few for DP's "
                "noise to average out."
            ),
        ),
        ("Delays (3.54% and 1.47% for OUTPOST): `gradveil bench overhead` times a step by itself.",),
    ),
    Reproduction(
        "outpost-fig4",
        "outpost",
        "Figure 4",
        "csDLG on a trained ResNet-18 under each defense.",
        (FIGURE_4,),
        {"small": "8", "paper": "8"},
        (_PICTURES, _CSDLG, _DP, "Soteria works on ResNet-18 here; the paper had none for it."),
    ),
    Reproduction(
        "outpost-fig5",
        "outpost",
        "Figure 5",
        "Fishing one image out of a batch, on ResNet-18.",
        (FIGURE_5,),
        {"small": "9", "paper": "5"},
        (_PICTURES, _BATCHES, _FISHING, _DP),
        (
            "Soteria and GradDefense, which the figure leaves out too.",
            "Clients in the training state, where the attack fails in the paper and [here](../../attacks/fishing.md).",
        ),
    ),
    Reproduction(
        "outpost-fig6",
        "outpost",
        "Figure 6",
        "Fishing one image out of a batch, on a vision transformer.",
        (FIGURE_6,),
        {"small": "3", "paper": "3"},
        (_PICTURES, _BATCHES, _FISHING),
    ),
)
