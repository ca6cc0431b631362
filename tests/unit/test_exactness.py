"""The self-test of architectures: what it finds, what a run makes of it, and what it leaves alone."""

import json

import pytest
import torch
from families import family_config, write_family

from duoka.comm.world import World
from duoka.config.schema import DataConfig, DataSource, LoraConfig, ModelConfig, ParallelConfig, RunConfig
from duoka.errors import ConfigError, DoesNotFit
from duoka.model import exactness
from duoka.model.attention import register_attention
from duoka.model.build import LossModel, load_model
from duoka.model.exactness import SelfTest
from duoka.model.fused import apply_fused
from duoka.model.request import ModelRequest
from duoka.model.row_choice import check_stages, choose_rows, find_passes
from duoka.model.tiny_copy import build_tiny, tiny_config
from duoka.parallel.apply import parallelize
from duoka.parallel.mesh import build_mesh
from duoka.plan.activations import activation_bytes_per_token
from duoka.plan.layout import Layout
from duoka.plan.own_attention import OWN_ATTENTION
from duoka.plan.recipe import Work
from duoka.plan.shape import demo_shape


@pytest.fixture
def fresh(monkeypatch):
    """No architecture has been tried yet in this process."""
    monkeypatch.setattr(exactness, "KNOWN", {})


def config_folder(path, model_type, **changes):
    config = family_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(path)
    return path


def run_config(folder, *, stage="sft", strategy="auto", sequence=1, **data):
    return RunConfig(
        stage=stage,
        model=ModelConfig(name=str(folder)),
        data=DataConfig(train=(DataSource(name="identity"),), **data),
        parallel=ParallelConfig(strategy=strategy, sequence=sequence),
    )


def test_a_llama_is_cut_into_stages_and_a_gpt2_is_not(tmp_path, fresh):
    model = ModelConfig(name="mine")
    check_stages(model, config_folder(tmp_path / "llama", "llama"))
    with pytest.raises(ConfigError, match="cannot cut model type gpt2") as refused:
        check_stages(model, config_folder(tmp_path / "gpt2", "gpt2"))
    assert "in two stages, beside the whole" in refused.value.where


def test_memory_that_the_system_refuses_is_no_fault_of_the_model(tmp_path, fresh, monkeypatch):
    """Under `ulimit -v` a Llama could not be tried: use a decoder-only language model, it was told."""

    def refuse(*given, **told):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 32768 bytes")

    folder = config_folder(tmp_path / "llama", "llama")
    monkeypatch.setattr(exactness, "build_tiny", refuse)
    with pytest.raises(DoesNotFit):
        check_stages(ModelConfig(name="mine"), folder)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_a_mixture_whose_config_asks_for_router_logits_is_cut_into_stages_too(tmp_path, fresh, family):
    check_stages(ModelConfig(name="mine"), config_folder(tmp_path, family, output_router_logits=True))


def test_a_llama_is_packed_with_our_head(tmp_path, fresh):
    folder = config_folder(tmp_path, "llama")
    rows = choose_rows(run_config(folder), folder)
    assert rows.packing and not rows.notes
    assert rows.applied_to(run_config(folder)).data.packing is True
    assert not find_passes(run_config(folder).model, folder, packing=True).own_logits


@pytest.mark.parametrize("model_type", ["stablelm", "lfm2", "qwen3_5_text"])
def test_layers_that_drop_the_borders_or_hold_state_are_told_of_them(tmp_path, fresh, model_type):
    rows = choose_rows(run_config(config_folder(tmp_path, model_type)), tmp_path)
    assert rows.packing and not rows.notes


def test_what_packing_would_change_is_padded_with_a_note(tmp_path, fresh):
    folder = config_folder(tmp_path, "bart")
    (note,) = choose_rows(run_config(folder), folder).notes
    assert "bart" in note and "states of its layers run on" in note and "%" in note


def test_packing_that_was_asked_for_and_is_not_exact_is_refused(tmp_path, fresh):
    folder = config_folder(tmp_path, "bart")
    with pytest.raises(ConfigError, match=r"data\.packing is true, and documents of .* see each other"):
        choose_rows(run_config(folder, packing=True), folder)
    with pytest.raises(ConfigError, match="stage pretrain learns rows that hold several documents"):
        choose_rows(run_config(folder, stage="pretrain"), folder)
    with pytest.raises(ConfigError, match=r"data\.fixed_rows makes rows that hold several documents"):
        choose_rows(run_config(folder, fixed_rows=True), folder)


@pytest.mark.parametrize("asked", [{"packing": False}, {"strategy": "dp"}])
def test_padding_that_was_asked_for_needs_no_note(tmp_path, fresh, asked):
    folder = config_folder(tmp_path, "bart")
    rows = choose_rows(run_config(folder, **asked), folder)
    assert not rows.packing and not rows.notes


