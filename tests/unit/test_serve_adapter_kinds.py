"""Adapters served by rows count as peft counts them, or are left to peft."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM

from duoka.errors import ConfigError
from duoka.model.build import load_adapter
from duoka.model.slots import SequenceCache
from duoka.serve.api.start import Settings, build_service
from duoka.serve.batching.adapters import RowAdapters, why_not_by_rows
from duoka.serve.load_run import Trained, find_trained
from duoka.serve.score_tasks import weights_digest

ONE, ALL = "layers.1.self_attn.q_proj", "q_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", tied=False)


def read(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "pattern",
    [
        {ALL: 32},
        {ONE: 32},
        {ONE: 32, ALL: 2},
        {ALL: 2, ONE: 32},
        {r".*\.1\..*q_proj": 32},
        {r"layers\.[01]\.mlp\.down_proj": 32},
        {r"^model\.layers\.0\..*": 32},
        {"^layers.0.*": 32},
        {"q_proj|down_proj": 32},
        {"self_attn": 32},
        {"proj": 32},
    ],
)
@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")
@pytest.mark.parametrize("rslora", [False, True])
def test_alphas_and_ranks_by_pattern_are_those_of_peft(
    folder: Path, tmp_path: Path, pattern: dict[str, int], rslora: bool
) -> None:
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], alpha_pattern=pattern, use_rslora=rslora,
        rank_pattern=dict.fromkeys(pattern, 2), init_lora_weights=False,
    )  # fmt: skip
    peft.get_peft_model(read(folder), settings).save_pretrained(tmp_path)
    ids = torch.arange(8, 28)[None]
    plain = read(folder)
    rows = RowAdapters(plain)
    rows.add("it", tmp_path)
    rows.set_rows(["it"])
    with torch.no_grad():
        ours = plain(ids).logits
        theirs = peft.PeftModel.from_pretrained(read(folder), tmp_path).eval()(input_ids=ids).logits
    assert torch.allclose(ours, theirs, atol=1e-5), (ours - theirs).abs().max()


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "begun by pissa_niter_4, which changes the weights below it"),
        ({"init_lora_weights": "olora"}, "begun by olora"),
        ({"alora_invocation_tokens": [5, 6]}, "from certain tokens of a text on"),
        ({"init_lora_weights": "gaussian"}, ""),
        ({"init_lora_weights": True}, ""),
    ],
)
def test_adapters_that_are_more_than_products_are_left_to_peft(tmp_path: Path, made: dict, reason: str) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, **made}), "utf-8")
    save_file({"base_model.model.q.lora_A.weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    found = why_not_by_rows(tmp_path)
    assert reason in found and bool(found) == bool(reason)


@pytest.mark.parametrize(
    "made",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [20, 21]},
        {"target_modules": ["q_proj"], "lora_bias": True},
    ],
)
def test_what_lies_beside_products_counts_in_an_answer(folder: Path, tmp_path: Path, made: dict) -> None:
    torch.manual_seed(0)
    adapted = peft.get_peft_model(read(folder), peft.LoraConfig(r=4, init_lora_weights=False, **made))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "trainable_tokens" in name or name.endswith("lora_B.default.bias"):
                parameter.add_(1.0)
    adapted.save_pretrained(tmp_path)
    facts = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    told = json.dumps(facts | {"base_model_name_or_path": str(folder)})
    (tmp_path / "adapter_config.json").write_text(told, encoding="utf-8")
    ids = list(range(8, 28))
    with torch.no_grad():
        wanted = adapted.eval()(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    settings = Settings(num_rows=1, cache_bytes=1 << 20, precision="fp32")
    service = build_service(find_trained(str(tmp_path), say=print), {}, settings)
    assert list(service.adapters.values()) == [None], "served alone"
    model = service.scheduler.model
    found = model.read(SequenceCache(len(ids)), ids, 0, None, keep_all=True)[:-1].log_softmax(-1)
    assert float((found - wanted).abs().max()) < 1e-4


def test_a_score_is_of_the_adapters_that_answered_by_what_they_hold(folder: Path, tmp_path: Path) -> None:
    """Of LLaMA-Factory's files: adapters below the last one; trained anew, one has the name of the one before."""
    below, above = tmp_path / "below", tmp_path / "above"
    for place in (below, above):
        peft.get_peft_model(read(folder), peft.LoraConfig(r=2, target_modules=[ALL])).save_pretrained(place)
    trained = Trained("m", folder, str(folder), adapter=above, merged=(str(below),))
    seen = [weights_digest(trained)]
    assert weights_digest(trained) == seen[0]
    for place in (below, above):
        facts = json.loads((place / "adapter_config.json").read_text())
        (place / "adapter_config.json").write_text(json.dumps(facts | {"lora_alpha": 3}))
        seen.append(weights_digest(trained))
        tensors = {name: value + 1 for name, value in load_file(place / "adapter_model.safetensors").items()}
        save_file(tensors, place / "adapter_model.safetensors", metadata={"format": "pt"})
        seen.append(weights_digest(trained))
    assert len(set(seen)) == 5


def test_an_adapter_that_peft_would_pass_over_in_silence_is_read_nowhere(folder: Path, tmp_path: Path) -> None:
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6])
    peft.get_peft_model(read(folder), settings).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"aLoRA.*is not computed here"):
        load_adapter(read(folder), tmp_path)
    with pytest.raises(ConfigError, match=r"aLoRA.*is not computed here"):
        RowAdapters(read(folder)).add("it", tmp_path)
