"""Fixtures that several folders of tests share, and two switches that change how numbers are rounded in all tests.

A test that passes on one processor only compares numbers near a kink, or with too narrow a margin. These environment
variables find such a test on any machine; CONTRIBUTING.md says how they are used:

GRADVEIL_DISTURB=1e-6  makes every image that is held in memory darker, each pixel by up to one part in a million
GRADVEIL_ONEDNN=off    computes without oneDNN, by the kernels that torch has for any processor
"""

from __future__ import annotations

import os
import signal

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line does

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradveil.auditing import Case, run_case
from gradveil.data import MemoryImages
from gradveil.report import render

DISTURB = float(os.environ.get("GRADVEIL_DISTURB") or 0)
ONEDNN = os.environ.get("GRADVEIL_ONEDNN", "on")

# A shell without job control starts what runs in its background with interrupts ignored, and tests' own processes
# would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if ONEDNN not in ("on", "off"):
    raise pytest.UsageError(f"GRADVEIL_ONEDNN is on or off, not {ONEDNN!r}")
if ONEDNN == "off":
    torch.backends.mkldnn.set_flags(False)
if not 0 <= DISTURB <= 1e-4:
    raise pytest.UsageError(f"GRADVEIL_DISTURB is a share from 0 to 1e-4, not {DISTURB}")
if DISTURB:
    undisturbed = MemoryImages._inputs

    def darker(images: MemoryImages, indices: Tensor) -> Tensor:
        """The same for the same image each time: tests compare an image with itself. Never above 1 or below 0."""
        inputs = undisturbed(images, indices)
        shares = torch.rand(inputs.shape[1:], generator=torch.Generator().manual_seed(0))
        return inputs * (1 - DISTURB * shares.to(inputs))

    MemoryImages._inputs = darker  # type: ignore[method-assign,assignment]


def pytest_report_header() -> str:
    return (
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, oneDNN {ONEDNN}, disturbed by {DISTURB}"
    )


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Everything made while this holds is in float64, where rounding moves nothing across a kink of a network."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one real audit: four CIFAR-10 images, LeNet, no defense and noise, IG and the prior alone."""
    folder = tmp_path_factory.mktemp("audited") / "audit"
    run_case(Case(budget="quick", attacks=("ig",)), folder)
    render(folder)
    return folder