@pytest.mark.parametrize("model_type", ["bert", "doge"])
def test_what_is_exact_in_no_way_is_refused(tmp_path, fresh, model_type):
    folder = config_folder(tmp_path, model_type)
    for config in (run_config(folder), run_config(folder, packing=False)):
        with pytest.raises(
            ConfigError, match=f"does not compute model type {model_type} as transformers does"
        ) as found:
            choose_rows(config, folder)
        assert found.value.exit_code == 2 and found.value.where and found.value.fix


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [("falcon", "sdpa"), ("llama4_text", "sdpa"), ("bloom", "eager"), ("gpt_neo", "eager"), ("deepseek_v32", "sdpa")],
)
def test_what_our_attention_does_not_know_is_padded_and_computed_by_the_models_own(
    tmp_path, fresh, model_type, attention
):
    folder = config_folder(tmp_path, model_type)
    rows = choose_rows(run_config(folder), folder)
    assert not rows.packing and f"attention as model type {model_type}" in rows.notes[-1]
    assert ("scores of all pairs" in rows.notes[-1]) == (attention == "eager") == rows.writes_scores
    assert OWN_ATTENTION[model_type] == rows.writes_scores, "what `duoka plan` knows without a copy"
    plain = demo_shape()
    kept = [activation_bytes_per_token(Work(one, None), Layout(), 100)[0] for one in (plain, rows.seen_in(plain))]
    assert kept[1] - kept[0] == 4 * plain.num_heads * 100 * rows.writes_scores
    assert find_passes(run_config(folder).model, folder, packing=False).attention == attention
    with pytest.raises(ConfigError, match="stage pretrain learns rows that hold several documents"):
        choose_rows(run_config(folder, stage="pretrain"), folder)


def test_rows_are_not_cut_over_ranks_whose_attention_does_not_exchange(tmp_path, fresh):
    folder = config_folder(tmp_path, "deepseek_v32")
    with pytest.raises(ConfigError, match=r"parallel\.sequence is 2, and (model type|rows of model type)"):
        choose_rows(run_config(folder, sequence=2, packing=False), folder)


def test_a_head_of_more_than_a_matrix_leaves_the_loss_to_the_models_logits(tmp_path, fresh):
    folder = config_folder(tmp_path, "modernbert-decoder")
    assert choose_rows(run_config(folder), folder).packing
    assert find_passes(run_config(folder).model, folder, packing=True).own_logits


def test_rows_are_cut_where_tokens_meet_in_attention_alone(tmp_path, fresh):
    for number, model_type in enumerate(("gemma2", "mixtral", "deepseek_v3")):
        folder = config_folder(tmp_path / str(number), model_type)
        assert choose_rows(run_config(folder, sequence=2, packing=False), folder).packing is False
    for number, model_type in enumerate(("lfm2", "qwen3_next", "falcon_h1")):
        folder = config_folder(tmp_path / f"mixing-{number}", model_type)
        with pytest.raises(ConfigError, match=f"rows of model type {model_type} cannot be cut"):
            choose_rows(run_config(folder, sequence=2), folder)


def test_rows_are_not_cut_where_rotation_depends_on_their_length(tmp_path, fresh):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = config_folder(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=64)
    assert choose_rows(run_config(folder, sequence=2, max_length=64), folder).packing
    with pytest.raises(ConfigError, match="beyond 64 tokens"):
        choose_rows(run_config(folder, sequence=2, max_length=128), folder)


def test_windows_are_tried_at_lengths_that_leave_them(monkeypatch):
    """The check has teeth: attention that forgets the window, or the borders, is seen."""
    config = family_config("mistral")
    assert SelfTest(config).layout == "packed"
    right = exactness.register_attention
    monkeypatch.setattr(exactness, "register_attention", lambda: None)
    from transformers import AttentionInterface

    from duoka.model import attention

    def forgetful(*args, **kwargs):
        return attention.attend(*args, **{**kwargs, **dict.fromkeys(forgotten)})

    try:
        AttentionInterface.register("duoka", forgetful)
        forgotten = ("sliding_window",)
        assert SelfTest(config).layout == "as written"
        forgotten = ("cu_seq_lens_q", "documents")
        monkeypatch.setattr(attention, "documents_read", lambda *_: None)  # those of the pass, in their place
        assert SelfTest(config).layout == "padded"
    finally:
        right()


def test_trying_moves_no_generator_and_keeps_no_weights(fresh):
    before = torch.random.get_rng_state()
    tested = SelfTest(family_config("gemma2"))
    assert tested.layout == "packed"
    assert torch.equal(torch.random.get_rng_state(), before)
    assert tested._alone is None


def test_a_mixture_is_compared_with_transformers_own_experts_each_time():
    """A model notes in its config how its experts are computed: once ours had, the copy it is measured by was ours."""
    config = tiny_config(family_config("mixtral"))
    assert build_tiny(config, register_attention()).config._experts_implementation == "duoka"
    assert build_tiny(config, "eager").config._experts_implementation != "duoka"


