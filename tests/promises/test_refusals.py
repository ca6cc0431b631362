"""Promise 5: bad input is refused by `duoka train` in one message, with exit code 2, before any process starts."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from bad_configs import CONTRADICTIONS, OVERRIDES, UNKNOWN_KEYS, VALUES, YAML_ITSELF

from duoka import cli
from duoka.cluster import restart

CONFIGS = [*YAML_ITSELF, *UNKNOWN_KEYS, *VALUES, *OVERRIDES]


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch, tmp_path):
    """A world, a tokenizer or a model that is touched fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError("something was started for a config that is wrong")

    monkeypatch.setattr(restart.LocalLauncher, "start", refuse)
    monkeypatch.setattr("duoka.data.prepare.prepare_data", refuse)
    monkeypatch.setattr("duoka.hub.models.model_folder", refuse)
    monkeypatch.chdir(tmp_path)


def train(capsys, *arguments):
    """(exit code, what stderr says) of `duoka train`."""
    code = cli.run(["train", *arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert not Path("runs").exists(), "a refused config leaves no run folder"
    return code, captured.err


@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: case.id.replace(" ", "-"))
def test_a_bad_config_starts_nothing(case, capsys):
    Path("sft.yaml").write_text(case.text, encoding="utf-8")
    code, said = train(capsys, "sft.yaml", *case.overrides)
    assert code == 2, said
    for line, what, fix in case.faults:
        assert what in said and fix in said, said
        assert not line or f"sft.yaml, line {line}" in said, said


@pytest.mark.parametrize("rule", CONTRADICTIONS)
def test_a_contradiction_starts_nothing(rule, capsys):
    Path("sft.yaml").write_text(CONTRADICTIONS[rule], encoding="utf-8")
    code, said = train(capsys, "sft.yaml")
    assert code == 2 and "sft.yaml, line 3" in said, said


GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def lines(*records):
    return "\n".join(json.dumps(record) if not isinstance(record, str) else record for record in records) + "\n"


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


# What stands in line 2 of a data file whose other lines are good, and what must be said of it.
RECORDS = {
    "cut json": ('{"messages": [{"role": "user", "content": "hi"', ["line 2"]),
    "unknown role": (chat(("user", "a"), ("robot", "b")), ["line 2", "robot"]),
    "roles out of order": (chat(("assistant", "a"), ("user", "b")), ["line 2"]),
    "null content": (chat(("user", "a"), ("assistant", None)), ["line 2"]),
    "empty assistant": (chat(("user", "a"), ("assistant", "")), ["line 2"]),
    "no messages": ({"messages": []}, ["line 2"]),
    "a number": ("17", ["line 2"]),
    "other tags": (
        {"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ["line 2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", RECORDS)
def test_a_wrong_record_is_named_with_file_and_line(kind, capsys, tiny_model):
    record, words = RECORDS[kind]
    Path("mine.jsonl").write_text(lines(GOOD, record, GOOD), encoding="utf-8")
    Path("sft.yaml").write_text(f"model: {tiny_model}\ndata: {{train: [mine.jsonl]}}\n", encoding="utf-8")
    code, said = train(capsys, "sft.yaml")
    assert code == 2, said
    assert "mine.jsonl" in said and all(word in said for word in words), said


def test_invalid_utf8_is_named_with_file_and_line(capsys, tiny_model):
    Path("mine.jsonl").write_bytes(lines(GOOD).encode() + b'{"messages": "\xff\xfe"}\n')
    Path("sft.yaml").write_text(f"model: {tiny_model}\ndata: {{train: [mine.jsonl]}}\n", encoding="utf-8")
    code, said = train(capsys, "sft.yaml")
    assert code == 2 and "line 2" in said and "UTF-8" in said, said


def write_model(folder, **files):
    folder.mkdir()
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content, encoding="utf-8")


NO_WEIGHTS = "\x02" + 7 * "\0" + "{}"  # a file that can be read, with no tensor
MODELS = {
    "no such folder": ("./nothing", None, "no such folder"),
    "an empty folder": ("empty", {}, "no config.json"),
    "pickles only": ("old", {"config__json": '{"model_type": "llama"}', "pytorch_model__bin": "x"}, "pickles"),
    "no weights": ("half", {"config__json": '{"model_type": "llama"}'}, "no weights"),
    "a broken config": ("broken", {"config__json": "{"}, "cannot be read"),
    "no model type": ("odd", {"config__json": "{}"}, "no model_type"),
    "an adapter": ("adapter", {"adapter_config__json": "{}"}, "an adapter"),
    "no tokenizer": (
        "mute",
        {"config__json": '{"model_type": "llama"}', "model__safetensors": NO_WEIGHTS},
        "no tokenizer",
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_path_that_is_no_model_is_refused_at_its_line(kind, capsys):
    name, files, words = MODELS[kind]
    if files is not None:
        write_model(Path(name), **files)
    Path("sft.yaml").write_text(f"data: {{train: [identity]}}\nmodel: {name}\n", encoding="utf-8")
    code, said = train(capsys, "sft.yaml")
    assert code == 2 and words in said and "sft.yaml, line 2" in said, said


def test_all_kinds_of_fault_are_told_together(capsys):
    text = "model: ./nothing\ndata: {train: [idntity, missing.jsonl]}\noptim: {lr: fast}\ntrian: {epochs: 2}\n"
    Path("sft.yaml").write_text(text, encoding="utf-8")
    code, said = train(capsys, "sft.yaml")
    assert code == 2
    for words in ("no such folder", "did you mean", "missing.jsonl", "optim.lr", "trian"):
        assert words in said, f"{words!r} is not in:\n{said}"
    places = [int(line.split("line ")[1].split(":")[0]) for line in said.splitlines() if "sft.yaml, line " in line]
    assert places == sorted(places) and set(places) == {1, 2, 3, 4}


def test_fp16_on_a_cpu_and_two_precisions_are_refused(capsys, tiny_model):
    import torch

    text = f"model: {tiny_model}\ndata: {{train: [identity]}}\ntrain: {{precision: %s}}\n"
    if not torch.cuda.is_available():
        Path("sft.yaml").write_text(text % "fp16", encoding="utf-8")
        code, said = train(capsys, "sft.yaml")
        assert code == 2 and "fp16" in said and "line 3" in said, said
    Path("sft.yaml").write_text(text % "[fp16, bf16]", encoding="utf-8")
    assert train(capsys, "sft.yaml")[0] == 2
    Path("sft.yaml").write_text(text.replace("precision: %s", "fp16: true, bf16: true"), encoding="utf-8")
    code, said = train(capsys, "sft.yaml")
    assert code == 2 and "precision" in said, said
