"""A page as a list of tags and a text, for tests of what is on it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from gradveil.report import render


class Outline(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def pictures(self) -> list[dict[str, str | None]]:
        """Every picture as ``src`` and ``alt``: those shown once are images, the others share one."""
        held = {one.get("id"): one["href"] for one in self.all("image")}
        found = []
        for at, (tag, attributes) in enumerate(self.tags):
            if tag == "img":
                found.append(attributes)
            elif tag == "svg" and attributes.get("class") == "picture":
                _, inside = self.tags[at + 1]
                href = inside["href"] or ""
                found.append({"src": held.get(href[1:], href), "alt": attributes["aria-label"]})
        return found

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def outline(folder: Path) -> Outline:
    return Outline(render(folder).read_text(encoding="utf-8"))
