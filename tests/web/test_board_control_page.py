"""`duoka board --control` in a real browser, with the real commands behind it: from a form to a trained, used model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from talking import write_talking_model
from told_control import ToldControl
from written_runs import write_run

from duoka.cli.act import Acts
from duoka.watch.board import Board
from duoka.watch.control import Control
from duoka.watch.server import BoardServer

pytestmark = [pytest.mark.web, pytest.mark.timeout(300)]
LOOKS = [(width, dark) for width in (400, 1400) for dark in (False, True)]
LONG = 120_000  # ms: what trains, exports or loads a model


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def serve(runs: Path) -> Iterator[Callable[[Control], str]]:
    servers = []

    def start(control: Control) -> str:
        server = BoardServer(Board(runs), control=control)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        servers.append((server, thread))
        return server.address

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def acts() -> Iterator[Acts]:
    made = Acts()
    yield made
    made.close()


def plan(page: Any) -> Any:
    return page.locator("#new-plan")


def expect(found: Any) -> Any:
    """Imported late: a machine without Playwright skips these."""
    from playwright.sync_api import expect as by_playwright

    return by_playwright(found)


def test_the_form_says_whether_it_fits_before_start_can_be_pressed(runs, serve, acts, opened) -> None:
    page = opened(serve(acts))
    page.get_by_role("button", name="New run").click()
    start = page.get_by_role("button", name="Start", exact=True)
    expect(plan(page).get_by_role("heading", name="It fits")).to_be_visible(timeout=LONG)
    expect(start).to_be_enabled()
    assert "name: demo" in plan(page).inner_text()
    page.locator("details[data-block=model] summary").click()
    page.get_by_label("model.name", exact=True).fill("")
    page.get_by_label("model.depth", exact=True).fill("300")
    page.get_by_label("model.tokenizer", exact=True).fill("demo")
    page.get_by_label("lora", exact=True).uncheck()
    expect(start).to_be_disabled()
    expect(plan(page).get_by_role("heading", name="It does not fit")).to_be_visible(timeout=LONG)
    expect(start).to_be_disabled()
    page.get_by_label("optim.lr", exact=True).fill("fast")
    expect(plan(page).get_by_text("optim.lr must be a number")).to_be_visible(timeout=LONG)
    assert page.get_by_label("optim.lr", exact=True).get_attribute("aria-invalid") is not None
    expect(start).to_be_disabled()
    page.get_by_role("button", name="Cancel").click()
    expect(plan(page)).to_be_hidden()
    assert not list(runs.iterdir()), "nothing was started"


def test_a_run_is_started_from_the_form_then_exported_and_chatted_with(runs, serve, acts, opened, tmp_path) -> None:
    model = write_talking_model(tmp_path / "talking")
    page = opened(serve(acts))
    page.get_by_role("button", name="New run").click()
    expect(plan(page).get_by_role("heading", name="It fits")).to_be_visible(timeout=LONG)
    page.locator("#new-name").fill("first 多卡")
    page.get_by_label("model.name", exact=True).fill(str(model))
    page.locator("details[data-block=train] summary").click()
    page.get_by_label("train.max_steps", exact=True).fill("2")
    page.get_by_label("data.max_length", exact=True).fill("64")
    page.get_by_label("optim.lr", exact=True).fill("1e-6")
    expect(plan(page).get_by_text("max_steps: 2")).to_be_visible(timeout=LONG)
    page.get_by_role("button", name="Start", exact=True).click()
    page.get_by_role("heading", name="first 多卡").wait_for(timeout=LONG)
    page.locator(".badge", has_text="done").wait_for(timeout=LONG)
    for kind, said in (("q8_0", "has no name for how this tokenizer cuts"), ("folder", "logits differ by at most")):
        page.get_by_role("button", name="Export").click()
        page.locator("#export-kind").select_option(kind)
        page.get_by_role("dialog").get_by_role("button", name="Export").click()
        page.locator("#jobs", has_text=said).wait_for(timeout=LONG)
    assert (runs / "first 多卡" / "export-folder" / "config.json").is_file()
    assert not (runs / "first 多卡" / "export-q8_0").exists()
    page.get_by_role("button", name="Chat").click()
    page.get_by_role("dialog").get_by_role("button", name="Chat").click()
    page.get_by_role("link", name="Open the chat").first.wait_for(timeout=LONG)
    chat = opened(page.url.split("#")[0] + "chat", context=page.context)
    chat.locator("#text").fill("Who are you?")
    chat.keyboard.press("Enter")
    chat.locator(".answer p").filter(has_text="I am duoka").wait_for(timeout=LONG)
    assert chat.url.startswith(page.url.split("/#")[0]), "one port is enough: the board's own"


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_the_form_and_what_was_begun_read_well(runs, serve, acts, opened, look_at, width, dark) -> None:
    write_run(runs / "before", 40)
    kind = f"{width}-{'dark' if dark else 'light'}"
    page = opened(serve(acts), width=width, dark=dark, touch=width < 500)
    page.get_by_role("button", name="New run").click()
    expect(plan(page).get_by_role("heading", name="It fits")).to_be_visible(timeout=LONG)
    look_at(page, f"board-new-{kind}")
    page.locator("details[data-block=parallel] summary").click()
    page.get_by_label("optim.lr", exact=True).fill("fast")
    expect(plan(page).get_by_text("optim.lr must be a number")).to_be_visible(timeout=LONG)
    look_at(page, f"board-new-fault-{kind}")
    page.get_by_label("Language").select_option("zh")
    page.get_by_role("heading", name="新建运行").wait_for()
    look_at(page, f"board-new-zh-{kind}")
    told = ToldControl()
    told.begun = [
        {"kind": "chat", "run": "before", "state": "ready", "text": ""},
        {"kind": "export q8_0", "run": "before", "state": "done", "text": "wrote /runs/before/export-q8_0\n" * 3},
        {"kind": "start", "run": "a-rather-long-name-多卡", "state": "failed", "text": "config error: " + "x" * 200},
    ]
    other = opened(serve(told), width=width, dark=dark, touch=width < 500)
    other.get_by_role("heading", name="before").wait_for()
    other.locator("#jobs li").nth(2).wait_for()
    look_at(other, f"board-jobs-{kind}")
    other.get_by_role("button", name="Export").click()
    other.get_by_role("dialog").wait_for()
    look_at(other, f"board-export-{kind}")
    other.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert told.told == []
