"""Where an export may be written, and which tokenizer and templates go with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny import CHATML, build_tiny_tokenizer, write_tiny_model
from transformers import AutoTokenizer

from duoka.cli import run as duoka
from duoka.config.schema import DataConfig, DataSource, ModelConfig, RunConfig
from duoka.data.tokens.tokenizer import load_tokenizer
from duoka.hub.models import check_model
from duoka.model.result import copy_tokenizer
from duoka.serve.load_run import Trained


def test_a_place_that_cannot_take_a_whole_folder_is_refused_before_any_work(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert duoka(["export", str(tiny_model), "-o", "."]) == 2
    said = capsys.readouterr().err
    assert "the folder that you are in" in said and "-o model" in said


@pytest.mark.parametrize("is_there", [True, False])
def test_what_goes_to_a_link_lies_where_it_points(tiny_model: Path, tmp_path: Path, is_there: bool) -> None:
    if is_there:
        (tmp_path / "place").mkdir()
    (tmp_path / "link").symlink_to("place")
    assert duoka(["export", str(tiny_model), "-o", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "place" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "place"]


def test_a_vocabulary_of_another_tool_goes_with_the_weights(tmp_path: Path) -> None:
    """Chinese GPT-2 has BERT's vocab.txt; without it every word of the copy is unknown, and nothing says so."""
    base = write_tiny_model(tmp_path / "base")
    for file in ("tokenizer.json", "chat_template.jinja"):
        (base / file).unlink()
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (base / "vocab.txt").write_text("\n".join([*marks, *"abcdefghijklmnopqrstuvwxyz多卡"]) + "\n", encoding="utf-8")
    (base / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    assert duoka(["export", str(base), "-o", str(tmp_path / "out")]) == 0
    ours, theirs = (AutoTokenizer.from_pretrained(folder)("a 多卡 b").input_ids for folder in (tmp_path / "out", base))
    assert ours == theirs and ours.count(marks.index("[UNK]")) == 0


def test_a_checkpoint_has_the_tokenizer_that_its_run_named(tiny_model: Path, tmp_path: Path) -> None:
    build_tiny_tokenizer().save_pretrained(tmp_path / "other")
    data = DataConfig(train=(DataSource(name="identity"),))
    config = RunConfig(model=ModelConfig(name=str(tiny_model), tokenizer="other"), data=data)
    run = Trained("run", tiny_model, "", checkpoint=tmp_path, config=config, config_base=tmp_path)
    assert run.tokenizer_folder == tmp_path / "other"


@pytest.mark.parametrize("form", ["files", "list"])
def test_no_template_of_the_base_stays_beside_the_one_of_training(tmp_path: Path, form: str) -> None:
    """Training writes all with the one that the config names, conversations with tools too."""
    base, out = tmp_path / "base", tmp_path / "out"
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "T{{ messages[0].content }}"}
    tokenizer.save_pretrained(base)
    if form == "list":  # as older folders have them
        shutil.rmtree(base / "additional_chat_templates")
        (base / "chat_template.jinja").unlink()
        listed = [{"name": name, "template": text} for name, text in tokenizer.chat_template.items()]
        settings = json.loads((base / "tokenizer_config.json").read_text())
        (base / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": listed}))
    out.mkdir()
    copy_tokenizer(base, out, CHATML)
    ours, theirs = load_tokenizer(out), AutoTokenizer.from_pretrained(out)
    assert ours.template == ours.tool_template == theirs.chat_template == CHATML
    assert ours.special_tokens == load_tokenizer(base).special_tokens


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("mp_rank_00_model_states.pt", "duoka import-checkpoint"),
        ("pytorch_model_fsdp_0/__0_0.distcp", "duoka import-checkpoint"),
        ("checkpoint-20/config.json", "there/checkpoint-20"),
        ("checkpoint-9/adapter_config.json", "there/checkpoint-9"),
        ("model_000010.pt", "write a folder with config.json"),
        ("mine.q8_0.gguf", "name the folder or Hub id that it was made from"),
    ],
    ids=["DeepSpeed", "FSDP", "Trainer", "PEFT", "nanochat", "GGUF"],
)
def test_a_checkpoint_of_another_tool_is_no_model_and_what_makes_one_of_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, words: str
) -> None:
    place = tmp_path / "there" / file
    place.parent.mkdir(parents=True)
    place.write_bytes(b"")
    assert duoka(["export", str(tmp_path / "there"), "-o", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    data = DataConfig(train=(DataSource(name="identity"),))
    (fault,) = check_model(RunConfig(model=ModelConfig(name=str(tmp_path / "there")), data=data), tmp_path)
    assert words in fault.fix


def test_a_state_of_accelerate_is_told_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model.safetensors", "random_states_0.pkl", "optimizer.bin"):
        (tmp_path / name).write_bytes(b"")
    assert duoka(["export", str(tmp_path), "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "a state that accelerate saved" in said and "copy config.json" in said
