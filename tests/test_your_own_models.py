"""Models as they come, of ``transformers``, ``torch.nn`` and ``peft``: audited and protected without a wrapper."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradveil
from gradveil import attacks, models
from gradveil.attacks.parts.labels import infer_labels
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Recipe
from gradveil.domains import Images
from gradveil.models import Functional, SeveralInputs
from gradveil.threat import observe, threat_model

warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

IMAGES, LABELS = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 1, 4, 1])
WORDS = {
    "input_ids": torch.arange(28).view(4, 7) % 20,
    "attention_mask": (torch.arange(7) < torch.tensor([[7], [5], [7], [3]])).long(),
}
TOPICS = torch.tensor([0, 1, 2, 1])


def vit() -> nn.Module:
    """A vision transformer from its configuration: it returns an object with logits."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        image_size=28, patch_size=14, num_channels=1, num_labels=10,
    )  # fmt: skip
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


def lora() -> nn.Module:
    """The same with adapters: everything is frozen but these and the classifier."""
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    model: nn.Module = peft.get_peft_model(vit(), options)
    with torch.no_grad():  # one half of an adapter starts at zero, so that the other has no gradient at first
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


class Encoder(nn.Module):
    """Attention of torch.nn, with the dropout of 0.1 that it has by default."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, kernel_size=14, stride=14)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        out: Tensor = self.head(self.encoder(tokens).mean(1))
        return out


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return Encoder()


def bert() -> nn.Module:
    """An encoder of text: two inputs by name, logits, dropout of 0.1."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=8, num_labels=3,
    )  # fmt: skip
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


OF_IMAGES = pytest.mark.parametrize("make", [vit, encoder, lora])


