"""The layer rules against torch's own double backward, for every shipped family of models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from exchanges import SAMPLES, observed, private_batches
from gradveil import engine, models
from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.parts.matching import Matching
from gradveil.core.types import Recipe
from gradveil.engine import Batched, SharedNetwork, products
from gradveil.engine.network import UnsupportedError

MODELS = [
    "lenet:init=wide",
    "lenet:normalize=true",
    "mlp",
    "convnet:width=4",
    "vit:depth=1,dim=24",
    "resnet18",
    "vgg11",
]


def ways(model: str, *, size: int, train: bool) -> tuple[dict[str, Batched], dict[str, Tensor], dict[str, object]]:
    attack = ATTACKS.build("ig:tv=0.1", Budget(1, 1))
    assert isinstance(attack, Matching)
    return attack.problems(observed(private_batches(3, size), model=model, recipe=Recipe(train_mode=train)), [0, 1, 2])


@pytest.mark.integration
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(("size", "train"), [(1, False), (2, False), (3, True)])
@pytest.mark.parametrize("model", MODELS)
def test_joint_slopes_are_those_of_double_backward(model: str, size: int, train: bool) -> None:
    found, starts, given = ways(model, size=size, train=train)
    assert "joint" in found, "the rules cover every shipped model"
    (slopes, values), (expected, reference) = found["joint"](starts, given), found["loop reverse"](starts, given)
    torch.testing.assert_close(values, reference, rtol=1e-9, atol=1e-9)
    for name in starts:
        assert starts[name].dtype == torch.float64
        assert (slopes[name] - expected[name]).norm() <= 1e-9 * expected[name].norm()


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("size", [1, 2])
def test_a_layer_with_a_term_of_its_own_in_the_loss_is_covered(size: int) -> None:
    """PRECODE's bottleneck, with a draw for each example that the adversary has read, and in a part of the layers."""
    batches = private_batches(3, size)
    seen = observed(batches, model="lenet:init=wide", defense="precode:size=8")
    attack = ATTACKS.build("ig:tv=0.1", Budget(1, 1))
    assert isinstance(attack, Matching)
    first = ("body.0.weight", "body.0.bias")
    before = [
        replace(one, reply={name: one.reply[name] for name in first}, labels=own.labels)
        for one, own in zip(seen, batches, strict=True)
    ]
    for shown in (seen, before):
        found, starts, given = attack.problems(shown, [0, 1, 2])
        given = {**given, "buffers": {"fc.0.noise": torch.randn(3, size, 8)}}
        (slopes, values), (expected, reference) = found["joint"](starts, given), found["loop reverse"](starts, given)
        torch.testing.assert_close(values, reference, rtol=1e-9, atol=1e-9)
        assert (slopes["pixels"] - expected["pixels"]).norm() <= 1e-9 * expected["pixels"].norm()


