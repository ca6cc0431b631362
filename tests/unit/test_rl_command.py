"""A guide's line for the last stage is `duoka rl`: its flags are keys, the run before is found, rates are its own."""

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
    assert run(["rl", "--dry-run"]) == 2
    assert "--data task:gsm8k:FOLDER" in capsys.readouterr().err
    assert run(["rl", "--source=base", "--data=task:sort"]) == 2
    assert "begins from sft or mid" in capsys.readouterr().err
