"""One opening of a page, under watch: what it asked for beyond itself, and what the browser complained of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import ConsoleMessage, Dialog, Page, Request, Route

SHOTS = Path(__file__).with_name("shots")

# Pictures out of view are not decoded yet; who asks for their size wants them now. Those that the page shows more than
# once are drawings of a shared one.
SIZES = """
() => {
  const held = (drawing) => {
    const use = drawing.querySelector("use");
    return use ? document.querySelector(use.getAttribute("href")) : drawing.querySelector("image");
  };
  const imageOf = (shown) => {
    if (shown instanceof HTMLImageElement) return shown;
    return Object.assign(new Image(), { src: held(shown).getAttribute("href") });
  };
  return Promise.all([...document.querySelectorAll("img, svg.picture")].map(async (shown) => {
    const image = imageOf(shown);
    image.loading = "eager";
    await image.decode();
    return [image.naturalWidth, image.naturalHeight];
  }));
}
"""


@dataclass
class Visit:
    """An opened page, with every request that would have left the file and every complaint of the browser."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def open(self, address: str) -> None:
        """Go to a file, let only that file through, and write down all that asks for more."""

        def admit(route: Route) -> None:
            if route.request.url.partition("#")[0] == address:
                route.continue_()
            else:
                route.abort()

        def note_request(request: Request) -> None:
            if request.url.partition("#")[0] != address and not request.url.startswith("data:"):
                self.requests.append(request.url)

        def note_message(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                self.complaints.append(message.text)

        def note_dialog(dialog: Dialog) -> None:
            self.complaints.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        self.page.route("**/*", admit)
        self.page.on("request", note_request)
        self.page.on("console", note_message)
        self.page.on("dialog", note_dialog)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(address)

    def pictures(self) -> list[list[int]]:
        """Width and height of every picture on the page, each decoded; one that cannot be is an error."""
        sizes: list[list[int]] = self.page.evaluate(SIZES)
        return sizes

    def barriers(self) -> list[str]:
        """What axe-core calls serious or critical, each with the first element that it concerns."""
        found = Axe().run(self.page).response
        assert len(found["passes"]) > 30, "it looked at the page"
        return [
            f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:200]}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]

    def screenshot(self, name: str) -> None:
        SHOTS.mkdir(exist_ok=True)
        self.pictures()
        self.page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


Open = Callable[..., Visit]
