"""Imprint: a crafted layer before the model gives most images of a batch away, exactly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from exchanges import SAMPLES, observed, private_batches
from gradveil import models
from gradveil.attacks import ATTACKS, Attack, Budget, Server
from gradveil.attacks.active.imprint import direction, edges
from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch, Recipe
from gradveil.data import load
from gradveil.threat import Knowledge, threat_model
from interrogation import interrogated

PUBLIC = SAMPLES.batch(range(64, 100))


def attack(options: str = "") -> Attack:
    return ATTACKS.build(f"imprint:{options}", Budget(1, 1))


def best_psnr(found: Tensor, batch: Batch) -> Tensor:
    """[n]: the PSNR of each private image's closest reconstruction."""
    errors = (found[:, None] - batch.inputs).square().mean(dim=(2, 3, 4))
    return -10 * errors.amin(dim=0).clamp(min=1e-16).log10()


def recovered(options: str, size: int, bar: float = 60.0, **exchange: object) -> int:
    """How many of the first ``size`` samples come back above ``bar`` decibels."""
    batch, chosen = SAMPLES.batch(range(size)), attack(options)
    seen = interrogated(chosen, batch, **{"model": "lenet", "threat": "G", "public": PUBLIC, **exchange})  # type: ignore[arg-type]
    (found,) = chosen([seen], seeds=[0])
    assert found.inputs.shape == batch.inputs.shape
    return int((best_psnr(found.inputs, batch) > bar).sum())


@pytest.mark.integration
@pytest.mark.parametrize("variant", ["fedsgd", "sparse"])
def test_resnet18_gives_most_of_a_batch_away(variant: str) -> None:
    assert recovered(f"variant={variant}", 16, model="resnet18") >= 12


@pytest.mark.integration
@pytest.mark.parametrize("variant", ["fedsgd", pytest.param("sparse", marks=pytest.mark.slow)])
def test_and_of_a_larger_one(variant: str) -> None:
    assert recovered(f"variant={variant},bins=256", 64, model="resnet18") >= 32


@pytest.mark.parametrize("query", ["mean", "dct", "random"])
@pytest.mark.parametrize("quantiles", ["public", "normal", "laplace"])
@pytest.mark.parametrize("variant", ["fedsgd", "sparse"])
def test_every_query_with_every_distribution(query: str, quantiles: str, variant: str) -> None:
    assert recovered(f"query={query},quantiles={quantiles},variant={variant}", 16) >= 10


@pytest.mark.parametrize("model", ["vgg11", "vit:depth=1,dim=24", "mlp", "mlp:normalize=true", "convnet:width=8"])
def test_whatever_the_model(model: str) -> None:
    assert recovered("", 16, model=model) >= 12


@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_sparse_bins_survive_local_steps_and_others_do_not(lr: float) -> None:
    steps = Recipe(sends="delta", batch_size=8, lr=lr)
    assert recovered("", 32, recipe=steps) >= 24
    assert recovered("variant=fedsgd", 32, recipe=steps) < 12
    assert recovered("", 32, recipe=Recipe(sends="delta", batch_size=8, epochs=3, lr=lr)) >= 24


def test_digits_by_public_data() -> None:
    """Digits are dark and vary little: public data place the bins where they are."""
    digits, size = load("mnist-samples"), 32
    batch, chosen = digits.batch(range(size)), attack("query=mean,quantiles=public")
    honest = models.build("lenet", digits.domain, seed=0)
    sent = {name: p.detach() for name, p in honest.named_parameters()}
    made = chosen.craft(Server(honest, "lenet", sent, digits.domain, digits.batch(range(50, 100))), [], 0)
    assert made is not None
    asked = batch.inputs.flatten(1) @ made.sent["front.query.weight"].T + made.sent["front.query.bias"]
    inside = (asked > 0) & (asked < 1e-6)
    assert torch.equal(inside.sum(dim=1), torch.ones(size, dtype=torch.int64)), "every digit is in one bin"
    assert (inside.sum(dim=0) == 1).sum() >= 22, "and most are alone there"


@pytest.mark.parametrize(("defense", "bar"), [
    ("noise:sigma=0.001", 50.0), ("noise:sigma=0.1", 30.0), ("clip:bound=4", 40.0), ("clip:bound=0.1,per=global", 60.0),
    ("sparsify:rate=0.8", 60.0), ("soteria:rate=0.8", 60.0),
])  # fmt: skip
def test_defenses_that_do_not_help(defense: str, bar: float) -> None:
    assert recovered("", 16, bar, model="lenet:init=wide", defense=defense) >= 12


def test_dp_helps() -> None:
    assert recovered("", 16, 15.0, model="lenet:init=wide", defense="dp") == 0


def test_many_clients_are_read_at_once_and_each_as_if_alone() -> None:
    chosen, batches = attack(), private_batches(3, 4)
    seen = [interrogated(chosen, batch, model="lenet") for batch in batches]
    shared = [
        seen[0],
        *(type(one)(**{**vars(one), "sent": seen[0].sent, "module": seen[0].module}) for one in seen[1:]),
    ]
    for one, alone in zip(chosen(shared, seeds=[0, 1, 2]), seen, strict=True):
        (single,) = chosen([alone], seeds=[5])
        torch.testing.assert_close(one.inputs, single.inputs)
        assert torch.equal(one.labels, single.labels)


