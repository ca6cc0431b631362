"""Of model types in no table, plans know what layers keep: measured on fake tensors, held to bytes of real ones."""

import json

import held_layers
import pytest
import torch
from families import write_family
from transformers import AutoConfig

from duoka.config.schema import DataConfig, DataSource, ModelConfig, RunConfig
from duoka.model import kept_bytes, native
from duoka.model.kept_bytes import measure_kept, read_measured_shape
from duoka.plan.activations import activation_bytes_per_token
from duoka.plan.layout import Layout
from duoka.plan.recipe import Work
from duoka.plan.shape import read_shape, shape_from_config
from duoka.runs.kept import with_kept

# A family that plans know by rows, one with other norms, one of convolutions, one of linear attention in most layers.
LINEAR = {f"linear_{name}": size for name, size in (("num_key_heads", 4), ("key_head_dim", 64), ("value_head_dim", 64))}
KINDS = {
    "llama": {},
    "cohere2": {},
    "lfm2": {"block_ff_dim": 704, "full_attn_idxs": [], "layer_types": ["conv"] * 3},
    "qwen3_5_text": {**LINEAR, "linear_num_value_heads": 4, "layer_types": ["linear_attention"] * 3},
}
SCANS = {
    "mamba": {"expand": 2},
    "mamba2": {"num_heads": 16, "head_dim": 32, "state_size": 64, "expand": 2, "n_groups": 1},
}
WAYS = {"full bf16": "full, bf16", "lora bf16": "lora, bf16", "full fp32": "full, fp32"}


def run_config():
    return RunConfig(model=ModelConfig(name="mine"), data=DataConfig(train=(DataSource(name="identity"),)))


def facts_of(name):
    return {"model_type": name, **held_layers.SIZES, **KINDS[name], "num_hidden_layers": 3}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_measured_is_what_real_layers_hold(monkeypatch, name):
    """Or somewhat more: its documents are of different lengths, and those of the oracle as long as each other."""
    monkeypatch.setitem(held_layers.FAMILIES, name, {key: v for key, v in KINDS[name].items() if key != "layer_types"})
    if name == "qwen3_5_text":
        monkeypatch.setitem(held_layers.FAMILIES[name], "full_attention_interval", 10**6)
    for way, real in list(WAYS.items())[: 1 if name == "llama" else None]:
        kept = measure_kept(facts_of(name), way)
        assert 0.97 < kept[way] / held_layers.held(name, real) < 1.18, way
        assert kept[f"working {way}"] > 0


@pytest.mark.parametrize("name", SCANS)
def test_scans_hold_what_is_measured_as_their_kernels_hold_it(monkeypatch, tmp_path, name):
    """The oracle's documents are short, and a convolution holds some tokens more of each than it has."""
    monkeypatch.setitem(held_layers.FAMILIES, name, SCANS[name])
    sizes = {"vocab_size": 512, "hidden_size": held_layers.SIZES["hidden_size"], "num_hidden_layers": 3}
    AutoConfig.for_model(name, **sizes, **SCANS[name]).save_pretrained(tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))  # with what JSON has no word for
    kept = measure_kept(facts, "full fp32")
    assert 0.9 < kept["full fp32"] / held_layers.held(name, "full, fp32") < 1.27
    if native.find() is not None or name != "mamba":  # in torch's words Mamba 1 holds states of all tokens
        assert kept["working full fp32"] < 3 * kept["full fp32"]


def test_plans_of_types_in_no_table_take_it():
    facts = facts_of("qwen3_5_text")
    guessed = shape_from_config(facts)
    measured = with_kept(guessed, facts, run_config(), lambda facts, way: {way: 9000.0, f"working {way}": 10.0})
    layout = Layout(precision="bf16")
    assert activation_bytes_per_token(Work(measured, None), layout)[0] == 9000
    assert activation_bytes_per_token(Work(guessed, None), layout)[0] != 9000
    assert "measured" in activation_bytes_per_token(Work(measured, None), layout)[1]


def test_it_is_measured_once_and_only_where_no_row_knows(tmp_path, monkeypatch):
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    asked = []
    monkeypatch.setattr(kept_bytes, "measure_kept", lambda facts, way: asked.append(way) or {way: 5.0})
    folder = write_family(tmp_path / "lfm2", "lfm2")
    first, again = read_measured_shape(folder, run_config()), read_measured_shape(folder, run_config())
    assert first == again and first.kept == (("full bf16", 5.0),) and asked == ["full bf16"]
    llama = write_family(tmp_path / "llama", "llama")
    assert read_measured_shape(llama, run_config()) == read_shape(llama) and asked == ["full bf16"]


def test_what_is_refused_or_damaged_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    facts = facts_of("lfm2")
    shape, answers = shape_from_config(facts), [None, {"full bf16": 1.0}, {"full bf16": 2.0}]

    def look():
        return with_kept(shape, facts, run_config(), lambda *_: answers.pop(0)).kept

    assert (look(), look(), look()) == ((), (("full bf16", 1.0),), (("full bf16", 1.0),))
    (file,) = (tmp_path / "cache" / "kept").iterdir()
    for damaged in ("[1]", '{"full', ""):
        answers[:] = [{"full bf16": 2.0}]
        file.write_text(damaged, encoding="utf-8")
        assert look() == (("full bf16", 2.0),)


def refuse(*given, **told):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 32768 bytes")


def test_measuring_draws_nothing_and_needs_no_gradients_around_it(monkeypatch):
    before = torch.random.get_rng_state()
    with torch.no_grad():
        assert measure_kept(facts_of("lfm2"), "full fp32").keys() == {"full fp32", "working full fp32"}
    assert torch.equal(before, torch.random.get_rng_state())
    monkeypatch.setattr(kept_bytes, "tiny_config", refuse)
    assert measure_kept(facts_of("lfm2"), "full bf16") is None


def test_code_that_takes_no_fake_tensors_leaves_the_guess(tmp_path, monkeypatch):
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    assert measure_kept({"model_type": "nobodys"}, "full bf16") == {}
    folder = write_family(tmp_path / "lfm2", "lfm2")
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"model_type": "nobodys"}
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    assert read_measured_shape(folder, run_config()).kept == ()
