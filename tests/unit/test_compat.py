"""What guides import by name: faults of a YAML have their place, and a data set says how many samples there are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import write_conversations

from duoka.compat.config import Config
from duoka.compat.data import load_dataset
from duoka.errors import Faults


def test_a_fault_of_from_yaml_has_file_line_and_key(tmp_path: Path) -> None:
    yaml = tmp_path / "x.yaml"
    yaml.write_text("model: demo\ndata: {train: [identity]}\noptim: {lr: fast}\n", encoding="utf-8")
    with pytest.raises(Faults) as caught:
        Config.from_yaml(yaml)
    assert "optim.lr must be a number" in str(caught.value) and "x.yaml, line 3" in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_99_samples_are_said_to_be_50_and_49(
    tmp_path: Path, tiny_model: Path, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write_conversations(tmp_path / "chats.jsonl", 99)
    yaml = tmp_path / "x.yaml"
    yaml.write_text(f"model: {tiny_model}\ndata: {{train: [chats.jsonl]}}\n", encoding="utf-8")
    accelerator: Any = SimpleNamespace(
        process_index=rank, num_processes=2, gradient_accumulation_steps=1,
        gather_object=lambda mine: [50, 49], print=lambda text: None if rank else print(text),
    )  # fmt: skip
    train, held_out = load_dataset(Config.from_yaml(yaml).data, accelerator=accelerator)
    assert (train.num_total, len(train), held_out) == (99, (50, 49)[rank], None)
    said = capsys.readouterr().out
    assert said.count("99 conversations, by rank: 50, 49") == (not rank)
