"""Chromium for the tests of the report: skipped with the reason where there is none, except in CI, where that fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from browser.visits import Open, Visit
from gradveil.report import render
from report.saved_audit import write_audit


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        reason = "there is no chromium on the PATH; scripts/install_browser.sh installs it where it may"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Open a file at a width and in a theme: ``visit(path, width=400, theme="dark")``."""
    contexts = []

    def open_file(path: Path, *, width: int = 1280, theme: Any = "light", javascript: bool = True) -> Visit:
        size: Any = {"width": width, "height": 900}
        context = browser.new_context(viewport=size, color_scheme=theme, java_script_enabled=javascript)
        contexts.append(context)
        seen = Visit(context.new_page())
        seen.open(path.as_uri())
        return seen

    yield open_file
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two defenses and one attack: what `gradveil audit` gives out of the box."""
    return render(write_audit(tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="session")
def wide_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More images than fit, several attacks, and a spec too long for its column."""
    defenses = ["none", "noise:sigma=0.1", "clip:norm=1.0+prune:share=0.9+noise:sigma=0.001"]
    return render(write_audit(tmp_path_factory.mktemp("wide"), defenses=defenses, attacks=["ig", "dlg"], images=20))
