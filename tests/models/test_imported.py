"""A user's own model by import path: how its factory is called, and what is said when something is off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.domains import Images
from gradveil.models import build, canonical, is_import_path

NETS = """
import math
import torch
from torch import nn

def with_domain(domain, width=4, *, bias: bool = True):
    size = math.prod(domain.shape)
    return nn.Sequential(nn.Flatten(), nn.Linear(size, width, bias=bias), nn.ReLU(), nn.Linear(width, domain.classes))

def only_options(width=5):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, width), nn.Linear(width, 10))

def classes_needed(classes: int):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, classes))

def anything(**options):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, options["classes"], bias=options["bias"]))

def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))

class Net(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.fc = nn.Linear(3072, classes)

    def forward(self, x):
        return self.fc(x.flatten(1))

def three_scores():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 3))

def two_outputs():
    class Pair(Net):
        def forward(self, x):
            return super().forward(x), x
    return Pair()

def wrong_input():
    return nn.Linear(7, 10)

def no_module():
    return 3

def broken():
    raise ZeroDivisionError("no\\n luck")

def frozen():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)).requires_grad_(False)

built = Net()
"""


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "usernets"
    package.mkdir()
    (package / "small.py").write_text(NETS)
    (package / "faulty.py").write_text("import no_such_library_anywhere")
    (package / "buggy.py").write_text("import math; math.tau.missing")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        ("usernets.small:with_domain", 3072 * 4 + 4 + 4 * 10 + 10),
        ("usernets.small:with_domain:width=2,bias=false", 3072 * 2 + 2 * 10 + 10),
        ("usernets.small:only_options:width=3", 3072 * 3 + 3 + 3 * 10 + 10),
        ("usernets.small:classes_needed:classes=10", 3072 * 10 + 10),
        ("usernets.small:anything:classes=10,bias=false", 3072 * 10),
        ("usernets.small:lazy", 3072 * 10 + 10),
        ("usernets.small:Net", 3072 * 10 + 10),
    ],
)
def test_factories_of_every_kind(spec: str, parameters: int, cifar: Images) -> None:
    before = torch.get_rng_state()
    model, again = build(spec, cifar, seed=1), build(spec, cifar, seed=1)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("usernets.small:three_scores", r"must give scores \[1, 10\] for one input, but gave \[1, 3\]"),
        ("usernets.small:two_outputs", "but gave tuple"),
        ("usernets.small:wrong_input", r"cannot take inputs \[1, 3, 32, 32\]: RuntimeError"),
        ("usernets.small:no_module", "must give a torch.nn.Module, but gave int"),
        ("usernets.small:broken", "could not be built: ZeroDivisionError: no luck"),
        ("usernets.small:frozen", "no trainable parameters"),
        ("usernets.small:built", "is Net, not a function or class"),
        ("usernets.small:math.pi", "is float, not a function or class"),
        ("usernets.small:absent", "has no 'absent'"),
        ("usernets.small", "write pkg.module:factory"),
        ("usernets.small:width=3", "write pkg.module:factory"),
        ("usernets.faulty:net", "no_such_library_anywhere"),
        ("usernets.buggy:net", "AttributeError: 'float' object has no attribute 'missing'"),
        ("usernets.nowhere:net", "PYTHONPATH"),
        ("nosuchmodule:net", "cannot import 'nosuchmodule'"),
        ("usernets.small:with_domain:depth=3", "no option 'depth'; its options: width=4, bias=true"),
        ("usernets.small:with_domain:width=wide", "a whole number"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(spec: str, complaint: str, cifar: Images) -> None:
    with pytest.raises(GradveilError, match=complaint) as caught:
        build(spec, cifar, seed=0)
    assert "\n" not in str(caught.value)


def test_paths_and_names_are_told_apart() -> None:
    paths = ["pkg.module:factory", "pkg.module:factory:width=3", "module:factory", "pkg.module"]
    names = ["lenet", "lenet:init=wide", "lenet:wide", "resnet18:", "unknown", "unknown:width=3"]
    assert all(map(is_import_path, paths))
    assert not any(map(is_import_path, names))


def test_canonical_spelling() -> None:
    assert (
        canonical("usernets.small:with_domain: width=02 ,bias=TRUE") == "usernets.small:with_domain:bias=true,width=2"
    )
    assert canonical(" usernets.small:lazy") == "usernets.small:lazy"
    assert canonical("lenet: normalize=TRUE, init=wide") == "lenet:init=wide,normalize=true"
