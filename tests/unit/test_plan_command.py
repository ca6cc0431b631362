"""`duoka plan` as it is typed: narrow, torch-free, exit code 4 when nothing fits, faults with their place."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from families import all_families

from duoka.cli.plan import command
from duoka.errors import ConfigError, Faults
from duoka.plan import hardware
from duoka.plan.hardware import Machine
from duoka.plan.own_attention import OWN_ATTENTION

GIB = 2**30
YAML = """model: demo
data: {train: [identity], eval: 0.1, max_length: 512}
lora: {rank: 8}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text(YAML, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine of 2 cores and 8 GiB; tests may make it smaller."""

    def use(available_bytes):
        monkeypatch.setattr(hardware, "read_machine", lambda: Machine(2, 16 * GIB, available_bytes))

    use(8 * GIB)
    return use


def plan(*words):
    return CliRunner().invoke(command, [str(word) for word in words], standalone_mode=False)


def test_a_plan_is_printed_with_steps_and_nothing_is_started(config, tmp_path):
    result = plan(config, "--nproc", 2)
    assert result.return_value == 0, result.exception
    for words in (
        "134,515,008",
        "ddp2",
        "16 samples per step = 2 ranks x 8 samples",
        "tokens per step",
        "optimizer steps",
        "fits in 4 GiB",
    ):
        assert words in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["sft.yaml"]


def test_json_is_one_object_and_follows_overrides(config):
    result = plan(config, "train.micro_batch=2", "lora.rank=4", "--json")
    answer = json.loads(result.output)
    assert answer["layout"]["micro"] == "2 samples" and answer["layout"]["name"] == "single"
    assert answer["model"]["num_trainable"] == 2_442_240 // 2


def test_what_does_not_fit_ends_with_exit_code_4(config, machine):
    machine(GIB // 2)
    result = plan(config)
    assert result.return_value == 4
    assert "does not fit in 512 MiB" in result.output
    assert json.loads(plan(config, "--json").output)["verdict"] == "does not fit"


def test_faults_of_config_model_and_machine_come_together_with_their_lines(config):
    config.write_text(YAML.replace("rank: 8", "targets: [c_attn]") + "train: {precision: fp16}\n", encoding="utf-8")
    error = plan(config).exception
    assert isinstance(error, Faults)
    assert {(fault.key, fault.line) for fault in error.faults} == {("lora.targets", 3), ("train.precision", 4)}


def test_a_folder_with_only_a_config_json_is_enough(config, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    facts = {
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    assert "(qwen2)" in plan(config, f"model={folder}").output
    (folder / "config.json").unlink()
    error = plan(config, f"model={folder}").exception
    assert isinstance(error, Faults) and error.faults[0].key == "model.name"


def test_data_that_is_not_here_leaves_only_the_steps_out(config):
    result = plan(config, "data.train=[far_away]")
    assert result.return_value == 0 and "optimizer steps" not in result.output


def test_a_hub_id_without_a_network_is_refused_at_once(config, monkeypatch, tmp_path):
    def no_name(*args, **kwargs):
        raise socket.gaierror("no name service")

    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(socket, "getaddrinfo", no_name)
    error = plan(config, "model=somebody/a-model-that-is-not-cached").exception
    assert isinstance(error, ConfigError) and "no network" in str(error)


def test_the_command_runs_without_torch(config):
    code = f"""
import sys
for name in ("torch", "transformers", "peft"):
    sys.modules[name] = None
from duoka.cli.plan import command
print("code", command.main([{str(config)!r}], standalone_mode=False))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "code 0" in done.stdout, done.stdout + done.stderr


def test_other_machines_are_planned_for_from_a_laptop(config):
    result = plan(config, "model=demo", "--on", "2x8xH100-80G")
    assert result.return_value == 0, result.exception
    for words in (
        "2x8xH100-80G",
        "tokens/s",
        "MFU",
        "layouts  of 16 devices",
        "changes  what each alone",
        "device-hours",
    ):
        assert words in result.output, result.output
    assert "of 4 samples is too small for 16 data" in plan(config, "--on", "16xH100", "train.global_batch=4").output
    with pytest.raises(Exception, match="leave --nproc out"):
        raise plan(config, "--on", "H100", "--nproc", 2).exception


def test_a_question_without_a_config(tmp_path):
    page = tmp_path / "plan.html"
    result = plan("--params", "7B", "--on", "8xA100-80G", "--price", 2, "--html", page)
    assert result.return_value == 0, result.exception
    assert "Memory of a rank" in page.read_text(encoding="utf-8")
    answer = json.loads(plan("--params", "7e9", "--on", "8xA100-80G", "--json").output)
    assert answer["layout"]["name"] == "fsdp8" and answer["speed"]["mfu"] > 0.2
    assert True in {one["is_trainable"] for one in answer["ranking"]["candidates"]}
    new = plan("--depth", 12, "--on", "H100", "--json").output
    assert json.loads(new)["model"]["num_layers"] == 12 and "lora: {" not in new, "adapters on noise"
    assert "--params" in str(plan("--params", "many").exception)
    assert "name a CONFIG" in str(plan().exception)


def test_a_hundred_million_parameters_on_8_gpus_send_700_mb_not_450():
    result = plan("--params", "100e6", "--on", "8xA100-80G")
    said = " ".join(result.output.split())
    assert "an all-reduce of 400 MB among 8 sends 700 MB" in said, result.output
    assert "2,800 MB of gradients in and 2,800 MB of weights out" in said, "DataParallel's first card: 7 x 400 MB"


def test_the_efficiency_of_many_devices_follows_from_their_network():
    found = []
    for network in ("8xNDR", "1x25GbE"):
        asked = ("--params", "7e9", "--on", f"2x8xH100-80G@{network}", "--layout", "fsdp16")
        speed = json.loads(plan(*asked, "--json").output)["speed"]
        waits = sum(speed["parts"].get(name, 0.0) for name in ("exchange", "pipeline bubble"))
        assert speed["scaling_efficiency"] == pytest.approx(1 - waits / speed["step_s"])
        assert f"efficiency {speed['scaling_efficiency']:.1%}: what 16 devices keep" in plan(*asked).output
        found.append(speed["scaling_efficiency"])
    assert 1 > found[0] > 0.8 > found[1] > 0
    assert "efficiency" not in plan("--params", "1e9", "--on", "H100").output, "one device waits for nobody"


def test_blooms_layout_is_worked_out_and_an_impossible_one_refused():
    asked = ("--params", "176e9", "--on", "48x8xA100-80G@4xEDR", "data.max_length=2048")
    result = plan(*asked, "--layout", "tp4.pp12", "train.global_batch=4m tokens", "train.micro_batch=2")
    assert "384 devices = dp 8 x tp 4 x pp 12: one copy of the model spans 48, 6 nodes" in " ".join(
        result.output.split()
    )
    assert "planned only" not in result.output, "tensor and pipeline axes train beside each other"
    assert "2,304 devices, and there are 384" in str(plan(*asked, "--layout", "ddp48.tp4.pp12").exception)


def test_ddp_memory_does_not_fall_with_the_number_of_cards():
    texts = []
    for cards in (1, 2, 4):
        texts.append(
            json.loads(plan("--params", "1e9", "--on", f"{cards}xH100", "parallel.strategy=ddp", "--json").output)
        )
    parts = [text["memory"]["parts"] for text in texts]
    assert all(part["optimizer"] == parts[0]["optimizer"] for part in parts)
    assert "more cards don't lower it" in texts[2]["notes"][0]


def test_the_planner_keeps_its_promises_on_published_runs():
    result = plan("--validate", "--json")
    assert result.return_value == 0, result.output
    answer = json.loads(result.output)
    assert answer["broken"] == [] and answer["num_judged"] > 200
    kept_aside = [
        row for row in answer["errors"] if row["rows"].startswith("judging") and row["quantity"] == "step time"
    ]
    assert len(kept_aside) >= 4 and all(row["p90"] <= 0.35 for row in kept_aside), kept_aside
    folds = {(fold["quantity"], fold["source"]): fold for fold in answer["folds"]}
    assert len(folds) == 8 and sum(fold["num_rows"] for fold in answer["folds"]) > 250
    assert all(fold["num_others"] > 0 and fold["constants"] for fold in folds.values())
    flops = next(row for row in answer["errors"] if row["quantity"] == "FLOPs")
    assert flops["num_rows"] > 200 and flops["p90"] < 0.01


def test_a_base_that_does_not_fit_under_adapters_is_offered_packed_and_only_there():
    """QLoRA is what a 13B model on 24 GB needs; a packed base, and one whose layers are cut, are not offered it."""
    words = ["--params", "13B", "--on", "RTX4090", "lora={rank: 16}"]
    refused = plan(*words)
    packed = plan(*words, "model.quantization=nf4")
    assert (refused.return_value, packed.return_value) == (4, 0)
    offered = [line for line in refused.output.splitlines() if line.strip().startswith("model.quantization: nf4")]
    assert len(offered) == 1 and "does not fit" not in offered[0]
    assert "model.quantization: nf4" not in packed.output
    assert (
        "model.quantization: nf4"
        not in plan("--params", "13B", "--on", "2xRTX4090", "--layout", "tp2", words[-1]).output
    )
    assert "model.quantization: nf4" not in plan("--params", "7B", "--on", "A100-80G").output


def test_a_model_that_is_cut_is_whole_in_a_group_of_processes_and_not_in_each():
    """It said "2 processes, each with a whole model" of eight that hold a quarter each."""
    said = " ".join(plan("--params", "7B", "--on", "2x4xA100-80G@1x10GbE").output.split())
    assert "ddp2.pp4: 2 groups of 4 processes, each group with a whole model" in said


def test_types_that_are_trained_by_their_own_attention_are_those_of_the_page():
    """docs/models.md has what each copy was found to be. Plans know a model with towers by what reads its text."""
    page = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    found = {row[1].strip() for row in rows if row[2].strip() == "padded, by its own attention"}
    assert found & set(all_families()) == set(OWN_ATTENTION)


def test_a_plan_counts_the_scores_of_attention_that_is_written_out(tmp_path, monkeypatch):
    """A plan alone took duoka's attention and packed rows for each type, and a run then found the model's own."""
    facts = {
        "model_type": "bloom", "hidden_size": 2048, "n_layer": 24, "n_head": 16, "vocab_size": 4096,
        "architectures": ["BloomForCausalLM"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    yaml = tmp_path / "a.yaml"
    yaml.write_text(f"model: {tmp_path}\ndata: {{train: [identity], max_length: 2048}}\n", encoding="utf-8")
    words = [yaml, "--on", "1xH100", "--json", "train.micro_batch=2048 tokens", "train.recompute=none"]
    found = plan(*words)
    assert "model type bloom is trained by its own attention, in padded rows, and keeps the scores" in found.stderr
    own = json.loads(found.stdout)
    assert own["layout"]["packing"] is False
    monkeypatch.setattr("duoka.plan.own_attention.OWN_ATTENTION", {})
    ours = json.loads(plan(*words).stdout)
    assert own["memory"]["parts"]["activations"] > 2 * ours["memory"]["parts"]["activations"]
    assert own["speed"]["parts"]["attention"] == pytest.approx(2 * ours["speed"]["parts"]["attention"]), "of all pairs"
