"""What private data is stands in ``domains/``: few other files know that it has channels and heights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gradveil

SOURCE = Path(gradveil.__file__).parent
ROOMS = {"domains", "data", "models", "generators", "metrics"}
"""They are about pictures, or hold them."""
MOST = 20

KNOWS = re.compile(
    r"\bH, W\b|\bheights?\b|\b(in_|out_)?channels(_last)?\b(?! of defenses)"  # their names
    r"|shape\[(-[23]|2:|1:3)|\bdim\(\) [!=]= 4|[\w)]\.ndim [!=]= 4"  # their places in a shape
    r"|dim=\((0, )?(1, )?2, 3\)|dim=\(-2, -1|(?<!-)\b1, 1, 1\)|\[:, None, None, None|\([13], \d\d+, \d\d+\)"
    r"|conv2d|pool2d|\b(un)?fold\(|\binterpolate\(|total_variation|\bPIL\b"  # what is done along them
    r"|\bdomain\.(mean|std|width)\b",
    re.IGNORECASE,
)
OF_A_DEFENSE = re.compile(r"\b(channels_of|channels)\b")
"""In files that use ``Channel`` the word stands for what a defense did between gradient and reply."""

KNOWN = {
    "attacks/against/ats.py": "undoes image operations",
    "attacks/generative.py": "which shipped generator draws which shape",
    "attacks/parts/matching.py": "shifts pictures onto each other",
    "attacks/parts/right_angle_labels.py": "smooth pictures as a prior",
    "attacks/parts/right_angles.py": "smooth pictures as a prior",
    "client/local.py": "a docstring",
    "client/owner.py": "attacks on its observations rebuild images",
    "defenses/ats.py": "image operations",
    "defenses/censor.py": "convolutions as matrices",
    "defenses/graddefense.py": "kinds of layers",
    "defenses/soteria.py": "strides of convolutions",
    "engine/clients.py": "memory layout of convolutions",
    "engine/rules.py": "gradients of convolutions",
    "lab/bench/attacks.py": "images of any size",
    "lab/generators/biggan.py": "a network that draws",
    "lab/generators/progan.py": "a network that draws",
    "lab/generators/stylegan2.py": "a network that draws",
    "lab/generators/training.py": "networks that draw and judge",
    "report/gallery.py": "how large pictures are on the page",
    "report/svg.py": "heights of charts",
}
"""Each file that knows, and why it has to. A new one is asked first whether the domain could not tell it."""


def knows(source: str) -> bool:
    """Whether a source, comments and docstrings included, speaks of channels and heights or computes along them."""
    return bool(
        KNOWS.search(OF_A_DEFENSE.sub("", source) if re.search(r"\bChannel\b|\bchannels_of\b", source) else source)
    )


def test_few_files_know_of_channels_and_heights() -> None:
    files = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in ROOMS]
    assert {path.relative_to(SOURCE).as_posix() for path in files if knows(path.read_text())} == KNOWN.keys()
    assert len(KNOWN) <= MOST


@pytest.mark.parametrize(
    "source",
    [
        '"""Inputs [n, C, H, W]."""',
        "channels, rows, columns = shape",
        "across, down = inputs.shape[-2:]",
        "mean = torch.tensor(domain.mean)",
        "inputs.mean(dim=(1, 2, 3))",
        "isinstance(layer, nn.Conv2d)",
        "if shape == (3, 32, 32):",
        "from PIL import Image",
        "repeated = inputs.repeat(2, 1, 1, 1)",
    ],
)
def test_a_source_that_knows_is_caught(source: str) -> None:
    assert knows(source)


@pytest.mark.parametrize(
    "source", ['"""Inputs [n, ...]."""', "torch.zeros(1, *domain.shape)", "channels: list[Channel] = channels_of(one)"]
)
def test_a_source_that_does_not_is_left_alone(source: str) -> None:
    assert not knows(source)
