"""What `learned` keeps must be of this defense, this model and this code, and nothing may be lost with the cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil import models
from gradveil.attacks import Learned, learned
from gradveil.attacks.parts import decoder
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT
from gradveil.core.seeding import isolated
from gradveil.core.streams import Stream
from gradveil.core.types import Recipe
from gradveil.data import ImageSet, load
from gradveil.defenses import DEFENSES, Chain, Defense, Noise
from gradveil.threat import Observation, observe, threat_model

SAMPLES = load("mnist-samples")


def blots(count: int) -> ImageSet:
    rng = torch.Generator().manual_seed(0)
    images = F.interpolate(torch.rand(count, 1, 3, 3, generator=rng), size=(28, 28)).mul(255).byte()
    return replace(SAMPLES, name="blots", images=images, labels=torch.arange(count) % 10)  # type: ignore[call-arg,return-value]


PUBLIC = blots(2100)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(decoder, "STEPS", 1)
    monkeypatch.setattr(decoder, "EPOCHS", {"entries": 1, "norms": 1})
    learned._memory.clear()
    yield tmp_path / "cache" / "learned"
    learned._memory.clear()


def seen(spec: str = "none", module: nn.Module | None = None) -> Observation:
    defense = DEFENSES.build(spec)
    module = defense.on_model(module or models.build("mlp", SAMPLES.domain, seed=0))
    sent, batch = models.trained_parameters(module), SAMPLES.batch([0])
    reply = SimulatedClient(module, recipe=Recipe(), defense=Defense()).reply(sent, batch, Stream.seeded(0, "client"))
    return observe(
        module=module,
        model="mlp",
        domain=SAMPLES.domain,
        sent=sent,
        reply=reply.update,
        batch=batch,
        recipe=Recipe(),
        defense=spec,
        built_defense=defense,
        candidates=SAMPLES,
        public=lambda _: PUBLIC,
        threat=threat_model("D"),
    )


def kept(folder: Path) -> int:
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_a_defense_that_somebody_changed_is_another_one(own_cache: Path) -> None:
    one = seen("noise:sigma=0.1")
    Learned(pairs=400)(one)
    assert kept(own_cache) == 1
    changed = Noise(sigma=0.1)
    object.__setattr__(changed, "transform", lambda tree, _rng, _log: tree)
    for defense in (changed, Chain([changed]), Noise(sigma=5.0)):
        assert not learned._says_all(replace(one, built_defense=defense))
    Learned(pairs=400)(replace(one, built_defense=changed))
    assert kept(own_cache) == 1
    assert len(learned._memory) == 2, "nor is the one in memory taken for it"


class Net(nn.Module):
    """A user's own, whose code may change from one audit to the next."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(784, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.layer(inputs.flatten(1)))


class Changed(Net):
    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.layer(1 - inputs.flatten(1)))


Changed.__name__ = "Net"


def test_models_of_others_share_no_decoder_though_they_look_alike(own_cache: Path) -> None:
    first, second = seen(module=Net()), seen(module=Changed())
    assert learned._digest(first, PUBLIC, 400) == learned._digest(second, PUBLIC, 400)
    one, other = (Learned(pairs=400).decoder(each, SILENT) for each in (first, second))
    assert kept(own_cache) == 0
    assert not torch.equal(one.entry_mean, other.entry_mean)


def test_a_layer_that_somebody_changed_is_not_ours() -> None:
    for change in ("forward", "hook"):
        module = models.build("mlp", SAMPLES.domain, seed=0)
        layer = next(each for each in module.modules() if isinstance(each, nn.Linear))
        if change == "forward":
            layer.forward = lambda input: input[:, :256]  # type: ignore[method-assign]  # noqa: A006
        else:
            layer.register_forward_hook(lambda *_: None)
        assert not learned._says_all(seen(module=module)), change


def test_what_layers_do_not_show_is_in_the_digest() -> None:
    def attention(heads: int) -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        net.attention = nn.MultiheadAttention(8, heads)
        return net

    digests = {learned._digest(replace(seen(), module=attention(heads)), PUBLIC, 400) for heads in (1, 2)}
    assert len(digests) == 2


def test_what_remembers_is_learned_anew() -> None:
    assert not learned._says_all(seen("topk"))


