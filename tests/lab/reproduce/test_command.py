"""``gradveil reproduce``: what it lists, what it refuses in one line, and what it leaves behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradveil.cli.main import app
from gradveil.core.errors import GradveilError
from gradveil.lab.reproduce import reproductions

runner = CliRunner(env={"COLUMNS": "200"})


def refusal(*arguments: str) -> str:
    result = runner.invoke(app, ["reproduce", *arguments])
    assert isinstance(result.exception, GradveilError), result.output
    return str(result.exception)


def test_the_list_has_every_name_with_what_each_scale_takes() -> None:
    lines = runner.invoke(app, ["reproduce", "--list"]).output.splitlines()
    assert [line.split()[0] for line in lines[1:-1] if not line.startswith(" ")] == list(reproductions())
    assert re.search(r"^censor-1 +Table I +30 cases, \d+ min +30 cases, \d+ min", "\n".join(lines), re.MULTILINE)
    assert any(line.startswith("dcs2-2") and "needs your data" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a reproduction, such as censor-1"),
        (["ggl-11"], "no reproduction is called 'ggl-11'; did you mean ggl-1"),
        (
            ["dcs2-2"],
            "add --data 'HAM10000=ham10000:path=FOLDER,size=224' or --data 'CelebA=celeba:path=FOLDER,size=224'",
        ),
        (["censor-7", "--data", "ImageNet"], "write WORD=NAME, such as ImageNet=imagenet:path=FOLDER"),
        (["censor-7", "--data", "Pets=folder:path=x"], "censor-7 has no data 'Pets' to bring; it has: ImageNet"),
        (["censor-7", "--scale", "small", "--settings", "release"], "--settings is of the scale paper"),
        (["censor-7", "--device", "tpu"], "the device is cpu or cuda, not 'tpu'"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: list[str], said: str) -> None:
    message = refusal(*arguments)
    assert said in message
    assert "\n" not in message


def test_a_page_of_nothing_says_that_nothing_was_run(tmp_path: Path) -> None:
    target = tmp_path / "page.md"
    arguments = ["reproduce", "censor-7", "--no-run", "--out", str(tmp_path / "out"), "--page", str(target)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.output.split() == [str(target)]
    assert "ImageNet, Layer-wise gradient; ImageNet, Entire gradient: not run yet." in target.read_text()
