"""From a data set to a file: a generator trained as a WGAN with gradient penalty.

The critic learns to tell drawn images from real ones, the generator learns to pass.

Every draw of an iteration is made before it, so that the iteration itself is a fixed sequence of kernels: on a GPU it
is captured once and replayed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.atomic import write_atomically
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.seeding import generator as seeded
from gradveil.core.seeding import isolated
from gradveil.core.tensor_files import Shapes, read_tensors, write_tensors
from gradveil.core.types import Json
from gradveil.data import DATASETS, load
from gradveil.generators import DCGAN, draw_sheet, save_generator
from gradveil.generators.dcgan import SIDE

KIND = "generator-training"
_AT_ONCE = 1000
"""Images of a data set that are read together."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and how. GGL trains 100 epochs with Adam 1e-4 in batches of 64; the penalty weighs 10."""

    steps: int = 20_000
    """Updates of the generator; the rate falls to zero over the last half of them."""
    batch: int = 64
    critic_steps: int = 5
    lr: float = 2e-4
    penalty: float = 10.0
    average: float = 0.999
    """Share of the old weights in the running average that becomes the result."""
    flip: bool = False
    """Mirror half of the real images."""
    seed: int = 0

    def __post_init__(self) -> None:
        fewest = min(self.steps, self.batch, self.critic_steps)
        if fewest < 1 or not 0 < self.lr < math.inf or not 0 <= self.average < 1:
            raise GradveilError("training needs at least one step, example and critic step, and a rate above 0")


@dataclass(frozen=True)
class IterationDraws:
    """All that is random in one iteration, for each critic step and, last, for the generator's."""

    index: Tensor
    """[k, B]: which real images."""
    codes: Tensor
    """[k + 1, B, latent]."""
    labels: Tensor
    """[B]: classes that the generator is asked for in its own step."""
    mixes: Tensor
    """[k, B]: where between a real and a drawn image the critic's slope is held."""
    mirrored: Tensor
    """[k, B]."""


