"""`duoka data inspect` shows what is learned; `duoka data list` shows which names there are."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from data_kit import TURNS, messages_record, simple_records, write_jsonl
from torch.utils.data import DistributedSampler

from duoka.cli.data import command
from duoka.cli.prepare import prepare_run
from duoka.config.load import load_config
from duoka.data.audit import evened_out
from duoka.data.feed.loader import Loader
from duoka.errors import ConfigError, Faults
from duoka.plan.choose import check_machine
from duoka.plan.hardware import Machine
from duoka.runs.folder import RunFolder


@pytest.fixture
def config(tmp_path: Path, tiny_tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder as far as `inspect` looks at it, and a config in a folder of its own."""
    model = tmp_path / "model"
    shutil.copytree(tiny_tokenizer_folder, model)
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")  # weights of nothing
    write_jsonl(tmp_path / "talk.jsonl", [messages_record(), *simple_records(9)])
    file = tmp_path / "run.yaml"
    file.write_text("model: model\ndata: {train: [talk.jsonl]}\n", encoding="utf-8")
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    return file


def test_inspect_marks_what_is_learned(config: Path) -> None:
    result = CliRunner().invoke(command, ["inspect", str(config)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "10 of 10 kept" in result.stdout
    assert f"{{+{TURNS[2][1]}<|im_end|>+}}" in result.stdout
    assert result.stdout.count("targets (marked)") == 3
    assert "read as messages" in result.stdout


def test_inspect_says_each_line_once_on_a_terminal(config: Path) -> None:
    """What is said while sets are tokenized, and the report, are on one screen."""
    leader, follower = os.openpty()
    words = [sys.executable, "-m", "duoka", "data", "inspect", str(config)]
    process = subprocess.Popen(words, stdout=follower, stderr=follower)
    os.close(follower)
    text = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while part := os.read(leader, 65536):
            text += part
    os.close(leader)
    assert process.wait() == 0
    assert text.count(b"10 of 10 kept") == 1, text.decode()
    piped = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "10 of 10 kept" in piped.stdout and "10 of 10 kept" in piped.stderr


def test_inspect_answers_programs_too(config: Path) -> None:
    arguments = ["inspect", str(config), "data.eval=0.2", "--json", "--samples", "1"]
    answer = json.loads(CliRunner().invoke(command, arguments, catch_exceptions=False).stdout)
    assert (answer["report"]["num_train"], answer["report"]["num_eval"]) == (8, 2)
    parts = answer["samples"][0]["parts"]
    assert [part["target"] for part in parts][:2] == [False, True]


def test_inspect_refuses_what_training_would(config: Path) -> None:
    with pytest.raises(Faults, match="did you mean 'identity'"):
        CliRunner().invoke(command, ["inspect", str(config), "data.train=[identiti]"], catch_exceptions=False)


def test_list_names_built_in_and_registered_sets(config: Path) -> None:
    (config.parent / "dataset_info.json").write_text('{"mine": {"file_name": "talk.jsonl"}}')
    result = CliRunner().invoke(command, ["list", str(config), "--json"], catch_exceptions=False)
    names = json.loads(result.stdout)
    assert names["identity"] == "built in"
    assert names["mine"].endswith("dataset_info.json")


def test_inspect_writes_the_same_as_a_page(config: Path) -> None:
    page = config.parent / "page.html"
    result = CliRunner().invoke(command, ["inspect", str(config), "--html", str(page)], catch_exceptions=False)
    text = page.read_text(encoding="utf-8")
    assert "10 of 10 kept" in text and "padding (8 rows at once): packed 0.0%" in text and "<mark>" in text
    assert f"<mark>{TURNS[2][1]}&lt;|im_end|&gt;</mark>" in text
    assert "packed 0.0%" in result.stdout and "answers end with the tokenizer's end token" in result.stdout
    assert "http" not in text, "a page that fetches something says to others that you read it"


def test_inspect_shows_data_that_another_stage_learns_from(config: Path) -> None:
    write_jsonl(config.parent / "pairs.jsonl", [{"prompt": "q", "chosen": "good", "rejected": "worse"}] * 3)
    arguments = ["inspect", str(config), "data.train=[pairs.jsonl]"]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert "preference pairs (ranking)" in result.stdout
    assert "tokens of a pair, the better answer first" in result.stdout and "documents" not in result.stdout
    assert "{+good<|im_end|>+}" in result.stdout and "{+worse<|im_end|>+}" in result.stdout


def test_the_examples_of_the_page_about_data_load(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 3
    for number, block in enumerate(blocks):
        file = tmp_path / f"{number}.yaml"
        file.write_text("model: demo\n" + block, encoding="utf-8")
        load_config(file)


@pytest.mark.parametrize("world", [1, 2, 8])
def test_audit_shows_who_learns_what(config: Path, world: int) -> None:
    write_jsonl(config.parent / "talk.jsonl", simple_records(99))
    arguments = ["audit", str(config), "--world", str(world), "--json"]
    answer = json.loads(CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False).stdout)
    assert (answer["total"], answer["num_twice"], answer["num_missing"]) == (99, 0, 0)
    assert sum(one["count"] for one in answer["ranks"]) == 99 and len(answer["ranks"]) == world


def test_audit_says_what_samplers_that_pad_would_make_of_99(config: Path) -> None:
    write_jsonl(config.parent / "talk.jsonl", simple_records(99))
    arguments = ["audit", str(config), "train.global_batch=128", "--world"]
    two, three = (
        CliRunner().invoke(command, [*arguments, world], catch_exceptions=False, standalone_mode=False).stdout
        for world in ("2", "3")
    )
    assert "each once: 0 twice, 0 missing" in two
    assert "elsewhere: DistributedSampler would make 100 of them, batches evened out 128" in two
    assert "would make 99 of them, batches evened out 129" in three, "3 x 43"
    many = CliRunner().invoke(command, [*arguments[:2], "train.global_batch=2k tokens", "--world", "2"])
    assert "would make 100 of them\n" in many.stdout, "batches of tokens have no number of samples"


def test_what_the_audit_says_of_padding_is_what_torch_s_sampler_does() -> None:
    for count in range(1, 201):
        for world in range(1, 9):
            ranks = [list(DistributedSampler(range(count), world, rank, shuffle=False)) for rank in range(world)]  # type: ignore[arg-type]
            assert sum(map(len, ranks)) == evened_out(count, world) and len({len(own) for own in ranks}) == 1
            assert {one for own in ranks for one in own} == set(range(count)), (count, world)


def test_audit_sees_a_sample_that_is_left_out(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = Loader.shares
    monkeypatch.setattr(Loader, "shares", lambda self, ids: shares(self, ids[1:]))
    result = CliRunner().invoke(command, ["audit", str(config)], catch_exceptions=False, standalone_mode=False)
    assert result.return_value == 1 and "NOT each once" in result.stdout and "1 missing" in result.stdout
    monkeypatch.setattr(Loader, "shares", lambda self, ids: [shares(self, ids)[0] + shares(self, ids[:1])[0]])
    result = CliRunner().invoke(command, ["audit", str(config)], catch_exceptions=False, standalone_mode=False)
    assert result.return_value == 1 and "1 twice" in result.stdout


def test_audit_names_the_row_groups_of_each_rank(config: Path) -> None:
    folder = config.parent / "texts"
    folder.mkdir()
    for name in "ab":
        pq.write_table(pa.table({"text": ["some text"] * 6}), folder / f"{name}.parquet", row_group_size=2)
    config.write_text(
        "model: model\nstage: pretrain\ndata: {train: [texts], stream: true, streams: 4}\n"
        "train: {max_steps: 5, global_batch: 4}\n"
    )
    arguments = ["audit", str(config), "--world", "3"]
    lines = CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False).stdout.splitlines()
    groups = re.findall(r"([ab]\.parquet:\d)\[0:2\]", "\n".join(lines))
    assert sorted(groups) == [f"{name}.parquet:{n}" for name in "ab" for n in range(3)]
    assert "each once" in lines[-1] and len(lines) == 5
    with pytest.raises(ConfigError, match="5 processes are asked for, and 4 streams feed them"):
        CliRunner().invoke(command, ["audit", str(config), "--world", "5"], catch_exceptions=False)


def test_ranks_that_share_a_model_share_a_stream(config: Path, tiny_model: Path) -> None:
    """Two ranks of one tensor-parallel model read the same rows: they were asked for two streams."""
    folder = config.parent / "texts"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["some text"] * 6}), folder / "a.parquet", row_group_size=2)
    config.write_text(
        f"model: {tiny_model}\nstage: pretrain\ndata: {{train: [texts], stream: true, streams: 1, max_length: 64}}\n"
        "train: {max_steps: 5, global_batch: 4}\nparallel: {tensor: 2}\n"
    )
    run, machine = RunFolder(config.parent / "run"), Machine(2, 8 << 30, 8 << 30)
    run.make()
    assert prepare_run(load_config(config), run, machine, 2).is_dir()
    with pytest.raises(ConfigError, match="2 processes are asked for, and 1 streams feed them"):
        prepare_run(load_config(config, ["parallel.tensor=1"]), run, machine, 2)
    (fault,) = check_machine(load_config(config, ["parallel.tensor=1"]).config, machine, 2)
    assert fault.key == "data.streams" and "2 processes are asked for, and 1 streams feed them" in fault.what
    assert not check_machine(load_config(config).config, machine, 2), "a plan says the same without the data"
