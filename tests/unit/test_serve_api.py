"""The HTTP API as clients use it: what is asked for is done or refused by name, streamed text is the whole text."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from serving import KEY, kept_busy, serving
from tiny import write_tiny_model

from duoka.serve.api.bodies import MOST_BYTES
from duoka.serve.api.server import Server

ASK = [{"role": "user", "content": "Who are you? 你是谁？"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with serving(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", tied=False)) as made:
        yield made


def connect(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)


def post(server: Server, path: str, body: object, *, key: str = KEY) -> tuple[int, dict]:
    connection = connect(server)
    text = body if isinstance(body, (str, bytes)) else json.dumps(body)
    connection.request("POST", path, text, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def chat(server: Server, **fields) -> dict:
    body = {"model": "tiny", "messages": ASK, "max_tokens": 8, "temperature": 0, **fields}
    status, answer = post(server, "/v1/chat/completions", body)
    assert status == 200, answer
    return answer


def complete(server: Server, **fields) -> dict:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 6, "temperature": 0, **fields}
    status, answer = post(server, "/v1/completions", body)
    assert status == 200, answer
    return answer


def stream(server: Server, path: str, body: dict) -> list[dict]:
    connection = connect(server)
    connection.request("POST", path, json.dumps({**body, "stream": True}), {"Authorization": f"Bearer {KEY}"})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
    events = [part.removeprefix("data: ") for part in answer.read().decode().split("\n\n") if part]
    connection.close()
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def refusal(server: Server, path: str = "/v1/chat/completions", **fields) -> tuple[int, dict]:
    body = {"model": "tiny", **({"messages": ASK} if "chat" in path else {"prompt": "a"}), **fields}
    status, answer = post(server, path, body)
    return status, answer["error"]


def test_a_chat_has_the_form_that_clients_read(server: Server) -> None:
    answer = chat(server)
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 8 and usage["total_tokens"] == usage["prompt_tokens"] + 8


def test_streamed_pieces_make_the_whole_answer(server: Server) -> None:
    body = {"model": "tiny", "messages": ASK, "max_tokens": 40, "seed": 5, "n": 2, "logprobs": True}
    whole = chat(server, **{**body, "temperature": 1.0})
    parts = stream(server, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == whole["usage"]
    assert all(part["usage"] is None for part in parts[:-1])
    for number in (0, 1):
        mine = [one for part in parts[:-1] for one in part["choices"] if one["index"] == number]
        want = whole["choices"][number]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(one["delta"].get("content", "") for one in mine) == want["message"]["content"]
        assert mine[-1]["finish_reason"] == want["finish_reason"]
        assert [t for one in mine for t in one["logprobs"]["content"]] == want["logprobs"]["content"]
    assert whole["choices"][0]["message"] != whole["choices"][1]["message"]


def test_a_seed_gives_the_same_text_while_others_are_answered(server: Server) -> None:
    def ask(seed: int) -> str:
        return chat(server, seed=seed, temperature=1.0, top_p=0.9)["choices"][0]["message"]["content"]

    alone = [ask(seed) for seed in range(6)]
    found: dict[int, str] = {}
    threads = [threading.Thread(target=lambda s=seed: found.__setitem__(s, ask(s))) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[seed] for seed in range(6)] == alone


def test_an_answer_ends_before_a_stop_text_wherever_tokens_are_cut(server: Server) -> None:
    free = complete(server, max_tokens=30)["choices"][0]["text"]
    stop = free[4:7]
    answer = complete(server, max_tokens=30, stop=["never", stop])["choices"][0]
    assert answer == {"index": 0, "text": free[: free.index(stop)], "logprobs": None, "finish_reason": "stop"}
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 30, "temperature": 0, "stop": stop}
    parts = stream(server, "/v1/completions", asked)
    assert "".join(part["choices"][0]["text"] for part in parts) == answer["text"], "a stop text was sent in part"


def test_a_prompt_can_be_scored_as_evaluation_harnesses_do(server: Server) -> None:
    ids = [70, 71, 72, 73]
    answer = complete(server, prompt=[ids], echo=True, logprobs=1, max_tokens=1, seed=1)["choices"][0]
    scores = answer["logprobs"]
    assert len(scores["token_logprobs"]) == len(scores["tokens"]) == len(scores["top_logprobs"]) == 5
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    assert answer["text"].startswith("".join(scores["tokens"][:4]))
    columns = (scores[name][1:] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for text, logprob, top in zip(*columns, strict=True):
        assert top[text] == logprob <= max(top.values()) <= 0
    only = complete(server, prompt=[ids], echo=True, logprobs=1, max_tokens=0)["choices"][0]
    assert only["logprobs"]["token_logprobs"] == scores["token_logprobs"][:4]


def test_prompts_come_as_text_and_as_tokens_and_several_at_once(server: Server) -> None:
    tokens = [100, 101, 102]
    many = complete(server, prompt=[tokens, [50, 51]], n=1)["choices"]
    assert [choice["index"] for choice in many] == [0, 1]
    assert many[0]["text"] == complete(server, prompt=tokens)["choices"][0]["text"]
    assert refusal(server, "/v1/completions", prompt=[1, 2, 10**9])[1]["param"] == "prompt"


def test_biases_and_penalties_are_as_defined(server: Server) -> None:
    best = complete(server, prompt="q", max_tokens=12, logit_bias={"90": 100})["choices"][0]["text"]
    assert len(set(best)) == 1, "a bias of 100 takes one token always"
    none = complete(server, prompt="q", max_tokens=12, logit_bias={"90": 100}, frequency_penalty=2, presence_penalty=2)
    assert none["choices"][0]["text"] == best, "2 + 2 a time does not undo 100 in twelve tokens"
    few = complete(server, prompt="q", max_tokens=12, logit_bias={"90": 12}, frequency_penalty=2)
    assert len(set(few["choices"][0]["text"])) > 1


CALLS = [{"id": "a", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"n": 0}, "n"),
        ({"seed": "x"}, "seed"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "include_usages"),
        ({"stream": True, "stream_options": 5}, "stream_options"),
        ({"beam_width": 4}, "beam_width"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
            "messages[0].function_call",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": CALLS}, *ASK]}, "messages[1].tool_calls"),
    ],
)
def test_what_is_not_served_is_refused_by_name(server: Server, fields: dict, param: str) -> None:
    status, error = refusal(server, **fields)
    assert status == 400 and error["param"] == param and error["type"] == "invalid_request_error", error
    assert len(error["message"]) > 15


def test_what_changes_nothing_is_taken(server: Server) -> None:
    quiet = {"user": "me", "store": False, "metadata": {}, "response_format": {"type": "text"}, "n": None}
    parts = [{"type": "text", "text": ASK[0]["content"]}]
    told = chat(server, **quiet, messages=[{"role": "user", "content": parts}])
    assert told["choices"] == chat(server, logprobs=False, top_logprobs=0)["choices"] == chat(server)["choices"]
    assert complete(server, suffix="")["choices"] == complete(server)["choices"]


def test_too_long_a_prompt_is_told_the_window(server: Server) -> None:
    status, error = refusal(server, messages=[{"role": "user", "content": "a" * 2000}])
    assert (status, error["code"]) == (400, "context_length_exceeded") and "1,024" in error["message"]


def test_only_who_has_the_key_is_answered(server: Server) -> None:
    assert post(server, "/v1/chat/completions", {}, key="other")[0] == 401
    connection = connect(server)
    for path, status in (("/health", 200), ("/v1/models", 401), ("/metrics", 401), ("/etc/passwd", 401)):
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == status, path
        answer.read()
    connection.close()


def test_the_word_before_the_key_may_be_written_small(server: Server) -> None:
    for words, status in ((f"bearer {KEY}", 200), (f"BEARER  {KEY}", 200), (f"Basic {KEY}", 401)):
        connection = connect(server)
        connection.request("GET", "/v1/models", headers={"Authorization": words})
        assert connection.getresponse().status == status, words
        connection.close()


def test_a_body_that_was_refused_unread_is_not_the_next_request(server: Server) -> None:
    for path, key, status in (("/v1/completions", "wrong", 401), ("/v1/nothing", KEY, 404)):
        connection = connect(server)
        connection.request("POST", path, '{"prompt": "abc"}', {"Authorization": f"Bearer {key}"})
        first = connection.getresponse()
        assert first.status == status and "error" in json.loads(first.read())
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}"})
        assert connection.getresponse().status == 200, path
        connection.close()


def test_bad_bodies_are_answered_in_words(server: Server) -> None:
    for body in ("{", "[1]", "[" * 100000, b"\xff\xfe"):
        status, answer = post(server, "/v1/chat/completions", body)
        assert status == 400 and answer["error"]["message"]
    connection = connect(server)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Length": str(MOST_BYTES + 1)}
    connection.request("POST", "/v1/completions", headers=headers)
    assert connection.getresponse().status == 413
    connection.close()
    assert post(server, "/v1/nothing", {})[0] == 404


HALF = '"\\ud83d"'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", f'{{"model": "tiny", "messages": [{{"role": "user", "content": {HALF}}}]}}'),
        ("/v1/chat/completions", b'{"model": "tiny", "messages": [{"role": "user", "content": "\xed\xa0\xbd"}]}'),
        ("/v1/completions", f'{{"model": "tiny", "prompt": "a", "stop": {HALF}}}'),
        ("/v1/completions", f'{{"model": {HALF}, "prompt": "a"}}'),
        ("/v1/embeddings", f'{{"model": "tiny", "input": {HALF}}}'),
        ("/v1/unload_lora_adapter", f'{{"lora_name": {HALF}}}'),
    ],
)
def test_half_a_character_is_refused_in_words(server: Server, path: str, body: str | bytes) -> None:
    status, answer = post(server, path, body)
    assert status == 400 and "half a character" in answer["error"]["message"]


def test_a_fault_of_the_server_is_answered_and_said_without_the_prompt(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(body: object, facts: object) -> None:
        raise LookupError("secret words")

    with monkeypatch.context() as patched:
        patched.setattr("duoka.serve.api.server.read_chat", fail)
        status, answer = post(server, "/v1/chat/completions", {"model": "tiny", "messages": ASK})
    said, deadline = "", time.monotonic() + 20
    while not said and time.monotonic() < deadline:  # it is said after the answer was sent
        time.sleep(0.01)
        said = capfd.readouterr().err
    assert status == 500 and answer["error"]["type"] == "server_error"
    for text in (said, answer["error"]["message"]):
        assert "LookupError" in text and "secret" not in text
    assert chat(server)["choices"]


def test_models_and_metrics_are_listed(server: Server) -> None:
    connection = connect(server)
    connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    assert [one["id"] for one in json.loads(connection.getresponse().read())["data"]] == ["tiny"]
    for name, status in (("tiny", 200), ("t%69ny", 200), ("gpt%2F4", 404), ("", 404)):
        connection.request("GET", f"/v1/models/{name}", headers={"Authorization": f"Bearer {KEY}"})
        answer = connection.getresponse()
        said = json.loads(answer.read())
        assert answer.status == status, name
        assert said["id"] == "tiny" if status == 200 else "there is tiny" in said["error"]["message"]
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    assert b"duoka_answer_tokens_total" in connection.getresponse().read()
    connection.close()
    status, error = refusal(server, model="gpt-4")
    assert status == 404 and "tiny" in error["message"]


def test_vectors_come_as_numbers_and_as_base64(server: Server) -> None:
    body = {"model": "tiny", "input": ["多卡", "b"], "encoding_format": "float"}
    status, answer = post(server, "/v1/embeddings", body)
    assert status == 200
    first = answer["data"][0]["embedding"]
    assert sum(x * x for x in first) == pytest.approx(1)
    packed = post(server, "/v1/embeddings", {**body, "encoding_format": "base64"})[1]["data"][0]["embedding"]
    raw = base64.b64decode(packed)
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(first)
    assert answer["data"][1]["embedding"] != first


def test_who_hangs_up_is_computed_for_no_longer(server: Server) -> None:
    body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 900, "stream": True, "ignore_eos": True})
    with socket.create_connection(server.server_address[:2]) as client:
        head = (
            "POST /v1/completions HTTP/1.1",
            "Host: x",
            f"Authorization: Bearer {KEY}",
            f"Content-Length: {len(body)}",
        )
        client.sendall("\r\n".join((*head, "", body)).encode())
        assert client.recv(10)
    scheduler = server.service.scheduler
    event = threading.Event()
    for _ in range(300):
        if not scheduler.num_active:
            break
        event.wait(0.1)
    assert scheduler.num_active == 0 and scheduler.numbers.answer_tokens < 10**6


def test_a_full_queue_says_when_to_come_again(server: Server) -> None:
    connection = connect(server)
    body = {"model": "tiny", "prompt": "a", "n": 8}
    with kept_busy(server):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Authorization": f"Bearer {KEY}"})
        answer = connection.getresponse()
    assert answer.status == 429 and answer.headers["Retry-After"]
    assert json.loads(answer.read())["error"]["type"] == "rate_limit_error"
    with contextlib.closing(connection):
        pass


def test_the_page_asks_no_one_else(server: Server) -> None:
    connection = connect(server)
    for path in ("/", "/chat.js", "/chat.css"):
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200 and "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text, path
    connection.close()


def test_bytes_of_tokens_are_the_answer_where_a_character_is_in_several(server: Server) -> None:
    answer = chat(server, max_tokens=40, logprobs=True, top_logprobs=2, temperature=1.5, seed=3)
    (choice,) = answer["choices"]
    told = [one for one in choice["logprobs"]["content"] if not one["token"].startswith("<|")]
    text = bytes(byte for one in told for byte in one["bytes"]).decode(errors="replace")
    assert text.rstrip("\ufffd") == choice["message"]["content"] and len(told) > 20
    assert any(len(one["bytes"]) == 1 and one["bytes"][0] > 0x7F for one in told), "no part of a character was drawn"
    (old,) = complete(server, prompt="é卡", max_tokens=0, echo=True, logprobs=2)["choices"]
    names = [r"bytes:\xc3", r"bytes:\xa9", r"bytes:\xe5", r"bytes:\x8d", r"bytes:\xa1"]
    assert old["logprobs"]["tokens"] == names and old["text"] == "é卡"
    assert old["logprobs"]["text_offset"] == [0, 1, 1, 2, 2]


def test_a_special_token_takes_no_place_in_an_answer(server: Server) -> None:
    asked = {"prompt": "é<|im_start|>", "echo": True, "logprobs": 0, "max_tokens": 3, "logit_bias": {"1": 100}}
    (told,) = complete(server, **asked)["choices"]
    assert told["text"] == "é<|im_start|>" and told["logprobs"]["tokens"][-3:] == ["<|im_start|>"] * 3
    assert told["logprobs"]["text_offset"][-4:] == [1, 13, 13, 13]


@pytest.mark.parametrize("echo", [False, True])
def test_places_of_tokens_are_counted_on_from_one_streamed_piece_to_the_next(server: Server, echo: bool) -> None:
    body = {"model": "tiny", "prompt": "é卡b", "max_tokens": 30, "logprobs": 1, "echo": echo, "seed": 3, "n": 2}
    whole = complete(server, **body, temperature=1.5)["choices"]
    parts = stream(server, "/v1/completions", {**body, "temperature": 1.5})
    for want in whole:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == want["index"]]
        assert len(mine) > 3 and "".join(one["text"] for one in mine) == want["text"]
        for name in ("tokens", "text_offset"):
            assert [x for one in mine for x in one["logprobs"][name]] == want["logprobs"][name], name


def test_more_answers_than_may_wait_are_refused_for_good(server: Server) -> None:
    status, error = refusal(server, n=9)
    assert (status, error["param"]) == (400, "n") and "at most 8 may wait" in error["message"]
    status, error = refusal(server, "/v1/completions", prompt=["a"] * 9)
    assert (status, error["param"]) == (400, "prompt")


def test_an_adapter_comes_and_goes_while_the_server_runs(server: Server, tmp_path: Path) -> None:
    status, answer = post(server, "/v1/load_lora_adapter", {"lora_name": "more", "lora_path": str(tmp_path / "none")})
    assert status == 400 and answer["error"]["param"] == "lora_path"
    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "tiny"})[0] == 404
