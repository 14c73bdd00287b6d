"""A real headless Chromium, and what it noticed of a page."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class Seen:
    """What went on in a page beyond what it shows."""

    requests: list[str] = field(default_factory=list)  # all but the page's own
    complaints: list[str] = field(default_factory=list)  # errors, and what the page's policy forbade
    dialogs: list[str] = field(default_factory=list)


@contextlib.contextmanager
def chromium(**how: Any) -> Iterator[tuple[Any, Seen]]:
    """A page of 1280 by 800, and what it noticed. Skips the test where Chromium or Playwright is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if binary is None:
        pytest.skip("no Chromium on the PATH")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        page, seen = browser.new_page(viewport={"width": 1280, "height": 800}, **how), Seen()
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.on("console", lambda said: seen.complaints.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: (seen.dialogs.append(dialog.message), dialog.dismiss()))
        yield page, seen
        browser.close()
