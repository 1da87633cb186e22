"""The search: Optuna proposes candidates, short audits and trainings measure them, and files keep what was measured.

Each trial is a file of its own, written when it is done: an interrupted search loses at most one. The study itself
lives in memory and is made anew from these files, so that nothing but checked JSON is ever read.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from gradveil import models
from gradveil.auditing.audit import read_model
from gradveil.core.atomic import make_folder, remove_partial, write_json
from gradveil.core.errors import BadFileError, GradveilError, in_one_line
from gradveil.core.locks import alone
from gradveil.core.progress import SILENT, Progress
from gradveil.core.reading import read_json
from gradveil.core.seeding import derive
from gradveil.lab.advise.answer import Recommendation, Trial, answer, baseline_of, distance, keepers
from gradveil.lab.advise.measure import SCRATCH, Laboratory, proved
from gradveil.lab.advise.question import ELSEWHERE, WISHES, Candidate, Question, is_features

VERSION = 1
PUBLISHED = ("censor", "outpost", "soteria", "precode", "ats", "graddefense")
"""Tried as they are: what hides nothing from somebody who holds candidates is dropped after a first look."""
SEARCHED = ("veil", "noise", "sparsify")
"""Kinds with a number that the search chooses; all others are tried as they are."""
AGAIN = 2
"""Further seeds with which a recommendation is trained before it is made."""
CONTESTANTS = 3
"""How many of the best are trained with further seeds, at most."""
ROUNDS = (10.0, 20.0, 40.0, 80.0)
"""Of trainings on public features."""

Space = dict[str, BaseDistribution]
Params = dict[str, float]


def kinds(asked: Question) -> list[str]:
    """What a search chooses among: a model and a kind of defense, as ``model|kind``.

    On public features as a second model only ``veil`` is tried: what leaks elsewhere leaks there.
    """
    public = is_features(asked.model)  # whose passes are long
    named = dict.fromkeys(("none", "veil", "noise", "sparsify", *(() if public else PUBLISHED), *asked.defenses))
    own = [f"{asked.model}|{kind}" for kind in named]
    return own if public else [*own, f"{ELSEWHERE}|none", f"{ELSEWHERE}|veil"]


def space(asked: Question, what: str) -> Space:
    """The numbers that are searched for a kind, each under a name of its own."""
    model, _, kind = what.partition("|")
    found: Space = {}
    if is_features(model):
        found["lr"] = FloatDistribution(3.0, 300.0, log=True)
        found["rounds"] = CategoricalDistribution(ROUNDS)
    else:
        found["lr"] = FloatDistribution(asked.lr / 10, asked.lr * 10, log=True)
    if kind == "veil":
        found["bound"] = FloatDistribution(0.03, 3.0, log=True)
    elif kind == "noise":
        found["sigma"] = FloatDistribution(1e-3, 10.0, log=True)
    elif kind == "sparsify":
        found["rate"] = FloatDistribution(0.9, 0.999)
    return {f"{what}/{name}": distribution for name, distribution in found.items()}


def candidate(asked: Question, what: str, params: Mapping[str, float]) -> Candidate:
    """What the numbers of a trial stand for."""
    model, _, kind = what.partition("|")
    value = {name.rpartition("/")[2]: number for name, number in params.items()}
    rounds = int(value.get("rounds", asked.rounds))
    steps = rounds if is_features(model) else rounds * asked.epochs
    spec = {
        "veil": f"veil:ceiling={asked.max_recognised:g},rounds={steps},bound={value.get('bound', 1):.3g}",
        "noise": f"noise:sigma={value.get('sigma', 1):.3g}",
        "sparsify": f"sparsify:rate={value.get('rate', 0.9):.4g}",
    }.get(kind, kind)
    return Candidate(model=model, defense=spec, lr=float(f"{value['lr']:.3g}"), rounds=rounds)


def first_trials(asked: Question) -> list[tuple[str, dict[str, float]]]:
    """What is tried before the search takes over: no defense at four step sizes, and each kind at least once.

    Where no step size stands, it is that of the best training without a defense.
    """
    public = is_features(asked.model)
    on, plain = (asked.model if public else ELSEWHERE), f"{asked.model}|none"
    lrs = (30.0, 100.0, 10.0, 300.0) if public else tuple(asked.lr * by for by in (1.0, 3.0, 0.3, 10.0))
    found = [(plain, {"lr": lr, "rounds": 40.0}) for lr in lrs]
    found += [] if public else [(f"{ELSEWHERE}|none", {"lr": 100.0, "rounds": 40.0})]
    for lr, rounds, bound in ((100.0, 40.0, 0.3), (30.0, 40.0, 0.3), (300.0, 40.0, 0.3), (100.0, 80.0, 0.1)):
        found.append((f"{on}|veil", {"lr": lr, "rounds": rounds, "bound": bound}))
    others = [what for what in kinds(asked) if what not in {one for one, _ in found}]
    return found + [(what, {"rounds": 40.0, "bound": 1.0, "sigma": 0.3, "rate": 0.99}) for what in others]


@alone
def advise(
    asked: Question, folder: Path, *, resume: bool = False, progress: Progress = SILENT
) -> tuple[Recommendation, str]:
    """Answer a question into a folder: the answer, and what was shortened for it. Trials that are saved are kept."""
    trials = _opened(asked, folder, resume=resume)
    laboratory = Laboratory(asked, folder, progress)
    ahead = [one for one in first_trials(asked)[: asked.trials] if not any(_same(asked, one, done) for done in trials)]
    with progress.task("advise", max(asked.trials, len(trials) + len(ahead))) as task:
        task.advance(len(trials))
        while ahead or len(trials) < asked.trials:  # other wishes have first trials of their own
            what, params = _first(asked, *ahead.pop(0), trials) if ahead else _proposed(asked, trials)
            chosen = candidate(asked, what, params)
            task.note(f"{chosen.defense} on {chosen.model}")
            trial = _measured(
                laboratory, Trial(number=len(trials) + 1, what=what, params=params, **vars(chosen)), trials
            )
            _save(folder, trial)
            trials.append(trial)
            task.advance()
            if baseline_of(asked, trials) is None and len(trials) >= 4:
                raise GradveilError(f"a training of {asked.model} without a defense does not end: {trial.why}")
    best = _confirmed(asked, laboratory, trials, folder, progress)
    found = answer(
        asked, best, held_out=len(laboratory.held_out), classes=laboratory.train.domain.classes,
        examples=laboratory.whole,
    )  # fmt: skip
    return found, laboratory.shortened


def _first(asked: Question, what: str, wanted: dict[str, float], trials: Sequence[Trial]) -> tuple[str, Params]:
    """A first trial, with the step size of the best training without a defense where it names none."""
    baseline = baseline_of(asked, trials)
    values = {"lr": asked.lr if baseline is None else baseline.lr} | wanted
    return what, {name: values[name.rpartition("/")[2]] for name in space(asked, what)}


def _proposed(asked: Question, trials: Sequence[Trial]) -> tuple[str, Params]:
    """What Optuna would try next, after all that was measured."""
    study = _study(asked, trials)
    asking = study.ask()
    what = asking.suggest_categorical("what", _open(asked, trials))
    return what, {name: _suggested(asking, name, each) for name, each in space(asked, what).items()}


def _open(asked: Question, trials: Sequence[Trial]) -> list[str]:
    """The kinds that a search is for: those with a number to choose, unless they failed whenever they were tried."""
    searched = [what for what in kinds(asked) if what.partition("|")[2] in SEARCHED]
    states = {what: {one.state for one in trials if one.what == what} for what in searched}
    return [what for what in searched if states[what] != {"failed"}] or searched


def _study(asked: Question, trials: Sequence[Trial]) -> optuna.Study:
    """A study of these trials, by the wishes of now. Its draws follow from the seed and from how many there are."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = derive(asked.seed, "advise", len(trials)) % 2**32
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=5),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=6, n_warmup_steps=2),
    )
    choices, baseline = _open(asked, trials), baseline_of(asked, trials)
    for trial in trials:
        numbers = space(asked, trial.what) if trial.what in kinds(asked) else {}
        if baseline is None or trial.state == "failed" or trial.most is None or trial.params.keys() != numbers.keys():
            continue
        far, dropped = _far(asked, trial, baseline), trial.state == "dropped"
        # Kinds that nothing is searched for help the pruner alone.
        known = {"what": CategoricalDistribution(choices), **numbers} if trial.what in choices else {}
        try:
            study.add_trial(
                optuna.trial.create_trial(
                    state=optuna.trial.TrialState.PRUNED if dropped else optuna.trial.TrialState.COMPLETE,
                    value=None if dropped else far[-1],
                    params={"what": trial.what, **trial.params} if known else {},
                    distributions=known,
                    intermediate_values=dict(enumerate(far, start=1)),
                )
            )
        except ValueError as error:
            raise BadFileError(f"trial {trial.number} is damaged: {in_one_line(error)}") from None
    return study


