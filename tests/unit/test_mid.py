"""Stage mid: a preset of keys, a mixture by shares and epochs, the optimizer of the run before, a guide's command."""

from pathlib import Path

import pytest

from duoka.cli import run
from duoka.cli.lines import meaning_of_torchrun
from duoka.config.load import load_config, resolved_yaml
from duoka.data.mixture import Asked, count_mixture
from duoka.errors import Faults

HEAD = "model: demo\nstage: mid\ndata: {train: [identity]}\n"
BASE = """optim: {name: muon, lr: 0.02, embedding_lr: 0.2, adamw_lr: 0.01, head_lr: 0.004, betas: [0.8, 0.95],
  schedule: wsd, warmup: 0.1}
train: {global_batch: 64k tokens}
data: {train: [identity], max_length: 512}
model: demo
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(text, *overrides):
    Path("mid.yaml").write_text(text, encoding="utf-8")
    return load_config("mid.yaml", overrides)


def write_base():
    Path("base.yaml").write_text(BASE, encoding="utf-8")
    folder = Path("runs/base")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(resolved_yaml(load_config("base.yaml")), encoding="utf-8")


def test_mid_learns_every_token_once_and_gives_way_to_what_is_written():
    config = load(HEAD).config
    assert (config.data.targets, config.data.on_long) == ("all", "split")
    assert (config.train.epochs, config.optim.schedule, config.optim.warmup) == (1.0, "wsd", 0.0)
    config = load(HEAD, "data.targets=assistant", "train.epochs=2").config
    assert (config.data.targets, config.train.epochs) == ("assistant", 2.0)


def test_a_resolved_mid_config_reads_back_the_same():
    write_base()
    loaded = load(HEAD, "optim.state=runs/base", "optim.lr=0.005")
    Path("resolved.yaml").write_text(resolved_yaml(loaded), encoding="utf-8")
    assert load_config("resolved.yaml").config == loaded.config


def test_the_optimizer_goes_on_at_the_rates_of_the_run_before():
    write_base()
    loaded = load(HEAD, "optim.state=runs/base", "optim.embedding_lr=0.05")
    optim = loaded.config.optim
    assert (optim.name, optim.lr, optim.embedding_lr, optim.head_lr) == ("muon", 0.02, 0.05, 0.004)
    assert (optim.betas, optim.warmup) == ((0.8, 0.95), 0.0), "the schedule is mid's own"
    assert (loaded.config.train.global_batch, loaded.config.data.max_length) == ("64k tokens", 512)
    assert loaded.origins["optim.lr"] == "from optim.state"
    assert load(HEAD, "optim.state=runs/base", "optim.name=adamw").config.optim.lr == 2e-5, "not another one's rates"
    assert load(HEAD.replace("mid", "sft"), "optim.state=runs/base").config.optim.name == "adamw"


@pytest.mark.parametrize(
    ("sizes", "asked", "counts"),
    [
        ([10, 30], [Asked(), Asked()], [10, 30]),
        ([10, 30], [Asked(epochs=4), Asked()], [40, 30]),
        ([10, 30], [Asked(epochs=0.5), Asked()], [5, 30]),
        ([1000, 60, 20], [Asked(share=0.2), Asked(), Asked()], [20, 60, 20]),
        ([5, 30, 10], [Asked(share=0.2), Asked(share=0.3), Asked(epochs=5)], [20, 30, 50]),
        ([0, 10], [Asked(share=0.5), Asked()], [0, 10]),
    ],
)
def test_shares_and_epochs_become_counts(sizes, asked, counts):
    assert count_mixture(sizes, asked) == counts


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("[{name: a, weight: 0.5}, {name: b, epochs: 2}]", "by weight and by share or epochs"),
        ("[{name: a, share: 0.5, epochs: 2}, b]", "both a share and epochs"),
        ("[{name: a, share: 0.5}, {name: b, share: 0.5}, c]", "add up to 1 or more"),
        ("[{name: a, share: 0.5}]", "measured by the sets without one"),
    ],
)
def test_a_mixture_that_means_two_things_is_refused(train, words):
    with pytest.raises(Faults, match=words):
        load(HEAD.replace("[identity]", train))


def test_a_guides_line_is_duoka_mid(capsys):
    line = ["--standalone", "--nproc_per_node=8", "-m", "scripts.mid_train", "--", "--device-batch-size=16"]
    assert meaning_of_torchrun(line).words == ("mid", "--nproc", "8", "--device-batch-size=16")
    assert run(["mid", "--data=identity"]) == 2
    assert "write:   --from runs/NAME" in capsys.readouterr().err


def test_its_flags_are_keys_and_the_run_before_is_found(capsys):
    write_base()
    config = Path("runs/base/config.yaml")
    config.write_text(config.read_text(encoding="utf-8").replace("name: sft", "name: pretrain"), encoding="utf-8")
    Path("runs/base/final").mkdir()
    Path("runs/base/final/config.json").write_text("{}", encoding="utf-8")
    words = ["mid", "--data=identity", "--total_batch_size=8192", "--run=m", "--init-lr-frac=0.5", "--dtype=bfloat16"]
    assert run([*words, "--dry-run"]) == 2, "its model is no model"
    said = capsys.readouterr().err
    for word in ("stage=mid", "train.global_batch=8192 tokens", "output=runs/m", "optim.lr=0.01 ", "runs/base/final"):
        assert word in said.replace("'", ""), (word, said)
    assert run(["mid", "--dry-run"]) == 2
    assert "--data task:spelling" in capsys.readouterr().err
