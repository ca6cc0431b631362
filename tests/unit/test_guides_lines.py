"""Launch lines of guides: what they mean here, what is mended in them, and what their environment may not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from duoka.cli import run
from duoka.cli.lines import Meaning, meaning_of_accelerate, meaning_of_torchrun, settings_of_words
from duoka.cli.typed import mend
from duoka.cluster.meeting import Rules
from duoka.cluster.nodes import Flags, NodeStart, read_node_start
from duoka.config.load import Start, load_config
from duoka.config.schema import RunConfig
from duoka.errors import ConfigError, Faults


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("ddp.py").write_text("")
    Path("x.yaml").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("--nproc_per_node=2 --master_port=29500 src/train.py --config x.yaml",
         "train x.yaml --nproc 2 --port 29500"),
        ("--standalone --nproc-per-node 2 -m duoka train x.yaml optim.lr=1e-4", "train x.yaml optim.lr=1e-4 --nproc 2"),
        ("--nproc_per_node=2 ddp.py --epochs 3", "launch --nproc 2 ddp.py --epochs 3"),
        ("--standalone --nproc_per_node=8 -m scripts.base_train --depth=12",
         "pretrain --nproc 8 --depth=12"),
        ("--nproc_per_node=2 train.py --gradient_checkpointing --config x.yaml --bf16 true",
         "train x.yaml gradient_checkpointing=true bf16=true --nproc 2"),
        ("--nproc_per_node=2 train.py --gradient_checkpointing x.yaml",
         "train x.yaml gradient_checkpointing=true --nproc 2"),
        ("--nproc_per_node=gpu --max_restarts=3 train.py x.yaml --learning-rate 1e-4",
         "train x.yaml learning_rate=1e-4 --restarts 3"),
        ("--nproc_per_node=2 -m duoka train x.yaml --dry-run", "train x.yaml --nproc 2 --dry-run"),
        ("--nproc_per_node=2 train.py --dry_run --config x.yaml", "train x.yaml --nproc 2 --dry-run"),
    ],
)  # fmt: skip
def test_a_torchrun_line_means(line: str, wanted: str) -> None:
    assert meaning_of_torchrun(line.split()) == Meaning(tuple(wanted.split()))


def test_a_torchrun_line_of_two_nodes_becomes_the_environment_form() -> None:
    line = "--nnodes=2 --nproc_per_node=4 --rdzv_id=456 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:1234 --node_rank=1"
    meaning = meaning_of_torchrun([*line.split(), "train.py", "--config", "x.yaml"])
    assert meaning.words == ("train", "x.yaml", "--nproc", "4")
    wanted = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert meaning.env == wanted and len(meaning.notes) == 2


@pytest.mark.parametrize(("nodes", "more"), [("1:4", ["--restarts", "3"]), ("2", [])])
def test_nodes_without_fixed_places_meet(nodes: str, more: list[str]) -> None:
    restarts = " --max_restarts=3" if more else ""
    line = (
        f"--nnodes={nodes} --nproc_per_node=2{restarts} --rdzv_id=4 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:1234"
    )
    meaning = meaning_of_torchrun([*line.split(), "src/train.py", "--config", "x.yaml"])
    meeting = ["--nproc", "2", "--nodes", nodes, "--meet", "10.0.0.1:1234"]
    assert meaning.words == ("train", "x.yaml", *meeting, *more) and not meaning.env
    assert "a rendezvous of their own, at 10.0.0.1:1234" in meaning.notes[0]


def test_a_script_of_ones_own_is_launched_on_several_nodes(folder: Path) -> None:
    (folder / "ddp.py").write_text("", encoding="utf-8")
    fixed = "--nnodes=2 --node_rank=1 --nproc_per_node=2 --master_addr=10.0.0.1 --master_port=1234 ddp.py --lr 1"
    meaning = meaning_of_torchrun(fixed.split())
    assert meaning.words == ("launch", "--nproc", "2", "ddp.py", "--lr", "1")
    assert meaning.env == {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    meets = "--nnodes=2 --nproc_per_node=4 --rdzv_id=456 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:1234 ddp.py"
    meaning = meaning_of_torchrun(meets.split())
    meeting = ("--nodes", "2", "--meet", "10.0.0.1:1234", "--output", "runs/ddp-456")
    assert meaning.words == ("launch", "--nproc", "4", *meeting, "ddp.py") and not meaning.env
    assert "a disk that all machines see" in meaning.notes[-1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nproc_per_nod=2 ddp.py", "did you mean --nproc_per_node"),
        ("--nproc_per_node=2", "names no program"),
        ("--nproc_per_node=2 no.py", "there is no script no.py"),
    ],
)
def test_a_torchrun_line_that_cannot_be_followed_says_why(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        meaning_of_torchrun(line.split())


def test_an_accelerate_line_and_its_config_file_mean() -> None:
    meaning = meaning_of_accelerate(
        ["launch", "--num_processes=2", "--main_port=29500", "src/train.py", "--config", "x.yaml"]
    )
    assert meaning.words == ("train", "x.yaml", "--nproc", "2", "--port", "29500")
    assert "--main_process_port" in meaning.notes[0]
    content = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 4,
               "fsdp_config": {"fsdp_offload_params": True}}  # fmt: skip
    Path("a.yaml").write_text(yaml.safe_dump(content))
    meaning = meaning_of_accelerate(["launch", "--config_file", "a.yaml", "--num-processes", "2", "train.py", "x.yaml"])
    settings = "train.precision=bf16 parallel.strategy=fsdp parallel.offload=params"
    assert meaning.words[:4] == ("train", "x.yaml", "--nproc", "2")
    assert set(meaning.words[4:]) == set(settings.split())
    Path("x.yaml").write_text(
        "model: demo\ndata: {train: [identity]}\ntrain: {precision: fp32}\nparallel:\n  strategy: zero3\n"
    )
    with pytest.raises(Faults) as caught:
        meaning_of_accelerate(["launch", "--config_file", "a.yaml", "train.py", "x.yaml"])
    said = str(caught.value)
    assert "train.precision is fp32 (x.yaml:3) and bf16 for accelerate launch" in said and "strategy" not in said
    Path("x.yaml").unlink()
    script = meaning_of_accelerate(
        ["launch", "--mixed_precision", "bf16", "--num_processes", "2", "ddp.py", "--x", "1"]
    )
    assert script.words == ("launch", "--nproc", "2", "ddp.py", "--x", "1")
    assert script.env == {"ACCELERATE_MIXED_PRECISION": "bf16"}
    deep = meaning_of_accelerate(
        ["launch", "--use_deepspeed", "--zero_stage", "2", "--num_processes", "2", "train.py", "x.yaml"]
    )
    assert deep.words == ("train", "x.yaml", "--nproc", "2", "parallel.strategy=zero2")


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("train x.yaml –nproc 2", "train x.yaml --nproc 2"),
        ("train x.yaml —nproc=2", "train x.yaml --nproc=2"),
        ("train x.yaml optim.lr＝1e-4", "train x.yaml optim.lr=1e-4"),
        ("train “x.yaml” output=“a”", "train x.yaml output=a"),
        ("export r –o out", "export r -o out"),
        ("chat r --prompt “你好，世界＝1”", "chat r --prompt “你好，世界＝1”"),
        ("launch s.py –x", "launch s.py –x"),
        ("train x.yaml a=-1", "train x.yaml a=-1"),
    ],
)
def test_what_is_pasted_is_read_as_it_was_meant_and_said(typed: str, read: str) -> None:
    words, notes = mend(typed.split())
    assert words == read.split() and bool(notes) == (typed != read)


TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "192.168.1.100", "MASTER_PORT": "29500"}


def read(env: dict[str, str], **flags: Any) -> NodeStart:
    return read_node_start(Flags(**flags), env)


def test_the_environment_of_guides_is_read() -> None:
    assert read({}, nproc=3, port=1, restarts=2) == NodeStart(num_processes=3, master_port=1, restarts=2)
    assert read({"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}).num_processes == 2
    start = read({**TWO, "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "4", "MIN_NNODES": "2", "MAX_NNODES": "2"})
    assert start == NodeStart(2, 1, 4, "192.168.1.100", 29500)
    assert read({"MAX_RESTARTS": "3"}).restarts == 3
    assert "RDZV_ID is not used" in read({**TWO, "RDZV_ID": "7"}).notes[0]


def test_nodes_that_may_leave_come_from_the_environment_or_from_flags() -> None:
    ranged = {**TWO, "NODE_RANK": "", "MIN_NNODES": "1", "MAX_NNODES": "4", "MAX_RESTARTS": "3", "RDZV_ID": "7"}
    assert read(ranged).elastic == Rules(1, 4, "192.168.1.100", 29500, restarts=3)
    assert read({**TWO, "MAX_RESTARTS": "2"}).elastic == Rules(2, 2, "192.168.1.100", 29500, restarts=2)
    typed = read({}, nodes="1:2", meet="10.0.0.1:29400", wait="10min", restarts=5)
    assert typed.elastic == Rules(1, 2, "10.0.0.1", 29400, 600.0, 5)
    assert read({}, nodes="2", meet="[fd00::1]:29400").elastic == Rules(2, 2, "fd00::1", 29400)


@pytest.mark.parametrize(
    ("flags", "what", "fix"),
    [
        ({"nodes": "1:2"}, "--meet is not given", "--meet 192.168.1.100:29500"),
        ({"nodes": "2:1", "meet": "a:1"}, '--nodes is "2:1"', "--nodes 1:2"),
        ({"nodes": "1:2", "meet": "here"}, '--meet is "here"', "--meet 192.168.1.100:29500"),
        ({"nodes": "1:2", "meet": "127.0.0.1:29400"}, "means that node itself", "hostname -I"),
        ({"nodes": "1:2", "meet": "a:1", "wait": "5 epochs"}, "--wait", "--wait 10min"),
        ({"meet": "a:29400"}, "--nodes is not given", "--nodes 1:2"),
    ],
)
def test_half_a_meeting_is_refused(flags: dict[str, str], what: str, fix: str) -> None:
    for env in ({}, {"NNODES": "2"}):
        with pytest.raises(Faults) as caught:
            read(env, **flags)
        assert what in str(caught.value) and fix in str(caught.value), caught.value
        assert ("keep one of the two forms" in str(caught.value)) == bool(env)


@pytest.mark.parametrize(
    ("change", "what", "fix"),
    [
        ({"NODE_RANK": ""}, "NODE_RANK is not given", "NODE_RANK=0 on the first node"),
        ({"NODE_RANK": "2"}, "NODE_RANK is 2, and NNODES is 2", "from 0 to 1"),
        ({"NODE_RANK": "one"}, 'NODE_RANK is "one"', "NODE_RANK=2"),
        ({"NNODES": ""}, "NODE_RANK is 1, and NNODES is not given", "NNODES=2"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not given", "first node's address"),
        ({"MASTER_ADDR": "127.0.0.1"}, "means that node itself", "hostname -I"),
        ({"MASTER_ADDR": "localhost"}, "means that node itself", "hostname -I"),
        ({"MASTER_PORT": ""}, "all nodes need the same one", "MASTER_PORT=29500"),
        ({"MASTER_PORT": "70000"}, "ports are 1 to 65535", "29500"),
        ({"MIN_NNODES": "3", "MAX_NNODES": "2"}, "MIN_NNODES is 3 and MAX_NNODES is 2", "MIN_NNODES=1"),
        ({"MIN_NNODES": "1", "MASTER_PORT": ""}, "all nodes need the same one", "MIN_NNODES=1 MAX_NNODES=2"),
    ],
)
def test_wrong_combinations_are_refused_with_the_fix(change: dict[str, str], what: str, fix: str) -> None:
    with pytest.raises(Faults) as caught:
        read({**TWO, **change})
    assert caught.value.exit_code == 2 and what in str(caught.value) and fix in str(caught.value), caught.value


def test_all_faults_of_the_environment_come_together_and_flags_may_not_contradict() -> None:
    with pytest.raises(Faults) as caught:
        read({"NNODES": "2", "NPROC_PER_NODE": "2"}, nproc=3)
    assert len(caught.value.faults) == 4, caught.value


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("torchrun --nproc_per_node=2 -m duoka train no.yaml", "duoka train no.yaml --nproc 2"),
        ("accelerate launch --num-processes 2 train.py --config no.yaml", "duoka train no.yaml --nproc 2"),
        ("llamafactory-cli train no.yaml learning_rate=1e-4", "duoka train no.yaml learning_rate=1e-4"),
        ("train no.yaml --dry_run", ""),
        ("llamafactory-cli export no.yaml", "duoka export no.yaml"),
    ],
)
def test_a_line_is_said_and_done(line: str, meaning: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    said = capsys.readouterr().err
    assert "there is no file no.yaml" in said and (not meaning or f"means:   {meaning}\n" in said), said


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ("llamafactory-cli webchat x.yaml", "webchat is another command here", "duoka chat FILE"),
        ("llamafactory-cli api x.yaml", "api is another command here", "duoka serve RUN"),
        ("torchrun --standalone -m scripts.chat_web", "scripts.chat_web is a command of its own here", "duoka serve"),
        ("torchrun --nproc_per_node=8 -m scripts.tok_train", "scripts.tok_train", "duoka data tokenizer"),
        ("llamafactory-cli trian x.yaml", "no command 'trian' here", "did you mean train"),
        ("accelerate config", "duoka needs no accelerate config", "duoka accelerate launch --config_file"),
        ("accelerate estimate-memory gpt2", "what gpt2 needs depends on how it is trained", "duoka plan x.yaml"),
        ("accelerate merge-weights a b", "there is nothing to merge", "duoka export RUN"),
        ("accelerate launch --num_processes=2 --main_port=29501", "names no program", "train.py --config x.yaml"),
        (
            "deepspeed --num_gpus=2 src/train.py --config x.yaml",
            "no command 'deepspeed'",
            "duoka train x.yaml --nproc N",
        ),
        (
            "torchrun --nproc_per_node=8 -m scripts.chat_eval --source=mid",
            "a command of its own",
            "duoka eval runs/NAME --tasks",
        ),
        ("chat examples/inference/llama3_lora_sft.yaml", "no file examples/inference", "name a run"),
    ],
)
def test_a_line_that_means_nothing_here_says_what_to_type(
    line: str, what: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    said = capsys.readouterr().err
    assert what in said and fix in said, said


def test_others_env_is_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["accelerate", "env"], ["llamafactory-cli", "env"]):
        assert run(words) == 0
        assert "means:   duoka env\n" in capsys.readouterr().err
    assert meaning_of_accelerate(["test"]).words == ("doctor",)


def test_what_is_mended_is_said_before_anything_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "no.yaml", "–nproc", "2"]) == 2
    assert capsys.readouterr().err.startswith("note: –nproc is read as --nproc")


def test_base_train_without_depth_has_the_depth_that_it_has_there() -> None:
    meaning = meaning_of_torchrun(["--nproc_per_node=8", "-m", "scripts.base_train", "--", "--run=x"])
    assert meaning.words == ("pretrain", "--nproc", "8", "--depth=20", "--run=x")
    assert any("20 layers" in note for note in meaning.notes)


def test_what_accelerate_config_wrote_on_this_machine_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = folder / "hf" / "accelerate"
    home.mkdir(parents=True)
    home.joinpath("default_config.yaml").write_text("num_processes: 3\nmixed_precision: bf16\n", "utf-8")
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    meaning = meaning_of_accelerate(["launch", "train.py", "--config", "x.yaml"])
    assert meaning.words == ("train", "x.yaml", "--nproc", "3", "train.precision=bf16")
    assert any("default_config.yaml is read" in note for note in meaning.notes)
    fewer = meaning_of_accelerate(["launch", "--num_processes=2", "train.py", "--config", "x.yaml"])
    assert fewer.words[:4] == ("train", "x.yaml", "--nproc", "2")
    Path("a.yaml").write_text("num_processes: 4\n", "utf-8")
    named = meaning_of_accelerate(["launch", "--config_file=a.yaml", "train.py", "--config", "x.yaml"])
    assert named.words == ("train", "x.yaml", "--nproc", "4")


def test_a_flag_comes_before_a_variable_and_a_variable_before_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.yaml").write_text("num_processes: 2\nmixed_precision: bf16\ndistributed_type: FSDP\n", "utf-8")
    line = ["launch", "--config_file=a.yaml", "train.py", "x.yaml"]
    assert "train.precision=bf16" in meaning_of_accelerate(line).words
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    meaning = meaning_of_accelerate(line)
    assert "parallel.strategy=zero1" in meaning.words
    assert any(
        "ACCELERATE_DEEPSPEED_ZERO_STAGE of the environment: before the config" in note for note in meaning.notes
    )
    flagged = meaning_of_accelerate([*line[:2], "--zero_stage=3", *line[2:]])
    assert "parallel.strategy=zero3" in flagged.words
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert not any(word.startswith("train.precision") for word in meaning_of_accelerate(line).words)


@pytest.mark.parametrize("word", ["--local-rank=1", "--local_rank=1"])
def test_the_local_rank_of_the_older_launcher_is_passed_over(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run([word, "completion", "bash"]) == 0
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert run([word, "completion", "bash"]) == 2  # another one is a mistake


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("-m torch.distributed.launch --nproc_per_node=2 train.py", "duoka torchrun --nproc_per_node=2 train.py"),
        ("-m scripts.base_train --depth=12", "duoka pretrain --depth=12"),
        ("-m scripts.mid_train", "duoka mid"),
        ("-m scripts.chat_sft --source=mid", "duoka sft --source=mid"),
        ("-m scripts.chat_rl --num_samples=16", "duoka rl --num_samples=16"),
        ("-m duoka train x.yaml", "duoka train x.yaml"),
    ],
)
def test_python_before_a_module_names_the_command(line: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["python", *line.split()]) == 2
    assert wanted in capsys.readouterr().err


def test_ddp_with_a_deepspeed_file_shares_the_work_as_that_file_says(folder: Path) -> None:
    text = 'trainer: {type: "ddp"}\nmodel: {model_name_or_path: m}\ndata: {dataset: identity}\n'
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}', "utf-8")
    Path("nested.yaml").write_text(f"{text}deepspeed: ds.json\nddp:\n  timeout: 180000000\n", "utf-8")
    loaded = load_config("nested.yaml", start=Start(2, True))
    assert loaded.config.parallel.strategy == "zero2"
    assert any("said by the DeepSpeed file" in note for note in loaded.notes)
    Path("nested.yaml").write_text(text, "utf-8")
    assert load_config("nested.yaml", start=Start(2, True)).config.parallel.strategy == "ddp"


def test_a_switch_of_a_file_may_stand_as_a_flag_behind_llamafactory_cli() -> None:
    words = ["x.yaml", "--gradient_checkpointing", "--learning_rate", "1e-4", "--json"]
    wanted = ["x.yaml", "gradient_checkpointing=true", "learning_rate=1e-4", "--json"]
    assert settings_of_words(words, only=("gradient_checkpointing", "learning_rate")) == wanted


def test_every_kind_of_trainer_that_guides_name_has_its_meaning(folder: Path) -> None:
    def read(kind: str) -> RunConfig:
        text = f"trainer: {{type: {kind}}}\nmodel: {{model_name_or_path: m}}\ndata: {{dataset: identity}}\n"
        Path("nested.yaml").write_text(text, "utf-8")
        return load_config("nested.yaml", start=Start(2, True)).config

    for kind in ("ddp", "zero1", "zero2", "zero3", "fsdp"):
        assert read(kind).parallel.strategy == kind
    assert read("dp").parallel.strategy == "auto"
    assert (read("tp2").parallel.tensor, read("pp4").parallel.pipeline) == (2, 4)
    for kind, advice in (("tp", "type: tp2"), ("pp", "type: pp2"), ("dpp", "known: ddp, single")):
        with pytest.raises(Faults) as refused:
            read(kind)
        assert advice in str(refused.value)
