"""Trained adapters that a config names: found, read, refused with a reason, and looked at beside the model."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from duoka.config.load import load_config, resolved_yaml
from duoka.errors import ConfigError, Faults
from duoka.hub.models import check_model
from duoka.serve.load_run import find_trained_on

TARGETS = {"q_proj": (64, 64), "up_proj": (64, 160)}  # of the tiny model: in, out


def write_adapter(folder: Path, *, layers: int = 4, rank: int = 3, targets: Any = None, **facts: Any) -> None:
    """A PEFT folder by hand: the header of its weights is all that is looked at."""
    folder.mkdir(parents=True, exist_ok=True)
    named = TARGETS if targets is None else targets
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "lora_dropout": 0.25, "target_modules": list(named)}
    (folder / "adapter_config.json").write_text(json.dumps(config | facts), "utf-8")
    header = {}
    for layer in range(layers):
        for name, (num_in, num_out) in named.items():
            part = "mlp" if name == "up_proj" else "self_attn"
            for which, shape in (("A", [rank, num_in]), ("B", [num_out, rank])):
                key = f"base_model.model.model.layers.{layer}.{part}.{name}.lora_{which}.weight"
                header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


def load(model: Path, *overrides: str) -> Any:
    Path("x.yaml").write_text(f"model: {model}\ndata: {{train: [identity]}}\nlora: {{adapter: a}}\n", "utf-8")
    return load_config("x.yaml", overrides, checks=(check_model,))


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_is_the_adapters_own_wins_and_is_said(tiny_model: Path) -> None:
    write_adapter(Path("a"))
    loaded = load(tiny_model)
    lora = loaded.config.lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (3, 6.0, 0.25, ("q_proj", "up_proj"))
    assert not loaded.notes and loaded.origins["lora.rank"] == "from lora.adapter"
    other = load(tiny_model, "lora.rank=8", "lora.targets=all", "lora.dropout=0.1")
    assert (other.config.lora.rank, other.config.lora.dropout) == (3, 0.1)
    (note,) = other.notes
    assert "lora.rank 8 (the adapter's: 3), lora.targets all (the adapter's: [q_proj, up_proj])" in note
    # A run's own config says the same when the adapter has gone.
    Path("run.yaml").write_text(resolved_yaml(loaded), "utf-8")
    Path("a").rename("b")
    assert load_config("run.yaml").config == loaded.config
    write_adapter(Path("a"), use_rslora=True)
    assert load(tiny_model).config.lora.alpha == pytest.approx(6 * 3**0.5)
    write_adapter(Path("a"), init_lora_weights="eva")  # which looks at data and leaves the base as it is
    assert load(tiny_model).config.lora.rank == 3


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "there is no such folder"),
        ({"use_dora": True}, "a DoRA adapter"),
        ({"init_lora_weights": "pissa_niter_16"}, "never turned into a plain one"),
        ({"rank_pattern": {"q_proj": 8}}, "different ranks"),
        ({"modules_to_save": ["lm_head"]}, "whole modules beside it"),
        ({"bias": "all"}, "with biases"),
        ({"alora_invocation_tokens": [5, 6]}, "from certain tokens of a text on"),
        ({"lora_bias": True}, "biases of its own"),
        ({"use_qalora": True}, "sums its inputs in groups"),
        ({"layer_replication": [[0, 4], [2, 4]]}, "some layers twice"),
        ({"init_lora_weights": "lora_ga"}, "never turned into a plain one"),
        ({"peft_type": "IA3"}, "of kind IA3"),
        ({"target_modules": ".*_proj"}, "not by a list of names"),
        ({"r": 4}, "are not of rank 4"),
        ({"layers": 3}, "nothing on layer 3's self_attn.q_proj"),
        ({"layers": 5}, "it has layer 4, and here there are 4"),
        ({"targets": {"q_proj": (128, 64)}}, "is for 128 x 64, and here 64 x 64"),
    ],
)
def test_an_adapter_that_cannot_go_on_here_is_refused_before_any_start(
    tiny_model: Path, made: dict[str, Any] | None, words: str
) -> None:
    if made is not None:
        write_adapter(Path("a"), **made)
    with pytest.raises(Faults) as caught:
        load(tiny_model)
    assert words in str(caught.value) and "line 3" in str(caught.value) and len(caught.value.faults) == 1, caught.value


def test_a_run_stands_for_its_result_and_says_when_it_has_none(tiny_model: Path) -> None:
    write_adapter(Path("a/final"))
    assert load(tiny_model).config.lora.rank == 3
    Path("c/checkpoints").mkdir(parents=True)
    with pytest.raises(Faults, match="a run that has not ended"):
        load(tiny_model, "lora.adapter=c")
    with pytest.raises(Faults, match=r"is the adapter in '\./a' again: it would count twice"):
        load(tiny_model, "lora.merge=[./a]")
    with pytest.raises(ConfigError, match="names an adapter twice"):
        find_trained_on("demo", ["a", "./a/final/../../a", "a"], say=print)
    with pytest.raises(Faults, match="which holds a whole model"):
        load(tiny_model, f"lora.adapter={tiny_model}")


def test_adapters_are_laid_into_weights_that_lie_as_peft_does(tmp_path: Path) -> None:
    import peft
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from duoka.config.schema import LoraConfig
    from duoka.model.adapters import Earlier

    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2)).eval()
    ids = torch.arange(8, 24)[None]
    for targets in (["attn.c_proj"], ["c_attn", "c_proj"]):  # the first is square: it would fit either way
        settings = peft.LoraConfig(r=2, lora_alpha=8, target_modules=targets, fan_in_fan_out=True)
        adapted = peft.get_peft_model(copy.deepcopy(plain), settings)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_()
        adapted.save_pretrained(tmp_path / targets[0])
        ours = copy.deepcopy(plain)
        below = Earlier.of(LoraConfig(merge=(str(tmp_path / targets[0]),)), Path())
        assert below is not None
        below.merge_into(ours)
        with torch.no_grad():
            assert torch.allclose(ours(ids).logits, adapted.eval()(input_ids=ids).logits, atol=1e-4)
            assert not torch.allclose(ours(ids).logits, plain(ids).logits, atol=1e-2)
