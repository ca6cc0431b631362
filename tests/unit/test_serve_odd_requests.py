"""What clients may ask and hardly ever do: prompts of no token, stops that are special, adapters of other models."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from families import write_family
from serving import KEY, serving
from tiny import build_tiny_tokenizer, write_tiny_model
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from duoka.data.tokens.tokenizer import load_tokenizer
from duoka.errors import ConfigError
from duoka.hub.base import write_base
from duoka.model.build import load_model
from duoka.model.request import ModelRequest
from duoka.model.sampling import Sampling, choose_token
from duoka.model.slots import SequenceCache, register_slot_attention
from duoka.serve.api.answers import Gone, Reply
from duoka.serve.api.requests import Facts, read_completion
from duoka.serve.api.server import Server
from duoka.serve.api.start import Settings, build_service, run_server
from duoka.serve.batching.model import CHUNK, SlotModel
from duoka.serve.batching.scheduler import Done, Failed, IsClosing, IsFull, Job, Scheduler, Scored
from duoka.serve.load_run import find_trained

BEGIN, END = 1, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer begins every text, as Llama 3's and Gemma's do, and whose template writes words alone."""
    made = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", tied=False)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    begin = [("<|im_start|>", BEGIN)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=begin)
    tokenizer.save(str(made / "tokenizer.json"))
    words_alone = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (made / "chat_template.jinja").write_text(words_alone, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def server(folder: Path):
    with serving(folder) as made:
        yield made


@pytest.fixture
def model(folder: Path) -> SlotModel:
    return SlotModel(load_model(ModelRequest(folder, dtype=torch.float32, attention=register_slot_attention())), 1)


def post(server: Server, path: str, **fields) -> tuple[int, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request("POST", path, json.dumps(fields), {"Authorization": f"Bearer {KEY}"})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def complete(server: Server, prompt, **fields) -> dict:
    status, answer = post(server, "/v1/completions", model="tiny", prompt=prompt, **{"temperature": 0, **fields})
    assert status == 200, answer
    return answer["choices"][0] | {"usage": answer["usage"]}


def job(new: int, prompt=(5, 6)) -> Job:
    return Job(tuple(prompt), Sampling(max_new_tokens=new), frozenset())


def test_messages_of_which_the_template_writes_nothing_are_refused_and_no_row_is_lost(server: Server) -> None:
    status, answer = post(server, "/v1/chat/completions", model="tiny", messages=[{"role": "user", "content": ""}])
    assert (status, answer["error"]["param"]) == (400, "messages") and "writes nothing" in answer["error"]["message"]
    assert server.service.scheduler.num_active == 0


def test_options_of_a_stream_that_is_none_are_refused(server: Server) -> None:
    for more, status in (({}, 400), ({"stream": False}, 400), ({"stream_options": None}, 200)):
        asked = {"model": "tiny", "prompt": "a", "max_tokens": 1, "stream_options": {"include_usage": True}} | more
        found, answer = post(server, "/v1/completions", **asked)
        assert found == status and (status == 200 or answer["error"]["param"] == "stream_options"), answer


def test_a_plain_text_begins_as_its_tokenizer_begins_it(server: Server, folder: Path) -> None:
    ids = AutoTokenizer.from_pretrained(folder)("abc")["input_ids"]
    assert ids[0] == BEGIN
    by_text, by_ids = complete(server, "abc", max_tokens=8), complete(server, ids, max_tokens=8)
    assert by_text == by_ids and by_text["usage"]["prompt_tokens"] == 4
    assert complete(server, "<|im_start|>abc", max_tokens=8) == by_text, "what is there is not written twice"


def test_a_stop_text_that_is_a_special_token_ends_an_answer(server: Server) -> None:
    asked = {"max_tokens": 5, "logit_bias": {"0": 100}}
    assert complete(server, "abc", **asked)["finish_reason"] == "length"
    stopped = complete(server, "abc", **asked, stop=["<|endoftext|>", "x"])
    assert (stopped["finish_reason"], stopped["usage"]["completion_tokens"]) == ("stop", 0)
    asked = {"max_tokens": 5, "logit_bias": {str(END): 100}, "ignore_eos": True}
    assert complete(server, "abc", **asked)["finish_reason"] == "length"
    assert complete(server, "abc", **asked, stop="<|im_end|>")["finish_reason"] == "stop"


def test_the_coldest_draw_is_the_likeliest_token() -> None:
    logits = torch.tensor([1.0, 9.0, 8.0])
    assert {choose_token(logits, Sampling(temperature, seed=7), 0) for temperature in (0, 5e-324, 1e-300)} == {1}


def test_who_left_while_waiting_keeps_no_place_in_the_queue(model: SlotModel) -> None:
    scheduler = Scheduler(model, bytes_per_token=1, max_bytes=1 << 20, max_waiting=2)
    scheduler.start()
    busy, waiting = job(900), [job(9), job(9)]
    scheduler.submit([busy])
    assert isinstance(busy.events.get(timeout=60), Scored)
    scheduler.submit(waiting)
    with pytest.raises(IsFull):
        scheduler.submit([job(9)])
    for one in waiting:
        one.cancel()
        assert one.events.get(timeout=60) == Done("cancelled")
    scheduler.submit([job(9)])
    busy.cancel()
    scheduler.close()


def test_who_hangs_up_is_missed_while_tokens_come_fast_and_nothing_is_sent(folder: Path) -> None:
    class Fast:
        def submit(self, jobs: list[Job]) -> None:
            threading.Thread(target=self.say, args=jobs, daemon=True).start()

        def say(self, one: Job) -> None:
            for _ in range(600):
                if one.is_cancelled:
                    return
                one.events.put(Scored(70, None))
                time.sleep(0.005)
            one.events.put(Done("length"))

    tokenizer = load_tokenizer(folder)
    facts = Facts(tokenizer, 260, 1024, frozenset(), {"tiny": None})
    asked = read_completion({"model": "tiny", "prompt": "a", "max_tokens": 900}, facts)
    with pytest.raises(Gone):
        Reply(asked, Fast(), tokenizer, lambda: True).whole()


def test_the_last_answer_is_sent_before_the_server_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed, sent, answers = threading.Event(), threading.Event(), []

    def whole(self: Reply) -> dict:
        found = plain(self)
        os.kill(os.getpid(), signal.SIGINT)
        computed.wait(1)
        sent.set()
        return found

    plain = Reply.whole
    monkeypatch.setattr(Reply, "whole", whole)
    settings = Settings(key=KEY, num_rows=1, cache_bytes=1 << 26, precision="fp32")
    made = Server(("127.0.0.1", 0), build_service(find_trained(str(folder), say=print), {}, settings))
    asking = threading.Thread(target=lambda: answers.append(complete(made, "abc", max_tokens=2)))
    asking.start()
    run_server(made)
    assert sent.is_set(), "the server ended with an answer that it had not sent"
    computed.set()
    asking.join()
    assert answers[0]["usage"]["completion_tokens"] <= 2


def test_where_memory_ends_whoever_asked_is_told(model: SlotModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def take_over(self, other, length) -> None:
        raise RuntimeError("out of memory")

    scheduler = Scheduler(model, bytes_per_token=1, max_bytes=1 << 20)
    scheduler.start()
    first, again = (job(1, [5] * (CHUNK + 3)) for _ in range(2))
    scheduler.submit([first])
    while not isinstance(first.events.get(timeout=60), Done):
        pass
    monkeypatch.setattr(SequenceCache, "take_over", take_over)
    scheduler.submit([again])
    assert again.events.get(timeout=60) == Failed("RuntimeError: out of memory")
    scheduler.close()
    with pytest.raises(IsClosing):
        scheduler.call(lambda: None)


@pytest.mark.parametrize("family", ["falcon", "llama4_text"])
def test_an_architecture_whose_attention_is_another_is_refused_and_not_answered_wrongly(
    tmp_path: Path, family: str
) -> None:
    folder = write_family(tmp_path / family, family, tokenizer=build_tiny_tokenizer())
    trained = find_trained(str(folder), say=print)
    with pytest.raises(ConfigError, match="cannot be served") as caught:
        build_service(trained, {}, Settings(num_rows=1))
    assert "duoka chat" in str(caught.value.fix)


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base.config._name_or_path = str(folder)
    made = tmp_path_factory.mktemp("adapter")
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(made)
    facts = json.loads((made / "adapter_config.json").read_text())
    (made / "adapter_config.json").write_text(json.dumps(facts | {"base_model_name_or_path": str(folder)}))
    return made


def test_an_adapter_that_was_trained_on_another_model_of_that_shape_is_refused(
    server: Server, folder: Path, adapter: Path, tmp_path: Path
) -> None:
    for seed, status in ((1, 400), (None, 200)):
        mine = tmp_path / f"adapter-{seed}"
        shutil.copytree(adapter, mine)
        write_base(folder if seed is None else write_tiny_model(tmp_path / "other", tied=False, seed=seed), mine)
        found, answer = post(server, "/v1/load_lora_adapter", lora_name="mine", lora_path=str(mine))
        assert found == status, answer
        assert status == 200 or "is not the one that it was trained on" in answer["error"]["message"]


def test_an_adapter_of_another_tool_that_names_another_base_is_loaded_with_a_warning(
    server: Server, folder: Path, adapter: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = write_tiny_model(tmp_path / "other", tied=False, seed=1)
    same = tmp_path / "copied"
    shutil.copytree(folder, same)
    facts = json.loads((adapter / "adapter_config.json").read_text())
    wanted = {
        str(other): "which is not the model here", "someone/else": "someone/else, which is not on this machine",
        str(folder): "", str(same): "", "someone/Tiny": "", None: "",
    }  # fmt: skip
    for place, (base, words) in enumerate(wanted.items()):
        mine = tmp_path / f"adapter-{place}"
        shutil.copytree(adapter, mine)
        (mine / "adapter_config.json").write_text(json.dumps(facts | {"base_model_name_or_path": base}))
        status, answer = post(server, "/v1/load_lora_adapter", lora_name=f"named-{place}", lora_path=str(mine))
        said = answer.get("warning", "")
        assert status == 200 and words in said and bool(words) == bool(said), (base, answer)
        assert (words or "loaded") in capfd.readouterr().err + (answer["status"] if not words else "")


def test_a_runs_folder_is_loaded_as_the_command_line_loads_it(server: Server, adapter: Path, tmp_path: Path) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    (run / "config.yaml").write_text("model: demo\ndata: {train: [identity]}\n", encoding="utf-8")
    status, answer = post(server, "/v1/load_lora_adapter", lora_name="run", lora_path=str(run))
    assert status == 400 and "no adapter_config.json in" in answer["error"]["message"], answer
    shutil.copytree(adapter, run / "final")
    assert post(server, "/v1/load_lora_adapter", lora_name="run", lora_path=str(run))[0] == 200
    assert post(server, "/v1/completions", model="run", prompt="abc", max_tokens=2)[0] == 200


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_files_that_are_no_adapter_are_refused_and_the_server_goes_on(
    server: Server, adapter: Path, tmp_path: Path, name: str
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(adapter, mine)
    (mine / name).write_text("[]", encoding="utf-8")
    status, answer = post(server, "/v1/load_lora_adapter", lora_name="broken", lora_path=str(mine))
    assert (status, answer["error"]["param"]) == (400, "lora_path"), answer
    assert complete(server, "abc", max_tokens=2)["finish_reason"]


def test_a_name_that_no_disk_takes_is_refused_as_any_other(server: Server) -> None:
    for path in ("a" * 3000, "a\0b"):
        status, answer = post(server, "/v1/load_lora_adapter", lora_name="odd", lora_path=path)
        assert (status, answer["error"]["param"]) == (400, "lora_path"), answer


def test_an_adapter_on_the_base_is_not_laid_over_a_model_that_was_trained_in_full(
    folder: Path, adapter: Path, tmp_path: Path
) -> None:
    beside = {"mine": find_trained(str(adapter), say=print)}
    whole = write_tiny_model(tmp_path / "whole", tied=False, seed=3)
    trained = replace(find_trained(str(folder), say=print), full=whole)
    settings = Settings(key=KEY, num_rows=1, cache_bytes=1 << 26, precision="fp32")
    with pytest.raises(ConfigError, match="no finished adapter on"):
        build_service(trained, beside, settings)
    with pytest.raises(ConfigError, match="trained in full, so others cannot be laid beside it"):
        build_service(replace(trained, full=None, checkpoint=tmp_path), beside, settings)
    assert set(build_service(replace(trained, full=None), beside, settings).facts.models) == {"tiny", "mine"}
