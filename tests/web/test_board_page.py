"""`duoka board` and `duoka report` in a real browser: what people see, click and type."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from told_control import ToldControl
from written_runs import T0, event_line, step_line, write_run

from duoka.runs.status import leader_identity
from duoka.watch.board import Board
from duoka.watch.control import Control
from duoka.watch.server import BoardServer

pytestmark = pytest.mark.web
LOOKS = [(width, dark) for width in (400, 1400) for dark in (False, True)]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def serve(runs: Path) -> Iterator[Callable[..., str]]:
    servers = []

    def start(control: Control | None = None) -> str:
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


def live_run(folder: Path, steps: int = 40, **how: Any) -> Path:
    """Of this machine and alive: this process counts as its leader."""
    return write_run(folder, steps, total_steps=how.pop("total_steps", 2 * steps), state="running", **how,
                     **leader_identity()).path  # fmt: skip


def write_more(run: Path, first: int, last: int) -> None:
    with (run / "events" / "run.jsonl").open("a", encoding="utf-8") as log:
        log.writelines(step_line(step, t=time.time()) for step in range(first, last + 1))


def figure(page: Any, name: str) -> str:
    return page.locator(".cards .card", has=page.get_by_text(name, exact=True)).locator("b").inner_text()


def wait_for_count(found: Any, count: int) -> None:
    from playwright.sync_api import expect

    expect(found).to_have_count(count, timeout=20_000)


def chart(page: Any, title: str = "Loss") -> Any:
    return page.locator("article.chart", has=page.get_by_role("heading", name=title, exact=True))


def test_the_first_look_shows_the_newest_run_and_more_steps_come_by_themselves(runs, serve, opened) -> None:
    run = live_run(runs / "now", 40, ranks=4, slow_rank=2)
    page = opened(serve())
    page.get_by_role("heading", name="now").wait_for()
    assert "token" not in page.url, "the token stays out of the address bar and of what is bookmarked"
    page.get_by_text("step 40 of 80").first.wait_for()
    chart(page).locator("path:not(.raw):not(.band)").first.wait_for()
    assert chart(page, "Gradient norm").count() == chart(page, "Tokens per second").count() == 1
    before = chart(page).locator("svg path:not(.raw)").first.get_attribute("d")
    assert page.get_by_text("rank 2 is the slowest").count()
    write_more(run, 41, 60)
    page.get_by_text("step 60 of 80").first.wait_for()
    assert chart(page).locator("svg path:not(.raw)").first.get_attribute("d") != before


def test_runs_are_laid_over_each_other_and_zoomed_and_read_by_keys(runs, serve, opened) -> None:
    for name, steps in (("one", 40), ("two 多卡 🎉", 60), ("three", 50)):
        config = write_run(runs / name, steps).config
        config.write_text(config.read_text().replace("0.0002", f"{steps}e-5"))
    page = opened(serve())
    page.get_by_label("show the curves of one").check()
    page.get_by_label("show the curves of two 多卡 🎉").check()
    page.get_by_label("show the curves of three").check()
    rows = chart(page).locator("table.legend tr")
    wait_for_count(chart(page).locator("table.legend tr"), 3)
    assert {"one", "two 多卡 🎉", "three"} == {row.locator("th").inner_text().strip() for row in rows.all()}
    page.get_by_label("show the curves of three").uncheck()
    wait_for_count(chart(page).locator("table.legend tr"), 2)
    page.get_by_role("tab", name="Differences").click()
    page.get_by_role("columnheader", name="two 多卡 🎉").wait_for()
    chart(page).locator("> svg").scroll_into_view_if_needed()
    box = chart(page).locator("> svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=4)
    page.mouse.up()
    page.get_by_role("button", name="Whole run").wait_for()
    chart(page).locator("> svg").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#said").inner_text().startswith("step ")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Whole run").wait_for(state="hidden")
    page.get_by_label("Axis").select_option("tokens")
    page.get_by_text("60k").first.wait_for()


def test_each_tab_shows_what_it_says_by_keyboard_too(runs, serve, opened) -> None:
    write_run(runs / "mine", 40, ranks=4, slow_rank=1)
    page = opened(serve())
    page.get_by_role("tab", name="Ranks").focus()
    page.get_by_text("Ranks x steps").wait_for()
    tabs = {"Events": "checkpoint", "Texts": "多卡 is", "Logs": "trains 训练", "Differences": "Choose"}
    for name, shown in tabs.items():
        page.keyboard.press("ArrowRight")
        tab = page.get_by_role("tab", name=name)
        assert tab.get_attribute("aria-selected") == "true"
        page.locator("#panel").get_by_text(shown).first.wait_for()
    page.get_by_label("Language").select_option("zh")
    page.get_by_role("tab", name="事件").wait_for()
    assert page.evaluate("document.documentElement.lang").startswith("zh")


def test_a_run_is_stopped_with_a_save_after_it_was_asked_and_nothing_happens_on_cancel(runs, serve, opened) -> None:
    run, control = live_run(runs / "mine"), ToldControl()
    page = opened(serve(control))
    page.get_by_role("button", name="Save and stop").click()
    dialog = page.get_by_role("dialog")
    assert "saves a checkpoint" in dialog.inner_text()
    dialog.get_by_role("button", name="Cancel").click()
    dialog.wait_for(state="hidden")
    page.get_by_role("button", name="Save and stop").click()
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert control.told == []
    page.get_by_role("button", name="Save and stop").click()
    dialog.get_by_role("button", name="Save and stop").click()
    page.get_by_text("asked pid 1 to save and leave").first.wait_for()
    assert control.told == [("stop", run.name)]
    plain = opened(serve())
    plain.get_by_role("heading", name="mine").wait_for()
    assert not plain.get_by_role("button", name="Save and stop").count(), "without --control it only looks"


def test_a_look_takes_neither_the_focus_from_a_button_nor_a_click_that_has_begun(runs, serve, opened) -> None:
    """Every two seconds the buttons were made anew."""
    run = live_run(runs / "mine", 40, total_steps=900)
    page = opened(serve(ToldControl()))
    button = page.get_by_role("button", name="Save and stop")
    button.focus()
    write_more(run, 41, 60)
    page.get_by_text("step 60 of 900").first.wait_for()
    assert page.evaluate("document.activeElement.id") == "act"
    box = button.bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    page.mouse.down()
    write_more(run, 61, 80)
    page.get_by_text("step 80 of 900").first.wait_for()
    page.mouse.up()
    page.get_by_role("dialog").get_by_text("saves a checkpoint").wait_for()


def test_what_is_marked_to_be_copied_stays_marked(runs, serve, opened) -> None:
    run = live_run(runs / "mine", 40, total_steps=900)
    page = opened(serve())
    page.get_by_role("tab", name="Events").click()
    page.locator("#panel td").first.wait_for()
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#panel tbody tr'))")
    marked = page.evaluate("String(getSelection())")
    write_more(run, 41, 60)
    page.get_by_text("step 60 of 900").first.wait_for()
    assert page.evaluate("String(getSelection())") == marked != ""


def test_a_log_that_grows_leaves_its_reader_where_he_reads(runs, serve, opened) -> None:
    """Every look scrolled to the end, and closed the list of files."""
    run = live_run(runs / "mine", 40, total_steps=900)
    log = run / "logs" / "rank00000.log"
    log.write_text("".join(f"line {n}\n" for n in range(400)), encoding="utf-8")
    page = opened(serve())
    page.get_by_role("tab", name="Logs").click()
    text, files = page.locator("#panel pre"), page.locator("#panel select")
    text.get_by_text("line 399").wait_for()
    assert text.evaluate("it => it.scrollHeight - it.scrollTop - it.clientHeight") < 60, "its end is shown first"
    files.focus()
    files.evaluate("it => { it.wasHere = true; }")
    text.evaluate("it => { it.scrollTop = 0; }")
    with log.open("a", encoding="utf-8") as file:
        file.write("line 400\n")
    write_more(run, 41, 60)
    text.get_by_text("line 400").wait_for()
    assert text.evaluate("it => it.scrollTop") == 0 and files.evaluate("it => it.wasHere")
    text.evaluate("it => { it.scrollTop = it.scrollHeight; }")
    with log.open("a", encoding="utf-8") as file:
        file.write("".join(f"line {n}\n" for n in range(401, 500)))
    write_more(run, 61, 80)
    text.get_by_text("line 499").wait_for()
    assert text.evaluate("it => it.scrollHeight - it.scrollTop - it.clientHeight") < 60, "who is at the end stays there"


def test_the_board_says_when_it_is_gone_and_comes_back(runs, serve, opened) -> None:
    live_run(runs / "mine")
    page = opened(serve())
    page.get_by_text("step 40 of 80").first.wait_for()
    page.context.set_offline(True)
    page.get_by_text("no answer from the board").wait_for()
    page.context.set_offline(False)
    page.get_by_text("● live").wait_for()
    opened.troubles = [one for one in opened.troubles if "ERR_INTERNET_DISCONNECTED" not in one]


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_nothing_runs_out_or_is_pale(runs, serve, opened, look_at, width, dark) -> None:
    write_run(runs / "failed", 30, state="failed", exit_code=5, cause="rank 3 was killed by signal 9 (out of memory)")
    run = live_run(runs / "sft-smollm2-多卡-identity-lora-rank16-a-rather-long-name", 400, ranks=16, slow_rank=3)
    with (run / "events" / "run.jsonl").open("a", encoding="utf-8") as log:
        log.write(event_line("warning", 300, text="loss 12.5 at step 300 is eight deviations above the median 🎉"))
        log.write(event_line("resume", 350, t=T0 + 400, world_size=16))
        log.writelines(step_line(step) for step in range(351, 401))
    page = opened(serve(ToldControl()), width=width, dark=dark, touch=width < 500)
    kind = f"{width}-{'dark' if dark else 'light'}"
    if width < 500:
        page.locator("#list summary").click()
    page.get_by_role("button", name="sft-smollm2").click()
    page.get_by_text("step 400 of 800").first.wait_for()
    page.get_by_text("Ranks x steps").wait_for()
    look_at(page, f"board-{kind}")
    page.get_by_label("show the curves of failed").check()
    wait_for_count(chart(page).locator("table.legend tr"), 2)
    for tab in ("Events", "Texts", "Logs", "Differences"):
        page.get_by_role("tab", name=tab).click()
        page.locator("#panel > *").first.wait_for()
        page.wait_for_timeout(200)
        look_at(page, f"board-{tab.lower()}-{kind}")
    page.get_by_role("button", name="failed").click()
    page.get_by_text("killed by signal 9").first.wait_for()
    page.get_by_label("Language").select_option("zh")
    page.get_by_role("tab", name="事件").wait_for()
    look_at(page, f"board-failed-zh-{kind}")


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_an_empty_folder_and_a_run_without_steps_are_said(runs, serve, opened, look_at, width, dark) -> None:
    address, kind = serve(), f"{width}-{'dark' if dark else 'light'}"
    page = opened(address, width=width, dark=dark)
    page.get_by_text("no runs in this folder yet").wait_for()
    look_at(page, f"board-empty-{kind}")
    write_run(runs / "starts", 0, state="starting", **leader_identity())
    page.get_by_role("heading", name="starts").wait_for()
    page.get_by_text("no rank has written a step yet").wait_for()
    look_at(page, f"board-starts-{kind}")


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_a_report_is_one_file_that_reads_well(runs, tmp_path, opened, look_at, width, dark) -> None:
    from duoka.cli import run as duoka

    run = write_run(runs / "mine-多卡-🎉", 400, ranks=4, slow_rank=1)
    assert duoka(["report", str(run.path), "-o", str(tmp_path / "report.html")]) == 0
    page = opened((tmp_path / "report.html").as_uri(), width=width, dark=dark)
    page.get_by_role("heading", name="mine-多卡-🎉").wait_for()
    assert len(opened.asked) == 1, "it fetches nothing"
    look_at(page, f"report-{width}-{'dark' if dark else 'light'}")