@pytest.mark.integration
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    ("attack", "defense"),
    [
        ("ig:tv=0.1", "none"),
        ("gi", "none"),
        ("ig:aware=true", "clip:bound=0.5"),
        ("ig:aware=true", "noise:sigma=0.01"),
    ],
)
def test_an_unformed_gradient_has_the_slopes_of_a_formed_one(
    attack: str, defense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ATTACKS.build(attack, Budget(1, 1))
    assert isinstance(chosen, Matching)
    found, starts, given = chosen.problems(observed(private_batches(2), model="resnet18", defense=defense), [0, 1])
    if defense.startswith("clip"):
        assert max(float(bound.max()) for bound in given["bound"].values()) == pytest.approx(0.5, abs=1e-6)
    if defense.startswith("noise"):
        assert max(trust.min() for trust in given["trust"].values()) < 1
    formed: list[bool] = []
    plain = engine.gradients
    monkeypatch.setattr(engine, "gradients", lambda *args: formed.append(True) or plain(*args))
    slopes, values = found["joint"](starts, given)
    assert not formed, "the gradients of all layers together were never there"
    monkeypatch.setattr(products, "PAYS_OFF", torch.inf)
    expected, reference = found["joint"](starts, given)
    assert formed
    torch.testing.assert_close(values, reference, rtol=1e-9, atol=1e-9)
    assert (slopes["pixels"] - expected["pixels"]).norm() <= 1e-9 * expected["pixels"].norm()


def test_what_was_cut_down_is_searched_apart_with_its_gradient_formed() -> None:
    attack = ATTACKS.build("ig:aware=true", Budget(1, 1))
    assert isinstance(attack, Matching)
    (whole,), (cut,) = (observed(private_batches(1), defense=name) for name in ("none", "sparsify:rate=0.9"))
    assert attack.kind_of(whole) != attack.kind_of(cut)
    assert "cut" in attack.problems([cut], [0])[2]
    assert "cut" not in attack.problems([whole], [0])[2]


def test_a_reply_with_half_a_layer_is_left_to_other_ways() -> None:
    seen = observed(private_batches(2), model="lenet")
    attack = ATTACKS.build("ig", Budget(1, 1))
    assert isinstance(attack, Matching)
    half = [replace(one, reply={"fc.bias": one.reply["fc.bias"]}, labels=torch.tensor([0])) for one in seen]
    found, starts, given = attack.problems(half, [0, 1])
    assert "joint" not in found
    assert found["vmap reverse"](starts, given)[1].isfinite().all()


def test_strides_padding_and_dilation_are_followed() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 5, (3, 5), stride=(2, 1), padding=(2, 1), dilation=(1, 2))
            self.b = nn.Conv2d(5, 4, 1, stride=3, bias=False)
            self.norm = nn.GroupNorm(2, 4)
            self.fc = nn.Linear(4, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(self.norm(self.b(torch.tanh(self.a(x)))).mean((2, 3)))
            return out

    seen = observed(private_batches(2, 2), model="lenet")
    module = Odd()
    sent = {name: p.detach() for name, p in module.named_parameters()}
    reply = {name: torch.randn_like(p) for name, p in sent.items()}
    own = [replace(one, module=module, sent=sent, reply=reply) for one in seen]
    attack = ATTACKS.build("ig", Budget(1, 1))
    assert isinstance(attack, Matching)
    found, starts, given = attack.problems(own, [0, 1])
    (slopes, _), (expected, _) = found["joint"](starts, given), found["loop reverse"](starts, given)
    assert (slopes["pixels"] - expected["pixels"]).norm() <= 1e-4 * expected["pixels"].norm()


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.LeakyReLU])
def test_layers_that_edit_what_they_are_given_edit_nothing_that_is_watched(activation: type[nn.ReLU]) -> None:
    edits = activation()
    module = nn.Sequential(nn.Conv2d(3, 4, 3, 2), edits, nn.Flatten(), nn.Linear(900, 10))

    def gradients(inplace: bool) -> dict[str, Tensor]:
        edits.inplace = inplace
        network = SharedNetwork(module, dict(module.named_parameters()), train_mode=False)
        batch = SAMPLES.batch(range(3))
        inputs = batch.inputs.unsqueeze(1).requires_grad_()
        passed = network.differentiate(nn.functional.cross_entropy, inputs, batch.labels.unsqueeze(1))
        assert edits.inplace is inplace, "the given module stays as it is"
        return engine.gradients(passed)

    copied, edited = gradients(False), gradients(True)
    for name, tensor in copied.items():
        torch.testing.assert_close(edited[name], tensor)


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(3, 6, 3, groups=3), nn.Conv2d(3, 3, 3, padding_mode="reflect", padding=1), nn.Bilinear(2, 2, 2)]
)
def test_a_layer_without_a_rule_is_refused(layer: nn.Module) -> None:
    module = nn.Sequential(layer)
    with pytest.raises(UnsupportedError, match="has no gradient rule"):
        SharedNetwork(module, dict(module.named_parameters()), train_mode=False)


def test_tied_parameters_are_refused() -> None:
    shared = nn.Linear(4, 4)
    module = nn.Sequential(shared, nn.Linear(4, 4))
    module[1].weight = shared.weight
    with pytest.raises(UnsupportedError, match="shared"):
        SharedNetwork(module, dict(module.named_parameters()), train_mode=False)


