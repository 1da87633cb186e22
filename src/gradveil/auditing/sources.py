"""Where the exchanges of an audit come from: simulated clients, or a program's own model and batch.

The third source is :func:`gradveil.auditing.saved.saved`. Each returns an :class:`AuditPlan`, and nothing that comes
after it asks which of them it was.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gradveil import models
from gradveil.attacks import ATTACKS, Attack, Crafted, Server
from gradveil.attacks.active.interrogation import interrogate
from gradveil.auditing.audit import OWN, SavedTraining
from gradveil.auditing.case import Case, ObservedCase, distinct, make_case
from gradveil.auditing.suites import SuiteSetting, suite
from gradveil.auditing.verdict import costs
from gradveil.bounds import Proof, prove
from gradveil.client import (
    SimulatedClient,
    Streams,
    cross_entropy,
    replies_in_round,
    rounds_to_audit,
    running_statistics,
    sends_constant,
)
from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.registry import describe_object, split_spec
from gradveil.core.seeding import derive, generator
from gradveil.core.streams import Stream
from gradveil.core.trees import detached
from gradveil.core.types import Batch, Loss, Params, Recipe
from gradveil.data import UNKNOWN, ImageSet, MemoryImages, load
from gradveil.data.public import PublicImages, usual_public
from gradveil.defenses import DEFENSES, Defense, Log, PublicData, check_model, fresh, links_of
from gradveil.defenses.public import SHIPPED
from gradveil.domains import Domain
from gradveil.threat import Knowledge, Observation, observe, threat_model

TOLD = frozenset({Knowledge.LABELS, Knowledge.STATISTICS})
"""What an adversary may be told of the private examples themselves: no noise covers it."""
CONSTANT = (
    "the same was sent for every example of the line-up, whatever the round and the size of the gradient, so that "
    "nothing tells them apart; what is sent about another model may differ"
)
PUBLIC = 1000
"""Examples of the same kind that a server may hold."""


@dataclass(frozen=True)
class Private:
    """The truth: the private examples, where they stand in the data set, and the gallery they hide in."""

    batch: Batch
    index: Tensor
    """[n]: position of each private example in the data set."""
    gallery: Tensor
    """[m, ...]: the private examples and distractors of the same kind, in an order that the case's seed decides."""
    places: Tensor
    """[n]: where each private example stands in the gallery."""
    listed: Tensor | None = None
    """[n]: the same for the candidates that the threat model grants; None where it grants none."""
    label_counts: Tensor | None = None
    """[classes]: how often each label occurs in the data set; None where that is not known."""

    def tensors(self) -> dict[str, Tensor]:
        """What a file of the truth holds."""
        tensors = {"inputs": self.batch.inputs, "labels": self.batch.labels, "index": self.index}
        return {name: tensor.cpu() for name, tensor in tensors.items()}

    def digest(self) -> str:
        """Of the private examples and their labels, wherever they stand in a data set."""
        whole = hashlib.sha256()
        for tensor in (self.batch.inputs, self.batch.labels):
            whole.update(tensor.cpu().contiguous().numpy().tobytes())
        return whole.hexdigest()

    def line_up(self) -> str:
        """A digest of the gallery."""
        return hashlib.sha256(self.gallery.contiguous().numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Exchange:
    """What was seen of every client of a cell, and what their defense logged."""

    observations: Sequence[Observation]
    log: Mapping[str, float] = field(default_factory=dict)
    randomized: bool = False
    """Whether the defense made random draws."""
    without: ImageSet | None = None
    """As many candidates as are granted, and no private example among them; None where there are too few for that."""


@dataclass(frozen=True)
class Origin:
    """Where saved exchanges come from, or in which round simulated clients were looked at: fields of their row."""

    training: str | None = None
    stage: str | None = None
    round: int | None = None
    clients: tuple[int, ...] = ()
    model_accuracy: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Cell:
    """One attack on one set of exchanges, or the same search without the updates: what becomes a row."""

    spec: str
    """Of the attack."""
    attack: Attack
    defense: str
    prior_only: bool
    digest: str
    broadcast: Hashable = None
    """Cells of one attack go into one batch if this is equal."""
    seeds: Sequence[int]
    """One for each observation, by its place: searches of different cells start alike."""
    exchange: Callable[[], Exchange]
    """Made when it is first asked for."""
    private: Callable[[], Private | None]
    """None where nobody knows the truth."""
    module: Callable[[], nn.Module]
    """The model whose representations MSE-R compares: as an honest server sends it, without a front."""
    paths: tuple[str, ...] = ()
    """The files of exchanges that were saved before the audit."""
    keep: bool = True
    """Whether the observations can be saved: not if an architecture cannot be built from its name."""
    owners: tuple[int | None, ...] = ()
    """The client of each private image."""
    origin: Origin = Origin()

    @property
    def search(self) -> Attack:
        """What is run: the attack, or what is left of it without the update."""
        alone = self.attack.prior_only() if self.prior_only else None
        return self.attack if alone is None else alone

    @property
    def crafted_by(self) -> str | None:
        """The attack if it needs a broadcast of its own making."""
        return self.spec if self.attack.crafts else None

    @property
    def clients(self) -> str:
        """Which of the simulated clients these are: those of a defense, in a round where there are several."""
        return self.defense if self.origin.stage is None else f"{self.defense} {self.origin.stage}"

    @property
    def title(self) -> str:
        where = self.clients if self.origin.training is None else self.origin.stage
        return f"{self.spec} without the update" if self.prior_only else f"{self.spec} on {where}"


@dataclass(frozen=True, kw_only=True)
class AuditPlan:
    """What an audit is about to do, whatever its source."""

    case: Case | ObservedCase
    """With the attacks that were chosen for it."""
    cells: Sequence[Cell]
    domain: Domain
    private: Private | None = None
    """The truth of all cells, where they share one."""
    trainings: tuple[SavedTraining, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """By defense that cannot work on the model, why."""
    class_names: Sequence[str] = ()
    """Of each label; empty where nobody knows them."""
    proofs: Mapping[str, Proof] = field(default_factory=dict)
    """By defense, what no attack can pass."""
    labels_are_people: bool = False


def simulated(
    case: Case, data: ImageSet | None = None, *, trained: Params | None = None, progress: Progress = SILENT
) -> AuditPlan:
    """Clients with the first examples of a data set, by default the one of the case, or with every k-th.

    ``trained`` are parameters by name that the server sends in the place of untrained ones. Digests of rows do not know
    them: audits of different parameters go into different folders.
    """
    check_device(case.device)
    data = load(case.data, progress=progress) if data is None else data

    def build() -> nn.Module:
        module = models.build(case.model, data.domain, seed=case.seed)
        if trained is not None:
            names = models.trained_parameters(module).keys()
            if trained.keys() != names:
                raise GradveilError(f"the trained parameters are not those of {case.model}")
            module.load_state_dict(trained, strict=False)
        return module

    clients = Simulation(case, data, build, progress=progress)
    attacks = {spec: ATTACKS.build(spec, case.effort()) for spec in case.attacks}
    return clients.plan({spec: DEFENSES.build(spec) for spec in case.defenses}, attacks)


def own(
    model: nn.Module,
    batch: Batch | tuple[Tensor, Tensor],
    *,
    defenses: Sequence[str | Defense],
    attacks: Sequence[str | Attack] = (),
    loss: Loss = cross_entropy,
    recipe: Recipe | None = None,
    batch_size: int = 1,
    gallery: ImageSet | Tensor | None = None,
    progress: Progress = SILENT,
    **fields: Any,
) -> AuditPlan:
    """Clients with a program's own module and examples; ``fields`` are others of a case, such as its threat."""
    inputs, labels = (batch.inputs, batch.labels) if isinstance(batch, Batch) else batch
    inputs, count = models.as_pictures(inputs), len(inputs)
    if not count or batch_size < 1 or count % batch_size:
        raise GradveilError(f"{count} examples cannot be cut into batches of {batch_size}")
    if not defenses:
        raise GradveilError("an audit needs at least one defense, such as none")
    parameter = next(iter(model.parameters()), None)
    if parameter is None:
        raise GradveilError("the model has no parameters: there is no update to audit")
    if odd := {each.dtype for each in (*model.parameters(), inputs)} - {torch.get_default_dtype()}:
        usual = torch.get_default_dtype()
        raise GradveilError(
            f"the model or its examples are of {odd.pop()}, and audits compute in {usual}: convert them"
        )
    with torch.no_grad():  # by a copy: each layer of the model stays in the mode it is in
        classes = int(models.logits_of(copy.deepcopy(model).eval()(inputs[:1].to(parameter.device))).shape[1])
    data = _own_images(inputs.detach().cpu(), labels.detach().cpu(), gallery, classes)
    fields |= {"images": count, "batch_size": batch_size, "gallery": len(data), "device": parameter.device.type}
    case = make_case(fields if recipe is None else {**fields, "recipe": recipe})
    guards = [
        (DEFENSES.canonical(one), DEFENSES.build(one)) if isinstance(one, str) else (DEFENSES.describe(one), one)
        for one in defenses
    ]
    built = [
        (ATTACKS.canonical(one), ATTACKS.build(one, case.effort())) if isinstance(one, str) else (_describe(one), one)
        for one in attacks
    ]
    names = {
        "data": OWN,
        "model": f"{type(model).__module__}:{type(model).__qualname__}",
        "defenses": distinct("defense", [name for name, _ in guards]),
        "attacks": distinct("attack", [name for name, _ in built]),
    }
    clients = Simulation(case.model_copy(update=names), data, lambda: copy.deepcopy(model), loss, progress)
    return clients.plan(dict(guards), dict(built))


def _describe(attack: Attack) -> str:
    """The spec of an attack without its budget or, where its class is not registered, what describes it."""
    name = next((name for name in ATTACKS if ATTACKS.get(name) is type(attack)), None)
    known = {} if name is None else ATTACKS.options(name)
    if name is None or not all(hasattr(attack, key) for key in known):
        return describe_object(attack)
    said = {key: getattr(attack, key) for key, option in known.items() if getattr(attack, key) != option.default}
    return ATTACKS.canonical(f"{name}:{','.join(f'{key}={value}' for key, value in said.items())}")


def _own_images(inputs: Tensor, labels: Tensor, gallery: ImageSet | Tensor | None, classes: int) -> MemoryImages:
    """The private examples and after them the other pictures.

    Nobody has labelled those for this model, and no label is made up: an adversary tries what an update allows.
    """
    if gallery is None:
        shape = tuple(inputs.shape[1:])
        gallery = next((samples for samples in map(load, SHIPPED) if samples.shape == shape), None)
        if gallery is None:
            size = " x ".join(map(str, shape))
            raise GradveilError(f"no shipped sample is {size}: give gallery= other pictures of that shape to hide in")
    pictures = gallery if isinstance(gallery, Tensor) else gallery.batch(range(len(gallery))).inputs
    if pictures.shape[1:] != inputs.shape[1:]:
        raise GradveilError("gallery= holds pictures of another shape than the private ones")
    pictures = pictures.detach().to(inputs)
    # A private picture that is in the gallery as well would be its own distractor.
    same = torch.cdist(pictures.flatten(1), inputs.flatten(1), p=float("inf")) == 0
    others = pictures[~same.any(1)]
    return MemoryImages.unscaled(
        name=OWN,
        images=torch.cat([inputs, others]),
        labels=torch.cat([labels, torch.full((len(others),), UNKNOWN)]),
        class_names=tuple(map(str, range(classes))),
    )


@dataclass(eq=False)
class Simulation:
    """Clients with private batches of a data set, who answer what a server sends them."""

    case: Case
    data: ImageSet
    build: Callable[[], nn.Module]
    """Makes the honest model."""
    loss: Loss = cross_entropy
    progress: Progress = SILENT
    _broadcasts: dict[str | None, Crafted] = field(default_factory=dict)
    _exchanges: dict[tuple[str, int, int], Exchange] = field(default_factory=dict)

    def plan(self, defenses: Mapping[str, Defense], attacks: Mapping[str, Attack]) -> AuditPlan:
        """Every attack on every defense, and after them each attack's prior alone, where it has one."""
        case, data, threat = self.case, self.data, threat_model(self.case.threat)
        for spec, attack in attacks.items():
            threat.vet(spec, attack.requires)
        costs(case.training, case.defenses)  # what is wrong with the trainings is raised now
        private = self.private
        if not attacks:
            setting = SuiteSetting(
                threat=threat,
                module=self.broadcast(None).module,
                model=case.model,
                domain=data.domain,
                recipe=case.recipe,
                batch_size=case.batch_size,
                public=usual_public(data) is not None,
            )
            attacks = {spec: ATTACKS.build(spec, case.effort()) for spec in suite(case.budget, setting)}
        left_out = {}
        for name, defense in defenses.items():
            try:
                check_model(defense, self.broadcast(name, defense).module)
            except GradveilError as error:
                if case.unfit == "refuse":
                    raise
                left_out[name] = str(error)
        # copies: what a defense of the caller has done before, or does now, is nobody else's
        fitting = {name: fresh(defense) for name, defense in defenses.items() if name not in left_out}
        if not fitting:
            raise GradveilError(f"no defense of the case can work on {case.model}: {next(iter(left_out.values()))}")
        case = case.model_copy(update={"attacks": tuple(attacks), "defenses": tuple(fitting)})
        seeds = [derive(case.seed, "attack", i) for i in range(case.images // case.batch_size)]

        rounds = {name: case.in_rounds or self.rounds(name, defense) for name, defense in fitting.items()}

        def cell(spec: str, name: str, number: int = 1, *, prior_only: bool = False) -> Cell:
            attack, defense = attacks[spec], fitting[name]
            reshaped = DEFENSES.reshaping(name, defense)
            once = prior_only or rounds[name] == (1,)
            return Cell(
                spec=spec,
                attack=attack,
                defense=name,
                prior_only=prior_only,
                digest=case.digest(spec, name, prior_only=prior_only, round_number=number),
                broadcast=reshaped,
                seeds=seeds,
                exchange=lambda: self.exchange(name, defense, attack if attack.crafts else None, number),
                private=lambda: private,
                module=lambda: self.broadcast(name, defense).module,
                keep=reshaped is None or all(split_spec(link)[0] in DEFENSES for link in DEFENSES.links(reshaped)),
                origin=Origin() if once else Origin(stage=f"round {number}", round=number),
            )

        crossed = [cell(spec, name, number) for spec in attacks for name in fitting for number in rounds[name]]
        searching = [spec for spec, attack in attacks.items() if attack.prior_only() is not None]
        alone = [cell(spec, case.defenses[0], prior_only=True) for spec in searching]
        told = {str(item) for item in TOLD & threat.knows}
        proofs = {
            name: prove(
                defense,
                self.broadcast(name, defense).module,
                case.recipe,
                inputs=private.batch.inputs,
                size=case.batch_size,
                candidates=len(private.gallery),
                given=told,
            )
            for name, defense in fitting.items()
        }
        for name, proof in proofs.items():
            if proof.release is None and not told and self.constant(name, fitting[name]):
                proofs[name] = replace(proof, constant=True, why=CONSTANT)
        return AuditPlan(
            case=case,
            cells=crossed + alone,
            domain=data.domain,
            private=private,
            left_out=left_out,
            class_names=data.class_names,
            proofs=proofs,
            labels_are_people=data.labels_are_people,
        )

    @cached_property
    def public(self) -> PublicImages:
        """What is public beside the data set: nothing that it holds."""
        return PublicImages.apart_from(self.data)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Places in the data set: of the private examples, the first or every k-th, and of all others as drawn."""
        case, data = self.case, self.data
        if (case.images - 1) * case.every >= len(data):
            every = f", every {case.every}th" if case.every > 1 else ""
            raise GradveilError(f"{case.data} has {len(data)} images, too few for {case.images}{every}")
        index = torch.arange(case.images) * case.every
        others = torch.randperm(len(data), generator=generator(case.seed, "gallery"))
        others = others[~torch.isin(others, index)]
        if len(others) == 0 and case.images < 2:
            raise GradveilError(f"{case.data} is too small to hide a private image in; use a larger data set")
        return index, others

    @cached_property
    def set_apart(self) -> Tensor:
        """Places in the data set of examples that are no candidates: what a server crafts with, which is public.

        From public examples that are candidates as well, a server would know who is not private.
        """
        knows, others = threat_model(self.case.threat).knows, self.places[1]
        if not {Knowledge.CRAFT, Knowledge.PUBLIC_DATA} <= knows:
            return others[:0]
        count = min(PUBLIC, len(others) // 2) if Knowledge.CANDIDATES in knows else min(PUBLIC, len(others))
        return others[len(others) - count :].sort().values

    @cached_property
    def lists(self) -> tuple[Tensor | None, Tensor | None]:
        """Places in the data set of the candidates with the private examples, and of as many without any of them.

        Both in an order that the case's seed decides. Where others are fewer than it takes for the second list to be as
        long, there is none, and all of the data set are candidates.
        """
        index, others = self.places
        if Knowledge.CANDIDATES not in threat_model(self.case.threat).knows:
            return None, None
        others = others[: len(others) - len(self.set_apart)]
        count = len(others) - len(index)
        listed = torch.cat([index, others[:count] if count > 0 else others])
        listed = listed[torch.randperm(len(listed), generator=generator(self.case.seed, "candidates"))]
        without = others[torch.randperm(len(others), generator=generator(self.case.seed, "without"))]
        return listed, without if count > 0 else None

    def candidates(self, listed: Tensor | None) -> ImageSet | None:
        """The candidates at these places. Where some labels are not known, none is: it would show who is private."""
        if listed is None:
            return None
        view, known = self.data.subset(listed), bool((self.data.labels != UNKNOWN).all())
        labels = view.labels if known else torch.full_like(view.labels, UNKNOWN)
        return replace(view, name=f"candidates of {self.data.name}", labels=labels)

    @cached_property
    def private(self) -> Private:
        """The private examples in a gallery of others: of candidates, where the threat model grants some.

        Whoever chooses among candidates would else have more luck than a gallery of more pictures lets expect.
        """
        (index, others), listed = self.places, self.lists[0]
        others = others if listed is None else others[torch.isin(others, listed)]
        hidden = torch.cat([index, others[: max(0, self.case.gallery - len(index))]])
        hidden = hidden[torch.randperm(len(hidden), generator=generator(self.case.seed, "line-up"))]
        return Private(
            batch=self.data.batch(index),
            index=index,
            gallery=self.data.batch(hidden).inputs,
            places=_found_in(hidden, index),
            listed=None if listed is None else _found_in(listed, index),
            label_counts=label_counts(self.data),
        )

    def broadcast(self, name: str | None, defense: Defense | None = None) -> Crafted:
        """What an honest server sends. Defenses that do not reshape the model share it and are attacked together."""
        links = [link for link in links_of(defense or Defense()) if link.reshapes]
        key = None if name is None or not links else DEFENSES.reshaping(name, defense)
        if key not in self._broadcasts:
            module = self.build()
            for link in links:
                module = link.on_model(module)
            module = module.to(self.case.device)
            self._broadcasts[key] = Crafted(module, self.case.model, models.trained_parameters(module), ())
        return self._broadcasts[key]

    def rounds(self, name: str, defense: Defense) -> tuple[int, ...]:
        """The rounds in which clients of a defense are looked at."""
        batch = self.private.batch.take(slice(self.case.batch_size)).to(self.case.device)
        public, honest = PublicData(self.private.batch.inputs), self.broadcast(name, defense)
        client = SimulatedClient(honest.module, recipe=self.case.recipe, defense=defense, loss=self.loss, public=public)
        return rounds_to_audit(client, detached(honest.sent), batch)

    def constant(self, name: str, defense: Defense) -> bool:
        """Whether clients of a defense send the same for every example of the line-up, and nothing beside it.

        A server that crafts what it sends may get other replies.
        """
        case, private, honest = self.case, self.private, self.broadcast(name, defense)
        beside = case.recipe.train_mode and bool(running_statistics(honest.module))
        if beside or Knowledge.CRAFT in threat_model(case.threat).knows:
            return False
        labels = torch.arange(len(private.gallery)) % self.data.domain.classes
        every = Batch(torch.cat([private.batch.inputs, private.gallery]), torch.cat([private.batch.labels, labels]))
        starts = range(0, len(every) - case.batch_size + 1, case.batch_size)
        batches = [every.take(slice(start, start + case.batch_size)).to(case.device) for start in starts]
        public = PublicData(private.batch.inputs)
        client = SimulatedClient(honest.module, recipe=case.recipe, defense=defense, loss=self.loss, public=public)
        return sends_constant(client, detached(honest.sent), batches)

    def exchange(self, name: str, defense: Defense, crafting: Attack | None, round_number: int = 1) -> Exchange:
        """What is seen of the clients of one defense, who get the honest broadcast or what an attack crafts from it."""
        key = (name, id(crafting), round_number)
        if key in self._exchanges:
            return self._exchanges[key]
        case, data, threat = self.case, self.data, threat_model(self.case.threat)
        starts = range(0, case.images, case.batch_size)
        batches = [self.private.batch.take(slice(i, i + case.batch_size)).to(case.device) for i in starts]
        log, drawn, public = Log(), list[Stream](), PublicData(self.private.batch.inputs)
        candidates, without = map(self.candidates, self.lists)
        honest = self.broadcast(name, defense)

        def replies(got: Crafted, numbers: Sequence[int], question: int = 0) -> list[Observation]:
            """What is seen of the clients of these numbers when they get this broadcast."""

            def streams(number: int) -> Streams:
                def stream(now: int) -> Stream:
                    again = ([question] if question else []) + ([-now] if now > 1 else [])
                    drawn.append(Stream.seeded(case.seed, "defense", name, number, *again))
                    return drawn[-1]

                return stream

            client = SimulatedClient(got.module, recipe=case.recipe, defense=defense, loss=self.loss, public=public)
            # copies: a defense that edits what it gets in place must not change the truth, or what others are sent
            own = [Batch(batches[i].inputs.clone(), batches[i].labels.clone()) for i in numbers]
            sent_back = replies_in_round(client, detached(got.sent), own, [*map(streams, numbers)], round_number)
            task.advance(len(numbers))
            seen = []
            for number, reply in zip(numbers, sent_back, strict=True):
                log.merge(reply.log)
                seen.append(
                    observe(
                        module=got.module,
                        model=got.model,
                        domain=data.domain,
                        sent=got.sent,
                        reply=reply.update,
                        batch=batches[number],
                        recipe=case.recipe,
                        defense=name,
                        built_defense=defense,
                        threat=threat,
                        crafted=got.tampered,
                        candidates=candidates,
                        public=self.public if Knowledge.PUBLIC_DATA in threat.knows else None,
                        loss=self.loss,
                        round_number=round_number,
                    )
                )
            return seen

        count = len(batches)
        with self.progress.task(f"clients with {name}", None if crafting else count) as task:
            if crafting is None:
                seen = replies(honest, range(count))
            else:
                unlisted = data.subset(self.set_apart)
                known = public.last(unlisted, PUBLIC) if Knowledge.PUBLIC_DATA in threat.knows else None
                server = Server(honest.module, case.model, honest.sent, data.domain, known)
                asked = [lambda got, question, i=i: replies(got, [i], question)[0] for i in range(count)]
                seen = interrogate(crafting, server, asked, derive(case.seed, "craft"))
        self._exchanges[key] = Exchange(seen, log.means(), any(rng.draws > 0 for rng in drawn), without)
        return self._exchanges[key]


def label_counts(data: ImageSet) -> Tensor | None:
    """[classes]: how often each label occurs; None where some are not known."""
    known = bool((data.labels != UNKNOWN).all())
    return torch.bincount(data.labels, minlength=len(data.class_names)) if known else None


def _found_in(places: Tensor, wanted: Tensor) -> Tensor:
    """[n]: where each of some numbers stands among others that hold it once."""
    return (places == wanted[:, None]).int().argmax(dim=1)


def check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise GradveilError("device cuda was asked for, but torch sees no GPU here: use --device cpu")