def test_the_same_config_is_tried_once(tmp_path, fresh, monkeypatch):
    folder = config_folder(tmp_path, "llama")
    first = exactness.check_architecture(folder)
    assert exactness.check_architecture(folder) is first
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"attention_bias": True}))
    assert exactness.check_architecture(folder) is not first


def test_a_tiny_copy_keeps_each_kind_of_layer():
    kinds = tiny_config(family_config("gemma3_text")).layer_types
    assert sorted(set(kinds)) == ["full_attention", "sliding_attention"] and len(kinds) <= 4
    assert tiny_config(family_config("lfm2")).num_hidden_layers <= 4
    own = family_config("mistral")
    small = tiny_config(own)
    assert small.hidden_size < own.hidden_size and small.num_attention_heads != small.num_key_value_heads
    assert own.hidden_size == family_config("mistral").hidden_size, "the model's own config was changed"


def test_a_tiny_copy_keeps_layers_of_each_part_whose_numbers_add_up():
    """As a model that goes through its middle layers again counts them, and refuses others."""
    own = family_config("mistral")
    parts = {"n_input_layers": 8, "n_recurrent_layers": 20, "n_output_layers": 4}
    vars(own).update(num_hidden_layers=32, layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8, **parts)
    small = tiny_config(own)
    assert [getattr(small, name) for name in parts] == [2, 2, 2] and small.num_hidden_layers == 6
    assert small.layer_types == ["sliding_attention", "full_attention"] * 3
    own.n_output_layers = 5  # of something else
    assert tiny_config(own).n_output_layers == 5


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"hidden_size": 66, "num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 1}),
        ("gpt2", {"n_layer": 5}),
        ("opt", {"hidden_size": 1024, "word_embed_proj_dim": 512, "do_layer_norm_before": False}),
        # A factor for every frequency of a head of 96.
        ("phi3", {"rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [1.5] * 48,
            "original_max_position_embeddings": 4096,
        }}),
    ],
)  # fmt: skip
def test_odd_sizes_are_made_small_too(model_type, settings):
    from transformers import AutoConfig

    tested = SelfTest(AutoConfig.for_model(model_type, **settings))
    assert tested.layout == "packed"
    assert tested._tiny.hidden_size == 64, "its own widths were taken, which may be large"


def test_adapters_pass_over_layers_that_are_linear_by_name_only(tmp_path):
    """DeepSeek-V4's grouped product and the routers of Phi's mixture and Llama 4 are subclasses of torch's linear
    layer; Falcon's is one that computes the same."""
    for name, odd, even in (
        ("deepseek_v4", "o_a_proj", "o_b_proj"), ("phimoe", "router", "q_proj"), ("llama4_text", "router", "o_proj"),
        ("falcon", "", "query_key_value"),
    ):  # fmt: skip
        asked = {"folder": write_family(tmp_path / name, name), "dtype": torch.float32, "trains": True}
        model = load_model(ModelRequest(**asked, attention="eager", lora=LoraConfig(rank=2)))
        adapted = {key.split(".lora_A")[0].rsplit(".", 1)[-1] for key, _ in model.named_parameters() if "lora_A" in key}
        assert even in adapted and odd not in adapted, (name, adapted)
        logits = model(input_ids=torch.arange(8, 16)[None], use_cache=False).logits
        assert torch.isfinite(logits).all()
    with pytest.raises(ConfigError, match=r"lora\.targets names o_a_proj \(DeepseekV4GroupedLinear\)") as refused:
        asked = {"folder": tmp_path / "deepseek_v4", "dtype": torch.float32, "trains": True}
        load_model(ModelRequest(**asked, attention="eager", lora=LoraConfig(rank=2, targets=("o_a_proj", "q_a_proj"))))
    assert "o_b_proj" in refused.value.fix and "o_a_proj" not in refused.value.fix


def test_what_a_fused_adapter_answers_may_be_added_to_in_place(tmp_path):
    """As Llama 4 does with its shared expert's."""
    folder = write_family(tmp_path, "llama4_text")
    asked = ModelRequest(folder, torch.float32, lora=LoraConfig(rank=2, dropout=0), attention="sdpa", trains=True)
    model = load_model(asked).train()
    assert apply_fused(model)
    model(input_ids=torch.arange(8, 16)[None], use_cache=False).logits.sum().backward()


def test_layers_of_an_attention_of_their_own_are_not_compiled(tmp_path):
    """Compiled for two threads, Falcon's shared key gave gradients that were off by 43 to 78%; with one thread none."""
    for name, attention in (("falcon", "sdpa"), ("bloom", "eager")):
        request = ModelRequest(write_family(tmp_path / name, name), torch.float32, attention=attention, trains=True)
        model, layout = LossModel(load_model(request)), Layout(compile=True)

        def compile_layers(model=model, layout=layout):
            parallelize(model, layout, ParallelConfig(), build_mesh(layout, World()))

        if attention == "eager":
            compile_layers()
            continue
        with pytest.raises(ConfigError, match="model type falcon is computed by its own attention") as refused:
            compile_layers()
        assert "compile: false" in refused.value.fix
