"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line does

from pathlib import Path

import pytest

from gradveil.auditing import Case, run_case
from gradveil.report import render

# A shell without job control starts what runs in its background with interrupts ignored, and tests' own processes
# would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one real audit: four CIFAR-10 images, LeNet, no defense and noise, IG and the prior alone."""
    folder = tmp_path_factory.mktemp("audited") / "audit"
    run_case(Case(budget="quick", attacks=("ig",)), folder)
    render(folder)
    return folder
