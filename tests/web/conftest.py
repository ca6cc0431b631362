"""A real browser for pages: Debian's Chromium, driven by Playwright. `make test-web`; skipped loudly without one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
# What it would ask the world for at its start, and what needs a graphics card or a user of its own.
QUIET = [
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--font-render-hinting=none",
]  # fmt: skip
AUDIT = (Path(__file__).parent / "audit.js").read_text(encoding="utf-8")


def find_browser() -> str:
    """Of DUOKA_BROWSER, or what is installed; "" for none."""
    given = os.environ.get("DUOKA_BROWSER", "")
    return given or next((found for name in NAMES if (found := shutil.which(name))), "")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    pages = pytest.importorskip("playwright.sync_api", reason='playwright is not installed: pip install "duoka[web]"')
    path = find_browser()
    if not path:
        pytest.skip("no Chromium is installed: apt install chromium, or set DUOKA_BROWSER")
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with pages.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=path, args=[*QUIET, *as_root])
        yield made
        made.close()


class Opened:
    """Pages of one test. At its end: none asked another machine for anything, none raised, none was refused."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._contexts: list[Any] = []
        self.asked: list[str] = []
        self.troubles: list[str] = []

    def __call__(
        self, address: str, *, width: int = 1400, height: int = 1000, dark: bool = False, language: str = "en-US",
        touch: bool = False, context: Any = None,
    ) -> Any:  # fmt: skip
        """`context`: of another page, whose cookies this one has too."""
        context = context or self._browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", locale=language,
            has_touch=touch, is_mobile=touch, reduced_motion="reduce", accept_downloads=True,
        )  # fmt: skip
        context.set_default_timeout(20_000)
        self._contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.troubles.append(f"raised: {error}"))
        page.on("console", lambda said: self.troubles.append(said.text) if said.type == "error" else None)
        page.goto(address)
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        away = [url for url in self.asked if not url.startswith(("http://127.0.0.1:", "data:", "blob:", "file:"))]
        assert not away, f"a page asked other machines: {away}"
        assert not self.troubles, self.troubles


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    pages = Opened(browser)
    yield pages
    pages.close()


@pytest.fixture
def look_at(request: pytest.FixtureRequest) -> Callable[[Any, str], None]:
    """Nothing runs out, is pale or nameless; with DUOKA_SHOTS=FOLDER a picture of each page is kept there."""

    def look(page: Any, name: str) -> None:
        if folder := os.environ.get("DUOKA_SHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)
        faults = page.evaluate(AUDIT)
        assert not faults, f"{name}:\n" + "\n".join(faults)

    return look
