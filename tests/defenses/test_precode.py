"""The bottleneck against a plain computation, its place in a model, and what clients and attackers make of it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.nn import functional as F

from exchanges import SAMPLES, private_batches
from gradveil import models
from gradveil.attacks import ATTACKS, Budget
from gradveil.client import SimulatedClient, cross_entropy
from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import detached
from gradveil.core.types import Batch, Params, Recipe
from gradveil.defenses import DEFENSES, precode
from gradveil.models import Functional
from gradveil.threat import Observation, observe, threat_model
from steps import step_of

FEDAVG = Recipe(sends="delta", epochs=2, batch_size=2, lr=0.05)
FAMILIES = ["lenet", "convnet:width=8", "mlp", "vit:depth=1,dim=48", "resnet18"]


def reshaped(model: str = "lenet", spec: str = "precode") -> nn.Module:
    return DEFENSES.build(spec).on_model(models.build(model, SAMPLES.domain, seed=0))


def functional(spec: str = "precode:size=16", *, noise: Tensor | None = None) -> Functional:
    """A LeNet with its bottleneck, in float64 so that derivatives can be compared closely."""
    model = Functional(reshaped(spec=spec).double())
    return model if noise is None else model.with_buffers({"fc.0.noise": noise.double()})


def observed(
    batches: list[Batch], model: str = "lenet:init=wide", spec: str = "precode", recipe: Recipe | None = None
) -> list[Observation]:
    """What the adversary sees where the two sides agreed on the architecture with the bottleneck in it."""
    defense, recipe = DEFENSES.build(spec), recipe or Recipe()
    module = reshaped(model, spec)
    client = SimulatedClient(module, recipe=recipe, defense=defense)
    return [
        observe(
            module=module,
            model=model,
            domain=SAMPLES.domain,
            sent=client.model.params,
            reply=client.reply(client.model.params, batch, Stream.seeded(0, "defense", i)).update,
            batch=batch,
            recipe=recipe,
            defense=spec,
            threat=threat_model("C"),
        )
        for i, batch in enumerate(batches)
    ]


def by_hand(bottleneck: precode.Bottleneck, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and KL divergence, the latter from torch's own distributions."""
    weight, bias = bottleneck.encoder.weight, bottleneck.encoder.bias
    size = len(weight) // 2
    mean = features @ weight[:size].T + bias[:size]
    std = F.softplus(features @ weight[size:].T + bias[size:])
    code = torch.distributions.Normal(mean, std)
    divergence = torch.distributions.kl_divergence(code, torch.distributions.Normal(0.0, 1.0)).sum(dim=1).mean()
    return (mean + std * noise) @ bottleneck.decoder.weight.T + bottleneck.decoder.bias, divergence


@pytest.mark.parametrize("rows", [1, 5])
def test_the_bottleneck_is_what_the_paper_says(rows: int) -> None:
    torch.manual_seed(0)
    bottleneck = precode.Bottleneck(12, 7, 0.25)
    features, noise = torch.randn(5, 12), torch.randn(rows, 7)
    bottleneck.noise = noise
    outputs = bottleneck(features)
    expected, divergence = by_hand(bottleneck, features, noise)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(bottleneck.pop_term(), 0.25 * divergence)


def test_without_a_draw_the_code_is_its_mean() -> None:
    bottleneck = precode.Bottleneck(12, 7, 0.25)
    features = torch.randn(5, 12, generator=generator(0))
    assert torch.equal(bottleneck(features), bottleneck.decoder(bottleneck.encoder(features)[:, :7]))


def test_the_term_stays_finite_where_the_standard_deviation_vanishes() -> None:
    bottleneck = precode.Bottleneck(2, 3, 1.0)
    with torch.no_grad():
        bottleneck.encoder.bias[3:] = -1e4
    bottleneck(torch.ones(1, 2))
    assert torch.isfinite(bottleneck.pop_term())


