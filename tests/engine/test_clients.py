"""Clients side by side on a GPU."""

from __future__ import annotations

import pytest
import torch

from gradveil import models
from gradveil.client import StatisticsAfter, cross_entropy
from gradveil.core.trees import detached, scaled
from gradveil.data import load
from gradveil.engine import Gradient, Request, without_tf32
from gradveil.engine.clients import ClientGraphs
from gradveil.federated import Federation, Training
from gradveil.models import Functional

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SAMPLES = load("mnist-samples")


def test_graphs_give_what_each_request_gives_alone() -> None:
    """In double precision, with batch norm in train mode, for changing numbers of clients and of examples."""
    module = models.build("convnet:width=4", SAMPLES.domain, seed=0).double().cuda()
    model = Functional(module, train_mode=True)
    params, buffers = detached(model.params), detached(dict(module.named_buffers()))
    gradient, statistics, graphs = Gradient(model, cross_entropy), StatisticsAfter(module), ClientGraphs()
    for turn in range(6):
        requests: list[Request[object]] = []
        for client in range(4 - turn % 2):
            batch = SAMPLES.batch(range(turn + client, turn + client + 8 + client // 2)).to("cuda")
            own, inputs = scaled(params, 1 + 0.1 * client), batch.inputs.double()
            requests.append(Request(gradient, (own, {}, inputs, batch.labels)))
            requests.append(Request(statistics, (own, buffers, inputs)))
        for found, request in zip(graphs(requests), requests, strict=True):
            torch.testing.assert_close(found, request.evaluate(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedsgd"])
def test_a_training_ends_where_clients_in_turn_end(algorithm: str) -> None:
    """Uneven shares, so that some work is captured and some is new."""
    fields = {"data": "mnist-samples", "model": "lenet", "clients": 4, "partition": "dirichlet:alpha=2", "lr": 0.01}
    with without_tf32():
        states = []
        for way in ("false", "true"):
            case = Training(**fields, algorithm=algorithm, batch_size=10, device="cuda", side_by_side=way)  # type: ignore[arg-type]
            federation = Federation(case, SAMPLES)
            for number in range(1, 7):
                federation.round(number)
            states.append(federation.state.params)
    torch.testing.assert_close(states[1], states[0], atol=1e-5, rtol=1e-4)
