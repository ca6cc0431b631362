"""`duoka data tokenizer`: what it learns is a transformers tokenizer that loses no byte and knows chats and tools."""

import json

import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from duoka.cli.data import command
from duoka.data.read.example import Example, Message
from duoka.data.tokens.template import encode
from duoka.data.tokens.tokenizer import load_tokenizer
from duoka.data.tokens.train_tokenizer import LEAST, SPECIAL_TOKENS, train_tokenizer
from duoka.errors import ConfigError, DuokaError, Faults

WORDS = "the cat sat on the mat, 多卡训练 2026 times; def f(x): return x ** 2\n\tné 🙂"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tok")
    lines = [json.dumps({"text": f"{WORDS} {index}"}) + "\n" for index in range(300)]
    (place / "text.jsonl").write_text("".join([*lines, '{"text": "  "}\n']), encoding="utf-8")
    (place / "plain.txt").write_text("one line\nanother line\n", encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def learned(folder):
    files = [str(folder / "text.jsonl"), str(folder / "plain.txt")]
    return train_tokenizer(files, folder / "out", vocab_size=400, max_bytes=10**9)


def test_transformers_and_duoka_read_the_same_ids_and_no_byte_is_lost(folder, learned):
    theirs, ours = AutoTokenizer.from_pretrained(folder / "out"), load_tokenizer(folder / "out")
    text = WORDS + "never seen: Ωж中\r\n  \t" + "".join(map(chr, range(1, 256)))
    ids = ours.encode(text)[0]
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids and theirs.decode(ids) == text
    assert len(theirs) == learned.vocab_size <= 400
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("<|bos|>", "<|im_end|>", "<|pad|>")
    assert [ours.backend.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))


def test_plain_text_begins_as_documents_begin_in_pretraining(folder, learned):
    theirs, ours = AutoTokenizer.from_pretrained(folder / "out"), load_tokenizer(folder / "out")
    ids = theirs("one line")["input_ids"]
    assert tuple(ids) == ours.encode_plain("one line") and ids[0] == ours.bos_id
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=True)["input_ids"][0] != ours.bos_id


def test_counts_are_those_of_the_files(folder, learned):
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [text for text in texts if text.strip()] + ["one line", "another line"]
    assert (learned.num_documents, learned.num_empty) == (len(texts), 1)
    assert learned.num_bytes == sum(len(text.encode()) for text in texts)
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    num_tokens = sum(len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
    assert learned.bytes_per_token == pytest.approx(learned.num_bytes / num_tokens)


def test_the_same_files_give_the_same_tokenizer(folder, learned):
    files = [str(folder / "text.jsonl"), str(folder / "plain.txt")]
    train_tokenizer(files, folder / "again", vocab_size=400, max_bytes=10**9)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / "again" / name).read_bytes() == (folder / "out" / name).read_bytes()


def test_its_template_learns_answers_and_calls_and_nothing_else(folder, learned):
    tokenizer = load_tokenizer(folder / "out")
    call = json.dumps([{"name": "search", "arguments": {"q": "cat"}}])
    turns = (
        Message("system", "be kind"), Message("user", "hi"), Message("assistant", "", call), Message("tool", "42"),
        Message("assistant", "bye"),
    )  # fmt: skip
    sample = encode(Example(turns, json.dumps([{"name": "search"}])), tokenizer)
    said = tokenizer.decode(sample.input_ids[sample.is_target].tolist())
    whole = tokenizer.decode(sample.input_ids.tolist())
    answer = '<tool_call>\n{"name": "search", "arguments": {"q": "cat"}}\n</tool_call><|im_end|>'
    assert said == answer + "bye<|im_end|>"
    assert whole.startswith('<|im_start|>system\nbe kind\n\n<tools>\n{"name": "search"}\n</tools>')
    assert "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>" in whole
    plain = encode(Example((Message("user", "hi"), Message("assistant", "bye"))), tokenizer)
    assert tokenizer.decode(plain.input_ids.tolist()).startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assist")


def test_sets_that_duoka_has_are_named_not_filed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    found = train_tokenizer(["task:stories", "identity"], tmp_path / "a", vocab_size=300, max_bytes=10**9)
    assert found.num_documents >= 4000 + 2 * 120, "every story, and each message of every talk"
    with pytest.raises(ConfigError, match="no task named"):
        train_tokenizer(["task:storys"], tmp_path / "b", vocab_size=300, max_bytes=10**9)


