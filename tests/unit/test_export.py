"""Merging and writing a model: plain transformers and PEFT are the oracle."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from families import write_family
from needs import since
from safetensors.torch import load_file, save_file
from tiny import build_tiny_tokenizer, write_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from duoka.config.schema import LoraConfig
from duoka.data.tokens.tokenizer import load_tokenizer
from duoka.errors import ConfigError, DuokaError
from duoka.hub.adapter_files import check_fit
from duoka.model import export
from duoka.model.build import load_adapter, load_model
from duoka.model.dtypes import narrow
from duoka.model.export import Sources, export_adapter, export_model
from duoka.model.request import ModelRequest
from duoka.model.result import add_stop_token, write_result
from duoka.model.shards import build_without_memory
from duoka.parallel.mesh import Mesh
from duoka.store.final_folder import ResultSources, write_final

TEXT = "Who are you? 我是多卡。"


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT folder whose adapter changes the answers: B is random, not the zeros that training starts from."""
    lm = load_model(ModelRequest(tiny_model, dtype=torch.float32, lora=LoraConfig(rank=4, alpha=8.0)))
    torch.manual_seed(1)
    for name, parameter in lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    folder = tmp_path_factory.mktemp("adapter") / "final"
    write_result(lm, tiny_model, folder)
    return folder


def export_from(adapter: Path, base: Path, folder: Path, dtype: torch.dtype = torch.float32) -> export.Exported:
    lm = load_adapter(load_model(ModelRequest(base, dtype=torch.float32, attention="sdpa")), adapter).eval()
    return export_model(lm, load_tokenizer(adapter), Sources(base, adapter), folder, dtype)


def logits_of(model: torch.nn.Module, folder: Path) -> torch.Tensor:
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        return model.eval()(ids).logits.float()


def test_merged_logits_are_those_of_base_and_adapter(adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    exported = export_from(adapter, tiny_model, tmp_path / "out")

    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    plain = logits_of(base, tiny_model)
    wanted = logits_of(peft.PeftModel.from_pretrained(base, adapter), tiny_model)
    got = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32), tmp_path / "out")
    assert (wanted - plain).abs().max() > 0.1, "the adapter changes nothing, so this test shows nothing"
    assert (got - wanted).abs().max() < 1e-4
    assert exported.max_difference < 1e-4 and exported.same_top_share == 1.0


