"""DeepSpeed's JSON: with `engine` it is an order to DeepSpeed; and what a run's YAML is in it, complete."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands import run_python
from needs import need_deepspeed

from duoka.cli import config as config_cli
from duoka.config.deepspeed_json import engine_json
from duoka.config.dialects.deepspeed import deepspeed
from duoka.config.load import Start, load_config, read_side_file
from duoka.config.schema_running import CompressConfig
from duoka.errors import ConfigError, DuokaError
from duoka.plan.choose import check_machine, check_packages
from duoka.plan.hardware import Gpu, Machine

HEAD = "model: demo\ndata: {train: [identity]}\n"
RUN = """
optim: {lr: 3e-4, betas: [0.8, 0.95], eps: 1e-6, weight_decay: 0.2, warmup: 10, clip: 0, min_lr: 0.1}
train: {max_steps: 100, global_batch: 24, micro_batch: 3, precision: bf16}
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def convert(text: str, *words: str, nproc: int = 2):
    Path("run.yaml").write_text(HEAD + text, "utf-8")
    Path("ds.json").unlink(missing_ok=True)
    line = ["convert", "run.yaml", *words, "-o", "ds.json", "--nproc", str(nproc)]
    return CliRunner().invoke(config_cli.command, line, standalone_mode=False)


def read(text: str, nproc: int = 2):
    Path("x.json").write_text(text, "utf-8")
    return read_side_file("x.json", Start(nproc, True)).text


PARTLY = "zero3, offload: {optimizer: host, share: 0.5}"


@pytest.mark.parametrize(
    "strategy", ["ddp", "zero1", "zero2", "zero3, offload: params", "zero2, offload: optimizer", PARTLY]
)
def test_a_runs_json_read_back_is_the_run(strategy: str) -> None:
    result = convert(f"{RUN}parallel: {{strategy: {strategy}}}\n")
    assert result.exit_code == 0, result.exception
    facts = json.loads(Path("ds.json").read_text("utf-8"))
    assert "auto" not in json.dumps(facts) and facts["gradient_clipping"] == 0
    assert facts["gradient_accumulation_steps"] == 4
    # As a whole config again, beside the lines that DeepSpeed has no words for.
    shown = read(json.dumps(facts))
    Path("again.yaml").write_text(HEAD + shown + "\n", "utf-8")
    again, run = load_config("again.yaml").config, load_config("run.yaml").config
    assert again.optim == run.optim and again.parallel == run.parallel
    assert again.train.global_batch == 24 and again.train.precision == "bf16"


def test_deepspeed_takes_the_json() -> None:
    need_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig

    assert convert(f"{RUN}parallel: {{strategy: zero2}}\n", nproc=1).exit_code == 0
    theirs = DeepSpeedConfig("ds.json")
    assert theirs.zero_config.stage == 2 and theirs.train_batch_size == 24 and theirs.gradient_clipping == 0
    assert theirs.scheduler_params["cos_min_ratio"] == 0.1 and theirs.optimizer_params["weight_decay"] == 0.2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "parallel.strategy is auto"),
        (["parallel.strategy=zero2", "train.global_batch=8k tokens"], "DeepSpeed counts samples"),
        (["parallel.strategy=zero2", "train.global_batch=10"], "do not divide"),
        (["parallel.strategy=zero2", "parallel.pipeline=2"], "axes beside data and tensor parallelism"),
        (["parallel.strategy=zero2", "optim.name=lamb"], "optim.name is lamb"),
        (["parallel.strategy=zero2", "parallel.offload={optimizer: host, share: 0.5}"], "share is 0.5"),
        (["parallel.strategy=zero1", "parallel.offload={optimizer: disk}"], "optimizer is disk"),
        (["parallel.strategy=ddp", "parallel.offload=optimizer"], "offloads from stage 1 on"),
        (["parallel.strategy=hsdp"], "MiCS"),
    ],
)
def test_what_the_json_cannot_say_is_refused(words: list[str], told: str) -> None:
    result = convert(RUN, *words)
    assert isinstance(result.exception, ConfigError) and told in str(result.exception)
    assert not Path("ds.json").exists()


def test_with_engine_its_switches_are_deepspeeds() -> None:
    zero = (
        '"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e6, "overlap_comm": true, "sub_group_size": "auto"}'
    )
    shown = read('{"engine": "deepspeed", ' + zero + "}")
    assert "engine: deepspeed" in shown and "strategy: zero3" in shown
    assert "deepspeed: {reduce_bucket_size: 5000000, overlap_comm: true}" in shown
    alone = read("{" + zero + "}")
    assert "engine" not in alone and "reduce_bucket_size" not in alone and "strategy: zero3" in alone