def test_talks_are_read_too_and_reading_ends_where_asked(tmp_path):
    talk = {"messages": [{"role": "user", "content": "ab ab"}, {"role": "assistant", "content": "cd cd"}]}
    (tmp_path / "talks.jsonl").write_text((json.dumps(talk) + "\n") * 50, encoding="utf-8")
    found = train_tokenizer([str(tmp_path)], tmp_path / "a", vocab_size=300, max_bytes=10**9)
    assert found.num_documents == 100 and found.vocab_size < 300  # few pairs are there to be learned
    assert "were asked for" in "\n".join(found.lines())
    part = train_tokenizer([str(tmp_path / "talks.jsonl")], tmp_path / "b", vocab_size=300, max_bytes=100)
    assert part.stopped_early and part.num_bytes == 100


BAD = [
    ("x.jsonl", "", {"vocab_size": LEAST - 1}, "no room for the 256 bytes", "--vocab-size"),
    ("x.jsonl", '{"content": "a"}\n', {}, "there is no 'text'; the record has 'content'", "--column"),
    ("x.jsonl", '{"text": 5}\n', {}, "'text' is no text", "--column"),
    ("x.jsonl", '{"text": "a"\n', {}, "JSON", ""),
    ("x.jsonl", '{"text": " "}\n', {}, "there is no text in these files", "look"),
    ("x.bin", "abc", {}, "of no kind that duoka reads", "convert"),
    ("x.jsonl", '{"text": "a"}\n', {"out": "."}, "is there already", "--out"),
]


@pytest.mark.parametrize(("name", "text", "more", "what", "fix"), BAD)
def test_what_cannot_work_is_refused(tmp_path, name, text, more, what, fix):
    (tmp_path / name).write_text(text or '{"text": "a"}\n', encoding="utf-8")
    options = {"vocab_size": 300, "max_bytes": 10**6} | {key: value for key, value in more.items() if key != "out"}
    with pytest.raises(DuokaError) as caught:
        train_tokenizer([str(tmp_path / name)], tmp_path / more.get("out", "new"), **options)
    assert isinstance(caught.value, (ConfigError, Faults, DuokaError))
    said = "\n".join(caught.value.lines())
    assert what in said and fix in said and (tmp_path / name).is_file()
    assert not (tmp_path / "new").exists()


def test_the_command_says_what_it_read_and_how_to_go_on(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "ab ab"}\n{"no": 1}\n{"text": "ab"}\n', encoding="utf-8")
    words = [str(tmp_path / "x.jsonl"), "--out", str(tmp_path / "new"), "--vocab-size", "280", "--skip-bad"]
    done = CliRunner().invoke(command, ["tokenizer", *words])
    assert done.exit_code == 0, done.output
    assert "2 documents" in done.output and "1 wrong ones left out" in done.output
    assert "bytes of this text per token" in done.output and f"tokenizer: {tmp_path / 'new'}" in done.output


def test_half_a_character_is_a_fault_of_its_line_and_may_be_passed_over(tmp_path):
    lines = ['{"text": "cut \\ud83d off"}\n', *['{"text": "hello there"}\n'] * 4]
    (tmp_path / "a.jsonl").write_text("".join(lines), encoding="utf-8")
    learn = {"vocab_size": LEAST, "max_bytes": 10**6}
    with pytest.raises(Faults, match="half a character") as caught:
        train_tokenizer([str(tmp_path / "a.jsonl")], tmp_path / "out", **learn)
    assert caught.value.faults[0].line == 1
    learned = train_tokenizer([str(tmp_path / "a.jsonl")], tmp_path / "out", skip_bad=True, **learn)
    assert (learned.num_bad, learned.num_documents) == (1, 4)


def test_a_tools_empty_answer_is_empty(learned, folder):
    talk = [{"role": "user", "content": "go"}, {"role": "tool", "content": None}]
    text = AutoTokenizer.from_pretrained(folder / "out").apply_chat_template(talk, tokenize=False)
    assert text.endswith("<tool_response>\n\n</tool_response><|im_end|>\n")
