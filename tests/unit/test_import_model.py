"""`duoka import-checkpoint` of files that DeepSpeed's engine writes without ZeRO; with ZeRO: promises."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM

from duoka.errors import ConfigError, StorageError
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


def test_a_model_with_adapters_beside_it_is_named_as_one(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base")
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    torch.save({"module": adapted.state_dict(), "global_steps": 3}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(ConfigError, match="adapters beside it") as refused:
        import_model(tmp_path, str(base), tmp_path / "new")
    assert "adapter_model.safetensors" in (refused.value.fix or "") and not (tmp_path / "new").exists()


def test_what_goes_to_a_link_lies_where_it_points_and_leaves_nothing_else(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base")
    (tmp_path / "saved").mkdir()
    module = AutoModelForCausalLM.from_pretrained(base).state_dict()
    torch.save({"module": module, "global_steps": 3}, tmp_path / "saved" / "mp_rank_00_model_states.pt")
    (tmp_path / "place").mkdir()
    (tmp_path / "link").symlink_to("place")
    import_model(tmp_path / "saved", str(base), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "place" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "link", "place", "saved"]
