"""Weights that were trained beside a base model are never computed with those of another one in its place."""

import json
import shutil

import peft
import pytest
from commands import run_duoka
from safetensors.torch import load_file, save_file
from tiny import write_conversations, write_pairs

from duoka.cli import run as duoka
from duoka.config.load import load_config
from duoka.errors import ConfigError
from duoka.serve.load_run import find_trained, find_trained_on

YAML = """
model: {folder}/model
data: {{train: [{folder}/chats.jsonl], max_length: 256}}
{lora}
optim: {{lr: 5e-3}}
train: {{max_steps: 2, global_batch: 4, precision: fp32, seed: 3}}
checkpoint: {{every: 1}}
output: {folder}/out
"""
ADAPTED = "lora: {rank: 2, dropout: 0, targets: [q_proj]}"


def quiet(text):
    pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(tiny_model, folder / "model")
    write_conversations(folder / "chats.jsonl", 12, seed=3)
    (folder / "adapted.yaml").write_text(YAML.format(folder=folder, lora=ADAPTED))
    (folder / "full.yaml").write_text(YAML.format(folder=folder, lora=""))
    for name in ("adapted", "full"):
        train(folder / f"{name}.yaml", folder / name)
    return folder


@pytest.fixture
def other_base(runs):
    """The base with one matrix changed, as a second training into the same folder leaves it."""
    weights = runs / "model/model.safetensors"
    before = weights.read_bytes()
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file(tensors | {name: tensors[name] * 1.5}, weights, metadata={"format": "pt"})
    yield weights
    weights.write_bytes(before)


def train(yaml, output, *settings, code=0):
    done = run_duoka("train", yaml, f"output={output}", *settings, "--nproc", "1")
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def go_on(runs, name, code=0):
    """Train the run to its end again, from its first checkpoint."""
    target = runs / f"{name}-on"
    shutil.rmtree(target, ignore_errors=True)
    (target / "checkpoints").mkdir(parents=True)
    shutil.copytree(runs / name / "checkpoints/step-00000001", target / "checkpoints/step-00000001")
    return train(runs / f"{name}.yaml", target, code=code)


def test_a_run_goes_on_beside_its_own_base_only(runs, other_base):
    output = go_on(runs, "adapted", code=2)
    assert "the base model is not what it was when step-00000001 was written" in output
    manifest = json.loads((runs / "adapted/checkpoints/step-00000001/manifest.json").read_text())
    assert manifest["base"]["weights"][:12] in output and "now: config" in output


def test_a_run_whose_checkpoint_holds_every_weight_goes_on_and_says_so(runs, other_base):
    output = go_on(runs, "full")
    assert "this run goes on with its own, all of them in step-00000001" in output
    wanted = load_file(runs / "full/final/model.safetensors")
    got = load_file(runs / "full-on/final/model.safetensors")
    assert all((got[name] == value).all() for name, value in wanted.items())


def test_a_run_whose_loss_compares_with_the_base_goes_on_beside_its_own_only(runs, request):
    """Its checkpoint holds every weight; what it is compared with comes from the base at each start."""
    write_pairs(runs / "pairs.jsonl", 8, seed=3)
    text = YAML.format(folder=runs, lora="stage: dpo").replace("chats.jsonl", "pairs.jsonl")
    for name, stage in (("compared", "dpo"), ("plain", "{name: dpo, loss: simpo}")):
        (runs / f"{name}.yaml").write_text(text.replace("stage: dpo", f"stage: {stage}"))
        train(runs / f"{name}.yaml", runs / name)
    request.getfixturevalue("other_base")
    output = go_on(runs, "compared", code=2)
    assert "was written, and the loss compares with what that model says" in output and "now: config" in output
    assert "this run goes on with its own" in go_on(runs, "plain")


def test_chat_eval_and_export_refuse_another_base(runs, other_base):
    for name, step in ((runs / "adapted", None), (runs / "adapted", 1), (runs / "adapted/final", None)):
        with pytest.raises(ConfigError, match="not the one that it was trained on") as caught:
            find_trained(str(name), step=step, say=quiet)
        assert "trained on: config" in caught.value.where and "bring that model back" in caught.value.fix
    find_trained(str(runs / "full"), say=quiet)


def test_the_base_itself_is_no_other_one(runs):
    find_trained(str(runs / "adapted"), say=quiet)
    find_trained(str(runs / "adapted/final"), say=quiet)
    go_on(runs, "adapted")
    config = runs / "model/config.json"
    before = config.read_text()
    config.write_text(json.dumps(json.loads(before) | {"transformers_version": "99"}))
    try:
        find_trained(str(runs / "adapted"), say=quiet)
    finally:
        config.write_text(before)


def test_a_base_that_the_user_names_is_taken_with_a_word(runs, other_base, tmp_path):
    said = []
    find_trained_on(str(runs / "model"), [str(runs / "adapted/final")], say=said.append)
    assert any("was trained on another model" in line for line in said)
    (tmp_path / "x.yaml").write_text(
        YAML.format(folder=runs, lora=f"lora: {{adapter: {runs / 'adapted/final'}, dropout: 0}}")
    )
    output = train(tmp_path / "x.yaml", tmp_path / "out", "train.max_steps=1")
    assert "was trained on another model than model.name" in output
    assert load_config(tmp_path / "x.yaml").config.lora.adapter


def test_exported_adapters_know_theirs_and_others_read_them(runs, tmp_path):
    assert duoka(["export", str(runs / "adapted"), "--adapter", "-o", str(tmp_path / "out")]) == 0
    ours = json.loads((runs / "adapted/final/base.json").read_text())
    assert json.loads((tmp_path / "out/base.json").read_text()) == ours
    assert peft.PeftConfig.from_pretrained(tmp_path / "out").r == 2