def _measured(laboratory: Laboratory, trial: Trial, trials: Sequence[Trial]) -> Trial:
    """The trial with what was found; dropped as soon as it cannot compete. A defense may be anybody's code."""
    try:
        seen = laboratory.privacy(trial.candidate)
        trial = trial.model_copy(update=vars(seen))
        if seen.recognised == 1.0 and trial.defense != "none":
            why = "all were recognised, as without a defense"
            return trial.model_copy(update={"state": "dropped", "why": why})
        for accuracy in laboratory.accuracies(trial.candidate):
            trial = trial.model_copy(update={"accuracies": (*trial.accuracies, accuracy)})
            if trial.defense != "none" and _hopeless(laboratory.asked, trial, trials):
                parts = len(trial.accuracies)
                why = f"{accuracy:.1%} after {parts} of 4 parts of the training, behind most others"
                return trial.model_copy(update={"state": "dropped", "why": why})
    except GradveilError as error:
        return trial.model_copy(update={"state": "failed", "why": str(error)})
    except Exception as error:
        return trial.model_copy(update={"state": "failed", "why": f"it raised {in_one_line(error)}"})
    return trial


def _hopeless(asked: Question, trial: Trial, trials: Sequence[Trial]) -> bool:
    """Whether Optuna's pruner drops a trial by how far it is from the wishes at this part of the training."""
    baseline = baseline_of(asked, trials)
    if baseline is None or len(trial.accuracies) == 4:
        return False
    asking = _study(asked, trials).ask()
    for part, value in enumerate(_far(asked, trial, baseline), start=1):
        asking.report(value, part)
    return asking.should_prune()


