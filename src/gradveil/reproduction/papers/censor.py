"""What is reproduced of CENSOR (Zhang et al., NDSS 2025), and what is known of the differences."""

from __future__ import annotations

from gradveil.reproduction.papers.censor_tables import (
    FIGURE_7,
    FIGURE_9,
    FIGURE_10,
    OVERHEAD,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    TABLE_5,
    TABLE_6,
    TABLE_7,
)
from gradveil.reproduction.table import Reproduction

_SEARCHES = (
    "The paper gives no iterations. Ours at paper scale are what an H200 does in minutes, with four restarts, at "
    "small scale what two cores do, with one or two: searches end early. The attack's own objective chooses among "
    "restarts; the paper reports the best performance of four trials."
)
_GENERATOR = (
    "The generator is a DCGAN of CIFAR-10 at 32x32 that ships, where the paper has BigGAN or StyleGAN2. It is easier "
    "to leave for GIAS and GIFD; GGL, which stays in it, searches by Adam, not CMA-ES."
)
_NOISE = (
    "On ResNet-18 noise of 0.1 is far stronger than in the paper: the gradient of one image has a norm of about 1.5, "
    "the noise on its 11.2 million entries one of 335. Whatever the paper's 0.1 is a multiple of, it is not this "
    "gradient; what it is was not found out."
)
_SPARSE = (
    "GIAS reaches more under sparsification in the paper than without a defense, and nearly as much under Soteria: "
    "its search seems to take the defense into account in a way the text does not say. Ours is the published "
    "objective."
)
_GI = (
    "GI matches by squared distance, which leads to the picture more slowly than IG's angle: at small scale, without a "
    "defense, a quarter of the images is identified after 300 steps, seven of eight after 1,000."
)
_FALLBACK = (
    "`censor` sends the best candidate where no trial lowers the loss. Algorithm 1 of the paper sends the gradient "
    "itself (`censor:fallback=original`), which on an untrained ResNet-18 is 19 of 20 steps and then no protection; "
    "the paper does not report how often. See [CENSOR](../../defenses/censor.md)."
)
_SMALL = (
    "At small scale the model is a LeNet with wide weights, not ResNet-18: it has 19 thousand entries for the noise "
    "to fall on and longer gradients, so that the same noise covers less, while a clip bound of 4, which never acts "
    "on ResNet-18, cuts some of its layers and not others."
)
_COMMON = (_SEARCHES, _GENERATOR, _FALLBACK, _SMALL)
_LEARNS = (
    (
        "The paper does not say whether a client sends one gradient or a local epoch; its attacks are on "
        "gradients, so this is one gradient (`fedsgd`). It trains for 2,000 rounds."
    ),
    (
        "What learns is the gradient itself, sent where no trial lowers the loss (`fallback=original`, as "
        "published): with the best candidate instead (`fallback=best`) accuracy stays at chance. "
        "[Convergence](../convergence.md) has both over 300 rounds."
    ),
    "At small scale a fully connected network learns 6,000 digits for 60 rounds.",
)

_GIFD_ONLY = ("One private image behind each gradient, untrained model, as in Table I.", *_COMMON)
REPRODUCTIONS = (
    Reproduction(
        "censor-1",
        "censor",
        "Table I",
        "Five attacks against five defenses and none.",
        (TABLE_1,),
        {"small": "4", "paper": "15"},
        (_NOISE, _SPARSE, _GI, *_COMMON),
        (
            (
                "Generative attacks on ImageNet and FFHQ need a generator of that size beside the data "
                "(`--generator`); none ships."
            ),
        ),
    ),
    Reproduction(
        "censor-2",
        "censor",
        "Table II",
        "Two attacks on updates of four images with different labels.",
        (TABLE_2,),
        {"small": "3", "paper": "10"},
        (_NOISE, "The images are 32x32 instead of 224x224: fewer unknowns for about as many equations.", *_COMMON),
    ),
    Reproduction(
        "censor-3",
        "censor",
        "Table III",
        ("An adaptive attack that averages over the defense's random draws."),
        (TABLE_3,),
        {"small": "1", "paper": "6"},
        (
            (
                "The paper does not say how many draws it averages; ours are 8, with one start each at paper "
                "scale. Its weighting of informative gradients is not described, and left out."
            ),
            *_GIFD_ONLY,
        ),
    ),
    Reproduction(
        "censor-5",
        "censor",
        "Table V",
        "The first ten rounds of a defended training.",
        (TABLE_5,),
        {"small": "2", "paper": "5"},
        (
            (
                "Twenty clients send one gradient of one image each per round, four of them are attacked. The "
                "paper does not say how its rounds train."
            ),
            "[Leakage over training](../leakage-over-training.md) asks the same without a defense, over 1,001 rounds.",
            *_GIFD_ONLY,
        ),
    ),
    Reproduction(
        "censor-6",
        "censor",
        "Table VI",
        "Whether a defended model learns, by clients per round.",
        (TABLE_6,),
        {"small": "5", "paper": "45"},
        _LEARNS,
    ),
    Reproduction(
        "censor-7",
        "censor",
        "Table VII",
        "Layer by layer, or the gradient as a whole.",
        (TABLE_7,),
        {"small": "1", "paper": "3"},
        _GIFD_ONLY,
    ),
    Reproduction(
        "censor-fig7",
        "censor",
        "Figures 7 and 8",
        "Whether a defended model learns, by number of trials.",
        (FIGURE_7,),
        {"small": "4", "paper": "40"},
        ("The text gives about 86% for all curves after 2,000 rounds, and no numbers for the loss.", *_LEARNS),
    ),
    Reproduction(
        "censor-fig9",
        "censor",
        "Figure 9",
        "How many trials the defense needs.",
        (FIGURE_9,),
        {"small": "2", "paper": "8"},
        (
            (
                "The figure has no numbers in the text. In the paper, pictures are recognized at 1 and 5 trials: "
                "there, no trial lowered the loss more often, and the gradient itself was sent "
                "(`fallback=original` here, as published)."
            ),
            *_GIFD_ONLY,
        ),
    ),
    Reproduction(
        "censor-fig10",
        "censor",
        "Figure 10",
        "Candidates made of gradients of public images.",
        (FIGURE_10,),
        {"small": "1", "paper": "4"},
        (
            (
                "The figure is pictures, without numbers; the first line repeats Table I. The public images are "
                "those that ship, of all ten classes, where the paper has one class (black grouse)."
            ),
            *_GIFD_ONLY,
        ),
    ),
    Reproduction(
        "censor-overhead",
        "censor",
        "Appendix B",
        "Time that CENSOR and Soteria add.",
        (OVERHEAD,),
        {"small": "1", "paper": "1"},
        (
            (
                "The paper does not say what is timed. Twenty evaluations of the loss on the client's batch "
                "cannot cost 0.002% of one local step; over a whole training with its data loading and server "
                "they may."
            ),
            "[Performance](../../performance.md) has the times of all defenses.",
        ),
    ),
)
