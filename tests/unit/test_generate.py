"""Generation against transformers' own, and streaming that never cuts a character."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import write_tiny_model
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM

from duoka.data.tokens.tokenizer import load_tokenizer
from duoka.errors import ConfigError
from duoka.model.answer import end_of_turn, stop_tokens, window_of
from duoka.model.sampling import Sampling, choose_token
from duoka.serve.chat import Chat, answer_lines, answer_once, talk
from duoka.serve.generate import CharacterStream, generate

MIXED = "多卡 👩‍🚀 trains, ça va? 🦆🇨🇳\n好。"


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    # Untied: a random model with a tied head says its last token again and again.
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "untied", tied=False)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path):
    return load_tokenizer(tiny_model)


@pytest.mark.parametrize("prompt", ["a", "Who are you?", "你是谁？请告诉我你的名字。"])
def test_greedy_tokens_are_those_of_transformers(lm: torch.nn.Module, tokenizer, prompt: str) -> None:
    ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": prompt}], prompt=True))[0]
    theirs = lm.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40, eos_token_id=-1, pad_token_id=0)
    ours = list(generate(lm, ids, frozenset(), Sampling(max_new_tokens=40)))
    assert ours == theirs[0, len(ids) :].tolist()
    assert len(set(ours)) > 3, "the model repeats itself, so this test shows little"


def test_an_answer_ends_before_a_stop_token(lm: torch.nn.Module, tokenizer) -> None:
    ids = tokenizer.encode("abc")[0]
    free = list(generate(lm, ids, frozenset(), Sampling(max_new_tokens=12)))
    stop = free[5]
    assert list(generate(lm, ids, frozenset([stop]), Sampling(max_new_tokens=12))) == free[: free.index(stop)]


def test_generation_ends_where_the_window_of_the_model_ends(lm: torch.nn.Module) -> None:
    window = lm.config.max_position_embeddings
    assert len(list(generate(lm, [5] * (window - 3), frozenset(), Sampling(max_new_tokens=50)))) == 3


def test_a_seed_gives_the_same_answer_and_another_seed_another(lm: torch.nn.Module) -> None:
    def sample(seed: int) -> list[int]:
        return list(generate(lm, [5, 6, 7], frozenset(), Sampling(1.0, 0.95, 30, seed)))

    assert sample(1) == sample(1) != sample(2)


def test_generating_leaves_gradients_on_for_its_caller(lm: torch.nn.Module) -> None:
    answer = generate(lm, [5, 6, 7], frozenset(), Sampling(max_new_tokens=5))
    next(answer)
    assert torch.is_grad_enabled()


def test_top_p_draws_only_from_the_likeliest() -> None:
    logits = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3]))
    drawn = [choose_token(logits, Sampling(1.0, 0.75), position) for position in range(400)]
    assert set(drawn) == {1, 3}
    assert 0.5 < drawn.count(1) / 400 < 0.75  # 0.5 of 0.8
    assert {choose_token(logits, Sampling(1.0, 1e-9), position) for position in range(20)} == {1}


def test_temperature_sharpens_and_zero_is_greedy() -> None:
    logits = torch.log(torch.tensor([0.4, 0.6]))
    cold = sum(choose_token(logits, Sampling(0.1), position) for position in range(300)) / 300
    assert cold > 0.93  # 0.6^10 / (0.6^10 + 0.4^10) = 0.98
    assert choose_token(logits, Sampling(0.0), 0) == 1


def test_stop_tokens_come_from_tokenizer_and_generation_config(lm: torch.nn.Module, tokenizer) -> None:
    assert tokenizer.eos_id in stop_tokens(lm, tokenizer)
    before = lm.generation_config.eos_token_id
    try:
        lm.generation_config.eos_token_id = [7, 9]
        assert stop_tokens(lm, tokenizer) == {7, 9, tokenizer.eos_id}
    finally:
        lm.generation_config.eos_token_id = before


def test_characters_come_whole_and_none_is_lost(tokenizer) -> None:
    stream = CharacterStream(tokenizer)
    tokens = tokenizer.encode(MIXED)[0]
    assert len(tokens) == len(MIXED.encode()), "one token a byte: every character is cut"
    pieces = [stream.add(token) for token in tokens]
    assert "".join(pieces) == MIXED == stream.text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[:6] == ["", "", "多", "", "", "卡"], "shown late or cut"


def test_bytes_that_are_no_character_do_not_stop_the_stream(tokenizer) -> None:
    stream = CharacterStream(tokenizer)
    tokens = tokenizer.encode("多ab")[0]
    shown = "".join(stream.add(token) for token in [tokens[0], *tokens[3:]])  # a lead byte without its others
    assert shown == "\ufffdab"
    assert stream.add(tokens[0]) == "" and stream.text == "\ufffdab"


def make_chat(lm: torch.nn.Module, tokenizer, **options) -> Chat:
    return Chat(lm, tokenizer, Sampling(max_new_tokens=6), **options)


def test_a_stray_byte_between_tokens_of_bytes_does_not_end_the_stream(tokenizer) -> None:
    """As Llama 2's and Gemma's tokenizers write what they have no word for: a byte a token, decoded by runs."""
    words = {word: place for place, word in enumerate(["\u2581a", "b", *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = Tokenizer(models.BPE(vocab=words, merges=[], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    stream = CharacterStream(replace(tokenizer, backend=backend))
    told = ["\u2581a", *"中当".encode(), "中".encode()[0], "b", "\u2581a", *"é".encode(), "中".encode()[0], "\u2581a"]
    pieces = [stream.add(words[one if isinstance(one, str) else f"<0x{one:02X}>"]) for one in told]
    assert "".join(pieces) == stream.text == "a中当\ufffdb aé\ufffd a"
    assert pieces[0] == "a" and pieces[3] == "中", "a character waits until the answer ends"


def test_a_pipe_is_answered_line_by_line_without_history(lm: torch.nn.Module, tokenizer) -> None:
    written: list[str] = []
    answer_lines(make_chat(lm, tokenizer), ["Hi\n", "\n", "你好\n", "Hi\n"], written.append, as_json=True)
    rows = [json.loads(line) for line in "".join(written).splitlines()]
    assert [row["prompt"] for row in rows] == ["Hi", "你好", "Hi"]
    assert rows[0]["answer"] == rows[2]["answer"], "a line saw what was said before it"


def test_a_terminal_chat_remembers_until_it_begins_anew(lm: torch.nn.Module, tokenizer) -> None:
    chat = make_chat(lm, tokenizer, system="Be brief.")
    written: list[str] = []
    histories: list[int] = []
    typed = iter(["one", "two", "/new", "three", "/help", "/etc/hosts, what is it?", "/quit"])

    def read(prompt: str) -> str:
        histories.append(len(chat.messages))
        return next(typed)

    talk(chat, read, written.append)
    assert histories == [0, 2, 4, 0, 2, 2, 4], "a path is no command"
    assert "commands: /new, /quit" in "".join(written)
    shown = tokenizer.decode(chat._encode())
    assert shown.startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_an_answer_broken_off_stays_in_the_history(lm: torch.nn.Module, tokenizer) -> None:
    chat = make_chat(lm, tokenizer)
    typed = iter(["one", "/quit"])
    calls = iter(range(100))

    def write(text: str) -> None:
        if next(calls) == 3:  # the greeting, "model: ", one piece, and then somebody presses Ctrl-C
            raise KeyboardInterrupt

    talk(chat, lambda prompt: next(typed), write)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]


def test_a_conversation_that_fills_the_window_is_said_to_and_may_begin_anew(lm: torch.nn.Module, tokenizer) -> None:
    chat = make_chat(lm, tokenizer)
    written: list[str] = []
    typed = iter(["one", "x" * 5000, "two", "/quit"])
    talk(chat, lambda prompt: next(typed), written.append)
    assert "the model's window is" in "".join(written) and "/new begins anew" in "".join(written)
    asked = [message["content"] for message in chat.messages if message["role"] == "user"]
    assert asked == ["one", "two"], "what could not be asked stays before every later question"
    with pytest.raises(ConfigError, match="window"):
        answer_once(chat, "x" * 5000, written.append)


def test_an_answer_that_was_cut_is_said_to_be(lm: torch.nn.Module, tokenizer) -> None:
    chat, written = make_chat(lm, tokenizer), []
    typed = iter(["one", "/quit"])
    talk(chat, lambda prompt: next(typed), written.append)
    assert "(cut after 6 tokens: --max-new-tokens takes more)" in "".join(written)
    window = window_of(lm)
    empty = tokenizer.encode(tokenizer.render([{"role": "user", "content": ""}], prompt=True))[0]
    answer_once(chat, "x" * (window - 3 - len(empty)), written.append)
    assert chat.num_cut == 2 and f"of {window:,} tokens" in chat.why_cut
    cuts: list[bool] = []
    (likeliest,) = generate(lm, [5, 6], frozenset(), Sampling(max_new_tokens=1), lambda: cuts.append(True))
    assert not list(generate(lm, [5, 6], frozenset([likeliest]), Sampling(), lambda: cuts.append(True)))
    assert cuts == [True], "what ends with a stop token is whole"


@pytest.mark.parametrize(
    ("template", "words"),
    [("{{ raise_exception('no system turns here') }}", "no system turns here"), ("{{ 'a' + messages }}", "str")],
)
def test_a_template_that_refuses_is_named(lm: torch.nn.Module, tokenizer, template: str, words: str) -> None:
    picky = replace(tokenizer, template=template)
    with pytest.raises(ConfigError, match=words):
        list(make_chat(lm, picky, system="Be brief.").ask("Hi"))


def test_an_answer_ends_with_what_training_ends_it_with(lm: torch.nn.Module, tokenizer) -> None:
    """A base model whose own end token is another one, trained with ChatML, must stop at <|im_end|>."""
    special = dict(tokenizer.special_tokens) | {"eos_token": "<|endoftext|>"}
    assert end_of_turn(replace(tokenizer, special_tokens=special)) == tokenizer.encode("<|im_end|>")[0][0]