@pytest.mark.parametrize("defense", ["noise:sigma=0.1,kind=gaussian+clip", *sorted(set(DEFENSES) - {"topk"})])
def test_what_is_ours_is_kept(defense: str) -> None:
    assert learned._says_all(seen(defense))
    assert learned._says_all(replace(seen(defense), built_defense=None))


@pytest.mark.parametrize("model", ["lenet", "convnet", "resnet18", "vit"])
def test_models_of_ours_are_kept(model: str) -> None:
    module = models.build(model, load("cifar10-samples").domain, seed=0)
    assert learned._says_all(replace(seen(), module=module))


def test_public_examples_that_are_private_now_make_another_decoder() -> None:
    """What one audit learned from, another must not have learned from: its public set lacks it, and so its digest."""
    assert learned._digest(seen(), PUBLIC, 400) != learned._digest(seen(), PUBLIC.subset(range(1, len(PUBLIC))), 400)


def test_other_code_has_other_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [learned._digest(seen(), PUBLIC, 400)]
    monkeypatch.setattr(learned, "_code", lambda: "edited")
    assert learned._digest(seen(), PUBLIC, 400) not in digests
    assert len(str(learned._code())) > 0


@pytest.mark.parametrize("obstacle", ["a file", "a link", "full"])
def test_an_audit_goes_on_where_nothing_can_be_kept(
    obstacle: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache.parent.mkdir()
    if obstacle == "a file":
        own_cache.write_text("in the way")
    elif obstacle == "a link":
        own_cache.symlink_to(own_cache)
    else:
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert Learned(pairs=400)(seen()).inputs.shape == (1, 1, 28, 28)
    assert obstacle != "full" or kept(own_cache) == 0, "nothing half written"


def test_the_folder_does_not_grow_without_end(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "MOST_FILES", 2)
    for age, name in ((300, "old"), (200, "older than most"), (100, "new")):
        own_cache.mkdir(parents=True, exist_ok=True)
        (own_cache / f"{name}.safetensors").write_text("")
        os.utime(own_cache / f"{name}.safetensors", (1e9 - age, 1e9 - age))
    Learned(pairs=400)(seen())
    assert [one.name for one in own_cache.iterdir() if one.name == "new.safetensors"]
    assert kept(own_cache) == 2


def test_a_kept_file_of_nonsense_is_made_again(own_cache: Path) -> None:
    first = Learned(pairs=400)(seen()).inputs
    (path,) = own_cache.iterdir()
    whole = path.read_bytes()
    for content in (b"", whole[:-4] + b"\xff\xff\xff\x7f", whole.replace(b"F32", b"F64", 1), b"\xff" * 100):
        learned._memory.clear()
        path.write_bytes(content)
        assert torch.equal(Learned(pairs=400)(seen()).inputs, first)
    path.unlink()
    path.mkdir()
    learned._memory.clear()
    assert torch.equal(Learned(pairs=400)(seen()).inputs, first)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_draws_on_a_gpu_are_seeded_and_leave_its_generator_as_it_was() -> None:
    device, drawn = torch.device("cuda", 0), []
    for _ in range(2):
        torch.rand(3, device=device)
        state = torch.cuda.get_rng_state(device)
        with isolated(0, "test", device=device):
            drawn.append(F.dropout(torch.ones(100, device=device)))
        assert torch.equal(state, torch.cuda.get_rng_state(device))
    assert torch.equal(*drawn)


def test_dropout_is_seeded_where_the_decoder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        decoder, "isolated", lambda *path, device=None: asked.append((path[-1], device)) or isolated(*path)
    )
    Learned(pairs=400)(seen())
    assert ("learned dropout", torch.device("cpu")) in asked


def test_a_model_of_another_shape_is_refused_in_one_line() -> None:
    with pytest.raises(GradveilError, match="of another shape than the model takes"):
        Learned(pairs=400)(replace(seen(), public=lambda _: load("cifar10-samples")))


class Shifted(Net):
    """One of its parameters is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.shift


def test_a_parameter_may_be_a_single_number() -> None:
    assert Learned(pairs=400)(seen(module=Shifted())).inputs.shape == (1, 1, 28, 28)
