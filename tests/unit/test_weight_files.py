"""A model's files that are not what its config says: refused by name, or read as transformers reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM

from duoka.config.schema import DataConfig, DataSource, ModelConfig, RunConfig
from duoka.errors import ConfigError
from duoka.hub.models import check_model
from duoka.model.build import load_model
from duoka.model.request import ModelRequest
from duoka.model.result import write_result
from duoka.model.shards import build_without_memory
from duoka.parallel.fill import fill_weights

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", tied=False)


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def cut_into_shards(folder: Path) -> list[Path]:
    lm = AutoModelForCausalLM.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    lm.save_pretrained(folder, max_shard_size="100KB")
    return sorted(folder.glob("*.safetensors"))


def logits_of(lm: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return lm.eval()(input_ids=torch.arange(3, 40)[None]).logits


def read_by_slices(folder: Path) -> torch.nn.Module:
    built = build_without_memory(ModelRequest(folder, dtype=torch.float32))
    assert built is not None
    lm, source = built
    fill_weights(lm, source, torch.device("cpu"))
    lm.set_attn_implementation("sdpa")
    return lm


def cut_short(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def lose_a_shard(folder: Path) -> None:
    cut_into_shards(folder)[1].unlink()


def lose_the_index(folder: Path) -> None:
    cut_into_shards(folder)
    (folder / INDEX).unlink()


def leave_a_pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 482656\n")


@pytest.mark.parametrize(
    ("damage", "words", "fix"),
    [
        (cut_short, f"whose {WEIGHTS} has 241,328 bytes, and 482,656 belong to it", "copy the model again"),
        (lose_a_shard, "which lacks 1 of its 6 files of weights (model-00002-of-00006", "copy the model again"),
        (lose_the_index, f"there is no {WEIGHTS} and no {INDEX}", f"copy {INDEX} too"),
        (leave_a_pointer, f"whose {WEIGHTS} is a pointer of Git LFS", "git lfs pull"),
    ],
)
def test_damaged_files_are_named_before_a_start_and_when_they_are_read(
    folder: Path, damage: Callable[[Path], None], words: str, fix: str
) -> None:
    config = RunConfig(model=ModelConfig(name=str(folder)), data=DataConfig(train=(DataSource(name="identity"),)))
    assert check_model(config, folder) == []
    damage(folder)
    (fault,) = check_model(config, folder)
    assert words in fault.what and fix in fault.fix and fault.key == "model.name"
    with pytest.raises(ConfigError) as caught:
        load_model(ModelRequest(folder, dtype=torch.float32))
    assert words in caught.value.what and fix in (caught.value.fix or "")


def test_a_model_whose_index_and_shards_are_whole_passes(folder: Path) -> None:
    assert len(cut_into_shards(folder)) == 6 and (folder / INDEX).is_file()
    config = RunConfig(model=ModelConfig(name=str(folder)), data=DataConfig(train=(DataSource(name="identity"),)))
    assert check_model(config, folder) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
            "has no values for 1 weight (model.layers.1.mlp.up_proj.weight): they would be drawn at random",
        ),
        (lambda tensors: tensors.pop("lm_head.weight"), "1 weight (lm_head.weight)"),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.ones(10, 64)}),
            "model.layers.0.mlp.up_proj.weight is 10 x 64 in the files, and 160 x 64 by the config",
        ),
    ],
)
def test_weights_that_the_files_do_not_have_are_not_drawn(
    folder: Path, change: Callable[[Tensors], object], words: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(ConfigError) as caught:
        load_model(ModelRequest(folder, dtype=torch.float32))
    assert words in caught.value.what


def test_weights_under_other_names_are_named_with_those_that_are_missing(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update(other=tensors.pop(name)))
    with pytest.raises(ConfigError) as caught:
        load_model(ModelRequest(folder, dtype=torch.float32))
    assert "its files hold 1 weight (other), for which the model has no place" in (caught.value.where or "")


def test_a_head_of_its_own_counts_whatever_the_config_shares(folder: Path, tmp_path: Path) -> None:
    """As transformers has it; and a folder that is written from it says so, for readers who go by the config."""
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"tie_word_embeddings": True}))
    wanted = logits_of(AutoModelForCausalLM.from_pretrained(folder))
    whole, sliced = load_model(ModelRequest(folder, dtype=torch.float32, attention="sdpa")), read_by_slices(folder)
    for lm in (whole, sliced):
        assert logits_of(lm).equal(wanted)
        write_result(lm, folder, tmp_path / "final")
        assert json.loads((tmp_path / "final/config.json").read_text())["tie_word_embeddings"] is False
        assert logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "final")).equal(wanted)


def test_a_head_that_is_written_twice_is_still_shared(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", tied=True)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    for lm in (load_model(ModelRequest(folder, dtype=torch.float32)), read_by_slices(folder)):
        assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
        assert lm.config.tie_word_embeddings


def test_of_two_forms_in_a_folder_slices_are_of_the_one_that_transformers_reads(folder: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", tied=False, seed=5)
    cut_into_shards(folder)
    shutil.copy(other / WEIGHTS, folder)
    wanted = logits_of(AutoModelForCausalLM.from_pretrained(folder))
    assert logits_of(read_by_slices(folder)).equal(wanted)
    assert logits_of(AutoModelForCausalLM.from_pretrained(other)).equal(wanted)


def test_an_index_that_names_another_file_is_read_as_transformers_reads_it(folder: Path) -> None:
    """It says which files belong to the model; what lies in them, they say themselves."""
    cut_into_shards(folder)
    index = json.loads((folder / INDEX).read_text())
    names = list(index["weight_map"])
    first, last = index["weight_map"][names[0]], index["weight_map"][names[-1]]
    assert first != last
    index["weight_map"] |= {names[0]: last, names[-1]: first}
    del index["weight_map"][names[1]]
    (folder / INDEX).write_text(json.dumps(index))
    wanted = logits_of(AutoModelForCausalLM.from_pretrained(folder))
    assert logits_of(read_by_slices(folder)).equal(wanted)
