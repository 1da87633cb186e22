"""Two domains that every model must take: colour 32x32 as CIFAR-10, grey 28x28 as MNIST."""

from __future__ import annotations

import pytest

from gradveil.domains import Images

CIFAR = Images(channels=3, height=32, width=32, classes=10, mean=(0.491, 0.482, 0.447), std=(0.247, 0.243, 0.262))
MNIST = Images(channels=1, height=28, width=28, classes=10, mean=(0.131,), std=(0.308,))


@pytest.fixture
def cifar() -> Images:
    return CIFAR


@pytest.fixture(params=[CIFAR, MNIST], ids=["cifar", "mnist"])
def domain(request: pytest.FixtureRequest) -> Images:
    return request.param