def test_without_the_package_it_is_refused_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.yaml").write_text(HEAD + "parallel: {engine: deepspeed, strategy: zero2}\n", "utf-8")
    config = load_config("run.yaml").config
    assert not any("deepspeed" in fault.what for fault in check_packages(config)) or not _has_it()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else found(name))
    (fault,) = check_packages(config)
    assert "deepspeed is not installed" in fault.what and "pip install 'duoka[deepspeed]'" in fault.fix


def _has_it() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def test_saving_does_not_import_it(tmp_path: Path, tiny_model: Path) -> None:
    """In a fresh process: Accelerate would, to ask whether the model is one of DeepSpeed's."""
    need_deepspeed()
    code = (
        "import sys, pathlib, torch\n"
        "from duoka.model.build import load_model\n"
        "from duoka.model.request import ModelRequest\n"
        "from duoka.model.result import write_result\n"
        f"base, new = pathlib.Path({str(tiny_model)!r}), pathlib.Path({str(tmp_path / 'new')!r})\n"
        "write_result(load_model(ModelRequest(base, dtype=torch.float32)), base, new)\n"
        "assert 'deepspeed' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)


AUTOTP = '{"engine": "deepspeed", "train_batch_size": 24, "tensor_parallel": {"autotp_size": 2, "dtype": "fp32"}, '
ZERO1 = '"zero_optimization": {"stage": 1}}'


def test_autotp_is_the_tensor_axis_and_its_batch_counts_ranks() -> None:
    shown = read(AUTOTP + ZERO1)
    assert "tensor: 2" in shown and "engine: deepspeed" in shown and "global_batch: 12" in shown
    native = read(AUTOTP.replace('"engine": "deepspeed", ', "") + ZERO1)
    assert "tensor: 2" in native and "engine" not in native
    assert "tensor" not in read(AUTOTP.replace('"autotp_size": 2', '"autotp_size": 1') + ZERO1)
    odd = AUTOTP.replace("24", "25")
    with pytest.raises(DuokaError, match="no multiple of it"):
        read(odd + ZERO1)


def test_a_tensor_axis_in_the_json_is_read_back() -> None:
    result = convert(f"{RUN}parallel: {{strategy: zero1, tensor: 2}}\n", nproc=4)
    assert result.exit_code == 0, result.exception
    facts = json.loads(Path("ds.json").read_text("utf-8"))
    assert facts["tensor_parallel"] == {"autotp_size": 2}
    # 24 samples are 2 data ranks' 4 micro-batches of 3; DeepSpeed counts those of all 4 ranks.
    assert facts["train_batch_size"] == 48 and facts["gradient_accumulation_steps"] == 4
    Path("again.yaml").write_text(HEAD + read(json.dumps(facts), nproc=4) + "\n", "utf-8")
    again, run = load_config("again.yaml").config, load_config("run.yaml").config
    assert again.parallel == run.parallel and again.train.global_batch == 24
    refused = convert(f"{RUN}parallel: {{strategy: zero1, tensor: 2}}\n", nproc=3)
    assert isinstance(refused.exception, DuokaError) and "no multiple of it" in str(refused.exception)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("parallel: {engine: deepspeed, strategy: zero1, tensor: 2, pipeline: 2}", "its pipeline takes no stage 2"),
        ("parallel: {engine: deepspeed, strategy: zero1, tensor: 2}\nlora: {}", "AutoTP cuts no adapters"),
        ("parallel: {engine: deepspeed, strategy: zero3, tensor: 2, offload: {optimizer: disk}}", "in files counts"),
        ("parallel: {engine: deepspeed, strategy: zero3, tensor: 2, reshard: node}", "neighboring ranks"),
        ("parallel: {engine: deepspeed, strategy: zero3, compress: {weights: int4}}", "int8 and gradients in int4"),
        ("parallel: {engine: deepspeed, strategy: zero3, compress: {gradients: int8}}", "int8 and gradients in int4"),
        ("parallel: {engine: deepspeed, strategy: zero1, compress: {weights: int8}}", "is DeepSpeed's stage 3"),
        (
            "parallel: {engine: deepspeed, strategy: zero3, offload: params, compress: {weights: int8}}",
            "was never seen",
        ),
    ],
)
def test_what_deepspeed_cannot_do_names_the_native_way(lines: str, told: str) -> None:
    Path("run.yaml").write_text(f"{HEAD}{lines}\n", "utf-8")
    with pytest.raises(DuokaError, match=told) as refused:
        load_config("run.yaml")
    assert "engine: native" in str(refused.value)


