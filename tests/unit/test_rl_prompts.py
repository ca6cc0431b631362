"""What stage rl asks, out of data: up to the last answer, with tools; too long ones and wrong records are counted."""

import json

import pytest
from data_kit import messages_record, write_jsonl
from tiny import CHATML, build_tiny_tokenizer

from duoka.config.schema import RunConfig
from duoka.data.prompts import prepare_prompts
from duoka.data.tokens.tokenizer import load_tokenizer
from duoka.errors import DataError, Faults

TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"c": "X"}}}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("tokenizer"), build_tiny_tokenizer()
    calls = "{% for message in messages if message.tool_calls %}{{ message.tool_calls | tojson }}{% endfor %}"
    made.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + calls + CHATML
    made.save_pretrained(folder)
    return load_tokenizer(folder)


def ask(tmp_path, tokenizer, records, **data):
    named = records if isinstance(records, str) else str(write_jsonl(tmp_path / "asked.jsonl", records))
    data = {"train": [{"name": named, **data.pop("source", {})}], "max_length": 200, **data}
    settings = {"model": "demo", "stage": "rl", "data": data, "rl": {"max_new_tokens": 20, "rewards": ["r.py:x"]}}
    return prepare_prompts(RunConfig.model_validate(settings), tmp_path, tokenizer)


def text_of(rows, place, tokenizer):
    return tokenizer.backend.decode(list(rows.ids[place]), skip_special_tokens=False)


def test_a_conversation_is_asked_up_to_its_last_answer(tmp_path, tokenizer):
    turns = [("system", "S"), ("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "the answer")]
    records = [{**messages_record(turns), "level": 3}, messages_record([("user", "alone")])]
    rows, report = ask(tmp_path, tokenizer, records[:1])
    (question,) = rows.questions
    assert question.messages == tuple(turns[:-1]) and question.answer == "the answer" and question.facts["level"] == 3
    text = text_of(rows, 0, tokenizer)
    assert (
        text.endswith("two<|im_end|>\n<|im_start|>assistant\n") and "the answer" not in text and "1<|im_end|>" in text
    )
    assert question.id == "asked.jsonl:1" and report.num_train == 1


def test_tools_and_calls_are_a_part_of_what_is_read(tmp_path, tokenizer):
    turns = [{"role": "user", "content": "Weather?"}, CALL, {"role": "tool", "content": "rain"}]
    record = {"messages": [*turns, {"role": "assistant", "content": "It rains."}], "tools": [TOOL]}
    rows, _ = ask(tmp_path, tokenizer, [record], max_length=800)
    text = text_of(rows, 0, tokenizer)
    assert '"of a city"' in text and '"arguments"' in text and "rain" in text and "It rains" not in text
    assert rows.questions[0].answer == "It rains."


def test_prompts_without_room_for_an_answer_are_left_out_and_counted(tmp_path, tokenizer):
    def record(size):
        return messages_record([("user", "x" * size), ("assistant", "y")])

    fits, _ = ask(tmp_path, tokenizer, [record(10)])
    most = 180 - len(fits.ids[0]) + 10  # a token a letter: so many leave exactly max_new_tokens
    rows, report = ask(tmp_path, tokenizer, [record(5), record(most), record(most + 1), record(7)])
    assert [len(one.messages[0][1]) for one in rows.questions] == [5, most, 7] and max(rows.lengths) == 180
    assert report.sets[0].counts.num_dropped_long == 1 and report.sets[0].counts.num_kept == 3
    with pytest.raises(DataError, match="no prompt is left"):
        ask(tmp_path, tokenizer, [record(most + 1)])


def test_wrong_records_are_refused_together_or_counted(tmp_path, tokenizer):
    good = messages_record([("user", "a"), ("assistant", "b")])
    records = [good, "{not json", {"messages": "no list"}, good]
    with pytest.raises(Faults) as caught:
        ask(tmp_path, tokenizer, records)
    assert [fault.line for fault in caught.value.faults] == [2, 3]
    rows, report = ask(tmp_path, tokenizer, records, on_bad="skip")
    assert len(rows) == 2 and report.sets[0].counts.num_bad == 2


def test_what_the_template_cannot_ask_is_a_wrong_record_too(tmp_path, tokenizer):
    good = messages_record([("user", "a"), ("assistant", "b")])
    thought = {"role": "assistant", "content": "1", "reasoning_content": "this template knows no key for it"}
    bad = messages_record([("user", "q"), ("user", "r"), ("assistant", "s")])
    bad["messages"].insert(1, thought)
    with pytest.raises(Faults, match="has its reasoning beside the answer") as caught:
        ask(tmp_path, tokenizer, [good, bad])
    (fault,) = caught.value.faults
    assert fault.line == 2 and fault.file.endswith("asked.jsonl")
    rows, report = ask(tmp_path, tokenizer, [good, bad, good], on_bad="skip")
    assert len(rows) == 2 and report.sets[0].counts.num_bad == 1 and report.sets[0].counts.num_records == 3
    with pytest.raises(DataError, match=r"no prompt is left: data\.on_bad is skip, and all 2 are wrong"):
        ask(tmp_path, tokenizer, [bad, bad], on_bad="skip")


def test_the_first_of_a_set_are_taken_and_tasks_ask_what_is_for_training(tmp_path, tokenizer):
    records = [messages_record([("user", str(n)), ("assistant", "b")]) for n in range(9)]
    rows, _ = ask(tmp_path, tokenizer, records, source={"max_samples": 4})
    assert [one.messages[0][1] for one in rows.questions] == ["0", "1", "2", "3"]
    rows, _ = ask(tmp_path, tokenizer, "task:sort", source={"max_samples": 5}, max_length=300)
    assert rows.questions[2].messages[-1][1] in text_of(rows, 2, tokenizer)
    assert len(rows) == 5 and all(one.id.startswith("sort/train") and one.answer for one in rows.questions)
    assert json.dumps(rows.questions[0].to_json())
