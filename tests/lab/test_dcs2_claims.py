"""The studies behind claims of DCS2 measure what their rows say."""

from itertools import islice

import torch
from dcs2_base import RELEASED, deal
from dcs2_claims import STUDIES, Run, cosines, silent
from torch.nn import functional as F

from gradveil import models
from gradveil.data import load
from gradveil.federated import Federation, make_training

BRIEFLY = Run("cpu", few=True)


def test_each_study_says_what_it_is_for() -> None:
    assert all(study.__doc__ for study in STUDIES.values())


def test_a_wider_layer_gives_more_images_away() -> None:
    found = {(row["model"], row["images"]): row["read_exactly"] for row in silent(BRIEFLY)}
    for images in (8, 32, 96):
        counts = [found[f"mlp:hidden={width}", images] for width in (256, 1000, 4000)]
        assert counts == sorted(counts)
        assert 0 < counts[-1] <= images


def test_a_start_of_the_same_label_has_a_parallel_gradient_at_once() -> None:
    other, same = islice(cosines(BRIEFLY), 2)
    assert (other["start_label"], same["start_label"]) == ("other", "same")
    assert same["start_cosine"] > 0.95 > other["cosine"]


def test_clients_have_the_labels_that_the_release_draws() -> None:
    data = load("mnist-samples")
    dealt = deal(data, "released", seed=0)
    assert [sorted(set(data.labels[own].tolist())) for own in dealt] == [sorted(pair) for pair in RELEASED]


def test_momentum_that_every_client_keeps_is_momentum_of_the_server() -> None:
    """One step a round, all clients in every round: what ``papers/dcs2.yaml`` takes for the training of the release."""
    data, spec, clients = load("mnist-samples"), "mlp:hidden=8", 5
    case = make_training(
        {
            "data": "mnist-samples", "clients": clients, "batch_size": 20, "lr": 0.1, "algorithm": "fedsgd",
            "model": spec, "server_momentum": 0.9,
        }
    )  # fmt: skip
    federation = Federation(case, data)
    owned = [data.batch(share) for share in federation.shares]
    shared = models.build(spec, data.domain, seed=case.seed)
    modules = [models.build(spec, data.domain, seed=case.seed) for _ in owned]
    steps = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in modules]
    for number in range(1, 5):
        federation.round(number)
        for module, step, batch in zip(modules, steps, owned, strict=True):
            module.load_state_dict(shared.state_dict())
            step.zero_grad()
            F.cross_entropy(module(batch.inputs), batch.labels).backward()
            step.step()
        mean = [torch.stack(same).mean(0) for same in zip(*(m.parameters() for m in modules), strict=True)]
        shared.load_state_dict(dict(zip(shared.state_dict(), mean, strict=True)))
    for name, expected in shared.named_parameters():
        torch.testing.assert_close(federation.state.params[name], expected.detach(), atol=1e-5, rtol=1e-4)
