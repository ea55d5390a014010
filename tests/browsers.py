"""A headless Chromium, and pages that note what they ask for and complain about. Skips where one is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
INLINE = ("data", "blob", "about")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; the test is skipped where playwright or Chromium is not installed."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("Chromium is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page in a context of its own.

    Attributes:
        complaints: errors of the console, and of scripts.
        asked: addresses that were asked for, without those inside the page.
    """

    def __init__(self, browser: Any, width: int = 1280, dark: bool = False) -> None:
        scheme = "dark" if dark else "light"
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self._note(said.type, said.text))
        self.page.on("pageerror", lambda error: self._note("error", str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def _note(self, kind: str, text: str) -> None:
        if kind == "error":
            self.complaints.append(text)

    def elsewhere(self, host: str = "127.0.0.1") -> list[str]:
        """Addresses on other hosts that were asked for."""
        parts = [urlsplit(address) for address in self.asked]
        return [one.geturl()[:80] for one in parts if one.scheme not in (*INLINE, "file") and one.hostname != host]

    def sideways(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))

    def close(self) -> None:
        self.context.close()