class Sly(nn.Module):
    """Uses a layer's weight behind the layer's back, which no hook can see."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * 32 * 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x.flatten(1)) + 10 * x.flatten(1).square() @ self.fc.weight.T
        return out


def test_a_model_that_the_rules_get_wrong_is_found_out() -> None:
    seen = observed(private_batches(2), model="lenet")
    module = Sly()
    sent = {name: p.detach() for name, p in module.named_parameters()}
    reply = {name: torch.randn_like(p) for name, p in sent.items()}
    attack = ATTACKS.build("ig", Budget(1, 1))
    assert isinstance(attack, Matching)
    found, _, _ = attack.problems([replace(one, module=module, sent=sent, reply=reply) for one in seen], [0, 1])
    assert "joint" not in found


class Odd(nn.Module):
    """Does what ordinary models do at times, and the rules have to live with."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.hidden, self.fc = nn.Linear(3072, 16), nn.Linear(16, 10)
        if habit == "unused":
            self.aside, self.token = nn.Linear(16, 3), nn.Parameter(torch.zeros(1, 1, 4))
        if habit == "normed":
            self.hidden = nn.utils.parametrizations.weight_norm(self.hidden)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.hidden(x.flatten(1)).sigmoid()
        if self.habit == "unused":
            self.aside(h)
        if self.habit == "one by one":
            h = torch.stack([self.hidden(one.flatten()).sigmoid() for one in x])
        outputs: Tensor = self.fc(input=h) if self.habit == "named" else self.fc(h)
        return outputs


@pytest.mark.parametrize(
    ("habit", "covered"), [("unused", True), ("named", False), ("normed", False), ("one by one", False)]
)
def test_a_model_with_habits_is_attacked_one_way_or_the_other(habit: str, covered: bool) -> None:
    torch.manual_seed(0)
    module = Odd(habit)
    sent = {name: p.detach() for name, p in module.named_parameters()}
    reply = {name: torch.randn_like(p) for name, p in sent.items()}
    attack = ATTACKS.build("ig", Budget(1, 1))
    assert isinstance(attack, Matching)
    seen = [replace(one, module=module, sent=sent, reply=reply) for one in observed(private_batches(2), model="lenet")]
    found, starts, given = attack.problems(seen, [0, 1])
    assert ("joint" in found) is covered
    slopes, _ = found["joint" if covered else "loop reverse"](starts, given)
    assert all(bool(tensor.isfinite().all()) for tensor in slopes.values())


def test_the_given_module_is_not_edited() -> None:
    module = models.build("resnet18", SAMPLES.domain, seed=0)
    before = [type(layer) for layer in module.modules()]
    SharedNetwork(module, dict(module.named_parameters()), train_mode=True)
    assert [type(layer) for layer in module.modules()] == before
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.integration
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_separate_problems_have_the_gradients_of_shared_ones(model: str, train: bool) -> None:
    module = models.build(model, SAMPLES.domain, seed=0)
    sent = {name: parameter.detach() for name, parameter in module.named_parameters()}
    batch, found = SAMPLES.batch(range(4)), []
    for kind in (SharedNetwork, engine.SeparateNetwork):
        inputs = batch.inputs.double().unflatten(0, (2, 2)).requires_grad_()
        network = kind(module.double(), {name: p.double() for name, p in sent.items()}, train_mode=train)
        passed = network.differentiate(nn.functional.cross_entropy, inputs, batch.labels.unflatten(0, (2, 2)))
        found.append(engine.gradients(passed))
    for name, expected in found[0].items():
        assert (found[1][name] - expected).norm() <= 1e-4 * expected.norm() + 1e-9, "torch is right to 6e-6 under vmap"


def test_a_layer_that_sees_no_example_is_not_covered() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.last = nn.Linear(3, 12), nn.Linear(12, 10)

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.last(x.flatten(1) + self.start(torch.ones(1, 3)))
            return outputs

    module = Constant()
    network = engine.SeparateNetwork(module, dict(module.named_parameters()), train_mode=None)
    with pytest.raises(UnsupportedError, match="same for all"):
        network.differentiate(nn.functional.cross_entropy, torch.rand(2, 1, 12), torch.zeros(2, 1, dtype=torch.long))