class Critic(nn.Module):
    """How real images [n, C, H, W] of these classes look: one number each, higher for real. No batch norm, as in WGAN.

    With classes, the features are also compared with the class's own direction (projection).
    """

    def __init__(self, shape: tuple[int, int, int], classes: int | None, features: int = 128) -> None:
        super().__init__()
        channels, height, width = shape
        self.edges = ((SIDE - width) // 2, -(-(SIDE - width) // 2), (SIDE - height) // 2, -(-(SIDE - height) // 2))
        sizes = (features, features, 2 * features, 4 * features)
        self.first = nn.Conv2d(channels, sizes[0], 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(a, b, 4, stride=2, padding=1) for a, b in pairwise(sizes))
        self.verdict = nn.Linear(sizes[-1] * 16, 1)
        self.directions = None if classes is None else nn.Parameter(torch.randn(classes, sizes[-1]) * 0.02)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.leaky_relu(self.first(F.pad(images * 2 - 1, self.edges, value=-1.0)), 0.2)
        for layer in self.body:
            x = F.leaky_relu(layer(x), 0.2)
        verdict: Tensor = self.verdict(x.flatten(1))[:, 0]
        if self.directions is None:
            return verdict
        return verdict + (x.mean(dim=(2, 3)) * self.directions[labels]).sum(dim=1)


class Trainer:
    """Generator, critic, their optimisers, and the running average of the generator."""

    def __init__(self, model: DCGAN, images: Tensor, labels: Tensor, schedule: Schedule) -> None:
        self.images, self.labels, self.schedule = images, labels, schedule
        self.model = model.to(images.device).train()
        with isolated(schedule.seed, "critic"):
            self.critic = Critic(model.shape, model.classes, model.options["features"]).to(images.device)
        self.average = copy.deepcopy(self.model)
        self.rate = torch.tensor(schedule.lr, device=images.device)
        betas = (0.0, 0.9)  # a critic's past slopes mislead: WGAN-GP takes no momentum
        adam = partial(torch.optim.Adam, lr=self.rate, betas=betas, capturable=images.is_cuda)
        self.generator_optimizer, self.critic_optimizer = adam(self.model.parameters()), adam(self.critic.parameters())
        self.critic_gap = torch.zeros((), device=images.device)
        self.done = 0

    def draws(self, step: int) -> IterationDraws:
        """Those of one iteration, which only the seed and its number decide: resuming needs no state of a generator."""
        rng = seeded(self.schedule.seed, "draws", step, device=self.images.device)
        k, size, device = self.schedule.critic_steps, self.schedule.batch, self.images.device
        classes = self.model.classes or 1

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=rng, device=device)

        return IterationDraws(
            index=torch.randint(len(self.images), (k, size), generator=rng, device=device),
            codes=torch.randn((k + 1, size, self.model.latent), generator=rng, device=device),
            labels=torch.randint(classes, (size,), generator=rng, device=device),
            mixes=uniform(k, size),
            mirrored=(uniform(k, size) < 0.5) & self.schedule.flip,
        )

    def iteration(self, draws: IterationDraws) -> None:
        """Some updates of the critic, one of the generator, one of the average."""
        for k in range(self.schedule.critic_steps):
            self.critic_step(draws, k)
        self.generator_optimizer.zero_grad()
        drawn = self.model.decode(draws.codes[-1], draws.labels)
        torch.autograd.backward(-self.critic(drawn, draws.labels).mean(), inputs=list(self.model.parameters()))
        self.generator_optimizer.step()
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(now, 1 - self.schedule.average)

    def critic_step(self, draws: IterationDraws, k: int) -> None:
        """The k-th update of the critic in an iteration."""
        self.critic_optimizer.zero_grad()
        labels = self.labels[draws.index[k]]
        real = self.images[draws.index[k]].float() / 255
        real = torch.where(draws.mirrored[k].view(-1, 1, 1, 1), real.flip(-1), real)
        with torch.no_grad():
            drawn = self.model.decode(draws.codes[k], labels)
        between = torch.lerp(real, drawn, draws.mixes[k].view(-1, 1, 1, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between, labels).sum(), between, create_graph=True)
        penalty = (torch.linalg.vector_norm(slope.flatten(1), dim=1) - 1).square().mean()
        gap = self.critic(real, labels).mean() - self.critic(drawn, labels).mean()
        torch.autograd.backward(self.schedule.penalty * penalty - gap, inputs=list(self.critic.parameters()))
        self.critic_optimizer.step()
        self.critic_gap.copy_(gap.detach())

    def run(
        self,
        progress: Progress = SILENT,
        each: Callable[[Trainer], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train to the end of the schedule; ``each`` is called at every tenth, ``stop`` asked before each step."""
        step = self._captured() if self.images.is_cuda else self.iteration
        total = self.schedule.steps
        with progress.task("training the generator", total) as task:
            task.advance(self.done)
            while self.done < total and not stop():
                self.rate.fill_(self.schedule.lr * min(1.0, 2 * (total - self.done) / total))
                step(self.draws(self.done))
                self.done += 1
                task.advance()
                if 10 * self.done // total > 10 * (self.done - 1) // total:
                    task.note(f"critic tells them apart by {float(self.critic_gap):.2f}")
                    if each is not None:
                        each(self)

    def result(self, batches: int = 50) -> DCGAN:
        """The averaged generator in eval mode, its norms set to the statistics of so many batches of its own draws."""
        settled = copy.deepcopy(self.average).train()
        norms = [layer for layer in settled.modules() if isinstance(layer, nn.BatchNorm1d)]
        for layer in norms:
            layer.reset_running_stats()
            layer.momentum = None  # the plain mean over all batches
        rng = seeded(self.schedule.seed, "statistics", device=self.images.device)
        with torch.no_grad():
            for _ in range(batches):
                labels = torch.randint(settled.classes or 1, (256,), generator=rng, device=self.images.device)
                codes = torch.randn((256, settled.latent), generator=rng, device=self.images.device)
                settled.decode(codes, labels)
        return settled.eval()

    def _captured(self) -> Callable[[IterationDraws], None]:
        """The iteration as one CUDA graph. Parameters and optimisers are put back to where warming up found them."""
        held = self.draws(self.done)
        before = {name: tensor.clone() for name, tensor in self._state().items()}
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.iteration(held)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.iteration(held)
        for name, tensor in self._state().items():
            tensor.copy_(before[name]) if name in before else tensor.zero_()

        def replay(draws: IterationDraws) -> None:
            for name, tensor in vars(draws).items():
                getattr(held, name).copy_(tensor)
            graph.replay()

        return replay

    def _state(self) -> dict[str, Tensor]:
        """Every tensor that training changes, by name; what is here is the tensor itself, not a copy."""
        found: dict[str, Tensor] = {}
        for part, module in (("model", self.model), ("average", self.average), ("critic", self.critic)):
            found |= {f"{part}/{name}": tensor for name, tensor in module.state_dict(keep_vars=True).items()}
        for part, optimizer in (("down", self.generator_optimizer), ("up", self.critic_optimizer)):
            for i, parameter in enumerate(optimizer.param_groups[0]["params"]):
                found |= {f"{part}/{i}/{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
        return {name: tensor.detach() for name, tensor in found.items()}

    def save(self, path: Path) -> None:
        """A checkpoint from which :meth:`load` goes on to the same result."""
        write_tensors(path, KIND, self._state(), {"done": self.done, **self._identity()})

    def load(self, path: Path) -> None:
        """Go on where a checkpoint of the same training on the same data was written."""
        self.iteration(self.draws(0))  # makes the optimisers' state, which the last lines overwrite
        state = self._state()

        def check(meta: Json, shapes: Shapes) -> None:
            if any(meta.get(key) != value for key, value in self._identity().items()):
                raise BadFileError(f"{path} is of another training: give the same data and options, or another file")
            if shapes != {name: tuple(tensor.shape) for name, tensor in state.items()}:
                raise BadFileError(f"{path} lacks a part of the training: delete it and start again")
            if type(meta.get("done")) is not int or not 0 <= meta["done"] <= self.schedule.steps:
                raise BadFileError(f"{path} does not say how far the training came: delete it and start again")

        tensors, meta = read_tensors(path, KIND, check=check)
        for name, tensor in state.items():
            tensor.copy_(tensors[name])
        self.done = meta["done"]

    def _identity(self) -> Json:
        """What two trainings must share to come to the same result; sums stand for the data."""
        places = torch.arange(len(self.labels), device=self.labels.device)
        sums = [int(self.images.sum(dtype=torch.int64)), int((self.labels * places).sum())]
        return {
            "schedule": asdict(self.schedule), "options": self.model.options, "data": [*self.images.shape, *sums],
        }  # fmt: skip


def fit(
    data: str,
    out: Path,
    schedule: Schedule,
    *,
    latent: int = 128,
    features: int = 128,
    kernel: int = 4,
    device: str = "cpu",
    resume: bool = False,
    progress: Progress = SILENT,
    stop: AbstractContextManager[Callable[[], bool]] | None = None,
) -> DCGAN | None:
    """Train on the train split that ``data`` names and write the generator to ``out``.

    At every tenth of the way a checkpoint and a sheet of draws are written beside it. ``stop`` is entered for the
    training alone and gives what is asked after each step: if it says so, a checkpoint is left and the result is None;
    ``resume`` then goes on to the same result.
    """
    checkpoint, picture = beside(out)
    if out.exists():
        raise GradveilError(f"{out} is there already: delete it, or write to another file")
    if resume and not checkpoint.exists():
        raise GradveilError(f"there is no checkpoint {checkpoint} to go on from: leave --resume out")
    if not resume and checkpoint.exists():
        raise GradveilError(f"{checkpoint} is of a training under way: go on with --resume, or delete it")
    if DATASETS.parse(data)[1].get("split", "train") != "train":
        raise GradveilError("a generator learns from the train split alone, or it would know what attacks look for")
    images = load(data, progress=progress)
    channels, height, width = images.shape
    sizes = {"latent": latent, "features": features, "kernel": kernel}
    with isolated(schedule.seed, "generator"):
        model = DCGAN(channels=channels, height=height, width=width, classes=len(images.class_names), **sizes)
    parts = [images.batch(range(at, min(at + _AT_ONCE, len(images)))).inputs for at in range(0, len(images), _AT_ONCE)]
    pixels = torch.cat([(part * 255).round().byte() for part in parts])
    trainer = Trainer(model, pixels.to(device), images.labels.to(device), schedule)
    if resume:
        trainer.load(checkpoint)

    def keep(trainer: Trainer) -> None:
        trainer.save(checkpoint)
        write_atomically(picture, draw_sheet(trainer.result(batches=5)))

    with stop or nullcontext(lambda: False) as asked:
        trainer.run(progress, keep, asked)
        if trainer.done < schedule.steps:
            trainer.save(checkpoint)
            return None
    result = trainer.result()
    about = {"data": data, "trained_on": images.name, "images": len(images), "method": "WGAN-GP"}
    result.card = {**about, **asdict(schedule)}
    save_generator(out, result, result.card)
    write_atomically(picture, draw_sheet(result))
    checkpoint.unlink(missing_ok=True)
    return result


def beside(out: Path) -> tuple[Path, Path]:
    """Where the checkpoint and the sheet of draws of a result go."""
    if out.suffix != ".safetensors":
        raise GradveilError(f"a generator is written to a file that ends in .safetensors, not {out.name!r}")
    return out.with_suffix(".checkpoint.safetensors"), out.with_suffix(".png")
