"""Which folder a model name means, without a network and without torch."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny import write_tiny_model

from duoka.config.schema import DataConfig, DataSource, LoraConfig, ModelConfig, ParallelConfig, RunConfig
from duoka.config.stages import StageConfig
from duoka.errors import ConfigError
from duoka.hub.base import model_fingerprint
from duoka.hub.models import check_model, find_model, model_folder, resolve_tokenizer


def config_of(name, **more):
    return RunConfig(model=ModelConfig(name=name, **more), data=DataConfig(train=(DataSource(name="identity"),)))


def write_snapshot(hub, hub_id, commit, *, branch=None, model):
    repository = hub / f"models--{hub_id.replace('/', '--')}"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    if branch:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
    return folder


def test_a_folder_is_found_from_here_and_from_the_yamls_folder(tmp_path, monkeypatch, tiny_model):
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "yamls"
    there.mkdir()
    (there / "mine").symlink_to(tiny_model)
    assert find_model(ModelConfig(name="mine"), there).folder == tiny_model.resolve()
    assert find_model(ModelConfig(name="mine"), tmp_path).hub_id == "mine"
    assert check_model(config_of("mine"), there) == []


def test_a_finished_run_is_the_model_that_it_made(tmp_path, tiny_model):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "final").symlink_to(tiny_model)
    assert find_model(ModelConfig(name="run"), tmp_path).folder == tiny_model.resolve()


def test_a_reward_models_folder_is_refused_where_words_are_learned(tmp_path, tiny_model):
    folder = tmp_path / "judge"
    shutil.copytree(tiny_model, folder)
    facts = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**facts, "architectures": ["LlamaForSequenceClassification"]}))
    (fault,) = check_model(config_of(str(folder)), tmp_path)
    assert "a reward model" in fault.what and fault.key == "model.name" and "stage: reward" in fault.fix
    goes_on = config_of(str(folder)).model_copy(update={"stage": StageConfig(name="reward")})
    assert check_model(goes_on, tmp_path) == []


@pytest.mark.parametrize("name", ["./x", "/x/y", "~/x", "a/b/c", "a b", "C:\\models\\x", "runs/mine"])
def test_what_looks_like_a_path_is_never_taken_for_a_hub_id(name, tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        find_model(ModelConfig(name=name), tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [("mine.gguf", "llama-server -m FILE"), ("model.safetensors", "write its folder"), ("config.json", "its folder")],
)
def test_a_file_is_named_for_what_it_is(name, said, tmp_path):
    """`there is no such folder` was said of files that are there."""
    (tmp_path / name).write_bytes(b"GGUF")
    for written in (name, str(tmp_path / name)):
        with pytest.raises(ConfigError) as caught:
            find_model(ModelConfig(name=written), tmp_path)
        assert said in caught.value.fix and "no such folder" not in caught.value.what


def test_a_warm_hub_cache_needs_no_network_and_keeps_to_the_revision(tmp_path, monkeypatch, tiny_model):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    old = write_snapshot(tmp_path, "me/chat", "aaa", branch="v1", model=tiny_model)
    new = write_snapshot(tmp_path, "me/chat", "bbb", branch="main", model=tiny_model)
    assert model_folder(ModelConfig(name="me/chat"), Path()) == new
    assert model_folder(ModelConfig(name="me/chat", revision="v1"), Path()) == old
    assert model_folder(ModelConfig(name="me/chat", revision="aaa"), Path()) == old
    (fault,) = check_model(config_of("me/chat", revision="v2"), Path())
    assert "switched off" in fault.what


def test_a_warm_hub_cache_is_found_where_the_hubs_client_keeps_it(tmp_path, monkeypatch, tiny_model):
    for name in ("HF_HUB_CACHE", "HF_HOME", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    there = write_snapshot(tmp_path / "huggingface" / "hub", "me/chat", "aaa", branch="main", model=tiny_model)
    assert (
        check_model(config_of("me/chat"), Path()) == [] and model_folder(ModelConfig(name="me/chat"), Path()) == there
    )


def test_from_scratch_takes_no_weights_from_the_hub(tmp_path, monkeypatch, tiny_model):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    asked = []

    def fetch(name, *, revision, allow_patterns):
        asked.append(allow_patterns)
        return tiny_model

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert model_folder(ModelConfig(name="me/chat"), Path()) == tiny_model
    model_folder(ModelConfig(name="me/chat", from_scratch=True), Path())
    assert ["*.safetensors" in patterns for patterns in asked] == [True, False]
    warm = write_snapshot(tmp_path, "me/chat", "aaa", branch="main", model=tiny_model)
    for file in warm.glob("*.safetensors"):
        file.unlink()
    model_folder(ModelConfig(name="me/chat", from_scratch=True), Path())
    assert len(asked) == 2, "a cache without weights is enough"


def test_without_a_network_a_hub_id_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("duoka.hub.models.hub_has_an_address", lambda: False)
    (fault,) = check_model(config_of("me/chat"), Path())
    assert "no network" in fault.what and fault.key == "model.name"


def test_a_new_models_tokenizer_is_a_folder_a_runs_or_a_hubs_and_the_vocabulary_follows_it(
    tmp_path, monkeypatch, tiny_model
):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "final").symlink_to(tiny_model)
    snapshot = write_snapshot(tmp_path / "hub", "me/words", "aaa", branch="main", model=tiny_model)
    for file in snapshot.glob("*.safetensors"):
        file.unlink()  # a tokenizer alone is enough here
    sizes = {"depth": 2, "width": 64, "head_dim": 16, "kv_heads": 4, "mlp_width": 192, "context": 128}

    def config(tokenizer):
        return config_of("").model_copy(update={"model": ModelConfig(tokenizer=tokenizer, **sizes)})

    for name in (str(tiny_model), "run", "me/words"):
        assert check_model(config(name), tmp_path) == []
        folder = model_folder(config(name).model, tmp_path)
        assert json.loads((folder / "config.json").read_text())["vocab_size"] == 320, name
    (other,) = check_model(config("me/other"), tmp_path)
    assert "switched off" in other.what and other.key == "model.tokenizer" and "duoka data tokenizer" in other.fix
    (gone,) = check_model(config("./tok"), tmp_path)
    assert "there is no such folder" in gone.what


def test_finding_and_checking_import_no_torch(tiny_model):
    code = (
        "import sys; from pathlib import Path; from duoka.hub.models import find_model, check_model;"
        "from duoka.config.schema import ModelConfig;"
        f"assert find_model(ModelConfig(name={str(tiny_model)!r}), Path()).folder;"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_base_in_8_bits_is_refused_where_weights_are_cut(tmp_path, tiny_model):
    """It ended in AttributeError: 'Parameter' object has no attribute 'CB'."""
    folder = tmp_path / "quantized"
    shutil.copytree(tiny_model, folder)
    facts = json.loads((folder / "config.json").read_text())
    for how, is_refused in (({"load_in_8bit": True}, True), ({"load_in_4bit": True, "load_in_8bit": False}, False)):
        quantized = {"quantization_config": {"quant_method": "bitsandbytes", **how}}
        (folder / "config.json").write_text(json.dumps(facts | quantized))
        for strategy in ("zero3", "hsdp", "zero2", "auto"):
            more = {"lora": LoraConfig(), "parallel": ParallelConfig(strategy=strategy)}
            faults = check_model(config_of(str(folder)).model_copy(update=more), tmp_path)
            assert bool(faults) is (is_refused and strategy in ("zero3", "hsdp")), (how, strategy)
            assert all("in 8 bits" in one.what and "zero2" in one.fix for one in faults)


def test_a_quantized_model_is_refused_under_dp_and_learns_by_adapters_alone(tmp_path, tiny_model):
    folder = tmp_path / "quantized"
    shutil.copytree(tiny_model, folder)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"quantization_config": {"quant_method": "gptq"}}))
    whole = config_of(str(folder))
    (fault,) = check_model(whole, tmp_path)
    assert "came packed (gptq)" in fault.what and fault.key == "model.name" and "lora: {rank: 8}" in fault.fix
    config = whole.model_copy(update={"lora": LoraConfig()})
    assert check_model(config, tmp_path) == []
    for key, words in (("model.quantization", "packed (gptq) already"), ("lora.init", "takes parts out")):
        part, _, name = key.partition(".")
        value = {"quantization": "nf4", "init": "pissa"}[name]
        changed = getattr(config, part).model_copy(update={name: value})
        (fault,) = check_model(config.model_copy(update={part: changed}), tmp_path)
        assert fault.key == key and words in fault.what
    (fault,) = check_model(config.model_copy(update={"parallel": ParallelConfig(strategy="dp")}), tmp_path)
    assert "is quantized (gptq)" in fault.what and fault.key == "parallel.strategy" and "ddp" in fault.fix


def test_another_model_of_the_same_shape_has_another_fingerprint(tmp_path, tiny_model):
    copied = tmp_path / "copied"
    shutil.copytree(tiny_model, copied)
    assert model_fingerprint(copied) == model_fingerprint(tiny_model)
    trained = write_tiny_model(tmp_path / "trained", seed=5)
    assert model_fingerprint(trained) != model_fingerprint(tiny_model)
    facts = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(facts | {"transformers_version": "9.9", "_name_or_path": "x"}))
    assert model_fingerprint(copied) == model_fingerprint(tiny_model), "the same model, written by another version"
    (copied / "config.json").write_text(json.dumps(facts | {"rms_norm_eps": 1e-3}))
    assert model_fingerprint(copied) != model_fingerprint(tiny_model)


def test_one_changed_matrix_gives_another_fingerprint(tmp_path, tiny_model):
    copied = tmp_path / "copied"
    shutil.copytree(tiny_model, copied)
    (weights,) = copied.glob("*.safetensors")
    tensors = load_file(weights)
    for name in tensors:
        save_file(tensors | {name: tensors[name] + 1}, weights, metadata={"format": "pt"})
        assert model_fingerprint(copied) != model_fingerprint(tiny_model), name


def test_a_tokenizer_is_one_folder_wherever_it_is_named(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def resolve(name):
        return resolve_tokenizer(config_of("m", tokenizer=name).model, tmp_path, tiny_model)

    assert resolve(None) == tiny_model
    shutil.copytree(tiny_model, tmp_path / "runs/tok/final")
    assert resolve("runs/tok") == tmp_path / "runs/tok/final", "of a run, what it made"
    write_snapshot(tmp_path / "hub", "org/tok", "abc", branch="main", model=tiny_model)
    assert resolve("org/tok").name == "abc"
    for name in ("org/not-there", "./no/folder"):
        with pytest.raises(ConfigError, match=r"model\.tokenizer is"):
            resolve(name)


@pytest.mark.parametrize("weights", ["none", "one file", "shards"])
def test_an_adapter_beside_a_config_is_no_model_and_beside_weights_one_too_many(tmp_path, tiny_model, weights):
    """Some tools write config.json into an adapter's folder: it must not be said that its file wants another name."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "adapter_config.json").write_text("{}")
    shutil.copy(folder / "model.safetensors", folder / "adapter_model.safetensors")
    if weights != "one file":
        (folder / "model.safetensors").unlink()
    if weights == "shards":
        shutil.copy(folder / "adapter_model.safetensors", folder / "model-00001-of-00001.safetensors")
    (fault,) = check_model(config_of(str(folder)), tmp_path)
    words, fix = (
        ("an adapter, not a model", "base model") if weights == "none" else ("and an adapter", "move adapter_c")
    )
    assert words in fault.what and fix in fault.fix


def test_a_family_without_a_head_for_scores_is_refused_in_words(tmp_path):
    """transformers names a Python class there."""
    from duoka.model.reading import read_model

    (tmp_path / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}', "utf-8")
    with pytest.raises(ConfigError, match="no model of type mamba with a head for scores"):
        read_model(tmp_path, scores=True)
