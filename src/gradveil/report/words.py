"""The report's plain language: the outcome, the adversary and the setting, in sentences for a reader without us."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from pydantic import JsonValue

from gradveil.auditing.audit import OWN, Answer, Audit, Provenance, Row, SavedTraining, Verdict
from gradveil.metrics.table import METRICS, NOT_AVAILABLE, PERCENT, finite, styled

NO_MOVE = "It has no counter-move here, and goes by what the update itself shows."
NOT_TRIED = "No attack that knows the defense was tried on it."
NOT_TOLD = "The adversary was not told which defense it faces."
CaseFields = Mapping[str, JsonValue]


def defense_name(spec: str) -> str:
    return "No defense" if spec == "none" else spec


def in_sentence(spec: str) -> str:
    """A defense as it is called inside a sentence."""
    return "no defense" if spec == "none" else spec


def attack_name(row: Row) -> str:
    if not row.is_prior:
        return row.attack
    return f"{row.prior_of or 'a search'} without the update (prior only)"


AWARE = {
    "none": "takes no defense into account",
    "estimates": "takes the defense as the update shows it",
    "informed": "knows the defense and adapts to it",
}


def kind_of(row: Row) -> str:
    """What an attack goes by, in a few words, where it stands."""
    if row.is_prior:
        return "what the same search finds with no update: chance"
    chooses = f"chooses among {row.candidates} candidates" if row.candidates is not None else ""
    # An attack that ranks candidates may have a counter-move too.
    aware = "informed" if any((row.counter_moves or {}).values()) else row.awareness
    return "; ".join(part for part in (AWARE.get(aware or "", ""), chooses) if part)


def label_name(label: int | None, names: Mapping[int, str]) -> str:
    """A label by its name.

    >>> label_name(3, {3: "cat"}), label_name(4, {}), label_name(None, {})
    ('cat', 'label 4', 'label unknown')
    """
    return "label unknown" if label is None else names.get(label, f"label {label}")


def short_attack(spec: str) -> str:
    """An attack without its options.

    >>> short_attack("ig:iterations=600,restarts=1")
    'ig'
    """
    return spec.partition(":")[0]


def choice(row: Row) -> str:
    """What the pictures of a row are where its attack drew none; empty of all others."""
    return "" if row.candidates is None else f", its choice among {row.candidates} candidates"


def row_name(row: Row) -> str:
    """A row inside a sentence. The prior alone meets no defense: it is there without an update."""
    when = "" if row.stage is None else f", {row.stage}"
    return attack_name(row) if row.is_prior else f"{row.attack} against {in_sentence(row.defense)}{when}"


def threat_name(threat: str, adversary: str) -> str:
    """A threat model by letter and title, with what was granted on top of it.

    >>> threat_name("C+labels", "parameter-aware eavesdropper, labels")
    'C, parameter-aware eavesdropper, given labels besides'
    """
    letter, *extra = threat.split("+")
    if not adversary:
        return threat
    granted = f", given {' and '.join(extra)} besides" if extra else ""
    return f"{letter}, {adversary.partition(', ')[0]}{granted}"


def span(interval: tuple[float, float] | None) -> str:
    """An interval of shares.

    >>> span((0.301, 0.954))
    '30% to 95%'
    """
    return NOT_AVAILABLE if interval is None else " to ".join(styled(share, PERCENT) for share in interval)


def headline(verdicts: Sequence[Verdict], *, people: bool = False) -> str:
    """The outcome of the whole audit in a few sentences. Where labels are ``people``, who was named comes first."""
    named = [(share, one) for one in verdicts if one.labels and (share := one.labels.share) is not None]
    if people and named:
        share, most_named = max(named, key=lambda pair: pair[0])
        guess = None if most_named.labels is None else most_named.labels.chance
        beside = "" if guess is None else f", where a guess names {styled(guess, PERCENT)}"
        who = f"at worst, {styled(share, PERCENT)} were named with {in_sentence(most_named.defense)}{beside}"
        return f"Labels are people here: {who}. {headline(verdicts)}"
    judged = [(verdict, share) for verdict in verdicts if (share := verdict.identified) is not None]
    if not judged:
        return "No share of identified images was measured, so this audit has no verdict."
    worst, most = max(judged, key=lambda pair: pair[1])
    extreme = f"{styled(most, PERCENT)} of private images were identified with {in_sentence(worst.defense)}"
    known = [above for verdict, _ in judged if (above := verdict.above_chance) is not None]
    if not known:
        return f"At worst, {extreme}; chance was not measured, so there is nothing to compare this with."
    if len(judged) == 1:
        beside = "" if worst.rebuilt_apart is None else styled(worst.rebuilt_apart.share, PERCENT)
        beside = beside and f" Without a list of candidates it was {beside}."
        return (
            f"With the attacks tried, {extreme}: {'' if known[0] else 'not '}more often than chance explains.{beside}"
        )
    count = "each" if all(known) else str(sum(known)) if any(known) else "none"
    least = min(share for _, share in judged)
    first, *others = [in_sentence(verdict.defense) for verdict, share in judged if share == least]
    more = f" and {len(others)} more" if others else ""
    spread = f"At worst, {extreme}; at best, {styled(least, PERCENT)} with {first}{more}"
    if least == most:
        spread = f"It was {styled(most, PERCENT)} in every setting"
    # In how many settings it took no list to choose from; nothing where no attack had one.
    rebuilding: list[Answer | Verdict | None] = [
        one.rebuilt_apart or (one if one.ranked_first is None else None) for one in verdicts
    ]
    rebuilt = [one.above_chance for one in rebuilding if one is not None and one.above_chance is not None]
    if rebuilt and any(verdict.rebuilt_apart for verdict in verdicts):
        enough = f"were enough for that in {sum(rebuilt)} of {len(rebuilt)}"
        spread = f"Pictures rebuilt without a list of candidates {enough}. {spread}"
    return (
        f"In {count} of the {len(known)} settings tried, private images were identified more often than chance "
        f"explains. {spread}."
    )


def origin(found: Provenance | None) -> list[tuple[str, str]]:
    """Where the audit comes from: what, and its value."""
    if found is None:
        return []
    facts = {
        "begun": found.started.replace("T", " ").replace("Z", " UTC"),
        "gradveil": found.version,
        "commit": found.commit or "not a git checkout",
        "private data": f"sha256 {found.data}" if found.data else "not known",
        "line-up": f"sha256 {found.line_up}" if found.line_up else "not known",
    }
    return list(facts.items())


def repeat(audit: Audit) -> tuple[str, tuple[str, ...]]:
    """How this audit can be made again: in words, and the commands or the call where they are known."""
    commands = audit.provenance.commands if audit.provenance else ()
    model, same = (
        value_of(audit.case, "model"),
        "The same seed on the same machine gives the same numbers to the last digit.",
    )
    if audit.case.get("data") == OWN:
        by = "this call" if commands else "gradveil.audit(model, batch, ...) with the settings below"
        return (
            "A Python program made this audit, of a model and a batch that only it holds: no command can repeat it. "
            f"In that program, with the same model and batch, {by} does. {same}"
        ), commands
    how = "Code of your own, such as a defense, has to be named with --load."
    if "observations" in audit.case:
        how = "The saved exchanges have to lie where they lay."
    elif "." in model.partition(":")[0]:
        how = f"A case file loads no code: add --model {model}, and --load for what else is yours."
    made = (
        "These commands made it, in this order. To repeat it, "
        if len(commands) > 1
        else "This command made it. Or "
        if commands
        else ""
    )
    save = "save the case below as case.yaml and run gradveil audit case.yaml --out DIR"
    return f"{made}{save}. {how} {same}", commands


def grades(bounds: Mapping[str, float], unit: str) -> str:
    """Up to where each grade goes.

    >>> grades({"A": 0.1, "B": 0.25}, "%")
    'A up to 10%, B up to 25%, F above'
    """
    return ", ".join([*(f"{letter} up to {100 * bound:g}{unit}" for letter, bound in bounds.items()), "F above"])


def points(share: float | None) -> str:
    """A share of accuracy in points.

    >>> points(0.0312), points(-0.01), points(None)
    ('3.1 points', 'none (1.0 points gained)', 'n/a')
    """
    if share is None:
        return NOT_AVAILABLE
    return f"{100 * share:.1f} points" if share >= 0 else f"none ({-100 * share:.1f} points gained)"


def setting(case: CaseFields, trainings: Sequence[SavedTraining] = (), line_ups: Collection[int] = ()) -> list[str]:
    """What was attacked and how hard, in sentences; ``line_ups``: how many images stood in those that were held."""
    restarts = f" and {_count(case, 'restarts', 'restart')} for each update" if case.get("restarts") is not None else ""
    specs = case.get("attacks")
    options = [option for option in ("iterations=", "restarts=") if isinstance(specs, list) and option in str(specs)]
    unless = ", where the options of an attack do not say otherwise" if options else ""
    sentences = [
        *(_saved(trainings) if trainings else _made(case)),
        f"The adversary searches with the budget “{value_of(case, 'budget')}”{restarts}{unless}.",
        "It keeps the result that its own objective prefers: it never sees the truth.",
    ]
    if line_ups:
        sizes = f"{min(line_ups)} to {max(line_ups)}" if len(set(line_ups)) > 1 else f"{min(line_ups)}"
        sentences.append(f"An image is identified in a line-up of {sizes} images.")
    return sentences


def _made(case: CaseFields) -> list[str]:
    """Where the updates come from when they were made for the audit."""
    images, how = _count(case, "images", "image"), case.get("recipe")
    return [
        f"The private data are {images} of {value_of(case, 'data')}; the model is {value_of(case, 'model')}.",
        f"Each update is computed from {_count(case, 'batch_size', 'private image')}.",
        recipe(how if isinstance(how, dict) else {}),
    ]


def _saved(trainings: Sequence[SavedTraining]) -> list[str]:
    """Where the updates come from when they were saved in the middle of trainings."""
    sentences = []
    for one in trainings:
        known, clients = one.model_dump(), len(one.clients)
        when = (
            f", from {clients} client{'' if clients == 1 else 's'} in rounds {runs(one.rounds)}" if one.rounds else ""
        )
        sentences.append(
            f"The updates of “{value_of(known, 'name')}” were saved while {value_of(known, 'model')} was trained on "
            f"{value_of(known, 'data')} with {in_sentence(value_of(known, 'defense'))}{when}."
        )
        if one.batch_size is not None:
            sentences.append(f"Each update is computed from {_count(known, 'batch_size', 'private image')}.")
        if one.recipe is not None:
            sentences.append(recipe(one.recipe))
    return list(dict.fromkeys(sentences))


def runs(numbers: Sequence[int], to: str = " to ") -> str:
    """Numbers in a sentence, a run of them in short.

    >>> runs([1, 2, 3, 4, 31, 32])
    '1 to 4, 31, 32'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(f"{run[0]}{to}{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in found)


def recipe(fields: CaseFields) -> str:
    """How the client trains, in a sentence."""
    mode = "training" if fields.get("train_mode") is True else "evaluation"
    if fields.get("sends") != "delta":
        return (
            f"The client sends the gradient of one step over its whole batch, with the model in {mode} mode (FedSGD)."
        )
    size = fields.get("batch_size")
    batches = "all images at once" if size is None else f"mini-batches of {_count(fields, 'batch_size', 'image')}"
    extras = [
        f"{key.replace('_', ' ')} {value:g}, "
        for key in ("momentum", "weight_decay")
        if (value := _number(fields, key))
    ]
    return (
        f"The client trains for {_count(fields, 'epochs', 'epoch')} in {batches}, with learning rate "
        f"{value_of(fields, 'lr')}, {''.join(extras)}and the model in {mode} mode, "
        "then sends the change of its parameters (FedAvg)."
    )


def counter_moves(rows: Sequence[Row]) -> list[tuple[str, list[tuple[str, str]]]]:
    """For each defense its links with what the informed attack does about each; "none" has nothing to counter."""
    attacks = [row for row in rows if not row.is_prior and row.defense != "none"]
    known = {row.defense: row.counter_moves for row in attacks if row.counter_moves is not None}
    found = []
    for defense in dict.fromkeys(row.defense for row in attacks):
        if defense in known:
            links = [(link, sentence or NO_MOVE) for link, sentence in known[defense].items()]
            found.append((defense, links or [(defense, NOT_TOLD)]))
        else:
            found.append((defense, [(defense, NOT_TRIED)]))
    return found


def assumptions(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What the adversary was assumed to know: sentences, each with where it holds ("" for everywhere)."""
    attacks = [row for row in rows if not row.is_prior]
    holders = _grouped(attacks, lambda row: row.assumptions)
    placed = [(sentence, where(held, attacks)) for sentence, held in holders.items()]
    return sorted(placed, key=lambda pair: pair[1] != "")


def flags(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Each flag, in the order of the rows, with where it was raised ("" for everywhere)."""
    attacks, raised = [row for row in rows if not row.is_prior], _grouped(rows, lambda row: row.flags)
    return [
        (flag, where(held, rows if any(row.is_prior for row in held) else attacks)) for flag, held in raised.items()
    ]


def where(held: Sequence[Row], among: Sequence[Row]) -> str:
    """In which of the rows something holds, as briefly as can be said: by defense, by attack, or one by one."""
    if len(held) == len(among):
        return ""
    defenses = dict.fromkeys(row.defense for row in held)
    if len(held) == sum(row.defense in defenses for row in among):
        return "against " + ", ".join(map(in_sentence, defenses))
    attacks = dict.fromkeys(map(attack_name, held))
    if len(held) == sum(attack_name(row) in attacks for row in among):
        return "for " + ", ".join(attacks)
    return "; ".join(map(row_name, held))


def logged(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What each defense wrote down while it ran: (defense, "key = value, ..."), the same only once."""
    lines = (
        (row.defense, ", ".join(f"{key} = {styled(value, '.4g')}" for key, value in row.log.items()))
        for row in rows
        if row.log and not row.is_prior
    )
    return list(dict.fromkeys(lines))


def missing(rows: Sequence[Row]) -> list[str]:
    """Metrics that could not be had, with the reason, each once."""
    reasons = dict.fromkeys(pair for row in rows for pair in row.not_available.items())
    return [f"{METRICS[key].heading if key in METRICS else key}: {reason}" for key, reason in reasons]


def _grouped(rows: Sequence[Row], texts: Callable[[Row], Iterable[str]]) -> dict[str, list[Row]]:
    """By text, the rows that have it."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        for text in texts(row):
            groups.setdefault(text, []).append(row)
    return groups


def value_of(fields: CaseFields, key: str) -> str:
    value = fields.get(key)
    return "(not recorded)" if value is None else str(value)


def _number(fields: CaseFields, key: str) -> float | None:
    try:
        return finite(fields.get(key))
    except ValueError:
        return None


def _count(fields: CaseFields, key: str, noun: str) -> str:
    number = _number(fields, key)
    if number is None:
        return f"an unrecorded number of {noun}s"
    return f"{number:g} {noun}{'' if number == 1 else 's'}"