@pytest.mark.parametrize("model", FAMILIES)
def test_the_model_keeps_everything_but_the_way_to_its_classifier(model: str) -> None:
    plain = models.build(model, SAMPLES.domain, seed=0)
    before = detached(dict(plain.named_parameters()))
    defense = DEFENSES.build("precode")
    changed = defense.on_model(plain)
    inputs = SAMPLES.batch(range(3)).inputs
    name = models.classifier(plain, inputs)
    parts: Any = changed.get_submodule(name)
    bottleneck, linear = parts
    assert isinstance(bottleneck, precode.Bottleneck)
    assert models.classifier(changed, inputs) == f"{name}.1"
    assert torch.equal(linear.weight, before[f"{name}.weight"])
    expected = linear(bottleneck(models.representation(plain, inputs)(inputs)))
    torch.testing.assert_close(changed(inputs), expected)
    assert not changed.training
    assert all(layer.training is False for layer in changed.modules())
    assert {k: v.shape for k, v in plain.named_parameters()} == {k: v.shape for k, v in before.items()}
    assert all(torch.equal(v, before[k]) for k, v in plain.named_parameters()), "the given model is not edited"
    features = linear.in_features
    added = sum(p.numel() for p in changed.parameters()) - sum(p.numel() for p in plain.parameters())
    assert added == 512 * (features + 1) + features * 257


def test_mode_precision_and_global_generator_are_kept() -> None:
    plain = models.build("lenet", SAMPLES.domain, seed=0).double().train()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    changed = DEFENSES.build("precode").on_model(plain)
    assert torch.equal(torch.rand(4), expected)
    assert all(layer.training for layer in changed.modules())
    assert {p.dtype for p in changed.parameters()} == {torch.float64}
    assert changed.get_submodule("fc.0").noise.dtype == torch.float64


def test_the_bottleneck_always_starts_the_same_and_needs_no_memory_for_shapes_alone() -> None:
    first, second = reshaped(), reshaped()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    with torch.device("meta"):
        shapes = reshaped()
    assert {p.device.type for p in shapes.parameters()} == {"meta"}
    assert [p.shape for p in shapes.parameters()] == [p.shape for p in first.parameters()]


def test_the_draw_is_no_part_of_the_state() -> None:
    assert not [name for name in reshaped().state_dict() if "noise" in name]


class Tied(nn.Module):
    """The classifier under two names, without bias, its weight that of the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 32 * 32, 10, bias=False)
        self.middle, self.last = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
        self.last.weight = self.middle.weight
        self.alias = self.last

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.alias(self.middle(self.first(inputs.flatten(1)).relu()))
        return out


def test_shared_parameters_stay_shared() -> None:
    changed = DEFENSES.build("precode:size=4").on_model(Tied())
    assert changed.alias is changed.last  # type: ignore[union-attr]
    assert changed.last[1].weight is changed.middle.weight  # type: ignore[union-attr,index]
    client = SimulatedClient(changed, recipe=Recipe(), defense=DEFENSES.build("precode:size=4"))
    reply = client.reply(client.model.params, SAMPLES.batch(range(3)), Stream.seeded(0)).update
    assert reply.keys() == client.model.params.keys()
    assert sum("encoder" in name for name in reply) == 2, "once, whatever its names"


class Attends(nn.Module):
    """Attention after the classifier in the order of definition; its output layer is no classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 10)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.mean(dim=1)
        out: Tensor = self.head(self.attention(rows, rows, rows, need_weights=False)[0].mean(dim=1))
        return out


def test_layers_of_attention_are_left_alone() -> None:
    changed = DEFENSES.build("precode:size=4").on_model(Attends())
    assert isinstance(changed.head[0], precode.Bottleneck)  # type: ignore[index]
    assert changed(SAMPLES.batch(range(2)).inputs).shape == (2, 10)


@pytest.mark.parametrize("where", ["check", "on_model"])
def test_a_model_without_a_linear_layer_is_refused(where: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 10, 32), nn.Flatten())
    with pytest.raises(GradveilError, match=r"Sequential has none: end the model with one") as caught:
        getattr(DEFENSES.build("precode"), where)(model)
    assert "\n" not in str(caught.value)


def test_a_second_bottleneck_is_refused() -> None:
    with pytest.raises(GradveilError, match="has its bottleneck already"):
        DEFENSES.build("precode:size=8").on_model(reshaped())
    with pytest.raises(GradveilError, match="has its bottleneck already"):
        DEFENSES.build("precode+precode").on_model(models.build("lenet", SAMPLES.domain, seed=0))


