"""`duoka import-checkpoint` of files that DeepSpeed's engine writes without ZeRO; with ZeRO: promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM

from duoka.errors import StorageError
from duoka.store.deepspeed_files import read_deepspeed
from duoka.store.import_model import import_model


def test_what_ends_an_answer_comes_with_the_weights(tmp_path: Path) -> None:
    base, saved = write_tiny_model(tmp_path / "base"), tmp_path / "saved"
    settings = base / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": [0, 2], "do_sample": True, "temperature": 0.6}), encoding="utf-8")
    trained = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "trained", seed=5))
    saved.mkdir()
    torch.save({"module": trained.state_dict(), "global_steps": 3}, saved / "mp_rank_00_model_states.pt")
    found = import_model(saved, str(base), tmp_path / "new")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert found.step == 3 and again.generation_config.eos_token_id == [0, 2]
    assert again.generation_config.temperature == 0.6
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(again(ids).logits, trained(ids).logits)


@pytest.mark.parametrize("held", [[1, 2], {"model": {}, "global_steps": 3}, {"module": {}, "global_steps": None}])
def test_files_of_another_form_are_refused_by_name(tmp_path: Path, held: object) -> None:
    """A file of that name which another tool wrote, or a version of DeepSpeed that is not known here."""
    torch.save(held, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(StorageError, match="written otherwise than the versions of DeepSpeed") as refused:
        read_deepspeed(tmp_path)
    assert "zero_to_fp32.py" in str(refused.value)