@OF_IMAGES
@pytest.mark.integration
@pytest.mark.parametrize(("attack", "threat"), [("ig:iterations=3,restarts=1", "C"), ("identify", "D")])
def test_they_are_audited(make: Callable[[], nn.Module], attack: str, threat: str) -> None:
    others = torch.rand(20, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    audit = gradveil.audit(make(), (IMAGES[:2], LABELS[:2]), attack=attack, threat=threat, gallery=others)
    row = audit.rows[0]
    assert row.psnr is not None
    if attack == "identify":
        assert row.identified == 1.0, "an update without a defense names its examples"


@OF_IMAGES
@pytest.mark.parametrize("defense", ["noise:sigma=0.01", "dp:sigma=1", "clip:per=example,bound=1", "censor", "ats"])
def test_a_client_trains_them(make: Callable[[], nn.Module], defense: str) -> None:
    model = make()
    client = gradveil.Client(model, defense=defense)
    for _ in range(2):
        client.step(IMAGES, LABELS)
    reply = client.reply()
    assert reply.keys() == models.trained_parameters(model).keys()
    assert any(change.any() for change in reply.values())


@OF_IMAGES
@pytest.mark.parametrize("defense", ["noise:sigma=0.01", "dp:sigma=1"])
def test_their_loops_are_protected(make: Callable[[], nn.Module], defense: str) -> None:
    """The loop stays as it was but for ``guard.loss``, which takes what the model returned."""
    model = make()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    guard = gradveil.protect(model, optimizer, F.cross_entropy, defense=defense)
    for _ in range(2):
        optimizer.zero_grad()
        guard.loss(model(IMAGES), LABELS).backward()
        optimizer.step()
    update, state = guard.update(), guard.state_dict()
    assert update.keys() == models.trained_parameters(model).keys()
    assert state.keys() == model.state_dict().keys()


def test_a_server_of_adapters_sends_adapters() -> None:
    model = lora()
    client, sent = gradveil.Client(model, defense="noise:sigma=0.01"), models.trained_parameters(model)
    for _ in range(2):
        client.start(sent)
        client.step(IMAGES, LABELS)
        reply = client.reply()
        sent = {name: tensor + reply[name] for name, tensor in sent.items()}
    client.start(sent | {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad})
    with pytest.raises(GradveilError, match="a broadcast maps all names"):
        client.start(dict(list(sent.items())[1:]))


def test_a_copy_of_a_guarded_model_does_not_train_by_its_own_loss() -> None:
    model = bert()
    gradveil.protect(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, defense="noise:sigma=0.01")
    copied = copy.deepcopy(model)
    for backward in (lambda: copied(**WORDS, labels=TOPICS).loss, lambda: copied(**WORDS).logits.sum()):
        with pytest.raises(GradveilError, match="a copy of a guarded one"):
            backward().backward()


def test_logits_may_be_taken_by_hand() -> None:
    model = vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = gradveil.protect(model, optimizer, F.cross_entropy, defense="noise:sigma=0.01")
    guard.loss(model(pixel_values=IMAGES).logits, LABELS).backward()
    optimizer.step()
    assert guard.update()


def test_the_loss_that_a_model_computes_itself_is_not_stepped_on() -> None:
    """``transformers`` computes a loss where it is given labels: its gradient is bare."""
    model = bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = gradveil.protect(model, optimizer, F.cross_entropy, defense="noise:sigma=0.01")
    model(**WORDS, labels=TOPICS).loss.backward()
    with pytest.raises(GradveilError, match=r"not the one that guard\.loss gave"):
        optimizer.step()
    optimizer.zero_grad()
    outputs = model(**WORDS, labels=TOPICS)
    with pytest.raises(GradveilError, match="also went backward past it"):
        (guard.loss(outputs, TOPICS) + outputs.loss).backward()


class Text(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> tuple[dict[str, Tensor], Tensor]:
        return {name: column[place] for name, column in WORDS.items()}, TOPICS[place]


@pytest.mark.parametrize("defense", ["noise:sigma=0.01", "dp:sigma=1", "clip:per=example,bound=1"])
def test_text_is_protected(defense: str) -> None:
    client = gradveil.Client(bert(), defense=defense)
    before = client.outputs(WORDS)
    for _ in range(2):
        client.step(WORDS, TOPICS)
    assert client.outputs(WORDS).shape == (4, 3)
    assert not torch.equal(client.outputs(WORDS), before)
    assert any(change.any() for change in client.reply().values())


def test_text_is_sampled_for_dp() -> None:
    client = gradveil.Client(bert(), defense="dp:sigma=1")
    for inputs, targets in client.sample(Text(), rate=0.2, steps=6):  # some of these batches are empty
        client.step(inputs, targets)
    assert client.privacy_spent(1e-5) < float("inf")
    assert all(torch.isfinite(change).all() for change in client.reply().values())


def test_examples_of_several_inputs_are_clipped_one_by_one() -> None:
    """Without clipping and noise the mean over examples is the gradient of the batch, padding and all."""
    model = bert().eval()
    value = F.cross_entropy(model(**WORDS).logits, TOPICS)
    value.backward()  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.zero_grad()
    guard = gradveil.protect(model, optimizer, F.cross_entropy, defense="clip:per=example,bound=1e9")
    guard.loss(model(**WORDS), TOPICS).backward()  # type: ignore[no-untyped-call]
    for name, gradient in guard.gradient().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((), {**WORDS, "output_hidden_states": True}, "tensors of inputs, each with a row"),
        ((), {**WORDS, "position_ids": torch.arange(7)[None]}, "tensors of inputs, each with a row"),
        ((), {**WORDS, "token_type_ids": torch.tensor(0)}, "tensors of inputs, each with a row"),
        (([WORDS["input_ids"]],), {}, "tensors of inputs, each with a row"),
        ((), {}, "tensors of inputs, each with a row"),
    ],
)
def test_what_could_carry_examples_past_the_defense_is_refused(
    arguments: tuple[Any, ...], keywords: dict[str, Any], message: str
) -> None:
    model = bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradveil.protect(model, optimizer, F.cross_entropy, defense="noise:sigma=0.01")
    with pytest.raises(GradveilError, match=message):
        model(*arguments, **keywords)


@pytest.mark.parametrize("defense", ["ats", "censor", "soteria", "dcs2", "graddefense", "outpost", "ats+noise:sigma=1"])
def test_a_defense_of_images_refuses_several_inputs(defense: str) -> None:
    client = gradveil.Client(bert(), defense=defense)
    with pytest.raises(GradveilError, match="one tensor of inputs"):
        client.step(WORDS, TOPICS)
    with pytest.raises(GradveilError, match="no step of this round"):
        client.reply()


