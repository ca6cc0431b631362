"""Adapters that another tool wrote, as PEFT leaves them: all of one counts, or it is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM

from duoka.cli import run as duoka
from duoka.errors import ConfigError
from duoka.model.build import load_adapter, load_model
from duoka.model.export import PROBES
from duoka.model.request import ModelRequest
from duoka.serve.load_run import find_trained, load_chat_tokenizer

WEIGHTS = "adapter_model.safetensors"
LINEARS = ["q_proj", "v_proj", "up_proj"]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "apart"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("base") / "model", tied=request.param)


def write_adapter(base: Path, folder: Path, *, tokens: int = 0, targets=LINEARS, **settings) -> torch.Tensor:
    """By PEFT alone; returns the logits that its model has."""
    lm = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(1)
    if tokens:
        lm.resize_token_embeddings(tokens)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, **settings)
    adapted = peft.get_peft_model(lm, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    adapted.save_pretrained(folder)
    return logits_of(adapted)


def logits_of(lm: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return lm.eval()(input_ids=torch.arange(3, 40)[None]).logits


def read(base: Path, adapter: Path) -> torch.nn.Module:
    return load_adapter(load_model(ModelRequest(base, dtype=torch.float32, attention="sdpa")), adapter)


def without_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]


def with_a_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        tensors[name.replace(".layers.1.", ".layers.2.")] = tensors[name].clone()


def by_other_names(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("base_model.model.")] = tensors.pop(name)


def of_a_wider_model(tensors: Tensors) -> None:
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    tensors[name] = torch.zeros(7, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_layer, "the model has a place for 6 weights"),
        (with_a_layer, "its file holds 6 weights"),
        (by_other_names, "its file holds 12 weights (model.layers.0.mlp.up_proj.lora_A.weight"),
        (of_a_wider_model, "size mismatch for base_model.model.model.layers.0.mlp.up_proj.lora_B"),
    ],
)
def test_an_adapter_of_which_a_part_would_not_count_is_refused(
    base: Path, tmp_path: Path, change: Callable[[Tensors], None], words: str
) -> None:
    write_adapter(base, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    change(tensors)
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        read(base, tmp_path)
    assert words in (caught.value.where or "") and "that it was trained on" in (caught.value.fix or "")


def test_an_adapter_without_a_whole_module_that_it_should_have_is_refused(base: Path, tmp_path: Path) -> None:
    """PEFT's KeyError was printed as it is: a name in quotes, and not that it is missing."""
    write_adapter(base, tmp_path, modules_to_save=["lm_head"])
    tensors = load_file(tmp_path / WEIGHTS)
    (name,) = (name for name in tensors if "lm_head" in name and "lora" not in name)
    del tensors[name]
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"lacks {name}, which its adapter_config.json says it has"):
        read(base, tmp_path)


def test_a_damaged_adapter_is_named(base: Path, tmp_path: Path) -> None:
    write_adapter(base, tmp_path)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:500])
    with pytest.raises(ConfigError, match=r"the adapter in .* could not be loaded"):
        read(base, tmp_path)


@pytest.mark.parametrize("whole", [None, ["embed_tokens", "lm_head"]], ids=["drawn", "learned"])
def test_an_adapter_with_tokens_of_its_own_brings_their_embeddings(
    base: Path, tmp_path: Path, whole: list[str] | None
) -> None:
    wanted = write_adapter(base, tmp_path, tokens=300, modules_to_save=whole)
    lm = read(base, tmp_path)
    assert wanted.shape[-1] == 300 and logits_of(lm).equal(wanted)


def test_an_adapter_without_a_tokenizer_has_its_bases(base: Path, tmp_path: Path, capsys) -> None:
    """PEFT writes two files and no more. `export` makes a folder of it that transformers answers the same from."""
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    wanted = write_adapter(base, adapter)
    trained = find_trained(str(adapter), say=print)
    tokenizer = load_chat_tokenizer(trained)
    assert tokenizer.encode(PROBES[0]) and tokenizer.template_name == "model"
    assert duoka(["export", str(adapter), "-o", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_difference"] < 1e-4
    assert torch.allclose(logits_of(AutoModelForCausalLM.from_pretrained(out)), wanted, atol=1e-5)
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_a_tokenizer_that_came_with_an_adapter_goes_before_its_bases(base: Path, tmp_path: Path) -> None:
    write_adapter(base, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path)
    assert find_trained(str(tmp_path), say=print).tokenizer_folder == tmp_path


def test_an_adapter_beside_the_embedding_is_merged_into_the_embedding_alone(base: Path, tmp_path: Path, capsys) -> None:
    """Where the head has the embedding's weights, it goes on with them as they were."""
    wanted = write_adapter(base, tmp_path / "adapter", targets=[*LINEARS, "embed_tokens"])
    assert duoka(["export", str(tmp_path / "adapter"), "-o", str(tmp_path / "out")]) == 0
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits_of(lm), wanted, atol=1e-5) and not lm.config.tie_word_embeddings


def test_layers_that_an_adapter_has_twice_stay_apart(base: Path, tmp_path: Path, capsys) -> None:
    write_adapter(base, tmp_path / "adapter", layer_replication=[[0, 2], [1, 2]])
    assert duoka(["export", str(tmp_path / "adapter"), "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "layers twice" in said and "--adapter" in said


def test_what_peft_does_not_merge_stays_apart(base: Path, tmp_path: Path, capsys) -> None:
    write_adapter(base, tmp_path / "adapter", lora_bias=True)
    assert duoka(["export", str(tmp_path / "adapter"), "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "PEFT does not merge this adapter" in said and "--adapter" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("named", ["", None, "gone"])
def test_an_adapter_whose_base_is_not_known_takes_no_other(
    base: Path, tmp_path: Path, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name of no letters is the folder that one is in, which may well hold a model."""
    write_adapter(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": named}))
    monkeypatch.chdir(base)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="trained on") as refused:
        find_trained(str(tmp_path / "adapter"), say=print)
    assert "base_model_name_or_path" in (refused.value.fix or "")
