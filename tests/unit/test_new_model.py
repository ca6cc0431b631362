"""What follows from a depth: sizes, rates, batch and horizon; and weights that any rank can draw for itself."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from duoka.config.derive import derive, rules_kept
from duoka.config.load import load_config, resolved_yaml
from duoka.config.schema import ModelConfig, RunConfig
from duoka.errors import ConfigError, Faults
from duoka.hub.models import check_model, model_folder
from duoka.hub.new_model import MARK, is_new, new_model_folder
from duoka.model.box import Box
from duoka.model.build import load_model
from duoka.model.random_init import DrawnWeights, InitializedWeights
from duoka.model.request import ModelRequest
from duoka.plan.horizon import find_horizon
from duoka.plan.shape import shape_from_config, shape_from_depth
from duoka.runs.folder import RunFolder
from duoka.serve.load_run import find_trained, load_trained
from duoka.train.samples import text_tokens


def load(tmp_path, text, *overrides):
    (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
    return load_config(tmp_path / "x.yaml", overrides)


BARE = "model: {depth: 12, tokenizer: tok}\ndata: {train: [identity]}\n"


def test_depth_twelve_is_what_the_rules_were_found_for(tmp_path):
    config = load(tmp_path, BARE).config
    model, optim = config.model, config.optim
    assert (model.width, model.head_dim, model.kv_heads, model.mlp_width, model.context) == (768, 128, 6, 2304, 2048)
    assert (config.stage.name, config.data.max_length) == ("pretrain", 2048)
    assert (config.train.global_batch, config.train.tokens, config.train.epochs) == ("524288 tokens", "20x", None)
    assert (optim.name, optim.lr, optim.schedule) == ("muon", 0.02, "wsd")


def test_rates_follow_the_batch_and_the_width(tmp_path):
    half = load(tmp_path, BARE, "train.global_batch=131072 tokens").config.optim
    whole = load(tmp_path, BARE).config.optim
    for name in ("lr", "adamw_lr", "embedding_lr", "head_lr"):
        assert getattr(half, name) == pytest.approx(getattr(whole, name) / 2, rel=5e-3), name
    wide = load(tmp_path, BARE, "model.width=3072").config.optim
    assert wide.lr == whole.lr and wide.embedding_lr == pytest.approx(whole.embedding_lr / 2, rel=5e-3)
    plain = load(tmp_path, BARE, "optim.name=adamw").config.optim
    assert (plain.lr, plain.adamw_lr, plain.embedding_lr) == (6e-4, None, None)


@pytest.mark.parametrize(
    ("overrides", "gain"),
    [
        (["train.max_steps=40"], 1.0),
        (["train.max_steps=512"], 0.5),
        (["train.tokens=1048576"], 0.5),  # of 2,048 each
        (["train.max_steps=512", "train.tokens=1B"], 0.5),  # whatever ends it first
        (["train.max_steps=100000"], 1 / 16),
        (["train.epochs=3"], 1 / 16),  # nobody knows how many steps that is
        ([], 1 / 16),
        (["train.max_steps=40", "train.global_batch=2097152 tokens"], 2.0),
    ],
)
def test_short_runs_take_longer_steps(tmp_path, overrides, gain):
    config = load(tmp_path, BARE, "train.global_batch=2048 tokens", *overrides).config
    assert config.optim.lr == pytest.approx(0.02 * gain, rel=5e-3)
    assert config.optim.head_lr == pytest.approx(0.006 * gain, rel=5e-3)


@pytest.mark.parametrize(
    ("depth", "width", "batch"),
    [(1, 128, 2**15), (4, 256, 2**17), (6, 384, 2**18), (12, 768, 2**19), (20, 1280, 2**20), (26, 1664, 2**20)],
)
def test_width_and_batch_of_other_depths(tmp_path, depth, width, batch):
    config = load(tmp_path, BARE, f"model.depth={depth}").config
    assert (config.model.width, config.train.global_batch) == (width, f"{batch} tokens")


def test_what_is_written_stays_and_is_told_apart(tmp_path):
    loaded = load(tmp_path, BARE, "model.head_dim=64", "optim.lr=0.01", "train.max_steps=100")
    assert loaded.config.model.kv_heads == 12 and loaded.config.train.tokens is None
    assert loaded.origins["model.width"] == "from depth" and loaded.origins["optim.lr"] == "command line"
    own, other = rules_kept(loaded.config)
    assert {"model.head_dim": 64, "optim.lr": 0.01}.items() == other.items() and own["model.width"] == 768


def test_a_resolved_config_derives_nothing_anew(tmp_path):
    """A worker, and a resume under a later version of the rules, read what was decided."""
    loaded = load(tmp_path, BARE)
    again = load(tmp_path, resolved_yaml(loaded))
    assert again.config.model_copy(update={"output": ""}) == loaded.config.model_copy(update={"output": ""})
    assert "from depth" not in again.origins.values()


def test_written_steps_end_the_run_whatever_they_pass_over(tmp_path):
    assert load(tmp_path, BARE, "train.max_steps=1000").config.train.epochs is None
    assert load(tmp_path, BARE, "train.max_steps=1000", "train.epochs=2").config.train.epochs == 2


def test_adamw_of_eight_bits_takes_the_rate_of_adamw(tmp_path):
    rates = {load(tmp_path, BARE, f"optim.name={name}").config.optim.lr for name in ("adamw", "adamw8bit")}
    assert len(rates) == 1 and rates != {2e-5}


def test_an_optimizer_without_a_rule_takes_any_rate_that_is_written(tmp_path):
    assert load(tmp_path, BARE, "optim.name=lamb", "optim.lr=2e-5").config.optim.lr == 2e-5
    with pytest.raises(Faults) as caught:
        load(tmp_path, BARE, "model.quantization=nf4")
    (fault,) = caught.value.faults  # one advice, and none that another rule refuses
    assert "delete" in fault.fix and "rank" not in fault.fix


def test_a_config_without_depth_is_left_alone(tmp_path):
    config = load(tmp_path, "model: demo\ndata: {train: [identity]}\n").config
    assert derive(config, ()) == (config, {})


def test_the_horizon_counts_parameters_that_multiply(tmp_path):
    config = load(tmp_path, BARE).config
    horizon = find_horizon(config, shape_from_depth(12, 32768))
    multiply = 12 * (4 * 768**2 + 3 * 768 * 2304) + 32768 * 768
    assert horizon.tokens == pytest.approx(20 * multiply, rel=1e-3)  # norms are counted too
    assert horizon.steps == round(horizon.tokens / 524288)
    billions = find_horizon(load(tmp_path, BARE, "train.tokens=2B tokens").config, shape_from_depth(12, 32768))
    assert (billions.tokens, billions.steps) == (2_000_000_000, 3815)


NAMES = {
    "model.embed_tokens.weight": (700, 96), "lm_head.weight": (130, 8),
    "model.layers.0.self_attn.q_proj.weight": (9, 5),
    "model.layers.1.mlp.down_proj.weight": (7, 3), "model.norm.weight": (11,),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_boxes_drawn_apart_are_those_of_the_whole(name):
    shape, drawn = torch.Size(NAMES[name]), DrawnWeights(3)
    whole = drawn.read(name, shape)
    assert whole.shape == shape
    for size in (2, 3, 4, 7):
        step = -(-shape[0] // size)
        for start in range(0, shape[0], step):
            box = Box((start, *(1 for _ in shape[1:])), (min(step, shape[0] - start), *(n - 2 for n in shape[1:])))
            assert torch.equal(drawn.read(name, shape, box), whole[box.slices])
    if len(shape) == 2 and "down_proj" not in name:
        assert not torch.equal(DrawnWeights(4).read(name, shape), whole)
        wanted = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 0.001}.get(name, shape[1] ** -0.5)
        assert float(whole.std()) == pytest.approx(wanted, rel=0.4)


def test_a_new_folder_is_a_config_and_a_tokenizer(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    model = ModelConfig(depth=2, tokenizer="x", width=64, head_dim=16, kv_heads=4, mlp_width=192, context=128)
    folder = new_model_folder(model, tiny_model, print)
    assert is_new(folder) and folder == new_model_folder(model, tiny_model, print)
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert facts["vocab_size"] == 320 and facts["num_attention_heads"] == 4 and facts["eos_token_id"] == 2
    assert (folder / "tokenizer.json").is_file() and (folder / MARK).is_file()
    os.mkdir(tmp_path / "plain")
    assert folder.stat().st_mode == (tmp_path / "plain").stat().st_mode, "others may read it as they may any folder"


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    model = ModelConfig(depth=2, tokenizer="x", width=64, head_dim=16, kv_heads=4, mlp_width=192, context=128)
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        new_model_folder(model, tmp_path, print)
    assert "duoka data tokenizer" in caught.value.fix
    with pytest.raises(ConfigError, match=r"model.tokenizer is './moved/away'.*no such folder"):
        model_folder(model.model_copy(update={"tokenizer": "./moved/away"}), tmp_path)


def test_a_finished_run_needs_its_tokenizers_folder_no_more(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    run = RunFolder(tmp_path / "run")
    run.final.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, run.final / name)
    sizes = "depth: 2, width: 64, head_dim: 16, kv_heads: 4, mlp_width: 192"
    text = f"model: {{tokenizer: ./moved/away, {sizes}}}\ndata: {{train: [identity]}}\ntrain: {{seed: 5}}\n"
    run.config.write_text(f"{text}output: {run.path}\n", encoding="utf-8")
    found = find_trained(str(run.path), say=print)
    assert found.full == run.final and is_new(found.base)
    base, drawn = (
        load_trained(found, dtype=torch.float32, base_only=True),
        load_model(ModelRequest(found.base, dtype=torch.float32, seed=5)),
    )
    assert all(map(torch.equal, base.parameters(), drawn.parameters())), "the run began with another base"


def test_where_one_token_begins_and_ends_texts_the_beginning_is_cut_first():
    both, apart = SimpleNamespace(bos_id=0, eos_id=0), SimpleNamespace(bos_id=1, eos_id=0)
    assert (
        text_tokens([0, 5, 6, 0, 7], both) == [5, 6] == text_tokens([1, 5, 6, 0, 7], apart) == text_tokens([5, 6], both)
    )


SCRATCH = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": 64},
    "gemma2": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
               "head_dim": 16, "intermediate_size": 48, "vocab_size": 128},
    "qwen3_moe": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
                  "head_dim": 16, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 4,
                  "num_experts_per_tok": 2, "vocab_size": 128},
}  # fmt: skip


@pytest.mark.parametrize("family", SCRATCH)
def test_from_scratch_begins_as_transformers_begins_and_alike_in_every_part(family):
    config = AutoConfig.for_model(family, **SCRATCH[family])
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    drawn, again, other = (InitializedWeights(config, seed) for seed in (3, 3, 4))
    names = dict(theirs.named_parameters(remove_duplicate=False))
    for name in reversed(names):  # in another order than they lie
        again.read(name, names[name].shape)
    for name, parameter in names.items():
        assert drawn.knows(name, parameter.shape) and not drawn.knows(name, torch.Size((1, *parameter.shape)))
        whole = drawn.read(name, parameter.shape)
        assert torch.equal(whole, again.read(name, parameter.shape))
        box = Box((1, *(0 for _ in parameter.shape[1:])), (2, *parameter.shape[1:]))
        assert torch.equal(again.read(name, parameter.shape, box), whole[1:3])
        spread = float(parameter.detach().std())
        if spread == 0:
            assert torch.equal(whole, parameter), name
        else:
            assert not torch.equal(whole, other.read(name, parameter.shape))
            assert float(whole.std()) == pytest.approx(spread, rel=0.25), name
    assert torch.equal(drawn.read("lm_head.weight", names["lm_head.weight"].shape), drawn.read(
        next(iter(names)), next(iter(names.values())).shape)) == bool(config.tie_word_embeddings)  # fmt: skip


def test_a_scratch_folder_takes_another_tokenizers_vocabulary(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "gpt2").mkdir()
    facts = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    facts["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}  # of weights that stay there
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(facts))
    assert round(shape_from_config(facts, where="gpt2").num_parameters / 1e6, 1) == 124.4
    config = RunConfig.model_validate({
        "model": {"name": str(tmp_path / "gpt2"), "from_scratch": True, "tokenizer": str(tiny_model)},
        "data": {"train": ["x"]}, "stage": "pretrain",
    })  # fmt: skip
    assert check_model(config, tmp_path) == []
    folder = model_folder(config.model, tmp_path)
    made = json.loads((folder / "config.json").read_text())
    assert is_new(folder) and made["vocab_size"] % 64 == 0 and made["vocab_size"] < 1000 and made["n_layer"] == 12
    assert (folder / "tokenizer.json").is_file() and not list(folder.glob("*.safetensors"))
    assert "quantization_config" not in made
    alone = config.model.model_copy(update={"tokenizer": None})
    faults = check_model(config.model_copy(update={"model": alone}), tmp_path)
    assert "which has no tokenizer" in faults[0].what
    named = config.model_copy(update={"model": config.model.model_copy(update={"from_scratch": False})})
    assert "from_scratch: true" in check_model(named, tmp_path)[0].fix
