"""``gradveil inspect``: is this broadcast crafted?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor, nn

from gradveil import client, models
from gradveil.cli.progress import say
from gradveil.client import Inspection
from gradveil.client.inspection import PROBE
from gradveil.core.errors import GradveilError
from gradveil.core.tensor_files import read_state, read_tensors, written_by_gradveil
from gradveil.core.types import Params
from gradveil.data import ImageSet, load
from gradveil.domains import Domain
from gradveil.threat import load_observations
from gradveil.threat.storage import KIND, Header

SUSPICIOUS = 3


def inspect(
    broadcast: Annotated[
        str,
        typer.Argument(metavar="MODEL_OR_STATE", help="A model spec, a safetensors state dict or an observation file."),
    ],
    previous: Annotated[Path | None, typer.Option(help="The last broadcast, a file of either kind.")] = None,
    model: Annotated[str | None, typer.Option(help="The model you agreed on; a plain state dict needs it.")] = None,
    data: Annotated[str | None, typer.Option(help="Public images to try the model on, such as mnist-samples.")] = None,
    seed: Annotated[int, typer.Option(help="Initialises the model of a spec.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON and nothing else.")] = False,
) -> None:
    """Look for the marks of a dishonest server in a broadcast. Exits with 3 if there are any, with 0 if not."""
    images = None if data is None else load(data)
    path = Path(broadcast)
    if path.suffix == ".safetensors" or path.exists():
        domain, module, state = _read(path, model, images)
    else:
        domain = (images or load("cifar10-samples")).domain
        module = models.build(broadcast, domain, seed=seed)
        state = module.state_dict()
    found = client.inspect(
        module,
        _parameters(module, state),
        domain=domain,
        probe=None if images is None else images.batch(range(min(PROBE, len(images)))),
        previous=None if previous is None else _parameters(module, _state(previous)),
    )
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _print(found)
    if found.suspicious:
        raise typer.Exit(SUSPICIOUS)


def _read(path: Path, model: str | None, images: ImageSet | None) -> tuple[Domain, nn.Module, dict[str, Tensor]]:
    """What inputs look like, the architecture that the broadcast is for, and what was sent.

    An observation says all of it; of a plain state dict the user says the first two.
    """
    observed = written_by_gradveil(path)
    if not observed:
        domain: Domain = (images or load("cifar10-samples")).domain
    else:
        domain = Header.read(path, read_tensors(path, KIND)[1]).domain
        if images is not None and images.domain.shape != domain.shape:
            others = f"--data {images.name} has others"
            raise GradveilError(f"{path} is of inputs {list(domain.shape)}, {others}: leave it out")
    if model is not None:
        module = models.build(model, domain, seed=0)
    elif observed:
        module = load_observations(path)[0].module
    else:
        raise GradveilError(f"{path} does not say of which model it is: add --model, such as --model resnet18")
    state = _state(path)
    for name, buffer in module.state_dict().items():  # running statistics are part of what was sent
        if name in state and name not in _parameters(module, state):
            if state[name].shape != buffer.shape:
                raise GradveilError(
                    f"buffer {name!r} has the shape {list(state[name].shape)}, not {list(buffer.shape)}"
                )
            buffer.copy_(state[name])
    return domain, module, state


def _state(path: Path) -> dict[str, Tensor]:
    """A state dict, or what an observation says was sent."""
    if not written_by_gradveil(path):
        return read_state(path)
    tensors, _ = read_tensors(path, KIND)
    parts = {name.partition("/"): tensor for name, tensor in tensors.items()}
    return {name: tensor for (part, _, name), tensor in parts.items() if part in ("sent", "buffer")}


def _parameters(module: nn.Module, state: dict[str, Tensor]) -> Params:
    """What of a state dict is trained: all but the buffers of the agreed model."""
    buffers = module.state_dict().keys() - dict(module.named_parameters(remove_duplicate=False))
    return {name: tensor for name, tensor in state.items() if name not in buffers}


def _print(found: Inspection) -> None:
    for finding in found.findings:
        word = typer.style(finding.severity, bold=True, fg="red" if finding.severity == "alarm" else None)
        measured = f" ({finding.figure:.3g}, bound {finding.bound:g})"
        typer.echo(word, nl=False)
        say(str(finding).removeprefix(finding.severity) + measured)
    for reason in found.left_out:
        say(f"not checked: {reason}")
    said = "suspicious: do not train on this" if found.suspicious else "nothing suspicious was found"
    typer.secho(said, bold=True, fg="red" if found.suspicious else "green")