class Pair(nn.Module):
    """Two images by position, of which the second may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(784, 10), nn.Linear(784, 10)

    def forward(self, left: Tensor, right: Tensor | None = None) -> Tensor:
        out: Tensor = self.first(left.flatten(1))
        return out if right is None else out + self.second(right.flatten(1))


def test_several_inputs_stay_together() -> None:
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    F.cross_entropy(model(IMAGES, IMAGES.flip(0)), LABELS).backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.zero_grad()
    guard = gradveil.protect(model, optimizer, F.cross_entropy, defense="clip:per=example,bound=1e9")
    for part in (slice(0, 2), slice(2, 4)):  # two passes, one step
        guard.loss(model(IMAGES[part], IMAGES.flip(0)[part]), LABELS[part]).div(2).backward()  # type: ignore[no-untyped-call]
    for name, gradient in guard.gradient().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_an_input_that_changed_or_needs_a_gradient_is_refused() -> None:
    model, right = Pair(), IMAGES.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    guard = gradveil.protect(model, optimizer, F.cross_entropy, defense="clip:per=example,bound=1")
    guard.loss(model(IMAGES, right), LABELS).backward()  # type: ignore[no-untyped-call]
    right.zero_()
    with pytest.raises(GradveilError, match="overwritten before the step"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(GradveilError, match="inputs that need a gradient"):
        guard.loss(model(IMAGES, right=right.requires_grad_()), LABELS)


def test_several_inputs_pass_through_vmap() -> None:
    function = Functional(Pair())

    def one(inputs: Any) -> Tensor:
        return function(function.params, inputs[None])[0]

    left, right = IMAGES, IMAGES.flip(0)
    together = torch.func.vmap(one)(SeveralInputs([left], {"right": right}))
    torch.testing.assert_close(together, function.module(left, right))
    torch.testing.assert_close(torch.func.vmap(one)(SeveralInputs([left, None], {})), function.module(left))


@OF_IMAGES
def test_attention_is_differentiated_twice_and_under_vmap(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    function = Functional(model)

    def distance(images: Tensor, label: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda p: function.loss(F.cross_entropy, p, images[None], label[None]))(
            function.params
        )
        return torch.stack([tensor.square().sum() for tensor in gradient.values()]).sum()

    together = torch.func.vmap(torch.func.grad(distance))(IMAGES, LABELS)
    alone = torch.stack([torch.func.grad(distance)(x, y) for x, y in zip(IMAGES, LABELS, strict=True)])
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-5)
    plain = models.logits_of(model(IMAGES)).detach()
    torch.testing.assert_close(function(function.params, IMAGES).detach(), plain, rtol=1e-4, atol=1e-5)


def test_the_switches_of_torch_are_put_back() -> None:
    def switches() -> tuple[bool, ...]:
        cuda = torch.backends.cuda
        return (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(), torch.backends.mha.get_fastpath_enabled(),
        )  # fmt: skip

    before = switches()
    with models.twice_differentiable(), models.twice_differentiable():
        assert switches() == (False, False, True, False, False)
    assert switches() == before
    with pytest.raises(RuntimeError):
        Functional(nn.Linear(2, 2))(dict(nn.Linear(3, 2).named_parameters()), torch.rand(1, 2))
    assert switches() == before


def test_an_update_of_adapters_is_matched_in_what_is_trained() -> None:
    """What is frozen is as good as public: the same gradient as that of the whole model, where it is trained."""
    module, batch = lora(), Batch(IMAGES[:1], LABELS[:1])
    client = SimulatedClient(module, recipe=Recipe())
    update = client.reply(models.trained_parameters(module), batch, Stream.seeded(0)).update
    value = F.cross_entropy(module.eval()(batch.inputs).logits, batch.labels)
    value.backward()  # type: ignore[no-untyped-call]
    own = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    assert update.keys() == own.keys()
    for name, tensor in update.items():
        torch.testing.assert_close(tensor, own[name], rtol=1e-3, atol=1e-6)


def adapters_alone() -> nn.Module:
    """Without the classifier, whose gradient attacks read labels off."""
    model = lora()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    return model


def biases_alone() -> nn.Module:
    model = vit()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


@pytest.mark.parametrize(("make", "least"), [(lora, 10), (biases_alone, 10), (adapters_alone, 5)])
def test_labels_are_read_off_what_is_trained(make: Callable[[], nn.Module], least: int) -> None:
    module, rng, right = make(), torch.Generator().manual_seed(0), 0
    sent, client = models.trained_parameters(module), SimulatedClient(module, recipe=Recipe())
    domain = Images(channels=1, height=28, width=28, classes=10, mean=(0.5,), std=(0.3,))
    for label in range(10):
        batch = Batch(torch.rand(1, 1, 28, 28, generator=rng), torch.tensor([label]))
        reply = client.reply(sent, batch, Stream.seeded(label)).update
        seen = observe(
            module=module, model="", domain=domain, sent=sent, reply=reply, batch=batch, recipe=Recipe(),
            defense="none", threat=threat_model("C"),
        )  # fmt: skip
        right += int(infer_labels([seen], 1)) == label
    assert right >= least


@pytest.mark.integration
@pytest.mark.parametrize("make", [adapters_alone, biases_alone])
@pytest.mark.parametrize(("attack", "threat"), [("ig:iterations=3,restarts=1", "C"), ("identify", "D")])
def test_parts_of_a_model_are_audited(make: Callable[[], nn.Module], attack: str, threat: str) -> None:
    others = torch.rand(20, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    row = gradveil.audit(make(), (IMAGES[:2], LABELS[:2]), attack=attack, threat=threat, gallery=others).rows[0]
    assert row.identified == (1.0 if attack == "identify" else row.identified)


def test_attacks_on_layers_that_are_frozen_say_so() -> None:
    others = torch.rand(20, 1, 28, 28)
    with pytest.raises(GradveilError, match="is frozen"):
        gradveil.audit(adapters_alone(), (IMAGES[:1], LABELS[:1]), attack="analytic", gallery=others)
    with pytest.raises(GradveilError, match="both trained"):
        gradveil.audit(adapters_alone(), (IMAGES, LABELS), attack="fishing", threat="F", gallery=others, batch_size=4)


def test_dropout_in_train_mode_is_refused_in_one_line() -> None:
    with pytest.raises(GradveilError, match=r"drops out at random.*rate to 0 or use eval mode"):
        SimulatedClient(encoder(), recipe=Recipe(train_mode=True))
    SimulatedClient(vit(), recipe=Recipe(train_mode=True))  # its rates are 0


@pytest.mark.parametrize("defense", ["noise:sigma=0.001", "dp:sigma=1", "noise:sigma=0.001,at=update"])
def test_a_client_shows_what_an_adversary_sees(defense: str) -> None:
    client = gradveil.Client(lora(), defense=defense)
    client.step(IMAGES, LABELS)
    before, spent = client.checkpoint()["parameters"], client.privacy_spent(1e-5)
    seen = client.observe(IMAGES[:1], LABELS[:1], threat="C")
    assert seen.reply.keys() == seen.sent.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in seen.sent.items())
    after = client.checkpoint()["parameters"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items()), "the client moved"
    assert client.privacy_spent(1e-5) > spent or spent == float("inf"), "what is shown is spent"
    found = attacks.InvertingGradients(iterations=2, restarts=1)(seen)
    assert found.inputs.shape == (1, 1, 28, 28)
    assert found.labels.shape == (1,)
    assert client.step(IMAGES, LABELS) > 0, "the client goes on as before"


def test_what_is_shown_counts_towards_the_plan() -> None:
    client = gradveil.Client(vit(), defense="dp:sigma=1,steps=1")
    client.observe(IMAGES, LABELS)
    with pytest.raises(GradveilError, match="more than the 1 that are planned"):
        client.observe(IMAGES, LABELS)
    with pytest.raises(GradveilError, match="more than the 1 that are planned"):
        client.step(IMAGES, LABELS)


def test_what_cannot_be_shown_costs_nothing() -> None:
    client = gradveil.Client(encoder(), defense="dp:sigma=1")
    with pytest.raises(GradveilError, match="drops out at random"):
        client.observe(IMAGES, LABELS)
    with pytest.raises(GradveilError, match="takes images"):
        client.observe(IMAGES.flatten(1), LABELS)
    assert client.privacy_spent(1e-5) == 0


def test_images_of_bytes_become_numbers() -> None:
    bytes_ = (IMAGES * 255).round().to(torch.uint8)
    client = gradveil.Client(vit(), defense="none")
    torch.testing.assert_close(client.outputs(bytes_), client.outputs(bytes_.float() / 255))
    client.step(bytes_, LABELS)
    with pytest.raises(GradveilError, match=r"channels, height, width.*permute"):
        client.step(bytes_.permute(0, 2, 3, 1), LABELS)


@pytest.mark.parametrize("outputs", [(torch.zeros(1, 2),), {"scores": torch.zeros(1, 2)}, None, 3.0])
def test_other_outputs_are_refused(outputs: object) -> None:
    with pytest.raises(GradveilError, match="one tensor of outputs, or an object with logits"):
        models.logits_of(outputs)
