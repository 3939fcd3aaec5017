"""Pages of ours in a real browser."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

CHROME = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None
)


class Opened:
    """A page from disk with what its console said and what it asked for; nothing may come from elsewhere."""

    ready: ClassVar[str]
    """In JavaScript: whether the page is there."""
    size: ClassVar[tuple[int, int]] = (1200, 900)

    def __init__(self, browser: Any, path: Path, address: str = "", width: int | None = None, scheme: str = "light"):
        view = {"width": width or self.size[0], "height": self.size[1]}
        self.context = browser.new_context(viewport=view, color_scheme=scheme)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda line: self.said.append(line.text) if line.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", self._note_request)
        self.page.goto(path.as_uri() + address)
        self.page.wait_for_function(self.ready)

    def _note_request(self, request: Any) -> None:
        self.asked.append(request.url.rsplit("/", 1)[-1])
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.said.append(f"asked for {request.url}")

    def close(self) -> None:
        assert self.said == []
        self.context.close()