def _far(asked: Question, trial: Trial, baseline: Trial) -> list[float]:
    """After each part of the training, how far from both wishes, beside the training without a defense."""
    pairs = zip(trial.accuracies, baseline.accuracies, strict=False)
    return [distance(asked, trial.most or 0.0, 100 * (plain - reached)) for reached, plain in pairs]


def _suggested(asking: optuna.Trial, name: str, distribution: BaseDistribution) -> float:
    if isinstance(distribution, FloatDistribution):
        return asking.suggest_float(name, distribution.low, distribution.high, log=distribution.log)
    assert isinstance(distribution, CategoricalDistribution)
    return float(asking.suggest_categorical(name, distribution.choices))  # type: ignore[arg-type]


def _same(asked: Question, wanted: tuple[str, dict[str, float]], trial: Trial) -> bool:
    """Whether a first trial was done, with these wishes; a step size that does not stand in it may be any."""
    what, values = wanted
    if trial.what != what:
        return False
    values = {"lr": trial.lr} | values
    params = {name: values[name.rpartition("/")[2]] for name in space(asked, what)}
    return trial.candidate == candidate(asked, what, params)


def _confirmed(
    asked: Question, laboratory: Laboratory, trials: list[Trial], folder: Path, progress: Progress
) -> list[Trial]:
    """The trials, of which the baseline and the best were trained with further seeds until one keeps both wishes."""

    def again(trial: Trial) -> Trial:
        seeds = range(asked.seed + 1 + len(trial.again), asked.seed + 1 + AGAIN)
        more = [list(laboratory.accuracies(trial.candidate, seed))[-1] for seed in seeds]
        done = trial.model_copy(update={"again": (*trial.again, *more)})
        _save(folder, done)
        trials[trials.index(trial)] = done
        return done

    with progress.task("further seeds", CONTESTANTS + 1) as task:
        baseline = baseline_of(asked, trials)
        if baseline is None:
            raise GradveilError(f"no training of {asked.model} without a defense came to its end: try more --trials")
        again(baseline)
        for _ in range(CONTESTANTS):
            task.advance()
            baseline = baseline_of(asked, trials) or baseline
            kept = keepers(asked, trials, baseline)
            if not kept or (len(kept[0].again) == AGAIN and len(baseline.again) == AGAIN):
                break
            again(kept[0] if len(kept[0].again) < AGAIN else baseline)
    return trials


def _opened(asked: Question, folder: Path, *, resume: bool) -> list[Trial]:
    """The trials that are kept, in order. Only wishes may differ from those of before."""
    path = folder / "question.json"
    if path.exists():
        if not resume:
            raise GradveilError(f"{folder} holds an advice already: add --resume to go on with it, or choose --out")
        before = _question(path)
        for name, value in asked.as_json().items():
            if name not in WISHES and before.get(name) != value:
                raise GradveilError(f"{folder} was asked with {name}={before.get(name)}, not {value}: go on with that")
    make_folder(folder / "trials")
    remove_partial(folder, "question.json", "trials/*.json")
    for left in folder.glob(f"{SCRATCH}*"):  # of an audit that was killed
        shutil.rmtree(left)
    write_json(path, {"version": VERSION, **asked.as_json()})
    trials = []
    for number, file in enumerate(sorted((folder / "trials").glob("[0-9]*.json")), start=1):
        trial = read_model(file, Trial, "a trial")
        model = trial.what.partition("|")[0]
        if trial.certified:  # what is proved is computed, whatever a file says
            trial = trial.model_copy(update=vars(proved(trial.defense)))
        if trial.number != number or trial.model != model or models.canonical(model) not in (asked.model, ELSEWHERE):
            raise BadFileError(f"{file} is not trial {number} of this advice: remove it, or choose another --out")
        trials.append(trial)
    return trials


def _question(path: Path) -> dict[str, object]:
    try:
        found = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise BadFileError(f"{path} is damaged: {in_one_line(error)}") from None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise BadFileError(f"{path} is not a question that this Gradveil reads")
    return found


def _save(folder: Path, trial: Trial) -> None:
    write_json(folder / "trials" / f"{trial.number:04}.json", trial.model_dump(mode="json"))
