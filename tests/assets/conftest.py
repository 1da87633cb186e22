"""A registry on this machine for the real clients to fetch from, as fast or as slowly as a test asks."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from assets.toys import PAYLOAD, toy
from gradveil.assets import CATALOGUE, Asset

PIECES = 20


@dataclass
class LocalRegistry:
    """Serves the archives in ``files`` and the pages that lead pip and npm to them."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    seconds_per_archive: float = 0.0
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Content type and content for a path, None where there is nothing."""
        if path.removeprefix("/files/") in self.files:
            return "application/octet-stream", self.files[path.removeprefix("/files/")]
        if path == "/simple/toy/":
            links = "".join(f'<a href="{self.url}/files/{name}">{name}</a>' for name in self.files)
            return "text/html", f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        if path == "/toy" and "toy-1.0.0.tgz" in self.files:
            return "application/json", json.dumps(self._npm_page(self.files["toy-1.0.0.tgz"])).encode()
        return None

    def _npm_page(self, archive: bytes) -> dict[str, Any]:
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()
        dist = {"tarball": f"{self.url}/files/toy-1.0.0.tgz", "integrity": integrity}
        version = {"name": "toy", "version": "1.0.0", "dist": dist}
        return {"name": "toy", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}


class _Handler(BaseHTTPRequestHandler):
    registry: LocalRegistry

    def do_GET(self) -> None:
        self.registry.asked.append(self.path)
        answer = self.registry.answer(self.path)
        if answer is None:
            self.send_error(404)
            return
        kind, content = answer
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        pause = self.registry.seconds_per_archive / PIECES if kind == "application/octet-stream" else 0.0
        step = -(-len(content) // PIECES)
        try:
            for at in range(0, len(content), step):
                self.wfile.write(content[at : at + step])
                time.sleep(pause)
        except ConnectionError:
            return  # the client was stopped, as some tests intend

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRegistry]:
    """The registry running, with pip and npm set up for it and for nothing else."""
    handler: type[_Handler] = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.registry = LocalRegistry(f"http://127.0.0.1:{server.server_port}")
    configured = ("PIP_", "NPM_CONFIG_")
    for name in [n for n in os.environ if n.upper().startswith(configured) or n.upper().endswith("_PROXY")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{handler.registry.url}/simple")
    monkeypatch.setenv("npm_config_registry", handler.registry.url)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield handler.registry
    server.shutdown()
    server.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("GRADVEIL_CACHE", str(folder))
    monkeypatch.delenv("GRADVEIL_OFFLINE", raising=False)
    return folder


@pytest.fixture(params=["pip", "npm"])
def client(request: pytest.FixtureRequest) -> str:
    if shutil.which("npm") is None and request.param == "npm":
        pytest.skip("npm is not installed")
    return str(request.param)


@pytest.fixture
def publish(client: str, registry: LocalRegistry, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ARG001
    """Puts a toy with these files into the registry and the catalogue, and returns its entry."""

    def put(files: dict[str, bytes]) -> Asset:
        asset, archive = toy(client, files)
        registry.files[asset.source.archive] = archive
        monkeypatch.setitem(CATALOGUE, "toy", asset)
        return asset

    return put


@pytest.fixture
def published(publish: Any) -> Asset:
    return publish(PAYLOAD)