def test_ddp_beside_a_tensor_axis_is_deepspeeds_alone() -> None:
    lines = HEAD + "parallel: {engine: deepspeed, strategy: ddp, tensor: 2}\n"
    Path("run.yaml").write_text(lines, "utf-8")
    assert load_config("run.yaml").config.parallel.tensor == 2
    Path("run.yaml").write_text(lines.replace("deepspeed", "native"), "utf-8")
    with pytest.raises(DuokaError, match="adds up gradients of whole tensors"):
        load_config("run.yaml")


PACKED = "compress: {weights: int8, gradients: int4}"


def test_zero_plus_plus_is_written_and_read_and_wants_a_gpu() -> None:
    Path("run.yaml").write_text(f"{HEAD}parallel: {{engine: deepspeed, strategy: zero3, {PACKED}}}\n", "utf-8")
    config = load_config("run.yaml").config
    zero = engine_json(config.parallel, "fsdp", "bf16", 2)["zero_optimization"]
    assert zero["zero_quantized_weights"] is zero["zero_quantized_gradients"] is True
    weights = config.parallel.model_copy(update={"compress": CompressConfig(weights="int8")})
    assert "zero_quantized_gradients" not in engine_json(weights, "fsdp", "bf16", 2)["zero_optimization"]
    (fault,) = check_machine(config, Machine(2, 8 << 30, 8 << 30), 2)
    assert fault.key == "parallel.compress" and "runs on CUDA alone" in fault.what and "engine: native" in fault.fix
    gpus = tuple(Gpu("NVIDIA H100", 80 << 30, 80 << 30, 9.0) for _ in range(2))
    assert not check_machine(config, Machine(2, 8 << 30, 8 << 30, gpus=gpus), 2)
    flags = '"zero_quantized_weights": true, "zero_quantized_gradients": true'
    assert PACKED in read('{"engine": "deepspeed", "zero_optimization": {"stage": 3, ' + flags + "}}")
    assert convert(f"{RUN}parallel: {{strategy: zero3, {PACKED}}}\n").exit_code == 0
    written = json.loads(Path("ds.json").read_text("utf-8"))["zero_optimization"]
    assert written["zero_quantized_weights"] and written["zero_quantized_gradients"]


def test_activations_elsewhere_are_not_left_out_without_a_word() -> None:
    lines = "parallel: {strategy: zero2, offload: {optimizer: host, activations: host}}\ntrain: {recompute: full}\n"
    assert "activations: host, and no key of a DeepSpeed JSON moves those" in convert(lines).stderr
    assert "activations" not in convert(lines.replace(", activations: host", "")).stderr


def test_every_key_that_deepspeed_has_is_known() -> None:
    """A file that runs there ends here at no word that "DeepSpeed has none of"."""
    need_deepspeed()
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    blocks = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": precision_config.DeepSpeedBF16Config,
        "fp16": precision_config.DeepSpeedFP16Config,
    }
    names = {f"{block}.{one.alias or name}" for block, own in blocks.items() for name, one in own.model_fields.items()}
    assert not names - deepspeed().rows.keys()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('"sequence_parallel_size": 2', "parallel: {sequence: 2}"),
        ('"pipeline": {"stages": 2}', "parallel: {pipeline: 2}"),
        ('"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}', "optim: {name: lamb"),
        ('"torch_autocast": {"enabled": true, "dtype": "int8"}', "there are bfloat16 and float16"),
        ('"gradient_allreduce_op": "sum"', "adds gradients over all target tokens"),
    ],
)
def test_what_the_json_asks_for_in_vain_names_what_does_it(text: str, told: str) -> None:
    with pytest.raises(DuokaError) as refused:
        read('{"zero_optimization": {"stage": 1}, ' + text + "}")
    assert told in str(refused.value)


BATCH = '{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, '


def test_a_batch_of_another_number_of_processes_names_that_number() -> None:
    assert "global_batch: 16" in read(BATCH + ZERO1, nproc=2)
    with pytest.raises(DuokaError) as refused:
        read(BATCH + ZERO1, nproc=1)
    said = str(refused.value)
    assert "gradient_accumulation_steps 4 x 1 process of this start are 8" in said and "--nproc 2" in said
    assert said.count("config error") == 1, said
    with pytest.raises(DuokaError) as refused:
        read(BATCH.replace("16", "20") + ZERO1, nproc=2)
    assert "--nproc" not in str(refused.value) and "delete one of the three" in str(refused.value)


