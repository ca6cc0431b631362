"""The chat page of `duoka serve` in a real browser: a model that says what it was taught, and an adapter beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from serving import KEY, address_of, serving
from talking import write_talking_model

from duoka.serve.api.server import Server

pytestmark = pytest.mark.web
WRITE_DOWN = """() => {
  const all = { subtree: true, childList: true, characterData: true };
  window.seen = [];
  new MutationObserver(() => window.seen.push(document.querySelector(".answer p")?.textContent ?? ""))
    .observe(document.getElementById("log"), all);
}"""
LOOKS = [(width, dark) for width in (400, 1400) for dark in (False, True)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    folder = write_talking_model(tmp_path_factory.mktemp("model") / "talking")
    wrapped = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(r=2, target_modules=["q_proj"])
    )
    with torch.no_grad():  # changes no answer: what stands beside the base can be waited for by name too
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1e-4)
    wrapped.save_pretrained(folder.parent / "tuned")
    with serving(folder) as made:
        made.service.load_adapter("tuned-多卡", folder.parent / "tuned")
        yield made


@pytest.fixture
def address(server: Server) -> str:
    return f"{address_of(server)}/#key={KEY}"


def settle(page: Any, **settings: object) -> None:
    page.locator("#settings summary").click()
    for name, value in settings.items():
        page.locator(f"#{name}").fill(str(value))
    page.locator("#settings summary").click()


def ask(page: Any, text: str) -> None:
    page.locator("#text").fill(text)
    page.keyboard.press("Enter")


def said(page: Any, model: str = "talking") -> Any:
    return page.locator("article.answer", has=page.get_by_role("heading", name=model, exact=True)).locator("p").last


def wait_for_text(found: Any, text: Any) -> None:
    from playwright.sync_api import expect

    expect(found).to_have_text(text, timeout=20_000)


def test_answers_stream_whole_characters_and_the_key_leaves_the_address(address, opened) -> None:
    page = opened(address)
    page.get_by_label("talking").wait_for()
    assert "key" not in page.url
    page.evaluate(WRITE_DOWN)
    settle(page, temperature=0)
    ask(page, "你好")
    wait_for_text(said(page), "你好！我是多卡 🚀。")
    seen = page.evaluate("() => [...new Set(window.seen)]")
    assert len(seen) > 4, "it came in pieces"
    assert all("你好！我是多卡 🚀。".startswith(one) for one in seen), f"a character was cut: {seen}"
    page.get_by_text("/s · first after").wait_for()
    assert page.locator(".said").inner_text() == "你好"


def test_an_answer_is_drawn_again_and_a_question_edited(address, opened) -> None:
    page = opened(address)
    settle(page, temperature=1)
    ask(page, "Toss a coin")
    wait_for_text(said(page), re.compile("^(heads|tails)$"))
    found = {said(page).inner_text()}
    for _ in range(40):
        if len(found) > 1:
            break
        page.get_by_text("/s · first after").wait_for()
        page.get_by_role("button", name="Again").click()
        wait_for_text(said(page), re.compile("^(heads|tails)$"))
        page.get_by_text("/s · first after").wait_for()
        found.add(said(page).inner_text())
    assert found == {"heads", "tails"}, "another draw gives another answer"
    settle(page, temperature=0)
    ask(page, "Who are you?")
    page.locator(".turn").nth(1).wait_for()
    page.get_by_text("/s · first after").nth(1).wait_for()
    page.get_by_role("button", name="Edit").first.click()
    assert page.locator("#text").input_value() == "Toss a coin" and page.locator(".turn.replaced").count() == 2
    page.keyboard.press("Escape")
    assert page.locator("#text").input_value() == "" and page.locator(".turn.replaced").count() == 0
    page.get_by_role("button", name="Edit").first.click()
    ask(page, "Who are you?")
    wait_for_text(said(page), "I am duoka 多卡 🎉.")
    assert page.locator(".turn").count() == 1


def test_an_answer_is_stopped_and_its_row_is_free(address, server, opened) -> None:
    page = opened(address)
    settle(page, temperature=0, max_tokens=900)
    ask(page, "Sing")
    page.get_by_text("la la la").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Send").wait_for()
    sung = said(page).inner_text()
    assert sung.startswith("la la") and "stopped" in page.locator("article.answer footer").inner_text()
    page.wait_for_timeout(600)
    assert said(page).inner_text() == sung and server.service.scheduler.num_active == 0
    ask(page, "Who are you?")  # the stopped answer is part of the conversation now; what matters: it is answered
    page.locator(".turn").nth(1).wait_for()
    page.get_by_role("button", name="Send").wait_for()


def test_several_models_answer_side_by_side(address, opened) -> None:
    page = opened(address)
    page.get_by_label("tuned-多卡").check()
    settle(page, temperature=0)
    ask(page, "Who are you?")
    for model in ("talking", "tuned-多卡"):
        wait_for_text(said(page, model), "I am duoka 多卡 🎉.")
    left, right = (page.locator("article.answer").nth(place).bounding_box() for place in (0, 1))
    assert left["y"] == right["y"] and left["x"] < right["x"]
    page.set_viewport_size({"width": 400, "height": 900})
    above, below = (page.locator("article.answer").nth(place).bounding_box() for place in (0, 1))
    assert above["x"] == below["x"] and above["y"] < below["y"], "one above the other on a phone"


def test_a_conversation_is_exported_and_imported(address, opened, tmp_path) -> None:
    page = opened(address)
    settle(page, temperature=0, system="Be short. 🎉")
    settle(page, system="")
    ask(page, "你好")
    wait_for_text(said(page), "你好！我是多卡 🚀。")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "chat.json")
    kept = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert kept["turns"] == [{"text": "你好", "answers": {"talking": {"text": "你好！我是多卡 🚀。"}}}]
    page.get_by_role("button", name="New").click()
    assert page.locator(".turn").count() == 0
    page.locator("#open").set_input_files(tmp_path / "chat.json")
    wait_for_text(said(page), "你好！我是多卡 🚀。")
    (tmp_path / "other.json").write_text('{"a": 1}')
    page.locator("#open").set_input_files(tmp_path / "other.json")
    page.get_by_text("This file is no exported conversation.").wait_for()
    assert page.locator(".turn").count() == 1
    page.reload()
    wait_for_text(said(page), "你好！我是多卡 🚀。")


def test_what_a_model_says_is_text_and_never_markup(address, opened, tmp_path) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    (tmp_path / "chat.json").write_text(json.dumps({
        "duoka": "chat", "system": "", "turns": [{"text": evil, "answers": {evil: {"text": evil}}}],
    }))  # fmt: skip
    page = opened(address)
    page.locator("#open").set_input_files(tmp_path / "chat.json")
    page.get_by_text(evil).nth(2).wait_for()
    assert page.locator("#log img, #log script").count() == 0


def test_a_wrong_key_is_said_where_it_is_mended(address, opened) -> None:
    page = opened(address.replace(KEY, "wrong"))
    page.get_by_text("the key is missing or wrong").wait_for()
    page.get_by_label("Key").fill(KEY)
    page.keyboard.press("Tab")
    page.get_by_label("talking").wait_for()
    opened.troubles = [one for one in opened.troubles if "401" not in one]


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_nothing_runs_out_or_is_pale(address, opened, look_at, width, dark) -> None:
    page, kind = opened(address, width=width, dark=dark, touch=width < 500), f"{width}-{'dark' if dark else 'light'}"
    page.get_by_label("tuned-多卡").check()
    look_at(page, f"chat-empty-{kind}")
    settle(page, temperature=0, max_tokens=200)
    for text in ("Who are you?", "你好", "Sing"):
        page.locator("#text").fill(text)
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Stop").wait_for(state="hidden")
    page.locator("#settings summary").click()
    look_at(page, f"chat-{kind}")
    page.get_by_role("button", name="中文").click()
    page.get_by_text("系统消息").wait_for()
    look_at(page, f"chat-zh-{kind}")
