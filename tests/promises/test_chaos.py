"""`duoka chaos`: the table that users see, and that a trial can be lost."""

import pytest
from tiny import write_conversations

from duoka import cli
from duoka.cluster import chaos
from duoka.cluster.fault_injection import strike
from duoka.config.load import load_config

YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
lora: {{rank: 4, dropout: 0.1}}
train: {{epochs: 3, global_batch: 8, precision: fp32}}
output: {output}
"""


@pytest.fixture
def yaml(tmp_path, tiny_model):
    data = write_conversations(tmp_path / "chats.jsonl", 40, seed=2)
    path = tmp_path / "run.yaml"
    path.write_text(YAML.format(model=tiny_model, data=data, output=tmp_path / "runs" / "mine"), encoding="utf-8")
    return path


def lose(stage):
    """A trial whose run is killed and not started again."""
    stage.start()
    strike(stage.wait_for_step(3), "SIGKILL")
    stage.expect(0)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_table_says_what_survived_and_what_was_lost(yaml, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(chaos, "TRIALS", (*chaos.TRIALS, chaos.Trial("lost", "killed, and left so", lose)))
    assert cli.run(["chaos", str(yaml), "--nproc", "1", "--only", "flip,full,lost"]) == 3
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[1]: line.split()[0] for line in lines if line.startswith("  ") and len(line.split()) > 3}
    assert [rows.get(name) for name in ("flip", "full", "lost")] == ["survived", "survived", "LOST"], lines
    assert any("exit 75, exit 0" in line for line in lines) and any("exit 6, exit 0" in line for line in lines)
    assert "2 of 3 survived in the same weights, bit for bit" in lines
    scratch = tmp_path / "runs" / "mine-chaos"
    left = sorted(path.name for path in scratch.iterdir())
    assert "lost" in left and "flip" not in left, "what was lost stays to be looked at"
    assert not (tmp_path / "runs" / "mine").exists(), "the run itself was not touched"
    assert cli.run(["chaos", str(yaml), "--nproc", "1"]) == 2, "nor is what an earlier chaos left"


def test_a_lost_trial_gives_code_3_and_stays_to_be_looked_at(yaml, tmp_path, capsys, monkeypatch):
    def run_trial(trial, stage, reference, *, same_bits):
        stage.run.path.mkdir()
        short = load_config(str(stage.config), stage.overrides).config
        assert (short.train.max_steps, short.optim.warmup) == (chaos.NUM_STEPS, 0.5)
        return chaos.Outcome(trial, 1.0, "exit 5", "it ended in other weights" if trial.name == "flip" else "")

    monkeypatch.setattr(chaos, "run_reference", lambda stage: "digest")
    monkeypatch.setattr(chaos, "patience_for", lambda run: 5.0)
    monkeypatch.setattr(chaos, "run_trial", run_trial)
    # A warm-up that is longer than a trial.
    assert cli.run(["chaos", str(yaml), "optim.warmup=100", "--only", "cut,flip"]) == 3
    out = capsys.readouterr().out
    assert "survived  cut" in out and "LOST      flip" in out and "it ended in other weights" in out
    assert "1 of 2 survived" in out
    assert [path.name for path in (tmp_path / "runs" / "mine-chaos").iterdir()] == ["flip"]
    assert cli.run(["chaos", str(yaml), "--only", "cut"]) == 2, "nor is what an earlier one left overwritten"
    assert "mine-chaos is there already" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_every_trial_survives(yaml, capsys):
    assert cli.run(["chaos", str(yaml), "--nproc", "2"]) == 0, capsys.readouterr().out


def test_trials_are_listed_and_misspelled_ones_refused(yaml, capsys):
    assert cli.run(["chaos", str(yaml), "--list"]) == 0
    assert "kill-launcher" in capsys.readouterr().out
    assert cli.run(["chaos", str(yaml), "--only", "kil-rank"]) == 2
    assert "did you mean kill-rank" in capsys.readouterr().err
