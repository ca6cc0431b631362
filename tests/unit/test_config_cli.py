"""`duoka config` and `duoka init`, and the page that documents every key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from needs import since

from duoka.cli import config as config_cli
from duoka.cli import init as init_cli
from duoka.config.catalog import known_keys
from duoka.config.document import config_markdown, json_schema
from duoka.config.load import load_config
from duoka.errors import ConfigError, Faults

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(command: Any, *words: str) -> Result:
    return CliRunner().invoke(command, list(words), standalone_mode=False)


def test_init_writes_a_config_that_loads_as_it_says() -> None:
    result = call(init_cli.command, "my.yaml", "--model", "a b/c", "--data", "x.jsonl", "--data", "identity")
    assert result.exception is None and "duoka train my.yaml" in result.output
    loaded = load_config("my.yaml")
    assert loaded.config.model.name == "a b/c" and [item.name for item in loaded.config.data.train] == [
        "x.jsonl",
        "identity",
    ]
    assert loaded.config.output == "runs/my" and loaded.config.lora is not None and loaded.notes == ()


def test_init_shows_every_block_with_comments_from_the_schema() -> None:
    call(init_cli.command)
    text = Path("sft.yaml").read_text()
    for key in known_keys().values():
        if "." not in key.name and key.name not in ("train_only", "rl"):  # in the place of lora; of stage rl alone
            assert f"\n{key.name}:" in f"\n{text}", key.name
    assert known_keys()["train.global_batch"].description in text


def test_init_never_overwrites() -> None:
    Path("sft.yaml").write_text("mine")
    result = call(init_cli.command)
    assert isinstance(result.exception, ConfigError) and result.exception.exit_code == 2
    assert Path("sft.yaml").read_text() == "mine"


@pytest.mark.parametrize("words", [["x.txt"], ["."], ["--model", " "]])
def test_init_refuses_what_makes_no_config(words: list[str]) -> None:
    result = call(init_cli.command, *words)
    assert isinstance(result.exception, ConfigError) and result.exception.fix


def test_show_prints_yaml_that_loads_equal() -> None:
    call(init_cli.command)
    result = call(config_cli.command, "show", "sft.yaml", "optim.lr=1e-4")
    Path("again.yaml").write_text(result.output)
    assert "# command line" in result.output
    assert load_config("again.yaml").config == load_config("sft.yaml", ["optim.lr=1e-4"]).config


def test_show_as_json_has_values_and_origins() -> None:
    call(init_cli.command)
    answer = json.loads(call(config_cli.command, "show", "sft.yaml", "--json").output)
    assert answer["config"]["train"]["global_batch"] == 16 and answer["origins"]["parallel.backend"] == "default"


def test_show_prints_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    Path("s.yaml").write_text("model: ${env:HF_TOKEN}\ndata: {train: [identity]}\n")
    for words in (["s.yaml"], ["s.yaml", "--json"]):
        result = call(config_cli.command, "show", *words)
        assert result.exception is None and "hunter2" not in result.output and "${env:HF_TOKEN}" in result.output


def test_show_refuses_a_bad_config_with_its_faults() -> None:
    Path("sft.yaml").write_text("model: demo\n")
    assert isinstance(call(config_cli.command, "show", "sft.yaml").exception, Faults)


@since(pydantic="2.14")  # with older ones the second schema of a process has a default too many
def test_the_json_schema_knows_every_key_its_bounds_and_the_short_forms() -> None:
    schema = json.loads(call(config_cli.command, "schema").output)
    assert schema == json_schema()
    text = json.dumps(schema)
    assert '"ge"' not in text and '"gt"' not in text and '"lt"' not in text
    assert schema["additionalProperties"] is False and schema["required"] == ["model", "data"]
    assert {"type": "string"}.items() <= schema["properties"]["model"]["anyOf"][0].items()
    for key in known_keys().values():
        owner = key.name.split(".")[:-1]
        assert key.description, f"{key.name} has no description"
        if len(owner) == 1:
            section = known_keys()[owner[0]].section
            assert section is not None and key.name.split(".")[-1] in schema["$defs"][section.__name__]["properties"]
    assert schema["$defs"]["LoraConfig"]["properties"]["rank"]["minimum"] == 1


def test_the_page_of_all_keys_is_the_schemas_own() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == config_markdown(), "run:   duoka config schema --markdown > docs/config.md"
    assert call(config_cli.command, "schema", "--markdown").output == page


def test_letters_that_the_locale_does_not_have_are_a_fault_of_the_name(tmp_path: Path) -> None:
    """A shell may say that file names are ASCII; Python then cannot make such a folder."""
    (tmp_path / "run.yaml").write_text("model: demo\ndata: {train: [identity]}\noutput: runs/多卡\n", encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8"}
    words = [sys.executable, "-m", "duoka", "config", "show", "run.yaml"]
    done = subprocess.run(words, cwd=tmp_path, env={**os.environ, **ascii_only}, capture_output=True, encoding="utf-8")
    assert done.returncode == 2 and "letters that the shell's locale has" in done.stderr, done.stderr