def test_a_client_whose_model_was_not_reshaped_is_refused() -> None:
    """Otherwise it would send gradients without any defense and say nothing."""
    client = SimulatedClient(
        models.build("lenet", SAMPLES.domain, seed=0), recipe=Recipe(), defense=DEFENSES.build("precode")
    )
    with pytest.raises(GradveilError, match="no bottleneck; build it with the defense's on_model"):
        client.reply(client.model.params, SAMPLES.batch([0]), Stream.seeded(0))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("precode:size=0", "size is a whole number from 1 to 65536, not 0"),
        ("precode:size=99999", "size is a whole number"),
        ("precode:kl_weight=-1", "kl_weight is at least 0, not -1"),
        ("precode:kl_weight=nan", "kl_weight=nan is not a finite number"),
        ("precode:kl_weight=inf", "kl_weight=inf is not a finite number"),
    ],
)
def test_impossible_options_are_refused(spec: str, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        DEFENSES.build(spec)


def test_a_classifier_over_positions_is_refused_in_one_line() -> None:
    changed = DEFENSES.build("precode").on_model(nn.Sequential(nn.Linear(32, 10)))
    with pytest.raises(GradveilError, match="inputs of 4 axes, not"):
        changed(SAMPLES.batch([0]).inputs)


def test_only_the_draw_is_random_and_it_is_standard_normal() -> None:
    defense, model = DEFENSES.build("precode"), Functional(reshaped())
    drawn = defense.on_forward(model, 400, Stream.seeded(0))
    noise = drawn.buffers["fc.0.noise"]
    assert noise.shape == (400, 256)
    assert noise.mean().abs() < 0.01
    assert noise.std().item() == pytest.approx(1, abs=0.01)
    assert torch.equal(noise, defense.on_forward(model, 400, Stream.seeded(0)).buffers["fc.0.noise"])
    assert model.buffers["fc.0.noise"].eq(0).all(), "the model that was given is not edited"


@pytest.mark.parametrize("recipe", [Recipe(), FEDAVG], ids=["FedSGD", "FedAvg"])
def test_a_client_sends_the_gradient_of_the_drawn_code_with_its_divergence(recipe: Recipe) -> None:
    """Against plain autograd: the same draws, one for each local step, in the order of the steps."""
    module, batch = reshaped(spec="precode:kl_weight=0.5"), SAMPLES.batch(range(4))
    defense = DEFENSES.build("precode:kl_weight=0.5")
    client = SimulatedClient(module, recipe=recipe, defense=defense)
    reply = client.reply(client.model.params, batch, Stream.seeded(3)).update
    copied, rng, size = copy.deepcopy(module), Stream.seeded(3), recipe.batch_size or 4
    for _ in range(recipe.epochs):
        for start in range(0, 4, size):
            part = batch.take(slice(start, start + size))
            features = copied.body(copied.normalize(part.inputs)).flatten(1)  # type: ignore[operator]
            bottleneck, linear = copied.fc  # type: ignore[misc]
            outputs, divergence = by_hand(bottleneck, features, rng.normal((len(part), 256), features))
            loss = cross_entropy(linear(outputs), part.labels) + 0.5 * divergence
            gradients = torch.autograd.grad(loss, list(copied.parameters()))
            if recipe.sends == "delta":
                with torch.no_grad():
                    for parameter, gradient in zip(copied.parameters(), gradients, strict=True):
                        parameter.sub_(recipe.lr * gradient)
    names = [name for name, _ in copied.named_parameters()]
    moved = {name: p.detach() - client.model.params[name] for name, p in copied.named_parameters()}
    expected = dict(zip(names, gradients, strict=True)) if recipe.sends == "gradient" else moved
    for name in names:
        torch.testing.assert_close(reply[name], expected[name], rtol=1e-3, atol=1e-6)


def test_replies_differ_by_the_draw_alone() -> None:
    client = SimulatedClient(reshaped(), recipe=Recipe(), defense=DEFENSES.build("precode"))
    first, again, other = (
        client.reply(client.model.params, SAMPLES.batch(range(2)), Stream.seeded(seed)).update for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.allclose(first["fc.0.encoder.weight"], other["fc.0.encoder.weight"], rtol=1e-2)


def test_derivatives_agree_under_every_transform() -> None:
    """Gradients one by one, under vmap, and their change along a direction by jvp and by double backward."""
    noise = torch.randn(1, 16, generator=generator(0))
    model, batch = functional(noise=noise), SAMPLES.batch(range(3))
    inputs, direction = batch.inputs.double(), {k: torch.ones_like(v) for k, v in model.params.items()}

    def loss(params: Params, image: Tensor, label: Tensor) -> Tensor:
        return model.loss(cross_entropy, params, image[None], label[None])

    together = vmap(grad(loss), in_dims=(None, 0, 0))(model.params, inputs, batch.labels)
    for i in range(3):
        alone = grad(loss)(model.params, inputs[i], batch.labels[i])
        for name in alone:
            torch.testing.assert_close(together[name][i], alone[name])

    image, label = inputs[0], batch.labels[0]
    forward = jvp(lambda p: grad(loss, argnums=1)(p, image, label), (model.params,), (direction,))[1]
    reverse = grad(lambda x: sum((g * direction[k]).sum() for k, g in grad(loss)(model.params, x, label).items()))(
        image
    )
    torch.testing.assert_close(forward, reverse)
    assert forward.abs().max() > 0


def test_a_forward_pass_leaves_nothing_that_cannot_be_copied() -> None:
    module = reshaped()
    module(SAMPLES.batch([0]).inputs)
    copied = copy.deepcopy(module)
    assert copied.fc[0].term is None  # type: ignore[union-attr,index]
    assert Functional(module).params.keys() == dict(module.named_parameters()).keys()


def test_noise_for_other_examples_is_refused_in_one_line() -> None:
    """Such as gradients of single examples where a draw for the batch stands: better no result than a wrong one."""
    model = DEFENSES.build("precode:size=16").on_forward(functional(), 4, Stream.seeded(0))
    with pytest.raises(GradveilError, match=r"drew noise for 4 examples, but .* of 1: the two cannot be chained"):
        vmap(lambda x: model(model.params, x[None]))(SAMPLES.batch(range(4)).inputs.double())


def test_gradients_of_single_examples_are_right_where_nothing_is_drawn() -> None:
    _, step = step_of(reshaped(), SAMPLES.batch(range(3)))
    each = step.example_gradients()
    whole = step.gradient()
    for name in whole:
        torch.testing.assert_close(each[name].mean(dim=0), whole[name], rtol=1e-3, atol=1e-6)


@pytest.mark.integration
@pytest.mark.parametrize("recipe", [Recipe(), FEDAVG], ids=["FedSGD", "FedAvg"])
def test_an_attack_runs_against_it(recipe: Recipe) -> None:
    seen = observed(private_batches(2, 2), recipe=recipe)
    found = ATTACKS.build("ig", Budget(1, 5))(seen, seeds=[0, 1])
    assert [one.inputs.shape for one in found] == [(2, 3, 32, 32)] * 2
    assert all(math.isfinite(one.objective) for one in found)


def test_the_engine_does_not_forget_the_divergence() -> None:
    """The way that derives layers by rules has the term of the bottleneck too: heavy, it would show."""
    heavy = observed(private_batches(1), spec="precode:kl_weight=1")
    ways, starts, given = ATTACKS.build("ig", Budget(1, 1)).problems(heavy, [0])  # type: ignore[attr-defined]
    given = {**given, "buffers": {"fc.0.noise": torch.randn(1, 1, 256, generator=generator(0, "a draw"))}}
    torch.testing.assert_close(ways["joint"](starts, given)[1], ways["loop reverse"](starts, given)[1])
    model = Functional(heavy[0].module)
    own = grad(lambda p: model.loss(cross_entropy, p, SAMPLES.batch([0]).inputs, SAMPLES.batch([0]).labels))
    assert own(heavy[0].sent)["fc.0.encoder.bias"][256:].norm() > 0.1, "of the divergence alone"


def test_one_example_gives_its_draw_away() -> None:
    """The counter-move: quotients of the layers' gradients are their inputs, and those say what was drawn."""
    (seen,) = observed(private_batches(1))
    rows = {}
    for layer in ("encoder", "decoder"):
        bias = seen.reply[f"fc.0.{layer}.bias"]
        row = int(bias.abs().argmax())
        rows[layer] = seen.reply[f"fc.0.{layer}.weight"][row] / bias[row]
    bottleneck = copy.deepcopy(seen.module.get_submodule("fc.0"))
    mean, spread = bottleneck.encoder(rows["encoder"]).chunk(2)  # type: ignore[operator]
    drawn = Stream.seeded(0, "defense", 0).normal((1, 256), mean)[0]
    torch.testing.assert_close((rows["decoder"] - mean) / F.softplus(spread), drawn, rtol=1e-2, atol=1e-2)