def test_tied_weights_stay_tied_and_the_base_is_untouched(adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    before = hashlib.sha256((tiny_model / "model.safetensors").read_bytes()).hexdigest()
    export_from(adapter, tiny_model, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert hashlib.sha256((tiny_model / "model.safetensors").read_bytes()).hexdigest() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_type_asked_for_is_the_type_written(
    adapter: Path, tiny_model: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    exported = export_from(adapter, tiny_model, tmp_path / "out", dtype)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert 0 < exported.max_difference < 0.03 * exported.max_logit


def test_an_exported_folder_holds_all_that_chatting_needs(adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    export_from(adapter, tiny_model, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not any("adapter" in name for name in names)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer.chat_template
        and tokenizer(TEXT).input_ids == AutoTokenizer.from_pretrained(tiny_model)(TEXT).input_ids
    )


def test_every_template_of_a_tokenizer_goes_with_the_weights(tmp_path: Path) -> None:
    """As transformers writes several: the usual one beside the tokenizer, the others in a folder of their own."""
    tokenizer = build_tiny_tokenizer()
    templates = {"default": str(tokenizer.chat_template), "tool_use": "{{ tools }}" + str(tokenizer.chat_template)}
    tokenizer.chat_template = templates
    base = write_tiny_model(tmp_path / "base")
    tokenizer.save_pretrained(base)
    lm = load_model(ModelRequest(base, dtype=torch.float32))
    write_result(lm, base, tmp_path / "final")
    for folder in (base, tmp_path / "final"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == templates
        assert load_tokenizer(folder).tool_template == templates["tool_use"]


def test_nothing_is_overwritten(adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not empty"):
        export_from(adapter, tiny_model, tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "thesis.txt"]


def test_an_empty_folder_may_be_filled(adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_from(adapter, tiny_model, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_merge_that_answers_differently_is_refused_and_leaves_nothing(
    adapter: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def merge_wrongly(self: peft.PeftModel, **options: object) -> torch.nn.Module:
        return self.unload()  # drops the adapter

    monkeypatch.setattr(peft.PeftModel, "merge_and_unload", merge_wrongly, raising=False)
    with pytest.raises(DuokaError, match="does not answer as base"):
        export_from(adapter, tiny_model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_template_that_is_not_the_models_own_goes_with_it(adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Trained with another template and another end of turn: whoever serves the folder must know both."""
    lm = load_adapter(load_model(ModelRequest(tiny_model, dtype=torch.float32, attention="sdpa")), adapter).eval()
    own = lm.generation_config.eos_token_id
    sources = Sources(tiny_model, adapter, chat_template="{{ messages[0]['content'] }}!")
    export_model(lm, load_tokenizer(adapter), sources, tmp_path / "out", torch.float32, stop_id=9)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi!"
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["eos_token_id"] == [own, 9]


def test_the_folder_of_a_run_knows_what_ends_an_answer_as_an_export_does(tiny_model: Path, tmp_path: Path) -> None:
    lm = load_model(ModelRequest(tiny_model, dtype=torch.float32))
    own = lm.generation_config.eos_token_id
    write_final(lm, Mesh(), lambda: ResultSources(tiny_model, tiny_model, stop_id=9), tmp_path / "final")
    written = json.loads((tmp_path / "final" / "generation_config.json").read_text())
    assert written["eos_token_id"] == [own, 9]


@since(transformers="5.23")
@pytest.mark.parametrize("odd", [{"temperature": 0.9, "top_p": 0.6}, {"pad_token_id": -1}], ids=["Vicuna", "Llama 2"])
def test_a_contradiction_in_a_published_file_stops_no_result(tmp_path: Path, odd: dict) -> None:
    """transformers writes such a file back as it came, and refuses it when what ends an answer is added."""
    base = write_tiny_model(tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **odd}))
    lm = load_model(ModelRequest(base, dtype=torch.float32, attention="sdpa"))
    write_final(lm, Mesh(), lambda: ResultSources(base, base, stop_id=9), tmp_path / "final")
    lm = load_model(ModelRequest(base, dtype=torch.float32, attention="sdpa"))
    export_model(lm, load_tokenizer(base), Sources(base, base), tmp_path / "out", torch.float32, stop_id=9)
    for place in ("final", "out"):
        written = json.loads((tmp_path / place / "generation_config.json").read_text())
        assert written["eos_token_id"] == [2, 9] and written.items() >= odd.items()


def test_what_older_transformers_would_not_write_is_left_out() -> None:
    """Up to 5.17 at least it refuses a contradictory file even as it came: what greedy answers ignore goes."""

    class Older(GenerationConfig):
        def save_pretrained(self, folder: Any, **how: Any) -> None:
            self.validate(strict=True)

    settings = Older(eos_token_id=2, temperature=0.9, top_p=0.6, pad_token_id=-1, do_sample=False)
    with pytest.raises(ValueError, match="temperature"):
        settings.save_pretrained("")
    lm: Any = SimpleNamespace(generation_config=settings)
    add_stop_token(lm, 9)
    settings.save_pretrained("")
    assert settings.eos_token_id == [2, 9] and settings.temperature is settings.pad_token_id is None
    drawn = Older(eos_token_id=2, temperature=0.9, do_sample=True)
    add_stop_token(SimpleNamespace(generation_config=drawn), None)  # type: ignore[arg-type]
    assert drawn.temperature == 0.9 and drawn.eos_token_id == 2


def test_others_may_read_what_was_exported(adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    export_from(adapter, tiny_model, tmp_path / "out")
    closed = [
        path.name for path in [tmp_path / "out", *(tmp_path / "out").iterdir()] if not path.stat().st_mode & 0o004
    ]
    assert not closed


def test_an_adapter_alone_names_its_base(adapter: Path, tiny_model: Path, tmp_path: Path) -> None:
    lm = load_adapter(load_model(ModelRequest(tiny_model, dtype=torch.float32)), adapter)
    export_adapter(lm, Sources(tiny_model, adapter), "some/base", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "some/base"
    theirs, ours = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "out"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_weights_that_are_narrowed_answer_as_a_model_that_was_read_so(tiny_model: Path) -> None:
    """A checkpoint of fp32 weights that is asked in bf16: `lm.to` rounds the rotary frequencies as well."""
    theirs = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    ours, moved = (AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32) for _ in range(2))
    narrow(ours, torch.bfloat16)
    ids = torch.arange(600)[None] % 250 + 5
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
        assert not torch.equal(moved.to(torch.bfloat16)(ids).logits, theirs(ids).logits)
    assert {name: one.dtype for name, one in ours.state_dict().items()} == {
        name: one.dtype for name, one in theirs.state_dict().items()
    }


def test_what_a_narrow_type_cannot_hold_stays_wide_in_every_folder(tmp_path: Path) -> None:
    """A router's bias, of GLM and DeepSeek: near 11 for all, where bf16 tells 1/16 apart; scores are below 1."""
    tokenizer = build_tiny_tokenizer()
    folder = write_family(tmp_path / "base", "glm4_moe", tokenizer=tokenizer)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "e_score_correction_bias" in name)
    tensors[name] = 11 + torch.rand(tensors[name].shape, generator=torch.Generator().manual_seed(0))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    lm = load_model(ModelRequest(folder, dtype=torch.float32, attention="sdpa"))
    write_result(lm, folder, tmp_path / "result", dtype=torch.bfloat16)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"dtype": "bfloat16"}))
    write_final(lm, Mesh(), lambda: ResultSources(folder, folder), tmp_path / "final")
    export_model(lm, load_tokenizer(folder), Sources(folder, folder), tmp_path / "out", torch.bfloat16)
    for place in ("result", "final", "out"):
        found = load_file(tmp_path / place / "model.safetensors")
        assert torch.equal(found[name], tensors[name]), place
        assert found["lm_head.weight"].dtype == torch.bfloat16
        assert json.loads((tmp_path / place / "config.json").read_text())["dtype"] == "bfloat16"
    sharded = build_without_memory(ModelRequest(folder, dtype=torch.bfloat16))
    assert sharded is not None and torch.equal(dict(sharded[0].named_buffers())[name], tensors[name])


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_of_the_head_is_merged_into_the_head_alone_and_goes_on_from_its_folder(
    tied: bool, tmp_path: Path
) -> None:
    base = write_tiny_model(tmp_path / "base", tied=tied)
    lora = LoraConfig(rank=4, alpha=8.0, targets=("lm_head", "q_proj"))
    lm = load_model(ModelRequest(base, dtype=torch.float32, lora=lora))
    torch.manual_seed(1)
    for name, parameter in lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    wanted = logits_of(lm, base)
    export_adapter(lm, Sources(base, base), str(base), tmp_path / "adapter")
    assert all(".lora_" in name for name in load_file(tmp_path / "adapter/adapter_model.safetensors"))
    assert not check_fit(LoraConfig(adapter=str(tmp_path / "adapter")), tmp_path, base)

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    again = logits_of(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter"), base)
    export_from(tmp_path / "adapter", base, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (logits_of(AutoModelForCausalLM.from_pretrained(base), base) - wanted).abs().max() > 0.1
    assert (again - wanted).abs().max() < 1e-5
    assert (logits_of(merged, tmp_path / "out") - wanted).abs().max() < 1e-4