def test_decay_that_adam_adds_to_gradients_is_refused() -> None:
    """DeepSpeed's Adam with adam_w_mode false is torch's Adam, and its AdamW is AdamW whatever that says."""

    def optimizer(kind: str, decay: float) -> str:
        params = {"lr": 1e-4, "weight_decay": decay, "adam_w_mode": False}
        return json.dumps({"zero_optimization": {"stage": 1}, "optimizer": {"type": kind, "params": params}})

    with pytest.raises(DuokaError, match="adds that to the gradients"):
        read(optimizer("Adam", 0.1))
    assert "name: adamw" in read(optimizer("Adam", 0.0)) and "weight_decay: 0.1" in read(optimizer("AdamW", 0.1))


def scheduler(*words: str):
    """(of the file: AdamW's rate, the scheduler's settings or None; what is said)."""
    result = convert(RUN, "parallel.strategy=zero2", *words)
    assert result.exit_code == 0, result.exception
    facts = json.loads(Path("ds.json").read_text("utf-8"))
    return facts["optimizer"]["params"]["lr"], facts.get("scheduler", {}).get("params"), result.stderr


def test_rates_of_the_json_are_those_of_the_run() -> None:
    """24 samples a step, a rate found for 6: four times that. 0.07 of 100 steps are 7, by floats a bit more."""
    rate, params, _ = scheduler(
        "optim.lr_scaling=linear", "optim.lr_batch=6", "optim.schedule=constant", "optim.min_lr=0"
    )
    assert rate == pytest.approx(1.2e-3) and params["warmup_max_lr"] == pytest.approx(1.2e-3)
    assert scheduler("optim.lr_scaling=sqrt", "optim.lr_batch=6")[0] == pytest.approx(6e-4)
    assert scheduler("optim.warmup=0.07")[1]["warmup_num_steps"] == 7
    assert scheduler("optim.warmup=7")[1]["warmup_num_steps"] == 7


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["optim.schedule=linear"], "falls to 0: the file has no scheduler"),
        (["optim.warmup=2M tokens"], "counts steps: the file has no scheduler"),
        (["optim.schedule=wsd"], "wsd, which DeepSpeed does not have: the file has no scheduler"),
    ],
)
def test_a_schedule_that_deepspeed_lacks_is_not_another_one(words: list[str], told: str) -> None:
    _, params, said = scheduler(*words)
    assert params is None and told in said


def test_rates_of_parts_are_not_left_out_without_a_word() -> None:
    assert (
        "embedding_lr and head_lr: the file has one rate"
        in scheduler("optim.embedding_lr=1e-3", "optim.head_lr=1e-4")[2]
    )
    assert "b_lr_ratio: the file has one rate" in scheduler("lora={b_lr_ratio: 4}")[2]
    assert "one rate" not in scheduler()[2]


def test_files_that_deepspeed_would_end_at_are_not_written() -> None:
    """Each of these ended deepspeed.initialize of 0.19.8: gradients of stage 0 in another type than its weights, a part
    of the state with an optimizer of torch's."""
    assert convert(f"{RUN}parallel: {{strategy: ddp}}\n").exit_code == 0
    assert "data_types" not in json.loads(Path("ds.json").read_text("utf-8"))
    result = convert(f"{RUN}parallel: {{strategy: {PARTLY}}}\n")
    facts = json.loads(Path("ds.json").read_text("utf-8"))
    assert "torch_adam" not in facts["optimizer"]["params"] and facts["zero_force_ds_cpu_optimizer"]
    assert "DeepSpeed's own Adam alone" in result.stderr
    assert "zero_hpz_partition_size" in convert(f"{RUN}parallel: {{strategy: zero3, reshard: node}}\n").stderr


@pytest.mark.parametrize("size", ["auto", "2048 tokens"])
def test_a_micro_batch_that_is_no_number_of_samples_is_said(size: str) -> None:
    said = convert(RUN, "parallel.strategy=zero2", f"train.micro_batch={size}").stderr
    assert f"train.micro_batch is {size}, which is 1" in said


def test_its_autotuners_tracker_is_not_imported_with_it(tmp_path: Path) -> None:
    """A second and a half of each rank's start where MLflow is installed; a run that logs there still finds it."""
    need_deepspeed()
    (tmp_path / "mlflow.py").write_text("", encoding="utf-8")
    code = (
        "import sys, torch\n"
        "from duoka.parallel.deepspeed_package import load_deepspeed\n"
        "load_deepspeed(torch.device('cpu'))\n"
        "assert 'mlflow' not in sys.modules\n"
        "import mlflow"
    )
    done = run_python("-c", code, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
