"""Guides' lines for the last stages are `duoka sft` and `duoka rl`: flags are keys, the run before is found."""

from pathlib import Path

import pytest

from duoka.cli import run
from duoka.cli.lines import meaning_of_torchrun

OPTIM = "optim: {name: muon, lr: 0.02, adamw_lr: 0.002, embedding_lr: 0.1, head_lr: 0.006}\n"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_run(name, stage):
    folder = Path("runs") / name
    (folder / "final").mkdir(parents=True)
    (folder / "final" / "config.json").write_text("{}", encoding="utf-8")
    text = f"model: demo\nstage: {{name: {stage}}}\ndata: {{train: [identity]}}\n{OPTIM}"
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def test_a_guides_line_is_duoka_rl(capsys):
    line = ["--standalone", "--nproc_per_node=8", "-m", "scripts.chat_rl", "--source=sft", "--num_samples=16"]
    words = ("rl", "--nproc", "8", "--source=sft", "--num_samples=16")
    assert meaning_of_torchrun(line).words == words
    assert run(["rl", "--source=sft", "--data=task:sort"]) == 2
    assert "write:   --from runs/NAME" in capsys.readouterr().err


def test_its_flags_are_keys_and_the_rates_are_those_of_the_run_before(capsys):
    write_run("chat", "sft")
    write_run("base", "pretrain")
    words = ["rl", "--source=sft", "--device_batch_size=8", "--num_samples=12", "--top-k=50", "--max-new-tokens=32"]
    assert run([*words, "--data=task:arithmetic", "--run=answers", "--dry-run"]) == 2, "its model is no model"
    said = capsys.readouterr().err.replace("'", "")
    for word in (
        "stage=rl", "train.global_batch=16", "rl.samples=12", "train.micro_batch=8", "rl.top_k=50", "train.epochs=1",
        "rl.max_new_tokens=32", "output=runs/answers", "optim.name=muon", "optim.lr=0.001 ", "runs/chat/final",
        "optim.embedding_lr=0.005 ", "optim.schedule=linear",
    ):  # fmt: skip
        assert word in said, (word, said)
    # 2 prompts of 4 answers are 8 at once; prompts were counted where answers are.
    words = ["rl", "--source=sft", "--device_batch_size=8", "--num_samples=4", "--examples_per_step=2"]
    assert run([*words, "--data=task:arithmetic", "--dry-run"]) == 2, "its model is no model"
    assert "train.global_batch" not in capsys.readouterr().err.split("means:")[1].split("\n", 1)[1]
    assert run(["rl", "--dry-run"]) == 2
    assert "--data task:gsm8k:FOLDER" in capsys.readouterr().err
    assert run(["rl", "--source=base", "--data=task:sort"]) == 2
    assert "begins from sft or mid" in capsys.readouterr().err


def test_a_guides_line_is_duoka_sft(capsys):
    line = ["--standalone", "--nproc_per_node=8", "-m", "scripts.chat_sft", "--source=mid", "--device_batch_size=8"]
    assert meaning_of_torchrun(line).words == ("sft", "--nproc", "8", "--source=mid", "--device_batch_size=8")
    write_run("between", "mid")
    write_run("base", "pretrain")
    chats = Path("chats.jsonl")
    chats.write_text("", encoding="utf-8")
    words = ["sft", "--source=mid", "--device_batch_size=8", "--data=chats.jsonl", "--run=talk", "--num-epochs=2"]
    assert run([*words, "--dry-run"]) == 2, "its model is no model"
    said = capsys.readouterr().err.replace("'", "")
    for word in (
        "stage=sft", "train.global_batch=32", "train.micro_batch=8", "train.epochs=2", "output=runs/talk",
        "optim.name=muon", "optim.lr=0.0004 ", "runs/between/final", "optim.schedule=linear", str(chats.absolute()),
    ):  # fmt: skip
        assert word in said, (word, said)
    assert run(["sft", "--source=base", "--data=chats.jsonl", "train.global_batch=4", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "runs/base/final" in said and "train.global_batch=32" not in said
    assert run(["sft", "--dry-run"]) == 2
    assert "--data chat.jsonl" in capsys.readouterr().err
