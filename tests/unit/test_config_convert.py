"""`duoka config convert`: the same config, in few lines, with a word on every line of the old file that needs one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from test_dialects import BASE, CORPUS, LOADS_TODAY, NESTED, load, refusal, write_deepspeed_files

from duoka.cli import config as config_cli
from duoka.config.load import Start, load_config
from duoka.plan.hardware import read_machine

FILES: dict[str, Any] = {name: CORPUS["train"][name]["keys"] for name in sorted(LOADS_TODAY)}
FILES |= {
    "the guide's": yaml.safe_load(NESTED),
    "with an adapter": BASE | {"adapter_name_or_path": "a,b"},
    "ours": {"model": {"depth": 4, "tokenizer": "demo"}, "data": {"train": ["a"]}},
    "ours, plain": {"model": "demo", "data": {"train": ["identity"]}, "lora": {}, "log": {"to": []}},
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def convert(*words: str) -> Any:
    return CliRunner().invoke(config_cli.command, ["convert", *words], standalone_mode=False)


@pytest.mark.parametrize("name", FILES)
def test_a_converted_file_is_the_same_config_in_few_lines(name: str) -> None:
    write_deepspeed_files()
    Path("x.yaml").write_text(yaml.safe_dump(FILES[name], sort_keys=False), "utf-8")
    result = convert("x.yaml", "-o", "ours.yaml", "--nproc", "2")
    assert result.exit_code == 0, result.output
    theirs = load_config("x.yaml", start=Start(2, bool(read_machine().gpus)))
    given = theirs.config.output == "runs/x" and "output" not in Path("ours.yaml").read_text("utf-8")
    ours = load_config("ours.yaml", ["output=runs/x"] if given else [])
    assert ours.config == theirs.config and not any("read as" in note for note in ours.notes)
    text = Path("ours.yaml").read_text("utf-8")
    keys = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(keys) < 50 and "# default" not in text and str(Path.cwd()) not in text


def test_it_says_what_became_of_which_line_and_overwrites_nothing() -> None:
    Path("x.yaml").write_text(yaml.safe_dump(BASE | {"plot_loss": True}, sort_keys=False), "utf-8")
    assert convert("x.yaml", "-o", "ours.yaml").exit_code == 0
    text = Path("ours.yaml").read_text("utf-8")
    assert f"#   line {len(BASE) + 1}, plot_loss: the loss curve is always drawn" in text, text
    assert "# model_name_or_path, line 1" in text
    assert "exists" in str(convert("x.yaml", "-o", "ours.yaml").exception)
    printed = convert("x.yaml", "-o", "-")
    assert printed.stdout == text and not Path("-").exists()
    assert "note: x.yaml is read as LLaMA-Factory" in printed.stderr and "duoka config convert" not in printed.stderr
    Path("elsewhere").mkdir()
    assert convert("x.yaml", "-o", "elsewhere/ours.yaml").exit_code == 0
    assert load_config("elsewhere/ours.yaml").base == Path.cwd()


def test_a_trained_adapter_goes_on_as_there_with_what_is_its_own() -> None:
    loaded = load(BASE | {"adapter_name_or_path": "a, b", "lora_rank": 64, "lora_alpha": 3, "lora_dropout": 0.3})
    assert loaded.config.lora is not None
    assert (loaded.config.lora.adapter, loaded.config.lora.merge, loaded.config.lora.rank) == ("b", ("a",), 8)
    text = "\n".join(loaded.notes)
    assert (
        "a merged into the base; b: it is trained further" in text
        and "lora_rank, line 7 lora_alpha, line 8 lora_dropout: of a new adapter" in text
    ), text
    new = load(BASE | {"adapter_name_or_path": "a", "create_new_adapter": True, "lora_rank": 64}).config.lora
    assert new is not None and (new.adapter, new.merge, new.rank) == (None, ("a",), 64)
    # The bare word of guides is a new adapter, unless a folder has that name.
    for folder, wanted in ((None, None), ("lora", "lora")):
        Path(folder or "other").mkdir()
        for text in (NESTED, yaml.safe_dump(BASE | {"adapter_name_or_path": "lora"})):
            lora = load(text).config.lora
            assert lora is not None and lora.adapter == wanted
    assert "finetuning_type full has none" in refusal(BASE | {"adapter_name_or_path": "a", "finetuning_type": "full"})
