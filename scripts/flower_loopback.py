"""Run a Flower app on this machine, from a simulation to TLS with authenticated nodes, and leave nothing behind.

python scripts/flower_loopback.py                                   # Flower's simulation, on Ray
python scripts/flower_loopback.py --engine deployment --tls --auth  # a SuperLink and SuperNodes
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flower_network import Ended, Network, NetworkError

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
APP = Path(__file__).parents[1] / "examples" / "flower"


def main(arguments: list[str] | None = None) -> int:
    given = parsed(arguments)
    for number in INTERRUPTS:
        signal.signal(number, _leave)
    with tempfile.TemporaryDirectory(prefix="gradveil-flower-") as temporary:
        folder = Path(temporary) if given.keep is None else given.keep
        try:
            ended = run(given, folder)
        except NetworkError as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted: everything that was started has ended", file=sys.stderr)
            return 130
    print(ended.log.rstrip())
    print(f"{ended.status} after {ended.seconds:.1f} s")
    return 0 if ended.good else 1


def run(given: argparse.Namespace, folder: Path) -> Ended:
    """One run from nothing to nothing; its time counts from the start of the first process."""
    simulated = given.supernodes if given.engine == "simulation" else None
    started = time.monotonic()
    with Network(folder, simulated=simulated, tls=given.tls, auth=given.auth) as network:
        if simulated is not None:  # nodes of a simulation have no config of their own, but its environment
            network.environment["GRADVEIL_NODE_CONFIG"] = node_config(given)
        network.start_link()
        if simulated is None:
            for place in range(given.supernodes):
                network.start_node(place, of=given.supernodes, config=node_config(given))
        number = network.submit(given.app, run_config(given))
        ended = network.follow(number, given.timeout)
        return Ended(ended.status, ended.log, time.monotonic() - started)


def run_config(given: argparse.Namespace) -> str:
    """What the options say, in the words of the run config."""
    said: dict[str, Any] = {"clients": given.supernodes}
    if given.out is not None:
        said["out"] = str(given.out.resolve())
    return " ".join([*(f"{key}={json.dumps(value)}" for key, value in said.items()), given.run_config]).strip()


def node_config(given: argparse.Namespace) -> str:
    """What every node says about itself."""
    out = "" if given.out is None else f"out={json.dumps(str(given.out.resolve()))}"
    return f"{out} {given.node_config}".strip()


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--app", type=Path, default=APP, help="folder with the pyproject.toml of a Flower app")
    parser.add_argument("--engine", choices=("simulation", "deployment"), default="simulation")
    parser.add_argument("--supernodes", type=int, default=2)
    parser.add_argument("--tls", action="store_true", help="certificates of an authority made for this run")
    parser.add_argument("--auth", action="store_true", help="only nodes with a registered key; needs --tls")
    parser.add_argument("--run-config", default="", help="as for flwr run, such as 'rounds=5 lr=0.05'")
    parser.add_argument(
        "--node-config", default="", help="as for flower-supernode, of every node, such as 'defense=\"outpost\"'"
    )
    parser.add_argument("--out", type=Path, help="folder for train.json, the checkpoint and taps")
    parser.add_argument("--keep", type=Path, help="folder for keys, state and logs; by itself one that is removed")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that the run may take")
    given = parser.parse_args(arguments)
    if given.engine == "simulation" and (given.tls or given.auth):
        parser.error("a simulation has no network to secure: add --engine deployment")
    if given.auth and not given.tls:
        parser.error("Flower authenticates nodes over TLS only: add --tls")
    return given


def _leave(_number: int, _frame: Any) -> None:
    """Stop everything, and let nothing interrupt that."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
