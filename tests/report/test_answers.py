"""Five answers for each defense, and what to do next: true to what was measured, with words for what was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradveil.auditing import Audit, Verdict, read_audit
from gradveil.auditing.audit import OWN
from gradveil.auditing.verdict import GRADES
from gradveil.report import words
from gradveil.report.answers import NOT_ASKED, answers, ceiling, images_for_an_a, outcomes, recommendations
from report.outline import outline
from report.saved_audit import edit_audit, write_audit, write_full_audit

CASE = {"data": "cifar10-samples", "model": "lenet:init=wide", "threat": "C", "images": 4, "batch_size": 1, "seed": 0}
READ = {"attack": "ig", "share": 1.0, "interval": (0.4, 1.0), "chance": 0.1, "above_chance": True}
HIDDEN = {"attack": "ig", "share": 0.0, "interval": (0.0, 0.6), "chance": 0.1, "above_chance": False}
PROVEN = {"recognised": 0.31, "member": 0.12, "psnr": 14.2, "assumes": "It assumes fresh noise."}


def verdict(defense: str = "noise:sigma=0.1", **more: Any) -> Verdict:
    found = {"identified": 0.0, "above_chance": False, "at_random": 0.01, "images": 4, "grade": "C"}
    return Verdict(**{"defense": defense, **found, **more})


def audit(*verdicts: Verdict, **more: Any) -> Audit:
    case = {**CASE, "budget": "thorough", "defenses": [one.defense for one in verdicts]}
    return Audit(**{"case": case, "rows": (), "verdicts": verdicts, "grades": GRADES, **more})


def advised(*verdicts: Verdict, **more: Any) -> str:
    return "\n".join(f"{one.why} > {one.command}" for one in recommendations(audit(*verdicts, **more)))


def test_each_answer_is_a_share_beside_chance_and_below_its_ceiling() -> None:
    shown = {one.name: one for one in answers(verdict(recognised=HIDDEN, labels=READ, ceiling=PROVEN))}
    assert list(shown) == ["rebuilt", "recognised", "member", "labels"]
    assert shown["recognised"].words == "not above chance (10%); 95% interval 0% to 60%; no attack passes 31%; by ig"
    assert (shown["labels"].outcome, shown["labels"].ceiling) == ("leaks", None)
    assert shown["member"].words == NOT_ASKED
    assert shown["member"].brief() == "not measured"


def test_an_answer_that_is_missing_says_why() -> None:
    (_, recognised, *_) = answers(verdict(recognised={"why": "No attack held candidates."}))
    assert (recognised.share, recognised.words) == (None, "No attack held candidates.")


def test_nothing_that_was_not_above_chance_is_good_news_unless_the_verdict_is() -> None:
    outcomes = [
        answers(verdict(rebuilt=HIDDEN, outcome=outcome))[0].outcome for outcome in ("holds", "unknown", "leaks")
    ]
    assert outcomes == ["holds", "unknown", "unknown"]


def test_older_audits_answer_what_they_asked() -> None:
    rebuilt, recognised, *_ = answers(verdict(identified=0.5, ranked_first=None))
    assert (rebuilt.share, recognised.words) == (0.5, NOT_ASKED)
    rebuilt, recognised, *_ = answers(verdict(identified=0.5, ranked_first=0.5))
    assert (rebuilt.words, recognised.share) == (NOT_ASKED, 0.5)


def test_a_ceiling_is_a_sentence_or_says_why_there_is_none() -> None:
    assert ceiling(verdict(ceiling=PROVEN)) == (
        "Proven: no attack recognises more than 31% of a line-up of this size, or finds more than 12% of members at 1% "
        "false alarms, or rebuilds better than 14.2 dB without a prior. It assumes fresh noise."
    )
    assert ceiling(verdict(ceiling={"why": "nothing is noised"})) == "Nothing is noised."
    assert "no attack from 40 replies recognises" in ceiling(verdict(ceiling={**PROVEN, "replies": 40}))


def test_labels_that_are_people_are_the_headline() -> None:
    one = verdict("none", labels=READ)
    assert answers(one, people=True)[0].name == "labels"
    assert answers(one, people=True)[0].meaning.endswith("who somebody is")
    assert words.headline([one], people=True).startswith("Labels are people here: at worst, 100% were named with no")
    assert "people" not in words.headline([one])
    assert "this alone tells who took part" in advised(one, labels_are_people=True)


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ([verdict(outcome="leaks", above_chance=True)], "--defense none --defense veil --out next"),
        ([verdict(outcome="leaks", above_chance=True), verdict("a", outcome="holds")], "Of what was tried, a held."),
        ([verdict(labels=READ), verdict("a", labels=HIDDEN)], "more often than chance. Not so under a."),
        ([verdict(labels=READ)], "No defense tried here is known to hide them."),
        ([verdict(flags=("no candidates",))], "Give the adversary one. > gradveil audit --data cifar10-samples"),
        ([verdict(flags=("no candidates",))], "--threat D"),
        ([verdict(flags=("no counter-move",))], "so it cannot be A or B"),
        ([verdict()], "It takes 32, with none found, to rule out a worse one. > gradveil audit --data"),
        ([verdict()], "--images 32"),
        ([verdict("dp", ceiling=PROVEN)], "gradveil advise --data cifar10 --model lenet:init=wide --max-rec"),
        ([verdict("a")], "--model lenet:init=wide --defense a --max-recognised 0.1 --max-loss 3 --out advice"),
        ([verdict(grade="A", cost={"grade": "A"})], "Nothing stands out."),
        ([verdict("a b;c")], "--defense 'a b;c' --out"),
        ([verdict("a b;c")], "--defense 'a b;c' --max-recognised"),
    ],
)  # fmt: skip
def test_what_to_do_next_follows_from_what_was_measured(verdicts: list[Verdict], said: str) -> None:
    assert said in advised(*verdicts)


@pytest.mark.parametrize(
    ("verdicts", "unsaid"),
    [
        ([verdict("veil:mu=3", outcome="leaks", above_chance=True)], "--defense none --defense veil"),
        ([verdict("none", grade="F")], "It takes 32"),
        ([verdict(images=32)], "It takes 32"),
        ([verdict(flags=("no candidates",))], "It takes 32"),
        ([verdict(labels=HIDDEN)], "labels were read"),
        ([verdict(flags=("prior-only as good",))], "Try harder"),  # there is nothing harder than thorough
    ],
)
def test_nothing_is_advised_without_a_reason(verdicts: list[Verdict], unsaid: str) -> None:
    assert unsaid not in advised(*verdicts)


def test_a_stronger_budget_is_advised_where_there_is_one() -> None:
    weak = audit(verdict(flags=("prior-only as good",)))
    quick = weak.model_copy(update={"case": {**weak.case, "budget": "quick"}})
    assert any("--budget standard" in one.command for one in recommendations(quick))


@pytest.mark.parametrize(("batch", "at_random", "images"), [(1, 0.01, 32), (4, 0.04, 104), (1, 0.0, 36)])
def test_so_many_images_are_needed_for_the_best_grade(batch: int, at_random: float, images: int) -> None:
    """As the exact interval has it: none found, and its upper end less chance is within the first bound."""
    one = audit(verdict(at_random=at_random), case={**CASE, "batch_size": batch})
    assert images_for_an_a(one) == images

    def beyond(count: int) -> float:
        return (1 - 0.025 ** (batch / count) - at_random) / (1 - at_random)

    assert beyond(images) <= GRADES["privacy"]["A"] < beyond(images - batch)


def test_commands_fit_where_the_audit_was_made() -> None:
    own = audit(verdict(flags=("no candidates",)), case={**CASE, "data": OWN})
    assert "gradveil.audit(model, batch, threat='D', ...)" in [one.command for one in recommendations(own)]
    saved = audit(verdict(flags=("no candidates",)), case={"observations": ["taps"], "budget": "quick"})
    assert all("--threat" not in one.command for one in recommendations(saved))


def test_the_page_has_answers_first_then_what_to_do(tmp_path: Path) -> None:
    folder = write_full_audit(tmp_path)
    verdicts = edit_audit(folder)["verdicts"]
    verdicts[1] |= {"labels": READ, "ceiling": PROVEN, "flags": ["no counter-move"]}
    edit_audit(folder, verdicts=verdicts)
    page = outline(folder)
    text = " ".join(page.text.split())
    assert len([one for one in page.all("div") if (one.get("class") or "").startswith("answer")]) == 4 * 5
    assert "· no counter-move" in text
    assert "Proven: no attack recognises more than 31% of a line-up of this size" in text
    assert "It assumes fresh noise." in text
    assert text.index("Ceiling") < text.index("What to do next From what") < text.index("What was assumed")


def test_classes_are_called_by_their_names(tmp_path: Path) -> None:
    folder = write_audit(tmp_path)
    edit_audit(folder, class_names={"0": "cat"})
    page = outline(folder)
    assert "Image 100cat" in page.text
    assert "Private image 100, cat" in [one["alt"] for one in page.pictures()]
    assert "Image 107label 1" in page.text, "one without a name"


def test_examples_are_listed_by_how_many_attacks_found_them(tmp_path: Path) -> None:
    folder = write_audit(tmp_path, attacks=["ig", "dlg"])
    rows = edit_audit(folder)["rows"]
    for row in rows:
        for place, image in enumerate(row["per_image"]):
            image["identified"] = place == 2 and row["prior_of"] is None and row["attack"] == "ig"
    edit_audit(folder, rows=rows)
    page = outline(folder)
    table = page.text.partition("The examples that leak most")[2].partition("Every defense")[0]
    assert table.index("Image 114") < table.index("Image 100")
    assert "by 2 of 4 attacks" in table
    for row in rows:
        row["per_image"] = [image | {"identified": False} for image in row["per_image"]]
    edit_audit(folder, rows=rows)
    assert "The examples that leak most" not in outline(folder).text


def test_says_where_it_comes_from_and_how_to_repeat_it(tmp_path: Path) -> None:
    folder = write_audit(tmp_path)
    assert "run gradveil audit case.yaml --out DIR" in outline(folder).text
    about: dict[str, Any] = {
        "started": "2026-11-18T08:30:00Z",
        "version": "0.1.0",
        "commit": "ab" * 20,
        "data": "cd" * 32,
    }
    about |= {"commands": ["gradveil audit <script>"]}
    edit_audit(folder, provenance=about)
    text = outline(folder).text
    assert "begun 2026-11-18 08:30:00 UTC, gradveil 0.1.0, commit ababababab\n" in text
    assert f"sha256 {'cd' * 32}" in text
    assert "This command made it." in text
    assert "gradveil audit <script>" in text


def test_a_program_is_told_to_call_again(tmp_path: Path) -> None:
    folder = write_audit(tmp_path)
    call = "gradveil.audit(model, batch, seed=3)"
    about = {"started": "2026-11-18T08:30:00Z", "version": "0.1.0", "commands": [call]}
    edit_audit(folder, case={**edit_audit(folder)["case"], "data": OWN}, provenance=about)
    text = outline(folder).text
    assert "no command can repeat it" in text
    assert call in text
    assert "case.yaml" not in text


def test_a_model_of_ones_own_has_to_be_named(tmp_path: Path) -> None:
    folder = write_audit(tmp_path)
    edit_audit(folder, case={**edit_audit(folder)["case"], "model": "my.nets:small"})
    assert "add --model my.nets:small" in words.repeat(read_audit(folder))[0]


def test_hostile_flags_are_only_text(tmp_path: Path) -> None:
    folder = write_audit(tmp_path)
    audited = edit_audit(folder)
    hostile = "<img src=x onerror=alert(1)>"
    audited["rows"][0]["flags"] = audited["verdicts"][0]["flags"] = [hostile]
    audited["flags"] = {hostile: {"raised_if": hostile, "because": hostile}}
    edit_audit(folder, **audited)
    page = outline(folder)
    assert page.text.count(hostile) >= 6
    assert not [image for image in page.all("img") if "onerror" in image]


def test_an_attack_is_explained_where_it_stands(tmp_path: Path) -> None:
    row = next(row for row in read_audit(write_audit(tmp_path)).rows if not row.is_prior)
    plain = row.model_copy(update={"awareness": "none", "candidates": 92})
    assert words.kind_of(plain) == "takes no defense into account; chooses among 92 candidates"
    moved = plain.model_copy(update={"counter_moves": {"noise": "It averages."}, "candidates": None})
    assert words.kind_of(moved) == "knows the defense and adapts to it"
    assert words.kind_of(row.model_copy(update={"attack": "prior-only"})).endswith("with no update: chance")


LEAKING = {"outcome": "leaks", "above_chance": True}
CERTIFICATE = {
    "defense": "veil", "steps": 40, "taken": 1, "recognised": {"10": 0.407, "100": 0.1}, "member": 0.1, "epsilon": 4.6,
    "delta": 1e-5, "against": "anybody", "assumes": (), "text": "Certificate.",
}  # fmt: skip


def test_a_model_that_veil_cannot_cover_is_told_where_it_can() -> None:
    (first, *_) = recommendations(audit(verdict("none", **LEAKING), veil_unfit="veil cannot bound batch norm"))
    assert "Veil cannot bound batch norm. It works on the same data with public features." in first.why
    assert "--model features " in first.command
    assert "--defense none --defense veil --out" in first.command


def test_a_plan_covers_the_local_epochs_of_the_audit() -> None:
    told = audit(verdict("none", **LEAKING), case={**CASE, "recipe": {"sends": "delta", "epochs": 5, "lr": 0.1}})
    assert "--defense veil:rounds=200 " in recommendations(told)[0].command


def test_the_last_lines_say_what_leaks_and_what_holds() -> None:
    held = verdict("veil", outcome="holds", grade="A", certificate=CERTIFICATE)
    assert outcomes(audit(verdict("none", **LEAKING), verdict("censor", **LEAKING), held, verdict("a"))) == [
        "Leaks: no defense, censor.",
        "Holds: veil (nobody recognises more than 10.0% in a line-up of 100, over 40 steps).",
        "Not known: a.",
    ]
    assert outcomes(audit(verdict("dp", outcome="holds", ceiling=PROVEN))) == [
        "Holds: dp (no attack on these replies recognises more than 31.0%)."
    ]


def test_nothing_that_only_a_program_holds_is_in_a_command() -> None:
    own = audit(verdict("veil", ceiling=PROVEN, grade="A"), case={**CASE, "data": OWN})
    assert all("advise" not in one.command for one in recommendations(own))