def test_what_is_not_found_is_gray_and_counted() -> None:
    """Sixteen images cannot be alone in five bins."""
    chosen, batch = attack("bins=5"), SAMPLES.batch(range(16))
    (found,) = chosen([interrogated(chosen, batch, model="lenet")], seeds=[0])
    gray = (found.inputs == 0.5).flatten(1).all(dim=1)
    assert int(gray.sum()) == 11
    assert found.objective == pytest.approx(11 / 16)


@pytest.mark.integration
def test_the_labels_are_read_though_not_in_order() -> None:
    chosen, batch = attack(), SAMPLES.batch(range(16))
    (found,) = chosen([interrogated(chosen, batch, model="resnet18")], seeds=[0])
    assert torch.equal(found.labels.sort().values, batch.labels.sort().values)


def test_one_question_of_the_same_seed_is_the_same_question() -> None:
    chosen, honest = attack(), models.build("lenet", SAMPLES.domain, seed=0)
    server = Server(honest, "lenet", {n: p.detach() for n, p in honest.named_parameters()}, SAMPLES.domain)
    before = torch.get_rng_state()
    first, again, other = (chosen.craft(server, [], seed) for seed in (1, 1, 2))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(torch.get_rng_state(), before)
    for name in first.tampered:
        assert torch.equal(first.sent[name], again.sent[name])
    assert not torch.equal(first.sent["front.query.weight"], other.sent["front.query.weight"])
    assert first.model == "imprint:bins=128,ceiling=1e-06,kind=sparse > lenet"
    rebuilt = models.build(first.model, SAMPLES.domain, seed=0)
    assert {n: p.shape for n, p in rebuilt.named_parameters()} == {n: t.shape for n, t in first.sent.items()}
    assert first.tampered == tuple(name for name in first.sent if name.startswith("front."))
    assert chosen.craft(server, [interrogated(chosen, SAMPLES.batch([0]), model="lenet")], 1) is None


def test_the_picture_that_is_passed_on_is_a_plain_one() -> None:
    for variant in ("fedsgd", "sparse"):
        seen = interrogated(attack(f"variant={variant}"), SAMPLES.batch(range(32)), model="lenet")
        front = seen.module.get_submodule("front")
        passed = torch.func.functional_call(
            front, {n.removeprefix("front."): t for n, t in seen.sent.items() if n in seen.crafted}, (PUBLIC.inputs,)
        )
        assert passed.flatten(1).std(dim=1).max() < 1e-3
        shades = passed.mean(dim=(1, 2, 3))
        assert -0.1 < shades.min() < 0.4
        assert 0.6 < shades.max() < 1.5


def test_it_needs_public_data_only_where_it_uses_them() -> None:
    threat_model("F").vet("imprint", attack().requires)
    asks = attack("quantiles=public")
    assert asks.requires - attack().requires == {Knowledge.PUBLIC_DATA}
    assert asks.crafts
    with pytest.raises(GradveilError, match="it fits threat model G, H"):
        threat_model("F").vet("imprint", asks.requires)
    with pytest.raises(GradveilError, match="quantiles=normal"):
        interrogated(asks, SAMPLES.batch([0]), model="lenet")


def test_other_broadcasts_are_refused() -> None:
    for model in ("lenet", "imprint > lenet"):
        with pytest.raises(GradveilError, match="crafted itself"):
            attack()(observed(private_batches(1), model=model), seeds=[0])
    with pytest.raises(GradveilError, match="has one already"):
        interrogated(attack(), SAMPLES.batch([0]), model="imprint > lenet")


@pytest.mark.parametrize("options", ["bins=2", "gain=0", "contrast=-1", "query=max"])
def test_bad_options(options: str) -> None:
    with pytest.raises(GradveilError, match="imprint"):
        attack(options)


@pytest.mark.parametrize("query", ["mean", "dct", "random"])
def test_bins_hold_equal_shares(query: str) -> None:
    """Of CIFAR-10 samples that the edges were not made of: no tenth of the bins holds more than a third of them."""
    asked = direction(query, SAMPLES.domain, 0)  # type: ignore[arg-type]
    answers = (SAMPLES.batch(range(64)).inputs * asked).sum(dim=(1, 2, 3)).double()
    for quantiles in ("public", "normal", "laplace"):
        ends = edges(asked, 100, quantiles, SAMPLES.domain, PUBLIC.inputs)
        assert ends.shape == (101,)
        assert ends.diff().min() > 0
        tenths = torch.histogram(answers, ends[::10])[0]
        assert int(tenths.sum()) == 64, "none is outside"
        assert tenths.max() <= 64 / 3


def test_quantiles_of_known_distributions() -> None:
    """Against the distribution functions themselves."""
    asked = direction("random", SAMPLES.domain, 0)
    levels = torch.arange(1, 8, dtype=torch.float64) / 8
    normal, laplace = (edges(asked, 8, kind, SAMPLES.domain, None)[1:-1] for kind in ("normal", "laplace"))  # type: ignore[arg-type]
    spread = (normal[-1] - normal[0]) / (2 * 1.1503493803760079)
    torch.testing.assert_close(torch.special.ndtr((normal - normal[3]) / spread), levels)
    standard = (laplace - laplace[3]) / spread * math.sqrt(2)
    torch.testing.assert_close(0.5 + standard.sign() * (1 - torch.exp(-standard.abs())) / 2, levels)
    drawn = torch.randn(4000, generator=torch.Generator().manual_seed(0)).double()
    pictures = 0.5 + drawn[:, None, None, None] * asked  # whose answers are the draws: asked has length 1
    found = edges(asked, 8, "public", SAMPLES.domain, pictures)[1:-1]
    torch.testing.assert_close(torch.special.ndtr(found), levels, atol=0.02, rtol=0)
