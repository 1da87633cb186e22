"""The certificate of an audit is the one that a client gives, in audit.json, in the report and on the terminal."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradveil
from gradveil.auditing import Verdict, read_audit
from gradveil.auditing.audit import CeilingAnswer, CertificateAnswer, Files, Row
from gradveil.auditing.ceilings import ceilings
from gradveil.auditing.verdict import Ceilings, verdicts
from gradveil.bounds import prove
from gradveil.core.types import Recipe
from gradveil.data import load
from gradveil.defenses import DEFENSES

SPECS = ["veil:rounds=7", "veil:cohort=4,mu=1", "dp:sigma=2.0", "veil+sparsify"]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def of_a_client(spec: str) -> object:
    """What a client says after one step on one example, as a JSON file has it."""
    digits = load("mnist-samples").batch([0])
    client = gradveil.Client(model(), defense=spec)
    client.start(model().state_dict())
    client.step(digits.inputs, digits.labels)
    client.reply()
    return json.loads(json.dumps(client.certificate().as_json()))


@pytest.mark.filterwarnings("ignore:defense veil. with 1 examples")
@pytest.mark.parametrize("spec", SPECS)
def test_an_audit_certifies_what_its_clients_do(spec: str, tmp_path: Path) -> None:
    digits = load("mnist-samples").batch([0, 1])
    case: dict[str, Any] = {"defenses": ["none", spec], "attacks": ["identify"], "threat": "D"}
    result = gradveil.audit(model(), (digits.inputs, digits.labels), out=tmp_path / "audit", **case)
    plain, veiled = read_audit(tmp_path / "audit").verdicts
    assert plain.certificate is None
    assert veiled.certificate is not None
    assert veiled.certificate.model_dump(mode="json") == of_a_client(spec)
    page = html.unescape(result.report(tmp_path / "report.html").read_text())
    for line in veiled.certificate.text.splitlines():
        assert line in page


@pytest.mark.parametrize(
    ("spec", "given"), [("noise:sigma=1", ()), ("clip:per=example+noise:sigma=1", ()), ("veil", ("labels",))]
)
def test_what_is_not_counted_or_covered_has_none(spec: str, given: tuple[str, ...]) -> None:
    inputs = load("mnist-samples").batch([0]).inputs
    proof = prove(DEFENSES.build(spec), model(), Recipe(), inputs=inputs, size=1, candidates=100, given=given)
    assert ceilings({spec: proof}, [])[spec].certificate is None


def test_an_attack_that_passes_the_ceiling_takes_the_certificate_away() -> None:
    about: dict[str, Any] = {
        "steps": 1,
        "taken": 1,
        "recognised": {"100": 0.02},
        "member": 0.02,
        "epsilon": 1,
        "delta": 1e-5,
    }
    proved = CertificateAnswer(**about, defense="dp", against="all", assumes=(), text="Certificate.")
    known: dict[str, Any] = {
        "gallery": 100,
        "at_random": 0.01,
        "label_accuracy": 0.0,
        "luck": 1e-4,
        "images": 16,
        "updates": 16,
    }
    row = Row(
        **known, defense="dp", attack="identify", identified=1.0, identified_interval=(0.8, 1.0),
        needs=("candidates",), files=Files(reconstruction=""),
    )  # fmt: skip
    for top, kept in ((0.02, False), (1.0, True)):
        found: Verdict = verdicts([row], ceilings={"dp": Ceilings(CeilingAnswer(recognised=top), None, proved)})[0]
        assert (found.certificate is not None) is kept
