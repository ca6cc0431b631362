"""What `duoka accelerate launch` makes of its flags and its config file, and what a script learns of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from duoka.accelerator.names.arguments import add_launchers
from duoka.cli.lines import meaning_of_accelerate
from duoka.errors import ConfigError, Faults


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def test_a_script_is_told_what_accelerate_launch_would_tell_it() -> None:
    """Sharding stayed behind: a script that was to be sharded was replicated, without a word."""
    Path("own.py").write_text("")
    line = ["launch", "--use_fsdp", "--fsdp_version=2", "--fsdp_offload_params", "true", "own.py"]
    wanted = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}
    assert meaning_of_accelerate(line).env == wanted
    deep = ["launch", "--use_deepspeed", "--zero_stage=3", "--offload_param_device=cpu", "own.py"]
    assert meaning_of_accelerate(deep).env == {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
    }  # fmt: skip
    content = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}}
    Path("a.yaml").write_text(yaml.safe_dump(content))
    env = meaning_of_accelerate(["launch", "--config_file=a.yaml", "own.py"]).env
    assert env == {"ACCELERATE_USE_FSDP": "true", "FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"}
    assert not meaning_of_accelerate(["launch", "--use_fsdp", "train.py", "x.yaml"]).env
    axes = ["--use_parallelism_config", "--parallelism_config_dp_shard_size=2"]
    env = meaning_of_accelerate(["launch", "--use_fsdp", *axes, "own.py"]).env
    assert env["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true" and env["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "2"


def test_devices_and_threads_of_accelerate_launch_count() -> None:
    line = ["launch", "--gpu_ids", "0,2", "--num_cpu_threads_per_process=3", "train.py", "x.yaml"]
    assert meaning_of_accelerate(line).env == {"CUDA_VISIBLE_DEVICES": "0,2", "OMP_NUM_THREADS": "3"}
    assert meaning_of_accelerate(["launch", "--cpu", "train.py", "x.yaml"]).env == {"CUDA_VISIBLE_DEVICES": ""}
    assert not meaning_of_accelerate(["launch", "--gpu_ids=all", "train.py", "x.yaml"]).env


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--use_megatron_lm --megatron_lm_tp_degree=2", "MEGATRON_LM is not there"),
        ("--tpu --vm x", "TPU is not there"),
        ("--use_fsdp --use_parallelism_config --parallelism_config_tp_size 2", "axes of a model"),
    ],
)
def test_what_accelerate_launch_can_and_duoka_cannot_is_refused_by_name(flags: str, said: str) -> None:
    with pytest.raises(Faults, match=said):
        meaning_of_accelerate(["launch", *flags.split(), "train.py", "x.yaml"])


def test_flags_of_accelerate_launch_that_change_nothing_are_known() -> None:
    line = "--dynamo_use_dynamic --main_training_function main --deepspeed_hostfile hosts --fp8_backend te train.py"
    meaning = meaning_of_accelerate(["launch", *line.split(), "x.yaml"])
    assert meaning.words == ("train", "x.yaml") and any("--hostfile FILE" in note for note in meaning.notes)


def told(**env: str) -> tuple[dict[str, object], list[str]]:
    said: dict[str, object] = {"parallel": {}}
    return said, add_launchers(said, None, {"ACCELERATE_USE_FSDP": "true", **env})


def test_what_the_launcher_was_told_of_fsdp_counts_as_its_plugin() -> None:
    """It sets the variables of both versions, with defaults where nothing was said."""
    both = {"FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    first, second = {**both, "FSDP_VERSION": "1"}, {**both, "FSDP_VERSION": "2"}
    for env, strategy in (
        (first, "fsdp"), (second, "fsdp"), ({**second, "FSDP_RESHARD_AFTER_FORWARD": "false"}, "zero2"),
        ({**first, "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, "hsdp"),
        ({**first, "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, "zero2"),
        ({**first, "FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"}, "zero2"),
        ({**first, "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, "ddp"),
    ):  # fmt: skip
        assert told(**env)[0]["strategy"] == strategy, env
    assert told(**second, FSDP_OFFLOAD_PARAMS="true")[0]["parallel"] == {"offload": "params"}
    assert told(**second, FSDP_OFFLOAD_PARAMS="false")[0]["parallel"] == {}
    (note,) = told(**second, FSDP_ACTIVATION_CHECKPOINTING="true")[1]
    assert "gradient_checkpointing_enable" in note


def test_axes_and_megatron_of_the_launcher_are_no_replicas() -> None:
    """Four ranks that share two models would have been four replicas, and learned from another batch."""
    axes = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
    with pytest.raises(ConfigError, match="tp_size=2"):
        told(**axes)
    sizes = {"PARALLELISM_CONFIG_TP_SIZE": "1", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
             "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "3"}  # fmt: skip
    said, _ = told(**{**axes, **sizes})
    assert said["strategy"] == "hsdp" and said["parallel"] == {"shard_ranks": 2}
    with pytest.raises(ConfigError, match="Megatron"):
        told(ACCELERATE_USE_MEGATRON_LM="true")
    (note,) = told(ACCELERATE_DYNAMO_BACKEND="INDUCTOR")[1]
    assert "model.compile()" in note and not told(ACCELERATE_DYNAMO_BACKEND="NO")[1]
